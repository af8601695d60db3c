"""Tensors for the states and master of a parameter: new ones, or those found, moved to the right place."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._algorithm.formats import Format, Plane
from .._algorithm.program import EMA, Rule
from .._algorithm.step import keywords
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
    """A plane for the local part `p`: the one that was `found`, moved to its `home` and laid out with these
    `strides`, if any; or a new one, which may begin as `start`.
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


def check_complete(
    state: Mapping[str, Any],
    found: Mapping[str, Format | None],
    rule: Rule,
    rules: Iterable[Rule],
    owner: str,
) -> None:
    """Raise if a parameter has lost some of what its rule keeps: beside the rest, it must not begin anew. The
    formats of states were `found`; `rules` are all that the optimizer has.
    """
    planes = [plane.name for name, each in found.items() if each for plane in each.planes(name)]
    lost = [name for name in (*rule.scalars, *planes) if state.get(name) is None]
    # but an option that was set in the middle of training may add a state
    if not lost and all(_lost_by(each, state, found) for each in (rule, *rules)):
        lost = _lost_by(rule, state, found)
    if lost:
        raise RuntimeError(
            f"{owner} found state {sorted(state)} for a parameter without {lost}, which it updates at every "
            "step; load a checkpoint of this optimizer, or clear the state"
        )


def _lost_by(rule: Rule, state: Mapping[str, Any], found: Mapping[str, Format | None]) -> list[str]:
    return [name for name in _needed_by(rule) if state.get(name) is None and not found.get(name)]


@functools.cache
def _needed_by(rule: Rule) -> tuple[str, ...]:
    counts = rule.saves_step and "step" in keywords(rule.update)
    return (*(name for _, name in rule.states), *["step"] * counts)


def check_state(found: Any, p: Tensor, plane: Plane, param_name: str | None) -> None:
    name = plane.name
    if not isinstance(found, Tensor):
        raise TypeError(f"state {name!r} is a {type(found).__name__}, not a tensor; load a matching checkpoint")
    owner = "its parameter" if param_name is None else f"its parameter {param_name!r}"
    if found.shape != plane_shape(plane, p, p) or found.is_complex() != p.is_complex():
        raise RuntimeError(
            f"state {name!r} has shape {tuple(found.shape)} and {found.dtype}, but {owner} "
            f"has {tuple(p.shape)} and {p.dtype}; load a matching checkpoint or delete optimizer.state[p]"
        )
    dtype = plane.dtype.to_complex() if p.is_complex() else plane.dtype
    if found.dtype != dtype:
        raise TypeError(
            f"state {name!r} of {owner.removeprefix('its ')} is {found.dtype}, and has to be {dtype}; load a "
            "matching checkpoint or delete optimizer.state[p]"
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
