"""How sixteen elements are loaded and stored: the one place where the cpu engine knows what planes hold.

Loading widens them to the type computed in, storing rounds them to nearest even.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from llvmlite import ir

from ..._algorithm.formats import Plane
from .build import (
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    LANES,
    ROUNDS_TO_BFLOAT,
    TO_BFLOAT,
    call_intrinsic,
    constant,
    element_of,
    fill,
    larger,
    of_elements,
    suffix,
    wide,
)


class Place(NamedTuple):
    """Where a vector's elements are: a mask, if some lie beyond the end, and inputs of their random bits."""

    mask: Any = None
    draw_inputs: tuple[ir.Value, ...] = ()


_STORED = {
    torch.float64: F64,
    torch.float32: F32,
    torch.float16: ir.HalfType(),
    torch.bfloat16: I16,
    torch.int16: I16,
    torch.int8: I8,
    torch.uint8: I8,
}
_SHORT = {torch.float64: "f64", torch.float32: "f32", torch.float16: "f16"}


def block_largest(builder: ir.IRBuilder, vectors: Sequence[ir.Value], masks: Sequence[Any]) -> ir.Value:
    """The bits of the largest absolute value in the vectors of a block; NaN is above all."""
    whole, largest = wide(I32), constant(wide(I32), 0)
    for value, mask in zip(vectors, masks, strict=True):
        size = builder.and_(builder.bitcast(resized(builder, value, F32), whole), constant(whole, 0x7FFFFFFF))
        # lanes beyond the end are no part of the block
        size = size if mask is None else builder.select(mask, size, constant(whole, 0))
        largest = larger(builder, largest, size)
    return call_intrinsic(builder, f"llvm.vector.reduce.smax.{suffix(whole)}", I32, [largest])


def below(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Lanes below `count`."""
    numbers = ir.Constant(wide(I32), [*range(LANES)])
    return builder.icmp_signed("<", numbers, fill(builder, builder.trunc(count, I32)))


def load(
    builder: ir.IRBuilder, address: ir.Value, index: ir.Value, plane: Plane, to: ir.VectorType, place: Place
) -> ir.Value:
    """Sixteen elements from `index` on, or those in the mask; one number, if they share it."""
    stored, size = plane.dtype, plane.dtype.itemsize
    if plane.block > 1:
        one = builder.load(_place(builder, address, builder.udiv(index, I64(plane.block)), _STORED[stored]))
        return widened(builder, one, stored, to.element)
    kind = wide(_STORED[stored])
    at = builder.bitcast(_place(builder, address, index, _STORED[stored]), kind.as_pointer())
    if place.mask is None:
        value = builder.load(at, align=size)
    else:
        name = f"llvm.masked.load.{_stored_suffix(kind, stored)}.p0"
        value = call_intrinsic(builder, name, kind, [at, I32(size), place.mask, ir.Constant(kind, None)])
    return widened(builder, value, stored, to)


def store(
    builder: ir.IRBuilder, address: ir.Value, index: ir.Value, plane: Plane, value: ir.Value, place: Place
) -> None:
    stored, size = plane.dtype, plane.dtype.itemsize
    value = (_cut if plane.is_exact and stored == torch.bfloat16 else narrowed)(builder, value, stored)
    if plane.block > 1:
        builder.store(value, _place(builder, address, builder.udiv(index, I64(plane.block)), _STORED[stored]))
        return
    at = builder.bitcast(_place(builder, address, index, _STORED[stored]), value.type.as_pointer())
    if place.mask is None:
        builder.store(value, at, align=size)
    else:
        name = f"llvm.masked.store.{_stored_suffix(value.type, stored)}.p0"
        call_intrinsic(builder, name, ir.VoidType(), [value, at, I32(size), place.mask])


def _stored_suffix(kind: ir.VectorType, stored: torch.dtype) -> str:
    return f"v{LANES}{_SHORT[stored]}" if stored in _SHORT else suffix(kind)


def _place(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, stored: ir.Type) -> ir.Value:
    return builder.gep(builder.inttoptr(address, stored.as_pointer()), [index])


def resized(builder: ir.IRBuilder, value: ir.Value, element: ir.Type) -> ir.Value:
    """Numbers of 32 or 64 bits, converted to `element`."""
    if element_of(value.type) == element:
        return value
    change = builder.fpext if element == F64 else builder.fptrunc
    return change(value, of_elements(element, value.type))


def widened(builder: ir.IRBuilder, value: ir.Value, stored: torch.dtype, to: ir.Type) -> ir.Value:
    if stored == torch.uint8:
        return builder.zext(value, of_elements(I32, to))
    if not stored.is_floating_point:
        return builder.sext(value, of_elements(I32, to))
    if stored == torch.bfloat16:
        bits = builder.shl(builder.zext(value, of_elements(I32, to)), constant(of_elements(I32, to), 16))
        value = builder.bitcast(bits, of_elements(F32, to))
    if stored == torch.float16:
        value = builder.fpext(value, of_elements(F32, to))
    return resized(builder, value, element_of(to))


def _cut(builder: ir.IRBuilder, value: ir.Value, stored: torch.dtype) -> ir.Value:
    """Bits of a float32 that is a bfloat16 already: processors that round turn those next to 0 into 0."""
    value = resized(builder, value, F32)
    bits = builder.lshr(
        builder.bitcast(value, of_elements(I32, value.type)), constant(of_elements(I32, value.type), 16)
    )
    return builder.trunc(bits, of_elements(I16, value.type))


def narrowed(builder: ir.IRBuilder, value: ir.Value, stored: torch.dtype) -> ir.Value:
    if not stored.is_floating_point:
        return builder.trunc(value, of_elements(_STORED[stored], value.type))
    # 64 bits go to 16 through 32: processors have no single instruction for it
    value = resized(builder, value, F64 if stored == torch.float64 else F32)
    kind = value.type
    if stored == torch.float16:
        return builder.fptrunc(value, of_elements(_STORED[stored], kind))
    if stored != torch.bfloat16:
        return value
    if ROUNDS_TO_BFLOAT:
        function = builder.module.globals.get(TO_BFLOAT)
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(of_elements(I16, kind), [kind]), TO_BFLOAT)
        return builder.call(function, [value])
    whole = of_elements(I32, kind)
    bits = builder.bitcast(value, whole)
    # to nearest even: add half of what is cut off, less one unless the last kept bit is odd
    odd = builder.and_(builder.lshr(bits, constant(whole, 16)), constant(whole, 1))
    bits = builder.add(bits, builder.add(odd, constant(whole, 0x7FFF)))
    bits = builder.lshr(bits, constant(whole, 16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, constant(whole, 0x7FC0), bits), of_elements(I16, kind))
