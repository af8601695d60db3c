"""Adagrad."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import Optimizer, fma, keyword, rule, sqrt, where
from .checks import check_lr, check_not_negative
from .parts import decayed


@rule(states={"s": "sum"}, nonnegative=("s",))
def adagrad(p, g, s, *, step, lr, lr_decay, weight_decay, initial_accumulator_value, eps):
    g = decayed(p, g, weight_decay)
    s = fma(g, g, where(step == 1, initial_accumulator_value, s))
    return fma(-lr / (1 + (step - 1) * lr_decay), g / (sqrt(s) + eps), p), s


class Adagrad(Optimizer):
    r"""Adagrad; a drop-in for `torch.optim.Adagrad`.

    .. math::
        g &\leftarrow g + \lambda p \\
        s &\leftarrow s + g^2 \\
        p &\leftarrow p - \frac{\gamma}{1 + (t - 1) \eta}\, \frac{g}{\sqrt{s} + \epsilon}

    `sum` is allocated at the first gradient, as all states here; torch's at once. Gradients must be dense.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        lr_decay: :math:`\eta`
        weight_decay: :math:`\lambda`, added to the gradient
        initial_accumulator_value: initial value of :math:`s`
        eps: :math:`\epsilon`
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.Adagrad([p], lr=0.1)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.9000, 1.9000])

    Duchi, Hazan and Singer, Adaptive Subgradient Methods, JMLR 2011.
    """

    lr: float | Tensor = 1e-2
    lr_decay: float = 0
    weight_decay: float = 0
    initial_accumulator_value: float = 0
    eps: float = 1e-10
    foreach: bool | None = None
    differentiable: bool = keyword(default=False, kw_only=True)
    fused: bool | None = keyword(default=None, kw_only=True)

    rule = adagrad

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        check_lr(arguments["lr"])
        check_not_negative(arguments, "lr_decay", "weight_decay", "initial_accumulator_value", "eps")
