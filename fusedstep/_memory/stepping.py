"""One step of tables: which sweeps they take, in which order, and what they exchange between sweeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from .._algorithm.program import Rule, StepSpec
from .._engines import Amp, is_traced, to_device
from . import shards
from .layout import overlaps_itself
from .ranks import any_found_inf, reduce_to_column
from .settings import Settings
from .table import Table


def step(
    tables: list[Table],
    amp: Amp,
    settings: Settings,
    look: Callable[[Sequence[Tensor]], None] | None = None,
) -> list[Tensor]:
    """Step these tables. If there are none, return numbers: if one is not 0, other ranks skip the step.

    Before anything is written, `look` gets what tables and ranks have exchanged about their gradients.
    """
    ranks_of_norm = [] if settings.norm_ranks is None else [settings.norm_ranks]
    if amp.found_inf is not None:
        told = dict.fromkeys(ranks for table in tables for ranks in table.owner_groups)
        amp = amp._replace(found_inf=any_found_inf(shards.local(amp.found_inf), [*told, *ranks_of_norm]))
    _check_grads(tables, settings.spec)
    for table in tables:
        table.begin()
    for table in tables if settings.offload else ():
        table.bring_params()
    # once for all tables of a device: a copy to the host waits
    is_told = amp.scale is not None or amp.found_inf is not None
    amps = {device: amp.to(device) for device in {table.device for table in tables}} if is_told else {}
    measured: list[Tensor] = []
    if settings.spec.measures_first:
        for table in tables:
            table.sweep(0, skips=False)
        if ranks_of_norm or len(tables) > 1:
            measured = [table.measured for table in tables]
        for ranks in ranks_of_norm:
            # even if nothing was measured here: the other ranks wait for this one
            measured = [reduce_to_column(measured, settings.spec.shared_kinds, ranks)]
        if look is not None:
            look(measured)
        for shared in _shared_by(tables) if measured else ():
            kept = shared[: len(settings.spec.shared_kinds)]
            torch.cat([to_device(t, shared.device) for t in measured], 1, out=kept)
        _tell_each_other(tables, 0)
    sweeps = range(int(settings.spec.measures_first), max([t.sweep_count for t in tables], default=0))
    if tables and any(tables[0].summed_over_all):
        try:
            for k in sweeps:
                for table in tables:
                    table.update(k, amps.get(table.device, amp))
                _tell_each_other(tables, k)
        finally:
            # even after an exception: what has been written to copies must be copied back
            for table in tables:
                table.end()
    else:
        # one table after the other: some share a workspace, and the results of one may be copied back while
        # the next one is stepped
        for table in tables:
            try:
                for k in sweeps:
                    table.update(k, amps.get(table.device, amp))
            finally:
                table.end()
    if tables or not ranks_of_norm:
        return []
    found = [] if amp.found_inf is None else [amp.found_inf]
    return found + [column[1, 0] for column in measured if settings.spec.skip_nonfinite]


def check_sums_over_all(tables: list[Table], rules: Collection[Rule], settings: Settings) -> None:
    """Raise if a rule sums over all tensors, but not all of them are stepped here by that rule."""
    programs = [bucket.program for table in tables for bucket in table.buckets]
    if not any(program.sums_over_all for program in programs):
        return
    if len(rules) > 1:
        raise TypeError(
            f"{settings.owner} has groups with different rules, and one of them sums over all tensors; use one "
            "rule for all groups, or an optimizer for each rule"
        )
    if settings.norm_ranks is not None:
        raise TypeError(
            f"{settings.owner} has a rule that sums over all tensors, which norm_group does not reach"
        )
    places = {tuple(p.summed_over_all(k) for k in range(len(p.sweeps))) for p in programs}
    assert len(places) == 1, "programs of one rule that have their sums in different places"


def _check_grads(tables: list[Table], spec: StepSpec) -> None:
    """Raise if this step writes gradients, and they cannot be written one by one."""
    if not (spec.zero_grads or spec.unscale_grads) or is_traced():
        return
    if not any(table.cells_changed or not table.engine.BY_ADDRESS for table in tables):
        return
    grads = [g for table in tables for bucket in table.buckets for g in bucket.local_grads()]
    if spec.unscale_grads and any(map(overlaps_itself, grads)):
        raise RuntimeError(
            "elements of a gradient share memory, as in an expanded tensor, so it cannot be unscaled in "
            "place; use p.grad = p.grad.clone(), or fusedstep.GradScaler, which leaves gradients scaled"
        )
    addresses = [g.data_ptr() for g in grads if g.numel()]
    if len({*addresses}) != len(addresses):
        if spec.unscale_grads:
            raise RuntimeError(
                "two parameters share a gradient, which would be unscaled twice; give one of them a clone, "
                "or use fusedstep.GradScaler, which leaves gradients as they are"
            )
        raise RuntimeError(
            "two parameters share a gradient, which would be zero for the second of them; call zero_grad() "
            "after step() instead of step(zero_grad=True, set_to_none=False)"
        )


def _shared_by(tables: list[Table]) -> list[Tensor]:
    """The tensors from which tables read the sums of all tables: each once, even if many tables share it."""
    return [*{id(table.shared[0]): table.shared[0] for table in tables}.values()]


def _tell_each_other(tables: list[Table], k: int) -> None:
    """Give every table the sums of all tables, for what is summed over all tensors in sweep `k`."""
    rows = tables[0].summed_over_all if len(tables) > 1 else []
    for row in rows[k] if k < len(rows) else ():
        for shared in _shared_by(tables):
            # one row at a time: a list of rows as an index would be copied to the device, which waits
            sums = [to_device(table.sums[row], shared.device) for table in tables]
            torch.cat(sums, out=shared[row])
