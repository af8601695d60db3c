"""The optimizers once more, in float64 and NumPy, written from the papers and torch's documentation.

Independent of the library on purpose: one that shared its rules could not disagree with it.
"""

import numpy as np


def sgd(p, grads, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False):
    buffer = None
    for g in grads:
        g = (-g if maximize else g) + weight_decay * p
        if momentum:
            buffer = g if buffer is None else momentum * buffer + (1 - dampening) * g
            g = g + momentum * buffer if nesterov else buffer
        p = p - lr * g
    return p, {} if buffer is None else {"momentum_buffer": buffer}


def adam(
    p,
    grads,
    lr,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    amsgrad=False,
    maximize=False,
    decoupled_weight_decay=False,
):
    m, v, largest = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, 1):
        g = -g if maximize else g
        if decoupled_weight_decay:
            p = p - lr * weight_decay * p
        else:
            g = g + weight_decay * p
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        largest = np.maximum(largest, v)
        second = (largest if amsgrad else v) / (1 - betas[1] ** t)
        p = p - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(second) + eps)
    states = {"exp_avg": m, "exp_avg_sq": v}
    return p, {**states, "max_exp_avg_sq": largest} if amsgrad else states


def adamw(p, grads, lr, weight_decay=1e-2, **options):
    return adam(p, grads, lr, weight_decay=weight_decay, decoupled_weight_decay=True, **options)
