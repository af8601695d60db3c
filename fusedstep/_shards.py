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
    # where the group can talk
    device: str
    rows: Tensor


def spreads(params: Sequence[Any], order: Sequence[int], device: torch.device) -> list[Spread]:
    """Of a table with these parameters: all process groups, in the same order on all ranks."""
    found: dict[Any, tuple[str, list[int]]] = {}
    for i in sorted(range(len(params)), key=order.__getitem__):
        p = params[i]
        for dim, placement in enumerate(p.placements if is_distributed(p) else ()):
            if not placement.is_replicate():
                group = p.device_mesh.get_group(dim)
                found.setdefault(group, (p.device_mesh.device_type, []))[1].append(i)
    return [Spread(group, kind, torch.tensor(rows).to(device)) for group, (kind, rows) in found.items()]


def add_up(sums: Tensor, kinds: str, spread: Spread) -> None:
    """Make sums over the parts that are here those over all ranks of a process group."""
    mine = sums[:, spread.rows]
    # in the same order on all ranks
    for kind in sorted({*kinds}):
        rows = [i for i, k in enumerate(kinds) if k == kind]
        vector = mine[rows].to(spread.device)
        if kind == "+":
            torch.distributed.all_reduce(vector, group=spread.group)
        else:
            # what is no number is no larger than others: tell it apart
            both = torch.stack((vector.nan_to_num(nan=0.0, posinf=torch.inf), vector.isnan().to(vector.dtype)))
            torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=spread.group)
            vector = torch.where(both[1] != 0, torch.nan, both[0])
        mine[rows] = vector.to(sums.device)
    sums[:, spread.rows] = mine


def meshes(params: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """All meshes of devices, in the same order on all ranks."""
    in_order = (params[i] for i in sorted(range(len(params)), key=order.__getitem__))
    return [*dict.fromkeys(p.device_mesh for p in in_order if is_distributed(p))]


def agree(found_inf: Tensor, meshes: Sequence[Any]) -> Tensor:
    """Whether any rank has found infinities."""
    found = local(found_inf).clone()
    for mesh in meshes:
        told = found.to(mesh.device_type)
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group=mesh.get_group(dim))
        found = told.to(found.device)
    return found
