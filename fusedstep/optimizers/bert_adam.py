"""The Adam that BERT was trained with."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ..rules import Optimizer, cos, fma, for_all, keyword, rule, sqrt, where
from .checks import check_adam
from .parts import MOMENTS, direction, larger, squares

# names of options; `scheduled` takes their positions
SCHEDULES = ("warmup_constant", "warmup_linear", "warmup_poly", "warmup_cosine")


@rule(states=MOMENTS, nonnegative=("v",))
def bert_adam(p, g, m, v, *, step, lr, warmup, t_total, schedule, b1, b2, e, weight_decay):
    factor = where(t_total == -1, 1.0, scheduled((step - 1) / t_total, warmup, schedule))
    m, v = fma(1 - b1, g, b1 * m), squares(g, v, b2)
    return fma(-(lr * factor), direction(p, m, v, weight_decay, 1.0, 1.0, e), p), m, v


def scheduled(x, warmup, schedule):
    """The factor of the learning rate at the fraction `x` of all steps."""
    linear = larger((x - 1) / (warmup - 1), 0.0)
    poly = sqrt(larger(1 - x, 0.0))
    cosine = 0.5 * (1 + cos(3.141592653589793 * x))
    after = where(schedule == 1, linear, where(schedule == 2, poly, where(schedule == 3, cosine, 1.0)))
    return where(x < warmup, x / warmup, after)


class BertAdam(Optimizer):
    r"""The Adam that BERT was trained with: clipped, without bias correction, with a schedule of its own.

    .. math::
        g &\leftarrow g \cdot \min(1, c / (\lVert g \rVert + 10^{-6})) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \gamma\, s(t / T)\, \Big( \frac{m}{\sqrt{v} + \epsilon} + \lambda p \Big)

    where `t` counts the updates before this one and, with :math:`x = t / T` and :math:`w` the warm-up,

    .. math::
        s(x) = x / w \text{ while } x < w \text{, then } \begin{cases}
            1 & \text{warmup\_constant} \\
            \max(0, (x - 1) / (w - 1)) & \text{warmup\_linear} \\
            \sqrt{\max(0, 1 - x)} & \text{warmup\_poly} \\
            (1 + \cos \pi x) / 2 & \text{warmup\_cosine}
        \end{cases}

    The schedule is evaluated on the device, from the saved count of each parameter: it resumes exactly.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        warmup: :math:`w`, as a fraction of all steps. 0: none. -1, the default, also means none to
            every schedule but "warmup_linear", which then starts at half the rate, by NVIDIA's formula
        t_total: :math:`T`, the number of all steps; -1: no schedule
        schedule: "warmup_linear", "warmup_constant", "warmup_poly" or "warmup_cosine"
        b1, b2: :math:`\beta_1` and :math:`\beta_2`
        e: :math:`\epsilon`
        weight_decay: :math:`\lambda`
        max_grad_norm: :math:`c`; 0 or less: no limit
        clip_scope: which gradients share a norm: "tensor", none, as in NVIDIA's class; "group", those of one
            group and dtype, as in Ascend's; "global", all
        maximize, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.BertAdam([p], lr=0.1, warmup=0.1, t_total=10, max_grad_norm=1.0)
    >>> for _ in range(2):  # the first step of a warm-up changes nothing
    ...     optimizer.zero_grad()
    ...     p.square().sum().backward()
    ...     optimizer.step()
    >>> p.data
    tensor([0.5741, 1.5731])

    Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers, NAACL 2019.
    """

    lr: float | Tensor = 1e-3
    warmup: float = -1
    t_total: float = -1
    schedule: str = "warmup_linear"
    b1: float = 0.9
    b2: float = 0.999
    e: float = 1e-6
    weight_decay: float = 0.01
    max_grad_norm: float | Tensor | None = 1.0
    clip_scope: str = for_all(default="tensor", kw_only=True)
    fused: bool | None = keyword(default=None, kw_only=True)

    rule = bert_adam
    words: ClassVar = {"schedule": SCHEDULES}
    # names of states in NVIDIA's class
    aliases: ClassVar = {"next_m": "exp_avg", "next_v": "exp_avg_sq"}

    def check(self, options: dict[str, Any]) -> None:
        check_adam(options["lr"], (options["b1"], options["b2"]), options["e"], options["weight_decay"])
        check_schedule(options["schedule"], options["warmup"], options["t_total"])


def check_schedule(schedule: str, warmup: float, t_total: float) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"Invalid schedule: {schedule!r}; use one of {SCHEDULES}")
    if not 0.0 <= warmup < 1.0 and warmup != -1:
        raise ValueError(f"Invalid warmup: {warmup}; use a fraction in [0, 1), or -1")
    if not t_total > 0 and t_total != -1:
        raise ValueError(f"Invalid t_total: {t_total}; use the number of all steps, or -1 for no schedule")
