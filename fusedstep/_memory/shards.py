"""Tensors of which each rank holds a part: the only file that knows DTensor.

Engines see the part that is here, as a plain tensor. Only sums over a tensor concern other ranks: those that
hold parts of it add up theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ranks import Ranks, ReduceGroup

_spec = attrgetter("_spec")


def is_distributed(t: Any) -> bool:
    # nobody has one before it is imported, which takes a while
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def are_distributed(tensors: Sequence[Any]) -> list[bool]:
    """The same for many, which are of a few types."""
    types = {type(t): is_distributed(t) for t in {type(t): t for t in tensors}.values()}
    return [types[type(t)] for t in tensors]


def local(t: Any) -> Any:
    """The part of a tensor that is here: all of it, if it is a plain one."""
    if not is_distributed(t):
        return t
    part = t._local_tensor
    # one that is still on its way, from other ranks
    return part.wait() if hasattr(part, "wait") else part


def size_here(t: Any) -> int:
    """Numbers in the part that a rank holds, where all count the same although their parts may be uneven."""
    size = t.numel()
    for dim, placement in enumerate(t.placements if is_distributed(t) else ()):
        size = -(-size // t.device_mesh.size(dim)) if placement.is_shard() else size
    return size


def is_offloaded(p: Any) -> bool:
    """Whether FSDP2 has a parameter on the host, for ranks that talk on other devices."""
    return is_distributed(p) and p.is_cpu and p.device_mesh.device_type != "cpu"


def like(part: Tensor, p: Any, shape: Sequence[int] | None = None) -> Tensor:
    """A tensor that is distributed as `p` is, and of which `part` is here; of another shape, if given."""
    if not is_distributed(p):
        return part
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # as FSDP2 makes its parameters; from_local would move a part that was offloaded to the mesh's devices
    strides = p.stride() if shape is None else torch.empty(shape, device="meta").stride()
    meta = TensorMeta(p.shape if shape is None else torch.Size(shape), strides, part.dtype)
    return DTensor(part, DTensorSpec(p.device_mesh, p.placements, meta), requires_grad=False)


def specs_of(tensors: Sequence[Any]) -> list[Any]:
    """Objects that say how tensors are distributed: two with the same one are so in the same way."""
    try:
        return [*map(_spec, tensors)]
    except AttributeError:
        # plain ones are among them. Where DTensors have none, which is private, placements are compared: 3 us
        # instead of 0.03
        return [getattr(t, "_spec", t) for t in tensors]


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
        found, wanted = (getattr(t, "placements", "a plain tensor") for t in (g, p))
        if not is_distributed(p):
            advice = "grad.full_tensor()"
        elif not is_distributed(g):
            advice = "torch.distributed.tensor.distribute_tensor(grad, p.device_mesh, p.placements)"
        else:
            advice = "grad.redistribute(p.device_mesh, p.placements)"
        raise RuntimeError(
            f"{owner} found a gradient distributed otherwise than its parameter: {found} for {wanted}; "
            f"use {advice}"
        )


def is_flat(p: Tensor) -> bool:
    """Whether FSDP1 has joined this parameter with others and cut them, without saying where."""
    return getattr(p, "_fsdp_flattened", False)


def is_cut(p: Any) -> bool:
    """Whether other ranks hold other parts of a parameter."""
    return is_distributed(p) and not all(placement.is_replicate() for placement in p.placements)


def has_whole_rows(p: Any) -> bool:
    """Whether the part that is here consists of rows of dimension 0."""
    if not is_distributed(p):
        return not is_flat(p)
    return all(placement.is_replicate() or placement.is_shard(0) for placement in p.placements)


def first_index(p: Any, owner: str) -> int:
    """Where the first element of the part that is here is in the whole tensor, counted row by row."""
    if not is_cut(p) and not is_flat(p):
        return 0
    from torch.distributed.tensor import Shard

    # a strided shard is a subclass, and has rows from several places
    placements = getattr(p, "placements", ())
    cuts = [placement for placement in placements if not placement.is_replicate()]
    if len(cuts) != 1 or type(cuts[0]) is not Shard or cuts[0].dim != 0:
        raise RuntimeError(
            f"{owner} draws random bits by the place of an element in its tensor, and found a parameter "
            f"{'that FSDP1 has flattened' if is_flat(p) else f'sharded as {placements}'}; use FSDP2, which "
            'shards along dimension 0, or rounding="nearest"'
        )
    mesh_dim = placements.index(cuts[0])
    ranks, rank = p.device_mesh.size(mesh_dim), p.device_mesh.get_local_rank(mesh_dim)
    # as torch.chunk cuts
    rows = min(-(-p.shape[0] // ranks) * rank, p.shape[0])
    return rows * (p.numel() // p.shape[0]) if p.shape[0] else 0


def on_several_meshes(params: Iterable[Any]) -> bool:
    """Whether a rank's neighbours are not the same for all of these parameters."""
    meshes = (p.device_mesh for p in params if is_distributed(p))
    first = next(meshes, None)
    return any(mesh != first for mesh in meshes)


