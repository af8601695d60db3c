"""Sums, or maxima, over a chunk, and by `fusedstep_reduce` over all chunks of a tensor."""

from __future__ import annotations

import triton
import triton.language as tl

from .words import maximum


@triton.jit
def joined(total, x, MAX: tl.constexpr):
    if MAX:
        return maximum(total, x)
    else:
        return total + x


@triton.jit
def folded(x, axis: tl.constexpr, MAX: tl.constexpr):
    if MAX:
        return tl.reduce(x, axis, maximum)
    else:
        return tl.sum(x, axis)


@triton.jit(do_not_specialize=["count"])
def fusedstep_reduce(partials, firsts, sums, count, MAXES: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of a tensor from those of its chunks."""
    t = tl.program_id(0)
    begin, end = tl.load(firsts + t), tl.load(firsts + t + 1)
    for k in tl.static_range(len(MAXES)):
        total = tl.zeros([BLOCK], sums.dtype.element_ty)
        for first in range(begin, end, 4 * BLOCK):
            # four loads at once, again for the latency of memory
            for j in tl.static_range(4):
                c = first + j * BLOCK + tl.arange(0, BLOCK)
                x = tl.load(partials + c * len(MAXES) + k, c < end, other=0)
                total = joined(total, x.to(total.dtype), MAXES[k])
        tl.store(sums + k * count + t, folded(total, 0, MAXES[k]))
