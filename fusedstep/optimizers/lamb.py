"""LAMB."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import Optimizer, fma, keyword, pair, power, report, rule, sqrt, total, where
from .checks import check_adam, is_tuple_of
from .parts import MOMENTS, direction, larger, smaller, squares


@rule(states=MOMENTS, nonnegative=("v",))
def lamb(
    p,
    g,
    m,
    v,
    *,
    step,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    bias_correction,
    grad_averaging,
    always_adapt,
    lowest,
    highest,
    max_weight_norm,
):
    m, v = fma(1 - grad_averaging * beta1, g, beta1 * m), squares(g, v, beta2)
    bias1 = 1 - bias_correction * power(beta1, step)
    bias2 = 1 - bias_correction * power(beta2, step)
    u = direction(p, m, v, weight_decay, 1 / bias1, 1 / sqrt(bias2), eps)
    ratio = trust(sqrt(total(p * p)), sqrt(total(u * u)), lowest, highest, max_weight_norm)
    ratio = report("trust_ratio", where(always_adapt + weight_decay != 0, ratio, 1.0))
    return fma(-(lr * ratio), u, p), m, v


def trust(weight, update, lowest, highest, max_weight_norm):
    """The norm of a tensor over that of its update, within bounds."""
    ratio = smaller(weight, max_weight_norm) / update
    return where(weight * update > 0, smaller(larger(ratio, lowest), highest), 1.0)


class Lamb(Optimizer):
    r"""LAMB: Adam that scales each update to the norm of its parameter; as Apex's FusedLAMB.

    .. math::
        g &\leftarrow g \cdot \min(1, c / \lVert g \rVert) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &\leftarrow \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon} + \lambda p \\
        p &\leftarrow p - \gamma\, \frac{\lVert p \rVert}{\lVert u \rVert}\, u

    The trust ratio :math:`\lVert p \rVert / \lVert u \rVert` is 1 where either norm is 0.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        betas: :math:`\beta_1` and :math:`\beta_2`, both numbers or both tensors
        eps: :math:`\epsilon`
        weight_decay: :math:`\lambda`
        bias_correction: whether to divide by :math:`1 - \beta^t`
        grad_averaging: add :math:`1 - \beta_1` times the gradient to `m`; if False, all of it
        max_grad_norm: :math:`c`, over all gradients together; None, 0 or less: no limit
        trust_bounds: the smallest and the largest trust ratio
        max_weight_norm: upper limit of :math:`\lVert p \rVert` in the ratio
        always_adapt: scale the update of every tensor; if False, the ratio is 1 where `weight_decay` is 0
        maximize, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = fusedstep.Lamb([p], lr=0.1, weight_decay=0.1)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([2.6598, 3.6336])

    You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, ICLR 2020.
    """

    lr: float | Tensor = 1e-3
    betas: tuple[float | Tensor, float | Tensor] = pair("beta1", "beta2", default=(0.9, 0.999))
    eps: float = 1e-6
    weight_decay: float = 0.01
    bias_correction: bool = True
    grad_averaging: bool = True
    max_grad_norm: float | Tensor | None = keyword(default=1.0, kw_only=True)
    trust_bounds: tuple[float, float] = pair("lowest", "highest", default=(0.0, float("inf")), kw_only=True)
    max_weight_norm: float = keyword(default=float("inf"), kw_only=True)
    always_adapt: bool = keyword(default=False, kw_only=True)
    fused: bool | None = keyword(default=None, kw_only=True)

    rule = lamb
    clip_eps = 0.0

    def check(self, options: dict[str, Any]) -> None:
        check_adam(options["lr"], options["betas"], options["eps"], options["weight_decay"])
        check_trust(options["trust_bounds"], options["max_weight_norm"])


def check_trust(bounds: tuple[float, float], max_weight_norm: float) -> None:
    if not is_tuple_of(2, bounds) or not 0 <= bounds[0] <= bounds[1]:
        raise ValueError(
            f"Invalid trust_bounds: {bounds!r}; two numbers are needed, the smallest and the largest ratio, "
            "not below 0"
        )
    if not max_weight_norm > 0:
        raise ValueError(f"Invalid max_weight_norm: {max_weight_norm}; use a positive number")
