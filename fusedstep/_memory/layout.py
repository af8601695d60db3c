"""How a tensor lies in memory.

An engine that works by address needs a parameter, its gradient and states dense and in the same element order.
A tensor that is not gets a dense stand-in, which is copied in before the update and out after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dense_strides(t: Tensor) -> tuple[int, ...]:
    """The strides of `t` if its elements fill a block of memory without gaps, else those of a fresh copy.

    >>> dense_strides(torch.empty(4, 3).t()), dense_strides(torch.empty(4, 6)[:, :3])
    ((1, 3), (3, 1))
    """
    return t.stride() if _is_dense(t) else row_strides(t)


def row_strides(t: Tensor) -> tuple[int, ...]:
    """The strides with which elements lie row by row, without gaps.

    >>> row_strides(torch.empty(4, 3).t())
    (4, 1)
    """
    return torch.empty(t.shape, device="meta").stride()


def _is_dense(t: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def lies_like(t: Tensor, strides: Sequence[int]) -> bool:
    """Whether `t` is dense with these strides and holds its values literally (no lazy conjugate)."""
    same = all(a == b for a, b, size in zip(t.stride(), strides, t.shape, strict=True) if size > 1)
    return (same or t.numel() == 0) and not t.is_conj() and not t.is_neg()


def empty_like(t: Tensor, strides: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_strided(t.shape, strides, dtype=dtype or t.dtype, device=t.device)


def laid_like(t: Tensor, strides: Sequence[int]) -> Tensor:
    """`t` itself if it has this layout, else a copy that has."""
    return t if lies_like(t, strides) else empty_like(t, strides).copy_(t)


def real_numel(t: Tensor) -> int:
    """Real numbers in `t`: a complex element is two."""
    return t.numel() * 2 if t.is_complex() else t.numel()


def overlaps_itself(t: Tensor) -> bool:
    """Whether elements of `t` may share memory, as those of an expanded tensor do.

    >>> overlaps_itself(torch.ones(1).expand(3)), overlaps_itself(torch.empty(4, 6)[:, :3].t())
    (True, False)
    """
    extent = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return t.numel() > 0
            extent += stride * (size - 1)
    return False
