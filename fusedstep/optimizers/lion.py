"""Lion."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ..rules import Optimizer, Rule, extra, fma, mix, pair, rule, sign
from .checks import check_betas, check_lr, check_not_negative
from .parts import cautious as without_what_opposes


@rule(states={"m": "exp_avg"})
def lion(p, g, m, *, lr, beta1, beta2, weight_decay):
    u = sign(mix(m, g, beta1))
    return fma(-lr, u, (1 - lr * weight_decay) * p), mix(m, g, beta2)


@rule(states={"m": "exp_avg"})
def lion_cautious(p, g, m, *, numel, lr, beta1, beta2, weight_decay):
    u = without_what_opposes(sign(mix(m, g, beta1)), g, numel)
    return fma(-lr, u, (1 - lr * weight_decay) * p), mix(m, g, beta2)


class Lion(Optimizer):
    r"""Lion: steps of equal size, by the sign of a momentum; half of Adam's states.

    .. math::
        p &\leftarrow (1 - \gamma \lambda)\, p - \gamma\, \operatorname{sign}(\beta_1 m + (1 - \beta_1) g) \\
        m &\leftarrow \beta_2 m + (1 - \beta_2) g

    Results, state and defaults are lion-pytorch's. Use a third to a tenth of AdamW's `lr`, and three to ten
    times its `weight_decay`.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        betas: :math:`\beta_1` and :math:`\beta_2`
        weight_decay: :math:`\lambda`
        cautious: leave out elements of an update that go against the gradient (Liang et al., 2024)
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> optimizer = fusedstep.Lion([p], lr=0.5)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([ 0.5000, -1.5000])

    Chen et al., Symbolic Discovery of Optimization Algorithms, NeurIPS 2023.
    """

    lr: float | Tensor = 1e-4
    betas: tuple[float, float] = pair("beta1", "beta2", default=(0.9, 0.99))
    weight_decay: float = 0.0
    cautious: bool = extra(default=False, kw_only=True)

    rules: ClassVar = (lion, lion_cautious)

    def check(self, options: dict[str, Any]) -> None:
        check_lr(options["lr"])
        check_betas(options["betas"])
        check_not_negative(options, "weight_decay")

    def rule_of(self, group: dict[str, Any]) -> Rule:
        return lion_cautious if group.get("cautious") else lion
