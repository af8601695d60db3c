"""`torch_npu.optim`'s Adadelta, RMSprop and TensorFlow's RMSprop."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..optimizers import Adadelta, RMSprop
from ..optimizers.checks import check_lr, check_not_negative
from ..optimizers.parts import decayed
from ..optimizers.rmsprop import BUFFER, MEAN, SQUARES
from ..rules import fma, rule, sqrt, where
from ._optimizers import FusedOptimizer


class NpuFusedAdadelta(FusedOptimizer, Adadelta):
    """Adadelta; see `fusedstep.Adadelta` for the maths and `fusedstep.npu` for what differs from upstream.

    Args:
        params: parameters, named parameters or groups of them
        lr, rho, eps, weight_decay: as in `fusedstep.Adadelta`
        state_dtype, engine: see `fusedstep.optimizers`

    >>> import torch
    >>> from fusedstep.npu import NpuFusedAdadelta
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = NpuFusedAdadelta([p])
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.9968, 1.9968])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        *,
        state_dtype: torch.dtype | str | None = None,
        engine: str | None = None,
    ) -> None:
        Adadelta.__init__(self, params, lr, rho, eps, weight_decay, state_dtype=state_dtype, engine=engine)


class NpuFusedRMSprop(FusedOptimizer, RMSprop):
    """RMSprop; see `fusedstep.RMSprop` for the maths and `fusedstep.npu` for what differs from upstream.

    Args:
        params: parameters, named parameters or groups of them
        lr, alpha, eps, weight_decay, momentum, centered: as in `fusedstep.RMSprop`
        state_dtype, engine: see `fusedstep.optimizers`

    >>> import torch
    >>> from fusedstep.npu import NpuFusedRMSprop
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = NpuFusedRMSprop([p], lr=0.01)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.9000, 1.9000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        *,
        state_dtype: torch.dtype | str | None = None,
        engine: str | None = None,
    ) -> None:
        own: dict[str, Any] = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay}
        own |= {"momentum": momentum, "centered": centered}
        RMSprop.__init__(self, params, **own, state_dtype=state_dtype, engine=engine)


@rule(states=SQUARES, nonnegative=("v",))
def rmsprop_tf(p, g, v, *, step, lr, alpha, eps, weight_decay, decoupled_decay):
    p, g, v = begun(p, g, v, step, alpha, weight_decay, decoupled_decay)
    return fma(-lr, g / sqrt(v + eps), p), v


@rule(states=SQUARES | BUFFER, nonnegative=("v",))
def rmsprop_tf_momentum(
    p, g, v, b, *, step, lr, alpha, eps, weight_decay, momentum, decoupled_decay, lr_in_momentum
):
    p, g, v = begun(p, g, v, step, alpha, weight_decay, decoupled_decay)
    p, b = pushed(p, b, g / sqrt(v + eps), lr, momentum, lr_in_momentum)
    return p, v, b


@rule(states=SQUARES | MEAN, nonnegative=("v",))
def rmsprop_tf_centered(p, g, v, a, *, step, lr, alpha, eps, weight_decay, decoupled_decay):
    p, g, v = begun(p, g, v, step, alpha, weight_decay, decoupled_decay)
    a = fma(1 - alpha, g - a, a)
    return fma(-lr, g / sqrt(fma(-a, a, v) + eps), p), v, a


@rule(states=SQUARES | BUFFER | MEAN, nonnegative=("v",))
def rmsprop_tf_centered_momentum(
    p, g, v, b, a, *, step, lr, alpha, eps, weight_decay, momentum, decoupled_decay, lr_in_momentum
):
    p, g, v = begun(p, g, v, step, alpha, weight_decay, decoupled_decay)
    a = fma(1 - alpha, g - a, a)
    p, b = pushed(p, b, g / sqrt(fma(-a, a, v) + eps), lr, momentum, lr_in_momentum)
    return p, v, b, a


def begun(p, g, v, step, alpha, weight_decay, decoupled_decay):
    """Weight decay, which ignores the rate if it is decoupled, and squares, which start as 1."""
    g = decayed(p, g, where(decoupled_decay != 0, 0.0, weight_decay))
    v = where(step == 1, 1.0, v)
    return where(decoupled_decay != 0, 1 - weight_decay, 1.0) * p, g, fma(1 - alpha, g * g - v, v)


def pushed(p, b, u, lr, momentum, lr_in_momentum):
    b = fma(momentum, b, where(lr_in_momentum != 0, lr, 1.0) * u)
    return fma(-where(lr_in_momentum != 0, 1.0, lr), b, p), b


class NpuFusedRMSpropTF(FusedOptimizer):
    r"""TensorFlow's RMSprop; see `fusedstep.npu` for what differs from upstream.

    .. math::
        v &\leftarrow v + (1 - \alpha) (g^2 - v) \qquad (v = 1 \text{ at first}) \\
        b &\leftarrow \mu b + \gamma\, \frac{g}{\sqrt{v + \epsilon}} \\
        p &\leftarrow p - b

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        alpha: :math:`\alpha`
        eps: :math:`\epsilon`, inside the root
        weight_decay: added to the gradient
        momentum: :math:`\mu`; with 0 there is no buffer
        centered: subtract the square of the mean gradient from :math:`v`
        decoupled_decay: multiply parameters by 1 - `weight_decay` instead, without the rate
        lr_in_momentum: the buffer holds updates times their rates; if False, updates alone
        state_dtype, engine: see `fusedstep.optimizers`

    >>> import torch
    >>> from fusedstep.npu import NpuFusedRMSpropTF
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = NpuFusedRMSpropTF([p], lr=0.1)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.8246, 1.7470])
    """

    lr: float | Tensor = 1e-2
    alpha: float = 0.9
    eps: float = 1e-10
    weight_decay: float = 0
    momentum: float = 0.0
    centered: bool = False
    decoupled_decay: bool = False
    lr_in_momentum: bool = True

    rules: ClassVar = (rmsprop_tf, rmsprop_tf_momentum, rmsprop_tf_centered, rmsprop_tf_centered_momentum)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.9,
        eps: float = 1e-10,
        weight_decay: float = 0,
        momentum: float = 0.0,
        centered: bool = False,
        decoupled_decay: bool = False,
        lr_in_momentum: bool = True,
        *,
        state_dtype: torch.dtype | str | None = None,
        engine: str | None = None,
    ) -> None:
        own = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        own |= {"centered": centered, "decoupled_decay": decoupled_decay, "lr_in_momentum": lr_in_momentum}
        self._setup(params, **own, maximize=False, state_dtype=state_dtype, engine=engine)

    def check(self, options: dict[str, Any]) -> None:
        check_lr(options["lr"])
        check_not_negative(options, "eps", "momentum", "weight_decay", "alpha")

    rule_of = RMSprop.rule_of
