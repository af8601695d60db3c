"""Which tensors are stepped by one list: those with the same conditions, and no more than a bounded size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._algorithm.program import Scalars, Sweep
from .. import GROUP, PLAIN_TYPES, SIZES, is_traced
from .scalars import Run
from .words import COMPARISONS

# of one slot, in one list; on the host they stay in the cache from one operation to the next
LIST_BYTES = 64 << 20
HOST_LIST_BYTES = 5 << 19


def list_bytes(is_host: bool) -> int:
    return HOST_LIST_BYTES if is_host else LIST_BYTES


class Part(NamedTuple):
    """Tensors that are stepped together: their rows in the table, and each slot of them.

    Those with the same `key` have the same scalars. Those that are not `plain` know ordinary operations only.
    """

    key: Any
    rows: list[int]
    tensors: list[list[Tensor]]
    plain: bool


class Columns:
    """The scalars of a run: a number for each row where the host knows them, a tensor otherwise."""

    def __init__(self, run: Run, known: dict[int, np.ndarray], unknown: dict[int, Tensor]) -> None:
        self.run, self._known, self._unknown = run, known, unknown
        self._as_dtype: dict[tuple[int, torch.dtype], Any] = {}

    def keys(self, table: Any, sweep: Sweep, rows: Sequence[int]) -> list[Any] | None:
        """For each row, what those in one list must have in common; None if all have it."""
        apart = []
        for column in _conditions(sweep):
            numbers = self._numbers(column, rows) if column in self._known else []
            if len(numbers) > 1:
                apart.append(numbers)
        if any(self._is_shared(column) for column in sweep.columns):
            classes = self._classes(table, rows)
            # with lists of a few, one operation for each tensor with its own scalar is the smaller evil
            if 1 < len({*classes}) <= len(rows) // 8:
                apart.append(classes)
        return [*zip(*apart, strict=True)] if apart else None

    def _numbers(self, column: int, rows: Sequence[int]) -> list[float]:
        """The numbers of these rows in a column that the host knows: one, if it is the same for all of them."""
        numbers = self._known[column]
        # a number of all rows is broadcast to them
        if numbers.strides != (0,):
            numbers = numbers[np.array(rows) - self.run.first]
        is_one = numbers.strides == (0,) or (numbers == numbers[0]).all()
        return numbers[:1].tolist() if is_one else numbers.tolist()

    def _is_shared(self, column: int) -> bool:
        """Whether only the device knows it, and it is the same for rows of a group with equal step counts."""
        unknown = self._unknown.get(column)
        return unknown is not None and unknown.dim() > 0 and column not in _varying(self.run.scalars)

    @staticmethod
    def _classes(table: Any, rows: Sequence[int]) -> list[Any]:
        groups, labels = table.host_cells[:, GROUP], table.known_steps.labels
        return [*zip(groups[rows].tolist(), labels[rows].tolist(), strict=True)]

    def take(self, table: Any, sweep: Sweep, rows: Sequence[int], dtype: torch.dtype) -> list[Any]:
        """Every scalar of these rows: one if that is the same for all of them, else one for each."""
        one_class = None
        found: list[Any] = []
        for column in sweep.columns:
            if column in self._known:
                numbers = self._numbers(column, rows)
                found.append(numbers if len(numbers) > 1 else numbers[0])
                continue
            vector = self._in(dtype, column)
            if self._is_shared(column) and one_class is None:
                one_class = len({*self._classes(table, rows)}) == 1
            if vector.dim() == 0:
                found.append(vector)
            elif len(rows) == 1 or (one_class and self._is_shared(column)):
                found.append(vector[rows[0] - self.run.first])
            else:
                # a list of places would have to be copied to the device, which waits
                scalars = vector.unbind()
                found.append([scalars[row - self.run.first] for row in rows])
        return found

    def _in(self, dtype: torch.dtype, column: int) -> Tensor:
        if (column, dtype) not in self._as_dtype:
            self._as_dtype[column, dtype] = self._unknown[column].to(dtype)
        return self._as_dtype[column, dtype]

    def differ(self, sweep: Sweep, rows: Sequence[int]) -> bool:
        """Whether a scalar differs between these rows, or may."""
        if any(column in self._unknown for column in sweep.columns):
            return True
        return any(len(self._numbers(column, rows)) > 1 for column in sweep.columns)


@functools.cache
def _varying(scalars: Scalars) -> frozenset[int]:
    """The columns that may differ between rows of a group with the same step count."""
    values = [kind in ("fold", "clip_total", "kept", *SIZES) for kind, _ in scalars.inputs]
    for _, args in scalars.code:
        values.append(any(values[arg] for arg in args if not isinstance(arg, float)))
    numbers = enumerate(scalars.columns, scalars.first_column)
    return frozenset(column for column, number in numbers if not isinstance(number, float) and values[number])


@functools.cache
def _conditions(sweep: Sweep) -> frozenset[int]:
    """The columns that decide which instructions are done."""
    # of every value, the columns it is made of; None if it belongs to elements
    made_of: list[frozenset[int] | None] = [None] * len(sweep.loads)
    made_of += [frozenset([column]) for column in sweep.columns]
    found: frozenset[int] = frozenset()
    for op, args in sweep.code:
        of_args = [made_of[arg] for arg in args if not isinstance(arg, float)]
        uniform = [of for of in of_args if of is not None]
        made_of.append(None if len(uniform) < len(of_args) else frozenset().union(*uniform))
        if op in COMPARISONS and made_of[-1] is not None:
            found |= made_of[-1]
        if op == "where" and not isinstance(args[0], float) and made_of[args[0]] is not None:
            found |= made_of[args[0]] or frozenset()
    return found


def parts(
    table: Any,
    bucket: Any,
    sweep: Sweep,
    columns: Columns | None,
    limit_of: Callable[[Any, list[int]], int | None],
) -> Iterator[Part]:
    """The live rows of a bucket, in lists of no more bytes than `limit_of(key, rows)`, if that is a limit."""
    slots, rows = bucket.tensors, [bucket.first_row + i for i in bucket.live]
    if type(table.scalars) is not Tensor:
        # beside scalars of a subclass (LocalTensor: one for each rank) nothing may be overwritten
        odd = {*range(len(rows))}
    else:
        odd = set() if bucket.is_plain and not is_traced() else _odd_places(slots)
    if not bucket.is_plain and len(odd) < len(rows) and any(map(Tensor.is_complex, slots[0])):
        slots = [
            [torch.view_as_real(t) if t.is_complex() and i not in odd else t for i, t in enumerate(tensors)]
            for tensors in slots
        ]
    for i in odd:
        # a subclass need not know operations on lists
        yield Part(("odd", rows[i]), [rows[i]], [[tensors[i]] for tensors in slots], plain=False)
    places = [i for i in range(len(rows)) if i not in odd] if odd else [*range(len(rows))]
    if not places:
        return
    keys = None if columns is None else columns.keys(table, sweep, [rows[i] for i in places])
    lists: dict[Any, list[int]] = {(): places} if keys is None else {}
    for i, key in zip(places, keys or (), strict=False):
        lists.setdefault(key, []).append(i)
    sizes: list[int] = []
    for key, members in lists.items():
        of_list = [rows[i] for i in members]
        # those of a list with scalars of their own are resolved by themselves
        same = columns is None or not columns.differ(sweep, of_list)
        limit = limit_of((key, () if same else (*of_list,)), of_list)
        if limit is not None and not sizes:
            sizes = [n * slots[0][places[0]].itemsize for n in map(Tensor.numel, slots[0])]
        for part in [members] if limit is None else _bounded(members, sizes, limit):
            of_part = of_list if part is members else [rows[i] for i in part]
            tensors = slots if len(part) == len(rows) else [[column[i] for i in part] for column in slots]
            whole = Part((key, () if same else (*of_part,)), of_part, tensors, plain=True)
            if limit is not None and len(part) == 1 and sizes[part[0]] > limit:
                yield from _cut(whole, limit)
            else:
                yield whole


def _odd_places(slots: list[list[Tensor]]) -> set[int]:
    """Where tensors are traced, more than plain ones, or have numbers that are not those in their memory."""
    if is_traced():
        return {*range(len(slots[0]))}
    flat = [*chain.from_iterable(slots)]
    odd: set[int] = set()
    if not {*map(type, flat)} <= PLAIN_TYPES:
        odd |= {i % len(slots[0]) for i, t in enumerate(flat) if type(t) not in PLAIN_TYPES}
    # states were allocated here
    params, grads = slots[:2]
    if any(map(Tensor.is_neg, params)) or any(map(Tensor.is_neg, grads)) or any(map(Tensor.is_complex, params)):
        odd |= {i % len(slots[0]) for i, t in enumerate(flat) if t.is_neg() or t.is_conj()}
    return odd


def _bounded(places: list[int], sizes: list[int], limit: int) -> Iterator[list[int]]:
    start, total = 0, 0
    for at, i in enumerate(places):
        if total + sizes[i] > limit and at > start:
            yield places[start:at]
            start, total = at, 0
        total += sizes[i]
    yield places[start:]


def _cut(part: Part, limit: int) -> Iterator[Part]:
    """A large tensor in pieces, if it lies so that they are views."""
    tensors = [column[0] for column in part.tensors]
    if not all(t.is_contiguous() for t in tensors):
        yield part
        return
    # equal ones, and none much smaller than a list need be
    count = -(-tensors[0].nbytes // limit)
    length = -(-tensors[0].numel() // count)
    for pieces in zip(*(t.detach().view(-1).split(length) for t in tensors), strict=True):
        yield part._replace(tensors=[[t] for t in pieces])
