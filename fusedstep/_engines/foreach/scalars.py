"""Scalars before a sweep: instructions on vectors with an element for each row of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._algorithm.program import Scalars
from .. import GROUP, LIVE, Amp
from .words import on_tensors

# inputs that differ between rows of a group with the same step count
_SUMS = ("fold", "clip_total")


class Run(NamedTuple):
    """Consecutive rows of a table that have these scalars."""

    scalars: Scalars
    first: int
    end: int


def on_device(table: Any, run: Run, amp: Amp) -> Tensor | None:
    """Computes them into the table; where that is decided, returns what is not 0 if the step is skipped."""
    scalars, rows = run.scalars, slice(run.first, run.end)
    # not by an index: that starts all threads, which may take milliseconds
    options, steps = table.options.index_select(0, table.cells[rows, GROUP]), table.steps[rows]
    decides = scalars.skip is not None
    exact = table.scalars.dtype
    found_inf = table.scalars.new_zeros(()) if amp.found_inf is None else amp.found_inf.reshape(()).to(exact)
    step = steps + 1 if table.counts and decides else steps
    given = {"step": step.to(exact), "scale": scale_of(table, amp), "found_inf": found_inf}
    measured, clip_ids = table.shared

    def value(kind: str, which: Any) -> Tensor:
        if kind == "option":
            return options[:, table.option_columns[which]]
        if kind == "fold":
            return table.sums[which, rows]
        if kind == "clip_total":
            return _clip_totals(measured[which], clip_ids, table.clip_ids[rows], table.shared_kinds[which])
        return measured[which].sum() if kind == "all_total" else given[kind]

    values = _values(scalars, value, exact)
    if scalars.columns:
        like = options[:, 0]
        columns = [_number_of(values, number, like).expand_as(like) for number in scalars.columns]
        last = scalars.first_column + len(columns)
        table.scalars[rows, scalars.first_column : last] = torch.stack(columns, 1)
    if not decides:
        return None
    skip = _number_of(values, scalars.skip, found_inf).reshape(-1)[0]
    if table.counts:
        steps += (table.cells[rows, LIVE] * (skip == 0)).to(steps.dtype)
    return skip


def on_host(table: Any, run: Run, counts: Tensor | None) -> Tensor:
    """The same for rows of a device, as far as the host knows; NaN where it must be read there."""
    scalars, rows = run.scalars, slice(run.first, run.end)
    decides = scalars.skip is not None
    options = None
    if table.host_options is not None:
        options = torch.from_numpy(table.host_options[table.host_cells[rows, GROUP]])

    def value(kind: str, which: Any) -> Tensor | None:
        if kind == "option":
            return None if options is None else options[:, table.option_columns[which]]
        if kind == "step" and counts is not None:
            return counts[rows] + 1 if table.counts and decides else counts[rows]
        # where the host asks, there is no GradScaler
        return torch.ones((), dtype=torch.float64) if kind == "scale" else None

    values = _values(scalars, value, torch.float64)
    found = torch.full((run.end - run.first, len(scalars.columns)), torch.nan, dtype=torch.float64)
    for i, number in enumerate(scalars.columns):
        if isinstance(number, float) or values[number] is not None:
            found[:, i] = _number_of(values, number, found[:, i])
    return found


def varying(scalars: Scalars) -> set[int]:
    """The columns that depend on sums over each tensor."""
    values = [kind in _SUMS for kind, _ in scalars.inputs]
    for _, args in scalars.code:
        values.append(any(values[arg] for arg in args if not isinstance(arg, float)))
    numbers = enumerate(scalars.columns, scalars.first_column)
    return {column for column, number in numbers if not isinstance(number, float) and values[number]}


def scale_of(table: Any, amp: Amp) -> Tensor:
    return table.scalars.new_ones(()) if amp.scale is None else amp.scale.reshape(()).to(table.scalars.dtype)


def _values(scalars: Scalars, value: Callable[[str, Any], Tensor | None], dtype: torch.dtype) -> list[Any]:
    """The inputs, then the results of the code on them; None is what cannot be known."""
    values: list[Any] = [value(*at) for at in scalars.inputs]
    for op, args in scalars.code:
        found = [arg if isinstance(arg, float) else values[arg] for arg in args]
        values.append(None if any(x is None for x in found) else on_tensors(op, found, dtype))
    return values


def _number_of(values: list[Any], number: Any, like: Tensor) -> Tensor:
    value = number if isinstance(number, float) else values[number]
    return value.to(like.dtype) if isinstance(value, Tensor) else torch.full_like(like, value)


def _clip_totals(measured: Tensor, ids: Tensor, wanted: np.ndarray, kind: str) -> Tensor:
    """For every row, what was measured of all rows it is clipped with."""
    fold = torch.sum if kind == "sum" else torch.amax
    totals = {i: fold(torch.where(ids == i, measured, 0)) for i in {*wanted.tolist()}}
    return torch.stack([totals[i] for i in wanted.tolist()])
