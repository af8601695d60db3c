"""The torch engine: programs as operations on lists of tensors, on any device and for any tensor subclass.

The instructions of a sweep are done one after the other, each for a whole list (`torch._foreach_*`, or a loop
where there is no such operation). Lists are bounded, so that intermediate results never grow with the model.
Scalars are numbers where the host knows them, exactly what torch.optim computes with; otherwise they stay on
the device.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._algorithm.program import Instruction, Scalars, Sweep
from . import GROUP, LIVE, SKIP, SKIPPED, Amp, is_traced

NAME = "torch"
BY_ADDRESS = False
CHUNK = 1
# of one role, in one list
_LIST_BYTES = 64 << 20


def unavailable(device_type: str) -> str | None:
    return None


def bind(table: Any) -> Executable:
    return Executable(table)


class Executable:
    """A table's programs, done instruction by instruction."""

    def __init__(self, table: Any) -> None:
        self._table = table
        # of every row, the numbers of its columns, as far as the host knows them
        self._numbers: list[list[float]] | None = None

    @torch.no_grad()
    def prepare(self, k: int, amp: Amp) -> None:
        table = self._table
        runs = [*table.scalar_runs(k)]
        skips = [_prepare(table, scalars, first, end, amp) for scalars, first, end in runs]
        decided = [skip for skip in skips if skip is not None]
        if decided:
            skip = (decided[0] != 0).to(table.status.dtype)
            scale = _scale(table, amp).to(table.status.dtype)
            table.status.copy_(torch.stack((skip, scale, table.status[SKIPPED] + skip, skip)))
        # a trace would keep numbers
        on_host = type(table.scalars) is Tensor and table.scalars.is_cpu and not is_traced()
        self._numbers = table.scalars.tolist() if on_host else None

    @torch.no_grad()
    def sweep(self, k: int, skips: bool) -> None:
        table = self._table
        skip = table.status[SKIP] != 0 if skips else None
        for bucket in table.buckets_with(k):
            sweep = bucket.program.sweeps[k]
            sums = table.sums[sweep.first_fold : sweep.first_fold + len(sweep.folds)]
            if sweep.folds:
                sums[:, bucket.first_row : bucket.first_row + len(bucket.rows)] = 0
            for part in _parts(bucket):
                at = [bucket.first_row + bucket.live[i] for i in part]
                stored = [[tensors[i] for i in part] for tensors in bucket.tensors]
                folded = _run(
                    sweep, stored, self._columns(at, sweep.columns, bucket.compute_dtype), skip, bucket
                )
                for of_fold, totals in zip(sums, folded, strict=True):
                    # one by one: a list of places would have to be copied to the device, which waits
                    for i, total in zip(at, totals, strict=True):
                        of_fold[i] = total

    def _columns(self, at: list[int], columns: Sequence[int], dtype: torch.dtype) -> list[Any]:
        """Each scalar of these rows: a number if that is the same for all of them, else one for each."""
        if not columns:
            return []
        if self._numbers is None:
            scalars = self._table.scalars[:, columns[0] : columns[-1] + 1].to(dtype)
            rows = [scalars[i].unbind() for i in at]
            return [rows[0][c] if len(at) == 1 else [row[c] for row in rows] for c in range(len(columns))]
        found: list[Any] = []
        for column in columns:
            numbers = [self._numbers[i][column] for i in at]
            same = all(number == numbers[0] for number in numbers)
            found.append(numbers[0] if same else numbers)
        return found


# scalars: the same instructions, on a vector with an element for each row


def _scale(table: Any, amp: Amp) -> Tensor:
    return table.scalars.new_ones(()) if amp.scale is None else amp.scale.reshape(()).to(table.scalars.dtype)


