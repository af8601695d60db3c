"""ADOPT."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import Optimizer, clamp, fma, keyword, maximum, mix, pair, power, rule, sqrt, where
from .checks import check_betas, check_lr, check_not_negative
from .parts import MOMENTS, decayed, squares


@rule(states=MOMENTS, nonnegative=("v",))
def adopt(p, g, m, v, *, step, lr, beta1, beta2, eps, weight_decay, decouple, clip_exp):
    g = decayed(p, g, where(decouple != 0, 0.0, weight_decay))
    limit = where(clip_exp < 0, float("inf"), power(step - 1, clip_exp))
    u = clamp(g / maximum(sqrt(v), eps), -limit, limit)
    first, v = step == 1, where(step == 1, g * g, squares(g, v, beta2))
    m = where(first, m, mix(m, u, beta1))
    p = where(first, p, fma(-lr, m, where(decouple != 0, 1 - lr * weight_decay, 1.0) * p))
    return p, m, v


class ADOPT(Optimizer):
    r"""Adam that converges with any :math:`\beta_2`: it divides a gradient by the moment of earlier ones.

    .. math::
        u &\leftarrow \operatorname{clip}\big(g / \max(\sqrt{v}, \epsilon),\ (t - 1)^{c}\big) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) u \\
        p &\leftarrow p - \gamma\, m \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2

    The first step only fills :math:`v`. Results are those of the paper's code, which reads the step count
    back to the host.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        betas: :math:`\beta_1` and :math:`\beta_2`
        eps: :math:`\epsilon`
        weight_decay: added to the gradient
        decouple: decay the parameter instead, as AdamW does
        clip_exp: :math:`c`; None: updates are not clipped
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.ADOPT([p], lr=0.1)
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     p.square().sum().backward()
    ...     optimizer.step()
    >>> p.data
    tensor([0.9900, 1.9900])

    Taniguchi et al., ADOPT: Modified Adam Can Converge with Any beta2 with the Optimal Rate, NeurIPS 2024.
    """

    lr: float | Tensor = 1e-3
    betas: tuple[float, float] = pair("beta1", "beta2", default=(0.9, 0.9999))
    eps: float = 1e-6
    weight_decay: float = 0.0
    decouple: bool = False
    clip_exp: float | None = keyword(default=0.25, kw_only=True)

    rule = adopt

    def check(self, options: dict[str, Any]) -> None:
        check_lr(options["lr"])
        check_betas(options["betas"])
        check_not_negative(options, "eps", "weight_decay")

    def number(self, option: str, value: Any) -> Any:
        return -1.0 if option == "clip_exp" and value is None else super().number(option, value)
