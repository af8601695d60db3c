"""Adan."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import Optimizer, fma, mix, power, rule, sqrt, triple, where
from .checks import check_betas, check_lr, check_not_negative
from .parts import squares

_STATES = {"m": "exp_avg", "q": "exp_avg_diff", "v": "exp_avg_sq", "opposite": "neg_pre_grad"}


@rule(states=_STATES, nonnegative=("v",))
def adan(p, g, m, q, v, opposite, *, step, lr, beta1, beta2, beta3, eps, weight_decay, no_prox):
    change = where(step == 1, 0.0, g + opposite)
    m, q, v = mix(m, g, beta1), mix(q, change, beta2), squares(fma(beta2, change, g), v, beta3)
    u = fma(1 / (1 - power(beta1, step)), m, beta2 / (1 - power(beta2, step)) * q)
    u = u / fma(1 / sqrt(1 - power(beta3, step)), sqrt(v), eps)
    p = fma(-lr, u, where(no_prox != 0, 1 - lr * weight_decay, 1.0) * p)
    return where(no_prox != 0, 1.0, 1 / (1 + lr * weight_decay)) * p, m, q, v, -g


class Adan(Optimizer):
    r"""Adaptive Nesterov momentum: Adam that also follows how gradients change.

    .. math::
        d &\leftarrow g - g_\text{before} \qquad (0 \text{ at first}) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \quad q \leftarrow \beta_2 q + (1 - \beta_2) d, \quad
            v \leftarrow \beta_3 v + (1 - \beta_3) (g + \beta_2 d)^2 \\
        p &\leftarrow \frac{1}{1 + \gamma \lambda} \Big( p - \gamma\, \frac{m / (1 - \beta_1^t)
            + \beta_2\, q / (1 - \beta_2^t)}{\sqrt{v / (1 - \beta_3^t)} + \epsilon} \Big)

    Results and states are those of the paper's code, as in timm.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        betas: :math:`\beta_1`, :math:`\beta_2` and :math:`\beta_3`
        eps: :math:`\epsilon`
        weight_decay: :math:`\lambda`
        no_prox: decay before the update, as AdamW does
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.Adan([p], lr=0.1)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.9000, 1.9000])

    Xie et al., Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models, TPAMI 2024.
    """

    lr: float | Tensor = 1e-3
    betas: tuple[float, float, float] = triple("beta1", "beta2", "beta3", default=(0.98, 0.92, 0.99))
    eps: float = 1e-8
    weight_decay: float = 0.0
    no_prox: bool = False

    rule = adan

    def check(self, options: dict[str, Any]) -> None:
        check_lr(options["lr"])
        check_betas(options["betas"], 3)
        check_not_negative(options, "eps", "weight_decay")
