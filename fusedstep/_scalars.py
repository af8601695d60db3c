"""From (step, hyper-parameters of the group) to the scalars of a rule, in float64.

Written like the rules, over single values and the same vocabulary plus `power` and `cos`, and run before
every pass, for every tensor, on the device its parameter lives on: bias corrections, schedules and norms
cost no host read. `step` counts this update, from 1. What earlier passes summed comes last. A rule takes
as many of the scalars as it has arguments for.
"""

from __future__ import annotations

from math import cos, sqrt

from ._rules import where


def power(base, exponent):
    return base**exponent


def sgd(step, lr, weight_decay, momentum, dampening, nesterov):
    # the first gradient fills the empty buffer undamped
    take = where(step == 1, 1.0, 1 - dampening)
    return lr, weight_decay, momentum, take, nesterov


def adam(step, lr, beta1, beta2, eps, weight_decay, decoupled):
    bias1 = 1 - power(beta1, step)
    bias2 = 1 - power(beta2, step)
    return (
        1 - decoupled * lr * weight_decay,
        (1 - decoupled) * weight_decay,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        lr / bias1,
        1 / sqrt(bias2),
        eps,
    )


def bert_adam(step, lr, warmup, t_total, schedule, beta1, beta2, eps, weight_decay):
    factor = where(t_total == -1, 1.0, scheduled((step - 1) / t_total, warmup, schedule))
    return lr * factor, weight_decay, 1.0, 1.0, eps, beta1, 1 - beta1, beta2, 1 - beta2


# as options name them; `scheduled` knows them by their position here
SCHEDULES = ("warmup_constant", "warmup_linear", "warmup_poly", "warmup_cosine")


def scheduled(x, warmup, schedule):
    """The factor of the learning rate at the fraction `x` of all steps."""
    linear = larger((x - 1) / (warmup - 1), 0.0)
    poly = sqrt(larger(1 - x, 0.0))
    cosine = 0.5 * (1 + cos(3.141592653589793 * x))
    after = where(schedule == 1, linear, where(schedule == 2, poly, where(schedule == 3, cosine, 1.0)))
    return where(x < warmup, x / warmup, after)


def lamb(
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
    weights,
    updates,
):
    bias1 = 1 - bias_correction * power(beta1, step)
    bias2 = 1 - bias_correction * power(beta2, step)
    ratio = trust(sqrt(weights), sqrt(updates), lowest, highest, max_weight_norm)
    ratio = where(always_adapt + weight_decay != 0, ratio, 1.0)
    return (
        lr * ratio,
        weight_decay,
        1 / bias1,
        1 / sqrt(bias2),
        eps,
        beta1,
        1 - grad_averaging * beta1,
        beta2,
        1 - beta2,
        ratio,
    )


def trust(weight, update, lowest, highest, max_weight_norm):
    """How much larger a tensor is than its update."""
    ratio = smaller(weight, max_weight_norm) / update
    return where(weight * update > 0, smaller(larger(ratio, lowest), highest), 1.0)


def clip(squares, scale, limit, eps):
    """The factor for gradients that were scaled and have this sum of squares."""
    return shrunk(sqrt(squares) / scale, limit, eps)


def clip_largest(largest, scale, limit, eps):
    """The same from their largest magnitude."""
    return shrunk(largest / scale, limit, eps)


def shrunk(norm, limit, eps):
    """What brings a norm down to `limit`; 0: no limit."""
    factor = limit / (norm + eps)
    # a norm that is no number poisons all gradients, as torch's clipping does
    return where(limit > 0, where(factor >= 1, 1.0, factor), 1.0)


def average(decay):
    """How much a moving average of parameters keeps, and how much it takes."""
    return decay, 1 - decay


def unused(step):
    """For a rule that needs no scalars; there is always one."""
    return (step,)


def larger(a, b):
    return where(a > b, a, b)


def smaller(a, b):
    return where(a < b, a, b)
