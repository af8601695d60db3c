"""Process groups: sums and maxima over their ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .._engines import to_device


class Ranks(NamedTuple):
    """A process group, and the device of its collectives: of the same type on all ranks."""

    group: Any
    device: torch.device


class ReduceGroup(NamedTuple):
    """Ranks that hold parts of the same tensors, and which rows of a table those are."""

    ranks: Ranks
    # in the same order on all ranks; None: all rows
    rows: Tensor | None

    def within(self, begin: int, end: int, device: torch.device) -> ReduceGroup | None:
        """The same with only its rows from `begin` to `end`; None if there are none."""
        rows = torch.arange(begin, end, device=device) if self.rows is None else self.rows
        rows = rows[(rows >= begin) & (rows < end)]
        return self._replace(rows=rows) if len(rows) else None


def ranks_of(group: Any) -> Ranks:
    """The ranks of a process group without a mesh; all of them must get the same, wherever tensors are."""
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
        # NaN is not larger than other numbers, so it is passed separately
        both = torch.stack((sums.nan_to_num(nan=0.0, posinf=torch.inf), sums.isnan().to(sums.dtype)))
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=group)
        sums.copy_(torch.where(both[1] != 0, torch.nan, both[0]))


@functools.cache
def _runs(kinds: tuple[str, ...]) -> list[tuple[str, slice]]:
    """Consecutive sums of one kind, which take one collective."""
    runs = ((kind, [*places]) for kind, places in groupby(range(len(kinds)), key=kinds.__getitem__))
    return [(kind, slice(places[0], places[-1] + 1)) for kind, places in runs]


def _reduced(sums: Tensor, kinds: tuple[str, ...], ranks: Ranks) -> Tensor:
    """Sums over all ranks, on the device of their collectives: in place, if `sums` is there."""
    there = sums if sums.device.type == ranks.device.type else to_device(sums, ranks.device)
    runs = _runs(kinds)
    for kind, run in runs:
        # no slice of a single run: it would take the host as long as a launch
        _all_reduce(there if len(runs) == 1 else there[run], kind, ranks.group)
    return there


def all_reduce_rows_(sums: Tensor, kinds: tuple[str, ...], group: ReduceGroup) -> None:
    """Turn sums over local parts into sums over all ranks that hold parts, in place."""
    reduced = _reduced(sums if group.rows is None else sums[:, group.rows], kinds, group.ranks)
    if group.rows is not None:
        sums[:, group.rows] = to_device(reduced, sums.device)
    elif reduced is not sums:
        sums.copy_(to_device(reduced, sums.device))


_FOLDS: dict[str, Any] = {"sum": torch.sum, "max": torch.amax}


def reduce_to_column(sums: Sequence[Tensor], kinds: tuple[str, ...], ranks: Ranks) -> Tensor:
    """One column: what this and all other ranks have summed, added up."""
    # this rank may have no sums
    like = sums[0] if sums else torch.zeros(0, dtype=torch.float64, device=ranks.device)
    ours = torch.cat([like.new_zeros(len(kinds), 1), *(t.to(like.device) for t in sums)], 1)
    folded = torch.stack([_FOLDS[kind](row) for kind, row in zip(kinds, ours, strict=True)]).unsqueeze(1)
    return _reduced(folded, kinds, ranks)


def add_up(sums: Tensor, ranks: Ranks) -> None:
    """Add up `sums` over all ranks, in place."""
    reduced = _reduced(sums, ("sum",), ranks) if sums.device.type == ranks.device.type else None
    if reduced is None:
        sums.copy_(to_device(_reduced(sums, ("sum",), ranks), sums.device))


def any_found_inf(found_inf: Tensor, groups: Sequence[Ranks]) -> Tensor:
    if not groups:
        return found_inf
    found = found_inf.clone().reshape(1, 1)
    for ranks in groups:
        found = _reduced(found, ("max",), ranks)
    return found.reshape(())


def check_group(group: Any, argument: str) -> None:
    """Raise if an argument is not a process group."""
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(
            f"Invalid {argument}: {group!r}; use a process group that this rank is in, for example "
            "torch.distributed.group.WORLD or mesh.get_group('pp')"
        )


def check_scope(clip_scope: str) -> None:
    """Raise if a `norm_group` makes no sense."""
    if clip_scope != "global":
        raise ValueError(
            f"norm_group joins the norm of all parameters with that of other ranks, but clip_scope is "
            f"{clip_scope!r}; use clip_scope='global', or leave norm_group out"
        )


class UnpicklableGroup(NamedTuple):
    """A process group in a saved optimizer: copies share it, and it cannot be pickled."""

    argument: str
    group: Any

    def __deepcopy__(self, memo: dict) -> UnpicklableGroup:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"an optimizer with a {self.argument} cannot be pickled: its process group exists only in this "
            "process; save its state_dict(), and load that into a new optimizer"
        )
