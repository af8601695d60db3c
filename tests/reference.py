"""The optimizers once more, in float64 and NumPy, written from the papers and torch's documentation.

Independent of the library on purpose: one that shared its rules could not disagree with it. Each takes one
parameter and its gradients, step by step; those that count steps can go on after `done` of them, from the
states that these left. Clipping looks at the gradients of several parameters and so comes before: `clip`, and
`train` for both.
"""

import math

import numpy as np


def begun(p, states, *names):
    """States to go on from; zeros before the first step."""
    return [np.zeros_like(p) if states is None or name not in states else states[name] for name in names]


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
    done=0,
    states=None,
):
    m, v, largest = begun(p, states, "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    for t, g in enumerate(grads, done + 1):
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


def bert_adam(
    p,
    grads,
    lr,
    warmup=-1,
    t_total=-1,
    schedule="warmup_linear",
    b1=0.9,
    b2=0.999,
    e=1e-6,
    weight_decay=0.01,
    maximize=False,
    done=0,
    states=None,
):
    m, v = begun(p, states, "exp_avg", "exp_avg_sq")
    for t, g in enumerate(grads, done):
        g = -g if maximize else g
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        rate = lr if t_total == -1 else lr * scheduled(t / t_total, warmup, schedule)
        p = p - rate * (m / (np.sqrt(v) + e) + weight_decay * p)
    return p, {"exp_avg": m, "exp_avg_sq": v}


def scheduled(x, warmup, schedule):
    if x < warmup:
        return x / warmup
    return {
        "warmup_constant": lambda: 1.0,
        "warmup_linear": lambda: max((x - 1) / (warmup - 1), 0.0),
        "warmup_poly": lambda: max(1 - x, 0.0) ** 0.5,
        "warmup_cosine": lambda: 0.5 * (1 + math.cos(math.pi * x)),
    }[schedule]()


def lamb(
    p,
    grads,
    lr,
    betas=(0.9, 0.999),
    eps=1e-6,
    weight_decay=0.01,
    bias_correction=True,
    grad_averaging=True,
    trust_bounds=(0.0, math.inf),
    max_weight_norm=math.inf,
    always_adapt=False,
    maximize=False,
    done=0,
    states=None,
):
    m, v = begun(p, states, "exp_avg", "exp_avg_sq")
    for t, g in enumerate(grads, done + 1):
        g = -g if maximize else g
        m = betas[0] * m + (1 - betas[0] if grad_averaging else 1) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        first, second = m, v
        if bias_correction:
            first, second = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        u = first / (np.sqrt(second) + eps) + weight_decay * p
        of_weights, of_update, ratio = np.sqrt((p * p).sum()), np.sqrt((u * u).sum()), 1.0
        if (weight_decay or always_adapt) and of_weights > 0 and of_update > 0:
            ratio = min(of_weights, max_weight_norm) / of_update
            ratio = min(max(ratio, trust_bounds[0]), trust_bounds[1])
        p = p - lr * ratio * u
    return p, {"exp_avg": m, "exp_avg_sq": v}


def clip(grads, limit, eps=1e-6, together=None):
    """The gradients of one step scaled down to a norm of `limit`; None, 0 or less: no limit.

    Some may be None. `together` labels those that share a norm by equal values; None: all do.
    """
    together = [0] * len(grads) if together is None else together
    squares = dict.fromkeys(together, 0.0)
    for g, label in zip(grads, together, strict=True):
        squares[label] += 0.0 if g is None else float((g * g).sum())
    clipped = []
    for g, label in zip(grads, together, strict=True):
        norm = math.sqrt(squares[label]) + eps
        factor = limit / norm if limit is not None and 0 < limit < norm else 1.0
        clipped.append(None if g is None else g * factor)
    return clipped


# limit, scope and eps, unless options say otherwise
CLIPPING = {bert_adam: (1.0, "tensor", 1e-6), lamb: (1.0, "global", 0.0)}


def clipping(rule, options):
    """How `options` clip before this rule: limit, scope and eps."""
    limit, scope, eps = CLIPPING.get(rule, (None, "global", 1e-6))
    return options.get("max_grad_norm", limit), options.get("clip_scope", scope), eps


def train(rule, params, grads, **options):
    """Value and states of all parameters, of one group and dtype, after the steps with these gradients."""
    limit, scope, eps = clipping(rule, options)
    together = range(len(params)) if scope == "tensor" else None
    steps = [clip(step, limit, eps, together) for step in grads]
    own = {name: value for name, value in options.items() if name not in ("max_grad_norm", "clip_scope")}
    return [rule(p, [step[i] for step in steps], **own) for i, p in enumerate(params)]


def orthogonalized(x, coefficients, eps=1e-7):
    """Newton and Schulz's iteration on one matrix, by the definition."""
    x = x / max(np.linalg.norm(x), eps)
    for a, b, c in coefficients:
        # of a tall matrix the same, and less work
        if len(x) <= len(x.T):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        else:
            gram = x.T @ x
            x = a * x + x @ (b * gram + c * gram @ gram)
    return x


KELLER = (3.4445, -4.7750, 2.0315)
ADJUSTED = {
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "spectral_unclamped": lambda rows, columns: (rows / columns) ** 0.5,
}


def muon(
    p,
    grads,
    lr,
    weight_decay=0.1,
    momentum=0.95,
    nesterov=True,
    ns_coefficients=(KELLER,) * 5,
    eps=1e-7,
    adjust_lr_fn="original",
    cautious_decay=False,
    normalize_rows=None,
):
    m, squares = np.zeros_like(p), np.zeros((len(p), 1))
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        o = orthogonalized(momentum * m + (1 - momentum) * g if nesterov else m, ns_coefficients, eps)
        if normalize_rows is not None:
            squares = normalize_rows * squares + (1 - normalize_rows) * (o * o).mean(1, keepdims=True)
            normalized = o / (np.sqrt(squares) + 1e-8)
            o = normalized * np.linalg.norm(o) / np.linalg.norm(normalized)
        decay = lr * weight_decay * (o * p >= 0 if cautious_decay else 1.0)
        p = (1 - decay) * p - lr * ADJUSTED[adjust_lr_fn](*p.shape) * o
    return p, {"momentum_buffer": m}
