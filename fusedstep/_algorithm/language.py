"""The language rules are written in: plain functions of single numbers, traced once.

A rule is called once with a `Value` for every number it takes. Operators and the words below record what would
be computed, and the engines turn the record into machine code, a Triton kernel, or operations on lists of
tensors. Called with plain numbers, the same rule just computes.

A value either belongs to one element of a tensor, or is the same for all of them: an option, the step count, a
sum over the tensor. Values that are the same for all elements are computed once per tensor, in float64.
"""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from .stage import Stage
from .value import Value, as_number, operation

# the number of elements of the tensor, while a rule is traced
_numel: ContextVar[Any] = ContextVar("numel", default=None)
# names by which rules report
_REPORTS = ("trust_ratio",)


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
    a = as_number(a)
    if type(a) is Value and not a.per_element:
        return a * given("numel") if kind == "sum" else a
    if _known(a):
        # called with plain numbers, a rule is about a single element
        numel = _numel.get()
        return a if numel is None or kind == "max" else a * numel
    value = type(a)("fold", a, kind)
    value.per_element, value.level = False, a.level + 1
    return value


@contextlib.contextmanager
def traced_with(numel: Any) -> Iterator[None]:
    """Within this context a rule is traced, for a tensor with so many elements."""
    token = _numel.set(numel)
    try:
        yield
    finally:
        _numel.reset(token)


def over_clip_group(fold):
    """A sum over the tensor as one over all tensors that are clipped together."""
    return fold if _known(fold) else Value("clip_total", fold)


def over_all(fold):
    """A sum over the tensor as one over all tensors of the optimizer."""
    return fold if _known(fold) else type(fold)("all_total", fold)


def total_over_all(a):
    """The sum of `a` over all elements of all tensors of the optimizer."""
    fold = total(a)
    if _numel.get() is not None and getattr(fold, "op", None) != "fold":
        raise TypeError(
            f"total_over_all(a) adds up a number of each element, but {a!r} is the same for all elements of a "
            "tensor; give it what is summed over the tensor, such as g * g"
        )
    return over_all(fold)


def staged(a, stage):
    """What a `Stage` makes of `a`: work on whole tensors, such as products of matrices, between two sweeps."""
    if not isinstance(stage, Stage) or type(stage).run is Stage.run:
        raise TypeError(
            "staged(a, stage) takes a stage, an instance of a subclass of Stage that has a `run`, and not "
            f"{stage!r}"
        )
    if type(stage).__hash__ is None:
        raise TypeError(
            f"{type(stage).__name__} has no hash, by which equal stages are found; mark it with "
            "@dataclass(frozen=True)"
        )
    if not getattr(a, "per_element", False):
        raise TypeError(f"{type(stage).__name__} works on tensors; give it a number of each element, not {a!r}")
    value = type(a)("stage", as_number(a), stage)
    value.per_element, value.level = True, a.level + 1
    return value


def report(name, a):
    """`a` itself, which `statistics()` returns by this name."""
    if name not in _REPORTS:
        raise TypeError(f"report(name, a) was given the name {name!r}; use one of {_REPORTS}")
    return reported(name, a)


def reported(name, a):
    """The same by any name."""
    if _known(a):
        return a
    if a.per_element:
        raise TypeError(
            f"report({name!r}, a) takes a number of each tensor, and {a!r} may differ between elements; report "
            "a sum or norm of it, total(a) for example"
        )
    return type(a)("report", as_number(a), name)


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