def check_sums(p: Any, owner: str, joined: bool) -> None:
    """Raise where this rank cannot have sums over a whole tensor, or those that are `joined` with others."""
    if is_flat(p):
        raise RuntimeError(
            f"{owner} needs norms of whole tensors, or to count what is no number in them, and FSDP1 has cut "
            "and joined them without saying where; use FSDP2 (torch.distributed.fsdp.fully_shard), or FSDP1's "
            "own clip_grad_norm_ and ShardedGradScaler"
        )
    if joined and is_distributed(p) and not _is_member(p):
        raise RuntimeError(
            f"{owner} joins what it measures of all gradients, and found a parameter whose mesh "
            f"{p.device_mesh.mesh.tolist()} leaves out this rank, {torch.distributed.get_rank()}; use a mesh "
            "of all ranks, or leave out max_grad_norm and skip_nonfinite"
        )


def drop_gathered(modules: Sequence[torch.nn.Module], params: Sequence[Any]) -> None:
    """Have modules of FSDP2 forget what they have gathered, where these parameters get other values."""
    if any(map(is_flat, params)):
        raise RuntimeError(
            "FSDP1 keeps gathered copies of parameters after a forward, and cannot be told that these have "
            "other values; use FSDP2 (torch.distributed.fsdp.fully_shard)"
        )
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"ema_parameters() was given a {type(module).__name__}; use ema_parameters(model)")
    module_of_fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for module in chain.from_iterable(module.modules() for module in modules):
        if isinstance(module, module_of_fsdp):
            module.reshard()
    known = {id(p) for module in modules for p in module.parameters()}
    if any(is_distributed(p) and id(p) not in known for p in params):
        raise RuntimeError(
            "parameters are DTensors, of which modules of FSDP2 keep gathered copies after a forward; use "
            "ema_parameters(model), with all of the model, which has them gathered anew before and after. If "
            "an exception has ended a forward, call set_reshard_after_forward(True) and reshard() of modules"
        )


class Division(NamedTuple):
    """Ranks among which the rows of a tensor are divided, and how many rows each of them has."""

    ranks: Ranks
    counts: tuple[int, ...]


def division_of(p: Any) -> Division | None:
    """How the rows of a parameter are divided; None if they are not, or if it is cut in other ways."""
    placements = p.placements if is_distributed(p) and _is_member(p) else ()
    cuts = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    from_shard = "torch.distributed.tensor" in sys.modules and sys.modules["torch.distributed.tensor"].Shard
    if len(cuts) != 1 or type(placements[cuts[0]]) is not from_shard or placements[cuts[0]].dim != 0:
        return None
    # as torch.chunk cuts
    size = p.device_mesh.size(cuts[0])
    each = -(-p.shape[0] // size)
    counts = (min(each, max(0, p.shape[0] - each * rank)) for rank in range(size))
    return Division(_ranks(p, cuts[0]), tuple(counts))


def largest_part(p: Any) -> int:
    """Elements of the largest part that a rank has; the same on all of them."""
    division = division_of(p)
    if division is None:
        return p.numel()
    return max(division.counts) * (p.numel() // max(1, p.shape[0]))


def way_of(p: Any) -> Any:
    """A value that is equal for tensors that are distributed alike."""
    return (p.device_mesh, p.placements) if is_distributed(p) else None


def whole_of(part: Tensor, p: Any) -> Tensor:
    """The tensor that is distributed as `p` is, and of which `part` is here: a collective call."""
    return like(part, p).full_tensor()  # type: ignore[attr-defined]


def part_of(whole: Tensor, p: Any) -> Tensor:
    """The part of it that is here where a tensor, which every rank has, is distributed as `p` is."""
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * p.device_mesh.ndim
    copies = DTensor.from_local(whole, p.device_mesh, everywhere, run_check=False)
    return local(copies.redistribute(placements=p.placements))


def _is_member(p: Any) -> bool:
    """Whether this rank is in the mesh of a parameter; one that is not has an empty part."""
    return p.device_mesh.get_coordinate() is not None


def _ranks(p: Any, dim: int) -> Ranks:
    return Ranks(p.device_mesh.get_group(dim), torch.device(p.device_mesh.device_type))


def reduce_groups(params: Sequence[Any], rows: Sequence[int], device: torch.device) -> list[ReduceGroup]:
    """Of a table with these parameters in these rows, in an order that is the same on all ranks."""
    found: dict[Ranks, list[int]] = {}
    for p, row, is_held in zip(params, rows, are_distributed(params), strict=True):
        for dim, placement in enumerate(p.placements if is_held and _is_member(p) else ()):
            if not placement.is_replicate():
                found.setdefault(_ranks(p, dim), []).append(row)
    everything = [*range(len(rows))]
    return [
        ReduceGroup(ranks, None if members == everything else torch.tensor(members, device="cpu").to(device))
        for ranks, members in found.items()
    ]


def owner_groups(params: Sequence[Any]) -> list[Ranks]:
    """All that hold parts or copies of these parameters, in the same order on all ranks."""
    held = [p for p, is_held in zip(params, are_distributed(params), strict=True) if is_held and _is_member(p)]
    return [*dict.fromkeys(_ranks(p, dim) for p in held for dim in range(p.device_mesh.ndim))]


def check_counted_once(group: Any, params: Sequence[Any], owner: str) -> None:
    """Raise where ranks of a `norm_group` hold the same parameter, whose norm would count twice."""
    ranks = {*torch.distributed.get_process_group_ranks(group)}
    for mesh in {p.device_mesh for p in params if is_distributed(p)}:
        if len(ranks.intersection(mesh.mesh.flatten().tolist())) > 1:
            raise RuntimeError(
                f"{owner} was given a norm_group of ranks that hold parts of the same parameters, over which "
                "norms are taken anyway; leave norm_group out, or give it ranks that hold other parameters, as "
                "the stages of a pipeline do"
            )
