"""The rows of a table that one launch updates, and what every step asks of their tensors.

Parameters, gradients and states may be re-allocated, replaced or changed in place at will, so each is looked at
before every step. Parameters and states mostly stay: see `kept.py`. Gradients come and go: a row without one is
switched off, and one that is there must be of the kind that the row was made for. A row that is not what it was
made for is made anew, by the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._algorithm.program import Scalars, StepSpec
from .._algorithm.step import GRAD, PARAM
from .._engines import ABSENT, CHANGED, FIRST_POINTER, LIVE, NUMEL, OTHER, SAME, UNMASKED_NUMEL
from . import shards, watch
from .kept import Kept, parts_of
from .row import Row, Settings

_grad = attrgetter("grad")


class Changes(NamedTuple):
    """Rows with a parameter or state of another kind, with such a gradient, and with their counts elsewhere."""

    kept: list[int]
    grads: list[int]
    recounted: list[int]


class Bucket:
    """The rows of a table that share a program: what one launch updates."""

    def __init__(self, rows: list[Row], first_row: int, cells: np.ndarray) -> None:
        self.rows, self.first_row, self.end_row, self._cells = rows, first_row, first_row + len(rows), cells
        self.program, self.engine = rows[0].program, rows[0].engine
        self.numels = np.array([row.numel for row in rows], np.int64)
        size = self.engine.chunk(self.program)
        self._in_full_chunks = self.numels // size * size
        # rows that have a gradient, and whether the cells are to be brought to the device
        self.live: list[int] = []
        self.cells_changed = True
        # tensors of the live rows by plane, during a step of an engine that works on tensors
        self.tensors: list[list[Tensor]] = []
        # what stages work on, of every row
        self._workspaces: list[list[Tensor]] = []
        self._params = [row.param for row in rows]
        self._states = len(self.program.state_planes)
        self._has_explicit_grads = any(row.explicit_grad is not None for row in rows)
        distributed = shards.are_distributed(self._params)
        self._any_distributed, self._all_distributed = any(distributed), all(distributed)
        self.has_staged = False
        # of every row: a gradient of the kind that it was made for, or none
        self._look_at_grads = _look_at_grads([watch.NOTHING] * len(rows))
        self.forget()

    def forget(self) -> None:
        """Look at everything anew the next time."""
        self._is_settled = self._saw_grads = False
        # parameters and states of the rows that have started, if any has
        self._kept: Kept | None = None
        self._started: list[int] = []
        self._grads_are_noted = False
        self._grad_specs: list[Any] = []

    # asked at every step

    def refresh(self) -> bool:
        """Write where everything is now; False if rows must be looked at one by one, and settled again."""
        if not self._is_settled:
            return False
        parts = [] if self._kept is None else self._kept.look()
        grads = self._find_grads()
        self._saw_grads = grads is not None
        found = CHANGED if grads is None else self._look_at_grads(grads)
        self._grads_are_noted = self._grads_are_noted and found == SAME
        if parts is None or grads is None or found == CHANGED:
            return False
        if self._kept is not None and not self._kept.is_noted:
            self._write_kept(self._kept)
        if not self._grads_are_noted:
            self._write_grads()
        if not self.engine.BY_ADDRESS:
            self._lend_tensors(parts, grads)
        return True

    def _find_grads(self) -> list[Any] | None:
        """The parts of gradients that are here, or None for one that is missing; None if one is distributed
        otherwise than its parameter.
        """
        grads = [row.grad for row in self.rows] if self._has_explicit_grads else [*map(_grad, self._params)]
        if not self._any_distributed:
            return grads
        there = [i for i, grad in enumerate(grads) if grad is not None]
        if len(there) == len(grads):
            alike = self._distributed_alike(self._params, grads)
            return parts_of(grads, self._all_distributed) if alike else None
        found = [grads[i] for i in there]
        if not self._distributed_alike([self._params[i] for i in there], found):
            return None
        for i, part in zip(there, parts_of(found, self._all_distributed), strict=True):
            grads[i] = part
        return grads

    def _distributed_alike(self, params: list[Tensor], grads: list[Any]) -> bool:
        """Whether gradients are distributed as their parameters are."""
        specs = shards.specs_of(grads)
        if len(specs) == len(self._grad_specs) and all(map(is_, specs, self._grad_specs)):
            return True
        if not all(map(shards.lies_alike, params, grads)):
            return False
        # objects that say nothing are no proof for the next time
        self._grad_specs = specs if self._all_distributed else []
        return True

    def _write_kept(self, kept: Kept) -> None:
        """Where the parameters and states of started rows are."""
        addresses, started = kept.address_table(), self._started
        for k, i in enumerate(started if self.has_staged else ()):
            copy = self.rows[i].param_copy
            if copy is not None:
                addresses[k, PARAM] = copy.data_ptr()
        first_state = FIRST_POINTER + GRAD + 1
        self._cells[started, FIRST_POINTER + PARAM] = addresses[:, 0]
        self._cells[started, first_state : first_state + self._states] = addresses[:, 1:]
        self._alignments[started] = np.bitwise_or.reduce(addresses, axis=1)
        kept.is_noted = True
        # what is aligned now is written with the gradients
        self._grads_are_noted = False

    def _write_grads(self) -> None:
        """Where the gradients are, and which rows they switch on."""
        found = self._look_at_grads.addresses.copy()
        is_live = found != ABSENT
        self.live = np.flatnonzero(is_live).tolist()
        for i in self.live if self.has_staged else ():
            copy = self.rows[i].grad_copy
            if copy is not None:
                found[i] = copy.data_ptr()
        cells = self._cells
        cells[:, LIVE], cells[:, NUMEL] = is_live, is_live * self.numels
        cells[:, FIRST_POINTER + GRAD] = found
        cells[:, UNMASKED_NUMEL] = is_live * self._unmasked(found | self._alignments)
        self._grads_are_noted = self.cells_changed = True

    def _unmasked(self, addresses: np.ndarray) -> np.ndarray:
        """How many elements are moved sixteen bytes at a time: none where an address is not aligned."""
        return np.where(addresses & 15, 0, self._in_full_chunks)

    def _lend_tensors(self, parts: list[Tensor], grads: list[Any]) -> None:
        """To the engine, for one step."""
        count, started = len(self._started), self._started
        columns = [parts[:count], *(parts[k :: self._states] for k in range(count, count + self._states))]
        if count < len(self.rows):
            places = {i: k for k, i in enumerate(started)}
            columns = [[column[places[i]] for i in self.live] for column in columns]
        else:
            columns = [*map(self._of_live, columns)]
        columns.insert(GRAD, self._of_live(grads))
        if self.has_staged:
            rows = self.live_rows
            columns[PARAM] = _standing_in(columns[PARAM], [row.param_copy for row in rows])
            columns[GRAD] = _standing_in(columns[GRAD], [row.grad_copy for row in rows])
        self.tensors = columns + [*map(self._of_live, self._workspaces)]

    def _of_live(self, items: list[Any]) -> list[Any]:
        return items if len(self.live) == len(items) else [items[i] for i in self.live]

    # asked where something has changed

    def find_changes(self) -> Changes:
        """After `refresh` has said no."""
        kept = ([], []) if self._kept is None else self._kept.find_changes()
        if not self._is_settled or not self._saw_grads or kept is None:
            everything = [*range(len(self.rows))]
            return Changes(everything, everything, [])
        of_grads = np.flatnonzero(self._look_at_grads.addresses == OTHER).tolist()
        changed, recounted = ([self._started[k] for k in places] for places in kept)
        return Changes(changed, of_grads, recounted)

    def stale_rows(self, changes: Changes, settings: Settings) -> list[int]:
        """Rows that cannot go on with what they have now; one without a gradient is made later."""
        for row in (self.rows[i] for i in changes.kept):
            row.started = row.started and row.keeps()
        for row in (self.rows[i] for i in changes.grads):
            if row.started and not row.takes(row.grad):
                row.started = row.adapt(settings)
        changed = sorted({*changes.kept, *changes.grads})
        return [i for i in changed if not self.rows[i].started and self.rows[i].grad is not None]

    def follow_states(self) -> None:
        """After rows were given other state dicts."""
        if self._kept is not None:
            self._kept.states = [self.rows[i].state for i in self._started]

    def start(self) -> None:
        """Settle rows that have just been made, and write where everything is."""
        self.settle()
        if not self.refresh():
            raise RuntimeError("a parameter changed while its step was prepared; is another thread at work?")

    def settle(self, changed: Sequence[int] | None = None) -> None:
        """Note the parameters and states of all started rows, and what their gradients will be; if only these
        rows have changed, of these.
        """
        self._started = [i for i, row in enumerate(self.rows) if row.started]
        rows = [self.rows[i] for i in self._started]
        self.has_staged = any(row.param_copy is not None or row.grad_copy is not None for row in rows)
        self._kept = Kept(rows) if rows else None
        self._alignments = np.zeros(len(self.rows), np.int64)
        kinds = {i: self._kind_of_grad(i) for i in changed or ()}
        if changed is None or not self._is_settled or not self._look_at_grads.expect(kinds):
            kinds_of_all = [*map(self._kind_of_grad, range(len(self.rows)))]
            self._look_at_grads = _look_at_grads(kinds_of_all)
        self._is_settled, self._grads_are_noted = True, False

    def _kind_of_grad(self, i: int) -> watch.Kind:
        row = self.rows[i]
        return row.kinds[GRAD] if row.started else watch.NOTHING

    # during a step

    @property
    def live_rows(self) -> list[Row]:
        return self._of_live(self.rows)

    @property
    def staged(self) -> list[Row]:
        """Live rows that work on copies."""
        return [row for row in self.live_rows if row.staged] if self.has_staged else []

    def local_grads(self) -> list[Tensor]:
        return [shards.local(row.grad) for row in self.live_rows]

    def count_writes(self, spec: StepSpec) -> None:
        """Tell autograd that the parameters were written, and gradients if they were cleared."""
        if self.live:
            torch.autograd.graph.increment_version(self._of_live(self._params))
        if self.live and spec.zero_grads:
            torch.autograd.graph.increment_version([row.grad for row in self.live_rows])

    def scalars(self, k: int) -> Scalars | None:
        """What is computed for its rows before sweep `k`, if anything."""
        return self.program.sweeps[k].scalars if k < len(self.program.sweeps) else None

    def folds(self, k: int) -> tuple[int, tuple[str, ...]] | None:
        """The first row of the sums of sweep `k`, and how each is summed; None if it has no such sweep."""
        if k >= len(self.program.sweeps):
            return None
        sweep = self.program.sweeps[k]
        return sweep.first_fold, tuple(fold.kind for fold in sweep.folds)

    def release(self) -> None:
        """Let go of all tensors; what is left are their addresses and how they are stored."""
        for row in self.rows:
            row.param, row.state, row.explicit_grad, row.fresh = None, {}, None, {}  # type: ignore[assignment]
        self.forget()
        self._params, self.tensors, self.has_staged = [], [], False

    def write_addresses(self, addresses: np.ndarray) -> None:
        """Where the tensors of all rows are, by plane, if somebody else has asked."""
        self._cells[:, UNMASKED_NUMEL] = self._unmasked(np.bitwise_or.reduce(addresses, axis=1))
        self._cells[:, FIRST_POINTER : FIRST_POINTER + addresses.shape[1]] = addresses
        self.cells_changed = True

    def lend_workspaces(self, tensors: list[list[Tensor]]) -> None:
        """Have rows work with these, which come after all other planes."""
        first = FIRST_POINTER + len(self.program.planes) - len(tensors)
        for k, column in enumerate(tensors if self.engine.BY_ADDRESS else ()):
            self._cells[:, first + k] = [*map(Tensor.data_ptr, column)]
        self._workspaces = tensors


def _look_at_grads(kinds: list[watch.Kind]) -> watch.Look:
    return watch.Look(kinds, absent=ABSENT, changes_sign=True)


def _standing_in(tensors: list[Tensor], copies: list[Tensor | None]) -> list[Tensor]:
    """Stand-ins of these tensors, and those that have none themselves."""
    return [t if copy is None else copy for t, copy in zip(tensors, copies, strict=True)]
