"""The torch engine: programs as operations on lists of tensors, on any device and for any tensor subclass.

    words       what each word of the language is on numbers, tensors and lists
    scalars     what is computed once per tensor, by the host where it knows enough, or on the device
    lists       which tensors are stepped by one list
    resolve     a sweep with its scalars filled in: less to do, and memory to reuse
    placed      tensors whose elements share numbers or draw random bits, one by one

Nothing waits for a device. What the host cannot know without reading it there stays there, and lists are made
of tensors that share such a scalar.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._algorithm.program import Program, Sweep
from ..._algorithm.step import GRAD, PARAM
from .. import FOUND, LIVE, SCALE, SKIP, SKIPPED, Amp, is_capturing, is_traced
from .lists import Columns, Part, list_bytes, parts
from .placed import pieces
from .placed import run as run_piece
from .resolve import Operation, Resolved
from .scalars import HostInputs, OnDevice, Run, keep_on_host, known_columns, on_host
from .words import filled

NAME = "torch"
BY_ADDRESS = False


def unavailable(device_type: str) -> str | None:
    return None


def chunk(program: Program) -> int:
    return 1


def bind(table: Any) -> Executable:
    return Executable(table)


# of some rows at a time, the terms of each sum
Swept = Iterator[tuple[list[int], list[list[Tensor]]]]


class Executable:
    """A table's programs, and the scalars of the sweep that comes next."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._runs = [[Run(*run) for run in table.scalar_runs(k)] for k in range(table.sweep_count)]
        programs = [bucket.program for bucket in table.buckets]
        self._reports = any(program.report_columns or program.group_columns for program in programs)
        self._columns: list[Columns] = []
        # by bucket and sweep, what was resolved last: scalars that are the same at every step are resolved once
        self._resolved: dict[tuple, Resolved] = {}
        # whether the host knows that this step is skipped
        self._is_skipped = False
        self._is_status_clear = False

    @property
    def _is_plain(self) -> bool:
        """Whether numbers are what they are: a trace would keep them, and a subclass may have several."""
        return type(self._table.scalars) is Tensor and not is_traced()

    @property
    def _is_host(self) -> bool:
        return self._is_plain and self._table.scalars.is_cpu

    @torch.no_grad()
    def prepare(self, k: int, amp: Amp) -> None:
        table = self._table
        runs = self._runs[k]
        decides = any(run.scalars.skip is not None for run in runs)
        table.known_steps.check()
        known = self._host_inputs(amp, counts=decides and table.counts)
        of_runs = [None if known is None else on_host(table, run, known) for run in runs]
        devices = [OnDevice(table, run, amp, counts=decides and table.counts) for run in runs]
        self._columns = []
        for run, values, device in zip(runs, of_runs, devices, strict=True):
            found = {} if values is None else known_columns(run, values)
            first = run.scalars.first_column
            rest = [c for c in range(first, first + len(run.scalars.columns)) if c not in found]
            self._columns.append(Columns(run, found, device.columns(rest)))
            if self._reports:
                self._report(run, found, device)
            if run.scalars.kept and self._is_host and values is not None:
                keep_on_host(table, run, values)
            elif run.scalars.kept:
                device.keep()
        if decides:
            skips = table.spec.skip_nonfinite or amp.found_inf is not None
            first_values: Any = of_runs[0]
            number: Any = runs[0].scalars.skip
            if not skips:
                self._take(amp)
            elif self._is_host:
                self._decide_on_host(bool(number if isinstance(number, float) else first_values[number]), amp)
            else:
                self._decide_on_device(devices[0].skip(), amp)
            if table.counts:
                # replays of a graph count unseen
                may_skip = skips or is_capturing()
                table.known_steps.advance(table.host_cells[:, LIVE], may_skip)

    def _host_inputs(self, amp: Amp, counts: bool) -> HostInputs | None:
        """What the host knows without waiting; None: nothing, or it may be something else at a replay."""
        table = self._table
        if not self._is_plain or is_capturing():
            return None
        if self._is_host:
            measured, ids = table.shared
            return HostInputs(
                table.options.double().numpy(),
                table.steps.double().numpy() + counts,
                1.0 if amp.scale is None else float(amp.scale),
                0.0 if amp.found_inf is None else float(amp.found_inf),
                table.kept.to(torch.float64, copy=True).numpy(),
                table.sums.double().numpy(),
                measured.double().numpy(),
                ids.numpy(),
            )
        labels = table.known_steps.labels
        # rows without gradients are not asked for, and need not be known
        is_known = ((labels >= 0) | (table.host_cells[:, LIVE] == 0)).all()
        return HostInputs(
            table.host_options,
            labels + counts if is_known else None,
            1.0 if amp.scale is None else None,
            0.0 if amp.found_inf is None else None,
        )

    def _report(self, run: Run, known: dict[int, np.ndarray], device: OnDevice) -> None:
        """Leave all scalars in the table, where statistics read them."""
        first, target = run.scalars.first_column, self._table.scalars[run.rows]
        for column in range(first, first + len(run.scalars.columns)):
            if self._is_host:
                target[:, column].copy_(torch.from_numpy(known[column].copy()))
            else:
                target[:, column].copy_(device.columns([column])[column])

    # whether the step is taken

    def _take(self, amp: Amp) -> None:
        """In any case."""
        table = self._table
        if table.counts:
            table.steps.add_(table.cells[:, LIVE])
        self._is_skipped = False
        if amp.scale is not None or not self._is_status_clear:
            table.status[SKIP : SCALE + 1].copy_(_status(0.0, amp, table.status))
            table.status[FOUND].zero_()
        self._is_status_clear = amp.scale is None

    def _decide_on_host(self, skip: bool, amp: Amp) -> None:
        table = self._table
        if table.counts and not skip:
            table.steps.add_(table.cells[:, LIVE])
        table.status[SKIP : SCALE + 1].copy_(_status(float(skip), amp, table.status))
        table.status[SKIPPED].add_(float(skip))
        table.status[FOUND].fill_(float(skip))
        self._is_skipped, self._is_status_clear = skip, False

    def _decide_on_device(self, found: Tensor, amp: Amp) -> None:
        table = self._table
        skip = (found != 0).to(table.status.dtype)
        if table.counts:
            table.steps.add_((table.cells[:, LIVE] * (1 - skip)).to(table.steps.dtype))
        table.status[SKIP : SCALE + 1].copy_(_status(skip, amp, table.status))
        table.status[SKIPPED].add_(skip)
        table.status[FOUND].copy_(skip)
        self._is_skipped = self._is_status_clear = False

    # sweeps

    @torch.no_grad()
    def sweep(self, k: int, skips: bool) -> None:
        table, skip = self._table, None
        if skips and self._is_host:
            if self._is_skipped:
                self._clear(k)
                return
        elif skips:
            skip = table.status[SKIP] != 0
        for bucket in table.buckets_with(k):
            self._sweep(bucket, bucket.program.sweeps[k], skip)

    def _clear(self, k: int) -> None:
        for bucket in self._table.buckets_with(k):
            if bucket.program.sweeps[k].clears:
                for t in bucket.tensors[1]:
                    t.zero_()

    def _columns_of(self, bucket: Any, sweep: Sweep) -> Columns | None:
        if not sweep.columns:
            return None
        return next(c for c in self._columns if c.run.first <= bucket.first_row < c.run.end)

    def _sweep(self, bucket: Any, sweep: Sweep, skip: Tensor | None) -> None:
        # of every sum and row; several terms where a tensor was cut
        terms: list[dict[int, list[Tensor]]] = [{} for _ in sweep.folds]
        swept = self._pieces if bucket.program.is_placed else self._lists
        for rows, folded in swept(bucket, sweep, self._columns_of(bucket, sweep), skip):
            for of_rows, found in zip(terms, folded, strict=True):
                for row, term in zip(rows, found, strict=True):
                    of_rows.setdefault(row, []).append(term)
        for at, (_, kind) in enumerate(sweep.folds):
            self._put(bucket, sweep.first_fold + at, kind, terms[at])

    def _lists(self, bucket: Any, sweep: Sweep, columns: Columns | None, skip: Tensor | None) -> Swept:
        table, dtype = self._table, bucket.program.compute_dtype
        resolved: dict[Any, Resolved] = {}
        copied = {i for i, plane in enumerate(bucket.program.planes) if plane.dtype != dtype}
        stored = {place for place, _ in sweep.stores if place != GRAD}
        free = copied if skip is not None else copied | stored

        def resolve(key: Any, rows: list[int]) -> Resolved:
            if key not in resolved:
                scalars = [] if columns is None else columns.take(table, sweep, rows, dtype)
                place = bucket.first_row, id(sweep), skip is None
                if place not in self._resolved or not self._resolved[place].is_for(scalars):
                    self._resolved[place] = Resolved(sweep, scalars, dtype, free, self._is_host)
                resolved[key] = self._resolved[place]
            return resolved[key]

        def limit_of(key: Any, rows: list[int]) -> int | None:
            # one operation in place leaves no results behind, for which there would have to be room
            if not copied and skip is None and resolve(key, rows).is_one_in_place:
                return None
            return list_bytes(self._is_host)

        for part in parts(table, bucket, sweep, columns, limit_of):
            yield part.rows, _run(resolve(part.key, part.rows), part, bucket, skip, sweep.clears)

    def _pieces(self, bucket: Any, sweep: Sweep, columns: Columns | None, skip: Tensor | None) -> Swept:
        """The same where elements share numbers, hold whole ones, or draw random bits."""
        table, program = self._table, bucket.program
        dtype, limit = program.compute_dtype, list_bytes(self._is_host)
        resolved: dict[int, Resolved] = {}
        for row, piece in pieces(table, bucket, limit):
            if row not in resolved:
                scalars = [] if columns is None else columns.take(table, sweep, [row], dtype)
                resolved[row] = Resolved(sweep, scalars, dtype, set(), self._is_host)
            yield [row], run_piece(resolved[row], piece, program, skip, sweep.clears, _folded)

    def _put(self, bucket: Any, fold: int, kind: str, terms: dict[int, list[Tensor]]) -> None:
        """Sums of every row of a bucket, 0 where it has no gradient."""
        target = self._table.sums[fold, bucket.first_row : bucket.end_row]
        if not terms:
            target.zero_()
            return
        combine = torch.sum if kind == "sum" else torch.amax
        totals = {row: x[0] if len(x) == 1 else combine(torch.stack(x)) for row, x in terms.items()}
        # all in one piece: a list of rows would have to be copied to the device, which waits
        zero = next(iter(totals.values())).new_zeros(())
        rows = range(bucket.first_row, bucket.end_row)
        target.copy_(torch.stack([totals.get(row, zero) for row in rows]))


