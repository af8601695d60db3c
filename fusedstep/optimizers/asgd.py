"""Averaged stochastic gradient descent."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import Optimizer, fma, maximum, power, rule, where
from .checks import check_lr, check_not_negative
from .parts import decayed


@rule(states={"a": "ax"}, scalars={"eta": "eta", "mu": "mu"})
def asgd(p, g, a, eta, mu, *, step, lr, lambd, alpha, t0, weight_decay):
    eta, mu = where(step == 1, lr, eta), where(step == 1, 1.0, mu)
    p = fma(-eta, decayed(p, g, weight_decay), (1 - lambd * eta) * p)
    a = where(mu == 1, p, fma(mu, p - a, a))
    return p, a, lr / power(1 + lambd * lr * step, alpha), 1 / maximum(1.0, step - t0)


class ASGD(Optimizer):
    r"""Averaged stochastic gradient descent; a drop-in for `torch.optim.ASGD`.

    .. math::
        g &\leftarrow g + \kappa p \\
        p &\leftarrow (1 - \lambda \eta) p - \eta\, g \\
        a &\leftarrow a + \mu\, (p - a) \\
        \eta &\leftarrow \gamma / (1 + \lambda \gamma t)^\alpha, \qquad \mu \leftarrow 1 / \max(1, t - t_0)

    As in torch, a step uses :math:`\eta` and :math:`\mu` of the step before.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        lambd: :math:`\lambda`
        alpha: :math:`\alpha`
        t0: :math:`t_0`, the step after which the average, state `ax`, begins
        weight_decay: :math:`\kappa`, added to the gradient
        max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.ASGD([p], lr=0.1)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.8000, 1.6000])

    Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992.
    """

    lr: float | Tensor = 1e-2
    lambd: float = 1e-4
    alpha: float = 0.75
    t0: float = 1e6
    weight_decay: float = 0
    foreach: bool | None = None
    maximize: bool = False
    differentiable: bool = False
    capturable: bool = False

    rule = asgd

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        check_lr(arguments["lr"])
        # torch checks lambd and alpha from version 2.15 on
        check_not_negative(arguments, "lambd", "alpha", "weight_decay")
