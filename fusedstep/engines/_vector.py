"""A Numba type that is sixteen numbers at once, so that a rule compiled on it needs no vectoriser's favour.

LLVM lowers it to whatever the processor has. `loader` and `storer` are the one place where the cpu
engine knows how values are stored: they widen to the type computed in, and round to nearest even back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import torch
from llvmlite import ir
from numba.core import types as nb
from numba.extending import intrinsic, models, overload, register_model

LANES = 16

_F32, _F64, _I16, _I32 = ir.FloatType(), ir.DoubleType(), ir.IntType(16), ir.IntType(32)


class Vector(nb.Type):
    """Sixteen numbers, or sixteen truth values."""

    def __init__(self, element: nb.Type) -> None:
        self.element = element
        super().__init__(f"Vector({element})")


FLOATS = {torch.float32: Vector(nb.float32), torch.float64: Vector(nb.float64)}
_MASK = Vector(nb.boolean)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        element = {nb.float32: _F32, nb.float64: _F64, nb.boolean: ir.IntType(1)}[kind.element]
        super().__init__(manager, kind, _wide(element))


def _wide(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, LANES)


def _fill(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A vector with `value` in every lane."""
    one = builder.insert_element(ir.Constant(_wide(value.type), ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(_wide(_I32), [0] * LANES))


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(name, fnty=function_type), args)


# functions of vectors; a number among the arguments stands for a vector of it


def _lowered(emit: Callable[..., ir.Value], result: Vector | None, kinds: tuple[nb.Type, ...]) -> Any:
    vector = next((kind for kind in kinds if isinstance(kind, Vector) and kind is not _MASK), None)
    if vector is None:
        return None

    def codegen(context, builder, signature, values):
        filled = [
            value
            if isinstance(kind, Vector)
            else _fill(builder, context.cast(builder, value, kind, vector.element))
            for kind, value in zip(kinds, values, strict=True)
        ]
        return emit(builder, *filled)

    return (result or vector)(*kinds), codegen


def _unary(emit: Callable[..., ir.Value]) -> Any:
    return intrinsic(lambda typing_context, a: _lowered(emit, None, (a,)))


def _binary(emit: Callable[..., ir.Value], result: Vector | None = None) -> Any:
    return intrinsic(lambda typing_context, a, b: _lowered(emit, result, (a, b)))


def _ternary(emit: Callable[..., ir.Value]) -> Any:
    return intrinsic(lambda typing_context, a, b, c: _lowered(emit, None, (a, b, c)))


def _math(name: str) -> Callable[..., ir.Value]:
    def emit(builder, *args):
        suffix = f"v{LANES}f64" if args[0].type == _wide(_F64) else f"v{LANES}f32"
        return _call(builder, f"llvm.{name}.{suffix}", args[0].type, list(args))

    return emit


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    is_nan, greater = builder.fcmp_unordered("uno", a, a), builder.fcmp_ordered(">", a, b)
    return builder.select(builder.or_(is_nan, greater), a, b)


fma = _ternary(_math("fma"))
sqrt = _unary(_math("sqrt"))
div = _binary(lambda builder, a, b: builder.fdiv(a, b))
maximum = _binary(_larger)
where = _ternary(lambda builder, condition, a, b: builder.select(condition, a, b))


def filler(kind: Vector) -> Any:
    """fill(numbers): each as a vector."""

    @intrinsic
    def fill(typing_context, numbers):
        def codegen(context, builder, signature, args):
            values = (builder.extract_value(args[0], i) for i in range(len(numbers)))
            casts = (context.cast(builder, value, numbers[0], kind.element) for value in values)
            return context.make_tuple(builder, signature.return_type, [_fill(builder, v) for v in casts])

        return nb.UniTuple(kind, len(numbers))(numbers), codegen

    return fill


def _comparison(sign: str) -> Any:
    compare = ir.IRBuilder.fcmp_unordered if sign == "!=" else ir.IRBuilder.fcmp_ordered
    return _binary(lambda builder, a, b: compare(builder, sign, a, b), _MASK)