def _status(skip: float | Tensor, amp: Amp, like: Tensor) -> Tensor:
    """Whether a step is skipped, and the scale of its gradients."""
    scale = 1.0 if amp.scale is None else amp.scale.reshape(()).to(like.dtype)
    found = [x if isinstance(x, Tensor) else torch.full_like(like[0], x) for x in (skip, scale)]
    return torch.stack(found)


def _run(resolved: Resolved, part: Part, bucket: Any, skip: Tensor | None, clears: bool) -> list[list[Tensor]]:
    """One sweep over one list; returns what it sums. `skip`, if not None, is known to the device alone."""
    dtype, tensors = bucket.program.compute_dtype, part.tensors
    loaded = tensors
    if not part.plain or any(tensors[slot][0].dtype != dtype for _, slot in resolved.loads):
        loaded = [[]] * len(tensors)
        for _, slot in resolved.loads:
            loaded[slot] = _load(tensors[slot], dtype, part.plain)
    values = resolved.run(loaded) if part.plain else resolved.run_one(loaded)
    if part.plain and resolved.is_in_place:
        return []
    of = dict(zip(resolved.order, values, strict=True))

    def result(x: Any) -> list[Any]:
        return of[x] if isinstance(x, Operation) else x if isinstance(x, list) else [x] * len(part.rows)

    stored = {slot for slot, _ in resolved.stores}
    # an operation may have left new numbers in the memory of a slot
    homes = {id(loaded[slot]): slot for _, slot in resolved.loads if loaded[slot] is tensors[slot]}
    new: dict[int, list[Any]] = {}
    for slot, x in resolved.stores:
        numbers = result(x)
        home = homes.get(id(numbers), slot)
        # in the memory of another slot, which will be written
        new[slot] = [t.clone() for t in numbers] if home != slot and home in stored else numbers
    if part.plain:
        resolved.is_in_place = not resolved.folds and all(new[i] is tensors[i] for i in new)
    # before anything is stored: what is summed may be what was loaded
    folded = []
    for kind, x in resolved.folds:
        terms = result(x)
        if not isinstance(x, Operation):
            terms = [filled(_real(t), each, dtype) for t, each in zip(tensors[PARAM], terms, strict=True)]
        folded.append(_folded(kind, terms, part.plain))
    for slot, numbers in new.items():
        if slot == GRAD and clears:
            # whether or not the step is taken, and though it may be expanded
            for t in tensors[slot]:
                t.zero_()
        elif numbers is not tensors[slot]:
            # gradients that are unscaled: autograd is not told, as by torch's fused optimizers
            targets = [t.data for t in tensors[slot]] if slot == GRAD else tensors[slot]
            _store(targets, numbers, skip, part.plain)
    return folded


