"""The rows of a table that one launch updates, and the check of their tensors before every step.

Parameters, gradients and states may be re-allocated, replaced or changed in place at will, so every step checks
each of them. Parameters and states mostly stay: see `kept.py`. Gradients come and go: a row without a gradient
is switched off. If a tensor no longer has the kind that its row was made for, the plan makes the row again.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._algorithm.program import Scalars, StepSpec
from .._algorithm.step import GRAD, PARAM
from .._engines import ABSENT, CHANGED, FIRST_POINTER, LIVE, NUMEL, OTHER, PLAIN_TYPES, SAME, UNMASKED_NUMEL
from .._engines.objects import same
from . import shards, watch
from .kept import Kept, parts_of
from .row import Row
from .settings import Settings

_grad = attrgetter("grad")
# torch's getters look for a __torch_function__ of every subclass, which takes as long as all else, unless told
# that there is none
_without_overrides = getattr(torch._C, "DisableTorchFunctionSubclass", contextlib.nullcontext)
_NO_OVERRIDE = torch.nn.Parameter.__torch_function__


class Changes(NamedTuple):
    """Rows whose parameter or a state has another kind, whose gradient has, and whose count was replaced."""

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
        # rows that have a gradient, and whether the cells must be copied to the device
        self.live: list[int] = []
        self.cells_changed = True
        # tensors of the live rows by plane, during a step of an engine that works on tensors
        self.tensors: list[list[Tensor]] = []
        # workspaces of stages: lists with a tensor for every row
        self._workspaces: list[list[Tensor]] = []
        self._params = [row.param for row in rows]
        self._states = len(self.program.state_planes)
        self._has_explicit_grads = any(row.explicit_grad is not None for row in rows)
        distributed = shards.are_distributed(self._params)
        self._any_distributed, self._all_distributed = any(distributed), all(distributed)
        self._subclasses: Any = {*map(type, self._params)} - PLAIN_TYPES
        # gradients of the rows during a step: a getter of `grad` may have made them just for it
        self._grads: list[Any] | None = None
        self.has_stand_ins = False
        # every row expects a gradient of the kind that it was made for, or none
        self._look_at_grads = _look_at_grads([watch.NOTHING] * len(rows))
        self.forget()

    def forget(self) -> None:
        """Check everything at the next step, as if nothing were known."""
        self._is_settled = self._saw_grads = False
        # parameters and states of the rows that have started, if any has
        self._kept: Kept | None = None
        self._started: list[int] = []
        self._grads_are_noted = False
        # specs of gradients that are distributed as their parameters are
        self._grad_specs: list[Any] = [None] * len(self.rows)
        # whether all lent tensors are known to be plain
        self.is_plain = False

    # at every step

    def refresh(self) -> bool:
        """Write the addresses that have changed; False if rows must be checked one by one and settled again."""
        if not self._is_settled:
            return False
        parts = [] if self._kept is None else self._kept.look()
        self._grads = grads = self._find_grads()
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
        """The local parts of gradients, None for a missing one. None instead of the list if a gradient is not
        distributed as its parameter is.
        """
        if self._has_explicit_grads:
            grads = [row.grad for row in self.rows]
        elif self._subclasses and all(map(_has_plain_grads, self._subclasses)):
            grads = _grads_of_subclasses(self._params)
        else:
            grads = [*map(_grad, self._params)]
        if not self._any_distributed:
            return grads
        specs = shards.specs_of(grads)
        if not same(specs, self._grad_specs) and not self._are_alike(grads, specs):
            return None
        return parts_of(grads, self._all_distributed)

    def _are_alike(self, grads: list[Any], specs: list[Any]) -> bool:
        """Whether gradients are distributed as their parameters are."""
        known = self._grad_specs
        new = [i for i, g in enumerate(grads) if g is not None and specs[i] is not known[i]]
        if not all(shards.lies_alike(self._params[i], grads[i]) for i in new):
            return False
        for i in new:
            known[i] = specs[i]
        return True

    def _write_kept(self, kept: Kept) -> None:
        """Write the addresses of parameters and states of started rows."""
        addresses, started = kept.address_table(), self._started
        for k, i in enumerate(started if self.has_stand_ins else ()):
            copy = self.rows[i].param_copy
            if copy is not None:
                addresses[k, PARAM] = copy.data_ptr()
        first_state = FIRST_POINTER + GRAD + 1
        self._cells[started, FIRST_POINTER + PARAM] = addresses[:, 0]
        self._cells[started, first_state : first_state + self._states] = addresses[:, 1:]
        self._alignments[started] = np.bitwise_or.reduce(addresses, axis=1)
        kept.is_noted = True
        # gradients are written together with alignments, which may have changed
        self._grads_are_noted = False

    def _write_grads(self) -> None:
        """Write the addresses of gradients, and which rows are live."""
        found = self._look_at_grads.addresses.copy()
        is_live = found != ABSENT
        self.live = np.flatnonzero(is_live).tolist()
        for i in self.live if self.has_stand_ins else ():
            copy = self.rows[i].grad_copy
            if copy is not None:
                found[i] = copy.data_ptr()
        cells = self._cells
        cells[:, LIVE], cells[:, NUMEL] = is_live, is_live * self.numels
        cells[:, FIRST_POINTER + GRAD] = found
        cells[:, UNMASKED_NUMEL] = is_live * self._unmasked(found | self._alignments)
        self._grads_are_noted = self.cells_changed = True

    def _unmasked(self, addresses: np.ndarray) -> np.ndarray:
        """How many elements are moved sixteen bytes at a time: none if an address is not aligned."""
        return np.where(addresses & 15, 0, self._in_full_chunks)

    def _lend_tensors(self, parts: list[Tensor], grads: list[Any]) -> None:
        """Have the tensors of live rows in `tensors`, where the engine finds them, for one step."""
        count, started = len(self._started), self._started
        columns = [parts[:count], *(parts[k :: self._states] for k in range(count, count + self._states))]
        if count < len(self.rows):
            places = {i: k for k, i in enumerate(started)}
            columns = [[column[places[i]] for i in self.live] for column in columns]
        else:
            columns = [*map(self._of_live, columns)]
        columns.insert(GRAD, self._of_live(grads))
        if self.has_stand_ins:
            rows = self.live_rows
            columns[PARAM] = _or_stand_ins(columns[PARAM], [row.param_copy for row in rows])
            columns[GRAD] = _or_stand_ins(columns[GRAD], [row.grad_copy for row in rows])
        self.tensors = columns + [*map(self._of_live, self._workspaces)]

    def _of_live(self, items: list[Any]) -> list[Any]:
        return items if len(self.live) == len(items) else [items[i] for i in self.live]

    # after a change

    def find_changes(self) -> Changes:
        """What has changed, after `refresh` has returned False."""
        kept = ([], []) if self._kept is None else self._kept.find_changes()
        if not self._is_settled or not self._saw_grads or kept is None:
            everything = [*range(len(self.rows))]
            return Changes(everything, everything, [])
        of_grads = np.flatnonzero(self._look_at_grads.addresses == OTHER).tolist()
        changed, recounted = ([self._started[k] for k in places] for places in kept)
        return Changes(changed, of_grads, recounted)

    def stale_rows(self, changes: Changes, settings: Settings) -> list[int]:
        """Rows that must be made again for the tensors they have now; a row without a gradient can wait."""
        for row in (self.rows[i] for i in changes.kept):
            row.started = row.started and row.keeps()
        for row in (self.rows[i] for i in changes.grads):
            if row.started and not row.takes(row.grad):
                row.started = row.adapt(settings)
        changed = sorted({*changes.kept, *changes.grads})
        return [i for i in changed if not self.rows[i].started and self.rows[i].grad is not None]

    def follow_states(self) -> None:
        """Take over the state dicts of rows, which were replaced."""
        if self._kept is not None:
            self._kept.states = [self.rows[i].state for i in self._started]

    def start(self) -> None:
        """Settle rows that have just been made, and write all addresses."""
        self.settle()
        if not self.refresh():
            raise RuntimeError("a parameter changed while its step was prepared; is another thread at work?")

    def settle(self, changed: Sequence[int] | None = None) -> None:
        """Note the parameters and states of all started rows, and the kinds of gradients that are expected; if
        only some rows have `changed`, do so for these.
        """
        if changed is None or not all(map(self._note_started, changed)):
            self._started = [i for i, row in enumerate(self.rows) if row.started]
            rows = [self.rows[i] for i in self._started]
            self.has_stand_ins = any(row.has_stand_ins for row in rows)
            self._kept = Kept(rows) if rows else None
            self._alignments = np.zeros(len(self.rows), np.int64)
            self.is_plain = not self.engine.BY_ADDRESS and _are_plain(rows)
        kinds = {i: self._kind_of_grad(i) for i in changed or ()}
        if changed is None or not self._is_settled or not self._look_at_grads.expect(kinds):
            kinds_of_all = [*map(self._kind_of_grad, range(len(self.rows)))]
            self._look_at_grads = _look_at_grads(kinds_of_all)
        self._is_settled, self._grads_are_noted = True, False

    def _note_started(self, i: int) -> bool:
        """Note the parameter and states of a row that has just started; False if it has changed otherwise."""
        row, k = self.rows[i], bisect.bisect_left(self._started, i)
        if not row.started or self._started[k : k + 1] == [i] or self._kept is None:
            return False
        if not self._kept.insert(k, row):
            return False
        self._started.insert(k, i)
        self.has_stand_ins |= row.has_stand_ins
        self.is_plain = self.is_plain and _are_plain([row])
        return True

    def _kind_of_grad(self, i: int) -> watch.Kind:
        row = self.rows[i]
        return row.kinds[GRAD] if row.started else watch.NOTHING

    # during a step

    @property
    def live_rows(self) -> list[Row]:
        return self._of_live(self.rows)

    def local_grads(self) -> list[Tensor]:
        return [shards.local(row.grad) for row in self.live_rows]

    def count_writes(self, spec: StepSpec) -> None:
        """Tell autograd that the parameters were written, and gradients if they were cleared."""
        if self.live:
            torch.autograd.graph.increment_version(self._of_live(self._params))
        if self.live and spec.zero_grads:
            torch.autograd.graph.increment_version([row.grad for row in self.live_rows])

    def scalars(self, k: int) -> Scalars | None:
        """The scalars that are computed for its rows before sweep `k`, if any."""
        return self.program.sweeps[k].scalars if k < len(self.program.sweeps) else None

    def has_sweep(self, k: int) -> bool:
        """Whether there is a sweep `k` that does anything: one may be there only for the scalars before it."""
        return k < len(self.program.sweeps) and self.program.sweeps[k].does_anything

    def folds(self, k: int) -> tuple[int, tuple[str, ...]] | None:
        """The row of the first sum of sweep `k`, and the kind of each sum; None if it has no such sweep."""
        if not self.has_sweep(k):
            return None
        sweep = self.program.sweeps[k]
        return sweep.first_fold, tuple(fold.kind for fold in sweep.folds)

    def end_step(self) -> None:
        """Let go of what only a step needs."""
        self.tensors, self._grads = [], None

    def release(self) -> None:
        """Let go of all tensors; keep only their addresses and how they are stored."""
        self.end_step()
        for row in self.rows:
            row.param, row.state, row.explicit_grad, row.fresh = None, {}, None, {}  # type: ignore[assignment]
        self.forget()
        self._params, self.has_stand_ins = [], False

    def write_addresses(self, addresses: np.ndarray) -> None:
        """Write the addresses of the tensors of all rows, by plane, as the caller has found them."""
        self._cells[:, UNMASKED_NUMEL] = self._unmasked(np.bitwise_or.reduce(addresses, axis=1))
        self._cells[:, FIRST_POINTER : FIRST_POINTER + addresses.shape[1]] = addresses
        self.cells_changed = True

    def lend_workspaces(self, tensors: list[list[Tensor]]) -> None:
        """Give rows these workspaces, whose planes come after all others."""
        first = FIRST_POINTER + len(self.program.planes) - len(tensors)
        for k, column in enumerate(tensors if self.engine.BY_ADDRESS else ()):
            self._cells[:, first + k] = [*map(Tensor.data_ptr, column)]
        self._workspaces = tensors


def _has_plain_grads(cls: Any) -> bool:
    """Whether a class has neither a __torch_function__ nor a `grad` of its own."""
    return cls.__torch_function__ is _NO_OVERRIDE and cls.grad is Tensor.grad


def _grads_of_subclasses(params: list[Tensor]) -> list[Any]:
    """The gradients of parameters whose classes have plain gradients."""
    with _without_overrides():
        return [*map(_grad, params)]


def _look_at_grads(kinds: list[watch.Kind]) -> watch.Look:
    return watch.Look(kinds, absent=ABSENT, changes_sign=True)


def _are_plain(rows: list[Row]) -> bool:
    kinds = {id(kind): kind for row in rows for kind in row.kinds}
    return all(kind.is_plain for kind in kinds.values())


def _or_stand_ins(tensors: list[Tensor], copies: list[Tensor | None]) -> list[Tensor]:
    """The stand-in of each tensor, or the tensor itself if it has none."""
    return [t if copy is None else copy for t, copy in zip(tensors, copies, strict=True)]
