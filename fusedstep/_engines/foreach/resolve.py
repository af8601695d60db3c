"""What is left of a sweep once its scalars are known.

Conditions that are numbers choose, and what was not chosen vanishes; factors of 1 vanish; and where torch has
one operation for several instructions, that is taken. What remains are operations on lists, each of which knows
the values that nobody needs after it: they may be overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._algorithm.program import Sweep
from ..._algorithm.value import COMPARISONS
from .words import on_lists, on_numbers, on_tensors

Lists = list[list[Tensor]]
# what formats do with a number of each element
_OF_ELEMENTS = ("bits", "number_bits", "block_largest")


class Operation:
    """An operation on lists of tensors that will be there, and on scalars.

    A scalar is a number, or a tensor of one element where only the device knows it; or a list of these, with
    one for each tensor.
    """

    __slots__ = ("args", "op", "slot")

    def __init__(self, op: str, args: list[Any], slot: int = -1) -> None:
        self.op, self.args = op, args
        # of a "load", which
        self.slot = slot

    @property
    def inputs(self) -> list[Operation]:
        return [arg for arg in self.args if isinstance(arg, Operation)]


class Resolved:
    """The operations of a sweep, in order, and what it stores and sums.

    `free_slots` are those whose old numbers may be overwritten once nobody needs them.
    """

    def __init__(
        self, sweep: Sweep, columns: list[Any], dtype: torch.dtype, free_slots: set[int], is_host: bool
    ) -> None:
        values: list[Any] = [Operation("load", [], slot) for slot in sweep.loads]
        values += columns
        for op, args in sweep.code:
            found = [arg if isinstance(arg, float) else values[arg] for arg in args]
            if op in _OF_ELEMENTS and not isinstance(found[0], Operation):
                # it has turned out to be the same for all elements
                found[0] = Operation("filled", [values[0], found[0]])
            values.append(_simplified(op, found, dtype))
        self._scalars = columns
        self.stores = [(slot, values[number]) for slot, number in sweep.stores]
        self.folds = [_fold(kind, values[number]) for number, kind in sweep.folds]
        self._dtype = dtype
        results = [x for _, x in (*self.stores, *self.folds) if isinstance(x, Operation)]
        self.order = _ordered(results)
        last_use = {x: use for use in self.order for x in use.inputs}
        free = {x for x in self.order if x.op != "load" or x.slot in free_slots} - {*results}
        numbers = {x: i for i, x in enumerate(self.order)}
        self.loads = [(numbers[x], x.slot) for x in self.order if x.op == "load"]
        # whether operations on lists left all results where they are stored; found out with the first list
        self.is_in_place = False
        # whether all there is to do is one operation that overwrites what it has loaded
        self.is_one_in_place = False
        # of every operation: what to call, its arguments, and those that are gone then; integers are places
        self._calls: list[tuple[int, Callable, list[Any], list[int]]] = []
        for x in self.order:
            if x.op == "load":
                continue
            dying = tuple(
                isinstance(arg, Operation) and arg in free and last_use[arg] is x and x.inputs.count(arg) == 1
                for arg in x.args
            )
            call = on_lists(x.op, "".join(map(_kind, x.args)), dying, dtype, is_host)
            self.is_one_in_place = not self._calls and any(dying) and not self.folds
            places = [numbers[arg] if isinstance(arg, Operation) else arg for arg in x.args]
            gone = [numbers[arg] for arg in {*x.inputs} if last_use[arg] is x and arg not in results]
            self._calls.append((numbers[x], call, places, gone))

    def is_for(self, scalars: list[Any]) -> bool:
        """Whether these are the scalars that it was made with, and all of them are numbers."""
        return all(type(x) is float for x in scalars) and scalars == self._scalars

    def run(self, tensors: Lists | dict[int, list[Tensor]]) -> list[Any]:
        """Do them all, on these tensors of every slot; returns the results in the order of operations."""
        values: list[Any] = [None] * len(self.order)
        for i, slot in self.loads:
            values[i] = tensors[slot]
        for i, call, args, gone in self._calls:
            values[i] = call(*[values[arg] if type(arg) is int else arg for arg in args])
            for at in gone:
                values[at] = None
        return values

    def run_one(self, tensors: Lists | dict[int, list[Tensor]], word: Callable = on_tensors) -> list[Any]:
        """The same on one tensor, by ordinary operations that overwrite nothing: it may be of any subclass."""
        values: list[Any] = [None] * len(self.order)
        for i, slot in self.loads:
            values[i] = tensors[slot]
        for i, _, args, _ in self._calls:
            found = [values[arg] if type(arg) is int else arg for arg in args]
            found = [arg[0] if isinstance(arg, list) else arg for arg in found]
            values[i] = [word(self.order[i].op, found, self._dtype)]
        return values


def _ordered(results: list[Operation]) -> list[Operation]:
    """All operations that `results` need, each after its inputs."""
    found: dict[Operation, None] = {}

    def visit(x: Operation) -> None:
        if x not in found:
            for arg in x.inputs:
                visit(arg)
            found[x] = None

    for x in results:
        visit(x)
    return [*found]


def _kind(arg: Any) -> str:
    """The letter that tells `on_lists` what an argument is."""
    if isinstance(arg, Operation):
        return "b" if arg.op in COMPARISONS else "l"
    if isinstance(arg, list):
        return "T" if isinstance(arg[0], Tensor) else "N"
    return "t" if isinstance(arg, Tensor) else "n"


# one instruction


def _simplified(op: str, args: list[Any], dtype: torch.dtype) -> Any:
    """The result of an instruction, or the operation that gives it."""
    if op == "draw":
        return Operation(op, args)
    if not any(isinstance(arg, Operation) for arg in args):
        return _of_scalars(op, args, dtype)
    if op == "where" and _is_number(args[0]):
        return args[1] if args[0] else args[2]
    if op == "mul" and any(_is_number(arg) and arg == 1.0 for arg in args):
        return next(arg for arg in args if isinstance(arg, Operation))
    if op == "fma":
        a, b, c = args
        return _fused(a, b, c, dtype)
    return Operation(op, args)


def _fused(a: Any, b: Any, c: Any, dtype: torch.dtype) -> Operation:
    """a * b + c, by the one of torch's operations that takes in most of what it is made of."""
    if not isinstance(b, Operation):
        a, b = b, a
    if not isinstance(c, Operation) or not isinstance(b, Operation):
        return Operation("fma", [a, b, c])
    if _is_number(a) and a < 0.5:
        # larger weights are counted from the other end
        if b.op == "sub" and b.args[1] is c and isinstance(b.args[0], Operation):
            return Operation("lerp", [c, b.args[0], a])
        if c.op == "mul" and _is_number(c.args[0]) and c.args[0] + a == 1.0:
            return Operation("lerp", [c.args[1], b, a])
    if not isinstance(a, Operation) and b.op == "div" and len(b.inputs) == 2:
        return _plus_quotient(c, b, a, dtype)
    if _is_number(a) and c.op == "div" and len(c.inputs) == 2:
        return _plus_quotient(Operation("mul", [b, a]), c, 1.0, dtype)
    if isinstance(a, Operation) and a.op == "mul" and _are_numbers(a.args[0]):
        return Operation("addcmul", [c, a.args[1], b, a.args[0]])
    return Operation("fma", [a, b, c])


