"""SGD, Adam and AdamW with torch.optim's signatures, options, states and results; BertAdam and Lamb.

Arguments that every class takes beyond its own:

    maximize       ascend instead of descend
    max_grad_norm  scale gradients down to this norm, taken over all parameters, as they are read: `p.grad`
                   itself stays as it is. None, 0 or less: no limit. A group's own limit holds for that group
    norm_type      which norm that is: 2, or inf for the largest element
    norm_group     process group of ranks that step other parameters of the same model, as those of
                   ZeroRedundancyOptimizer or the stages of a pipeline do: norm and skips are one for all
    skip_nonfinite skip a step, on the device, if a gradient holds NaN or inf; `step_was_skipped` and
                   `skipped_steps` tell
    ema_decay      keep a moving average of the parameters, state `ema`, in float32 at least, from what they are
                   before the first step with it; `ema_parameters()` shows it
    statistics     sum up what `statistics()` then tells: norms of gradients, parameters, updates, and more
    state_dtype    dtype of the states, for example torch.float32 under bfloat16 parameters, or "int8" for a
                   quarter of the memory; or a mapping of these by the names of states. None: the parameter's.
                   It holds through save and load, whatever the checkpoint was saved with. A group may have
                   its own; where it has none, 8 bits are for tensors of 4,096 elements or more
    master         how what a parameter of 16 bits was rounded from is kept: "split", bfloat16 parameters and
                   a rest of 16 bits; "split8", a rest of 8 bits; "float32", a copy; None: not at all. A
                   group may have its own
    rounding       "nearest", or "stochastic" for parameters of 16 bits without a master and narrow states
    seed           of the random bits for that; the same on all ranks
    engine         "torch", "cpu" or "triton" to insist on one; None: the best one for each parameter

Those that torch.optim has also take what they take there:

    foreach, fused, capturable
                   accepted so that existing calls keep working. Every step here is fused, and can be
                   captured in a CUDA graph
    differentiable must be False: a fused update is not recorded by autograd
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import _to_scalar

from ._algorithm.program import Rule
from ._algorithm.rules import ADAM, ADAMW, AMSGRAD, AMSGRADW, BERT_ADAM, LAMB, MOMENTUM, SCHEDULES
from ._algorithm.rules import SGD as PLAIN_SGD
from ._torch.arguments import (
    check_adam,
    check_schedule,
    check_sgd,
    check_tensors_allowed,
    check_trust,
    fixed,
    for_all,
    keyword,
    pair,
)
from ._torch.optimizer import Optimizer


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
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.SGD([p], lr=0.1, momentum=0.9)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.8000, 1.6000])

    Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013.
    """

    lr: float | Tensor = 1e-3
    momentum: float = 0
    dampening: float = 0
    weight_decay: float | Tensor = 0
    nesterov: bool = False
    foreach: bool | None = keyword(default=None, kw_only=True)
    differentiable: bool = keyword(default=False, kw_only=True)
    fused: bool | None = keyword(default=None, kw_only=True)

    rules: ClassVar = (MOMENTUM, PLAIN_SGD)

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        check_sgd(arguments)

    def rule(self, group: dict[str, Any]) -> Rule:
        return MOMENTUM if group["momentum"] != 0 else PLAIN_SGD


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

    rules: ClassVar = (ADAM, ADAMW, AMSGRAD, AMSGRADW)

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        check_adam(*(arguments[name] for name in ("lr", "betas", "eps", "weight_decay")))
        check_tensors_allowed(arguments)
        arguments["betas"] = tuple(map(_to_scalar, arguments["betas"]))

    def rule(self, group: dict[str, Any]) -> Rule:
        if group["decoupled_weight_decay"]:
            return AMSGRADW if group["amsgrad"] else ADAMW
        return AMSGRAD if group["amsgrad"] else ADAM


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


