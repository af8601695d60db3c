"""LARS."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ..rules import Optimizer, Rule, fma, minimum, report, rule, sqrt, total, where
from .checks import check_not_negative
from .sgd import check_sgd, momentum_sgd, plain_sgd


@rule()
def lars(p, g, *, lr, weight_decay, trust_coeff, eps, trust_clip):
    return (fma(-lr, adapted(p, g, lr, weight_decay, trust_coeff, eps, trust_clip), p),)


@rule(states=dict(momentum_sgd.states), saves_step=False)
def lars_momentum(
    p, g, b, *, step, lr, weight_decay, momentum, dampening, nesterov, trust_coeff, eps, trust_clip
):
    g, still = adapted(p, g, lr, weight_decay, trust_coeff, eps, trust_clip), 0.0
    options = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    return momentum_sgd(p, g, b, step=step, lr=lr, weight_decay=still, **options)


def adapted(p, g, lr, weight_decay, trust_coeff, eps, trust_clip):
    """A gradient scaled to the norm of its parameter."""
    weight, size = sqrt(total(p * p)), sqrt(total(g * g))
    ratio = where(weight * size > 0, trust_coeff * weight / (size + weight * weight_decay + eps), 1.0)
    ratio = report("trust_ratio", where(trust_clip != 0, minimum(ratio / lr, 1.0), ratio))
    return ratio * fma(weight_decay, p, g)


class LARS(Optimizer):
    r"""SGD that scales each gradient to the norm of its parameter; as timm's Lars.

    .. math::
        g &\leftarrow \tau\, \frac{\lVert p \rVert}{\lVert g \rVert + \lambda \lVert p \rVert + \epsilon}\,
            (g + \lambda p) \\
        b &\leftarrow \mu b + (1 - \delta) g \qquad (b = g \text{ at first}) \\
        p &\leftarrow p - \gamma\, (g + \mu b \text{ if nesterov else } b)

    Where either norm is 0, the ratio is 1. `p.grad` stays as it is; timm's class scales it.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        momentum: :math:`\mu`; with 0 there is no buffer
        dampening: :math:`\delta`
        weight_decay: :math:`\lambda`
        nesterov: look ahead; needs momentum and no dampening
        trust_coeff: :math:`\tau`
        eps: :math:`\epsilon`
        trust_clip: limit the ratio to `lr`, as LARC does
        always_adapt: scale gradients also where `weight_decay` is 0; if False, SGD steps these groups
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = fusedstep.LARS([p], lr=1.0, always_adapt=True, trust_coeff=0.1)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([2.7000, 3.6000])

    You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017.
    """

    lr: float | Tensor = 1.0
    momentum: float = 0
    dampening: float = 0
    weight_decay: float = 0
    nesterov: bool = False
    trust_coeff: float = 0.001
    eps: float = 1e-8
    trust_clip: bool = False
    always_adapt: bool = False

    rules: ClassVar = (lars_momentum, lars, momentum_sgd, plain_sgd)

    def check(self, options: dict[str, Any]) -> None:
        check_sgd(options)
        check_not_negative(options, "trust_coeff", "eps")

    def rule_of(self, group: dict[str, Any]) -> Rule:
        if group["weight_decay"] != 0 or group["always_adapt"]:
            return lars_momentum if group["momentum"] != 0 else lars
        return momentum_sgd if group["momentum"] != 0 else plain_sgd
