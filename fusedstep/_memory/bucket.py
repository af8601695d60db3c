"""The rows of a table that one launch updates, and what every step asks of their tensors.

Parameters, gradients and states may be re-allocated, replaced or changed in place at will, so each is looked at
before every step. Parameters and states mostly stay: see `kept.py`. Gradients come and go: a row without one is
switched off, and one that is there must be of the kind that the row was made for. A row that is not what it was
made for is made anew, by the plan.
"""

from __future__ import annotations

from array import array
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._algorithm.program import Scalars, StepSpec
from .._algorithm.step import GRAD, PARAM
from .._engines import FIRST_POINTER, LIVE, NUMEL, UNMASKED_NUMEL
from . import shards, watch
from .kept import Kept, parts_of
from .row import Row, Settings

_grad = attrgetter("grad")
# rows that are looked at together: few enough that their tensors are still in the cache at the next question,
# and that to note them anew takes little
_BLOCK = 64


class Block:
    """Consecutive rows of a bucket, with their cells in the table."""

    def __init__(self, rows: list[Row], first_row: int, cells: np.ndarray, numels: np.ndarray) -> None:
        self.rows, self.first_row, self.cells = rows, first_row, cells
        # rows that have a gradient, and whether the cells are to be brought to the device
        self.live: list[int] = []
        self.cells_changed = True
        # tensors of the live rows by plane, during a step of an engine that works on tensors
        self.tensors: list[list[Tensor]] = []
        # what stages work on, of every row
        self.workspaces: list[list[Tensor]] = []
        self._params = [row.param for row in rows]
        self._everything = [*range(len(rows))]
        self._numels, self._engine, self._states = numels, rows[0].engine, len(rows[0].program.state_planes)
        self._full = _in_full_chunks(numels, rows[0])
        self._has_explicit_grads = any(row.explicit_grad is not None for row in rows)
        self._are_distributed = [*map(shards.is_distributed, self._params)]
        self._any_distributed = any(self._are_distributed)
        self.forget()

    def forget(self) -> None:
        """Look at everything anew the next time."""
        self._is_settled, self._kept_changed = False, True
        # parameters and states of the rows that have started, if any has
        self._kept: Kept | None = None
        self._kept_addresses: list[int] = []
        self._forget_grads()

    def _forget_grads(self) -> None:
        self._check_grads = watch.Kinds([])
        self._grad_addresses: list[int] | None = None
        self._grad_specs: list[Any] = []

    # asked at every step

    def refresh(self) -> bool:
        """Write where everything is now; False if rows must be looked at one by one, and settled again."""
        grads = [row.grad for row in self.rows] if self._has_explicit_grads else [*map(_grad, self._params)]
        parts = self._kept.look() if self._kept is not None else []
        self._kept_changed = not self._is_settled or parts is None
        if parts is None or self._kept_changed:
            return False
        if self._kept is not None:
            if self._kept.counts_elsewhere:
                return False
            if self._kept.addresses != self._kept_addresses:
                self._write_kept(self._kept)
        if not self._place_grads(grads):
            return False
        if not self._engine.BY_ADDRESS:
            self._lend_tensors(parts)
        return True

    def _write_kept(self, kept: Kept) -> None:
        """Where the parameters and states of started rows are."""
        addresses = kept.address_table()
        for k, i in enumerate(self._started if self._has_staged else ()):
            copy = self.rows[i].param_copy
            if copy is not None:
                addresses[k, PARAM] = copy.data_ptr()
        first_state = FIRST_POINTER + GRAD + 1
        self.cells[self._started, FIRST_POINTER + PARAM] = addresses[:, 0]
        self.cells[self._started, first_state : first_state + self._states] = addresses[:, 1:]
        self._alignments = np.zeros(len(self.rows), np.int64)
        self._alignments[self._started] = np.bitwise_or.reduce(addresses, axis=1)
        self._kept_addresses = kept.addresses
        # what is aligned now is written with the gradients
        self._grad_addresses = self._grad_addresses and []
        self.cells_changed = True

    def _place_grads(self, grads: list[Any]) -> bool:
        is_full = len(self.live) == len(grads) and not self._any_distributed
        # None is of no tensor's kind
        if not (is_full and self._check_grads.in_one_call(grads)):
            if not self._switch(grads):
                return False
            grads = self._of_live(grads)
            if self._any_distributed:
                if not self._distributed_alike(grads):
                    return False
                grads = parts_of(grads, all(self._are_distributed))
            if not self._check_grads(grads):
                return False
        if not self._engine.BY_ADDRESS:
            self.tensors = [grads]
            return True
        addresses = [*map(watch.address, grads)]
        if addresses != self._grad_addresses:
            self._write_grads(addresses)
        return True

    def _lend_tensors(self, parts: list[Tensor]) -> None:
        """To the engine, for one step, with the gradients that it has."""
        count = len(self._started)
        columns = [parts[:count], *(parts[k :: self._states] for k in range(count, count + self._states))]
        if count < len(self.rows):
            places = {i: k for k, i in enumerate(self._started)}
            columns = [[column[places[i]] for i in self.live] for column in columns]
        else:
            columns = [*map(self._of_live, columns)]
        self.tensors = [columns[0], *self.tensors, *columns[1:], *map(self._of_live, self.workspaces)]

    def _switch(self, grads: list[Any]) -> bool:
        """Switch on the rows that have a gradient, and the others off; False if one of them has not started."""
        # not `None in grads`, which would compare tensors
        if any(map(is_, grads, repeat(None))):
            live = [*compress(self._everything, map(is_not, grads, repeat(None)))]
        else:
            live = self._everything
        if len(self._started) < len(self.rows) and not {*live} <= {*self._started}:
            return False
        if live != self.live or self._grad_addresses is None:
            self.live = live
            self._forget_grads()
            self._check_grads = watch.Kinds([self.rows[i].checks[GRAD] for i in live])
            is_live = np.zeros(len(grads), np.int64)
            is_live[live] = 1
            self.cells[:, LIVE], self.cells[:, NUMEL] = is_live, is_live * self._numels
            self.cells[:, UNMASKED_NUMEL] = 0
            self._grad_addresses = []
            self.cells_changed = True
        return True

    def _of_live(self, items: list[Any]) -> list[Any]:
        return items if len(self.live) == len(items) else [items[i] for i in self.live]

    def _distributed_alike(self, grads: list[Any]) -> bool:
        """Whether gradients are distributed as their parameters are."""
        specs = [*map(shards.spec_of, grads)]
        if len(specs) == len(self._grad_specs) and all(map(is_, specs, self._grad_specs)):
            return True
        if not all(map(shards.lies_alike, self._of_live(self._params), grads)):
            return False
        # objects that say nothing are no proof for the next time
        self._grad_specs = specs if all(self._are_distributed) else []
        return True

    def _write_grads(self, addresses: list[int]) -> None:
        # by way of an array, three times as fast as what numpy makes of a list
        found = np.frombuffer(array("q", addresses), np.int64)
        if self._has_staged:
            copies = ((at, self.rows[i].grad_copy) for at, i in enumerate(self.live))
            for at, copy in ((at, copy) for at, copy in copies if copy is not None):
                found[at] = copy.data_ptr()
        live: Any = slice(None) if len(self.live) == len(self.rows) else self.live
        self.cells[live, FIRST_POINTER + GRAD] = found
        self.cells[live, UNMASKED_NUMEL] = _unmasked(self._full[live], found | self._alignments[live])
        self._grad_addresses = addresses
        self.cells_changed = True

    # asked where something has changed

    @property
    def places(self) -> range:
        """Of its rows in the table."""
        return range(self.first_row, self.first_row + len(self.rows))

    def stale_rows(self, settings: Settings) -> list[int]:
        """After `refresh` has said no: rows that cannot go on with what they have now. One without a gradient
        is made with its next one.
        """
        for row in self.rows:
            if row.started and self._kept_changed:
                row.started = row.is_right()
            elif row.started and not row.takes(row.grad):
                row.started = row.adapt(settings)
        return [i for i, row in enumerate(self.rows) if not row.started and row.grad is not None]

    def follow_states(self) -> None:
        """After rows were given other state dicts."""
        if self._kept is not None:
            self._kept.states = [self.rows[i].state for i in self._started]

    def settle(self) -> None:
        """Note the parameters and states of all started rows, and write where these are."""
        self.forget()
        self._started = [i for i, row in enumerate(self.rows) if row.started]
        rows = [self.rows[i] for i in self._started]
        self._has_staged, self._is_settled = any(row.staged for row in rows), True
        self._kept = Kept(rows) if rows else None

    # during a step

    @property
    def live_rows(self) -> list[Row]:
        return self._of_live(self.rows)

    @property
    def staged(self) -> list[Row]:
        """Live rows that work on copies."""
        return [row for row in self.live_rows if row.staged] if self._has_staged else []

    def count_writes(self, spec: StepSpec) -> None:
        """Tell autograd that the parameters were written, and gradients if they were cleared."""
        if self.live:
            torch.autograd.graph.increment_version(self._of_live(self._params))
        if self.live and spec.zero_grads:
            torch.autograd.graph.increment_version([row.grad for row in self.live_rows])

    def release(self) -> None:
        """Let go of all tensors; what is left are their addresses and how they are stored."""
        self.forget()
        self._params, self.tensors, self._has_staged = [], [], False
        for row in self.rows:
            row.param, row.state, row.explicit_grad, row.fresh = None, {}, None, {}  # type: ignore[assignment]


