"""What one step touches, as tables of addresses that are built once and checked every step.

    Plan      all of an optimizer's parameters that have had a gradient
    Table     those that one engine steps on one device: step counts, hyper-parameters, scalars, addresses
    Bucket    those of a table that share a rule and dtypes: what one launch updates

A step is a few passes. Pass 0 measures gradients, only if they are to be clipped; the others are the rule's.
Before each of those, scalars are prepared from the step count, the hyper-parameters and what earlier passes
summed over every tensor. Groups do not split buckets: a hyper-parameter is a column of a table with one row
per group. A gradient
that vanishes switches its row off; one that moves rewrites its address; anything else that changes
(another parameter, dtype, shape, rule) builds the plan anew. A plan keeps no gradient and no state alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, groupby
from operator import is_, itemgetter
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import _get_scalar_dtype

from . import _scan
from ._entry import MEASURE, Entry, Known, Pass, Rule, Settings, make_entry
from ._layout import numel
from .engines import FULL, GROUP, LIMIT, LIVE, NUMEL, OPTIONS, POINTERS, SEGMENT, compute_dtype

_params = itemgetter("params")


class Amp(NamedTuple):
    """What a GradScaler hands over: divide gradients by `scale`, skip the step where `found_inf`."""

    scale: Tensor | None = None
    found_inf: Tensor | None = None

    def to(self, device: torch.device) -> Amp:
        if self.scale is None and self.found_inf is None:
            return self
        return Amp(*(t if t is None else t.to(device, non_blocking=True) for t in self))


class Bucket:
    """The entries of a table that share a rule and the dtype of every role."""

    def __init__(self, entries: list[Entry], rows: np.ndarray, engine: ModuleType) -> None:
        self.entries, self.rows, self.engine = entries, rows, engine
        self.rule, self.dtypes = entries[0].rule, entries[0].dtypes
        self.compute_dtype = compute_dtype(self.dtypes)
        self.numels = np.array([numel(entry.param) for entry in entries], np.int64)
        # set by every survey: parameters with a gradient, entries that need a copy, the compiled look
        self.params: list[Tensor] = []
        self.staged: list[Entry] = []
        self._scan: Any = None
        self.rows_changed = False
        # the engine's own: what it compiled and tabulated
        self.launch: Any = None

    def survey(self) -> bool:
        """Look at every entry in Python; False if one is no longer what it was built as."""
        grads = [entry.grad for entry in self.entries]
        if not all(g is None or entry.fits(g) for entry, g in zip(self.entries, grads, strict=True)):
            return False
        live = [entry for entry, g in zip(self.entries, grads, strict=True) if g is not None]
        has_grad = np.array([g is not None for g in grads], np.int64)
        self.rows_changed |= not np.array_equal(self.rows[:, LIVE], has_grad)
        self.rows[:, LIVE] = has_grad
        self.params = [entry.param for entry in live]
        absent = [entry.param for entry, g in zip(self.entries, grads, strict=True) if g is None]
        self.staged = [entry for entry in live if entry.staged]
        self._scan = None
        if self.engine.BY_ADDRESS:
            self.live = np.flatnonzero(self.rows[:, LIVE]) if absent else slice(None)
            self.rows[:, NUMEL] = np.where(self.rows[:, LIVE], self.numels, 0)
            self.rows[:, FULL] = 0
            self._full = self.numels[self.live] // self.engine.CHUNK * self.engine.CHUNK
            addresses = np.array([entry.addresses() for entry in live], np.int64)
            self.write_addresses(addresses.reshape(len(live), len(self.rule.roles)))
            if not self.staged and _scan.Entries.can_read(live):
                self._scan = _scan.Entries(live, [*self.rule.states.values()], absent)
        return True

    def refresh(self) -> bool:
        """Bring the rows up to date with where everything is now; False if the plan must be built anew."""
        verdict = _scan.UNSURE if self._scan is None else self._scan.look()
        if verdict == _scan.MOVED:
            self.write_addresses(self._scan.addresses)
        return verdict != _scan.UNSURE or self.survey()

    def write_addresses(self, addresses: np.ndarray) -> None:
        # full chunks are for aligned tensors: they are read and written sixteen bytes at a time
        misaligned = np.bitwise_or.reduce(addresses, axis=1) & 15
        self.rows[self.live, FULL] = np.where(misaligned, 0, self._full)
        self.rows[self.live, POINTERS : POINTERS + len(self.rule.roles)] = addresses
        self.rows_changed = True


class Table:
    """Step counts, hyper-parameters, scalars, sums and addresses of what one engine steps on one device."""

    def __init__(self, engine: ModuleType, entries: list[Entry], hyper: np.ndarray, settings: Settings) -> None:
        self.engine, self.device, self.counts = engine, entries[0].param.device, settings.counts
        # all rules of an optimizer share their scalars and the number of their passes and sums
        self.rule = entries[0].rule
        self.clips = bool((hyper[:, LIMIT] > 0).any())
        by_bucket = sorted(range(len(entries)), key=lambda i: entries[i].bucket)
        self.entries = [entries[i] for i in by_bucket]
        width = POINTERS + max(len(entry.dtypes) for entry in entries)
        self.host_rows = np.zeros((len(entries), width), np.int64)
        self.host_rows[:, GROUP] = [entry.group for entry in self.entries]
        self.host_rows[:, SEGMENT] = [entry.segment for entry in self.entries]
        # mps has no float64
        exact = torch.float32 if self.device.type == "mps" else settings.exact
        scalars = max(p.scalar_count for entry in entries for p in entry.rule.passes)
        self.rows = torch.from_numpy(self.host_rows).to(self.device)
        self.scalars = torch.zeros(len(entries), 1 + scalars, dtype=exact, device=self.device)
        # of every pass in turn, one row per sum
        self.sums = torch.zeros(1 + self.rule.sums, len(entries), dtype=exact, device=self.device)
        # the squares of all gradients that may be clipped together, and who goes with whom
        self.everyone = self.sums[0], torch.from_numpy(self.segments).to(self.device)
        self.hyper = torch.from_numpy(hyper).to(self.device, exact, copy=True)
        self.steps = self._adopt_steps()
        # the engine's own, as a bucket's
        self.launch: Any = None
        self.buckets = []
        for _, same in groupby(enumerate(self.entries), key=lambda pair: pair[1].bucket):
            indices, members = zip(*same, strict=True)
            rows = self.host_rows[indices[0] : indices[-1] + 1]
            self.buckets.append(Bucket([*members], rows, engine))

    @property
    def segments(self) -> np.ndarray:
        return self.host_rows[:, SEGMENT].copy()

    def passes(self, rule: Rule) -> tuple[Pass, ...]:
        return (MEASURE, *rule.passes)

    @property
    def used_passes(self) -> range:
        return range(0 if self.clips else 1, 1 + len(self.rule.passes))

    def columns(self, k: int) -> slice:
        """Which of the table's sums are of pass `k`."""
        first = sum(p.sums for p in self.passes(self.rule)[:k])
        return slice(first, first + self.passes(self.rule)[k].sums)

    def _adopt_steps(self) -> Tensor:
        """One vector of step counts, of which each entry gets a view."""
        counts = [entry.step for entry in self.entries]
        steps = torch.tensor([0.0 if isinstance(n, Tensor) else n for n in counts], dtype=_get_scalar_dtype())
        steps = steps.to(self.device)
        # select, not unbind: a view that may itself be written in place
        for i, (entry, count) in enumerate(zip(self.entries, counts, strict=True)):
            entry.step, entry.all_steps = steps[i], steps
            if isinstance(count, Tensor):
                entry.step.copy_(count.reshape(()), non_blocking=True)
        return steps

    def refresh(self) -> bool:
        return all(bucket.refresh() for bucket in self.buckets)

    def begin(self) -> None:
        """Bring to the device what a step needs."""
        # on the host they are the same memory
        if self.device.type != "cpu" and any(bucket.rows_changed for bucket in self.buckets):
            upload(self.host_rows, self.rows)
            for bucket in self.buckets:
                bucket.rows_changed = False
        for bucket in self.buckets:
            for entry in bucket.staged:
                entry.copy_in()

    def update(self, amp: Amp) -> None:
        """Update everything live, in place."""
        for k in range(1, 1 + len(self.rule.passes)):
            self.engine.prepare(self, amp, first=k == 1)
            self.engine.sweep(self, k, amp)
        for bucket in self.buckets:
            for entry in bucket.staged:
                entry.copy_out()
            if self.engine.BY_ADDRESS:
                # autograd must know that these were written
                torch.autograd.graph.increment_version(bucket.params)


