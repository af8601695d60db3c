"""Tensors whose rows are divided among ranks, put together for a stage, and divided again.

Each rank puts together some of the tensors of a stack, as much work as every other. It gets the rows that
others have by one all-to-all, and sends back what the stage made of them by another; those of other stacks are
on their way meanwhile. Where all ranks have all rows, as with DDP, each works on some tensors and tells the
others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._engines import to_device
from .ranks import Ranks
from .shards import Division

Work = Callable[[Tensor, Tensor], None]


class Shares:
    """How tensors are divided among ranks, so that all have as much to do, whatever the stacks."""

    def __init__(self) -> None:
        self._loads: dict[Any, list[float]] = {}

    def of(self, ranks: Ranks, count: int, work: float) -> list[int]:
        """Of `count` tensors, each so much work, how many every rank takes; the same on all of them."""
        size = torch.distributed.get_world_size(ranks.group)
        loads = self._loads.setdefault(ranks.group, [0.0] * size)
        taken = [0] * size
        for _ in range(count):
            rank = min(range(size), key=lambda rank: (loads[rank], rank))
            taken[rank] += 1
            loads[rank] += work
        return taken


class Exchange:
    """A stack of parts on its way: sent when this is made, worked on by `work`, and back after `wait`."""

    def __init__(self, division: Division, taken: list[int], source: Tensor, target: Tensor) -> None:
        """Ranks take consecutive tensors of the stack, so many each; source and target have parts."""
        ranks, counts = division
        self._ranks, self._target = ranks, target
        self._counts, self._mine = counts, taken[torch.distributed.get_rank(ranks.group)]
        self._row = source.shape[2:]
        length = math.prod(self._row)
        # of what goes to each rank, and of what comes from it
        self._ours = [n * source.shape[1] * length for n in taken]
        self._theirs = [self._mine * count * length for count in counts]
        self._received = torch.empty(sum(self._theirs), dtype=source.dtype, device=ranks.device)
        self._pending = self._send(self._received, source, self._theirs, self._ours)
        self._result: Tensor | None = None

    def _send(self, into: Tensor, what: Tensor, sizes: list[int], lengths: list[int]) -> Any:
        self._sent = to_device(what, self._ranks.device).reshape(-1)
        return torch.distributed.all_to_all_single(
            into, self._sent, sizes, lengths, group=self._ranks.group, async_op=True
        )

    def work(self, run: Work, dtype: torch.dtype) -> None:
        """Put together what has come, have it worked on, and send it back."""
        self._pending.wait()
        parts = [
            part.view(self._mine, count, *self._row)
            for part, count in zip(self._received.split(self._theirs), self._counts, strict=True)
        ]
        whole = to_device(torch.cat(parts, 1), self._target.device)
        made = whole.view(dtype)
        if len(whole):
            run(whole, made)
        back = torch.cat([part.reshape(-1) for part in made.split(self._counts, 1)])
        here = self._target.device.type == self._ranks.device.type
        self._result = self._target if here else torch.empty_like(self._target, device=self._ranks.device)
        self._pending = self._send(self._result.view(-1), back, self._ours, self._theirs)

    def wait(self) -> None:
        """Until all parts are back."""
        self._pending.wait()
        if self._result is not None and self._result is not self._target:
            self._target.copy_(self._result)


def divide(ranks: Ranks, taken: list[int], run: Work, source: Tensor, target: Tensor) -> None:
    """Work on a stack of which all ranks have all tensors: each takes so many, and tells the others."""
    rank, most = torch.distributed.get_rank(ranks.group), max(taken)
    firsts = [sum(taken[:i]) for i in range(len(taken))]
    mine = slice(firsts[rank], firsts[rank] + taken[rank])
    if taken[rank]:
        run(source[mine], target[mine])
    told = target.new_empty(most, *target.shape[1:], device=ranks.device)
    told[: taken[rank]].copy_(target[mine])
    everything = told.new_empty(len(taken) * most, *told.shape[1:])
    torch.distributed.all_gather_into_tensor(everything, told, group=ranks.group)
    for i, part in enumerate(everything.split(most)):
        target[firsts[i] : firsts[i] + taken[i]].copy_(part[: taken[i]])
