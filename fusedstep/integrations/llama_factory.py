"""Names for LLaMA-Factory's `optim_config`, in its version 1: registered when this is imported.

optim_config: {name: fused_adamw, lr: 1.0e-4, max_grad_norm: 1.0}
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from llamafactory.v1.plugins.trainer_plugins.optimizer import OptimizerPlugin

from ..registry import by_name
from .hugging_face import names


def make(of: str, model: torch.nn.Module, config: Any) -> torch.optim.Optimizer:
    """The optimizer of this name for the parameters that a model trains; `config` has options and the name.

    >>> make("adamw", torch.nn.Linear(2, 1), {"name": "fused_adamw", "lr": "1e-4"}).defaults["lr"]
    0.0001
    """
    options = {key: value for key, value in dict(config).items() if key != "name"}
    return by_name(of, **options)([p for p in model.parameters() if p.requires_grad])


for _name, _of in names().items():
    OptimizerPlugin(_name).register()(functools.partial(make, _of))
