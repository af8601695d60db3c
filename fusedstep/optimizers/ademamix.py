"""AdEMAMix."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import Optimizer, exp, fma, log, minimum, mix, power, rule, sqrt, triple, where
from .checks import check_betas, check_lr, check_not_negative
from .parts import MOMENTS, moments


@rule(states={**MOMENTS, "s": "exp_avg_slow"}, nonnegative=("v",))
def ademamix(p, g, m, v, s, *, step, lr, beta1, beta2, beta3, eps, weight_decay, alpha, t_alpha_beta3):
    # how much of the warm-up is over
    part = where(t_alpha_beta3 > 0, minimum(step / where(t_alpha_beta3 > 0, t_alpha_beta3, 1.0), 1.0), 1.0)
    # half-lives, which rise linearly; that of 0 is 0
    slow = exp(1 / ((1 - part) / log(beta1) + part / log(beta3)))
    m, v = moments(g, m, v, beta1, beta2)
    s = mix(s, g, where(part < 1, minimum(slow, beta3), beta3))
    u = fma(alpha * part, s, m / (1 - power(beta1, step)))
    u = u / fma(1 / sqrt(1 - power(beta2, step)), sqrt(v), eps)
    return fma(-lr, u, (1 - lr * weight_decay) * p), m, v, s


class AdEMAMix(Optimizer):
    r"""AdamW with a second momentum that remembers tens of thousands of steps.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \quad s \leftarrow \beta_3 s + (1 - \beta_3) g, \quad
            v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow (1 - \gamma \lambda)\, p - \gamma\, \frac{m / (1 - \beta_1^t) + \alpha s}{
            \sqrt{v / (1 - \beta_2^t)} + \epsilon}

    Results are those of the paper's code, with decoupled decay.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        betas: :math:`\beta_1`, :math:`\beta_2` and :math:`\beta_3`
        eps: :math:`\epsilon`
        weight_decay: :math:`\lambda`
        alpha: :math:`\alpha`
        t_alpha_beta3: number of steps over which :math:`\alpha` rises from 0, and :math:`\beta_3` from
            :math:`\beta_1`; None: no warm-up
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.AdEMAMix([p], lr=0.1)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.9000, 1.9000])

    Pagliardini, Ablin and Grangier, The AdEMAMix Optimizer: Better, Faster, Older, ICLR 2025.
    """

    lr: float | Tensor = 1e-3
    betas: tuple[float, float, float] = triple("beta1", "beta2", "beta3", default=(0.9, 0.999, 0.9999))
    eps: float = 1e-8
    weight_decay: float = 0.0
    alpha: float = 5.0
    t_alpha_beta3: float | None = None

    rule = ademamix

    def check(self, options: dict[str, Any]) -> None:
        check_lr(options["lr"])
        check_betas(options["betas"], 3)
        check_not_negative(options, "eps", "weight_decay", "alpha")

    def number(self, option: str, value: Any) -> Any:
        return 0.0 if option == "t_alpha_beta3" and value is None else super().number(option, value)
