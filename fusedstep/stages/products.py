"""Products of matrices that are symmetric, such as X X^T: one half is computed, and mirrored."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# from this size on, half the work gains more than cuBLAS does by being faster: benchmarks/MEASURED.md
_LEAST = 512
# a row must be a multiple of so many numbers of 16 bits for our kernels to load its tiles
ALIGNED = 8
# what is added to a product: symmetric matrices, each with a factor; two at most
Addends = Sequence[tuple[float, Tensor]]
# while the settings of all threads are changed
_changing = threading.Lock()


def symmetric_product(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    plus: Addends = (),
    transposed: bool = False,
) -> Tensor:
    """alpha A B^T, and what is `plus`, which the caller knows to be symmetric; A^T B if `transposed`. Rounded
    once where there is a kernel for it.

    >>> x = torch.tensor([[[1.0, 2.0]]])
    >>> symmetric_product(x, x, alpha=2.0, plus=[(0.5, torch.tensor([[[4.0]]]))])
    tensor([[[12.]]])
    >>> symmetric_product(x, x, transposed=True)
    tensor([[[1., 2.],
             [2., 4.]]])
    """
    n = a.shape[2] if transposed else a.shape[1]
    out = torch.empty(len(a), n, n, dtype=a.dtype, device=a.device)
    if has_kernel(a, b, transposed):
        kernels_for(a).multiply(a, b, plus, out, alpha, transposed)
        return out
    left, right = (a.mT, b) if transposed else (a, b.mT)
    (beta, first), *more = plus or ((0.0, out),)
    torch.baddbmm(first, left, right, beta=beta, alpha=alpha, out=out)
    for factor, addend in more:
        out.add_(addend, alpha=factor)
    return out


@contextlib.contextmanager
def sums_in_float32(device: torch.device) -> Iterator[None]:
    """Have cuBLAS add up in float32 within this context, whatever torch's settings: partial sums may exceed the
    range of float16.

    >>> with sums_in_float32(torch.device("cuda")):
    ...     torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    False
    """
    if device.type != "cuda":
        yield
        return
    allowed = torch.backends.cuda.matmul
    with _changing:
        parts_in_16, in_16 = allowed.allow_fp16_reduced_precision_reduction, allowed.allow_fp16_accumulation
        # newer versions of torch set split-k together with the first of these
        parts = getattr(allowed, "allow_fp16_reduced_precision_reduction_split_k", None)
        before = parts_in_16 if parts is None else (parts_in_16, parts)
        try:
            allowed.allow_fp16_reduced_precision_reduction = allowed.allow_fp16_accumulation = False
            yield
        finally:
            allowed.allow_fp16_reduced_precision_reduction = before
            allowed.allow_fp16_accumulation = in_16


def has_kernel(a: Tensor, b: Tensor, transposed: bool) -> bool:
    """Whether one of our kernels computes this product."""
    n = a.shape[2] if transposed else a.shape[1]
    kernels = kernels_for(a) if n >= _LEAST else None
    return kernels is not None and kernels.takes(a, b, transposed)


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
