"""Tensors of which each rank holds a part: the only file that knows DTensor.

Engines see the local part, as a plain tensor. Other ranks matter only for sums over a tensor: ranks that hold
parts of it add up their sums.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._engines import PLAIN_TYPES, sent
from .ranks import Ranks, ReduceGroup

_spec = attrgetter("_spec")


def is_distributed(t: Any) -> bool:
    if type(t) in PLAIN_TYPES:
        return False
    # nobody has one before it is imported, which takes a while
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def are_distributed(tensors: Sequence[Any]) -> list[bool]:
    """`is_distributed` of many tensors, which have few different types."""
    types = {type(t): is_distributed(t) for t in {type(t): t for t in tensors}.values()}
    return [types[type(t)] for t in tensors]


def local(t: Any) -> Any:
    """The local part of a tensor: all of it, if it is a plain tensor."""
    if not is_distributed(t):
        return t
    part = t._local_tensor
    # a part that is still on its way from other ranks
    return part.wait() if hasattr(part, "wait") else part


def size_here(t: Any) -> int:
    """Elements of the local part, rounded up so that all ranks get the same although parts may be uneven."""
    size = t.numel()
    for dim, placement in enumerate(t.placements if is_distributed(t) else ()):
        size = -(-size // t.device_mesh.size(dim)) if placement.is_shard() else size
    return size


def is_offloaded(p: Any) -> bool:
    """Whether FSDP2 keeps a parameter on the host, with a mesh of other devices."""
    return is_distributed(p) and p.is_cpu and p.device_mesh.device_type != "cpu"


def like(part: Tensor, p: Any, shape: Sequence[int] | None = None) -> Tensor:
    """A tensor that is distributed as `p` is, with `part` as its local part; of another shape, if given."""
    if not is_distributed(p):
        return part
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # as FSDP2 makes its parameters; from_local would move a part that was offloaded to the mesh's devices
    strides = p.stride() if shape is None else torch.empty(shape, device="meta").stride()
    meta = TensorMeta(p.shape if shape is None else torch.Size(shape), strides, part.dtype)
    return DTensor(part, DTensorSpec(p.device_mesh, p.placements, meta), requires_grad=False)


def specs_of(tensors: Sequence[Any]) -> list[Any]:
    """Objects that say how tensors are distributed: tensors with the same object are distributed alike. Tensors
    that are not distributed have their type.
    """
    try:
        return [*map(_spec, tensors)]
    except AttributeError:
        # some are not distributed, or missing. Or DTensors have no spec, which is private: then placements are
        # compared, in 3 us instead of 0.03
        known = zip(tensors, are_distributed(tensors), strict=True)
        return [getattr(t, "_spec", t) if is_held else type(t) for t, is_held in known]


def lies_alike(a: Any, b: Any) -> bool:
    """Whether two tensors are distributed in the same way."""
    if not is_distributed(a) or not is_distributed(b):
        return is_distributed(a) == is_distributed(b)
    return a.placements == b.placements and a.device_mesh == b.device_mesh


def check(p: Any, g: Any, owner: str) -> None:
    """Raise if a parameter and its gradient are distributed in a way that does not let parts be updated."""
    for t, what in ((p, "parameter"), (g, "gradient")):
        if is_distributed(t) and any(placement.is_partial() for placement in t.placements):
            raise RuntimeError(
                f"{owner} found a {what} with placements {t.placements}: every rank holds a summand; "
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
            f"{owner} found a gradient that is not distributed as its parameter is: {found} for {wanted}; "
            f"use {advice}"
        )


def is_flat(p: Tensor) -> bool:
    """Whether FSDP1 has joined this parameter with others and cut them, without saying where."""
    return getattr(p, "_fsdp_flattened", False)


def is_cut(p: Any) -> bool:
    """Whether other ranks hold other parts of a parameter."""
    return is_distributed(p) and not all(placement.is_replicate() for placement in p.placements)


def has_whole_rows(p: Any) -> bool:
    """Whether the local part consists of whole rows of dimension 0."""
    if not is_distributed(p):
        return not is_flat(p)
    return all(placement.is_replicate() or placement.is_shard(0) for placement in p.placements)


def first_index(p: Any, owner: str) -> int:
    """The index of the first local element in the whole tensor, counted row by row."""
    if not is_cut(p) and not is_flat(p):
        return 0
    from torch.distributed.tensor import Shard

    # a strided shard is a subclass, and has rows from several places
    placements = getattr(p, "placements", ())
    cuts = [placement for placement in placements if not placement.is_replicate()]
    if len(cuts) != 1 or type(cuts[0]) is not Shard or cuts[0].dim != 0:
        raise RuntimeError(
            f"{owner} draws random bits by the place of an element in its tensor, but found a parameter "
            f"{'that FSDP1 has flattened' if is_flat(p) else f'sharded as {placements}'}; use FSDP2, which "
            'shards along dimension 0, or rounding="nearest"'
        )
    mesh_dim = placements.index(cuts[0])
    ranks, rank = p.device_mesh.size(mesh_dim), p.device_mesh.get_local_rank(mesh_dim)
    # as torch.chunk cuts
    rows = min(-(-p.shape[0] // ranks) * rank, p.shape[0])
    return rows * (p.numel() // p.shape[0]) if p.shape[0] else 0


def on_several_meshes(params: Iterable[Any]) -> bool:
    """Whether these parameters are distributed over different meshes."""
    meshes = (p.device_mesh for p in params if is_distributed(p))
    first = next(meshes, None)
    return any(mesh != first for mesh in meshes)


def check_sums(p: Any, owner: str, joined: bool) -> None:
    """Raise if this rank cannot get sums over a whole tensor, or sums that are `joined` with other tensors'."""
    if is_flat(p):
        raise RuntimeError(
            f"{owner} needs norms of whole tensors, or counts of their non-finite elements, but FSDP1 has cut "
            "and joined them without saying where; use FSDP2 (torch.distributed.fsdp.fully_shard), or FSDP1's "
            "own clip_grad_norm_ and ShardedGradScaler"
        )
    if joined and is_distributed(p) and not _is_member(p):
        raise RuntimeError(
            f"{owner} adds up what it measures of all gradients, but found a parameter whose mesh "
            f"{p.device_mesh.mesh.tolist()} leaves out this rank, {torch.distributed.get_rank()}; use a mesh "
            "of all ranks, or leave out max_grad_norm and skip_nonfinite"
        )


