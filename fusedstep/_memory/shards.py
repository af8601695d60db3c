"""Tensors of which each rank holds a part: the only file that knows DTensor.

Engines see the part that is here, as a plain tensor. Only sums over a tensor concern other ranks: those that
hold parts of it add up theirs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .._engines import to_device


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


def spec_of(t: Any) -> Any:
    """An object that says how a tensor is distributed: two tensors with the same one are so in the same way."""
    # private; where DTensors have none, an object of its own, and placements are compared: 3 us instead of 0.05
    return getattr(t, "_spec", t)


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


class Ranks(NamedTuple):
    """A process group, and where this rank talks in it: on all ranks a device of the same type."""

    group: Any
    device: torch.device


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


class ReduceGroup(NamedTuple):
    """Ranks that hold parts of the same tensors, and which rows of a table those are."""

    ranks: Ranks
    # in the same order on all ranks; None if that is just all of them
    rows: Tensor | None

    def within(self, begin: int, end: int, device: torch.device) -> ReduceGroup | None:
        """Those of these rows of the table; None if there are none."""
        rows = torch.arange(begin, end, device=device) if self.rows is None else self.rows
        rows = rows[(rows >= begin) & (rows < end)]
        return self._replace(rows=rows) if len(rows) else None


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


def ranks_of(group: Any) -> Ranks:
    """Of a process group without a mesh. All ranks must find the same, wherever their tensors are."""
    backends = dict(pair.split(":") for pair in torch.distributed.get_backend_config(group).split(","))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # a backend for both, such as gloo, goes through the host
    if accelerator is None or backends.get(accelerator.type) in (None, backends.get("cpu")):
        return Ranks(group, torch.device("cpu"))
    index = torch.accelerator.current_device_index()
    return Ranks(group, group.bound_device_id or torch.device(accelerator.type, index))


def _all_reduce(sums: Tensor, kind: str, group: Any) -> None:
    if kind == "sum":
        torch.distributed.all_reduce(sums, group=group)
    else:
        # NaN is not larger than other numbers: it is told apart
        both = torch.stack((sums.nan_to_num(nan=0.0, posinf=torch.inf), sums.isnan().to(sums.dtype)))
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=group)
        sums.copy_(torch.where(both[1] != 0, torch.nan, both[0]))


@functools.cache
def _runs(kinds: tuple[str, ...]) -> list[tuple[str, slice]]:
    """Sums of a kind that follow each other, which take one collective."""
    runs = ((kind, [*places]) for kind, places in groupby(range(len(kinds)), key=kinds.__getitem__))
    return [(kind, slice(places[0], places[-1] + 1)) for kind, places in runs]


def _reduced(sums: Tensor, kinds: tuple[str, ...], ranks: Ranks) -> Tensor:
    """Sums over all ranks, on the device where these talk: in place, if that is here."""
    there = sums if sums.device.type == ranks.device.type else to_device(sums, ranks.device)
    runs = _runs(kinds)
    for kind, run in runs:
        # not sliced where that is all: it takes the host as long as a launch
        _all_reduce(there if len(runs) == 1 else there[run], kind, ranks.group)
    return there


def all_reduce_rows_(sums: Tensor, kinds: tuple[str, ...], group: ReduceGroup) -> None:
    """Make sums over the parts that are here those over all ranks that hold parts."""
    reduced = _reduced(sums if group.rows is None else sums[:, group.rows], kinds, group.ranks)
    if group.rows is not None:
        sums[:, group.rows] = to_device(reduced, sums.device)
    elif reduced is not sums:
        sums.copy_(to_device(reduced, sums.device))


_FOLDS: dict[str, Any] = {"sum": torch.sum, "max": torch.amax}


def reduce_to_column(sums: Sequence[Tensor], kinds: tuple[str, ...], ranks: Ranks) -> Tensor:
    """Of everything that this and all other ranks have summed: one column."""
    # this rank may have nothing
    like = sums[0] if sums else torch.zeros(0, dtype=torch.float64, device=ranks.device)
    ours = torch.cat([like.new_zeros(len(kinds), 1), *(t.to(like.device) for t in sums)], 1)
    folded = torch.stack([_FOLDS[kind](row) for kind, row in zip(kinds, ours, strict=True)]).unsqueeze(1)
    return _reduced(folded, kinds, ranks)


def add_up(sums: Tensor, ranks: Ranks) -> None:
    """Over all ranks, in place."""
    reduced = _reduced(sums, ("sum",), ranks) if sums.device.type == ranks.device.type else None
    if reduced is None:
        sums.copy_(to_device(_reduced(sums, ("sum",), ranks), sums.device))


def any_rank_found_inf(found_inf: Tensor, groups: Sequence[Ranks]) -> Tensor:
    if not groups:
        return found_inf
    found = local(found_inf).clone().reshape(1, 1)
    for ranks in groups:
        found = _reduced(found, ("max",), ranks)
    return found.reshape(())


def check_group(group: Any, argument: str) -> None:
    """Raise where an argument is no process group."""
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(
            f"Invalid {argument}: {group!r}; use a process group that this rank is in, for example "
            "torch.distributed.group.WORLD or mesh.get_group('pp')"
        )


def check_scope(clip_scope: str) -> None:
    """Raise where a `norm_group` makes no sense."""
    if clip_scope != "global":
        raise ValueError(
            f"norm_group joins the norm of all parameters with that of other ranks, but clip_scope is "
            f"{clip_scope!r}; use clip_scope='global', or leave norm_group out"
        )


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


class UnpicklableGroup(NamedTuple):
    """A process group in a copy of an optimizer: the same one. It cannot leave the process."""

    argument: str
    group: Any

    def __deepcopy__(self, memo: dict) -> UnpicklableGroup:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"an optimizer with a {self.argument} cannot be pickled: its process group is of this process; "
            "save its state_dict(), and load that into one constructed anew"
        )