class BertAdam(Optimizer):
    r"""Adam as BERT was trained with: clipped, without bias correction, with a schedule of its own.

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
        warmup: :math:`w`, as a fraction of all steps. 0: none. -1, the default, means none as well to
            every schedule but "warmup_linear", which then starts at half the rate: it is NVIDIA's formula
        t_total: :math:`T`, the number of all steps; -1: no schedule
        schedule: "warmup_linear", "warmup_constant", "warmup_poly" or "warmup_cosine"
        b1, b2: :math:`\beta_1` and :math:`\beta_2`
        e: :math:`\epsilon`
        weight_decay: :math:`\lambda`
        max_grad_norm: :math:`c`; 0 or less: no limit
        clip_scope: the gradients a norm is taken over: "tensor", each its own, as NVIDIA's class does;
            "group", all of one group and dtype, as Ascend's does; "global", all of them
        maximize, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = fusedstep.BertAdam([p], lr=0.1, warmup=0.1, t_total=10, max_grad_norm=1.0)
    >>> for _ in range(2):  # the first step of a warm-up goes nowhere
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

    rules: ClassVar = (BERT_ADAM,)
    words: ClassVar = {"schedule": SCHEDULES}
    # NVIDIA's class
    aliases: ClassVar = {"next_m": "exp_avg", "next_v": "exp_avg_sq"}

    def check(self, options: dict[str, Any]) -> None:
        check_adam(options["lr"], (options["b1"], options["b2"]), options["e"], options["weight_decay"])
        check_schedule(options["schedule"], options["warmup"], options["t_total"])


class Lamb(Optimizer):
    r"""LAMB: Adam whose update is scaled, tensor by tensor, to the size of the tensor; as Apex's FusedLAMB.

    .. math::
        g &\leftarrow g \cdot \min(1, c / \lVert g \rVert) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &\leftarrow \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon} + \lambda p \\
        p &\leftarrow p - \gamma\, \frac{\lVert p \rVert}{\lVert u \rVert}\, u

    The trust ratio :math:`\lVert p \rVert / \lVert u \rVert` is 1 where either norm is 0.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        betas: :math:`\beta_1` and :math:`\beta_2`, both numbers or both tensors
        eps: :math:`\epsilon`
        weight_decay: :math:`\lambda`
        bias_correction: whether to divide by :math:`1 - \beta^t`
        grad_averaging: whether `m` takes :math:`1 - \beta_1` of a gradient, or all of it
        max_grad_norm: :math:`c`, over all gradients together; None, 0 or less: no limit
        trust_bounds: the smallest and the largest trust ratio
        max_weight_norm: what :math:`\lVert p \rVert` counts as at most
        always_adapt: scale the update of every tensor; if False, where `weight_decay` is 0 the ratio is 1
        maximize, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = fusedstep.Lamb([p], lr=0.1, weight_decay=0.1)
    >>> p.square().sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([2.6598, 3.6336])

    You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, ICLR 2020.
    """

    lr: float | Tensor = 1e-3
    betas: tuple[float | Tensor, float | Tensor] = pair("beta1", "beta2", default=(0.9, 0.999))
    eps: float = 1e-6
    weight_decay: float = 0.01
    bias_correction: bool = True
    grad_averaging: bool = True
    max_grad_norm: float | Tensor | None = keyword(default=1.0, kw_only=True)
    trust_bounds: tuple[float, float] = pair("lowest", "highest", default=(0.0, float("inf")), kw_only=True)
    max_weight_norm: float = keyword(default=float("inf"), kw_only=True)
    always_adapt: bool = keyword(default=False, kw_only=True)
    fused: bool | None = keyword(default=None, kw_only=True)

    rules: ClassVar = (LAMB,)
    clip_eps = 0.0

    def check(self, options: dict[str, Any]) -> None:
        check_adam(options["lr"], options["betas"], options["eps"], options["weight_decay"])
        check_trust(options["trust_bounds"], options["max_weight_norm"])
