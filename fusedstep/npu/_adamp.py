"""`torch_npu.optim`'s AdamP: Adam without what would only change the norms of weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..optimizers.checks import check_adam, check_not_negative
from ..optimizers.parts import MOMENTS, moments
from ..rules import Stage, abs, fma, largest, mix, pair, power, rule, sqrt, staged, total, where
from ._optimizers import FusedOptimizer


@dataclass(frozen=True)
class RowSums(Stage):
    """For every element the sum of its row, which is all that has its index in dimension 0.

    A vector has no rows: it stays as it is, and is told by `rows` of 0.
    """

    def run(self, source: Tensor, target: Tensor, workspace_bytes: int) -> None:
        within_a_row = tuple(range(2, source.dim()))
        # without any, the target is the source: they are the same memory
        if within_a_row:
            target.copy_(source.sum(within_a_row, keepdim=True))

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, int]:
        rows = shape[0] if len(shape) > 1 else 0
        return rows, math.prod(shape[1:] if rows else shape)

    def joins_rows(self, shape: tuple[int, ...]) -> bool:
        # ranks that have different rows need none of the others'
        return False

    def allocates(self, shape: tuple[int, ...]) -> int:
        # float64, at most
        return shape[0] * 8 if len(shape) > 1 else 0


def along(eps, gg, gp, pp, pu):
    """|cos| of the gradient and the parameter, and how many times the parameter is in the update, from sums of
    their products.
    """
    length = sqrt(pp) + eps
    return abs(gp) / (sqrt(gg) + eps) / length, pu / length / length


@rule(states=MOMENTS, nonnegative=("v",))
def adamp(
    p,
    g,
    m,
    v,
    *,
    step,
    rows,
    columns,
    numel,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    delta,
    wd_ratio,
    nesterov,
):
    m, v = moments(g, m, v, beta1, beta2)
    u = where(nesterov != 0, mix(m, g, beta1), m) / fma(1 / sqrt(1 - power(beta2, step)), sqrt(v), eps)
    # no |cos| is below 0: vectors are not projected
    delta = where(rows != 0, delta, 0.0)
    of_rows = [staged(x, RowSums()) for x in (g * g, g * p, p * p, p * u)]
    # each element of a row holds its sum
    of_all = [total(x) / columns for x in of_rows]
    (cos_of_rows, in_rows), (cos_of_all, in_all) = (along(eps, *sums) for sums in (of_rows, of_all))
    by_rows, by_all = largest(cos_of_rows) < delta / sqrt(columns), cos_of_all < delta / sqrt(numel)
    u = where(by_rows, fma(-in_rows, p, u), where(by_all, fma(-in_all, p, u), u))
    decay = lr * weight_decay * where(by_rows, wd_ratio, where(by_all, wd_ratio, 1.0))
    return fma(-lr / (1 - power(beta1, step)), u, (1 - decay) * p), m, v


class NpuFusedAdamP(FusedOptimizer):
    r"""AdamP; see `fusedstep.npu` for what differs from upstream.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &\leftarrow \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon} \\
        u &\leftarrow u - \frac{p \cdot u}{\lVert p \rVert^2}\, p, \quad r = \rho
            \qquad \text{if projected, else } r = 1 \\
        p &\leftarrow (1 - \gamma \lambda r)\, p - \frac{\gamma}{1 - \beta_1^t}\, u

    Normalisation layers make a network ignore the scale of weights before them. There, gradients are nearly
    orthogonal to weights, and what an update has along the weights only makes them grow. Parameters of two
    dimensions or more are therefore projected: by rows, each with its own :math:`p` and :math:`u`, if
    :math:`\lvert \cos(g, p) \rvert < \delta / \sqrt{\text{row length}}` for all of them; else as one vector, if
    the same is true of that; else not at all. A row is what has one index in the first dimension.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        betas: :math:`\beta_1` and :math:`\beta_2`, both numbers or both tensors
        eps: :math:`\epsilon`, also added to norms before something is divided by them
        weight_decay: :math:`\lambda`
        delta: :math:`\delta`; with 0, nothing is projected
        wd_ratio: :math:`\rho`, which part of the decay is left where the update is projected
        nesterov: look ahead: :math:`\beta_1 m + (1 - \beta_1) g` instead of :math:`m` in :math:`u`
        state_dtype, engine: see `fusedstep.optimizers`

    >>> import torch
    >>> from fusedstep.npu import NpuFusedAdamP
    >>> p = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    >>> optimizer = NpuFusedAdamP([p], lr=0.1, delta=1.0)
    >>> p.grad = torch.tensor([[4.0, -2.0]])
    >>> optimizer.step()
    >>> p.data  # Adam would go to [2.9, 4.1]
    tensor([[2.8880, 4.0840]])

    Heo et al., AdamP: Slowing Down the Slowdown for Momentum Optimizers on Scale-invariant Weights, ICLR 2021.
    """

    lr: float | Tensor = 1e-3
    betas: tuple[float | Tensor, float | Tensor] = pair("beta1", "beta2", default=(0.9, 0.999))
    eps: float = 1e-8
    weight_decay: float = 0
    delta: float = 0.1
    wd_ratio: float = 0.1
    nesterov: bool = False

    rule = adamp

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
        *,
        state_dtype: torch.dtype | str | None = None,
        engine: str | None = None,
    ) -> None:
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "delta": delta}
        own |= {"wd_ratio": wd_ratio, "nesterov": nesterov, "maximize": False}
        self._setup(params, **own, state_dtype=state_dtype, engine=engine)

    def check(self, options: dict[str, Any]) -> None:
        check_adam(options["lr"], options["betas"], options["eps"], options["weight_decay"])
        check_not_negative(options, "delta", "wd_ratio")
