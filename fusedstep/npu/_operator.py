"""MindSpeed's operator: one AdamW update of single tensors, in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import functional

# what upstream's code calls the arguments that its document names otherwise
_OTHER_NAMES = {
    "param": "var",
    "exp_avg": "m",
    "exp_avg_sq": "v",
    "max_exp_avg_sq": "max_grad_norm",
    "state_step": "step",
}


_NAMES = ("var", "grad", "m", "v", "max_grad_norm")


def _by_either_name(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for other, name in _OTHER_NAMES.items():
            if other in kwargs and name in kwargs:
                raise TypeError(
                    f"{function.__name__}() got {name!r} and {other!r}, two names of one argument; pass one"
                )
            if other in kwargs:
                kwargs[name] = kwargs.pop(other)
        return function(*args, **kwargs)

    return call


@_by_either_name
def npu_apply_fused_adamw_v2(
    var: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    max_grad_norm: Tensor | None,
    step: Tensor | int,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    amsgrad: bool = False,
    maximize: bool = False,
) -> None:
    r"""One step of AdamW on one tensor, in place; everything is computed in float32.

    .. math::
        p &\leftarrow (1 - \gamma \lambda) p \\
        m &\leftarrow m + (1 - \beta_1) (g - m) \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \frac{\gamma}{1 - \beta_1^t}\, \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon}

    The names of upstream's code work as keywords too: `param`, `grad`, `exp_avg`, `exp_avg_sq`,
    `max_exp_avg_sq` and `state_step`.

    Args:
        var: the parameter, float32, float16 or bfloat16
        grad: its gradient, any of the three
        m, v: its moments, in the dtype of `var` or float32
        max_grad_norm: the largest `v` so far, any of the three: no norm, despite its name. Only read, and
            then written, with `amsgrad`; None otherwise
        step: which update this is, from 1; a number or a one-element tensor, which is only read
        lr, beta1, beta2, weight_decay, eps: :math:`\gamma, \beta_1, \beta_2, \lambda, \epsilon`
        amsgrad: divide by the largest `v` so far
        maximize: ascend instead of descend

    >>> import torch
    >>> from fusedstep.npu import npu_apply_fused_adamw_v2
    >>> var, grad, m, v = (torch.full((2,), x) for x in (0.5, 0.5, 0.9, 0.9))
    >>> npu_apply_fused_adamw_v2(var, grad, m, v, None, 10, beta1=0.9999, beta2=0.9999)
    >>> var
    tensor([0.4700, 0.4700])
    """
    if amsgrad and max_grad_norm is None:
        raise ValueError(
            "amsgrad=True needs max_grad_norm, the largest v so far, but it is None; "
            "start with torch.zeros_like(v), or use amsgrad=False"
        )
    largest = [max_grad_norm] if amsgrad and max_grad_norm is not None else []
    named = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    functional._update([[var], [grad], [m], [v], largest], _NAMES, step, named, amsgrad, maximize)
