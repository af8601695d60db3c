"""Products of matrices that are symmetric, such as X X^T: half of them is computed, and mirrored."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

# from this size on half the work is worth more than what cuBLAS does better: benchmarks/MEASURED.md
_LEAST = 512


def symmetric_product(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    addend: Tensor | None = None,
    diagonal: float = 0.0,
    transposed: bool = False,
) -> Tensor:
    """alpha A B^T + beta C + diagonal I, which the caller knows to be symmetric; A^T B if `transposed`.

    >>> x = torch.tensor([[[1.0, 2.0]]])
    >>> symmetric_product(x, x, alpha=2.0, diagonal=1.0)
    tensor([[[11.]]])
    >>> symmetric_product(x, x, transposed=True)
    tensor([[[1., 2.],
             [2., 4.]]])
    """
    n = a.shape[2] if transposed else a.shape[1]
    out = torch.empty(len(a), n, n, dtype=a.dtype, device=a.device)
    kernels = kernels_for(a) if n >= _LEAST else None
    if kernels is not None and kernels.takes(a, b, transposed):
        kernels.multiply(a, b, addend, out, alpha, beta, diagonal, transposed)
        return out
    left, right = (a.mT, b) if transposed else (a, b.mT)
    torch.baddbmm(out if addend is None else addend, left, right, beta=beta, alpha=alpha, out=out)
    if diagonal:
        out.diagonal(dim1=1, dim2=2).add_(diagonal)
    return out


def kernels_for(x: Tensor) -> Any:
    """The module with kernels for this tensor; None where there is none."""
    return _kernels() if x.device.type == "cuda" and torch.version.hip is None else None


@functools.cache
def _kernels() -> Any:
    try:
        from . import kernels
    except ImportError:
        return None
    return kernels
