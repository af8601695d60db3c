"""Instructions of a program as a device function for Triton, which compiles from source text."""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..._algorithm.bits import DRAW_INPUTS, DRAWN_TOGETHER, draw_code
from ..._algorithm.code import Instruction
from ..._algorithm.formats import Plane, compute_dtype
from ..._algorithm.program import Scalars, Sweep
from . import words

_INFIX = {"add": "+", "sub": "-", "mul": "*", "and": "&", "xor": "^"}
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
# written out instead of called: in the interpreter, calling a function costs more than its work. FLOAT is the
# type computed in
_CALLS = {
    "neg": "-{}",
    "abs": "tl.abs({})",
    "fma": "tl.fma({}, {}, {})",
    "maximum": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "power": "words.power({}, {})",
    "tanh": "words.tanh({})",
    # in float64, or they would be approximate
    "exp": "tl.exp(({}).to(tl.float64)).to(FLOAT)",
    "log": "tl.log(({}).to(tl.float64)).to(FLOAT)",
    "cos": "tl.cos(({}).to(tl.float64)).to(FLOAT)",
    # words of formats
    "from_bits": "({}).to(tl.float32, bitcast=True).to(FLOAT)",
    "number": "({}).to(FLOAT)",
    "round_bfloat16": "({}).to(tl.float32).to(tl.bfloat16).to(FLOAT)",
    "round_float16": "({}).to(tl.float32).to(tl.float16).to(FLOAT)",
}
# correctly rounded
_FLOAT32 = {**_CALLS, "div": "tl.div_rn({}, {})", "sqrt": "tl.sqrt_rn({})"}
_FLOAT64 = {**_CALLS, "div": "{} / {}", "sqrt": "tl.sqrt({})"}
# within two units of the last place, which 8 bits do not show, at a fifth of the instructions: with so few
# bytes to move, a sweep would wait for these
_FAST = {**_FLOAT32, "div": "{} / {}", "sqrt": "tl.sqrt({})"}
if words.ON_NVIDIA.value:
    # results below 2**-126 are 0
    _FAST |= {"div": "words.fast_quotient({}, {})", "sqrt": "words.fast_root({})"}
# their results are whole numbers, whatever they take
_WHOLE = {
    "bits": "({}).to(tl.float32).to(tl.int32, bitcast=True)",
    "number_bits": "words.number_bits({})",
    "whole": "({}).to(tl.int32)",
    "shift_left": "({} << {})",
    "shift_right": "words.shift_right({}, {})",
    "with_sign": "words.with_sign({}, {})",
    "byte": "words.byte({}, {})",
    "product_high": "words.product_high({}, {})",
    "block_largest": "words.block_largest({}, mask)",
}


class _Writer:
    """Lines of a function; values are its arguments, then the results of instructions."""

    def __init__(self, kinds: str, calls: dict[str, str]) -> None:
        """`kinds` has a letter for each argument: `f`, a float; `i`, a whole number. Conditions are `t`."""
        self.lines: list[str] = []
        # device functions that are called, by name
        self.called: dict[str, Any] = {}
        self._calls, self._float = calls, "tl.float64" if calls is _FLOAT64 else "tl.float32"
        self._names = [f"x{i}" for i in range(len(kinds))]
        self.arguments = (*self._names,)
        self._kinds = [*kinds]

    def name(self, arg: int | float, like: int | float | None = None) -> str:
        """A value; a constant as a tensor of the kind and shape of `like`."""
        if isinstance(arg, float):
            at = self._names[like] if isinstance(like, int) else "x0"
            is_whole = isinstance(like, int) and self._kinds[like] == "i"
            return f"tl.full({at}.shape, {_literal(arg, is_whole)}, {'tl.int32' if is_whole else self._float})"
        return self._names[arg]

    def write(self, op: str, args: tuple[int | float, ...]) -> None:
        number = len(self._names)
        # the first value among arguments that must be of one kind
        same = args[1:] if op == "where" else args
        like = next((arg for arg in same if isinstance(arg, int)), None)
        is_whole = like is not None and self._kinds[like] == "i"
        kind = "i" if is_whole else "f"
        if op == "where":
            condition = self._names[int(args[0])]
            condition = condition if self._kinds[int(args[0])] == "t" else f"({condition} != 0)"
            text = f"tl.where({condition}, {self.name(args[1], like)}, {self.name(args[2], like)})"
        elif op == "constant":
            text = self.name(args[0])
        elif op in _INFIX or op in _COMPARISONS:
            sign = _INFIX.get(op) or _COMPARISONS[op]
            # a number beside a tensor takes the tensor's type
            a, b = (_literal(arg, is_whole) if isinstance(arg, float) else self.name(arg) for arg in args)
            text, kind = f"{a} {sign} {b}", "t" if op in _COMPARISONS else kind
        elif op == "draw":
            text, kind = self._draw(int(args[0])), "i"
        elif op in _WHOLE:
            found = (_literal(arg, True) if isinstance(arg, float) else self.name(arg) for arg in args)
            text, kind = _WHOLE[op].format(*found), "i"
        else:
            text = self._calls[op].format(*(self.name(arg, like) for arg in args))
            text = text.replace("FLOAT", self._float)
            kind = kind if op in ("neg", "maximum", "minimum") else "f"
        self._kinds.append(kind)
        self._names.append(f"v{number}")
        self.lines.append(f"v{number} = {text}")

    def _draw(self, slot: int) -> str:
        fours, word = divmod(slot, DRAWN_TOGETHER)
        name = f"drawn{fours}"
        if f"_{name}" not in self.called:
            self.called[f"_{name}"] = _draw_function(fours)
            self.lines.append(f"{name} = _{name}(*draw_inputs)")
        return f"{name}[{word}]"


