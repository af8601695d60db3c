"""Tensors of which each rank holds a part: the only file that knows DTensor.

Engines see the part that is here, as a plain tensor. Only sums over a tensor concern other ranks: those that
hold parts of it add up theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
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

    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


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
    rows: Tensor


def spreads(params: Sequence[Any], order: Sequence[int], device: torch.device) -> list[Spread]:
    """Of a table with these parameters: all process groups, in the same order on all ranks."""
    found: dict[Any, list[int]] = {}
    for i in sorted(range(len(params)), key=order.__getitem__):
        p = params[i]
        for dim, placement in enumerate(p.placements if is_distributed(p) else ()):
            if not placement.is_replicate():
                found.setdefault(p.device_mesh.get_group(dim), []).append(i)
    return [Spread(group, torch.tensor(rows).to(device)) for group, rows in found.items()]


def process_groups(params: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """All whose ranks hold parts or copies of these parameters, in the same order on all ranks."""
    in_order = (params[i] for i in sorted(range(len(params)), key=order.__getitem__))
    meshes = dict.fromkeys(p.device_mesh for p in in_order if is_distributed(p))
    return [*dict.fromkeys(mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim))]


def _all_reduced(sums: Tensor, kind: str, group: Any) -> Tensor:
    if kind == "+":
        reduced = sums.clone()
        torch.distributed.all_reduce(reduced, group=group)
        return reduced
    # what is no number is no larger than others: tell it apart
    both = torch.stack((sums.nan_to_num(nan=0.0, posinf=torch.inf), sums.isnan().to(sums.dtype)))
    torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=group)
    return torch.where(both[1] != 0, torch.nan, both[0])


def _joined(sums: Tensor, kinds: str, group: Any) -> Tensor:
    """Sums over all ranks of a process group: one all-reduce for every kind of them."""
    # the group takes tensors on these, this one perhaps among them
    devices = {device.type: device for device in group._device_types}
    there = sums.to(devices.get(sums.device.type, group._device_types[0]))
    # in the same order on all ranks
    by_kind = {kind: _all_reduced(there, kind, group) for kind in sorted({*kinds})}
    return torch.stack([by_kind[kind][i] for i, kind in enumerate(kinds)]).to(sums.device)


def add_up(sums: Tensor, kinds: str, spread: Spread) -> None:
    """Make sums over the parts that are here those over all ranks of a process group."""
    if kinds:
        sums[:, spread.rows] = _joined(sums[:, spread.rows], kinds, spread.group)


def total(sums: Sequence[Tensor], kinds: str, group: Any) -> Tensor:
    """Of everything that this and all other ranks of a process group have summed: one column."""
    # this rank may have nothing
    like = sums[0] if sums else torch.zeros(0, dtype=torch.float64)
    ours = torch.cat([like.new_zeros(len(kinds), 1), *(t.to(like.device) for t in sums)], 1)
    folded = torch.stack([FOLDS[kind](row) for kind, row in zip(kinds, ours, strict=True)])
    return _joined(folded.unsqueeze(1), kinds, group)


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
    found = local(found_inf).reshape(1, 1)
    for group in groups:
        found = _joined(found, "^", group)
    return found.reshape(())
