"""From (step, hyper-parameters of the group) to the scalars of a rule, in float64.

Written like the rules, over single values and the same vocabulary plus `power`, and run once a step
for every tensor, on the device its parameter lives on: bias corrections and schedules cost no host
read. `step` counts this update, from 1. A rule takes as many of the scalars as it has arguments for.
"""

from __future__ import annotations

from math import sqrt

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
