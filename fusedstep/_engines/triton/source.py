"""Instructions of a program as a device function for Triton, which compiles from source text."""

from __future__ import annotations

import functools
import hashlib
import linecache
from typing import Any

import triton
import triton.language as tl

from ..._algorithm.program import Instruction, Scalars, Sweep


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _power(base, exponent):
    return tl.exp(exponent.to(tl.float64) * tl.log(base.to(tl.float64))).to(base.dtype)


@triton.jit
def _tanh(a):
    x = a.to(tl.float64)
    t = tl.exp(-2 * tl.abs(x))
    # 1 - t would cancel where x is small
    small = tl.abs(x) * (1 - x * x * (1 / 3 - x * x * (2 / 15)))
    value = tl.where(tl.abs(x) < 1e-2, small, (1 - t) / (1 + t))
    return tl.where(x < 0, -value, value).to(a.dtype)


_INFIX = {"add": "+", "sub": "-", "mul": "*"}
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
# written out instead of called: in the interpreter a call of a function costs more than what it does
_CALLS = {
    "fma": "tl.fma({}, {}, {})",
    "maximum": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "power": "_power({}, {})",
    "tanh": "_tanh({})",
    # in float64, or they would be approximate
    "exp": "tl.exp(({}).to(tl.float64)).to(x0.dtype)",
    "log": "tl.log(({}).to(tl.float64)).to(x0.dtype)",
    "cos": "tl.cos(({}).to(tl.float64)).to(x0.dtype)",
}
# correctly rounded
_FLOAT32 = {**_CALLS, "div": "tl.div_rn({}, {})", "sqrt": "tl.sqrt_rn({})"}
_FLOAT64 = {**_CALLS, "div": "{} / {}", "sqrt": "tl.sqrt({})"}
# `tl` is looked for in every function by the interpreter
_NAMES = {"tl": tl, "_power": _power, "_tanh": _tanh}


class _Writer:
    """Lines of a function; values are its arguments, then the results of instructions."""

    def __init__(self, arguments: int, calls: dict[str, str]) -> None:
        self.lines: list[str] = []
        self._calls = calls
        self._names = [f"x{i}" for i in range(arguments)]
        self._truths: set[int] = set()

    def name(self, arg: int | float) -> str:
        """A value; a constant as a tensor of the type computed in, and a condition as 0 or 1."""
        if isinstance(arg, float):
            return f"tl.full(x0.shape, {_literal(arg)}, x0.dtype)"
        return f"{self._names[arg]}.to(x0.dtype)" if arg in self._truths else self._names[arg]

    def write(self, op: str, args: tuple[int | float, ...]) -> None:
        number = len(self._names)
        if op == "where":
            condition = self._names[int(args[0])]
            condition = condition if args[0] in self._truths else f"({condition} != 0)"
            text = f"tl.where({condition}, {self.name(args[1])}, {self.name(args[2])})"
        elif op == "constant":
            text = self.name(args[0])
        elif op == "neg":
            text = f"-{self.name(args[0])}"
        elif op in _INFIX or op in _COMPARISONS:
            sign = _INFIX.get(op) or _COMPARISONS[op]
            # a number beside a tensor takes the tensor's type
            a, b = (_literal(arg) if isinstance(arg, float) else self.name(arg) for arg in args)
            text = f"{a} {sign} {b}"
        else:
            text = self._calls[op].format(*map(self.name, args))
        if op in _COMPARISONS:
            self._truths.add(number)
        self._names.append(f"v{number}")
        self.lines.append(f"v{number} = {text}")


def _literal(number: float) -> str:
    return repr(number) if number - number == 0 else f'float("{number!r}")'


def _function(
    name: str, arguments: int, code: tuple[Instruction, ...], results: tuple[int | float, ...], is_double: bool
) -> Any:
    """A device function of `arguments` values that gives `results`."""
    writer = _Writer(arguments, _FLOAT64 if is_double else _FLOAT32)
    for op, args in code:
        writer.write(op, args)
    given = ", ".join(f"x{i}" for i in range(arguments))
    returned = "".join(f"{writer.name(result)}, " for result in results)
    body = "\n".join(f"    {line}" for line in (*writer.lines, f"return ({returned})"))
    text = f"def {name}({given}):\n{body}\n"
    # Triton asks Python for the source of a function, by the name of its file
    file = f"<fusedstep {name} {hashlib.sha1(text.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": __name__, **_NAMES}
    exec(compile(text, file, "exec"), names)
    return triton.jit(names[name])


@functools.cache
def sweep_function(sweep: Sweep, name: str, is_double: bool) -> Any:
    """rule(*loaded, *scalars): what is stored, then what is summed."""
    results = (*(value for _, value in sweep.stores), *(fold.value for fold in sweep.folds))
    # a lambda's name is none
    name = f"fusedstep_{name}" if name.isidentifier() else "fusedstep_rule"
    return _function(name, len(sweep.loads) + len(sweep.columns), sweep.code, results, is_double)


@functools.cache
def scalars_function(scalars: Scalars, is_double: bool) -> Any:
    """scalars(*inputs): the columns, then whether the step is to be skipped."""
    skip = () if scalars.skip is None else (scalars.skip,)
    results = (*scalars.columns, *skip)
    return _function("fusedstep_scalars", len(scalars.inputs), scalars.code, results, is_double)
