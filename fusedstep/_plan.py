"""What one step touches, as tables of addresses that are built once and checked every step.

    Plan      all of an optimizer's parameters that have had a gradient
    Table     those that one engine steps on one device: step counts, hyper-parameters, scalars, addresses
    Bucket    those of a table that share a rule and dtypes: what one launch updates

Groups do not split buckets: a hyper-parameter is a column of a table with one row per group. A gradient
that vanishes switches its row off; one that moves rewrites its address; anything else that changes
(another parameter, dtype, shape, rule) builds the plan anew. A plan keeps no gradient and no state alive.
"""

from __future__ import annotations

from itertools import chain, groupby
from operator import attrgetter, is_, itemgetter
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import _get_scalar_dtype

from ._entry import Entry, make_entry
from ._layout import Addresses, Guard, numel
from .engines import FULL, GROUP, LIVE, NUMEL, POINTERS

_grad, _params, _step = attrgetter("grad"), itemgetter("params"), itemgetter("step")


class Amp(NamedTuple):
    """What a GradScaler hands over: divide gradients by `scale`, skip the step where `found_inf`."""

    scale: Tensor | None = None
    found_inf: Tensor | None = None

    def to(self, device: torch.device) -> Amp:
        return Amp(*(t if t is None else t.to(device, non_blocking=True) for t in self))


