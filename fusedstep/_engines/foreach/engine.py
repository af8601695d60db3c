"""The torch engine: programs as operations on lists of tensors, on any device and for any tensor subclass.

    words       what each word of the language is on numbers, tensors and lists
    scalars     what is computed once per tensor, on the device, or by the host where it knows enough
    resolve     a sweep with its numbers filled in: less to do, and memory to reuse

Lists hold tensors with the same numbers, and are bounded, so that intermediate results never grow with the
model; larger tensors are cut. Subclasses and traced tensors go one by one, by ordinary operations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._algorithm.program import Sweep
from .. import FOUND, LIVE, SCALE, SKIP, SKIPPED, Amp, is_capturing, is_traced, to_device
from .resolve import Operation, Resolved
from .scalars import Run, on_device, on_host, scale_of, varying

NAME = "torch"
BY_ADDRESS = False
CHUNK = 1
# of one slot, in one list; on the host they stay in the cache from one operation to the next
_LIST_BYTES = 64 << 20
_HOST_LIST_BYTES = 4 << 20

_PLAIN = {Tensor, torch.nn.Parameter}

_varying = functools.cache(varying)


def unavailable(device_type: str) -> str | None:
    return None


def bind(table: Any) -> Executable:
    return Executable(table)


class _Part(NamedTuple):
    """Tensors that are stepped together: their rows in the table, and each slot of them.

    Those with the same `key` have the same numbers.
    """

    key: Any
    rows: list[int]
    tensors: list[list[Tensor]]
    plain: bool


class Executable:
    """A table's programs, and which of their numbers the host knows."""

    def __init__(self, table: Any) -> None:
        self._table = table
        # a row of scalars for each of the table; NaN: only the device knows
        self._numbers: list[list[float]] | None = None
        # counts as the host knows them, while the device's are at this version
        self._counts: Tensor | None = None
        self._version: int | None = None
        self._was_captured = False
        self._is_status_clear = False

    @property
    def _is_host(self) -> bool:
        # a trace would keep numbers
        scalars = self._table.scalars
        return type(scalars) is Tensor and scalars.is_cpu and not is_traced()

    @torch.no_grad()
    def prepare(self, k: int, amp: Amp) -> None:
        table = self._table
        runs = [Run(*run) for run in table.scalar_runs(k)]
        if self._is_host:
            self._prepare_on_device(runs, amp)
            self._numbers = table.scalars.tolist()
            return
        skips = table.spec.skip_nonfinite or amp.found_inf is not None
        counts = None if skips else self._known_counts()
        found = [] if amp.scale is not None else [on_host(table, run, counts) for run in runs]
        if not found or any(bool(numbers.isnan().any()) for numbers in found) or self._has_reports:
            self._prepare_on_device(runs, amp)
        elif any(run.scalars.skip is not None for run in runs):
            self._count()
        self._numbers = self._filled(runs, found)
        if counts is not None and table.counts and any(run.scalars.skip is not None for run in runs):
            self._counts = counts + torch.from_numpy(table.host_cells[:, LIVE])
            self._version = table.steps._version

    @property
    def _has_reports(self) -> bool:
        return any(bucket.program.report_columns for bucket in self._table.buckets)

    def _known_counts(self) -> Tensor | None:
        """Counts of every row; read from the device once, when they came from elsewhere."""
        steps = self._table.steps
        # replays of a graph count unseen
        self._was_captured |= is_capturing()
        if self._was_captured or type(steps) is not Tensor or steps.is_meta or is_traced():
            return None
        if self._counts is None or steps._version != self._version:
            self._counts, self._version = steps.to("cpu", torch.float64), steps._version
        return self._counts

    def _prepare_on_device(self, runs: list[Run], amp: Amp) -> None:
        table = self._table
        skips = [on_device(table, run, amp) for run in runs]
        decided = [skip for skip in skips if skip is not None]
        if decided:
            skip = (decided[0] != 0).to(table.status.dtype)
            scale = scale_of(table, amp).to(table.status.dtype)
            table.status.copy_(torch.stack((skip, scale, table.status[SKIPPED] + skip, skip)))
            self._is_status_clear = False

    def _count(self) -> None:
        """A step that is taken in any case."""
        table = self._table
        if table.counts:
            table.steps.add_(table.cells[:, LIVE])
        if not self._is_status_clear:
            for at, value in ((SKIP, 0), (SCALE, 1), (FOUND, 0)):
                table.status[at].fill_(value)
            self._is_status_clear = True

    def _filled(self, runs: list[Run], found: list[Tensor]) -> list[list[float]] | None:
        if not found:
            return None
        numbers = torch.full(self._table.scalars.shape, torch.nan, dtype=torch.float64)
        for run, part in zip(runs, found, strict=True):
            first = run.scalars.first_column
            numbers[run.first : run.end, first : first + part.shape[1]] = part
        return numbers.tolist()

    @torch.no_grad()
    def sweep(self, k: int, skips: bool) -> None:
        table, skip = self._table, None
        if skips:
            skip = table.status[SKIP] != 0
        if skips and self._is_host:
            if bool(skip):
                self._clear(k)
                return
            skip = None
        for bucket in table.buckets_with(k):
            self._sweep(bucket, bucket.program.sweeps[k], skip)

    def _sweep(self, bucket: Any, sweep: Sweep, skip: Tensor | None) -> None:
        # of every sum and row; several terms where a tensor was cut
        terms: list[dict[int, list[Tensor]]] = [{} for _ in sweep.folds]
        resolved: dict[Any, Resolved] = {}
        for part in self._parts(bucket, sweep):
            if part.key not in resolved:
                columns = self._columns(part.rows, sweep, bucket.compute_dtype)
                resolved[part.key] = Resolved(sweep, columns, bucket.compute_dtype)
            folded = _run(resolved[part.key], part, bucket.program.slots, skip, sweep.clears)
            for of_rows, found in zip(terms, folded, strict=True):
                for row, term in zip(part.rows, found, strict=True):
                    of_rows.setdefault(row, []).append(term)
        sums = self._table.sums[sweep.first_fold : sweep.first_fold + len(sweep.folds)]
        if sweep.folds:
            sums[:, bucket.first_row : bucket.first_row + len(bucket.rows)] = 0
        for total, (_, kind), of_rows in zip(sums, sweep.folds, terms, strict=True):
            if of_rows:
                fold = torch.sum if kind == "sum" else torch.amax
                found = [x[0] if len(x) == 1 else fold(torch.stack(x)) for x in of_rows.values()]
                rows = to_device(torch.tensor([*of_rows], device="cpu"), total.device)
                total.index_copy_(0, rows, torch.stack(found).to(total.dtype))

    def _clear(self, k: int) -> None:
        for bucket in self._table.buckets_with(k):
            if bucket.program.sweeps[k].clears:
                for t in bucket.tensors[1]:
                    t.zero_()

    def _columns(self, rows: list[int], sweep: Sweep, dtype: torch.dtype) -> list[Any]:
        """Each scalar of these rows: a number if that is the same for all of them, else one for each."""
        if sweep.scalars is None:
            return []
        known = None if self._numbers is None else [self._numbers[i] for i in rows]
        from_device: list[tuple[Tensor, ...]] = []
        found: list[Any] = []
        for at, column in enumerate(sweep.columns):
            if known is not None and not math.isnan(known[0][column]):
                several = column in _varying(sweep.scalars) and len(known) > 1
                found.append([row[column] for row in known] if several else known[0][column])
                continue
            if not from_device:
                scalars = self._table.scalars[:, sweep.columns[0] : sweep.columns[-1] + 1].to(dtype)
                from_device = [scalars[i].unbind() for i in rows]
            found.append([row[at] for row in from_device])
        return found

    def _keys(self, bucket: Any, sweep: Sweep) -> Sequence[Any]:
        """Of every live row something that is the same for those with the same numbers, sums aside."""
        if self._numbers is None or sweep.scalars is None:
            return [()] * len(bucket.live)
        rows = [self._numbers[bucket.first_row + i] for i in bucket.live]
        apart = _varying(sweep.scalars)
        columns = [c for c in sweep.columns if c not in apart and rows and not math.isnan(rows[0][c])]
        return [*map(itemgetter(*columns), rows)] if columns else [()] * len(rows)

    def _parts(self, bucket: Any, sweep: Sweep) -> Iterator[_Part]:
        """The live rows of a bucket, in lists of bounded size."""
        limit = _HOST_LIST_BYTES if self._is_host else _LIST_BYTES
        slots, rows = bucket.tensors, [bucket.first_row + i for i in bucket.live]
        # whether a list has more than the numbers that its rows have in common
        apart = not self._knows_all(rows, sweep)
        sizes = [t.nbytes for t in slots[0]]
        odd = _odd_places(slots)
        lists: dict[Any, list[int]] = {}
        for i, key in enumerate(self._keys(bucket, sweep)):
            if i in odd:
                # a subclass need not know operations on lists
                yield _Part(("odd", rows[i]), [rows[i]], [[tensors[i]] for tensors in slots], plain=False)
            elif sizes[i] > limit and all(t[i].is_contiguous() and not t[i].is_complex() for t in slots):
                length = limit // slots[0][i].itemsize
                for pieces in zip(*(t[i].detach().view(-1).split(length) for t in slots), strict=True):
                    yield _Part((key, rows[i] if apart else ()), [rows[i]], [[t] for t in pieces], plain=True)
            else:
                lists.setdefault(key, []).append(i)
        for key, places in lists.items():
            for part in _bounded(places, sizes, limit):
                of_part = [rows[i] for i in part]
                yield _Part(
                    (key, (*of_part,) if apart else ()),
                    of_part,
                    [[tensors[i] for i in part] for tensors in slots],
                    plain=True,
                )

    def _knows_all(self, rows: list[int], sweep: Sweep) -> bool:
        """Whether all numbers of a sweep are known here, and none depends on sums."""
        if self._numbers is None or sweep.scalars is None or not rows:
            return False
        first = self._numbers[rows[0]]
        apart = _varying(sweep.scalars)
        return not any(c in apart or math.isnan(first[c]) for c in sweep.columns)


