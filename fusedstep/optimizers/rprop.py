"""Rprop."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import Optimizer, clamp, fma, keyword, pair, rule, sign, where
from .checks import check_lr


@rule(states={"before": "prev", "s": "step_size"}, nonnegative=("s",))
def rprop(p, g, before, s, *, step, lr, shrink, grow, lowest, highest):
    turn = g * before
    s = where(step == 1, lr, s) * where(turn > 0, grow, where(turn < 0, shrink, 1.0))
    s, g = clamp(s, lowest, highest), where(turn < 0, 0.0, g)
    return fma(-sign(g), s, p), g, s


class Rprop(Optimizer):
    r"""Resilient backpropagation; a drop-in for `torch.optim.Rprop`.

    Every element has its own step size: it grows while the gradient keeps its sign, and shrinks when the sign
    changes; the element then skips a step.

    Args:
        params: parameters, named parameters or groups of them
        lr: the first step size
        etas: factors that shrink and grow a step size
        step_sizes: the smallest and the largest step size
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> optimizer = fusedstep.Rprop([p], lr=0.1)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([ 0.9000, -1.9000])

    Riedmiller and Braun, A Direct Adaptive Method for Faster Backpropagation Learning, ICNN 1993.
    """

    lr: float | Tensor = 1e-2
    etas: tuple[float, float] = pair("shrink", "grow", default=(0.5, 1.2))
    step_sizes: tuple[float, float] = pair("lowest", "highest", default=(1e-6, 50))
    capturable: bool = keyword(default=False, kw_only=True)
    foreach: bool | None = keyword(default=None, kw_only=True)
    differentiable: bool = keyword(default=False, kw_only=True)

    rule = rprop

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        check_lr(arguments["lr"])
        etas = arguments["etas"]
        if not 0.0 < etas[0] < 1.0 < etas[1]:
            raise ValueError(f"Invalid eta values: {etas[0]}, {etas[1]}")
