"""The language rules are written in: plain functions of single numbers, traced once.

A rule is called once with a `Value` for every number it takes. Operators and the words below note what would
be computed, and the engines turn those notes into machine code, a Triton kernel, or operations on lists of
tensors. Called with plain numbers, the same rule just computes.

A value either belongs to one element of a tensor, or is the same for all of them: an option, the step count, a
sum over the tensor. What is the same for all elements is computed once per tensor, in float64.
"""

from __future__ import annotations

import builtins
import math
from typing import Any, NoReturn

_SUPPORTED = (
    "operators, comparisons and abs, clamp, cos, exp, fma, log, maximum, minimum, mix, power, sign, sqrt, tanh "
    "and where of fusedstep.rules"
)


class Value:
    """A number that will be known when a step runs: an operation, and the values or numbers it takes.

    `per_element` says whether it may differ between the elements of a tensor. `level` counts the sums over
    tensors that have to be complete before it can be computed.
    """

    __slots__ = ("args", "level", "op", "per_element")

    def __init__(self, op: str, *args: Any) -> None:
        values = [arg for arg in args if isinstance(arg, Value)]
        self.op, self.args = op, args
        self.per_element: bool = any(value.per_element for value in values)
        self.level: int = max((value.level for value in values), default=0)

    def __add__(self, other):
        return operation("add", self, other)

    def __radd__(self, other):
        return operation("add", other, self)

    def __sub__(self, other):
        return operation("sub", self, other)

    def __rsub__(self, other):
        return operation("sub", other, self)

    def __mul__(self, other):
        return operation("mul", self, other)

    def __rmul__(self, other):
        return operation("mul", other, self)

    def __truediv__(self, other):
        return operation("div", self, other)

    def __rtruediv__(self, other):
        return operation("div", other, self)

    def __pow__(self, other):
        return operation("power", self, other)

    def __rpow__(self, other):
        return operation("power", other, self)

    def __neg__(self):
        return operation("neg", self)

    def __pos__(self):
        return self

    def __abs__(self):
        return abs(self)

    def __lt__(self, other):
        return operation("lt", self, other)

    def __le__(self, other):
        return operation("le", self, other)

    def __gt__(self, other):
        return operation("gt", self, other)

    def __ge__(self, other):
        return operation("ge", self, other)

    def __eq__(self, other):
        return operation("eq", self, other)  # type: ignore[override]

    def __ne__(self, other):
        return operation("ne", self, other)  # type: ignore[override]

    # two values are the same only if they are one
    __hash__ = object.__hash__

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "a rule cannot branch on a value, which is not known before the step runs: found it in an `if`, "
            "`and`, `or` or `not`; use where(condition, a, b), and products of conditions"
        )

    def __float__(self) -> NoReturn:
        raise TypeError(f"a rule called a function that takes numbers only; accepted are {_SUPPORTED}")

    __int__ = __index__ = __float__

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a value in a rule has no {name!r}; accepted are {_SUPPORTED}")

    def __iter__(self) -> NoReturn:
        raise TypeError("a value in a rule is a single number and cannot be unpacked or indexed")


def operation(op: str, *args: Any) -> Value:
    for arg in args:
        if not isinstance(arg, (Value, int, float)):
            raise TypeError(f"a rule used a {type(arg).__name__}, {arg!r}, in {op!r}; use numbers and values")
    made = next((type(arg) for arg in args if isinstance(arg, Value)), Value)
    return made(op, *args)


def _known(*args: Any) -> bool:
    return not any(isinstance(arg, Value) for arg in args)


# the words: on plain numbers each has the meaning that engines give it


def fma(a, b, c):
    """a * b + c, rounded once where the hardware can."""
    return a * b + c if _known(a, b, c) else operation("fma", a, b, c)


def where(condition, a, b):
    if _known(condition):
        return a if condition else b
    return operation("where", condition, a, b)


def maximum(a, b):
    """The larger one; NaN if either is."""
    if _known(a, b):
        return a if a > b or a != a else b
    return operation("maximum", a, b)


def minimum(a, b):
    """The smaller one; NaN if either is."""
    if _known(a, b):
        return a if a < b or a != a else b
    return operation("minimum", a, b)


def clamp(a, low, high):
    return minimum(maximum(a, low), high)


def abs(a):
    return builtins.abs(a) if _known(a) else operation("abs", a)


def sign(a):
    """-1, 0 or 1."""
    return where(a > 0, 1.0, where(a < 0, -1.0, 0.0))


def sqrt(a):
    return math.sqrt(a) if _known(a) else operation("sqrt", a)


def exp(a):
    return math.exp(a) if _known(a) else operation("exp", a)


def log(a):
    return math.log(a) if _known(a) else operation("log", a)


def tanh(a):
    return math.tanh(a) if _known(a) else operation("tanh", a)


def cos(a):
    return math.cos(a) if _known(a) else operation("cos", a)


def power(base, exponent):
    return base**exponent if _known(base, exponent) else operation("power", base, exponent)


def mix(old, new, keep):
    """keep * old + (1 - keep) * new, exact at both ends."""
    return mixed(old, new, keep, 1 - keep)


def mixed(old, new, keep, take):
    """The same where 1 - keep is known."""
    # old + take * d forgets the new where the old is much larger: start from the nearer end
    is_near = take < keep
    return fma(where(is_near, take, -keep), new - old, where(is_near, old, new))


# sums over tensors, and what is only looked at


def total(a):
    """The sum of `a` over all elements of the tensor."""
    return _fold(a, "sum")


def largest(a):
    """The largest `a` of all elements of the tensor, without its sign; NaN if any is."""
    return _fold(abs(a), "max")


def _fold(a, kind):
    if _known(a):
        return a
    value = type(a)("fold", a, kind)
    value.per_element, value.level = False, a.level + 1
    return value


def over_clip_group(fold):
    """A sum over the tensor as one over all tensors that are clipped together."""
    return fold if _known(fold) else Value("clip_total", fold)


def over_all(fold):
    """A sum over the tensor as one over all tensors of the optimizer."""
    return fold if _known(fold) else type(fold)("all_total", fold)


def total_over_all(a):
    """The sum of `a` over all elements of all tensors of the optimizer."""
    return over_all(total(a))


def staged(a, stage):
    """What a `Stage` makes of `a`: work on whole tensors, such as products of matrices, between two sweeps."""
    if not getattr(a, "per_element", False):
        raise TypeError(f"{type(stage).__name__} works on tensors; give it a number of each element, not {a!r}")
    value = type(a)("stage", a, stage)
    value.per_element, value.level = True, a.level + 1
    return value


def report(name, a):
    """`a` itself, which `statistics()` tells by this name."""
    return a if _known(a) else type(a)("report", a, name)


def plane(place: int) -> Value:
    """What is stored for each element in a tensor of the row: parameter, gradient, a state or part of one."""
    value = Value("plane", place)
    value.per_element = True
    return value


def given(name: str) -> Value:
    """What is the same for all elements of a tensor: the step count, an option, the scale of gradients."""
    return Value("given", name)


def kept(place: int) -> Value:
    """What is kept once for a tensor, from step to step."""
    return Value("kept", place)