def _in_full_chunks(numels: np.ndarray, row: Row) -> np.ndarray:
    size = row.engine.chunk(row.program)
    return numels // size * size


def _unmasked(in_full_chunks: np.ndarray, addresses: np.ndarray) -> np.ndarray:
    """How many elements are read and written sixteen bytes at a time: none where an address is not aligned."""
    return np.where(addresses & 15, 0, in_full_chunks)


class Bucket:
    """The rows of a table that share a program: what one launch updates."""

    def __init__(self, rows: list[Row], first_row: int, cells: np.ndarray) -> None:
        self.first_row, self.end_row, self.cells = first_row, first_row + len(rows), cells
        self.program, self.engine = rows[0].program, rows[0].engine
        self.numels = np.array([row.numel for row in rows], np.int64)
        firsts = range(0, len(rows), _BLOCK)
        self.blocks = [
            Block(rows[i : i + _BLOCK], first_row + i, cells[i : i + _BLOCK], self.numels[i : i + _BLOCK])
            for i in firsts
        ]

    @property
    def rows(self) -> list[Row]:
        return [*chain.from_iterable(block.rows for block in self.blocks)]

    def scalars(self, k: int) -> Scalars | None:
        """What is computed for its rows before sweep `k`, if anything."""
        return self.program.sweeps[k].scalars if k < len(self.program.sweeps) else None

    def folds(self, k: int) -> tuple[int, tuple[str, ...]] | None:
        """The first row of the sums of sweep `k`, and how each is summed; None if it has no such sweep."""
        if k >= len(self.program.sweeps):
            return None
        sweep = self.program.sweeps[k]
        return sweep.first_fold, tuple(fold.kind for fold in sweep.folds)

    @property
    def live(self) -> list[int]:
        """The rows that have a gradient."""
        return [block.first_row - self.first_row + i for block in self.blocks for i in block.live]

    @property
    def live_rows(self) -> list[Row]:
        return [*chain.from_iterable(block.live_rows for block in self.blocks)]

    @property
    def staged(self) -> list[Row]:
        """Those of them that work on copies."""
        return [*chain.from_iterable(block.staged for block in self.blocks)]

    @property
    def tensors(self) -> list[list[Tensor]]:
        """Tensors of the live rows by plane, during a step of an engine that works on tensors."""
        lent = [block.tensors for block in self.blocks if block.tensors]
        return [[*chain.from_iterable(column)] for column in zip(*lent, strict=True)]

    @property
    def cells_changed(self) -> bool:
        return any(block.cells_changed for block in self.blocks)

    def settle(self) -> None:
        """Note and write where all tensors of rows are that have just been made."""
        for block in self.blocks:
            block.settle()
            if not block.refresh():
                raise RuntimeError(
                    "a parameter changed while its step was prepared; is another thread at work?"
                )

    def release(self) -> None:
        for block in self.blocks:
            block.release()

    def write_addresses(self, addresses: np.ndarray) -> None:
        """Where the tensors of all rows are, by plane, if somebody else has asked."""
        in_full_chunks = _in_full_chunks(self.numels, self.blocks[0].rows[0])
        self.cells[:, UNMASKED_NUMEL] = _unmasked(in_full_chunks, np.bitwise_or.reduce(addresses, axis=1))
        self.cells[:, FIRST_POINTER : FIRST_POINTER + addresses.shape[1]] = addresses
        self.note_upload(False)

    def lend_workspaces(self, tensors: list[list[Tensor]]) -> None:
        """Have rows work with these, which come after all other planes."""
        first = FIRST_POINTER + len(self.program.planes) - len(tensors)
        for k, column in enumerate(tensors if self.engine.BY_ADDRESS else ()):
            self.cells[:, first + k] = [*map(Tensor.data_ptr, column)]
        for i, block in zip(range(0, self.end_row - self.first_row, _BLOCK), self.blocks, strict=True):
            block.workspaces = [column[i : i + _BLOCK] for column in tensors]

    def note_upload(self, done: bool) -> None:
        """Whether the cells are on the device as they are here."""
        for block in self.blocks:
            block.cells_changed = not done

    def local_grads(self) -> list[Tensor]:
        return [shards.local(row.grad) for row in self.live_rows]
