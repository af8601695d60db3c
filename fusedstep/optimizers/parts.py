"""What rules have in common.

`fma` is spelled out, and `/` and `sqrt` are correctly rounded, so that every engine gives the same bits.
"""

from __future__ import annotations

from ..rules import fma, maximum, mix, power, sqrt, total, where

MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}


def decayed(p, g, weight_decay):
    # an infinite weight without decay must not turn the gradient into NaN
    return where(weight_decay != 0, fma(weight_decay, p, g), g)


def decayed_either(p, g, lr, weight_decay, decoupled):
    """The parameter as AdamW decays it, or the gradient as Adam does."""
    factor = where(decoupled != 0, 1 - lr * weight_decay, 1.0)
    return factor * p, decayed(p, g, where(decoupled != 0, 0.0, weight_decay))


def moments(g, m, v, beta1, beta2):
    return mix(m, g, beta1), squares(g, v, beta2)


def squares(g, v, beta2):
    return fma((1 - beta2) * g, g, beta2 * v)


def direction(p, m, v, weight_decay, inv_bias1, inv_sqrt_bias2, eps):
    u = (inv_bias1 * m) / fma(inv_sqrt_bias2, sqrt(v), eps)
    return where(weight_decay != 0, fma(weight_decay, p, u), u)


def descended(p, m, v, step, lr, beta1, beta2, eps):
    step_size = lr / (1 - power(beta1, step))
    inv_sqrt_bias2 = 1 / sqrt(1 - power(beta2, step))
    return fma(-step_size, m / fma(inv_sqrt_bias2, sqrt(v), eps), p)


def adamw_step(p, g, m, v, decay, step, lr, beta1, beta2, eps):
    """A step of AdamW that first scales the parameter by 1 - `decay`."""
    m, v = moments(g, m, v, beta1, beta2)
    return descended((1 - decay) * p, m, v, step, lr, beta1, beta2, eps), m, v


def cautious(u, g, numel):
    """The elements of an update that agree with the gradient, scaled up to make up for the others.

    Liang et al., Cautious Optimizers: Improving Training with One Line of Code, 2024.
    """
    agrees = where(u * g > 0, 1.0, 0.0)
    return agrees * u / maximum(total(agrees) / numel, 1e-3)


def larger(a, b):
    return where(a > b, a, b)


def smaller(a, b):
    return where(a < b, a, b)
