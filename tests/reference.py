"""Steps in float64 of one parameter at a time, by torch.optim's classes and those of fusedstep.cli.references.

Each function takes one parameter and its gradients, step by step; it can go on after `done` of them, from the
states that these left. Clipping looks at the gradients of several parameters and so comes before: `clip`, and
`train` for both.
"""

from typing import NamedTuple

import numpy as np
import torch

from fusedstep.cli import references


class Steps(NamedTuple):
    """The steps of a class; a value, which goes to other processes."""

    cls: type[torch.optim.Optimizer]

    def __call__(self, p, grads, done=0, states=None, **options):
        p = torch.nn.Parameter(torch.tensor(p, dtype=torch.float64))
        if issubclass(self.cls, references.Reference):
            options["max_grad_norm"] = None
        optimizer = self.cls([p], **options)
        if states is not None:
            numbers = {name: torch.tensor(state, dtype=torch.float64) for name, state in states.items()}
            optimizer.state[p] = {"step": torch.tensor(float(done)), **numbers}
        for g in grads:
            p.grad = torch.tensor(g, dtype=torch.float64)
            optimizer.step()
        kept = {name: state for name, state in optimizer.state[p].items() if name != "step"}
        found = {name: state.numpy() for name, state in kept.items() if state is not None}
        return p.detach().numpy(), found


sgd, adam, adamw = map(Steps, (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW))
bert_adam, lamb = map(Steps, (references.BertAdam, references.Lamb))


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
