"""`torch_npu.optim`'s LAMB: our rule with other scalars."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..optimizers.checks import check_adam
from ..optimizers.lamb import lamb
from ..optimizers.parts import MOMENTS
from ..rules import pair, rule, where
from ._optimizers import FusedOptimizer


@rule(states=MOMENTS, nonnegative=("v",))
def npu_lamb(p, g, m, v, *, step, lr, beta1, beta2, eps, weight_decay, adam):
    return lamb(
        p,
        g,
        m,
        v,
        step=step,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        bias_correction=0.0,
        grad_averaging=1.0,
        always_adapt=1.0,
        # with `adam`, both are 1; without it, the bounds have no effect
        lowest=adam,
        highest=where(adam != 0, adam, 1e38),
        max_weight_norm=10.0,
    )


class NpuFusedLamb(FusedOptimizer):
    r"""Ascend's LAMB; see `fusedstep.npu` for what differs from upstream.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &\leftarrow \frac{m}{\sqrt{v} + \epsilon} + \lambda p \\
        p &\leftarrow p - \gamma\, \frac{\min(\lVert p \rVert, 10)}{\lVert u \rVert}\, u

    The trust ratio is 1 where either norm is 0. Unlike `fusedstep.Lamb`, which follows the paper and Apex,
    this has no bias correction, limits the norm of a parameter to 10, and clips gradients only if asked to.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        betas: :math:`\beta_1` and :math:`\beta_2`, both numbers or both tensors
        eps: :math:`\epsilon`
        weight_decay: :math:`\lambda`
        adam: whether the trust ratio is 1 everywhere
        use_global_grad_norm: divide gradients by their norm over all groups, if that is above 1; upstream
            raises an error here
        state_dtype, engine: see `fusedstep.optimizers`

    >>> import torch
    >>> from fusedstep.npu import NpuFusedLamb
    >>> p = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = NpuFusedLamb([p], lr=0.1, weight_decay=0.1)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([2.6515, 3.6414])

    You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, ICLR 2020.
    """

    lr: float | Tensor = 1e-3
    betas: tuple[float | Tensor, float | Tensor] = pair("beta1", "beta2", default=(0.9, 0.999))
    eps: float = 1e-6
    weight_decay: float = 0
    adam: bool = False
    use_global_grad_norm: bool = False

    rule = npu_lamb
    clip_eps = 0.0

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        use_global_grad_norm: bool = False,
        *,
        state_dtype: torch.dtype | str | None = None,
        engine: str | None = None,
    ) -> None:
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adam": bool(adam)}
        own |= {"use_global_grad_norm": use_global_grad_norm, "maximize": False}
        self._setup(params, **own, state_dtype=state_dtype, engine=engine)

    def check(self, options: dict[str, Any]) -> None:
        check_adam(options["lr"], options["betas"], options["eps"], options["weight_decay"])

    def limit(self, group: dict[str, Any]) -> float | None:
        return 1.0 if group["use_global_grad_norm"] else None