_BINARY = {
    operator.add: _binary(lambda builder, a, b: builder.fadd(a, b)),
    operator.sub: _binary(lambda builder, a, b: builder.fsub(a, b)),
    operator.mul: _binary(lambda builder, a, b: builder.fmul(a, b)),
    operator.lt: _comparison("<"),
    operator.gt: _comparison(">"),
    operator.le: _comparison("<="),
    operator.ge: _comparison(">="),
    operator.eq: _comparison("=="),
    operator.ne: _comparison("!="),
}
_neg = _unary(lambda builder, a: builder.fneg(a))


def _overload_binary(symbol: Callable, function: Any) -> None:
    @overload(symbol)
    def implementation(a, b):
        if isinstance(a, Vector) or isinstance(b, Vector):
            return lambda a, b: function(a, b)


for _symbol, _function in _BINARY.items():
    _overload_binary(_symbol, _function)


@overload(operator.neg)
def _overload_neg(a):
    if isinstance(a, Vector):
        return lambda a: _neg(a)


# storage


class _BFloat(ir.types._BaseFloatType):
    null, intrinsic_name = "0.0", "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
_STORED = {torch.float64: _F64, torch.float32: _F32, torch.float16: ir.HalfType(), torch.bfloat16: _I16}
_ROUNDS_TO_BFLOAT = llvmlite.binding.get_host_cpu_features().get("avx512bf16", False)


def _widened(builder: ir.IRBuilder, value: ir.Value, stored: torch.dtype, to: ir.VectorType) -> ir.Value:
    if stored == torch.bfloat16:
        bits = builder.shl(builder.zext(value, _wide(_I32)), _fill(builder, _I32(16)))
        value = builder.bitcast(bits, _wide(_F32))
    if stored == torch.float16:
        value = builder.fpext(value, _wide(_F32))
    if value.type == to:
        return value
    return builder.fptrunc(value, to) if stored == torch.float64 else builder.fpext(value, to)


def _narrowed(builder: ir.IRBuilder, value: ir.Value, stored: torch.dtype) -> ir.Value:
    # 16 bits are reached from 32: processors have no instruction for more at once
    to = _wide(_F64 if stored == torch.float64 else _F32)
    if value.type != to:
        value = (builder.fpext if stored == torch.float64 else builder.fptrunc)(value, to)
    if stored == torch.float16:
        return builder.fptrunc(value, _wide(_STORED[stored]))
    if stored != torch.bfloat16:
        return value
    if _ROUNDS_TO_BFLOAT:  # one instruction instead of eight
        return builder.bitcast(builder.fptrunc(value, _wide(_BFloat())), _wide(_I16))
    bits = builder.bitcast(value, _wide(_I32))
    # to nearest even: add half of what is cut off, less one unless the last kept bit is odd
    odd = builder.and_(builder.lshr(bits, _fill(builder, _I32(16))), _fill(builder, _I32(1)))
    bits = builder.add(bits, builder.add(odd, _fill(builder, _I32(0x7FFF))))
    bits = builder.lshr(bits, _fill(builder, _I32(16)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, _fill(builder, _I32(0x7FC0)), bits), _wide(_I16))


def _place(
    builder: ir.IRBuilder, addresses: ir.Value, index: ir.Value, role: int, stored: torch.dtype
) -> ir.Value:
    first = builder.inttoptr(builder.extract_value(addresses, role), _STORED[stored].as_pointer())
    return builder.bitcast(builder.gep(first, [index]), _wide(_STORED[stored]).as_pointer())


