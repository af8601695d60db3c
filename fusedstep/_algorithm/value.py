"""Values: numbers that will be known when a step runs, and record how they are made.

Operators make values of values. A comparison is a condition of `where`; anywhere else it is recorded as the
number 1 or 0, so engines need not know conditions as numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any, NoReturn

from .instead import SUPPORTED, instead

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
# what Python has, and rules have no word for
_NO_OPERATORS = {"floordiv": "//", "mod": "%", "matmul": "@", "xor": "^", "lshift": "<<", "rshift": ">>"}
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


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
        return operation("abs", self)

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

    def __setitem__(self, place: Any, new: Any) -> NoReturn:
        raise TypeError("a value in a rule is never overwritten; return the new number")

    def __format__(self, spec: str) -> NoReturn:
        raise TypeError("a value in a rule is not known before the step runs, and cannot be printed")

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


def _without(sign: str) -> Callable:
    def refuse(self: Value, other: Any = None) -> NoReturn:
        raise TypeError(f"a rule cannot use `{sign}`; accepted are {SUPPORTED}")

    return refuse


for _name, _sign in _NO_OPERATORS.items():
    setattr(Value, f"__{_name}__", _without(_sign))
    setattr(Value, f"__r{_name}__", _without(_sign))


def operation(op: str, *args: Any) -> Value:
    for arg in args:
        # those of NumPy are `Real`, too
        if not isinstance(arg, (Value, int, float, Real)):
            raise _foreign(arg, op)
    if op == "power" and isinstance(args[1], Real) and args[1] in _POWERS:
        return _POWERS[args[1]](args[0])
    made = next((type(arg) for arg in args if isinstance(arg, Value)), Value)
    conditions = args[:1] if op == "where" else ()
    return made(op, *conditions, *map(as_number, args[len(conditions) :]))


def as_number(a: Any) -> Any:
    """A comparison as 1 or 0, anything else as it is."""
    return operation("where", a, 1.0, 0.0) if isinstance(a, Value) and a.op in COMPARISONS else a


def _foreign(arg: Any, op: str) -> TypeError:
    return TypeError(f"a rule used a {type(arg).__name__}, {arg!r}, in {op!r}; use numbers and values")


# exponents that take a few multiplications or a root, as in torch and NumPy
_POWERS: dict[Any, Callable[[Any], Value]] = {
    2: lambda a: a * a,
    3: lambda a: a * a * a,
    -1: lambda a: 1 / a,
    0.5: lambda a: operation("sqrt", a),
}
