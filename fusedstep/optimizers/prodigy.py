"""Prodigy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import Optimizer, abs, fma, maximum, minimum, pair, power, rule, sqrt, total_over_all, where
from .checks import check_betas, check_lr, check_not_negative
from .parts import MOMENTS, decayed

_STATES = {**MOMENTS, "s": "s", "start": "p0"}
_GROUP = {"d": "d", "d_max": "d_max", "numerator": "d_numerator", "k": "k"}


@rule(states=_STATES, group_scalars=_GROUP, nonnegative=("v",), saves_step=True)
def prodigy(
    p,
    g,
    m,
    v,
    s,
    start,
    d,
    d_max,
    numerator,
    k,
    *,
    step,
    lr,
    beta1,
    beta2,
    beta3,
    eps,
    weight_decay,
    decouple,
    use_bias_correction,
    safeguard_warmup,
    d0,
    d_coef,
    growth_rate,
):
    start, d, d_max = where(step == 1, p, start), where(k == 0, d0, d), where(k == 0, d0, d_max)
    g = decayed(p, g, where(decouple != 0, 0.0, weight_decay))
    bias = sqrt(1 - power(beta2, k + 1)) / (1 - power(beta1, k + 1))
    rate = d * lr * where(use_bias_correction != 0, bias, 1.0)
    m, v = fma(d * (1 - beta1), g, beta1 * m), fma(d * d * (1 - beta2) * g, g, beta2 * v)
    keep = where(beta3 < 0, sqrt(beta2), beta3)
    s = fma(d / d0 * where(safeguard_warmup != 0, d, rate), g, keep * s)
    moved = d / d0 * rate * total_over_all(g * (start - p))
    numerator, denominator = fma(keep, numerator, moved), total_over_all(abs(s))
    # without gradients there is no estimate
    is_taken = denominator > 0
    found = d_coef * numerator / where(is_taken, denominator, 1.0)
    d_max = where(is_taken, maximum(d_max, found), d_max)
    grown = minimum(d_max, where(d == d0, maximum(d, found), d) * growth_rate)
    d = where(is_taken, grown, d)
    decay = where(decouple != 0, 1 - rate * weight_decay, 1.0)
    # as prodigyopt does, which then keeps no momentum
    u = where(beta1 == 0, d * g, m)
    new = fma(-rate, u / fma(d, eps, sqrt(v)), decay * p)
    return where(is_taken, new, p), m, v, s, start, d, d_max, numerator, k + where(is_taken, 1.0, 0.0)


class Prodigy(Optimizer):
    r"""AdamW that estimates its learning rate: the distance to go, from the way so far.

    .. math::
        r &\leftarrow \sqrt{\beta_2}\, r + \frac{\gamma d^2}{d_0} \langle g, p_0 - p \rangle, \quad
            s \leftarrow \sqrt{\beta_2}\, s + \frac{\gamma d^2}{d_0} g \\
        m &\leftarrow \beta_1 m + (1 - \beta_1)\, d g, \quad v \leftarrow \beta_2 v + (1 - \beta_2)\, d^2 g^2 \\
        d' &\leftarrow \max(d, r / \lVert s \rVert_1) \\
        p &\leftarrow (1 - \gamma d \lambda)\, p - \gamma d\, \frac{m}{\sqrt{v} + d' \epsilon}

    Scalar product and norm are over all parameters. Every group holds the estimate as a tensor, `d`. The host
    reads nothing back; prodigyopt reads two numbers of each parameter. `s` and `p0` have the shape of their
    parameter. All groups should have the same `lr`. Add parameters that are trained later as a new group: a
    group that is frozen at first starts from `d0` when it is unfrozen.

    Args:
        params: parameters, named parameters or groups of them
        lr: :math:`\gamma`, a factor: leave it at 1, and have a schedule lower it
        betas: :math:`\beta_1` and :math:`\beta_2`
        beta3: decay of the sums that estimate the distance; None: the root of :math:`\beta_2`
        eps: :math:`\epsilon`
        weight_decay: :math:`\lambda`
        decouple: decay parameters, as AdamW does; False: add to the gradient
        use_bias_correction: correct biases as Adam does
        safeguard_warmup: leave `lr` out of :math:`s`, for schedules with a warm-up
        d0: :math:`d_0`, the first estimate, a small number
        d_coef: a factor of the estimate
        growth_rate: the largest factor that the estimate may grow by in a step
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.Prodigy([p])
    >>> for _ in range(50):
    ...     optimizer.zero_grad()
    ...     p.square().sum().backward()
    ...     optimizer.step()
    >>> bool(optimizer.param_groups[0]["d"] > 1e-2), bool(p.norm() < 2)
    (True, True)

    Mishchenko and Defazio, Prodigy: An Expeditiously Adaptive Parameter-Free Learner, ICML 2024.
    """

    lr: float | Tensor = 1.0
    betas: tuple[float, float] = pair("beta1", "beta2", default=(0.9, 0.999))
    beta3: float | None = None
    eps: float = 1e-8
    weight_decay: float = 0
    decouple: bool = True
    use_bias_correction: bool = False
    safeguard_warmup: bool = False
    d0: float = 1e-6
    d_coef: float = 1.0
    growth_rate: float = float("inf")

    rule = prodigy

    def check(self, options: dict[str, Any]) -> None:
        check_lr(options["lr"])
        check_betas(options["betas"])
        check_not_negative(options, "eps", "weight_decay")
        if not options["d0"] > 0:
            raise ValueError(f"Invalid d0 value: {options['d0']}; use a small positive number")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        first, new = self.param_groups[0], self.param_groups[-1]
        for name in _GROUP.values():
            # one estimate for all: a group that is added later continues from it
            new[name] = first[name].detach().clone() if isinstance(first[name], Tensor) else first[name]

    def number(self, option: str, value: Any) -> Any:
        return -1.0 if option == "beta3" and value is None else super().number(option, value)
