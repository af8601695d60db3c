"""Adam and AdamW."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ..rules import Optimizer, Rule, extra, fixed, keyword, maximum, pair, rule, where
from .checks import as_scalar, check_adam, check_tensors_allowed
from .parts import MOMENTS, adamw_step, cautious, decayed, descended, moments

_MAXIMA = {**MOMENTS, "w": "max_exp_avg_sq"}


@rule(states=MOMENTS, nonnegative=("v",))
def adam(p, g, m, v, *, step, lr, beta1, beta2, eps, weight_decay):
    m, v = moments(decayed(p, g, weight_decay), m, v, beta1, beta2)
    return descended(p, m, v, step, lr, beta1, beta2, eps), m, v


@rule(states=MOMENTS, nonnegative=("v",))
def adamw(p, g, m, v, *, step, lr, beta1, beta2, eps, weight_decay, corrected_decay, peak_lr):
    decay = corrected(lr, corrected_decay, peak_lr) * weight_decay
    return adamw_step(p, g, m, v, decay, step, lr, beta1, beta2, eps)


@rule(states=_MAXIMA, nonnegative=("v", "w"))
def adam_amsgrad(p, g, m, v, w, *, step, lr, beta1, beta2, eps, weight_decay):
    m, v = moments(decayed(p, g, weight_decay), m, v, beta1, beta2)
    w = maximum(w, v)
    return descended(p, m, w, step, lr, beta1, beta2, eps), m, v, w


@rule(states=_MAXIMA, nonnegative=("v", "w"))
def adamw_amsgrad(p, g, m, v, w, *, step, lr, beta1, beta2, eps, weight_decay, corrected_decay, peak_lr):
    m, v = moments(g, m, v, beta1, beta2)
    w = maximum(w, v)
    p = (1 - corrected(lr, corrected_decay, peak_lr) * weight_decay) * p
    return descended(p, m, w, step, lr, beta1, beta2, eps), m, v, w


@rule(states=MOMENTS, nonnegative=("v",))
def adam_cautious(p, g, m, v, *, step, numel, lr, beta1, beta2, eps, weight_decay):
    g = decayed(p, g, weight_decay)
    m, v = moments(g, m, v, beta1, beta2)
    return descended(p, cautious(m, g, numel), v, step, lr, beta1, beta2, eps), m, v


@rule(states=MOMENTS, nonnegative=("v",))
def adamw_cautious(p, g, m, v, *, step, numel, lr, beta1, beta2, eps, weight_decay, corrected_decay, peak_lr):
    m, v = moments(g, m, v, beta1, beta2)
    p = (1 - corrected(lr, corrected_decay, peak_lr) * weight_decay) * p
    return descended(p, cautious(m, g, numel), v, step, lr, beta1, beta2, eps), m, v


def corrected(lr, corrected_decay, peak_lr):
    """The learning rate that weight decay uses."""
    return where(corrected_decay != 0, lr * lr / peak_lr, lr)


class Adam(Optimizer):
    r"""Adam; a drop-in for `torch.optim.Adam`.

    .. math::
        g &\leftarrow g + \lambda p \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \frac{\gamma}{1 - \beta_1^t}\, \frac{m}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        betas: :math:`\beta_1` and :math:`\beta_2`, both numbers or both tensors
        eps: :math:`\epsilon`
        weight_decay: :math:`\lambda`, added to the gradient
        amsgrad: divide by the largest `v` so far
        decoupled_weight_decay: decay the parameter instead, as AdamW does
        cautious: leave out elements of an update that go against the gradient (Liang et al., 2024)
        corrected_decay, peak_lr: for decoupled decay; see `AdamW`
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.Adam([p], lr=0.1)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.9000, 1.9000])

    Kingma and Ba, Adam: A Method for Stochastic Optimization, ICLR 2015.
    """

    lr: float | Tensor = 1e-3
    betas: tuple[float | Tensor, float | Tensor] = pair("beta1", "beta2", default=(0.9, 0.999))
    eps: float = 1e-8
    weight_decay: float = 0
    amsgrad: bool = False
    foreach: bool | None = keyword(default=None, kw_only=True)
    capturable: bool = keyword(default=False, kw_only=True)
    differentiable: bool = keyword(default=False, kw_only=True)
    fused: bool | None = keyword(default=None, kw_only=True)
    decoupled_weight_decay: bool = keyword(default=False, kw_only=True)
    cautious: bool = extra(default=False, kw_only=True)
    corrected_decay: bool = extra(default=False, kw_only=True)
    peak_lr: float | Tensor | None = extra(default=None, kw_only=True)

    rules: ClassVar = (adam, adamw, adam_amsgrad, adamw_amsgrad, adam_cautious, adamw_cautious)

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        check_adam(*(arguments[name] for name in ("lr", "betas", "eps", "weight_decay")))
        check_tensors_allowed(arguments)
        arguments["betas"] = tuple(map(as_scalar, arguments["betas"]))
        if arguments.get("corrected_decay") and arguments.get("peak_lr") is None:
            # a copy: schedulers fill a tensor in place
            lr = arguments["lr"]
            arguments["peak_lr"] = lr.detach().clone() if isinstance(lr, Tensor) else lr

    def check(self, options: dict[str, Any]) -> None:
        if options.get("corrected_decay") and not options["decoupled_weight_decay"]:
            raise ValueError("corrected_decay=True is for decoupled weight decay; use AdamW")
        peak = options.get("peak_lr")
        if options.get("corrected_decay") and peak is not None and not peak > 0:
            raise ValueError(
                f"Invalid peak_lr: {peak}; corrected_decay needs the largest rate of the schedule, above 0"
            )

    def number(self, option: str, value: Any) -> Any:
        if option == "peak_lr" and value is None:
            return self.defaults["lr"]
        return super().number(option, value)

    def rule_of(self, group: dict[str, Any]) -> Rule:
        if group.get("cautious") and group["amsgrad"]:
            raise ValueError("cautious=True and amsgrad=True do not go together; use one of them")
        if group["decoupled_weight_decay"]:
            return adamw_cautious if group.get("cautious") else adamw_amsgrad if group["amsgrad"] else adamw
        return adam_cautious if group.get("cautious") else adam_amsgrad if group["amsgrad"] else adam


class AdamW(Adam):
    r"""Adam with decoupled weight decay; a drop-in for `torch.optim.AdamW`.

    .. math::
        p &\leftarrow (1 - \gamma \lambda) p \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \frac{\gamma}{1 - \beta_1^t}\, \frac{m}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        betas: :math:`\beta_1` and :math:`\beta_2`, both numbers or both tensors
        eps: :math:`\epsilon`
        weight_decay: :math:`\lambda`
        amsgrad: divide by the largest `v` so far
        cautious: leave out elements of an update that go against the gradient (Liang et al., 2024)
        corrected_decay: decay by :math:`\gamma^2 / \gamma_\text{max}` instead of :math:`\gamma`, so that
            norms of weights hold when the rate falls (Defazio, Why Gradients Rapidly Increase Near the End of
            Training, 2025)
        peak_lr: :math:`\gamma_\text{max}`, the largest rate of the schedule; None: the constructor's `lr`
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.AdamW([p], lr=0.1, weight_decay=0.5)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.8500, 1.8000])

    Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019.
    """

    weight_decay: float = 1e-2
    decoupled_weight_decay: bool = fixed(default=True, init=False)
