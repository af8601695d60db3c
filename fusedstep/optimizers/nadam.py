"""NAdam."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import Optimizer, fma, keyword, pair, power, rule, sqrt, where
from .checks import check_betas, check_lr, check_not_negative
from .parts import MOMENTS, decayed_either, moments


@rule(states=MOMENTS, scalars={"product": "mu_product"}, nonnegative=("v",))
def nadam(
    p, g, m, v, product, *, step, lr, beta1, beta2, eps, weight_decay, momentum_decay, decoupled_weight_decay
):
    p, g = decayed_either(p, g, lr, weight_decay, decoupled_weight_decay)
    mu, next_mu = (beta1 * (1 - 0.5 * power(0.96, t * momentum_decay)) for t in (step, step + 1))
    product = where(step == 1, 1.0, product) * mu
    m, v = moments(g, m, v, beta1, beta2)
    of_g, of_m = (1 - mu) / (1 - product), next_mu / (1 - product * next_mu)
    u = fma(of_m, m, of_g * g) / fma(1 / sqrt(1 - power(beta2, step)), sqrt(v), eps)
    return fma(-lr, u, p), m, v, product


class NAdam(Optimizer):
    r"""Adam with Nesterov momentum; a drop-in for `torch.optim.NAdam`.

    .. math::
        \mu_t &= \beta_1 (1 - 0.96^{t \psi} / 2) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        \hat m &\leftarrow \frac{\mu_{t+1} m}{1 - \prod_{i \le t + 1} \mu_i}
            + \frac{(1 - \mu_t) g}{1 - \prod_{i \le t} \mu_i} \\
        p &\leftarrow p - \gamma\, \frac{\hat m}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        betas: :math:`\beta_1` and :math:`\beta_2`
        eps: :math:`\epsilon`
        weight_decay: added to the gradient
        momentum_decay: :math:`\psi`
        decoupled_weight_decay: decay the parameter instead, as AdamW does
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.NAdam([p], lr=0.1)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.8944, 1.8944])

    Dozat, Incorporating Nesterov Momentum into Adam, ICLR workshop 2016.
    """

    lr: float | Tensor = 2e-3
    betas: tuple[float, float] = pair("beta1", "beta2", default=(0.9, 0.999))
    eps: float = 1e-8
    weight_decay: float = 0
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False
    foreach: bool | None = keyword(default=None, kw_only=True)
    capturable: bool = keyword(default=False, kw_only=True)
    differentiable: bool = keyword(default=False, kw_only=True)

    rule = nadam

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        check_lr(arguments["lr"])
        check_not_negative(arguments, "eps")
        check_betas(arguments["betas"])
        check_not_negative(arguments, "weight_decay", "momentum_decay")
