"""The words of the language on numbers, on tensors, and on lists of tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._algorithm.value import COMPARISONS

# a number

_NUMBER: dict[str, Callable] = {
    **{name: getattr(operator, name) for name in (*COMPARISONS, "add", "sub", "mul", "neg")},
    "div": operator.truediv,
    "constant": float,
    "fma": lambda a, b, c: a * b + c,
    "where": lambda condition, a, b: a if condition else b,
    # it becomes one beside whole numbers
    "whole": float,
}

# numbers of a table's rows, as an array

_NUMBERS: dict[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "constant": np.float64,
    "fma": lambda a, b, c: a * b + c,
    "where": np.where,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "power": np.power,
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "cos": np.cos,
}


def on_numbers(op: str, args: list[Any]) -> Any:
    with np.errstate(all="ignore"):
        return _NUMBERS[op](*args)


def _on_number(op: str, args: list[Any]) -> float | bool:
    try:
        found = _NUMBER[op](*args)
    except (KeyError, ZeroDivisionError, OverflowError):
        # numpy knows all words, and what is infinite
        found = on_numbers(op, args)
    return bool(found) if op in COMPARISONS else float(found)


# tensors


def _fma(a, b, c):
    # add with a number rounds once on CPU, as torch.optim's own updates do
    for factor, other in ((a, b), (b, a)):
        if isinstance(factor, float) and isinstance(other, Tensor):
            return torch.add(c, other, alpha=factor)
    return torch.addcmul(c, b, a) if isinstance(c, Tensor) and isinstance(b, Tensor) else a * b + c


def filled(like: Tensor, number: float | Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of this one's shape with the same number everywhere."""
    return torch.zeros_like(like, dtype=dtype).add_(number)


def _where(condition, a, b):
    if not isinstance(condition, Tensor):
        chosen, other = (a, b) if condition else (b, a)
        # a copy: what is given may be overwritten
        return chosen.clone() if isinstance(chosen, Tensor) else filled(other, chosen, other.dtype)
    return torch.where(condition if condition.dtype == torch.bool else condition != 0, a, b)


def _as_tensors(function: Callable) -> Callable:
    def call(*args: Any) -> Any:
        like = next(arg for arg in args if isinstance(arg, Tensor))
        return function(*(arg if isinstance(arg, Tensor) else like.new_full((), arg) for arg in args))

    return call


def _product_high(a: Tensor, b: Tensor) -> Tensor:
    a, b = (x.to(torch.int64) & 0xFFFFFFFF for x in (a, b))
    # in two parts, whose products 64 bits can hold
    return (((a >> 16) * b + ((a & 0xFFFF) * b >> 16)) >> 16).to(torch.int32)


_TO_TYPES: dict[str, Callable] = {
    "bits": lambda a, dtype: a.to(torch.float32).view(torch.int32),
    "number_bits": lambda a, dtype: torch.where(a == a, a.to(torch.float32).view(torch.int32), 0x7FC00000),
    "from_bits": lambda a, dtype: a.view(torch.float32).to(dtype),
    "number": lambda a, dtype: a.to(dtype),
    "whole": lambda a, dtype: a.to(torch.int32),
    "round_bfloat16": lambda a, dtype: a.to(torch.bfloat16).to(dtype),
    "round_float16": lambda a, dtype: a.to(torch.float16).to(dtype),
}


_TENSORS: dict[str, Callable] = {
    **{name: getattr(operator, name) for name in (*COMPARISONS, "add", "sub", "mul", "neg")},
    # a number divided by a tensor would be multiplied by its reciprocal
    "div": _as_tensors(torch.div),
    "fma": _fma,
    "where": _where,
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "maximum": _as_tensors(torch.maximum),
    "minimum": _as_tensors(torch.minimum),
    "power": torch.pow,
    "exp": torch.exp,
    "log": torch.log,
    "tanh": torch.tanh,
    "cos": torch.cos,
    # words of formats, but for those that ask where an element is
    "and": torch.bitwise_and,
    "xor": torch.bitwise_xor,
    "shift_left": torch.bitwise_left_shift,
    "byte": lambda a, which: a >> 8 * which,
    "with_sign": lambda a, b: a | (b & -0x80000000),
    # with zeros coming in
    "shift_right": lambda a, by: (a >> by) & ((1 << (32 - by)) - 1),
    "product_high": _as_tensors(_product_high),
    # what `resolve` finds in a program
    "filled": lambda like, number: torch.zeros_like(like).add_(number),
    "lerp": torch.lerp,
    "addcmul": lambda c, a, b, factor: torch.addcmul(c, a, b, value=factor),
    "addcdiv": lambda c, a, b, factor: torch.addcdiv(c, a, b, value=factor),
}