# which gradients are clipped together, by their entries
CLIP_SCOPES: dict[str, Callable[[Entry], Any]] = {
    "tensor": lambda entry: id(entry),
    "group": lambda entry: (entry.group, entry.param.dtype),
    "global": lambda entry: None,
}


def make_tables(entries: list[Entry], hyper: np.ndarray, settings: Settings) -> list[Table]:
    """Tables of these entries, ready to be stepped."""
    keys = [*map(CLIP_SCOPES[settings.clip_scope], entries)]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    by_table: dict[tuple, list[Entry]] = {}
    for entry, key in zip(entries, keys, strict=True):
        entry.segment = numbers[key]
        by_table.setdefault((entry.engine, entry.device), []).append(entry)
    tables = [Table(engine, members, hyper, settings) for (engine, _), members in by_table.items()]
    for table in tables:
        if len(tables) > 1:
            segments = torch.from_numpy(np.concatenate([other.segments for other in tables]))
            table.everyone = table.sums.new_zeros(len(segments)), segments.to(table.device)
        table.engine.compile(table)
    return tables


def step(tables: list[Table], amp: Amp) -> None:
    """One step of everything in these tables."""
    amps = [amp.to(table.device) for table in tables]
    for table in tables:
        table.begin()
    if any(table.clips for table in tables):
        for table, amp in zip(tables, amps, strict=True):
            table.engine.sweep(table, 0, amp)
        if len(tables) > 1:
            _exchange(tables)
    for table, amp in zip(tables, amps, strict=True):
        table.update(amp)


