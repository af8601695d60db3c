"""Tensors whose rows are divided among ranks are put together for a stage, and divided again.

Each rank puts together some of the tensors of a stack, so that all ranks have equal work. One all-to-all brings
it the rows of other ranks, another sends back the results of the stage; both overlap with the work on other
stacks. If all ranks have all rows, as with DDP, each works on some tensors and sends the results to the others.
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
    """Divides tensors among ranks, so that all ranks have equal work over all stacks."""

    def __init__(self) -> None:
        self._loads: dict[Any, list[float]] = {}

    def of(self, ranks: Ranks, count: int, work: float) -> list[int]:
        """How many of `count` tensors, each of this much work, every rank takes; all ranks get the same."""
        size = torch.distributed.get_world_size(ranks.group)
        loads = self._loads.setdefault(ranks.group, [0.0] * size)
        taken = [0] * size
        for _ in range(count):
            rank = min(range(size), key=lambda rank: (loads[rank], rank))
            taken[rank] += 1
            loads[rank] += work
        return taken


class Exchange:
    """A stack of parts in transfer: sent by the constructor, worked on by `work`, back after `wait`."""

    def __init__(self, division: Division, taken: list[int], source: Tensor, target: Tensor) -> None:
        """Each rank takes `taken` consecutive tensors of the stack; source and target hold local parts."""
        ranks, counts = division
        self._ranks, self._target = ranks, target
        self._counts, self._mine = counts, taken[torch.distributed.get_rank(ranks.group)]
        self._row = source.shape[2:]
        length = math.prod(self._row)
        # how many elements go to each rank, and come from it
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
        """Put together the parts that have come, run the stage, and send back the results."""
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
        """Wait until all parts are back."""
        self._pending.wait()
        if self._result is not None and self._result is not self._target:
            self._target.copy_(self._result)


def divide(ranks: Ranks, taken: list[int], run: Work, source: Tensor, target: Tensor) -> None:
    """Work on a stack that all ranks have: each works on some tensors, and sends the others the results."""
    rank, most = torch.distributed.get_rank(ranks.group), max(taken)
    firsts = [sum(taken[:i]) for i in range(len(taken))]
    mine = slice(firsts[rank], firsts[rank] + taken[rank])
    if taken[rank]:
        run(source[mine], target[mine])
    ours = target.new_empty(most, *target.shape[1:], device=ranks.device)
    ours[: taken[rank]].copy_(target[mine])
    everything = ours.new_empty(len(taken) * most, *ours.shape[1:])
    torch.distributed.all_gather_into_tensor(everything, ours, group=ranks.group)
    for i, part in enumerate(everything.split(most)):
        target[firsts[i] : firsts[i] + taken[i]].copy_(part[: taken[i]])
