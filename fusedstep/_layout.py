"""How a tensor lies in memory, and whether it still lies there.

An engine that works on addresses needs every role of a tensor (parameter, gradient, states) dense and
in the same element order. What is not gets a dense stand-in, copied in before and out after the update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

try:  # PyTorch's own check for "same dtype, device, sizes and strides": 20 ns a tensor, all in one call
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # private, so it may go: then the same comparison in Python, 10x slower
    TensorGuards = None

# one C call where the build has it (CUDA builds do), else one call a tensor
_same_addresses = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def dense_strides(t: Tensor) -> tuple[int, ...]:
    """The strides of `t` if its elements fill a block of memory without gaps, else those of a fresh copy.

    >>> dense_strides(torch.empty(4, 3).t()), dense_strides(torch.empty(4, 6)[:, :3])
    ((1, 3), (3, 1))
    """
    return t.stride() if _is_dense(t) else torch.empty(t.shape, device="meta").stride()


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
    """`t` itself if it lies so, else a copy that does."""
    return t if lies_like(t, strides) else empty_like(t, strides).copy_(t)


def numel(t: Tensor) -> int:
    """Real numbers in `t`: a complex element is two."""
    return t.numel() * 2 if t.is_complex() else t.numel()


class Guard:
    """Tells whether tensors still have the dtypes, devices, sizes and strides they were built with."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        if TensorGuards is None:
            self._facts = [*map(_facts, tensors)]
            return
        fixed = [[None] * t.dim() for t in tensors]
        guards = TensorGuards(*tensors, dynamic_dims_sizes=fixed, dynamic_dims_strides=fixed)
        self._check = guards.check

    def holds(self, tensors: Sequence[Tensor | None]) -> bool:
        if TensorGuards is not None:
            return self._check(*tensors)
        return len(tensors) == len(self._facts) and [*map(_facts, tensors)] == self._facts


def _facts(t: Tensor | None) -> tuple | None:
    return t if t is None else (t.dtype, t.device, t.shape, t.stride(), t.is_conj(), t.is_neg(), type(t))


class Addresses:
    """The addresses of a list of tensors, remembered; the tensors themselves are not kept alive."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self._indices: list[int] = []

    def moved(self, tensors: list[Tensor]) -> bool:
        """Remember where `tensors` are now; whether any of them was elsewhere before."""
        if len(tensors) == len(self.values):
            if _same_addresses is not None and _same_addresses(tensors, self.values, self._indices):
                return False
        values = [*map(Tensor.data_ptr, tensors)]
        if values == self.values:
            return False
        self.values, self._indices = values, [*range(len(values))]
        return True
