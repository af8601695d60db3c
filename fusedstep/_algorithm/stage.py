"""Work on whole tensors between two sweeps over memory: products of matrices, above all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Stage:
    """What a rule may have done to all numbers of a tensor together, by `staged(x, stage)`.

    The sweep before it stores what it works on, in a workspace; the sweep after it loads what it left there.
    A stage is a value, a frozen dataclass for example: equal ones do the same, and share their programs.
    """

    def run(self, source: Tensor, target: Tensor, workspace_bytes: int) -> None:
        """Fill `target` with what is made of `source`: stacks of whole tensors of one shape, in one memory. It
        may allocate so many bytes for a while.
        """
        raise NotImplementedError

    def dtypes(self, device: torch.device, compute: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Of what it works on, and of what it makes of that, both of one size, where rules are computed in
        `compute`.
        """
        return compute, compute

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of the matrices that a tensor of this shape consists of, which rules may take as
        `rows` and `columns`. Raises ValueError for what it cannot work on.
        """
        if len(shape) < 2:
            raise ValueError(
                f"found a tensor of shape {shape}, and matrices have two dimensions; give it to another group"
            )
        return shape[-2], shape[-1]

    def joins_rows(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor that is cut along dimension 0 must be put together for it."""
        return len(shape) == 2

    def flops(self, shape: tuple[int, ...]) -> float:
        """How much work a tensor of this shape is, for dividing it among ranks."""
        return float(math.prod(shape))

    def states(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """What it keeps for a tensor of this shape, or for a part of it: shapes by name. They are float32, or
        float64 as their parameter.
        """
        return {}

    def finish(
        self,
        target: Tensor,
        states: list[dict[str, Any]],
        skip: Tensor,
        add_up: Callable[[Tensor], None] | None,
    ) -> None:
        """What is left to do to a stack of parts, each with its states, which must stay as they are where
        `skip` is True. Where a tensor's rows are divided among ranks, `add_up` adds up what each has, in place.
        """
