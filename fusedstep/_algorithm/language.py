"""The language rules are written in: plain functions of single numbers, traced once.

A rule is called once with a `Value` for every number it takes. Operators and the words below record what would
be computed, and the engines turn the record into machine code, a Triton kernel, or operations on lists of
tensors. Called with plain numbers, the same rule just computes.

A value either belongs to one element of a tensor, or is the same for all of them: an option, the step count, a
sum over the tensor. Values that are the same for all elements are computed once per tensor, in float64.
"""

from __future__ import annotations

import builtins
import math
from numbers import Real
from typing import Any, NoReturn

from .instead import SUPPORTED, instead
from .stage import Stage

# NumPy's functions for operators: a NumPy number at the left of an operator calls them
_OPERATORS = {
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "power": "power",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "equal": "eq",
    "not_equal": "ne",
}


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

    # two values are equal only if they are the same object
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        if self.op == "given":
            return f"<value of {self.args[0]!r}>"
        return "<value of an element>" if self.op == "plane" else f"<value made by {self.op!r}>"

    # what a rule cannot do

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "a rule cannot branch on a value, which is not known before the step runs: found it in an `if`, "
            "`and`, `or`, `not`, `max`, `min` or `a < b < c`; use where(condition, a, b), products of "
            "conditions, maximum(a, b) and minimum(a, b)"
        )

    def __float__(self) -> NoReturn:
        raise TypeError(f"a rule called a function that takes numbers only; accepted are {SUPPORTED}")

    __int__ = __index__ = __round__ = __float__

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a value in a rule has no {name!r}; {instead(name)}")

    def __getitem__(self, place: Any = None) -> NoReturn:
        raise TypeError(
            "a value in a rule is a single number and cannot be unpacked or indexed, and has no length; "
            "write what is done to one element"
        )

    __iter__ = __len__ = __getitem__

    def __and__(self, other: Any = None) -> NoReturn:
        raise TypeError(
            "a rule cannot use `&`, `|` or `~`; multiply conditions, a * b, for `and`, write maximum(a, b) for "
            "`or` and 1 - a for `not`"
        )

    __rand__ = __or__ = __ror__ = __invert__ = __and__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """What torch calls instead of a function that a value is passed to."""
        for arg in args:
            if hasattr(arg, "__torch_function__") and not isinstance(arg, Value):
                raise _foreign(arg, func.__name__)
        raise TypeError(
            f"a rule called {func.__name__!r} of torch, which takes tensors; {instead(func.__name__)}"
        )

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> NoReturn:
        """The same for NumPy's functions."""
        raise TypeError(
            f"a rule called {func.__name__!r} of NumPy, which takes arrays; {instead(func.__name__)}"
        )

    def __array_ufunc__(self, func: Any, method: str, *args: Any, **kwargs: Any) -> Value:
        """The same for those of its functions that work element by element."""
        if func.__name__ in _OPERATORS and method == "__call__":
            # comparisons hand a number over as an array without dimensions
            numbers = [arg.item() if getattr(arg, "ndim", None) == 0 else arg for arg in args]  # type: ignore
            return operation(_OPERATORS[func.__name__], *numbers)
        return self.__array_function__(func, (), args, kwargs)


def operation(op: str, *args: Any) -> Value:
    for arg in args:
        # those of NumPy are `Real`, too
        if not isinstance(arg, (Value, int, float, Real)):
            raise _foreign(arg, op)
    made = next((type(arg) for arg in args if isinstance(arg, Value)), Value)
    return made(op, *args)


def _foreign(arg: Any, op: str) -> TypeError:
    return TypeError(f"a rule used a {type(arg).__name__}, {arg!r}, in {op!r}; use numbers and values")


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
    """`mix` where 1 - keep is known."""
    # old + take * d loses the new where the old is much larger: start from the nearer end
    is_near = take < keep
    return fma(where(is_near, take, -keep), new - old, where(is_near, old, new))


# sums over tensors, stages and reports


def total(a):
    """The sum of `a` over all elements of the tensor."""
    return _fold(a, "sum")


def largest(a):
    """The largest absolute value of `a` over the tensor; NaN if any is NaN."""
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
    if not isinstance(stage, Stage):
        raise TypeError(
            f"staged(a, stage) takes a stage, an instance of a subclass of Stage, and not {stage!r}"
        )
    if not getattr(a, "per_element", False):
        raise TypeError(f"{type(stage).__name__} works on tensors; give it a number of each element, not {a!r}")
    value = type(a)("stage", a, stage)
    value.per_element, value.level = True, a.level + 1
    return value


def report(name, a):
    """`a` itself, which `statistics()` returns by this name."""
    return a if _known(a) else type(a)("report", a, name)


def plane(place: int) -> Value:
    """What a plane of the row stores for each element: parameter, gradient, a state or part of one."""
    value = Value("plane", place)
    value.per_element = True
    return value


def given(name: str) -> Value:
    """A value that all elements of a tensor share: the step count, an option, the scale of gradients."""
    return Value("given", name)


def kept(place: int) -> Value:
    """A number that is kept once for a tensor, from step to step."""
    return Value("kept", place)