def on_tensors(op: str, args: list[Any], dtype: torch.dtype) -> Any:
    """A word on tensors and numbers; on numbers alone it gives a number."""
    like = next((arg for arg in args if isinstance(arg, Tensor)), None)
    if like is None:
        return _on_number(op, args)
    if op in _TO_TYPES:
        return _TO_TYPES[op](args[0], dtype)
    if any(isinstance(arg, Tensor) and arg.dtype == torch.int32 for arg in args):
        # constants beside whole numbers
        args = [int(arg) if isinstance(arg, float) else arg for arg in args]
    if op == "where":
        # two numbers would have torch's default dtype
        numbers = not isinstance(args[1], Tensor) and not isinstance(args[2], Tensor)
        if numbers and isinstance(args[0], Tensor):
            args = [args[0], torch.full((), args[1], dtype=dtype, device=like.device), args[2]]
    return _TENSORS[op](*args)


# lists of tensors
#
# What a word is called with is told by a letter for each argument: `l`, a list of tensors; `n`, a number; `N`,
# a number for each tensor; `t`, a number that only the device knows; `T`, one for each tensor; `b`, conditions.

_UNARY = ("neg", "abs", "sqrt", "exp", "log", "tanh", "cos")
_COMMUTING = ("add", "mul", "maximum", "minimum")
_BINARY = (*_COMMUTING, "sub", "div", "power")
_FUSED = ("lerp", "addcmul", "addcdiv")
# torch has these for one tensor beside a list; for the others it only has numbers
_WITH_TENSOR = ("add", "mul", "div")

Call = Callable[..., list[Tensor]]


def on_lists(op: str, kinds: str, free: tuple[bool, ...], dtype: torch.dtype, is_host: bool) -> Call:
    """A word for such arguments, of which those that are `free` may be overwritten."""
    if op in _UNARY and kinds == "l":
        return _foreach(op, free[0])
    if op in _BINARY:
        found = _binary(op, kinds, free)
        if found is not None and is_host and op == "mul" and "n" in kinds:
            # 0.18 ms for 400 tensors of 1,024, where a number takes 0.78: it would be wrapped for each
            return lambda *args: found(
                *(torch.tensor(x, dtype=dtype, device="cpu") if isinstance(x, float) else x for x in args)
            )
        if found is not None:
            return found
    if op in _FUSED and set(kinds[:-1]) == {"l"} and kinds[-1] in "nN":
        return _foreach(op, free[0])
    if op == "fma" and kinds[0] != "b" and kinds[1] == "l" and kinds[2] != "b":
        return _list_fma(kinds, free, is_host)
    # random bits take none: they are drawn for one tensor at a time, in another way
    count_at = next((i for i, kind in enumerate(kinds) if kind in "lNTb"), 0)

    def one_by_one(*args: Any) -> list[Tensor]:
        lists = [kind in "lNTb" for kind in kinds]
        return [
            on_tensors(op, [arg[i] if each else arg for arg, each in zip(args, lists, strict=True)], dtype)
            for i in range(len(args[count_at]))
        ]

    return one_by_one


def _binary(op: str, kinds: str, free: tuple[bool, ...]) -> Call | None:
    if op in _COMMUTING and kinds[1] == "l" and (kinds[0] != "l" or free[1] > free[0]):
        found = _binary(op, kinds[::-1], (free[1], False))
        return None if found is None else lambda a, b: found(b, a)
    if kinds[0] == "l" and (kinds[1] in "lnN" or (kinds[1] in "tT" and op in _WITH_TENSOR)):
        return _foreach(op, free[0])
    return None


def _list_fma(kinds: str, free: tuple[bool, ...], is_host: bool) -> Call:
    factor, offset = kinds[0], kinds[2]
    if offset == "l" and factor == "n":
        add = _foreach("add", free[2])
        return lambda a, b, c: add(c, b, alpha=a)
    if offset == "l" and factor in "lT":
        addcmul = _foreach("addcmul", free[2])
        return lambda a, b, c: addcmul(c, b, a)
    if offset == "l" and factor == "N" and is_host:
        # in one pass, which there is no operation on lists for
        add_one = Tensor.add_ if free[2] else torch.add
        return lambda a, b, c: [add_one(z, y, alpha=x) for x, y, z in zip(a, b, c, strict=True)]
    mul, plus = _foreach("mul", free[1]), _foreach("add", in_place=True)
    if offset == "l" and free[2]:
        return lambda a, b, c: plus(c, mul(b, a))
    return lambda a, b, c: plus(mul(b, a), c)


def _foreach(op: str, in_place: bool) -> Call:
    name = {"power": "pow"}.get(op, op) + "_" * in_place
    # private, but what torch.optim's own optimizers are made of; without it, one tensor after the other
    function = getattr(torch, f"_foreach_{name}", None) or _looped(name)

    def call(*args: Any, **how: Any) -> list[Tensor]:
        made = function(*args, **how)
        return args[0] if in_place else [*made]

    return call


def _looped(name: str) -> Call:
    method: Any = getattr(Tensor, name, None)
    if method is None:
        # there is no Tensor.maximum_
        method = lambda x, y: x.copy_(getattr(Tensor, name[:-1])(x, y))

    def call(first: list[Tensor], *others: Any, **how: Any) -> list[Tensor]:
        columns = (other if isinstance(other, (list, tuple)) else repeat(other) for other in others)
        rows = zip(first, *columns, strict=False)
        # the factor of addcmul and addcdiv
        return [method(*row[:3], **({"value": row[3]} if row[3:] else {}), **how) for row in rows]

    return call