def _literal(number: float, is_whole: bool = False) -> str:
    if is_whole:
        return repr(int(number))
    return repr(number) if number - number == 0 else f'float("{number!r}")'


def _function(
    name: str,
    first: tuple[str, ...],
    writer: _Writer,
    code: Sequence[Instruction],
    results: Sequence[int | float],
) -> Any:
    """A device function that returns `results`; it takes the arguments `first`, then the writer's."""
    given = ", ".join((*first, *writer.arguments))
    for op, args in code:
        writer.write(op, args)
    returned = "".join(f"{writer.name(result)}, " for result in results)
    body = "\n".join(f"    {line}" for line in (*writer.lines, f"return ({returned})"))
    text = f"def {name}({given}):\n{body}\n"
    # Triton asks Python for the source of a function, by the name of its file
    file = f"<fusedstep {name} {hashlib.sha1(text.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    # the interpreter looks for `tl` in every function
    names: dict[str, Any] = {"__name__": __name__, "tl": tl, "words": words, **writer.called}
    exec(compile(text, file, "exec"), names)
    return triton.jit(names[name])


@functools.cache
def _draw_function(fours: int) -> Any:
    code = draw_code(fours)
    return _function(
        f"fusedstep_drawn{fours}", (), _Writer("i" * len(DRAW_INPUTS), _FLOAT32), code.code, code.numbers
    )


@functools.cache
def sweep_function(sweep: Sweep, name: str, planes: tuple[Plane, ...]) -> Any:
    """rule(mask, draw_inputs, *loaded, *scalars): what is stored, then what is summed.

    `mask` says which elements exist; random bits are drawn from `draw_inputs`.
    """
    results = (*(value for _, value in sweep.stores), *(fold.value for fold in sweep.folds))
    kinds = "".join("i" if planes[place].is_whole else "f" for place in sweep.loads) + "f" * len(sweep.columns)
    is_coarse = any(plane.block > 1 for plane in planes)
    calls = _FLOAT64 if compute_dtype(planes) == torch.float64 else _FAST if is_coarse else _FLOAT32
    # a lambda's name is no identifier
    name = f"fusedstep_{name}" if name.isidentifier() else "fusedstep_rule"
    return _function(name, ("mask", "draw_inputs"), _Writer(kinds, calls), sweep.code, results)


@functools.cache
def scalars_function(scalars: Scalars, is_double: bool) -> Any:
    """scalars(*inputs): the columns, whether the step is to be skipped, and what is kept."""
    skip = () if scalars.skip is None else (scalars.skip,)
    results = (*scalars.columns, *skip, *scalars.kept)
    writer = _Writer("f" * len(scalars.inputs), _FLOAT64 if is_double else _FLOAT32)
    return _function("fusedstep_scalars", (), writer, scalars.code, results)