def _odd_places(slots: list[list[Tensor]]) -> Collection[int]:
    """Where tensors are traced, or are more than plain ones."""
    if is_traced():
        return range(len(slots[0]))
    if {*map(type, chain.from_iterable(slots))} <= _PLAIN:
        return ()
    return {i for tensors in slots for i, t in enumerate(tensors) if type(t) not in _PLAIN}


def _bounded(places: list[int], sizes: list[int], limit: int) -> Iterator[list[int]]:
    start, total = 0, 0
    for at, i in enumerate(places):
        if total + sizes[i] > limit and at > start:
            yield places[start:at]
            start, total = at, 0
        total += sizes[i]
    yield places[start:]


class _Loaded(NamedTuple):
    """The numbers of one slot; `in_place`: in the memory they are stored in."""

    tensors: list[Tensor]
    in_place: bool


def _load(tensors: list[Tensor], dtype: torch.dtype) -> _Loaded:
    in_place = not any(map(Tensor.is_neg, tensors))
    if not in_place or any(map(Tensor.is_complex, tensors)):
        in_place = in_place and not any(map(Tensor.is_conj, tensors))
        tensors = [*map(_real, tensors)]
    if tensors[0].dtype == dtype:
        return _Loaded([*tensors], in_place)
    return _Loaded([t.to(dtype) for t in tensors], False)


