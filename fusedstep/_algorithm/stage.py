"""Work on whole tensors between two sweeps over memory: products of matrices, above all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Stage:
    """Work on all numbers of a tensor together, which a rule asks for by `staged(x, stage)`.

    The sweep before it stores its source in a workspace; the sweep after it loads its target from there. A
    stage is a value, a frozen dataclass for example: equal stages do the same, and share their programs.
    """

    def run(self, source: Tensor, target: Tensor, workspace_bytes: int) -> None:
        """Fill `target` with what is made of `source`: stacks of whole tensors of one shape, both in the same
        memory. It may allocate `workspace_bytes` while it runs.
        """
        raise NotImplementedError

    def dtypes(self, device: torch.device, compute: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of source and target, both of one size, where rules are computed in `compute`."""
        return compute, compute

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of the matrices that a tensor of this shape consists of, which rules may take as
        `rows` and `columns`. Raises ValueError for a shape that it cannot work on.
        """
        if len(shape) < 2:
            raise ValueError(
                f"found a tensor of shape {shape}, but matrices have two dimensions; give it to another group"
            )
        return shape[-2], shape[-1]

    def joins_rows(self, shape: tuple[int, ...]) -> bool:
        """Whether it needs a tensor that is cut along dimension 0 put together."""
        return len(shape) == 2

    def flops(self, shape: tuple[int, ...]) -> float:
        """How much work a tensor of this shape is, for dividing it among ranks."""
        return float(math.prod(shape))

    def allocates(self, shape: tuple[int, ...]) -> int:
        """Bytes that `run` allocates for a tensor of this shape on a GPU, if it may; `fusedstep memory` adds
        them to the workspace.
        """
        return 0

    def states(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Shapes, by name, of what it keeps for a tensor of this shape, or for a part of one. The dtype is
        float32, or float64 if the parameter's is.
        """
        return {}

    def finish(
        self,
        target: Tensor,
        states: list[dict[str, Any]],
        skip: Tensor,
        add_up: Callable[[Tensor], None] | None,
    ) -> None:
        """Finish a stack of parts, each with its states, which must not change where `skip` is True. If the
        rows of a tensor are divided among ranks, `add_up` adds up a tensor over these ranks, in place.
        """
