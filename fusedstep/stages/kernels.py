"""Kernels for matrices: symmetric products, of which the tiles up to the diagonal are computed, and stored
twice; and matrices scaled to another type.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# rows and columns of a tile, and how much of a product is computed at a time: benchmarks/MEASURED.md
_TILE, _DEPTH, _WARPS = 128, 64, 4
# a product of more takes longer loads ahead, one of less another program beside it
_DEEP = 2048
# elements that a program scales
_SCALED, _SCALING_WARPS = 2048, 4


def takes(a: Tensor, b: Tensor, transposed: bool) -> bool:
    """Whether the hardware can load tiles of these, of which none has parts of two matrices, and 32 bits are
    enough to count the elements of a result.
    """
    aligned = a.is_contiguous() and b.is_contiguous() and a.itemsize == 2 and a.shape[2] % 8 == 0
    n = a.shape[2] if transposed else a.shape[1]
    return aligned and n * n < 2**31 and (not transposed or a.shape[1] % _DEPTH == 0)


def scale(x: Tensor, factors: Tensor, out: Tensor) -> None:
    """Fill `out` with every matrix of `x` times its factor. The elements of each follow each other."""
    numel = x[0].numel()
    with torch.cuda.device(x.device):
        fusedstep_scale[(triton.cdiv(numel, _SCALED), len(x))](
            x, factors, out, numel, x.stride(0), out.stride(0), BLOCK=_SCALED, num_warps=_SCALING_WARPS
        )


@triton.jit
def fusedstep_scale(x, factors, out, numel, x_stride, out_stride, BLOCK: tl.constexpr):
    matrix = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + matrix * x_stride + o, o < numel).to(tl.float32) * tl.load(factors + matrix)
    tl.store(out + matrix * out_stride + o, value.to(out.dtype.element_ty), o < numel)


def multiply(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None,
    out: Tensor,
    alpha: float,
    beta: float,
    diagonal: float,
    transposed: bool,
) -> None:
    """Fill `out` with alpha A B^T + beta C + diagonal I, or with A^T B in place of A B^T."""
    n, depth = (a.shape[2], a.shape[1]) if transposed else (a.shape[1], a.shape[2])
    block = [_DEPTH, _TILE] if transposed else [_TILE, _DEPTH]
    # all matrices below each other
    descriptors = [TensorDescriptor.from_tensor(t.view(-1, t.shape[2]), block) for t in (a, b)]
    side = triton.cdiv(n, _TILE)
    with torch.cuda.device(a.device):
        fusedstep_symmetric[(side * (side + 1) // 2, len(a))](
            *descriptors,
            out if addend is None else addend,
            out,
            n,
            depth,
            alpha,
            beta,
            diagonal,
            ADDS=addend is not None,
            TRANSPOSED=transposed,
            TILE=_TILE,
            DEPTH=_DEPTH,
            num_warps=_WARPS,
            num_stages=4 if depth > _DEEP else 3,
        )


@triton.jit(do_not_specialize=["alpha", "beta", "diagonal"])
def fusedstep_symmetric(
    a,
    b,
    addend,
    out,
    n,
    depth,
    alpha,
    beta,
    diagonal,
    ADDS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tile, matrix = tl.program_id(0), tl.program_id(1)
    # tiles are counted along the rows of a triangle
    i = ((tl.sqrt(8 * tile.to(tl.float32) + 1) - 1) / 2).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    j = tile - i * (i + 1) // 2
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
    first = matrix.to(tl.int64) * n * n
    places = rows[:, None] * n + columns[None, :]
    inside = (rows[:, None] < n) & (columns[None, :] < n)
    total *= alpha
    if ADDS:
        total += beta * tl.load(addend + first + places, inside, other=0).to(tl.float32)
    total += tl.where(rows[:, None] == columns[None, :], diagonal, 0.0)
    found = total.to(out.dtype.element_ty)
    tl.store(out + first + places, found, inside)
    if i != j:
        mirrored = columns[:, None] * n + rows[None, :]
        tl.store(out + first + mirrored, tl.trans(found), (columns[:, None] < n) & (rows[None, :] < n))