def _exchange(tables: list[Table]) -> None:
    """Give every table the measurements of all."""
    for table in tables:
        # what comes to the host must have arrived before it is read there
        waits = table.device.type == "cpu"
        parts = [other.sums[0].to(table.device, non_blocking=not waits) for other in tables]
        torch.cat(parts, out=table.everyone[0])


def upload(host: np.ndarray, device: Tensor) -> None:
    source = torch.from_numpy(host).to(device.dtype)
    if device.is_cuda:
        # a fresh pinned block for each upload: the allocator reuses it only when the copy is done
        source = source.pin_memory()
    device.copy_(source, non_blocking=True)


def _numbers(option: Any, group: int) -> Iterable[float | Tensor]:
    """The numbers in a group's option: one, or a pair; a tensor on a device stays a tensor."""
    pair = isinstance(option, (tuple, list)) and len(option) == 2
    for value in option if pair else (option,):
        try:
            if isinstance(value, Tensor) and value.numel() == 1 and value.device.type != "cpu":
                yield value.detach().reshape(())
            else:
                # plus 0: a string is no number, though float() would read it
                yield float(value.detach() if isinstance(value, Tensor) else value + 0)
        except (TypeError, ValueError, RuntimeError) as error:
            message = f"group {group} has the option {option!r}; use a number or a one-element tensor"
            raise TypeError(message) from error


