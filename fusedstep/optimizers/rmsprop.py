"""RMSprop."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ..rules import Optimizer, Rule, fma, mix, rule, sqrt
from .checks import check_lr, check_not_negative
from .parts import decayed, squares

SQUARES = {"v": "square_avg"}
MEAN = {"a": "grad_avg"}
BUFFER = {"b": "momentum_buffer"}


@rule(states=SQUARES, nonnegative=("v",), saves_step=True)
def rmsprop(p, g, v, *, lr, alpha, eps, weight_decay):
    g = decayed(p, g, weight_decay)
    v = squares(g, v, alpha)
    return fma(-lr, g / (sqrt(v) + eps), p), v


@rule(states=SQUARES | BUFFER, nonnegative=("v",), saves_step=True)
def rmsprop_momentum(p, g, v, b, *, lr, alpha, eps, weight_decay, momentum):
    g = decayed(p, g, weight_decay)
    v = squares(g, v, alpha)
    b = fma(momentum, b, g / (sqrt(v) + eps))
    return fma(-lr, b, p), v, b


@rule(states=SQUARES | MEAN, nonnegative=("v",), saves_step=True)
def rmsprop_centered(p, g, v, a, *, lr, alpha, eps, weight_decay):
    g = decayed(p, g, weight_decay)
    v, a = squares(g, v, alpha), mix(a, g, alpha)
    return fma(-lr, g / (sqrt(fma(-a, a, v)) + eps), p), v, a


@rule(states=SQUARES | BUFFER | MEAN, nonnegative=("v",), saves_step=True)
def rmsprop_centered_momentum(p, g, v, b, a, *, lr, alpha, eps, weight_decay, momentum):
    g = decayed(p, g, weight_decay)
    v, a = squares(g, v, alpha), mix(a, g, alpha)
    b = fma(momentum, b, g / (sqrt(fma(-a, a, v)) + eps))
    return fma(-lr, b, p), v, b, a


class RMSprop(Optimizer):
    r"""RMSprop; a drop-in for `torch.optim.RMSprop`.

    .. math::
        g &\leftarrow g + \lambda p \\
        v &\leftarrow \alpha v + (1 - \alpha) g^2 \\
        p &\leftarrow p - \gamma\, \frac{g}{\sqrt{v} + \epsilon}

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        alpha: :math:`\alpha`
        eps: :math:`\epsilon`
        weight_decay: :math:`\lambda`, added to the gradient
        momentum: momentum of the updates; with 0 there is no buffer
        centered: divide by the standard deviation, the root of :math:`v` minus the square of the mean gradient
        max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.RMSprop([p], lr=0.01)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.9000, 1.9000])

    Tieleman and Hinton, Lecture 6.5 of Neural Networks for Machine Learning, 2012.
    """

    lr: float | Tensor = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0
    momentum: float = 0
    centered: bool = False
    capturable: bool = False
    foreach: bool | None = None
    maximize: bool = False
    differentiable: bool = False

    rules: ClassVar = (rmsprop, rmsprop_momentum, rmsprop_centered, rmsprop_centered_momentum)

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        check_lr(arguments["lr"])
        check_not_negative(arguments, "eps", "momentum", "weight_decay", "alpha")

    def rule_of(self, group: dict[str, Any]) -> Rule:
        return self.rules[2 * bool(group["centered"]) + (group["momentum"] > 0)]
