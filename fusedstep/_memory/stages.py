"""Stages of a table: work on whole tensors between its sweeps.

What a stage works on lies in a workspace, tensors of one shape behind each other: it works on such a stack at
once. The workspace is bounded. Where it does not hold all tensors, these take turns: each turn is a table of
its own, which takes all of its sweeps before the next one begins, in the same memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import Tensor

from .._algorithm.program import Staged
from . import shards
from .bucket import Bucket
from .replay import Replays
from .row import Row

# where every stack begins, in bytes
_ALIGNMENT = 512


def take_turns(rows: Sequence[Row], workspace_bytes: int) -> None:
    """Have rows take turns, so that what stages work on fits into half of the workspace, if it can be."""
    used: dict[tuple, int] = {}
    # those of one shape together: they are worked on together
    for row in sorted((row for row in rows if row.program.stages), key=lambda row: (*row.param.shape,)):
        row.turn = max((turn for *_, turn in used), default=0)
        before, need = used.get(row.table_key, 0), sum(_sizes(row.program.stages, [row]))
        if before and before + need > workspace_bytes // 2:
            row.turn += 1
        used[row.table_key] = used.get(row.table_key, 0) + need


def _sizes(stages: Sequence[Staged], rows: list[Row]) -> Iterator[int]:
    """Bytes that each stage needs for the tensors of these rows."""
    for staged in stages:
        size = sum(shards.local(row.param).numel() for row in rows)
        size *= rows[0].program.planes[staged.source].dtype.itemsize
        yield -(-size // _ALIGNMENT) * _ALIGNMENT


def _alike(bucket: Bucket) -> Iterator[tuple[int, list[Row]]]:
    """Rows of one shape that follow each other, and the place of the first of them in its bucket."""
    first = 0
    for _, same in groupby(bucket.rows, key=lambda row: (row.param.shape, shards.local(row.param).shape)):
        rows = [*same]
        yield first, rows
        first += len(rows)


def needed_memory(buckets: list[Bucket]) -> int:
    """Bytes of what the stages of these buckets work on."""
    return sum(sum(_sizes(b.program.stages, rows)) for b in buckets for _, rows in _alike(b))


class Stack:
    """Tensors of one shape that a stage works on together."""

    def __init__(self, staged: Staged, rows: list[Row], first: int, memory: Tensor) -> None:
        """Of consecutive rows of a bucket, beginning with its row `first`; the memory has room for more."""
        self.after, self._stage, self._first = staged.after, staged.stage, first
        shape = len(rows), *shards.local(rows[0].param).shape
        numel = len(rows) * shards.local(rows[0].param).numel()
        dtypes = (rows[0].program.planes[place].dtype for place in (staged.source, staged.target))
        self.source, self.target = (memory.view(dtype)[:numel].view(shape) for dtype in dtypes)

    def run(self, bucket: Bucket, replays: Replays, workspace_bytes: int) -> None:
        """Work on those rows of their bucket that have a gradient."""
        mine = [i - self._first for i in bucket.live if 0 <= i - self._first < len(self.source)]
        rows = bucket.rows
        # slices instead of an index, which would have to be brought to the device
        for _, run in groupby(enumerate(mine), key=lambda at: at[1] - at[0]):
            places = [i for _, i in run]
            part = slice(places[0], places[-1] + 1)
            work = functools.partial(self._stage.run, self.source[part], self.target[part], workspace_bytes)
            replays.run((self, part.start, part.stop), work)
            self._stage.finish(self.target[part], [rows[self._first + i].state for i in places], None)


class Stages:
    """What the stages of a table work on, and what comes after each sweep."""

    def __init__(self, buckets: list[Bucket], memory: Tensor, replays: Replays, workspace_bytes: int) -> None:
        """The memory, and what is replayed there, may be those of others, too, which take other turns."""
        self._stacks: list[tuple[Bucket, Stack]] = []
        self._replays = replays
        self._left = max(0, workspace_bytes - len(memory))
        begin = 0
        for bucket in (bucket for bucket in buckets if bucket.program.stages):
            workspaces: list[list[Tensor]] = [[] for _ in range(2 * len(bucket.program.stages))]
            for first, rows in _alike(bucket):
                sizes = _sizes(bucket.program.stages, rows)
                for i, (staged, size) in enumerate(zip(bucket.program.stages, sizes, strict=True)):
                    stack = Stack(staged, rows, first, memory[begin : begin + size])
                    self._stacks.append((bucket, stack))
                    workspaces[2 * i] += stack.source
                    workspaces[2 * i + 1] += stack.target
                    begin += size
            bucket.lend_workspaces(workspaces)

    def run(self, k: int) -> None:
        """What comes after sweep `k`."""
        for bucket, stack in self._stacks:
            if stack.after == k:
                stack.run(bucket, self._replays, self._left)
