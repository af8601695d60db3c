"""Every update rule, in order of increasing complexity.

A rule is the paper's box: a function of the parameter `p`, its gradient `g` and the optimizer's states, each a
single number, and by keyword of options and of `step`, which counts this update from 1. It returns the new
parameter and the new states. Single letters are values stored for every element, words are the same for a whole
tensor.

`fma` is spelled out, and `/` and `sqrt` are correctly rounded, so that every engine gives the same bits.
The gradient arrives unscaled, clipped and with its sign already turned for `maximize`.
"""

from __future__ import annotations

from .language import cos, fma, maximum, mixed, power, report, sqrt, total, where
from .program import make_rule

_MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}


def sgd(p, g, *, lr, weight_decay):
    return (fma(-lr, decayed(p, g, weight_decay), p),)


def momentum(p, g, b, *, step, lr, weight_decay, momentum, dampening, nesterov):
    # the first gradient fills the empty buffer undamped
    take = where(step == 1, 1.0, 1 - dampening)
    g = decayed(p, g, weight_decay)
    b = fma(take, g, momentum * b)
    return fma(-lr, where(nesterov != 0, fma(momentum, b, g), b), p), b


def adam(p, g, m, v, *, step, lr, beta1, beta2, eps, weight_decay):
    m, v = moments(decayed(p, g, weight_decay), m, v, beta1, beta2)
    return descended(p, m, v, step, lr, beta1, beta2, eps), m, v


def adamw(p, g, m, v, *, step, lr, beta1, beta2, eps, weight_decay):
    m, v = moments(g, m, v, beta1, beta2)
    return descended((1 - lr * weight_decay) * p, m, v, step, lr, beta1, beta2, eps), m, v


def amsgrad(p, g, m, v, w, *, step, lr, beta1, beta2, eps, weight_decay):
    m, v = moments(decayed(p, g, weight_decay), m, v, beta1, beta2)
    w = maximum(w, v)
    return descended(p, m, w, step, lr, beta1, beta2, eps), m, v, w


def amsgradw(p, g, m, v, w, *, step, lr, beta1, beta2, eps, weight_decay):
    m, v = moments(g, m, v, beta1, beta2)
    w = maximum(w, v)
    return descended((1 - lr * weight_decay) * p, m, w, step, lr, beta1, beta2, eps), m, v, w


def bert_adam(p, g, m, v, *, step, lr, warmup, t_total, schedule, b1, b2, e, weight_decay):
    factor = where(t_total == -1, 1.0, scheduled((step - 1) / t_total, warmup, schedule))
    m, v = fma(1 - b1, g, b1 * m), squares(g, v, b2)
    return fma(-(lr * factor), direction(p, m, v, weight_decay, 1.0, 1.0, e), p), m, v


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


def scaled(p, g):
    """Gradients clipped in place: `p` is the gradient itself."""
    return (g,)


# what rules have in common


def decayed(p, g, weight_decay):
    # an infinite weight without decay must not turn the gradient into NaN
    return where(weight_decay != 0, fma(weight_decay, p, g), g)


def moments(g, m, v, beta1, beta2):
    return mixed(m, g, beta1, 1 - beta1), squares(g, v, beta2)


def squares(g, v, beta2):
    return fma((1 - beta2) * g, g, beta2 * v)


def direction(p, m, v, weight_decay, inv_bias1, inv_sqrt_bias2, eps):
    u = (inv_bias1 * m) / fma(inv_sqrt_bias2, sqrt(v), eps)
    return where(weight_decay != 0, fma(weight_decay, p, u), u)


def descended(p, m, v, step, lr, beta1, beta2, eps):
    step_size = lr / (1 - power(beta1, step))
    inv_sqrt_bias2 = 1 / sqrt(1 - power(beta2, step))
    return fma(-step_size, m / fma(inv_sqrt_bias2, sqrt(v), eps), p)


def trust(weight, update, lowest, highest, max_weight_norm):
    """How much larger a tensor is than its update."""
    ratio = smaller(weight, max_weight_norm) / update
    return where(weight * update > 0, smaller(larger(ratio, lowest), highest), 1.0)


# as options name them; `scheduled` knows them by their position here
SCHEDULES = ("warmup_constant", "warmup_linear", "warmup_poly", "warmup_cosine")


def scheduled(x, warmup, schedule):
    """The factor of the learning rate at the fraction `x` of all steps."""
    linear = larger((x - 1) / (warmup - 1), 0.0)
    poly = sqrt(larger(1 - x, 0.0))
    cosine = 0.5 * (1 + cos(3.141592653589793 * x))
    after = where(schedule == 1, linear, where(schedule == 2, poly, where(schedule == 3, cosine, 1.0)))
    return where(x < warmup, x / warmup, after)


def larger(a, b):
    return where(a > b, a, b)


def smaller(a, b):
    return where(a < b, a, b)


SGD = make_rule(sgd, {}, saves_step=False)
MOMENTUM = make_rule(momentum, {"b": "momentum_buffer"}, saves_step=False)
ADAM = make_rule(adam, _MOMENTS, nonnegative=("v",))
ADAMW = make_rule(adamw, _MOMENTS, nonnegative=("v",))
AMSGRAD = make_rule(amsgrad, {**_MOMENTS, "w": "max_exp_avg_sq"}, nonnegative=("v", "w"))
AMSGRADW = make_rule(amsgradw, {**_MOMENTS, "w": "max_exp_avg_sq"}, nonnegative=("v", "w"))
BERT_ADAM = make_rule(bert_adam, _MOMENTS, nonnegative=("v",))
LAMB = make_rule(lamb, _MOMENTS, nonnegative=("v",))
SCALED = make_rule(scaled, {}, saves_step=False)
