"""NovoGrad."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ..rules import Optimizer, Rule, fma, keyword, largest, pair, power, rule, sqrt, total, where
from .checks import check_betas, check_lr, check_not_negative


@rule(states={"m": "exp_avg"}, scalars={"n": "exp_avg_sq"})
def novograd(
    p, g, m, n, *, step, lr, beta1, beta2, eps, weight_decay, bias_correction, inside, grad_averaging, init_zero
):
    n = blended(n, total(g * g), step, beta2, init_zero)
    options = lr, beta1, beta2, eps, weight_decay, bias_correction, inside, grad_averaging
    return *stepped(p, g, m, sqrt(n), step, *options), n


@rule(states={"m": "exp_avg"}, scalars={"n": "exp_avg_sq"})
def novograd_largest(
    p, g, m, n, *, step, lr, beta1, beta2, eps, weight_decay, bias_correction, inside, grad_averaging, init_zero
):
    n = blended(n, largest(g), step, beta2, init_zero)
    options = lr, beta1, beta2, eps, weight_decay, bias_correction, inside, grad_averaging
    return *stepped(p, g, m, n, step, *options), n


def blended(n, size, step, beta2, init_zero):
    return fma(1 - beta2, size, beta2 * where(step == 1, where(init_zero != 0, 0.0, size), n))


def stepped(p, g, m, norm, step, lr, beta1, beta2, eps, weight_decay, bias_correction, inside, grad_averaging):
    bias1 = 1 - bias_correction * power(beta1, step)
    bias2 = 1 - bias_correction * power(beta2, step)
    scale = 1 / (norm / sqrt(bias2) + eps)
    m = fma(1 - grad_averaging * beta1, where(inside != 0, fma(weight_decay, p, scale * g), g), beta1 * m)
    u = where(inside != 0, m / bias1, fma(weight_decay, p, scale * (m / bias1)))
    return fma(-lr, u, p), m


class NovoGrad(Optimizer):
    r"""NovoGrad: Adam with one second moment for a whole tensor; follows the source of Apex's FusedNovoGrad.

    .. math::
        n &\leftarrow \beta_2 n + (1 - \beta_2) \lVert g \rVert^2
            \qquad (n = \lVert g \rVert^2 \text{ at first}) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        p &\leftarrow p - \gamma\, \Big( \frac{m / (1 - \beta_1^t)}{\sqrt{n / (1 - \beta_2^t)} + \epsilon}
            + \lambda p \Big)

    :math:`n` is a single number, state `exp_avg_sq` of each parameter; Apex keeps its root in the group.
    `by_largest` is Apex's `norm_type`: here, `norm_type` is the norm that gradients are clipped by.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        bias_correction: whether to divide by :math:`1 - \beta^t`
        betas: :math:`\beta_1` and :math:`\beta_2`
        eps: :math:`\epsilon`
        weight_decay: :math:`\lambda`
        reg_inside_moment: divide and decay gradients before `m` averages them, as the paper does
        grad_averaging: add :math:`1 - \beta_1` times the gradient to `m`; if False, all of it
        by_largest: use the largest element of a gradient as its norm
        init_zero: start :math:`n` at 0
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = fusedstep.NovoGrad([p], lr=0.1, bias_correction=False, grad_averaging=False)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([2.9400, 3.9200])

    Ginsburg et al., Training Deep Networks with Stochastic Normalized Gradient Descent, 2019.
    """

    lr: float | Tensor = 1e-3
    bias_correction: bool = True
    betas: tuple[float, float] = pair("beta1", "beta2", default=(0.9, 0.999))
    eps: float = 1e-8
    weight_decay: float = 0.0
    reg_inside_moment: bool = keyword(default=False, kw_only=True, scalar="inside")
    grad_averaging: bool = keyword(default=True, kw_only=True)
    by_largest: bool = keyword(default=False, kw_only=True)
    init_zero: bool = keyword(default=False, kw_only=True)

    rules: ClassVar = (novograd, novograd_largest)

    def rule_of(self, group: dict[str, Any]) -> Rule:
        return novograd_largest if group["by_largest"] else novograd

    def check(self, options: dict[str, Any]) -> None:
        check_lr(options["lr"])
        check_betas(options["betas"])
        check_not_negative(options, "weight_decay")
        if not options["eps"] > 0:
            raise ValueError(
                f"Invalid epsilon value: {options['eps']}; use one above 0: gradients of 0 are divided by it"
            )
