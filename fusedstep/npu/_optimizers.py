"""The classes of `torch_npu.optim` that are ours with other names, signatures and options."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .. import functional
from .._torch.optimizer import Optimizer
from ..optimizers import SGD, Adam, AdamW, BertAdam


class FusedOptimizer(Optimizer):
    """What all classes of `torch_npu.optim` have besides an update."""

    is_fused_optimizer = True

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fill all gradients with zeros; with `set_to_none`, drop them."""
        super().zero_grad(set_to_none)

    def clip_grad_norm_fused_(self, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale all gradients down to `max_norm`, taken over all groups; returns their norm before."""
        params = [p for group in self.param_groups for p in group["params"]]
        return functional.clip_grad_norm_(params, max_norm, norm_type).to(torch.float32)


class NpuFusedAdam(FusedOptimizer, Adam):
    """Adam; see `fusedstep.Adam` for the maths and `fusedstep.npu` for what differs from upstream.

    Args:
        params: parameters, named parameters or groups of them
        lr, betas, eps, weight_decay, amsgrad: as in `fusedstep.Adam`
        state_dtype, engine: see `fusedstep.optimizers`

    >>> import torch
    >>> from fusedstep.npu import NpuFusedAdam
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = NpuFusedAdam([p], lr=0.1)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.9000, 1.9000])
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
        state_dtype: torch.dtype | str | None = None,
        engine: str | None = None,
    ) -> None:
        Adam.__init__(
            self, params, lr, betas, eps, weight_decay, amsgrad, state_dtype=state_dtype, engine=engine
        )


class NpuFusedAdamW(FusedOptimizer, AdamW):
    """Adam with decoupled weight decay; see `fusedstep.AdamW`, and `fusedstep.npu` for what differs.

    Args:
        params: parameters, named parameters or groups of them
        lr, betas, eps, weight_decay, amsgrad: as in `fusedstep.AdamW`
        state_dtype, engine: see `fusedstep.optimizers`

    >>> import torch
    >>> from fusedstep.npu import NpuFusedAdamW
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = NpuFusedAdamW([p], lr=0.1, weight_decay=0.5)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.8500, 1.8000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        state_dtype: torch.dtype | str | None = None,
        engine: str | None = None,
    ) -> None:
        AdamW.__init__(
            self, params, lr, betas, eps, weight_decay, amsgrad, state_dtype=state_dtype, engine=engine
        )


class NesterovError(ValueError, TypeError):
    """Upstream documents a TypeError but raises a ValueError: handlers of either work."""


class NpuFusedSGD(FusedOptimizer, SGD):
    """Stochastic gradient descent; see `fusedstep.SGD`, and `fusedstep.npu` for what differs.

    The first gradient of a parameter, even a late one, fills its momentum buffer undamped, as in torch.optim.
    Upstream has one "first" for all parameters.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate; required, unless every group has its own
        momentum, dampening, weight_decay, nesterov: as in `fusedstep.SGD`
        state_dtype, engine: see `fusedstep.optimizers`

    >>> import torch
    >>> from fusedstep.npu import NpuFusedSGD
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = NpuFusedSGD([p], lr=0.1, momentum=0.9)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.8000, 1.6000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        state_dtype: torch.dtype | str | None = None,
        engine: str | None = None,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise NesterovError(
                f"nesterov=True needs momentum above 0 and dampening 0, not {momentum} and {dampening}; "
                "set both so, or use nesterov=False"
            )
        # infinity stands for no rate, and is refused in every group
        rate = math.inf if lr is None else lr
        options = momentum, dampening, weight_decay, nesterov
        SGD.__init__(self, params, rate, *options, state_dtype=state_dtype, engine=engine)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            lr = param_group.get("lr", self.defaults["lr"])
            if isinstance(lr, float) and lr == math.inf:
                raise ValueError(
                    "NpuFusedSGD got no learning rate for a group; pass lr, or give every group one"
                )
        super().add_param_group(param_group)


class NpuFusedBertAdam(FusedOptimizer, BertAdam):
    """The Adam that BERT was trained with; see `fusedstep.BertAdam`, and `fusedstep.npu` for what differs.

    Gradients are clipped by the norm of all gradients of one group and dtype, as in upstream; but a group may
    have its own `max_grad_norm`, and `p.grad` does not change. "warmup_cosine" works after the warm-up,
    "warmup_poly" stays at 0 past the end, and a resumed run resumes its schedule.

    As in upstream, "warmup_linear" with `warmup=-1` starts at half the rate; `warmup=0` starts at all of it.

    Args:
        params: parameters, named parameters or groups of them
        lr, warmup, t_total, schedule, b1, b2, e, weight_decay: as in `fusedstep.BertAdam`
        max_grad_norm: the largest norm of a group's gradients; 0 or less: no limit
        state_dtype, engine: see `fusedstep.optimizers`

    >>> import torch
    >>> from fusedstep.npu import NpuFusedBertAdam
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = NpuFusedBertAdam([p], lr=0.1, warmup=0.1, t_total=10)
    >>> for _ in range(2):  # the first step of a warm-up changes nothing
    ...     optimizer.zero_grad()
    ...     p.square().sum().backward()
    ...     optimizer.step()
    >>> p.data
    tensor([0.5741, 1.5731])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        warmup: float = -1,
        t_total: float = -1,
        schedule: str = "warmup_linear",
        b1: float = 0.9,
        b2: float = 0.999,
        e: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float | Tensor | None = 1.0,
        *,
        state_dtype: torch.dtype | str | None = None,
        engine: str | None = None,
    ) -> None:
        options: Any = lr, warmup, t_total, schedule, b1, b2, e, weight_decay, max_grad_norm
        BertAdam.__init__(self, params, *options, clip_scope="group", state_dtype=state_dtype, engine=engine)
        if any(map(_starts_at_half_the_rate, self.param_groups)):
            warnings.warn(
                "warmup=-1 with schedule='warmup_linear' starts at half the learning rate and goes down from "
                "there, as in torch_npu; use warmup=0 to start at the full rate",
                stacklevel=2,
            )


def _starts_at_half_the_rate(group: dict[str, Any]) -> bool:
    return group["schedule"] == "warmup_linear" and group["warmup"] == -1 and group["t_total"] != -1
