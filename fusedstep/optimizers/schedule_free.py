"""AdamW and SGD without a schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..rules import Optimizer, fma, group_entry, maximum, minimum, pair, power, rule, sqrt, where
from .checks import check_betas, check_lr, check_not_negative
from .parts import squares

_GROUP = {"k": "k", "weight_sum": "weight_sum", "highest": "lr_max"}


@rule(states={"z": "z", "v": "exp_avg_sq"}, group_scalars=_GROUP, nonnegative=("v",), saves_step=False)
def schedule_free_adamw(
    p,
    g,
    z,
    v,
    k,
    weight_sum,
    highest,
    *,
    step,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    warmup_steps,
    r,
    weight_lr_power,
):
    v = squares(g, v, beta2)
    u = g / fma(1 / sqrt(1 - power(beta2, k + 1)), sqrt(v), eps)
    rate, highest = warmed_up(k, highest, lr, warmup_steps)
    share, weight_sum = averaged(k, weight_sum, highest, r, weight_lr_power)
    p, z = moved(p, where(step == 1, p, z), fma(weight_decay, p, u), beta1, rate, share)
    return p, z, v, k + 1, weight_sum, highest


@rule(states={"z": "z"}, group_scalars=_GROUP, saves_step=False)
def schedule_free_sgd(
    p, g, z, k, weight_sum, highest, *, step, lr, momentum, weight_decay, warmup_steps, r, weight_lr_power
):
    rate, highest = warmed_up(k, highest, lr, warmup_steps)
    share, weight_sum = averaged(k, weight_sum, highest, r, weight_lr_power)
    p, z = moved(p, where(step == 1, p, z), fma(weight_decay, p, g), momentum, rate, share)
    return p, z, k + 1, weight_sum, highest


def warmed_up(k, highest, lr, warmup_steps):
    """The rate of this step, and the highest so far."""
    rate = lr * minimum((k + 1) / maximum(warmup_steps, 1.0), 1.0)
    return rate, where(k == 0, rate, maximum(rate, highest))


def averaged(k, weight_sum, highest, r, weight_lr_power):
    """The share of this step in the average, and the weight of all steps so far."""
    weight = power(k + 1, r) * power(highest, weight_lr_power)
    weight_sum = weight_sum + weight
    # while the rate is 0, no step has any weight
    return where(weight_sum > 0, weight / where(weight_sum > 0, weight_sum, 1.0), 0.0), weight_sum


def moved(y, z, u, momentum, rate, share):
    y = fma(rate * (momentum * (1 - share) - 1), u, fma(share, z - y, y))
    return y, fma(-rate, u, z)


class _ScheduleFree(Optimizer):
    """What both share: parameters are where gradients are taken or, after `eval()`, the average."""

    def train(self) -> None:
        """Show the points that gradients are taken at."""
        self._show(is_average=False)

    def eval(self) -> None:
        """Show the average that a schedule would lead to, for evaluation and checkpoints of the model."""
        self._show(is_average=True)

    @torch.no_grad()
    def _show(self, is_average: bool) -> None:
        for group in self.param_groups:
            momentum = group["betas"][0] if "betas" in group else group["momentum"]
            is_shown = group["train_mode"] != is_average
            for p in () if is_shown else group["params"]:
                z = self.state.get(p, {}).get("z")
                if z is not None:
                    # with offload, z is on the host
                    z = z.to(p.dtype).to(p.device)
                    p.lerp_(z, float(1 - 1 / momentum if is_average else 1 - momentum))
            group["train_mode"] = not is_average

    def storage_of(self, group: dict[str, Any]) -> Any:
        storage = super().storage_of(group)
        if storage.master is not None or storage.dtype_of("z") == torch.int8:
            raise ValueError(
                f"{type(self).__name__} takes no master, and no 8 bits for z: train() and eval() compute "
                'parameters from z; use master=None, and states by name, such as {"exp_avg_sq": "int8"}'
            )
        return storage

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step, as every optimizer here does, but in train mode only."""
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError(
                f"{type(self).__name__} shows the average of its parameters, where no gradient is taken; "
                "call optimizer.train() before training, and optimizer.eval() before evaluation"
            )
        return super().step(*args, **kwargs)


class ScheduleFreeAdamW(_ScheduleFree):
    r"""AdamW without a schedule or a planned end: it averages, and takes gradients near the average.

    .. math::
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2, \quad
            u \leftarrow \frac{g}{\sqrt{v / (1 - \beta_2^t)} + \epsilon} + \lambda y \\
        z &\leftarrow z - \gamma u, \quad x \leftarrow (1 - c) x + c z, \quad
            y \leftarrow \beta_1 x + (1 - \beta_1) z

    with :math:`c` the share of this step in the average :math:`x`. Parameters are :math:`y` in training, and
    :math:`x` after `eval()`: call `train()` and `eval()` with the model's, as for the authors'
    AdamWScheduleFree, which has the same results and states. A new optimizer is in train mode.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        betas: :math:`\beta_1` and :math:`\beta_2`
        eps: :math:`\epsilon`
        weight_decay: :math:`\lambda`
        warmup_steps: number of steps over which the rate rises
        r: a step's weight in the average is this power of its number,
        weight_lr_power: times this power of the largest rate so far
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.ScheduleFreeAdamW([p], lr=0.1)
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     p.square().sum().backward()
    ...     optimizer.step()
    >>> optimizer.eval()
    >>> p.data
    tensor([0.8527, 1.8513])

    Defazio et al., The Road Less Scheduled, NeurIPS 2024.
    """

    lr: float | Tensor = 0.0025
    betas: tuple[float, float] = pair("beta1", "beta2", default=(0.9, 0.999))
    eps: float = 1e-8
    weight_decay: float = 0
    warmup_steps: int = 0
    r: float = 0.0
    weight_lr_power: float = 2.0
    train_mode: bool = group_entry(default=True, init=False)

    rule = schedule_free_adamw

    def check(self, options: dict[str, Any]) -> None:
        check_lr(options["lr"])
        check_betas(options["betas"])
        check_not_negative(options, "eps", "weight_decay", "warmup_steps")
        if not options["betas"][0] > 0:
            raise ValueError(f"Invalid betas: {options['betas']}; the first must be above 0")


class ScheduleFreeSGD(_ScheduleFree):
    r"""SGD without a schedule or a planned end: `ScheduleFreeAdamW` with the gradient as update.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate, a number or a one-element tensor; larger than SGD's
        momentum: how near the average gradients are taken, between 0 and 1
        weight_decay: added to the gradient
        warmup_steps: number of steps over which the rate rises
        r: a step's weight in the average is this power of its number,
        weight_lr_power: times this power of the largest rate so far
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.ScheduleFreeSGD([p], lr=0.1)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.8000, 1.6000])

    Defazio et al., The Road Less Scheduled, NeurIPS 2024.
    """

    lr: float | Tensor = 1.0
    momentum: float = 0.9
    weight_decay: float = 0
    warmup_steps: int = 0
    r: float = 0.0
    weight_lr_power: float = 2.0
    train_mode: bool = group_entry(default=True, init=False)

    rule = schedule_free_sgd

    def check(self, options: dict[str, Any]) -> None:
        check_lr(options["lr"])
        check_not_negative(options, "weight_decay", "warmup_steps")
        if not 0 < options["momentum"] < 1:
            raise ValueError(f"Momentum must be between 0 and 1 exclusive: {options['momentum']}")
