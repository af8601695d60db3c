"""Fused optimizers for PyTorch: every parameter in one pass over memory, on any device.

>>> import torch, fusedstep
>>> model = torch.nn.Linear(4, 2)
>>> optimizer = fusedstep.AdamW(model.parameters(), lr=1e-3)
>>> model(torch.randn(8, 4)).square().mean().backward()
>>> optimizer.step()
"""

from . import functional
from .amp import GradScaler
from .optimizers import SGD, Adam, AdamW, BertAdam, Lamb
from .rules import Optimizer

__all__ = ["SGD", "Adam", "AdamW", "BertAdam", "GradScaler", "Lamb", "Optimizer", "functional"]
__version__ = "0.1.0"