def _in_range(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Lanes below `count`."""
    lanes = ir.Constant(_wide(_I32), list(range(LANES)))
    return builder.icmp_signed("<", lanes, _fill(builder, builder.trunc(count, _I32)))


_SHORT = {torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "i16"}


# roles with how they are stored; and where in what is given out
Loaded = list[tuple[int, torch.dtype]]
Stored = list[tuple[int, torch.dtype, int]]


def loader(roles: Loaded, compute: Vector, masked: bool) -> Any:
    """load(addresses, i, count): elements i, i+1, ... of these roles; only `count` of them if masked."""

    @intrinsic
    def load(typing_context, addresses, i, count):
        def codegen(context, builder, signature, args):
            to, values = context.get_value_type(compute), []
            for role, stored in roles:
                place, kind = _place(builder, args[0], args[1], role, stored), _wide(_STORED[stored])
                size = stored.itemsize
                if masked:
                    name = f"llvm.masked.load.v{LANES}{_SHORT[stored]}.p0"
                    nothing = ir.Constant(kind, None)
                    value = _call(
                        builder, name, kind, [place, _I32(size), _in_range(builder, args[2]), nothing]
                    )
                else:
                    value = builder.load(place, align=size)
                values.append(_widened(builder, value, stored, to))
            return context.make_tuple(builder, signature.return_type, values)

        return nb.UniTuple(compute, len(roles))(addresses, i, count), codegen

    return load


def storer(roles: Stored, masked: bool) -> Any:
    """store(addresses, i, count, values): the reverse for these values, rounded to how they are stored."""

    @intrinsic
    def store(typing_context, addresses, i, count, values):
        def codegen(context, builder, signature, args):
            for role, stored, at in roles:
                value = _narrowed(builder, builder.extract_value(args[3], at), stored)
                place = _place(builder, args[0], args[1], role, stored)
                if masked:
                    name = f"llvm.masked.store.v{LANES}{_SHORT[stored]}.p0"
                    mask = _in_range(builder, args[2])
                    _call(builder, name, ir.VoidType(), [value, place, _I32(stored.itemsize), mask])
                else:
                    builder.store(value, place, align=stored.itemsize)
            return context.get_dummy_value()

        return nb.void(addresses, i, count, values), codegen

    return store


# sums, in float64; "^" takes the largest instead

Summed = tuple[tuple[str, int], ...]


def _sums(count: int) -> nb.Type:
    return nb.UniTuple(FLOATS[torch.float64], count)


def zeros(count: int) -> Any:
    """zeros(): as many sums, each of sixteen parts."""

    @intrinsic
    def zeros(typing_context):
        def codegen(context, builder, signature, args):
            zero = ir.Constant(_wide(_F64), None)
            return context.make_tuple(builder, signature.return_type, [zero] * count)

        return _sums(count)(), codegen

    return zeros


def adder(summed: Summed, masked: bool) -> Any:
    """add(sums, values, lanes): sums with the values at these places added; only of so many lanes if masked."""

    @intrinsic
    def add(typing_context, sums, values, lanes):
        def codegen(context, builder, signature, args):
            added = []
            for k, (kind, at) in enumerate(summed):
                value = builder.extract_value(args[1], at)
                if masked:  # what lies beyond may be no number
                    nothing = ir.Constant(value.type, None)
                    value = builder.select(_in_range(builder, args[2]), value, nothing)
                value = value if value.type == _wide(_F64) else builder.fpext(value, _wide(_F64))
                total = builder.extract_value(args[0], k)
                added.append(_larger(builder, total, value) if kind == "^" else builder.fadd(total, value))
            return context.make_tuple(builder, signature.return_type, added)

        return _sums(len(summed))(sums, values, lanes), codegen

    return add


def putter(summed: Summed) -> Any:
    """put(address, i, sums): the sums as row `i` of the float64 matrix there."""

    @intrinsic
    def put(typing_context, address, i, sums):
        def codegen(context, builder, signature, args):
            matrix = builder.inttoptr(args[0], _F64.as_pointer())
            for k, (kind, _) in enumerate(summed):
                parts = builder.extract_value(args[2], k)
                if kind == "^":
                    total = builder.extract_element(parts, _I32(0))
                    for lane in range(1, LANES):
                        total = _larger(builder, total, builder.extract_element(parts, _I32(lane)))
                else:
                    name = f"llvm.vector.reduce.fadd.v{LANES}f64"
                    total = _call(builder, name, _F64, [_F64(0.0), parts])
                at = builder.add(builder.mul(args[1], args[1].type(len(summed))), args[1].type(k))
                builder.store(total, builder.gep(matrix, [at]))
            return context.get_dummy_value()

        return nb.void(address, i, sums), codegen

    return put
