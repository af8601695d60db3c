"""SGD, Adam and AdamW: torch.optim's signatures, options, states and results.

Arguments that every class takes beyond its own:

    maximize       ascend instead of descend
    state_dtype    dtype of the states, for example torch.float32 under bfloat16 parameters; None: the
                   parameter's. It holds through save and load, whatever the checkpoint was saved with
    engine         "torch", "cpu" or "triton" to insist on one; None: the best one for each parameter
    foreach, fused, capturable
                   accepted so that existing calls keep working. Every step here is fused, and can be
                   captured in a CUDA graph
    differentiable must be False: a fused update is not recorded by autograd
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, _to_scalar

from . import _rules, _scalars
from ._entry import Rule
from ._optimizer import Optimizer

_SGD = Rule(_scalars.sgd, _rules.sgd, (), saves_step=False)
_MOMENTUM = Rule(_scalars.sgd, _rules.momentum, ("momentum_buffer",), saves_step=False)
_ADAM = Rule(_scalars.adam, _rules.adam, ("exp_avg", "exp_avg_sq"))
_AMSGRAD = Rule(_scalars.adam, _rules.amsgrad, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))


class SGD(Optimizer):
    r"""Stochastic gradient descent, with momentum; a drop-in for `torch.optim.SGD`.

    .. math::
        g &\leftarrow g + \lambda p \\
        b &\leftarrow \mu b + (1 - \tau) g \qquad (b = g \text{ at first}) \\
        p &\leftarrow p - \gamma\, (g + \mu b \text{ if nesterov else } b)

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        momentum: :math:`\mu`; with 0 there is no buffer
        dampening: :math:`\tau`
        weight_decay: :math:`\lambda`, added to the gradient
        nesterov: look ahead; needs momentum and no dampening
        maximize, state_dtype, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.SGD([p], lr=0.1, momentum=0.9)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.8000, 1.6000])

    Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013.
    """

    options = ("lr", "weight_decay", "momentum", "dampening", "nesterov")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        engine: str | None = None,
    ) -> None:
        _check_lr(lr)
        if momentum < 0.0:
            raise ValueError(f"Invalid momentum value: {momentum}")
        if weight_decay < 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults, state_dtype=state_dtype, engine=engine)

    def rule(self, group: dict[str, Any]) -> Rule:
        return _MOMENTUM if group["momentum"] != 0 else _SGD


class _AdamFamily(Optimizer):
    """What Adam and AdamW share: everything but the default way to decay weights."""

    options = ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay")
    switches = ("amsgrad",)

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        state_dtype: torch.dtype | None,
        engine: str | None,
    ) -> None:
        _check_adam(**{name: defaults[name] for name in ("lr", "betas", "eps", "weight_decay")})
        _check_tensors_allowed(defaults)
        defaults["betas"] = tuple(map(_to_scalar, defaults["betas"]))
        super().__init__(params, defaults, state_dtype=state_dtype, engine=engine)

    def rule(self, group: dict[str, Any]) -> Rule:
        return _AMSGRAD if group["amsgrad"] else _ADAM


class Adam(_AdamFamily):
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
        maximize, state_dtype, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.Adam([p], lr=0.1)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.9000, 1.9000])

    Kingma and Ba, Adam: A Method for Stochastic Optimization, ICLR 2015.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | None = None,
        engine: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, state_dtype, engine)


class AdamW(_AdamFamily):
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
        maximize, state_dtype, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.AdamW([p], lr=0.1, weight_decay=0.5)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.8500, 1.8000])

    Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019.
    """

    fixed: ClassVar = {"decoupled_weight_decay": True}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        engine: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            **self.fixed,
        }
        super().__init__(params, defaults, state_dtype, engine)


# the checks say what torch.optim says, word for word: handlers and tests out there depend on it


def _check_lr(lr: float | Tensor) -> None:
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")


def _check_adam(lr: float | Tensor, betas: tuple, eps: float, weight_decay: float) -> None:
    _check_lr(lr)
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    if len(betas) != 2:
        raise ValueError(f"Invalid betas: {betas}; two are needed")
    for i, beta in enumerate(betas):
        if isinstance(beta, Tensor) and beta.numel() != 1:
            raise ValueError(f"Tensor betas[{i}] must be 1-element")
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")
    if len({isinstance(beta, Tensor) for beta in betas}) != 1:
        raise ValueError("betas must be either both floats or both Tensors")


def _check_tensors_allowed(options: dict[str, Any]) -> None:
    # torch's restriction, not ours: code that relies on the error must keep working
    if options["foreach"] and not options["capturable"]:
        for name, value in (
            ("lr", options["lr"]),
            *((f"betas[{i}]", b) for i, b in enumerate(options["betas"])),
        ):
            if isinstance(value, Tensor):
                raise ValueError(f"{name} as a Tensor is not supported for capturable=False and foreach=True")
