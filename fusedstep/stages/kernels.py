"""Kernels for matrices: symmetric products, and matrices times a factor, in another dtype. Of a product, only
tiles up to the diagonal are computed, and stored twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .products import ALIGNED, Addends

# rows and columns of a tile, and the depth that is multiplied at a time: benchmarks/MEASURED.md
_TILE, _DEPTH, _WARPS = 128, 64, 4
# a deeper product gains by loading further ahead, a shallower one by another program beside it
_DEEP = 2048
# elements that a program scales
_SCALED, _SCALING_WARPS = 2048, 4


def takes(a: Tensor, b: Tensor, transposed: bool) -> bool:
    """Whether the hardware can load tiles of these tensors, none of them with parts of two matrices, and 32
    bits can count the elements of a result.
    """
    aligned = a.is_contiguous() and b.is_contiguous() and a.itemsize == 2 and a.shape[2] % ALIGNED == 0
    n = a.shape[2] if transposed else a.shape[1]
    return aligned and n * n < 2**31 and (not transposed or a.shape[1] % _DEPTH == 0)


def scale(x: Tensor, factors: Tensor, out: Tensor) -> None:
    """Fill `out` with every matrix of `x` times its factor. Each matrix must be contiguous."""
    numel = x[0].numel()
    blocks = triton.cdiv(numel, _SCALED)
    with torch.cuda.device(x.device):
        # one dimension: the others of a grid end at 65,535
        fusedstep_scale[(blocks * len(x),)](
            x, factors, out, numel, blocks, x.stride(0), out.stride(0), BLOCK=_SCALED, num_warps=_SCALING_WARPS
        )


@triton.jit
def fusedstep_scale(x, factors, out, numel, blocks, x_stride, out_stride, BLOCK: tl.constexpr):
    matrix = (tl.program_id(0) // blocks).to(tl.int64)
    o = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + matrix * x_stride + o, o < numel).to(tl.float32) * tl.load(factors + matrix)
    tl.store(out + matrix * out_stride + o, value.to(out.dtype.element_ty), o < numel)


def multiply(a: Tensor, b: Tensor, plus: Addends, out: Tensor, alpha: float, transposed: bool) -> None:
    """Fill `out` with alpha A B^T, or with alpha A^T B, and what is `plus`."""
    n, depth = (a.shape[2], a.shape[1]) if transposed else (a.shape[1], a.shape[2])
    block = [_DEPTH, _TILE] if transposed else [_TILE, _DEPTH]
    # all matrices, one below the other
    descriptors = [TensorDescriptor.from_tensor(t.view(-1, t.shape[2]), block) for t in (a, b)]
    side = triton.cdiv(n, _TILE)
    (beta, first), (gamma, second), *_ = (*plus, (0.0, out), (0.0, out))
    with torch.cuda.device(a.device):
        fusedstep_product[(side * (side + 1) // 2, len(a))](
            *descriptors,
            first,
            second,
            out,
            n,
            depth,
            alpha,
            beta,
            gamma,
            ADDENDS=len(plus),
            TRANSPOSED=transposed,
            TILE=_TILE,
            DEPTH=_DEPTH,
            num_warps=_WARPS,
            num_stages=4 if depth > _DEEP else 3,
        )


@triton.jit
def _place(tile):
    """Row and column of a tile, if tiles are counted along the rows of a triangle."""
    i = ((tl.sqrt(8 * tile.to(tl.float32) + 1) - 1) / 2).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    return i, tile - i * (i + 1) // 2


@triton.jit(do_not_specialize=["alpha", "beta", "gamma"])
def fusedstep_product(
    a,
    b,
    first,
    second,
    out,
    n,
    depth,
    alpha,
    beta,
    gamma,
    ADDENDS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    matrix = tl.program_id(1)
    i, j = _place(tl.program_id(0))
    total = tl.zeros([TILE, TILE], tl.float32)
    for k in range(0, depth, DEPTH):
        if TRANSPOSED:
            x = tl.trans(a.load([matrix * depth + k, i * TILE]))
            y = b.load([matrix * depth + k, j * TILE])
        else:
            x = a.load([matrix * n + i * TILE, k])
            y = tl.trans(b.load([matrix * n + j * TILE, k]))
        total = tl.dot(x, y, total)
    rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    start = matrix.to(tl.int64) * n * n
    places = rows[:, None] * n + columns[None, :]
    inside = (rows[:, None] < n) & (columns[None, :] < n)
    total *= alpha
    if ADDENDS > 0:
        total += beta * tl.load(first + start + places, inside, other=0).to(tl.float32)
    if ADDENDS > 1:
        total += gamma * tl.load(second + start + places, inside, other=0).to(tl.float32)
    found = total.to(out.dtype.element_ty)
    mirrored = columns[:, None] * n + rows[None, :]
    across = (columns[:, None] < n) & (rows[None, :] < n)
    if i != j:
        tl.store(out + start + places, found, inside)
        tl.store(out + start + mirrored, tl.trans(found), across)
    else:
        # rounded factors need not commute, and then the two entries of a pair differ: the lower one twice
        tl.store(out + start + places, found, inside & (rows[:, None] >= columns[None, :]))
        tl.store(out + start + mirrored, tl.trans(found), across & (rows[None, :] > columns[:, None]))
