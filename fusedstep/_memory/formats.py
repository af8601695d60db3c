"""How a slot is stored: a format names the tensors (planes) it consists of.

Rules know nothing of formats. Engines load and store whole blocks of a format; allocation, checkpoints and
shards ask for its planes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Plane(NamedTuple):
    """One tensor of a format: its suffix in the state's name, its dtype, and elements that share a number."""

    suffix: str
    dtype: torch.dtype
    block: int = 1


class Plain(NamedTuple):
    """One tensor of the parameter's shape; a complex number is stored as two of this dtype."""

    dtype: torch.dtype

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane("", self.dtype),)

    @property
    def loses_bits(self) -> bool:
        """Whether what is read back is less precise than what was computed."""
        return self.dtype.itemsize < 4

    @property
    def block(self) -> int:
        """Elements that must be loaded and stored together."""
        return 1


Format = Plain


def real_dtype(t: Tensor) -> torch.dtype:
    """The dtype of the real numbers in `t`."""
    return t.dtype.to_real() if t.is_complex() else t.dtype


def plain_format(t: Tensor) -> Plain:
    return Plain(real_dtype(t))


def compute_dtype(formats: tuple[Format, ...]) -> torch.dtype:
    """What an update with slots stored so is computed in."""
    return torch.float64 if any(f.dtype == torch.float64 for f in formats) else torch.float32
