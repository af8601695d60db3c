"""Tensors of which each rank holds a part: the only file that knows DTensor.

Engines see the part that is here, as a plain tensor. Only sums over a tensor concern other ranks: those that
hold parts of it add up theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._passes import FOLDS


def is_distributed(t: Any) -> bool:
    # nobody has one before it is imported, which takes a while
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def local(t: Any) -> Any:
    """The part of a tensor that is here: all of it, if it is a plain one."""
    if not is_distributed(t):
        return t
    part = t._local_tensor
    # one that is still on its way, from other ranks
    return part.wait() if hasattr(part, "wait") else part


def like(part: Tensor, p: Any) -> Tensor:
    """A tensor that is distributed as `p` is, and of which `part` is here."""
    if not is_distributed(p):
        return part
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # as FSDP2 makes its parameters; from_local would move a part that was offloaded to the mesh's devices
    meta = TensorMeta(p.shape, p.stride(), part.dtype)
    return DTensor(part, DTensorSpec(p.device_mesh, p.placements, meta), requires_grad=False)


def lies_alike(a: Any, b: Any) -> bool:
    """Whether two tensors are distributed in the same way."""
    if not is_distributed(a) or not is_distributed(b):
        return is_distributed(a) == is_distributed(b)
    return a.placements == b.placements and a.device_mesh == b.device_mesh


def check(p: Any, g: Any, owner: str) -> None:
    """Raise where a parameter and its gradient are not distributed so that parts can be updated."""
    for t, what in ((p, "parameter"), (g, "gradient")):
        if is_distributed(t) and any(placement.is_partial() for placement in t.placements):
            raise RuntimeError(
                f"{owner} found a {what} with placements {t.placements}, of which every rank holds a summand; "
                f"redistribute it to Shard or Replicate first"
            )
    if not lies_alike(p, g):
        found = getattr(g, "placements", "a plain tensor")
        raise RuntimeError(
            f"{owner} found a gradient distributed otherwise than its parameter: {found} for "
            f"{getattr(p, 'placements', 'a plain tensor')}; use grad.redistribute(placements=p.placements)"
        )


def check_norms(p: Tensor, owner: str) -> None:
    """Raise where the norm of a whole tensor cannot be had."""
    if getattr(p, "_fsdp_flattened", False):
        raise RuntimeError(
            f"{owner} needs norms of whole tensors, and FSDP1 has cut and joined them without saying where; "
            "use FSDP2 (torch.distributed.fsdp.fully_shard), or for clipping FSDP1's own clip_grad_norm_"
        )


class Spread(NamedTuple):
    """Which rows of a table are spread over the ranks of a process group."""

    group: Any
    # in the same order on all ranks; None if that is just all of them
    rows: Tensor | None


def spreads(params: Sequence[Any], order: Sequence[int], device: torch.device) -> list[Spread]:
    """Of a table with these parameters: all process groups, in the same order on all ranks."""
    found: dict[Any, list[int]] = {}
    for i in sorted(range(len(params)), key=order.__getitem__):
        p = params[i]
        for dim, placement in enumerate(p.placements if is_distributed(p) else ()):
            if not placement.is_replicate():
                found.setdefault(p.device_mesh.get_group(dim), []).append(i)
    everything = [*range(len(params))]
    return [
        Spread(group, None if rows == everything else torch.tensor(rows).to(device))
        for group, rows in found.items()
    ]


def process_groups(params: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """All whose ranks hold parts or copies of these parameters, in the same order on all ranks."""
    in_order = (params[i] for i in sorted(range(len(params)), key=order.__getitem__))
    meshes = dict.fromkeys(p.device_mesh for p in in_order if is_distributed(p))
    return [*dict.fromkeys(mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim))]


def _all_reduce(sums: Tensor, kind: str, group: Any) -> None:
    if kind == "+":
        torch.distributed.all_reduce(sums, group=group)
    else:
        # what is no number is no larger than others: tell it apart
        both = torch.stack((sums.nan_to_num(nan=0.0, posinf=torch.inf), sums.isnan().to(sums.dtype)))
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=group)
        sums.copy_(torch.where(both[1] != 0, torch.nan, both[0]))


def _join(sums: Tensor, kinds: str, group: Any) -> None:
    """Make sums those over all ranks of a process group, at once those of a kind that follow each other."""
    # the group takes tensors on these devices, perhaps on this one
    devices = {device.type: device for device in group._device_types}
    there = sums.to(devices.get(sums.device.type, group._device_types[0]))
    for kind, same in groupby(enumerate(kinds), key=itemgetter(1)):
        places = [i for i, _ in same]
        _all_reduce(there[places[0] : places[-1] + 1], kind, group)
    if there is not sums:
        sums.copy_(there)


def add_up(sums: Tensor, kinds: str, spread: Spread) -> None:
    """Make sums over the parts that are here those over all ranks of a process group."""
    if spread.rows is None:
        _join(sums, kinds, spread.group)
    else:
        mine = sums[:, spread.rows]
        _join(mine, kinds, spread.group)
        sums[:, spread.rows] = mine


def total(sums: Sequence[Tensor], kinds: str, group: Any) -> Tensor:
    """Of everything that this and all other ranks of a process group have summed: one column."""
    # this rank may have nothing
    like = sums[0] if sums else torch.zeros(0, dtype=torch.float64)
    ours = torch.cat([like.new_zeros(len(kinds), 1), *(t.to(like.device) for t in sums)], 1)
    folded = torch.stack([FOLDS[kind](row) for kind, row in zip(kinds, ours, strict=True)]).unsqueeze(1)
    _join(folded, kinds, group)
    return folded


def check_norm_group(group: Any, params: Sequence[Any], owner: str) -> None:
    """Raise where ranks of this group hold the same parameter, whose norm would count twice."""
    ranks = {*torch.distributed.get_process_group_ranks(group)}
    for mesh in {p.device_mesh for p in params if is_distributed(p)}:
        if len(ranks.intersection(mesh.mesh.flatten().tolist())) > 1:
            raise RuntimeError(
                f"{owner} was given a norm_group of ranks that hold parts of the same parameters, over which "
                "norms are taken anyway; leave norm_group out, or give it ranks that hold other parameters, as "
                "the stages of a pipeline do"
            )


def agree(found_inf: Tensor, groups: Sequence[Any]) -> Tensor:
    """Whether any rank of these process groups has found infinities."""
    found = local(found_inf).clone().reshape(1, 1)
    for group in groups:
        _join(found, "^", group)
    return found.reshape(())
