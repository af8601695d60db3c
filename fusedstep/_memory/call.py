"""Steps of tensors that are passed at every call, without an optimizer.

No tensor is kept alive between calls. Kept are the tables of the last calls and how their tensors were stored,
so that a call with the same tensors, or with others that are stored alike, only launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._engines import CHANGED, MOVED, Amp, is_watched
from . import watch
from .row import Memory, Row, make_row
from .settings import Settings, Update
from .shards import local
from .stepping import step as step_tables
from .table import Table, make_tables

# parameters, gradients and states in turn
Lists = Sequence[list[Tensor]]


class Job(NamedTuple):
    """What a call does: an update, under these settings, with these options by name."""

    update: Update
    settings: Settings
    options: dict[str, float]

    @property
    def numbers(self) -> np.ndarray:
        return np.array([[*self.options.values()]])


class Call:
    """Tables for tensors that are stored as these are."""

    # inference tensors cannot be written outside inference mode, so none is allocated here
    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, lists: Lists, job: Job) -> None:
        self._job = job
        # states that are not laid out like their parameters are updated in copies
        self._moved: list[tuple[Tensor, Tensor]] = []
        rows = [self._row(roles, job) for roles in zip(*lists, strict=True)]
        self.tables = make_tables(rows, job.numbers, [*job.options], job.settings)
        index = {id(row): i for i, row in enumerate(rows)}
        # each bucket, with the places of its rows in the lists
        self._buckets = [
            (bucket, [index[id(row)] for row in bucket.rows])
            for table in self.tables
            for bucket in table.buckets
        ]
        for row in rows:
            row.commit(Memory({}, {}))
        for bucket, _ in self._buckets:
            bucket.start()
        copies = self._moved or any(
            bucket.has_stand_ins or not bucket.engine.BY_ADDRESS for bucket, _ in self._buckets
        )
        # with copies it cannot serve another call: they would keep tensors alive
        self.can_stay = not copies and not any(local(t) is not t for tensors in lists for t in tensors)
        if self.can_stay:
            tensors = [*chain.from_iterable(lists)]
            self._count, self._look = len(tensors), watch.Look(watch.kinds_of(tensors), changes_sign=True)
            self._look(tensors)

    def _row(self, roles: tuple[Tensor, ...], job: Job) -> Row:
        p, g, *states = roles
        state = dict(zip((name for _, name in job.update.rule.states), states, strict=True))
        memory = Memory({p: {**state}} if state else {}, {})
        row = make_row(p, job.update, 0, memory, job.settings, grad=g)
        self._moved += [(state[name], copy) for name, copy in row.fresh.items()]
        return row

    def fits(self, lists: Lists) -> bool:
        """Whether these tensors are stored as the tables expect; if so, the tables now point to them."""
        tensors = [*chain.from_iterable(lists)]
        if len(tensors) != self._count:
            return False
        found_at_worst = self._look(tensors)
        if found_at_worst == CHANGED:
            return False
        if found_at_worst == MOVED:
            found = self._look.addresses.reshape(len(lists), -1)
            written = np.delete(found, 1, axis=0)
            if len(np.unique(written)) != written.size:
                return False
            for bucket, rows in self._buckets:
                bucket.write_addresses(found[:, rows].T)
        return True

    def step(self, lists: Lists, job: Job, count: Tensor) -> None:
        for table in self.tables:
            table.steps.fill_(count.reshape(()))
            if job.options != self._job.options:
                table.set_options(job.numbers)
        self._job = job
        step_tables(self.tables, Amp(), job.settings)
        for k, tensors in enumerate(lists):
            if k != 1:
                torch.autograd.graph.increment_version(tensors)
        for state, copy in self._moved:
            state.copy_(copy)
        # keep no tensor alive
        for bucket, _ in self._buckets:
            bucket.release()


_calls: dict[tuple, Call] = {}
_MOST_CALLS = 1024


def call(key: tuple, lists: Lists, job: Job, count: Tensor, check: Callable[[], None]) -> list[Table]:
    """Step these tensors with the tables of an earlier call, if they fit; if not, `check` the tensors first."""
    # taken out, so that no other thread uses it, and no later call if this one raises
    found = None if is_watched() else _calls.pop(key, None)
    with torch.no_grad():
        if found is None or not found.fits(lists):
            check()
            found = Call(lists, job)
        found.step(lists, job, count)
    if found.can_stay and not is_watched():
        while len(_calls) >= _MOST_CALLS:
            _calls.pop(next(iter(_calls)), None)
        _calls[key] = found
    return found.tables
