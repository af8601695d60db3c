"""The words of the language on numbers, on tensors, and on lists of tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_COMPARISONS: dict[str, Callable] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
_OPERATORS: dict[str, Callable] = {
    **_COMPARISONS,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "constant": float,
}
_NUMBERS: dict[str, Callable] = {
    **_OPERATORS,
    "div": operator.truediv,
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
        # a copy: what is given may be overwritten
        chosen = a if condition else b
        return chosen.clone() if isinstance(chosen, Tensor) else chosen
    return torch.where(condition if condition.dtype == torch.bool else condition != 0, a, b)


def _as_tensors(function: Callable) -> Callable:
    def call(*args: Any) -> Any:
        like = next(arg for arg in args if isinstance(arg, Tensor))
        return function(*(arg if isinstance(arg, Tensor) else like.new_full((), arg) for arg in args))

    return call


_TENSORS: dict[str, Callable] = {
    **_OPERATORS,
    # a number divided by a tensor would be multiplied by its reciprocal
    "div": _as_tensors(torch.div),
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
    # what `resolve` finds in a program
    "lerp": torch.lerp,
    "addcmul": lambda c, a, b, factor: torch.addcmul(c, a, b, value=factor),
    "addcdiv": lambda c, a, b, factor: torch.addcdiv(c, a, b, value=factor),
}


def on_tensors(op: str, args: list[Any], dtype: torch.dtype) -> Any:
    """A word on tensors and numbers; on numbers alone it gives a number."""
    like = next((arg for arg in args if isinstance(arg, Tensor)), None)
    if like is None:
        return _NUMBERS[op](*args)
    if op == "where":
        # two numbers would have torch's default dtype
        numbers = not isinstance(args[1], Tensor) and not isinstance(args[2], Tensor)
        if numbers and isinstance(args[0], Tensor):
            args = [args[0], torch.full((), args[1], dtype=dtype, device=like.device), args[2]]
    elif op not in _COMPARISONS:
        # conditions are numbers, 0 and 1
        args = [arg.to(dtype) if isinstance(arg, Tensor) and arg.dtype == torch.bool else arg for arg in args]
        args = [float(arg) if isinstance(arg, bool) else arg for arg in args]
    return _TENSORS[op](*args)


# lists

_UNARY = ("neg", "sqrt", "exp", "log", "tanh", "cos")
_COMMUTING = ("add", "mul", "maximum", "minimum")
_BINARY = (*_COMMUTING, "sub", "div", "power")
_FUSED = {"lerp": 2, "addcmul": 3, "addcdiv": 3}


def on_lists(op: str, args: list[Any], free: list[bool], dtype: torch.dtype) -> list[Tensor]:
    """A word on lists of tensors, and numbers or lists of numbers; those that are `free` may be overwritten."""
    args = [float(arg) if isinstance(arg, bool) else arg for arg in args]
    tensors = [isinstance(arg, list) and isinstance(arg[0], Tensor) and arg[0].dtype == dtype for arg in args]
    if op in _COMMUTING and (tensors[1], free[1]) > (tensors[0], free[0]):
        args, tensors, free = args[::-1], tensors[::-1], free[::-1]
    is_number = isinstance(args[-1], float)
    if op in _UNARY and tensors[0]:
        return _call(op, args, free[0])
    if op in _BINARY and tensors[0] and (tensors[1] or _is_numbers(args[1])):
        return _call(op, args, free[0])
    if op in _FUSED and all(tensors[: _FUSED[op]]):
        return _call(op, args, free[0])
    if op == "fma" and isinstance(args[0], float) and tensors[1]:
        if tensors[2]:
            return _call("add", [args[2], args[1]], free[2], alpha=args[0])
        if is_number and args[1][0].is_cpu:
            # both in one pass, which there is no operation on lists for
            offset = torch.tensor(args[2], dtype=dtype)
            return [torch.add(offset, t, alpha=args[0], **({"out": t} if free[1] else {})) for t in args[1]]
        if is_number:
            return _call("add", [_call("mul", args[1::-1], free[1]), args[2]], True)
    if op == "fma" and _is_numbers(args[0]) and tensors[1:] == [True, True]:
        add = Tensor.add_ if free[2] else torch.add
        return [add(c, t, alpha=factor) for factor, t, c in zip(*args, strict=True)]
    if op == "fma" and all(tensors):
        return _call("addcmul", [args[2], args[0], args[1]], free[2])
    count = next(len(arg) for arg in args if isinstance(arg, list))
    return [
        on_tensors(op, [arg[i] if isinstance(arg, list) else arg for arg in args], dtype) for i in range(count)
    ]


def _is_numbers(arg: Any) -> bool:
    return isinstance(arg, float) or (isinstance(arg, list) and isinstance(arg[0], float))


def _call(op: str, args: list[Any], in_place: bool, **how: Any) -> list[Tensor]:
    name = {"power": "pow"}.get(op, op)
    if in_place:
        getattr(torch, f"_foreach_{name}_")(*args, **how)
        return args[0]
    return [*getattr(torch, f"_foreach_{name}")(*args, **how)]