def _prepare(table: Any, scalars: Scalars, first: int, end: int, amp: Amp) -> Tensor | None:
    """The scalars of consecutive rows; where that is decided, returns what is not 0 if the step is skipped."""
    rows = slice(first, end)
    options, steps = table.options[table.cells[rows, GROUP]], table.steps[rows]
    decides = scalars.skip is not None
    step = steps + 1 if table.counts and decides else steps
    exact = table.scalars.dtype
    found_inf = table.scalars.new_zeros(()) if amp.found_inf is None else amp.found_inf.reshape(()).to(exact)
    measured, clip_ids = table.shared

    def value(kind: str, which: Any) -> Tensor:
        if kind == "option":
            return options[:, table.option_columns[which]]
        if kind == "fold":
            return table.sums[which, rows]
        if kind == "clip_total":
            return _clip_totals(measured[which], clip_ids, table.clip_ids[rows], table.shared_kinds[which])
        if kind == "all_total":
            return measured[which].sum()
        return {"step": step.to(exact), "scale": _scale(table, amp), "found_inf": found_inf}[kind]

    values = _walk(scalars.code, [value(*at) for at in scalars.inputs], _on_vectors)
    if scalars.columns:
        like = options[:, 0]
        columns = [_number_of(values, number, like).expand_as(like) for number in scalars.columns]
        table.scalars[rows, scalars.first_column : scalars.first_column + len(columns)] = torch.stack(
            columns, 1
        )
    if not decides:
        return None
    skip = _number_of(values, scalars.skip, found_inf).reshape(-1)[0]
    if table.counts:
        steps += (table.cells[rows, LIVE] * (skip == 0)).to(steps.dtype)
    return skip


def _number_of(values: list[Any], number: Any, like: Tensor) -> Tensor:
    value = number if isinstance(number, float) else values[number]
    return value.to(like.dtype) if isinstance(value, Tensor) else torch.full_like(like, value)


def _clip_totals(measured: Tensor, ids: Tensor, wanted: np.ndarray, kind: str) -> Tensor:
    """For every row, what was measured of all rows it is clipped with."""
    fold = torch.sum if kind == "sum" else torch.amax
    totals = {i: fold(torch.where(ids == i, measured, 0)) for i in {*wanted.tolist()}}
    return torch.stack([totals[i] for i in wanted.tolist()])


# instructions


def _walk(code: Sequence[Instruction], values: list[Any], do: Callable[[str, list[Any]], Any]) -> list[Any]:
    """`values`, then the results of `code` on them."""
    values = [*values]
    for op, args in code:
        values.append(do(op, [arg if isinstance(arg, float) else values[arg] for arg in args]))
    return values


_OPERATORS: dict[str, Callable] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "constant": float,
}
_NUMBERS: dict[str, Callable] = {
    **_OPERATORS,
    "fma": lambda a, b, c: a * b + c,
    "where": lambda condition, a, b: a if condition else b,
    "sqrt": math.sqrt,
    "maximum": lambda a, b: a if a > b or a != a else b,
    "minimum": lambda a, b: a if a < b or a != a else b,
    "power": math.pow,
    "exp": math.exp,
    "log": math.log,
    "tanh": math.tanh,
    "cos": math.cos,
}


def _fma(a, b, c):
    # add with a number rounds once on CPU, as torch.optim's own updates do
    for factor, other in ((a, b), (b, a)):
        if isinstance(factor, float) and isinstance(other, Tensor):
            return torch.add(c, other, alpha=factor)
    return torch.addcmul(c, b, a) if isinstance(c, Tensor) and isinstance(b, Tensor) else a * b + c


def _where(condition, a, b):
    if not isinstance(condition, Tensor):
        return a if condition else b
    if isinstance(a, float) and isinstance(b, float):
        # numbers alone would have torch's default dtype
        a = torch.full((), a, dtype=torch.float64, device=condition.device)
    return torch.where(condition, a, b)


def _as_tensors(function: Callable) -> Callable:
    def call(*args: Any) -> Any:
        like = next(arg for arg in args if isinstance(arg, Tensor))
        return function(*(arg if isinstance(arg, Tensor) else like.new_full((), arg) for arg in args))

    return call


_TENSORS: dict[str, Callable] = {
    **_OPERATORS,
    "fma": _fma,
    "where": _where,
    "sqrt": torch.sqrt,
    "maximum": _as_tensors(torch.maximum),
    "minimum": _as_tensors(torch.minimum),
    "power": torch.pow,
    "exp": torch.exp,
    "log": torch.log,
    "tanh": torch.tanh,
    "cos": torch.cos,
}


def _on_vectors(op: str, args: list[Any]) -> Any:
    known = _NUMBERS if not any(isinstance(arg, Tensor) for arg in args) else _TENSORS
    return known[op](*args)


