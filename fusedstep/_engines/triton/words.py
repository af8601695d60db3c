"""Words of the language as device functions for Triton, where its own do not say the same."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# whether there is inline assembly
ON_NVIDIA = tl.constexpr(torch.version.cuda is not None and not triton.knobs.runtime.interpret)


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def power(base, exponent):
    """As C has it: of a negative base, only whole powers."""
    b, e = base.to(tl.float64), exponent.to(tl.float64)
    size = tl.exp(e * tl.log(tl.abs(b)))
    is_whole, is_even = tl.floor(e) == e, tl.floor(e / 2) == e / 2
    size = tl.where(b < 0, tl.where(is_whole, tl.where(is_even, size, -size), float("nan")), size)
    return tl.where(e == 0, 1.0, tl.where(b == 1, 1.0, size)).to(base.dtype)


@triton.jit
def tanh(a):
    x = a.to(tl.float64)
    t = tl.exp(-2 * tl.abs(x))
    # 1 - t would cancel where x is small
    small = tl.abs(x) * (1 - x * x * (1 / 3 - x * x * (2 / 15)))
    value = tl.where(tl.abs(x) < 1e-2, small, (1 - t) / (1 + t))
    return tl.where(x < 0, -value, value).to(a.dtype)


@triton.jit
def block_largest(a, mask):
    size = tl.abs(a.to(tl.float32))
    # what lies beyond the end of a tensor is no part of a block
    size = size if mask is None else tl.where(mask, size, 0)
    return tl.reduce(size, 1, maximum, keep_dims=True).to(tl.int32, bitcast=True)


@triton.jit
def number_bits(a):
    a = a.to(tl.float32)
    if ON_NVIDIA:
        # added to, a NaN has all bits set but its sign
        a = tl.inline_asm_elementwise("add.f32 $0, $1, 0f80000000;", "=f,f", [a], tl.float32, True, 1)
        return tl.minimum(a.to(tl.int32, bitcast=True), 0x7FC00000)
    else:
        return tl.where(a == a, a.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def shift_right(a, BY: tl.constexpr):
    return (a.to(tl.uint32, bitcast=True) >> BY).to(tl.int32, bitcast=True)


@triton.jit
def with_sign(a, b):
    if ON_NVIDIA:
        # a | (b & sign), for which the compiler would make a condition of a sign that comes from 16 bits
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, 0x80000000, 0xF8;", "=r,r,r", [a, b], tl.int32, True, 1
        )
    else:
        return a | (b & -2147483648)


@triton.constexpr_function
def _bytes_of_four(which):
    """Assembly that takes this byte of each two numbers, and then those of both pairs."""
    pair = f"0x{4 + which}{which}"
    taken = f"prmt.b32 l, $1, $2, {pair}; prmt.b32 h, $3, $4, {pair};"
    return f"{{.reg .b32 l, h; {taken} prmt.b32 $0, l, h, 0x5410;}}"


@triton.jit
def byte(a, WHICH: tl.constexpr):
    if ON_NVIDIA:
        return tl.inline_asm_elementwise(_bytes_of_four(WHICH), "=r,r,r,r,r", [a], tl.int8, True, 4)
    else:
        return shift_right(a, 8 * WHICH)


@triton.jit
def laid_out_like(a, b):
    """A number of 64 bits, in the thread that has the float32 `b`: without it, what is computed from places of
    elements would be exchanged between threads at the end.
    """
    if ON_NVIDIA:
        return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l,f", [a, b], a.dtype, True, 1)
    else:
        return a


@triton.jit
def product_high(a, B: tl.constexpr):
    return ((a.to(tl.uint32, bitcast=True).to(tl.uint64) * (B & 0xFFFFFFFF)) >> 32).to(tl.int32)


@triton.jit
def fast_quotient(a, b):
    a, b = tl.broadcast(a, b)
    return tl.inline_asm_elementwise("div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)


@triton.jit
def fast_root(a):
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [a], tl.float32, True, 1)
