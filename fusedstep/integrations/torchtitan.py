"""torchtitan's container of optimizers, which here knows our names, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from ..registry import by_name

PREFIX = "fusedstep."
if not hasattr(OptimizersContainer, "_resolve_optimizer_factory"):
    raise ImportError(
        "this torchtitan looks its optimizers up in another way than 0.3.0 does; use that version, or set "
        "container.optimizers yourself"
    )


class FusedOptimizers(OptimizersContainer):
    """The container to put in a trainer's configuration; `optimizer_name` may be `fusedstep.AdamW`.

    Options of a group go into `optimizer_kwargs`, those of a whole optimizer (`statistics`, `skip_nonfinite`,
    `norm_type`) into `optimizer_factory_kwargs_by_name`. torchtitan's own trainer clips, by
    `training.max_norm`, over all meshes: no `max_grad_norm` here.

    >>> model = torch.nn.Linear(4, 2)
    >>> container = fused("AdamW", lr=1e-3).build(model_parts=[model])
    >>> type(container.optimizers[0])
    <class 'fusedstep.optimizers.adam.AdamW'>
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name.startswith(PREFIX):
            return by_name(name.removeprefix(PREFIX))
        return OptimizersContainer._resolve_optimizer_factory(name)


def fused(name: str = "AdamW", **options: Any) -> FusedOptimizers.Config:
    """The configuration of one group for all parameters, as torchtitan's `default_adamw` makes it.

    >>> fused("Lion", lr=1e-4).param_groups[0].optimizer_name
    'fusedstep.Lion'
    """
    name = f"{PREFIX}{by_name(name).__name__}"
    return FusedOptimizers.Config(
        param_groups=[ParamGroupConfig(pattern=r".*", optimizer_name=name, optimizer_kwargs=options)]
    )