def _load(tensors: list[Tensor], dtype: torch.dtype, plain: bool) -> list[Tensor]:
    if not plain:
        return [_real(t).to(dtype) for t in tensors]
    if tensors[0].dtype == dtype:
        return tensors
    if tensors[0].is_cpu:
        return [t.to(dtype) for t in tensors]
    copies = [torch.empty_like(t, dtype=dtype) for t in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def _store(tensors: list[Tensor], numbers: list[Any], skip: Tensor | None, plain: bool) -> None:
    if plain and skip is None and isinstance(numbers[0], Tensor):
        torch._foreach_copy_(tensors, numbers)
        return
    for t, new in zip(tensors, numbers, strict=True):
        target = _real(t)
        if not isinstance(new, Tensor):
            new = filled(target, new, target.dtype)
        target.copy_(new if skip is None else torch.where(skip, target, new))
        if t.is_conj() or t.is_neg():
            # written to a copy so far
            t.copy_(torch.view_as_complex(target) if t.is_complex() else target)


def _folded(kind: str, terms: list[Tensor], plain: bool) -> list[Tensor]:
    # mps has no float64
    exact = torch.float64 if terms[0].device.type != "mps" else torch.float32
    if kind == "squares" and plain and terms[0].is_cpu:
        return [*map(_squares, terms)]
    if kind == "squares" and plain:
        norms = torch._foreach_norm(terms, 2, dtype=exact)
        return [*torch._foreach_mul(norms, norms)]
    if kind == "squares":
        return [(t * t).sum(dtype=exact) for t in terms]
    if kind == "sum":
        return [t.sum(dtype=exact) for t in terms]
    # of nothing there is no largest; no branch: ranks in one process may have other numbers of elements
    return [torch.cat((t.to(exact).flatten(), t.new_zeros(1, dtype=exact))).amax() for t in terms]


# so few squares can be summed in float32 without losing what it holds
_SQUARES = 1024


def _squares(t: Tensor) -> Tensor:
    """The sum of squares in float64, of sums of a few: a quarter of the time that float64 takes throughout."""
    flat, count = t.detach().reshape(-1), t.numel()
    if count <= _SQUARES:
        return torch.dot(flat, flat)
    whole = count // _SQUARES * _SQUARES
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, _SQUARES), dim=1).double()
    total = torch.dot(norms, norms)
    return total if whole == count else total + torch.dot(flat[whole:], flat[whole:])


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.resolve_neg()
