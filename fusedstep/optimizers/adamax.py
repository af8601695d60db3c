"""Adamax."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import Optimizer, abs, fma, keyword, maximum, mix, pair, power, rule
from .checks import check_betas, check_lr, check_not_negative
from .parts import decayed


@rule(states={"m": "exp_avg", "u": "exp_inf"}, nonnegative=("u",))
def adamax(p, g, m, u, *, step, lr, beta1, beta2, eps, weight_decay):
    g = decayed(p, g, weight_decay)
    m, u = mix(m, g, beta1), maximum(beta2 * u, abs(g) + eps)
    return fma(-lr / (1 - power(beta1, step)), m / u, p), m, u


class Adamax(Optimizer):
    r"""Adam with the largest gradient instead of a mean of squares; a drop-in for `torch.optim.Adamax`.

    .. math::
        g &\leftarrow g + \lambda p \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        u &\leftarrow \max(\beta_2 u, |g| + \epsilon) \\
        p &\leftarrow p - \frac{\gamma}{1 - \beta_1^t}\, \frac{m}{u}

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        betas: :math:`\beta_1` and :math:`\beta_2`
        eps: :math:`\epsilon`
        weight_decay: :math:`\lambda`, added to the gradient
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.Adamax([p], lr=0.1)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.9000, 1.9000])

    Kingma and Ba, Adam: A Method for Stochastic Optimization, ICLR 2015.
    """

    lr: float | Tensor = 2e-3
    betas: tuple[float, float] = pair("beta1", "beta2", default=(0.9, 0.999))
    eps: float = 1e-8
    weight_decay: float = 0
    foreach: bool | None = None
    differentiable: bool = keyword(default=False, kw_only=True)
    capturable: bool = keyword(default=False, kw_only=True)

    rule = adamax

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        check_lr(arguments["lr"])
        check_not_negative(arguments, "eps")
        check_betas(arguments["betas"])
        check_not_negative(arguments, "weight_decay")
