"""MindSpeed's operators: one update of single tensors, in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import functional
from ..optimizers.parts import MOMENTS, decayed, direction, moments
from ..rules import fma, power, rule, sqrt, where

# names of arguments in upstream's code, and in its document
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
        grad: its gradient, any of the three dtypes
        m, v: its moments, in the dtype of `var` or float32
        max_grad_norm: the largest `v` so far, any of the three dtypes; no norm, despite its name. Read and
            written only with `amsgrad`; None otherwise
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


@rule(states={**MOMENTS, "s": "s"}, nonnegative=("v",))
def _ema_adamw(p, g, m, v, s, *, step, lr, beta1, beta2, eps, weight_decay, in_update, bias_correction, keep):
    g = decayed(p, g, where(in_update != 0, 0.0, weight_decay))
    m, v = moments(g, m, v, beta1, beta2)
    bias1, bias2 = (1 - bias_correction * power(beta, step) for beta in (beta1, beta2))
    u = direction(p, m, v, where(in_update != 0, weight_decay, 0.0), 1 / bias1, 1 / sqrt(bias2), eps)
    p = fma(-lr, u, p)
    return p, m, v, fma(1 - keep, p, keep * s)


def npu_apply_fused_ema_adamw(
    grad: Tensor,
    var: Tensor,
    m: Tensor,
    v: Tensor,
    s: Tensor,
    step: Tensor | int,
    lr: float = 1e-3,
    ema_decay: float = 0.9999,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    mode: int = 1,
    bias_correction: bool = True,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""One step of Adam on one tensor, in place, and an average of the parameter; computed in float32.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \quad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \gamma\, \Big( \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}
            + \lambda p \Big) \\
        s &\leftarrow \delta s + (1 - \delta)\, p

    Args:
        grad: the gradient, float32, float16 or bfloat16
        var: its parameter, any of the three dtypes
        m, v: its moments, in the dtype of `var` or float32
        s: the average, any of the three dtypes
        step: which update this is, from 1; a number or a one-element tensor, which is only read
        lr, ema_decay, beta1, beta2: :math:`\gamma, \delta, \beta_1, \beta_2`
        eps: :math:`\epsilon`
        mode: 1 adds the decay to the update, 0 to the gradient
        bias_correction: whether to divide by :math:`1 - \beta^t`
        weight_decay: :math:`\lambda`

    Returns `var`, `m`, `v` and `s`.

    >>> import torch
    >>> from fusedstep.npu import npu_apply_fused_ema_adamw
    >>> grad, var, m, v, s = (torch.full((2,), x) for x in (0.5, 0.5, 0.0, 0.0, 0.5))
    >>> var, m, v, s = npu_apply_fused_ema_adamw(grad, var, m, v, s, 1, lr=0.1, ema_decay=0.9)
    >>> var, s
    (tensor([0.4000, 0.4000]), tensor([0.4900, 0.4900]))
    """
    if mode not in (0, 1):
        raise ValueError(f"Invalid mode: {mode!r}; use 0 to add the decay to the gradient, 1 to the update")
    named = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    named |= {"in_update": mode, "bias_correction": float(bool(bias_correction)), "keep": ema_decay}
    functional._apply_rule(
        _ema_adamw, [[var], [grad], [m], [v], [s]], ("var", "grad", "m", "v", "s"), step, named
    )
    return var, m, v, s
