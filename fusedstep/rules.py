"""Everything for an optimizer of your own: the update of one element, and a class with its options.

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

A rule is called once, with values that record what is done to them; every engine then compiles the record. So a
rule may use operators, comparisons and the words below, but nothing that needs a number at once, such as `if`.
Called with plain numbers, the same function just computes: `lion(1.0, 2.0, 0.0, lr=0.5, ...)`.

    p, g, states       by position, one number of each element; the new `p` and states are returned. States
                       start as zeros; `where(step == 1, start, m)` starts them as something else
    options            by keyword: numbers of the group. What depends on these alone is computed once per tensor
    step, numel        by keyword: the number of this update of the tensor, from 1; its number of elements
    rows, columns      by keyword: the size of the matrices that the tensor consists of
    total(x)           the sum of x over the tensor; largest(x), its largest |x|
    total_over_all(x)  the sum of x over all tensors of the optimizer
    staged(x, stage)   what a `Stage` makes of all `x` of the tensor together, such as products of matrices
    scalars            kept once for each tensor, as a 0-dim entry of its state; returned after the states
    group_scalars      kept once for each group, as a 0-dim tensor in `param_groups`; returned last
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import overload

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


@overload
def rule(update: Callable, /) -> Rule: ...


@overload
def rule(
    *,
    states: Mapping[str, str] = ...,
    scalars: Mapping[str, str] = ...,
    group_scalars: Mapping[str, str] = ...,
    nonnegative: tuple[str, ...] = ...,
    saves_step: bool | None = ...,
) -> Callable[[Callable], Rule]: ...


def rule(
    update: Callable | None = None,
    /,
    *,
    states: Mapping[str, str] = _NONE,
    scalars: Mapping[str, str] = _NONE,
    group_scalars: Mapping[str, str] = _NONE,
    nonnegative: tuple[str, ...] = (),
    saves_step: bool | None = None,
) -> Rule | Callable[[Callable], Rule]:
    """Mark a function as the update of one element: `@rule(...)`, or `@rule` if nothing is kept.

    Args:
        states: what is kept for each element: names in `optimizer.state[p]` by names of arguments
        scalars: what is kept once for each tensor, likewise
        group_scalars: what is kept once for each group: names in `param_groups`
        nonnegative: arguments for states that are never below 0, which 8 bits then hold more precisely
        saves_step: whether the step count is part of the state; None: if the function takes `step`. A rule that
            does not save it may only ask whether this is the first step

    >>> from fusedstep.rules import rule, where
    >>> @rule(states={"b": "momentum_buffer"})
    ... def heavy_ball(p, g, b, *, step, lr, momentum):
    ...     b = where(step == 1, g, momentum * b + g)
    ...     return p - lr * b, b
    >>> heavy_ball(1.0, 0.5, 0.0, step=1, lr=0.1, momentum=0.9)
    (0.95, 0.5)
    """

    def mark(update: Callable) -> Rule:
        if not inspect.isfunction(inspect.unwrap(update)):
            raise TypeError(
                f"@rule marks a function, and was given {update!r}; write it above one, and what is kept as "
                '@rule(states={"m": "exp_avg"})'
            )
        saves = "step" in keywords(update) if saves_step is None else saves_step
        return make_rule(update, states, saves, nonnegative, scalars, group_scalars)

    return mark if update is None else mark(update)
