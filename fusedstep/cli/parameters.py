"""Parameters with gradients for a row: from a list of shapes, or from a user's model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fusedstep import Muon

from .counting import groups_of
from .factory import made
from .shapes import MODELS
from .works import DTYPES, Work

Shape = Sequence[int]


def drawn(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Any:
    """A parameter of random numbers, and its gradient."""
    drawn_in = torch.complex64 if dtype.is_complex else torch.float32
    draw = lambda: torch.randn(shape, device=generator.device, generator=generator, dtype=drawn_in)
    p = nn.Parameter((0.02 * draw()).to(dtype))
    p.grad = (0.01 * draw()).to(dtype)
    return p


def parameters(work: Work, device: str) -> list[Any]:
    """All parameters that have a gradient at some step."""
    generator = torch.Generator(device).manual_seed(0)
    if work.model in MODELS:
        return [drawn(shape, DTYPES[work.dtype][0], generator) for shape in MODELS[work.model]]
    model = made(work.model).to(device)
    if work.dtype in DTYPES:
        model = model.to(DTYPES[work.dtype][0])
    params = [p for p in model.parameters() if p.requires_grad]
    for p in params:
        # in the memory layout of its parameter
        p.grad = torch.empty_like(p).normal_(generator=generator).mul_(0.01)
    return params


def groups(work: Work, params: list[Any]) -> list[dict[str, Any]]:
    """One group, or one for each parameter if the name of the model says so; for Muon by their dimensions."""
    if work.model.endswith("groups"):
        return [group for p in params for group in groups(work._replace(model=""), [p])]
    if work.optimizer == "Muon":
        return groups_of(Muon, [("", p) for p in params])
    return [{"params": params}]


def dtype_of(params: list[Any]) -> str:
    """The name of the dtype of a user's parameters."""
    found = {p.dtype for p in params}
    names = {dtypes: name for name, dtypes in DTYPES.items()}
    one = found.pop()
    return names.get((one, one), str(one).removeprefix("torch.")) if not found else "mixed"
