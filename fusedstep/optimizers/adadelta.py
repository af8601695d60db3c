"""Adadelta."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import Optimizer, fma, keyword, rule, sqrt
from .checks import check_lr, check_not_negative
from .parts import decayed, squares


@rule(states={"v": "square_avg", "a": "acc_delta"}, nonnegative=("v", "a"), saves_step=True)
def adadelta(p, g, v, a, *, lr, rho, eps, weight_decay):
    g = decayed(p, g, weight_decay)
    v = squares(g, v, rho)
    u = sqrt(a + eps) / sqrt(v + eps) * g
    return fma(-lr, u, p), v, squares(u, a, rho)


class Adadelta(Optimizer):
    r"""Adadelta; a drop-in for `torch.optim.Adadelta`.

    .. math::
        g &\leftarrow g + \lambda p \\
        v &\leftarrow \rho v + (1 - \rho) g^2 \\
        u &\leftarrow \frac{\sqrt{a + \epsilon}}{\sqrt{v + \epsilon}}\, g \\
        a &\leftarrow \rho a + (1 - \rho) u^2 \\
        p &\leftarrow p - \gamma\, u

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        rho: :math:`\rho`
        eps: :math:`\epsilon`, inside both roots
        weight_decay: :math:`\lambda`, added to the gradient
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.Adadelta([p])
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.9968, 1.9968])

    Zeiler, ADADELTA: An Adaptive Learning Rate Method, 2012.
    """

    lr: float | Tensor = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0
    foreach: bool | None = None
    capturable: bool = keyword(default=False, kw_only=True)
    differentiable: bool = keyword(default=False, kw_only=True)

    rule = adadelta

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        check_lr(arguments["lr"])
        if not 0.0 <= arguments["rho"] <= 1.0:
            raise ValueError(f"Invalid rho value: {arguments['rho']}")
        check_not_negative(arguments, "eps", "weight_decay")
