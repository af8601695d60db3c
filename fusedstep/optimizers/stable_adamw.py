"""StableAdamW."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import Optimizer, fma, maximum, mix, pair, power, rule, sqrt, total
from .checks import check_adam
from .parts import MOMENTS, squares


@rule(states=MOMENTS, nonnegative=("v",))
def stable_adamw(p, g, m, v, *, step, numel, lr, beta1, beta2, eps, weight_decay):
    m, v = mix(m, g, debiased(beta1, step)), squares(g, v, debiased(beta2, step))
    rate = lr / maximum(1.0, sqrt(total(g * g / maximum(v, eps * eps)) / numel))
    return fma(-rate, m / (sqrt(v) + eps), (1 - rate * weight_decay) * p), m, v


def debiased(beta, step):
    """The decay at which an average that starts at 0 is unbiased."""
    grown = power(beta, step)
    return (beta - grown) / (1 - grown)


class StableAdamW(Optimizer):
    r"""AdamW that lowers the rate of a tensor while its second moment lags behind.

    .. math::
        m &\leftarrow \hat\beta_1 m + (1 - \hat\beta_1) g, \quad
            v \leftarrow \hat\beta_2 v + (1 - \hat\beta_2) g^2, \quad
            \hat\beta = \frac{\beta - \beta^t}{1 - \beta^t} \\
        \eta &\leftarrow \gamma \Big/ \max\Big(1, \sqrt{\operatorname{mean}(g^2 / \max(v, \epsilon^2))}\Big) \\
        p &\leftarrow (1 - \eta \lambda)\, p - \eta\, \frac{m}{\sqrt{v} + \epsilon}

    Gradients then need no clipping. Results are optimi's and pytorch_optimizer's; optimi reads a number of each
    tensor back to the host.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        betas: :math:`\beta_1` and :math:`\beta_2`
        eps: :math:`\epsilon`
        weight_decay: :math:`\lambda`
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.StableAdamW([p], lr=0.1, weight_decay=0.0)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.9000, 1.9000])

    Wortsman et al., Stable and Low-Precision Training for Large-Scale Vision-Language Models, NeurIPS 2023.
    """

    lr: float | Tensor = 1e-3
    betas: tuple[float, float] = pair("beta1", "beta2", default=(0.9, 0.99))
    eps: float = 1e-8
    weight_decay: float = 1e-2

    rule = stable_adamw

    def check(self, options: dict[str, Any]) -> None:
        check_adam(options["lr"], options["betas"], options["eps"], options["weight_decay"])
