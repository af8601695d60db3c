"""Scalars before a sweep: on the host, as far as it knows what they are made of, and on the device otherwise.

Either way the instructions are done on vectors with an element for each row of a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._algorithm.program import Scalars
from .. import GROUP, LIVE, SIZES, Amp, clip_totals
from .words import on_numbers, on_tensors


class Run(NamedTuple):
    """Consecutive rows of a table that have these scalars."""

    scalars: Scalars
    first: int
    end: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.end)


# on the host


class HostInputs(NamedTuple):
    """What the host knows of a step; None: only the device does. The last four are those of a CPU table."""

    options: np.ndarray
    steps: np.ndarray | None
    scale: float | None
    found_inf: float | None
    kept: np.ndarray | None = None
    sums: np.ndarray | None = None
    measured: np.ndarray | None = None
    measured_ids: np.ndarray | None = None


def on_host(table: Any, run: Run, known: HostInputs) -> list[Any]:
    """All values of a run, the inputs and then the results of its code; None where it takes the device. Values
    that are the same for all rows may have one element.
    """
    options = known.options[_one_if_equal(table.host_cells[run.rows, GROUP])]

    def value(kind: str, which: Any) -> Any:
        if kind == "option":
            found = options[:, table.option_columns[which]]
            # NaN stands for a tensor on the device, where the host does not know everything
            return None if known.sums is None and np.isnan(found).any() else found
        if kind == "step":
            return None if known.steps is None else _one_if_equal(known.steps[run.rows])
        if kind in SIZES:
            return table.host_cells[run.rows, SIZES[kind]].astype(np.float64)
        if kind == "kept":
            return None if known.kept is None else known.kept[which, run.rows]
        if kind in ("scale", "found_inf"):
            return known.scale if kind == "scale" else known.found_inf
        if known.sums is None or known.measured is None or known.measured_ids is None:
            return None
        if kind == "fold":
            return known.sums[which, run.rows]
        if kind == "all_total":
            return known.measured[which].sum()
        totals = clip_totals(table.shared_kinds[which], known.measured[which], known.measured_ids)
        return totals[table.clip_ids[run.rows]]

    values = [value(*at) for at in run.scalars.inputs]
    for op, args in run.scalars.code:
        values.append(_on_known(op, [arg if isinstance(arg, float) else values[arg] for arg in args]))
    return values


def _one_if_equal(numbers: np.ndarray) -> np.ndarray:
    return numbers[:1] if (numbers == numbers[0]).all() else numbers


def _on_known(op: str, args: list[Any]) -> Any:
    if op == "where" and args[0] is not None:
        # what was not chosen need not be known
        if np.all(args[0]):
            return args[1]
        if not np.any(args[0]):
            return args[2]
    return None if any(arg is None for arg in args) else on_numbers(op, args)


def known_columns(run: Run, values: list[Any]) -> dict[int, np.ndarray]:
    """Those columns of a run that the host knows, with a number for each row."""
    found = {}
    for column, number in enumerate(run.scalars.columns, run.scalars.first_column):
        value = number if isinstance(number, float) else values[number]
        if value is not None:
            found[column] = np.broadcast_to(np.asarray(value, np.float64), (run.end - run.first,))
    return found


def keep_on_host(table: Any, run: Run, values: list[Any]) -> None:
    """Have the table hold what is kept now of every tensor that is stepped."""
    live = table.host_cells[run.rows, LIVE] != 0
    for target, number in zip(table.kept[:, run.rows], run.scalars.kept, strict=False):
        value = number if isinstance(number, float) else values[number]
        target.copy_(torch.from_numpy(np.where(live, value, target.numpy())))


# on the device


class OnDevice:
    """Values of a run on the device, each computed when it is asked for."""

    def __init__(self, table: Any, run: Run, amp: Amp, counts: bool) -> None:
        self._table, self._run, self._amp, self._counts = table, run, amp, counts
        self._exact = table.scalars.dtype
        self._options: Tensor | None = None
        self._values: dict[int, Any] = {}

    def columns(self, which: Iterable[int]) -> dict[int, Tensor]:
        """Columns with an element for each row, or with one that all of them share."""
        scalars = self._run.scalars
        return {column: self._tensor(scalars.columns[column - scalars.first_column]) for column in which}

    def keep(self) -> None:
        """Have the table hold what is kept now of every tensor that is stepped."""
        rows, kept = self._run.rows, self._run.scalars.kept
        new = [self._tensor(number).to(self._table.kept.dtype) for number in kept]
        for target, value in zip(self._table.kept[:, rows], new, strict=False):
            target.copy_(torch.where(self._table.cells[rows, LIVE] != 0, value, target))

    def skip(self) -> Tensor:
        """Not 0 if the step is skipped."""
        assert self._run.scalars.skip is not None
        return self._tensor(self._run.scalars.skip).reshape(-1)[0]

    def _tensor(self, number: int | float) -> Tensor:
        value = number if isinstance(number, float) else self._value(number)
        if isinstance(value, Tensor):
            return value.to(self._exact)
        return torch.full((), value, dtype=self._exact, device=self._table.device)

    def _value(self, number: int) -> Any:
        if number not in self._values:
            scalars = self._run.scalars
            at = number - len(scalars.inputs)
            if at < 0:
                self._values[number] = self._input(*scalars.inputs[number])
            else:
                op, args = scalars.code[at]
                found = [arg if isinstance(arg, float) else self._value(arg) for arg in args]
                self._values[number] = on_tensors(op, found, self._exact)
        return self._values[number]

    def _input(self, kind: str, which: Any) -> Any:
        table, rows = self._table, self._run.rows
        if kind == "option":
            if self._options is None:
                self._options = table.options.index_select(0, table.cells[rows, GROUP])
            return self._options[:, table.option_columns[which]]
        if kind == "step":
            return (table.steps[rows] + 1 if self._counts else table.steps[rows]).to(self._exact)
        if kind in SIZES:
            return table.cells[rows, SIZES[kind]].to(self._exact)
        if kind == "kept":
            # a copy: it is written before all that is made of it is read
            return table.kept[which, rows].to(self._exact, copy=True)
        if kind == "scale":
            return 1.0 if self._amp.scale is None else self._amp.scale.reshape(()).to(self._exact)
        if kind == "found_inf":
            return 0.0 if self._amp.found_inf is None else self._amp.found_inf.reshape(()).to(self._exact)
        if kind == "fold":
            return table.sums[which, rows]
        measured, ids = table.shared
        if kind == "all_total":
            return measured[which].sum()
        return _clip_totals(measured[which], ids, table.clip_ids[rows], table.shared_kinds[which])


def _clip_totals(measured: Tensor, ids: Tensor, wanted: np.ndarray, kind: str) -> Tensor:
    """For every row, what was measured of all rows it is clipped with."""
    fold = torch.sum if kind == "sum" else torch.amax
    totals = {i: fold(torch.where(ids == i, measured, 0)) for i in {*wanted.tolist()}}
    if len(totals) == 1:
        return next(iter(totals.values()))
    return torch.stack([totals[i] for i in wanted.tolist()])