class Plan:
    """The tables of an optimizer, and whether they still describe it."""

    @torch.no_grad()
    def __init__(self, optimizer: Any) -> None:
        groups, known = optimizer.param_groups, Known(optimizer.state, optimizer.unsaved_steps)
        self._members = [[*members] for members in map(_params, groups)]
        params = [*chain.from_iterable(self._members)]
        if len(set(map(id, params))) != len(params):
            raise ValueError(
                f"{optimizer.settings.owner} was given a parameter twice and would update it twice at once; "
                "pass every parameter once, for example list(dict.fromkeys(params))"
            )
        self._rules = [*map(optimizer.rule, groups)]
        for gone in optimizer.unsaved_steps.keys() - set(params):
            del optimizer.unsaved_steps[gone]
        self._read_options(optimizer)

        self._pending: list[Tensor] = []
        entries: list[Entry] = []
        for i, rule in enumerate(self._rules):
            for p in self._members[i]:
                if p.grad is None:
                    self._pending.append(p)
                else:
                    entries.append(make_entry(p, rule, i, known, optimizer.settings))
        self.tables = make_tables(entries, self._hyper, optimizer.settings)

        # everything is allocated and compiled
        for entry in entries:
            entry.commit(known)
        for table in self.tables:
            if not all(bucket.survey() for bucket in table.buckets):
                raise RuntimeError(
                    "a parameter changed while its step was prepared; is another thread at work?"
                )
        self._copy_cells()
        self._record(optimizer)

    def _record(self, optimizer: Any) -> None:
        """Remember what the optimizer holds now, for the next step to compare."""
        groups, state = optimizer.param_groups, optimizer.state
        self._states = [*state.values()]
        self._scan = None
        if _scan.API is not None and _scan.Groups.can_read(groups, state):
            options = () if self._volatile else optimizer.all_options
            self._scan = _scan.Groups(groups, options, state, self._pending)

    def describes(self, optimizer: Any) -> bool:
        """Whether this is still the optimizer's plan, once brought up to date with what only moved."""
        same = self._scan is not None and self._scan.same(optimizer.param_groups, optimizer.state)
        if not same and not self._holds(optimizer):
            return False
        if (not same or self._volatile) and not self._refresh_options(optimizer):
            return False
        if not all(table.refresh() for table in self.tables):
            return False
        if not same:
            self._record(optimizer)
        return True

    def _holds(self, optimizer: Any) -> bool:
        """Whether the optimizer has the parameters and states it had, looked at in Python."""
        members, state = [*map(_params, optimizer.param_groups)], optimizer.state
        return (
            [*map(len, members)] == [*map(len, self._members)]
            and all(map(is_, chain.from_iterable(members), chain.from_iterable(self._members)))
            and len(state) == len(self._states)
            and all(map(is_, state.values(), self._states))
            and all(p.grad is None for p in self._pending)
        )

    def _refresh_options(self, optimizer: Any) -> bool:
        if [*map(optimizer.rule, optimizer.param_groups)] != self._rules:
            return False
        before = self._hyper, [cell[:2] for cell in self._cells]
        self._read_options(optimizer)
        if (before[0][:, LIMIT] > 0).any() != (self._hyper[:, LIMIT] > 0).any():
            return False
        if not np.array_equal(before[0], self._hyper) or before[1] != [cell[:2] for cell in self._cells]:
            for table in self.tables:
                upload(self._hyper, table.hyper)
        self._copy_cells()
        return True

    def _read_options(self, optimizer: Any) -> None:
        """Hyper-parameters as a matrix, a row per group, in the columns that engines know."""
        self._cells: list[tuple[int, int, Tensor]] = []
        options = [*map(optimizer.options_of, optimizer.param_groups)]
        limits = [group.get("max_grad_norm") for group in optimizer.param_groups]
        # anything but numbers and words and tuples of them may change in place, and is read anew every step
        parts = chain.from_iterable(
            v if isinstance(v, tuple) else (v,) for row in (limits, *options) for v in row
        )
        self._volatile = not all(isinstance(v, (int, float, str, type(None))) for v in parts)
        hyper, words = [], {word: i for i, word in enumerate(optimizer.words)}
        for i, (limit, (maximize, *values)) in enumerate(zip(limits, options, strict=True)):
            row = [-1.0 if maximize else 1.0]
            values = [0 if limit is None else limit, optimizer.clip_eps, *values[: len(optimizer.options)]]
            numbers = (words.get(v, v) if isinstance(v, str) else v for v in values)
            for value in chain.from_iterable(_numbers(v, i) for v in numbers):
                if isinstance(value, Tensor):
                    self._cells.append((i, len(row), value))
                # not 0, which for some means off
                row.append(1.0 if isinstance(value, Tensor) else value)
            if len(row) != OPTIONS + self._rules[i].scalars.__code__.co_argcount - 1 - self._rules[i].sums:
                raise ValueError(f"group {i} has too many or too few numbers in its options: {values}")
            hyper.append(row)
        self._hyper = np.array(hyper, np.float64)

    def _copy_cells(self) -> None:
        """Hyper-parameters that live on a device stay there."""
        for table in self.tables:
            for row, column, value in self._cells:
                table.hyper[row, column].copy_(value, non_blocking=True)

    def step(self, amp: Amp) -> None:
        step(self.tables, amp)