def _on_lists(op: str, args: list[Any]) -> Any:
    """An operation on lists of tensors, and numbers, tensors or lists of these that go with them."""
    lists = [arg for arg in args if isinstance(arg, list)]
    if not lists:
        return _on_vectors(op, args)
    fast = _foreach(op, args)
    if fast is not None:
        # these operations give tuples
        return [*fast] if isinstance(fast, tuple) else fast
    return [
        _on_vectors(op, [arg[i] if isinstance(arg, list) else arg for arg in args])
        for i in range(len(lists[0]))
    ]


def _is_tensors(arg: Any) -> bool:
    return isinstance(arg, list) and isinstance(arg[0], Tensor) and arg[0].dim() + arg[-1].dim() > 0


def _is_numbers(arg: Any) -> bool:
    return isinstance(arg, float) or (isinstance(arg, list) and isinstance(arg[0], float))


_BY_LIST = {"add": torch._foreach_add, "sub": torch._foreach_sub, "mul": torch._foreach_mul}
_BY_LIST |= {"div": torch._foreach_div}
_UNARY = {"neg": torch._foreach_neg, "sqrt": torch._foreach_sqrt, "exp": torch._foreach_exp}
_UNARY |= {"log": torch._foreach_log, "tanh": torch._foreach_tanh, "cos": torch._foreach_cos}


def _foreach(op: str, args: list[Any]) -> Any:
    """The result by one of torch's operations on lists, if there is one for these arguments."""
    if op == "where":
        return None if isinstance(args[0], (list, Tensor)) else args[1] if args[0] else args[2]
    tensors = [_is_tensors(arg) for arg in args]
    if op in _UNARY and tensors[0]:
        return _UNARY[op](args[0])
    if op == "mul" and tensors == [False, True]:
        args, tensors = args[::-1], [True, False]
    if op == "mul" and isinstance(args[1], float) and args[1] == 1.0:
        return args[0]
    if op in _BY_LIST and tensors[0] and (tensors[1] or _is_numbers(args[1])):
        return _BY_LIST[op](args[0], args[1])
    if op == "fma" and isinstance(args[0], float) and tensors[1]:
        if tensors[2]:
            return torch._foreach_add(args[2], args[1], alpha=args[0])
        if isinstance(args[2], float):
            return None
    if op == "fma" and all(tensors):
        return torch._foreach_addcmul(args[2], args[0], args[1])
    return None


# sweeps


def _parts(bucket: Any) -> Iterator[list[int]]:
    """The live rows of a bucket, in lists of bounded size."""
    part: list[int] = []
    size = 0
    for i, p in enumerate(bucket.tensors[0]):
        if type(p) not in (Tensor, torch.nn.Parameter) or is_traced():
            # one at a time: a subclass need not know operations on lists
            yield [i]
            continue
        part.append(i)
        size += p.nbytes
        if size >= _LIST_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _run(
    sweep: Sweep, stored: list[list[Tensor]], columns: list[Any], skip: Tensor | None, bucket: Any
) -> list[list[Tensor]]:
    """One sweep over a list of parameters; returns what it sums, for each of them."""
    dtype = bucket.compute_dtype
    loaded = [[_real(t).to(dtype) for t in stored[k]] for k in sweep.loads]
    values = _walk(sweep.code, [*loaded, *columns], _on_lists)
    for k, number in sweep.stores:
        name, new = bucket.program.slots[k].letter, values[number]
        for i, t in enumerate(stored[k]):
            if name == "g" and sweep.clears:
                # whether or not the step is taken, and though it may be expanded
                t.zero_()
            else:
                # gradients that are unscaled: autograd is not told, as by torch's fused optimizers
                _store(t.data if name == "g" else t, new[i] if isinstance(new, list) else new, skip)
    return [[_folded(kind, values[number][i]) for i in range(len(stored[0]))] for number, kind in sweep.folds]


def _store(t: Tensor, new: Any, skip: Tensor | None) -> None:
    target = _real(t)
    if not isinstance(new, Tensor):
        new = torch.full_like(target, new)
    target.copy_(new if skip is None else torch.where(skip, target, new))
    if t.is_conj() or t.is_neg():
        # written to a copy so far
        t.copy_(torch.view_as_complex(target) if t.is_complex() else target)


def _folded(kind: str, term: Tensor) -> Tensor:
    term = term.to(torch.float64 if term.device.type != "mps" else None)
    # of nothing there is no largest; no branch: ranks in one process may have other numbers of elements
    return term.sum() if kind == "sum" else torch.cat((term.flatten(), term.new_zeros(1))).amax()


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.resolve_neg()
