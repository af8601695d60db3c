"""Bytes that a step of any implementation must move: what its rule loads and stores."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

import fusedstep

from .contender import LR, known
from .shapes import with_gradients
from .works import DTYPES, Work

# steps that bytes are averaged over where gradients come and go
_STEPS = 64


def program_of(work: Work, of_param: torch.dtype | None = None) -> Any:
    """The program that steps a parameter of the work."""
    name = "AdamW" if work.optimizer == "functional.adamw_" else work.optimizer
    # large enough for 8 bits
    p = torch.nn.Parameter(torch.ones(64, 64, dtype=of_param or DTYPES[work.dtype][0]))
    p.grad = torch.ones_like(p)
    cls = getattr(fusedstep, name)
    options = {"lr": LR, "state_dtype": work.states, **known(cls, work.options), "engine": "torch"}
    # how rows are cut, which its own may not be
    options = {name: value for name, value in options.items() if name not in ("num_heads", "split_sizes")}
    optimizer = cls([p], **options)
    if "grad_scale" in work.options:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(work.options["grad_scale"]), torch.tensor(0.0)
    optimizer.step()
    (bucket,) = optimizer._plan.tables[0].buckets
    return bucket.program


def bytes_per_parameter(work: Work, of_param: torch.dtype | None = None) -> float:
    """Bytes that an update must move: what all sweeps of its program load and store, but for workspace."""
    program = program_of(work, of_param)
    sizes = [plane.dtype.itemsize / plane.block for plane in program.planes]
    for staged in program.stages:
        sizes[staged.source] = sizes[staged.target] = 0.0
    moved = [(*sweep.loads, *(place for place, _ in sweep.stores)) for sweep in program.sweeps]
    return sum(sizes[place] for places in moved for place in places)


def _beside(work: Work, is_left_to_adamw: bool) -> Work:
    """Muon's work, or AdamW's that Muon does for vectors."""
    return work._replace(options={**work.options, "use_muon": False}) if is_left_to_adamw else work


def bytes_moved(work: Work, params: list[Any]) -> float:
    """Bytes that a step of these parameters moves; the mean, if gradients come and go."""
    kinds = [(p.dtype, work.optimizer == "Muon" and p.dim() < 2) for p in params]
    # a complex number is two
    sizes = {
        kind: (1 + kind[0].is_complex) * bytes_per_parameter(_beside(work, kind[1]), kind[0])
        for kind in {*kinds}
    }
    each = [sizes[kind] * p.numel() for kind, p in zip(kinds, params, strict=True)]
    chosen = with_gradients(work.model)
    if chosen is None:
        return sum(each)
    return (
        sum(sum(b for b, has in zip(each, step, strict=True) if has) for step in islice(chosen, _STEPS))
        / _STEPS
    )