def drop_gathered(modules: Sequence[torch.nn.Module], params: Sequence[Any]) -> None:
    """Have modules of FSDP2 drop gathered copies, before these parameters get other values."""
    if any(map(is_flat, params)):
        raise RuntimeError(
            "FSDP1 keeps gathered copies of parameters after a forward, and cannot be told that parameters "
            "have other values now; use FSDP2 (torch.distributed.fsdp.fully_shard)"
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
            "parameters are DTensors, and modules of FSDP2 keep gathered copies of them after a forward; use "
            "ema_parameters(model), with the whole model, which makes FSDP2 gather them again. If an exception "
            "has ended a forward, call set_reshard_after_forward(True) and reshard() of the modules"
        )


class Division(NamedTuple):
    """The ranks that the rows of a tensor are divided among, and how many rows each rank has."""

    ranks: Ranks
    counts: tuple[int, ...]


def division_of(p: Any) -> Division | None:
    """How the rows of a parameter are divided among ranks; None if it is not cut, or cut in other ways."""
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
    """The whole of a tensor that is distributed as `p` is, from its local `part`: a collective call."""
    return like(part, p).full_tensor()  # type: ignore[attr-defined]


def part_of(whole: Tensor, p: Any) -> Tensor:
    """The local part of a tensor, which every rank has, once it is distributed as `p` is."""
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * p.device_mesh.ndim
    copies = DTensor.from_local(whole, p.device_mesh, everywhere, run_check=False)
    return local(copies.redistribute(placements=p.placements))


def _is_member(p: Any) -> bool:
    """Whether this rank is in the mesh of a parameter; if not, its part is empty."""
    return p.device_mesh.get_coordinate() is not None


def _ranks(p: Any, dim: int) -> Ranks:
    return Ranks(p.device_mesh.get_group(dim), torch.device(p.device_mesh.device_type))


def reduce_groups(params: Sequence[Any], rows: Sequence[int], device: torch.device) -> list[ReduceGroup]:
    """The groups of a table with these parameters in these rows, in the same order on all ranks."""
    found: dict[Ranks, list[int]] = {}
    for p, row, is_held in zip(params, rows, are_distributed(params), strict=True):
        for dim, placement in enumerate(p.placements if is_held and _is_member(p) else ()):
            if not placement.is_replicate():
                found.setdefault(_ranks(p, dim), []).append(row)
    everything = [*range(len(rows))]
    return [
        ReduceGroup(ranks, None if members == everything else sent(torch.tensor(members, device="cpu"), device))
        for ranks, members in found.items()
    ]


def owner_groups(params: Sequence[Any]) -> list[Ranks]:
    """All ranks that hold parts or copies of these parameters, in the same order on all ranks."""
    held = [p for p, is_held in zip(params, are_distributed(params), strict=True) if is_held and _is_member(p)]
    return [*dict.fromkeys(_ranks(p, dim) for p in held for dim in range(p.device_mesh.ndim))]


def check_counted_once(group: Any, params: Sequence[Any], owner: str) -> None:
    """Raise if ranks of a `norm_group` hold the same parameter, whose norm would count twice."""
    ranks = {*torch.distributed.get_process_group_ranks(group)}
    for mesh in {p.device_mesh for p in params if is_distributed(p)}:
        if len(ranks.intersection(mesh.mesh.flatten().tolist())) > 1:
            raise RuntimeError(
                f"{owner} was given a norm_group of ranks that hold parts of the same parameters, whose norms "
                "are added up over them anyway; leave norm_group out, or give it ranks that hold other "
                "parameters, as the stages of a pipeline do"
            )