class Bucket:
    """The entries of a table that share a rule and the dtype of every role."""

    def __init__(self, entries: list[Entry], rows: np.ndarray, engine: ModuleType) -> None:
        self.entries, self.rows, self.engine = entries, rows, engine
        self.rule, self.dtypes = entries[0].rule, entries[0].dtypes
        self.compute_dtype = torch.float64 if torch.float64 in self.dtypes else torch.float32
        self._getters = [itemgetter(name) for name in self.rule.states]
        self.numels = np.array([numel(entry.param) for entry in entries], np.int64)
        # the engine's own: chunk table and compiled kernel
        self.launch: Any = None

    def survey(self) -> bool:
        """See which entries have a gradient; False if one no longer is what it was built as."""
        grads = [entry.param.grad for entry in self.entries]
        if not all(g is None or entry.fits(g) for entry, g in zip(self.entries, grads, strict=True)):
            return False
        live = [entry for entry, g in zip(self.entries, grads, strict=True) if g is not None]
        self._dead = [entry.param for entry, g in zip(self.entries, grads, strict=True) if g is None]
        self.rows[:, LIVE] = [g is not None for g in grads]
        self.live, self.params = live, [entry.param for entry in live]
        if not self.engine.BY_ADDRESS:
            return True
        self._states, self._steps = [e.state for e in live], [e.step for e in live]
        self._targets = [e.param if e.param_copy is None else e.param_copy for e in live]
        self._grad_copies = [(i, e.grad_copy) for i, e in enumerate(live) if e.grad_copy is not None]
        self.staged = [e for e in live if e.param_copy is not None or e.grad_copy is not None]
        # gradients alone: autograd lays them out as the parameter lies, so they show what it became
        self._guard = Guard([*map(_grad, self.params)])
        self._addresses, self._state_addresses = Addresses(), Addresses()
        self._state_addresses.moved(self._state_tensors())
        self.refresh()
        return True

    def _state_tensors(self) -> list[Tensor]:
        return [*chain.from_iterable(map(get, self._states) for get in self._getters)]

    def refresh(self) -> bool:
        """Bring the rows up to date with where everything is now; False if the plan must be rebuilt."""
        if not self.engine.BY_ADDRESS:
            return self.survey()
        grads = [*map(_grad, self.params)]
        if any(p.grad is not None for p in self._dead) or not self._guard.holds(grads):
            return self.survey()
        try:
            if self.rule.counts and not all(map(is_, map(_step, self._states), self._steps)):
                return False
            if self._state_addresses.moved(self._state_tensors()):
                return False
        except (KeyError, TypeError):  # a state was taken out, or is no tensor any more
            return False
        for i, copy in self._grad_copies:
            grads[i] = copy
        if self._addresses.moved([*self._targets, *grads]):
            self._write()
        return True

    def _write(self) -> None:
        live = self.rows[:, LIVE] != 0
        numels = self.numels[live]
        pointers = np.array(self._addresses.values + self._state_addresses.values, np.int64)
        pointers = pointers.reshape(-1, len(numels)).T
        chunk = self.engine.chunk(self)
        aligned = (pointers % 16 == 0).all(axis=1)
        self.rows[:, NUMEL] = self.rows[:, FULL] = 0
        self.rows[live, NUMEL] = numels
        self.rows[live, FULL] = np.where(aligned, numels // chunk * chunk, 0)
        self.rows[live, POINTERS : POINTERS + pointers.shape[1]] = pointers
        self.moved = True

    moved = False


class Table:
    """Step counts, hyper-parameters, scalars and addresses of what one engine steps on one device."""

    def __init__(self, engine: ModuleType, entries: list[Entry], hyper: np.ndarray) -> None:
        self.engine, self.device = engine, entries[0].param.device
        self.rule = entries[0].rule
        by_bucket = sorted(range(len(entries)), key=lambda i: entries[i].bucket)
        self.entries = [entries[i] for i in by_bucket]
        width = POINTERS + max(len(entry.dtypes) for entry in entries)
        self.host_rows = np.zeros((len(entries), width), np.int64)
        self.host_rows[:, GROUP] = [entry.group for entry in self.entries]
        # float64 so that bias corrections hold at any step; mps has none
        exact = torch.float32 if self.device.type == "mps" else torch.float64
        scalars = max(entry.rule.scalar_count for entry in entries)
        self.rows = torch.from_numpy(self.host_rows).to(self.device)
        self.scalars = torch.zeros(len(entries), 1 + scalars, dtype=exact, device=self.device)
        self.hyper = torch.from_numpy(hyper).to(self.device, exact, copy=True)
        self.steps = self._adopt_steps()
        self.buckets = []
        for _, same in groupby(enumerate(self.entries), key=lambda pair: pair[1].bucket):
            indices, members = zip(*same, strict=True)
            rows = self.host_rows[indices[0] : indices[-1] + 1]
            self.buckets.append(Bucket([*members], rows, engine))
        engine.compile(self)

    def _adopt_steps(self) -> Tensor:
        """One vector of step counts, of which each entry gets a view."""
        counts = [entry.step for entry in self.entries]
        steps = torch.tensor([0.0 if isinstance(n, Tensor) else n for n in counts], dtype=_get_scalar_dtype())
        steps = steps.to(self.device)
        # select, not unbind: a view that may itself be written in place
        for i, (entry, count) in enumerate(zip(self.entries, counts, strict=True)):
            entry.step = steps[i]
            if isinstance(count, Tensor):
                entry.step.copy_(count.reshape(()), non_blocking=True)
        return steps

    def refresh(self) -> bool:
        return all(bucket.refresh() for bucket in self.buckets)

    def step(self, amp: Amp) -> None:
        """Update everything live, in place."""
        if any(bucket.moved for bucket in self.buckets):
            _upload(self.host_rows, self.rows)
            for bucket in self.buckets:
                bucket.moved = False
        if not self.engine.BY_ADDRESS:
            return self.engine.step(self, amp.to(self.device))
        staged = [entry for bucket in self.buckets for entry in bucket.staged]
        for entry in staged:
            entry.copy_in()
        self.engine.step(self, amp.to(self.device))
        for entry in staged:
            entry.copy_out()
        for bucket in self.buckets:
            torch.autograd.graph.increment_version(bucket.params)


def _upload(host: np.ndarray, device: Tensor) -> None:
    source = torch.from_numpy(host)
    if device.is_cuda:
        # a fresh pinned block for each upload: the allocator reuses it only when the copy is done
        source = source.pin_memory()
    if device.data_ptr() != source.data_ptr():
        device.copy_(source, non_blocking=True)


class Plan:
    """The tables of an optimizer, and whether they still describe it."""

    def __init__(self, optimizer: Any) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        self._members = [[*members] for members in map(_params, groups)]
        self._params = [*chain.from_iterable(self._members)]
        if len(set(map(id, self._params))) != len(self._params):
            raise ValueError(
                f"{optimizer.settings.owner} was given a parameter twice and would update it twice at once; "
                "pass every parameter once, for example list(dict.fromkeys(params))"
            )
        self._rules = [*map(optimizer.rule, groups)]
        self._inputs = len(optimizer.options)
        self._read_options([*map(optimizer.options_of, groups)])

        self._pending, tables = [], {}
        for i, rule in enumerate(self._rules):
            for p in self._members[i]:
                if p.grad is None:
                    self._pending.append(p)
                else:
                    entry = make_entry(p, state.get(p), rule, i, optimizer.settings)
                    tables.setdefault((entry.engine, entry.device), []).append(entry)
        self.tables = [Table(engine, entries, self._hyper) for (engine, _), entries in tables.items()]

        # everything is allocated and compiled: from here on nothing can fail
        for table in self.tables:
            for entry in table.entries:
                state.setdefault(entry.param, entry.state)
                entry.commit()
            for bucket in table.buckets:
                bucket.survey()
        self._states = [*state.values()]
        self._copy_cells()

    def describes(self, optimizer: Any) -> bool:
        """Whether this is still the optimizer's plan, once brought up to date with what only moved."""
        groups, state = optimizer.param_groups, optimizer.state
        members = [*map(_params, groups)]
        params = [*chain.from_iterable(members)]
        return (
            len(params) == len(self._params)
            and all(map(is_, params, self._params))
            and [*map(len, members)] == [*map(len, self._members)]
            and len(state) == len(self._states)
            and all(map(is_, state.values(), self._states))
            and not any(p.grad is not None for p in self._pending)
            and self._refresh_options(optimizer)
            and all(table.refresh() for table in self.tables)
        )

    def _refresh_options(self, optimizer: Any) -> bool:
        options = [*map(optimizer.options_of, optimizer.param_groups)]
        # tensors are read anew every step and never compared: that could wait for the device
        if not self._tensors and options == self._options:
            return True
        if [*map(optimizer.rule, optimizer.param_groups)] != self._rules:
            return False
        before = self._hyper
        self._read_options(options)
        if not np.array_equal(before, self._hyper):
            for table in self.tables:
                _upload(self._hyper, table.hyper)
        self._copy_cells()
        return True

    def _read_options(self, options: list[tuple]) -> None:
        """Hyper-parameters as a matrix, a row per group: the sign of the gradient, then the scalars' inputs."""
        self._options, self._tensors, self._cells = options, False, []
        hyper = []
        for i, (maximize, *values) in enumerate(options):
            row = [-1.0 if maximize else 1.0]
            inputs = (v if isinstance(v, (tuple, list)) else (v,) for v in values[: self._inputs])
            for value in chain.from_iterable(inputs):
                if isinstance(value, Tensor):
                    self._tensors = True
                    if value.device.type != "cpu":
                        self._cells.append((i, len(row), value))
                        value = 0.0
                row.append(float(value))
            hyper.append(row)
        self._hyper = np.array(hyper, np.float64)

    def _copy_cells(self) -> None:
        """Hyper-parameters that live on a device stay there."""
        for table in self.tables:
            for row, column, value in self._cells:
                table.hyper[row, column].copy_(value.reshape(()), non_blocking=True)

    def step(self, amp: Amp) -> None:
        for table in self.tables:
            table.step(amp)