def _plus_quotient(c: Operation, quotient: Operation, factor: Any, dtype: torch.dtype) -> Operation:
    """c + factor * quotient, with all numbers in it drawn into the factor: every one is a pass over memory.

    Not where elements are as precise as numbers: what these are rounded to would show.
    """
    top, bottom = quotient.args
    draws = dtype != torch.float64 and _are_numbers(factor)
    if draws and top.op == "mul" and _are_numbers(top.args[0]):
        factor, top = _of_scalars("mul", [factor, top.args[0]], dtype), top.args[1]
    if draws and bottom.op == "fma" and _divides(bottom.args[0]) and _are_numbers(bottom.args[2]):
        by, x, offset = bottom.args
        bottom = Operation("add", [x, _of_scalars("div", [offset, by], dtype)])
        factor = _of_scalars("div", [factor, by], dtype)
    if not _are_numbers(factor):
        # torch takes no tensor for a factor
        bottom, factor = Operation("div", [bottom, factor]), 1.0
    return Operation("addcdiv", [c, top, bottom, factor])


def _divides(arg: Any) -> bool:
    """Whether numbers can be divided by it without leaving the range that they are precise in."""
    numbers = arg if isinstance(arg, list) else [arg]
    return _are_numbers(arg) and all(2.0**-16 < abs(number) < 2.0**16 for number in numbers)


def _fold(kind: str, x: Any) -> tuple[str, Any]:
    if kind == "sum" and isinstance(x, Operation) and x.op == "mul" and x.args[0] is x.args[1]:
        return "squares", x.args[0]
    return kind, x


def _of_scalars(op: str, args: Sequence[Any], dtype: torch.dtype) -> Any:
    """The same for scalars, which may be lists with one for each tensor."""
    lists = [arg for arg in args if isinstance(arg, list)]
    if not lists:
        return on_tensors(op, [*args], dtype)
    if all(_is_number(arg) or _are_numbers(arg) for arg in args):
        return on_numbers(op, [np.array(arg) if isinstance(arg, list) else arg for arg in args]).tolist()
    return [
        on_tensors(op, [arg[i] if isinstance(arg, list) else arg for arg in args], dtype)
        for i in range(len(lists[0]))
    ]


def _is_number(arg: Any) -> bool:
    return isinstance(arg, (bool, float))


def _are_numbers(arg: Any) -> bool:
    return isinstance(arg, float) or (isinstance(arg, list) and isinstance(arg[0], float))
