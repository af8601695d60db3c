"""Everything to write an optimizer of your own: the update of one element, and a class with its options.

>>> import torch, fusedstep
>>> from fusedstep.rules import mix, pair, rule, sign
>>> @rule(states={"m": "exp_avg"})
... def lion(p, g, m, *, lr, beta1, beta2, weight_decay):
...     u = sign(mix(m, g, beta1))
...     return p - lr * (u + weight_decay * p), mix(m, g, beta2)
>>> class Lion(fusedstep.Optimizer):
...     rule = lion
...     lr: float = 1e-4
...     betas: tuple[float, float] = pair("beta1", "beta2", (0.9, 0.99))
...     weight_decay: float = 0.0
>>> p = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
>>> optimizer = Lion([p], lr=0.5, max_grad_norm=1.0)
>>> p.square().sum().backward()
>>> optimizer.step()
>>> p.data
tensor([ 0.5000, -1.5000])

A rule is called once, with values that note what is done to them; every engine then compiles these notes. So it
may use operators, comparisons and the words below, and nothing that needs a number now, such as `if`. Of plain
numbers the same function just computes: `lion(1.0, 2.0, 0.0, lr=0.5, ...)`.

    p, g, states       by position, one number of each element; the new `p` and states are returned. States
                       begin as zeros; `where(step == 1, start, m)` has them begin as something else
    options            by keyword: numbers of the group, whatever they are made of is computed once per tensor
    step, numel        by keyword: which update of the tensor this is, from 1 on; its number of elements
    rows, columns      by keyword: of the matrices that the tensor consists of
    total(x)           the sum over the tensor, for what is computed after it; largest(x), its largest |x|
    total_over_all(x)  the sum over all tensors of the optimizer
    staged(x, stage)   what a `Stage` makes of all `x` of the tensor together, such as products of matrices
    scalars            kept once for each tensor, as a 0-dim entry of its state; returned after the states
    group_scalars      kept once for each group, as a 0-dim tensor in `param_groups`; returned last
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ._algorithm.language import (
    abs,
    clamp,
    cos,
    exp,
    fma,
    largest,
    log,
    maximum,
    minimum,
    mix,
    power,
    report,
    sign,
    sqrt,
    staged,
    tanh,
    total,
    total_over_all,
    where,
)
from ._algorithm.program import Rule, make_rule
from ._algorithm.step import keywords
from ._torch.arguments import extra, fixed, for_all, group_entry, keyword, pair, triple
from ._torch.optimizer import Optimizer
from .stages import NewtonSchulz, Stage, named_coefficients

__all__ = [
    "NewtonSchulz",
    "Optimizer",
    "Rule",
    "Stage",
    "abs",
    "clamp",
    "cos",
    "exp",
    "extra",
    "fixed",
    "fma",
    "for_all",
    "group_entry",
    "keyword",
    "largest",
    "log",
    "maximum",
    "minimum",
    "mix",
    "named_coefficients",
    "pair",
    "power",
    "report",
    "rule",
    "sign",
    "sqrt",
    "staged",
    "tanh",
    "total",
    "total_over_all",
    "triple",
    "where",
]

_NONE: Mapping[str, str] = MappingProxyType({})


def rule(
    *,
    states: Mapping[str, str] = _NONE,
    scalars: Mapping[str, str] = _NONE,
    group_scalars: Mapping[str, str] = _NONE,
    nonnegative: tuple[str, ...] = (),
    saves_step: bool | None = None,
) -> Callable[[Callable], Rule]:
    """Mark a function as the update of one element.

    Args:
        states: what is kept for each element: names in `optimizer.state[p]` by names of arguments
        scalars: what is kept once for each tensor, likewise
        group_scalars: what is kept once for each group: names in `param_groups`
        nonnegative: arguments for states that are never below 0, which 8 bits then hold more precisely
        saves_step: whether the step count is part of the state; None: if the function takes `step`. A rule that
            does not save it may ask only whether this is the first step

    >>> from fusedstep.rules import rule, where
    >>> @rule(states={"b": "momentum_buffer"})
    ... def heavy_ball(p, g, b, *, step, lr, momentum):
    ...     b = where(step == 1, g, momentum * b + g)
    ...     return p - lr * b, b
    >>> heavy_ball(1.0, 0.5, 0.0, step=1, lr=0.1, momentum=0.9)
    (0.95, 0.5)
    """

    def mark(update: Callable) -> Rule:
        saves = "step" in keywords(update) if saves_step is None else saves_step
        return make_rule(update, states, saves, nonnegative, scalars, group_scalars)

    return mark
