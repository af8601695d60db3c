"""RAdam."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import Optimizer, fma, keyword, pair, power, rule, sqrt, where
from .checks import check_betas, check_lr, check_not_negative
from .parts import MOMENTS, decayed_either, moments


@rule(states=MOMENTS, nonnegative=("v",))
def radam(p, g, m, v, *, step, lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay):
    p, g = decayed_either(p, g, lr, weight_decay, decoupled_weight_decay)
    m, v = moments(g, m, v, beta1, beta2)
    bias1, bias2 = 1 - power(beta1, step), 1 - power(beta2, step)
    most = 2 / (1 - beta2) - 1
    rho = most - 2 * step * (1 - bias2) / bias2
    rectified = sqrt((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho) * bias2)
    u = where(rho > 5, where(rho > 5, rectified, 0.0) * m / (sqrt(v) + eps), m)
    return fma(-lr / bias1, u, p), m, v


class RAdam(Optimizer):
    r"""Adam that ignores its second moment until that is reliable; a drop-in for `torch.optim.RAdam`.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        \rho &= \rho_\infty - \frac{2 t \beta_2^t}{1 - \beta_2^t},
            \qquad \rho_\infty = \frac{2}{1 - \beta_2} - 1 \\
        p &\leftarrow p - \frac{\gamma\, m}{1 - \beta_1^t} \cdot \begin{cases}
            \sqrt{\frac{(\rho - 4)(\rho - 2) \rho_\infty}{(\rho_\infty - 4)(\rho_\infty - 2) \rho}}\,
            \frac{\sqrt{1 - \beta_2^t}}{\sqrt{v} + \epsilon} & \rho > 5 \\
            1 & \text{otherwise}
        \end{cases}

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        betas: :math:`\beta_1` and :math:`\beta_2`
        eps: :math:`\epsilon`
        weight_decay: added to the gradient
        decoupled_weight_decay: decay the parameter instead, as AdamW does
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.RAdam([p], lr=0.1)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.8000, 1.6000])

    Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, ICLR 2020.
    """

    lr: float | Tensor = 1e-3
    betas: tuple[float, float] = pair("beta1", "beta2", default=(0.9, 0.999))
    eps: float = 1e-8
    weight_decay: float = 0
    decoupled_weight_decay: bool = False
    foreach: bool | None = keyword(default=None, kw_only=True)
    capturable: bool = keyword(default=False, kw_only=True)
    differentiable: bool = keyword(default=False, kw_only=True)

    rule = radam

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        check_lr(arguments["lr"])
        check_not_negative(arguments, "eps")
        check_betas(arguments["betas"])
        check_not_negative(arguments, "weight_decay")
