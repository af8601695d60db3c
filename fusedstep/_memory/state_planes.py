"""Tensors of a parameter's state and master: new ones, and those that are there, in the right place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._algorithm.formats import Plane
from .._algorithm.program import EMA
from . import shards, watch
from .layout import dense_strides, laid_like
from .offload import Home
from .storage import plane_shape

# states that begin as a copy of their parameter; others begin with zeros
_COPIES = (EMA, "master")
MASTER_PLANES = {"master", "master_rest"}


def made(
    plane: Plane, p: Tensor, whole: Tensor, home: Home, strides: tuple | None, found: Any, start: Tensor
) -> Tensor:
    """A plane of the part `p` that is here: the one that was found, in its place and with its strides, if it
    has any, or a new one, which may begin as `start`.
    """
    shape = plane_shape(plane, whole, p)
    if found is not None:
        found = found.to(home.device)
        if plane.block > 1:
            return home.take(found.contiguous())
        return home.take(found if strides is None else laid_like(found, strides))
    dtype = plane.dtype.to_complex() if p.is_complex() else plane.dtype
    if plane.block > 1:
        return torch.zeros(shape, dtype=dtype, device=home.device, pin_memory=home.is_pinned)
    if strides is not None:
        tensor = home.empty(p, strides, dtype)
    elif home.is_away:
        tensor = home.empty(p, dense_strides(p), dtype)
    else:
        tensor = torch.empty_like(p, dtype=dtype, requires_grad=False)
    return tensor.copy_(start) if plane.name in _COPIES else tensor.zero_()


def check_state(found: Any, p: Tensor, plane: Plane, param_name: str | None) -> None:
    name = plane.name
    if not isinstance(found, Tensor):
        raise TypeError(f"state {name!r} is a {type(found).__name__}, not a tensor; load a matching checkpoint")
    owner = "its parameter" if param_name is None else f"its parameter {param_name!r}"
    if found.shape != plane_shape(plane, p, p) or found.is_complex() != p.is_complex():
        raise RuntimeError(
            f"state {name!r} has shape {tuple(found.shape)} and {found.dtype}, {owner} "
            f"{tuple(p.shape)} and {p.dtype}; load a matching checkpoint or delete optimizer.state[p]"
        )
    if found.dtype != plane.dtype and not (found.is_floating_point() or found.is_complex()):
        raise TypeError(
            f"state {name!r} of {owner.removeprefix('its ')} is {found.dtype}, not floating-point; load a "
            "matching checkpoint"
        )
    if not watch.has_numbers(shards.local(found)):
        raise RuntimeError(
            f"state {name!r} of {owner.removeprefix('its ')} has no memory: its storage was freed; load a "
            "checkpoint or delete optimizer.state[p]"
        )
    if not shards.lies_alike(found, p):
        raise RuntimeError(
            f"state {name!r} is not distributed as {owner} is; load the checkpoint with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
