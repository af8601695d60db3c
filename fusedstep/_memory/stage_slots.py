"""What the stages of a rule need for a parameter: the formats of their workspaces, and states of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._algorithm.formats import Format, Plain, compute_dtype
from .._algorithm.program import Rule
from .._algorithm.stage import Stage
from . import shards
from .shards import local


def stage_formats(p: Tensor, rule: Rule, formats: tuple[Format, ...], owner: str) -> tuple[Format, ...]:
    """The formats of what stages read and write; raises if a stage cannot work on the parameter."""
    if rule.stages and p.is_complex():
        raise RuntimeError(f"{owner} does not support complex parameters")
    found: list[Format] = []
    for stage in rule.stages:
        stage.matrix((*p.shape,))
        compute = compute_dtype(tuple(plane for format in formats for plane in format.planes("")))
        found += map(Plain, stage.dtypes(p.device, compute))
    return tuple(found)


def shapes_of_states(stages: Iterable[Stage], t: Tensor) -> dict[str, tuple[int, ...]]:
    """The shapes of what stages keep for a tensor, or for a part of one, by name."""
    return {name: shape for stage in stages for name, shape in stage.states((*t.shape,)).items()}


def stage_states(p: Tensor, rule: Rule, state: dict[str, Any], owner: str) -> dict[str, Tensor]:
    """States of stages that a parameter lacks, or has on another device; raises if a state does not fit."""
    fresh, part = {}, local(p)
    kept, here = shapes_of_states(rule.stages, p), shapes_of_states(rule.stages, part)
    if kept and not shards.has_whole_rows(p):
        raise RuntimeError(
            f"{owner} normalises whole rows, but found a parameter sharded as {p.placements}; "  # type: ignore[attr-defined]
            "shard along dimension 0, or use normalize_rows=None"
        )
    for name, shape in kept.items():
        found = state.get(name)
        if found is not None and (not isinstance(found, Tensor) or found.shape != shape):
            raise RuntimeError(
                f"state {name!r} is {getattr(found, 'shape', found)!r}, but a parameter of shape {(*p.shape,)} "
                f"keeps one of shape {shape}; load a matching checkpoint or delete optimizer.state[p]"
            )
        if found is None:
            dtype = torch.promote_types(p.dtype, torch.float32)
            made = torch.zeros(here[name], dtype=dtype, device=part.device)
            fresh[name] = shards.like(made, p, shape)
        elif local(found).device != part.device:
            fresh[name] = shards.like(local(found).to(part.device), p, shape)
    return fresh
