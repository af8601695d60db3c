"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ..rules import Optimizer, Rule, fma, keyword, rule, where
from .checks import check_lr
from .parts import decayed


@rule()
def plain_sgd(p, g, *, lr, weight_decay):
    return (fma(-lr, decayed(p, g, weight_decay), p),)


@rule(states={"b": "momentum_buffer"}, saves_step=False)
def momentum_sgd(p, g, b, *, step, lr, weight_decay, momentum, dampening, nesterov):
    # the first gradient fills the empty buffer undamped
    take = where(step == 1, 1.0, 1 - dampening)
    g = decayed(p, g, weight_decay)
    b = fma(take, g, momentum * b)
    return fma(-lr, where(nesterov != 0, fma(momentum, b, g), b), p), b


class SGD(Optimizer):
    r"""Stochastic gradient descent, with momentum; a drop-in for `torch.optim.SGD`.

    .. math::
        g &\leftarrow g + \lambda p \\
        b &\leftarrow \mu b + (1 - \tau) g \qquad (b = g \text{ at first}) \\
        p &\leftarrow p - \gamma\, (g + \mu b \text{ if nesterov else } b)

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        momentum: :math:`\mu`; with 0 there is no buffer
        dampening: :math:`\tau`
        weight_decay: :math:`\lambda`, added to the gradient
        nesterov: look ahead; needs momentum and no dampening
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.SGD([p], lr=0.1, momentum=0.9)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.8000, 1.6000])

    Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013.
    """

    lr: float | Tensor = 1e-3
    momentum: float = 0
    dampening: float = 0
    weight_decay: float | Tensor = 0
    nesterov: bool = False
    foreach: bool | None = keyword(default=None, kw_only=True)
    differentiable: bool = keyword(default=False, kw_only=True)
    fused: bool | None = keyword(default=None, kw_only=True)

    rules: ClassVar = (momentum_sgd, plain_sgd)

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        check_sgd(arguments)

    def rule_of(self, group: dict[str, Any]) -> Rule:
        return momentum_sgd if group["momentum"] != 0 else plain_sgd


def check_sgd(options: dict[str, Any]) -> None:
    check_lr(options["lr"])
    momentum, weight_decay = options["momentum"], options["weight_decay"]
    if momentum < 0.0:
        raise ValueError(f"Invalid momentum value: {momentum}")
    if weight_decay < 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")
    if options["nesterov"] and (momentum <= 0 or options["dampening"] != 0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")
