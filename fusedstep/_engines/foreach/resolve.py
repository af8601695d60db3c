"""What is left of a sweep once its scalars are known.

Conditions that are numbers choose, and what was not chosen vanishes; factors of 1 vanish; and where torch has
one operation for several instructions, that is taken. What remains are operations on lists, each of which knows
the values that nobody needs after it: they may be overwritten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._algorithm.program import Sweep
from .words import on_lists, on_tensors


class Operation:
    """An operation on lists of tensors that will be there, and on numbers or lists of them."""

    __slots__ = ("args", "op", "slot")

    def __init__(self, op: str, args: list[Any], slot: int = -1) -> None:
        self.op, self.args = op, args
        # of a "load", which
        self.slot = slot

    @property
    def inputs(self) -> list[Operation]:
        return [arg for arg in self.args if isinstance(arg, Operation)]


class Resolved:
    """The operations of a sweep, in order, and what it stores and sums."""

    def __init__(self, sweep: Sweep, columns: list[Any], dtype: torch.dtype) -> None:
        values: list[Any] = [Operation("load", [], slot) for slot in sweep.loads]
        values += columns
        for op, args in sweep.code:
            found = [arg if isinstance(arg, float) else values[arg] for arg in args]
            values.append(_simplified(op, found, dtype))
        self.stores = [(slot, values[number]) for slot, number in sweep.stores]
        self.folds = [_fold(kind, values[number]) for number, kind in sweep.folds]
        self.dtype = dtype
        self._results = {x for _, x in (*self.stores, *self.folds) if isinstance(x, Operation)}
        needed = set(self._results)
        for value in reversed(values):
            if isinstance(value, Operation) and value in needed:
                needed.update(value.inputs)
        self.order = [*dict.fromkeys(x for x in values if isinstance(x, Operation) and x in needed)]
        self._last_use = {x: use for use in self.order for x in use.inputs}

    def run(self, load: Any, plain: bool) -> dict[Operation, list[Tensor]]:
        """Do them all. `load` gives the tensors of a slot and whether they may be overwritten; those that are
        not `plain` are only asked for ordinary operations.
        """
        values: dict[Operation, list[Tensor]] = {}
        free: set[Operation] = set()
        for x in self.order:
            if x.op == "load":
                values[x], is_free = load(x.slot)
                if is_free:
                    free.add(x)
                continue
            args = [values[arg] if isinstance(arg, Operation) else arg for arg in x.args]
            if not plain:
                values[x] = [
                    on_tensors(x.op, [arg[0] if isinstance(arg, list) else arg for arg in args], self.dtype)
                ]
                continue
            dying = [arg for arg in x.inputs if self._last_use[arg] is x and arg not in self._results]
            values[x] = on_lists(x.op, args, [arg in dying and arg in free for arg in x.args], self.dtype)
            free.add(x)
            for arg in dying:
                values.pop(arg, None)
        return values


def _simplified(op: str, args: list[Any], dtype: torch.dtype) -> Any:
    """The result of an instruction, or the operation that gives it."""
    if not any(isinstance(arg, Operation) for arg in args):
        return _of_scalars(op, args, dtype)
    if op == "where" and _is_number(args[0]):
        return args[1] if args[0] else args[2]
    if op == "mul" and 1.0 in [arg for arg in args if _is_number(arg)]:
        return next(arg for arg in args if isinstance(arg, Operation))
    if op == "fma":
        return _fused(*args)
    return Operation(op, args)


def _fused(a: Any, b: Any, c: Any) -> Operation:
    """a * b + c, by the one of torch's operations that takes in most of what it is made of."""
    if not isinstance(b, Operation):
        a, b = b, a
    if isinstance(c, Operation) and isinstance(b, Operation):
        if _is_number(a) and b.op == "sub" and b.args[1] is c and isinstance(b.args[0], Operation) and a < 0.5:
            # the larger weights are counted from the other end
            return Operation("lerp", [c, b.args[0], a])
        if _is_numbers(a) and b.op == "div" and len(b.inputs) == 2:
            return Operation("addcdiv", [c, *b.args, a])
        if isinstance(a, Operation) and a.op == "mul" and _is_numbers(a.args[0]):
            return Operation("addcmul", [c, a.args[1], b, a.args[0]])
    return Operation("fma", [a, b, c])


def _fold(kind: str, x: Any) -> tuple[str, Any]:
    if kind == "sum" and isinstance(x, Operation) and x.op == "mul" and x.args[0] is x.args[1]:
        return "squares", x.args[0]
    return kind, x


def _of_scalars(op: str, args: list[Any], dtype: torch.dtype) -> Any:
    """The same for numbers, and for lists with one for each tensor."""
    lists = [arg for arg in args if isinstance(arg, list)]
    if not lists:
        return on_tensors(op, args, dtype)
    return [
        on_tensors(op, [arg[i] if isinstance(arg, list) else arg for arg in args], dtype)
        for i in range(len(lists[0]))
    ]


def _is_number(arg: Any) -> bool:
    return isinstance(arg, (bool, float))


def _is_numbers(arg: Any) -> bool:
    return isinstance(arg, float) or (isinstance(arg, list) and isinstance(arg[0], float))
