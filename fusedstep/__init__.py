"""Fused optimizers for PyTorch, on CPU and GPU: a step updates all parameters of a model together.

>>> import torch, fusedstep
>>> model = torch.nn.Linear(4, 2)
>>> optimizer = fusedstep.AdamW(model.parameters(), lr=1e-3)
>>> model(torch.randn(8, 4)).square().mean().backward()
>>> optimizer.step()
"""

from . import functional, optimizers
from ._torch.release import release_gradients
from .amp import GradScaler
from .checking import check_rule
from .muon_groups import muon_groups
from .optimizers import *  # noqa: F403  (its __all__ is ours)
from .registry import by_name
from .rules import Optimizer

__all__ = ["GradScaler", "Optimizer", "by_name", "check_rule", "functional", "muon_groups", "release_gradients"]
__all__ += optimizers.__all__
__version__ = "0.3.0.dev0"
