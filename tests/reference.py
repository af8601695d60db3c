"""Steps in float64 of one parameter at a time, by torch.optim's classes and those of fusedstep.cli.references.

Each function takes one parameter and its gradients, step by step; it can go on after `done` of them, from the
states that these left. Clipping looks at the gradients of several parameters and so comes before: `clip`, and
`train` for both.
"""

import numpy as np
import torch

from fusedstep.cli import references


def of(cls):
    def steps(p, grads, done=0, states=None, **options):
        p = torch.nn.Parameter(torch.tensor(p, dtype=torch.float64))
        if issubclass(cls, references.Reference):
            options["max_grad_norm"] = None
        optimizer = cls([p], **options)
        if states is not None:
            numbers = {name: torch.tensor(state, dtype=torch.float64) for name, state in states.items()}
            optimizer.state[p] = {"step": torch.tensor(float(done)), **numbers}
        for g in grads:
            p.grad = torch.tensor(g, dtype=torch.float64)
            optimizer.step()
        kept = {name: state for name, state in optimizer.state[p].items() if name != "step"}
        found = {name: state.numpy() for name, state in kept.items() if state is not None}
        return p.detach().numpy(), found

    return steps


sgd, adam, adamw = of(torch.optim.SGD), of(torch.optim.Adam), of(torch.optim.AdamW)
bert_adam, lamb = of(references.BertAdam), of(references.Lamb)


def clip(grads, limit, eps=1e-6, together=None):
    """The gradients of one step scaled down to a norm of `limit`; None, 0 or less: no limit.

    Some may be None. `together` labels those that share a norm by equal values; None: all do.
    """
    together = [0] * len(grads) if together is None else together
    some = [(torch.tensor(g), label) for g, label in zip(grads, together, strict=True) if g is not None]
    found, labels = zip(*some, strict=True) if some else ((), ())
    factors = iter(references.clip_factors([*found], [*labels], [limit] * len(found), 2.0, eps))
    return [None if g is None else np.asarray(g * next(factors)) for g in grads]


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
