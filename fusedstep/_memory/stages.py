"""Stages of a table: work on whole tensors between its sweeps.

A workspace holds the tensors that a stage works on. Tensors of one shape lie one after the other, as a stack,
which the stage works on at once. The workspace is bounded. If it cannot hold all tensors, they take turns: each
turn is a table of its own, which takes all of its sweeps before the next turn begins, in the same memory.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .._algorithm.program import Staged
from .._engines import SKIP, is_traced
from . import shards
from .bucket import Bucket
from .exchange import Exchange, Shares, divide
from .ranks import Ranks, add_up
from .replay import Replays
from .row import Row
from .settings import Settings

# every stack begins at a multiple of this many bytes
_ALIGNMENT = 512
# stages that have run without an error, with the shape, dtype and device of what they worked on
_tried: set[tuple] = set()


def take_turns(rows: Sequence[Row], workspace_bytes: int) -> None:
    """Have rows take turns, so that the tensors of stages fit into half of the workspace, if possible."""
    limit = workspace_bytes // 2
    # for each engine and device, the current turn and how much of the workspace it takes
    used: dict[tuple, tuple[int, int]] = {}
    for row in rows:
        row.turn = 0
    staged = [(row.table_key[:2], (*row.param.shape,), row) for row in rows if row.program.stages]
    # rows of one shape together, because a stage works on them together
    for (place, _), same in groupby(sorted(staged, key=itemgetter(0, 1)), key=itemgetter(0, 1)):
        needs = [(row, sum(_sizes(row.program.stages, [row]))) for _, _, row in same]
        turn, taken = used.get(place, (0, 0))
        if taken + sum(need for _, need in needs) > limit >= sum(need for _, need in needs):
            # a new turn has room for all of them
            turn, taken = turn + 1, 0
        for row, need in needs:
            if taken and taken + need > limit:
                turn, taken = turn + 1, 0
            row.turn, taken = turn, taken + need
        used[place] = turn, taken


def _sizes(stages: Sequence[Staged], rows: list[Row]) -> Iterator[int]:
    """Bytes that each stage needs for the tensors of these rows."""
    for staged in stages:
        size = sum(shards.largest_part(row.param) for row in rows)
        size *= rows[0].program.planes[staged.source].dtype.itemsize
        yield -(-size // _ALIGNMENT) * _ALIGNMENT


def _alike(bucket: Bucket) -> Iterator[tuple[int, list[Row]]]:
    """Runs of consecutive rows that are stacked together, after the place of their first row in the bucket."""
    first = 0
    for _, same in groupby(bucket.rows, key=lambda row: (row.param.shape, shards.way_of(row.param))):
        rows = [*same]
        yield first, rows
        first += len(rows)


def matrix_of(row: Row) -> tuple[int, int]:
    """Rows and columns of the matrices that the parameter of a row consists of."""
    shape = (*row.param.shape,)
    for staged in row.program.stages:
        return staged.stage.matrix(shape)
    rows = shape[0] if shape else 1
    return rows, row.param.numel() // max(1, rows)


def give_workspaces(tables: Sequence[Any], settings: Settings) -> None:
    """Give tables their workspaces: those of a device take turns, and share one large enough for each."""
    for device in {table.device for table in tables}:
        here = [table for table in tables if table.device == device]
        staged = [table for table in here if any(bucket.program.stages for bucket in table.buckets)]
        if staged:
            # nothing, if all tensors are empty
            size = max(_needed_memory(table.buckets) for table in staged)
            memory, replays = torch.empty(size, dtype=torch.uint8, device=device), Replays(device)
            for table in staged:
                table.stages = Stages(table.buckets, memory, replays, settings)


def _needed_memory(buckets: list[Bucket]) -> int:
    """Bytes of the workspace that the stages of these buckets need."""
    staged = [bucket for bucket in buckets if bucket.program.stages]
    return sum(sum(_sizes(bucket.program.stages, rows)) for bucket in staged for _, rows in _alike(bucket))


class Stack:
    """Tensors of one shape that a stage works on together."""

    def __init__(self, staged: Staged, rows: list[Row], first: int, memory: Tensor) -> None:
        """For consecutive rows of a bucket, from its row `first` on; `memory` may be larger than needed."""
        self.after, self.stage, self._first, self._like = staged.after, staged.stage, first, rows[0].param
        shape = len(rows), *shards.local(self._like).shape
        dtypes = (rows[0].program.planes[place].dtype for place in (staged.source, staged.target))
        self.source, self.target = (memory.view(dtype)[: math.prod(shape)].view(shape) for dtype in dtypes)
        joins_rows = self.stage.joins_rows((*self._like.shape,))
        division = shards.division_of(self._like)
        self._division = division if joins_rows else None
        # cut, but not into rows: every rank puts whole tensors together
        self._is_gathered = shards.is_cut(self._like) and division is None
        self._has_states = bool(self.stage.states((*self._like.shape,)))
        self._taken: list[int] = []
        self._live: list[int] = []
        self._parts: list[slice] = []
        self._exchanges: list[Exchange] = []

    def share(self, shares: Shares, replicas: Ranks | None) -> None:
        """Decide which rank works on which tensors, if several ranks could."""
        self._replicas = None if shards.is_distributed(self._like) else replicas
        ranks = self._replicas if self._division is None else self._division.ranks
        if ranks is not None:
            work = self.stage.flops((*self._like.shape,))
            self._taken = shares.of(ranks, len(self.source), work)

    def _shares(self, ranks: Ranks, part: slice) -> list[int]:
        count = part.stop - part.start
        return self._taken if count == len(self.source) else Shares().of(ranks, count, 1.0)

    def try_out(self, workspace_bytes: int) -> None:
        """Run the stage on zeros, once for all stacks like this one, before a step has written anything: this
        compiles what the stage needs, and raises if it cannot run.
        """
        source, target = self.source, self.target
        if self._taken or self._is_gathered:
            ranks = self._replicas if self._division is None else self._division.ranks
            count = len(source) if ranks is None else self._taken[torch.distributed.get_rank(ranks.group)]
            source = torch.empty(count, *self._like.shape, dtype=source.dtype, device=source.device)
            target = source.view(target.dtype)
        key = self.stage, source.shape, source.dtype, source.device
        if key not in _tried and source.numel() and not is_traced():
            returned = self.stage.run(source.zero_(), target, workspace_bytes)  # type: ignore[func-returns-value]
            if returned is not None:
                name = type(self.stage).__name__
                raise TypeError(f"{name}.run returned {returned!r}; fill `target` instead: target.copy_(x)")
            _tried.add(key)

    def begin(self, live: list[int]) -> None:
        """Find the rows of this stack among the bucket's `live` rows, which have a gradient, and send other
        ranks the parts that they work on.
        """
        mine = live[bisect_left(live, self._first) : bisect_left(live, self._first + len(self.source))]
        if mine != self._live:
            # slices instead of an index, which would have to be copied to the device
            runs = ([*run] for _, run in groupby(enumerate(mine), key=lambda at: at[1] - at[0]))
            ends = ((run[0][1] - self._first, run[-1][1] - self._first + 1) for run in runs)
            self._live, self._parts = mine, [slice(*each) for each in ends]
        if self._division is not None:
            self._exchanges = [
                Exchange(
                    self._division,
                    self._shares(self._division.ranks, part),
                    self.source[part],
                    self.target[part],
                )
                for part in self._parts
            ]

    def work(self, replays: Replays, workspace_bytes: int) -> None:
        run = lambda source, target: self.stage.run(source, target, workspace_bytes)
        for exchange in self._exchanges:
            exchange.work(run, self.target.dtype)
        for part in () if self._exchanges else self._parts:
            source, target = self.source[part], self.target[part]
            if self._replicas is not None:
                divide(self._replicas, self._shares(self._replicas, part), run, source, target)
            elif self._is_gathered:
                self._gather(run, source, target)
            else:
                replays.run((self, part.start, part.stop), functools.partial(run, source, target))

    def _gather(self, run: Callable, source: Tensor, target: Tensor) -> None:
        whole = torch.stack([shards.whole_of(part, self._like) for part in source])
        made = whole.view(target.dtype)
        run(whole, made)
        for part, each in zip(target, made, strict=True):
            part.copy_(shards.part_of(each, self._like))

    def end(self, bucket: Bucket, skip: Tensor) -> None:
        """Wait for the results of other ranks, and finish; `skip` says whether the step is skipped."""
        for exchange in self._exchanges:
            exchange.wait()
        self._exchanges, rows = [], bucket.rows if self._has_states else []
        for part in self._parts:
            states = [self._states(row.state) for row in rows[self._first :][part]]
            self.stage.finish(self.target[part], states, skip, self._add_up if self._division else None)

    def _states(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """The local parts of the states that the stage keeps for a tensor."""
        return {name: shards.local(state[name]) for name in self.stage.states((*self._like.shape,))}

    def _add_up(self, sums: Tensor) -> None:
        assert self._division is not None
        add_up(sums, self._division.ranks)


class Stages:
    """The stages of a table, with their workspaces."""

    def __init__(self, buckets: list[Bucket], memory: Tensor, replays: Replays, settings: Settings) -> None:
        """Tables that take other turns may share `memory`, and the `replays` of work on it."""
        self._stacks: list[tuple[Bucket, Stack]] = []
        self._replays, shares, workspace_bytes = replays, Shares(), settings.workspace_bytes
        self._left = max(0, workspace_bytes - len(memory))
        begin = 0
        for bucket in (bucket for bucket in buckets if bucket.program.stages):
            workspaces: list[list[Tensor]] = [[] for _ in range(2 * len(bucket.program.stages))]
            for first, rows in _alike(bucket):
                sizes = _sizes(bucket.program.stages, rows)
                for i, (staged, size) in enumerate(zip(bucket.program.stages, sizes, strict=True)):
                    stack = Stack(staged, rows, first, memory[begin : begin + size])
                    stack.share(shares, settings.replicas)
                    self._stacks.append((bucket, stack))
                    workspaces[2 * i] += stack.source
                    workspaces[2 * i + 1] += stack.target
                    begin += size
            bucket.lend_workspaces(workspaces)
        for _, stack in self._stacks:
            stack.try_out(self._left)

    def run(self, k: int, status: Tensor) -> None:
        """Run the stages that come after sweep `k`."""
        stacks = [(bucket, stack) for bucket, stack in self._stacks if stack.after == k]
        live = {id(bucket): bucket.live for bucket, _ in stacks}
        for bucket, stack in stacks:
            stack.begin(live[id(bucket)])
        for _, stack in stacks:
            stack.work(self._replays, self._left)
        skip = status[SKIP] != 0
        for bucket, stack in stacks:
            stack.end(bucket, skip)
