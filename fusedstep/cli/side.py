"""One side of a comparison: an optimizer, ours or a peer's, and the parameters that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Side:
    """An optimizer that a loop is run with: ours or a peer's."""

    cls: Any
    options: dict[str, Any]
    device: str
    size: int
    # the last parameters it has made, to compare results
    made: list[Any] = field(default_factory=list)

    def params(self, shapes: Sequence[tuple[int, ...]] = (), kind: Any = torch.nn.Parameter) -> list[Any]:
        """Parameters of 64 elements, or of these shapes, with gradients; the same numbers for every side."""
        generator = torch.Generator().manual_seed(0)
        self.made = []
        for shape in shapes or [(64,)] * self.size:
            values, grad = (torch.randn(shape, generator=generator).to(self.device) for _ in range(2))
            self.made.append(kind(values))
            self.made[-1].grad = grad
        return self.made

    def optimizer(self, params: Any, **options: Any) -> Any:
        return self.cls(params, **{"lr": 1e-3, **self.options, **options})

    @property
    def is_ours(self) -> bool:
        return self.cls.__module__.startswith("fusedstep")