def _run(
    resolved: Resolved, part: _Part, slots: tuple, skip: Tensor | None, clears: bool
) -> list[list[Tensor]]:
    """One sweep over one list; returns what it sums. `skip`, if not None, is known to the device alone."""
    loaded: dict[int, _Loaded] = {}
    stored = [slot for slot, _ in resolved.stores]

    def load(slot: int) -> tuple[list[Tensor], bool]:
        found = loaded[slot] = _load(part.tensors[slot], resolved.dtype)
        is_last = slot in stored and slots[slot].letter != "g" and skip is None
        return found.tensors, is_last or not found.in_place

    values = resolved.run(load, part.plain)

    def result(x: Any) -> list[Any]:
        return values[x] if isinstance(x, Operation) else [x] * len(part.rows)

    # where a slot's memory is that of its old numbers, an operation may have left its new ones there
    homes = {id(found.tensors): slot for slot, found in loaded.items() if found.in_place}
    new = {slot: result(x) for slot, x in resolved.stores}
    for slot, numbers in new.items():
        if homes.get(id(numbers), slot) != slot and homes[id(numbers)] in stored:
            # another slot's memory, which will be written
            new[slot] = [t.clone() for t in numbers]
    for slot, numbers in new.items():
        tensors = part.tensors[slot]
        if slots[slot].letter == "g" and clears:
            # whether or not the step is taken, and though it may be expanded
            for t in tensors:
                t.zero_()
        elif homes.get(id(numbers)) != slot:
            # gradients that are unscaled: autograd is not told, as by torch's fused optimizers
            tensors = [t.data for t in tensors] if slots[slot].letter == "g" else tensors
            _store(tensors, numbers, skip, part.plain)
    return [_folded(kind, result(x), part.plain) for kind, x in resolved.folds]


def _store(tensors: list[Tensor], numbers: list[Any], skip: Tensor | None, plain: bool) -> None:
    if plain and skip is None and isinstance(numbers[0], Tensor) and not any(map(_is_view, tensors)):
        torch._foreach_copy_(tensors, numbers)
        return
    for t, new in zip(tensors, numbers, strict=True):
        _store_one(t, new, skip)


def _is_view(t: Tensor) -> bool:
    """Whether its numbers are not those in its memory, or not real."""
    return t.is_complex() or t.is_neg()


def _store_one(t: Tensor, new: Any, skip: Tensor | None) -> None:
    target = _real(t)
    if not isinstance(new, Tensor):
        new = torch.full_like(target, new)
    target.copy_(new if skip is None else torch.where(skip, target, new))
    if t.is_conj() or t.is_neg():
        # written to a copy so far
        t.copy_(torch.view_as_complex(target) if t.is_complex() else target)


def _folded(kind: str, terms: list[Tensor], plain: bool) -> list[Tensor]:
    # mps has no float64
    exact = torch.float64 if terms[0].device.type != "mps" else torch.float32
    if kind == "squares" and plain:
        return [*torch._foreach_pow(torch._foreach_norm(terms, 2, dtype=exact), 2)]
    if kind == "squares":
        return [(t * t).sum(dtype=exact) for t in terms]
    if kind == "sum":
        return [t.sum(dtype=exact) for t in terms]
    # of nothing there is no largest; no branch: ranks in one process may have other numbers of elements
    return [torch.cat((t.to(exact).flatten(), t.new_zeros(1, dtype=exact))).amax() for t in terms]


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.resolve_neg()
