"""Instructions of programs as LLVM: every operation on sixteen numbers at once, or on one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from llvmlite import ir

from ..._algorithm.bits import DRAWN_TOGETHER, draw_code
from ..._algorithm.code import Instruction
from .build import (
    F32,
    F64,
    I1,
    I32,
    I64,
    LANES,
    LIBRARY,
    call_intrinsic,
    constant,
    element_of,
    fill,
    larger,
    of_elements,
    suffix,
)
from .planes import Place, narrowed, resized, widened

_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_ARITHMETIC = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv", "neg": "fneg"}
_OF_WHOLE = {"add": "add", "sub": "sub", "mul": "mul", "neg": "neg", "and": "and_", "xor": "xor"}
_INTRINSICS = {"fma": "fma", "sqrt": "sqrt", "abs": "fabs"}
_SHIFTS = {"shift_left": "shl", "shift_right": "lshr"}


class Emitter:
    """Writes the instructions of a program for numbers of one type, a vector's or a scalar's.

    Beside a vector of a block's elements there may be one number that all of them share.
    """

    def __init__(self, builder: ir.IRBuilder, kind: ir.Type, rounds_power: bool = False) -> None:
        self.builder, self.kind, self.element = builder, kind, element_of(kind)
        self._rounds_power = rounds_power
        self._drawn: dict[int, list[ir.Value]] = {}

    def run(
        self,
        code: Sequence[Instruction],
        values: list[ir.Value],
        place: Place = Place(),  # noqa: B008
    ) -> list[ir.Value]:
        """`values`, then the results of `code` on them."""
        values = [*values]
        for op, args in code:
            values.append(self.emit(op, args, values, place))
        return values

    def emit(self, op: str, args: Sequence[int | float], values: list[Any], place: Place) -> ir.Value:
        """The result of one instruction on these values."""
        return self._emit(op, [arg if isinstance(arg, float) else values[arg] for arg in args], place)

    def constant(self, number: float) -> ir.Value:
        return constant(self.kind, number)

    def _emit(self, op: str, args: list[Any], place: Place) -> ir.Value:
        b = self.builder
        if op == "where":
            chosen = self._alike(args[1:], like=args[0].type)
            return b.select(self._truth(args[0]), *chosen)
        if op in _SHIFTS:
            return getattr(b, _SHIFTS[op])(args[0], constant(args[0].type, args[1]))
        if op == "byte":
            return b.lshr(args[0], constant(args[0].type, 8 * args[1]))
        if op == "draw":
            return self._draw(int(args[0]), place)
        args = self._alike(args)
        is_whole = isinstance(element_of(args[0].type), ir.IntType)
        if op == "constant":
            return args[0]
        if op in _COMPARISONS and is_whole:
            return b.icmp_signed(_COMPARISONS[op], *args)
        if op in _COMPARISONS:
            compare = b.fcmp_unordered if op == "ne" else b.fcmp_ordered
            return compare(_COMPARISONS[op], *args)
        if op in _OF_WHOLE and is_whole:
            return getattr(b, _OF_WHOLE[op])(*args)
        if op in _ARITHMETIC:
            return getattr(b, _ARITHMETIC[op])(*args)
        if op in ("maximum", "minimum"):
            return larger(b, args[0], args[1], ">" if op == "maximum" else "<")
        if op in _INTRINSICS:
            return call_intrinsic(b, f"llvm.{_INTRINSICS[op]}.{suffix(args[0].type)}", args[0].type, args)
        if op in LIBRARY:
            return self._library(op, args)
        return self._stored_word(op, args)

    def _stored_word(self, op: str, args: list[ir.Value]) -> ir.Value:
        """The words of formats, except those that need a whole block."""
        b, value, kind = self.builder, args[0], args[0].type
        if op == "bits":
            return b.bitcast(resized(b, value, F32), of_elements(I32, kind))
        if op == "number_bits":
            is_nan = b.fcmp_unordered("uno", value, value)
            whole = b.bitcast(resized(b, value, F32), of_elements(I32, kind))
            return b.select(is_nan, constant(whole.type, 0x7FC00000), whole)
        if op == "from_bits":
            return resized(b, b.bitcast(value, of_elements(F32, kind)), self.element)
        if op == "whole":
            return b.fptosi(value, of_elements(I32, kind))
        if op == "number":
            return b.sitofp(value, of_elements(self.element, kind))
        if op == "with_sign":
            return b.or_(value, b.and_(args[1], constant(kind, -0x80000000)))
        if op == "product_high":
            long = [b.zext(arg, of_elements(I64, kind)) for arg in args]
            product = b.lshr(b.mul(*long), constant(of_elements(I64, kind), 32))
            return b.trunc(product, of_elements(I32, kind))
        dtype = getattr(torch, op.removeprefix("round_"))
        return widened(b, narrowed(b, value, dtype), dtype, kind)

    def _draw(self, slot: int, place: Place) -> ir.Value:
        fours, word = divmod(slot, DRAWN_TOGETHER)
        if fours not in self._drawn:
            code = draw_code(fours)
            values = self.run(code.code, [*place.draw_inputs])
            self._drawn[fours] = [values[int(number)] for number in code.numbers]
        return self._drawn[fours][word]

    def _alike(self, args: list[Any], like: ir.Type | None = None) -> list[ir.Value]:
        """Arguments of one type: constants as the others, single numbers in all lanes."""
        values = [arg for arg in args if not isinstance(arg, float)]
        if not values:
            element = self.kind if like is None else of_elements(self.element, like)
            return [constant(element, arg) for arg in args]
        kinds = [value.type for value in values]
        kind = next((kind for kind in kinds if isinstance(kind, ir.VectorType)), kinds[0])
        if isinstance(like, ir.VectorType):
            kind = of_elements(element_of(kind), like)
        found = iter(values)
        return [
            constant(kind, arg) if isinstance(arg, float) else self._filled(next(found), kind) for arg in args
        ]

    def _filled(self, value: ir.Value, kind: ir.Type) -> ir.Value:
        is_one = isinstance(kind, ir.VectorType) and not isinstance(value.type, ir.VectorType)
        return fill(self.builder, value) if is_one else value

    def _truth(self, value: ir.Value) -> ir.Value:
        is_truth = element_of(value.type) == I1
        return value if is_truth else self.builder.fcmp_unordered("!=", value, constant(value.type, 0.0))

    def _library(self, op: str, args: list[ir.Value]) -> ir.Value:
        kind = args[0].type
        if not isinstance(kind, ir.VectorType):
            result = self._call_library(op, args)
            if op == "power" and self._rounds_power:
                # where scalars are float32, a power must be rounded before it cancels, as in 1 - beta^t
                result = self.builder.fpext(self.builder.fptrunc(result, F32), F64)
            return result
        result = ir.Constant(kind, ir.Undefined)
        for lane in map(I32, range(LANES)):
            one = self._call_library(op, [self.builder.extract_element(arg, lane) for arg in args])
            result = self.builder.insert_element(result, one, lane)
        return result

    def _call_library(self, op: str, args: list[ir.Value]) -> ir.Value:
        b, is_wide = self.builder, self.element == F64
        args = [arg if is_wide else b.fpext(arg, F64) for arg in args]
        name, module = LIBRARY[op], b.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(F64, [F64] * len(args)), name)
        result = b.call(function, args)
        return result if is_wide else b.fptrunc(result, F32)


# sums, in float64


def added(builder: ir.IRBuilder, kind: str, total: ir.Value, value: ir.Value, mask: Any) -> ir.Value:
    """Sixteen running sums, or maxima, that take in `value`, or its lanes in `mask`."""
    if mask is not None:  # lanes beyond the end may be NaN
        value = builder.select(mask, value, ir.Constant(value.type, None))
    value = resized(builder, value, F64)
    return larger(builder, total, value) if kind == "max" else builder.fadd(total, value)


def folded(builder: ir.IRBuilder, kind: str, parts: ir.Value) -> ir.Value:
    """The sixteen parts as one, in order."""
    if kind == "sum":
        name = f"llvm.vector.reduce.fadd.{suffix(parts.type)}"
        return call_intrinsic(builder, name, F64, [F64(0.0), parts])
    total = builder.extract_element(parts, I32(0))
    for lane in range(1, LANES):
        total = larger(builder, total, builder.extract_element(parts, I32(lane)))
    return total
