"""SGD, Adam and AdamW with torch.optim's signatures, options, states and results; BertAdam and Lamb.

Arguments that every class takes beyond its own:

    maximize       ascend instead of descend
    max_grad_norm  scale gradients down to this norm, taken over all parameters, as they are read: `p.grad`
                   itself stays as it is. None, 0 or less: no limit. A group's own limit holds for that group
    norm_type      which norm that is: 2, or inf for the largest element
    norm_group     process group of ranks that step other parameters of the same model, as those of
                   ZeroRedundancyOptimizer or the stages of a pipeline do: norm and skips are one for all
    skip_nonfinite skip a step, on the device, if a gradient holds NaN or inf; `step_was_skipped` and
                   `skipped_steps` tell. "raise": wait for the device, and raise FloatingPointError that names
                   the parameters, before anything is written
    ema_decay      keep a moving average of the parameters, state `ema`, in float32 at least, from what they are
                   before the first step with it; `ema_parameters()` shows it
    fused          who unscales gradients with torch's GradScaler, for the whole optimizer, as in torch. None,
                   False: the scaler, which then waits for the device and calls no step that is to be skipped.
                   True: the step, which needs no waiting, can be captured and takes float16 gradients. None is
                   True with `norm_group`, and for parameters on several meshes. With fusedstep.GradScaler it is
                   the step in any case. Every step is fused, whatever this is
    statistics     sum up what `statistics()` then tells: norms of gradients, parameters, updates, and more
    state_dtype    dtype of the states, for example torch.float32 under bfloat16 parameters; None: the
                   parameter's. It holds through save and load, whatever the checkpoint was saved with. Also by
                   name, as configuration files have it: "float32"
    engine         "torch", "cpu" or "triton" to insist on one; None: the best one for each parameter

Those that torch.optim has also take what they take there:

    foreach, capturable
                   accepted so that existing calls keep working. Every step can be captured in a CUDA graph
    differentiable must be False: a fused update is not recorded by autograd
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, _to_scalar

from . import _rules, _scalars
from ._arguments import check_adam, check_schedule, check_sgd, check_tensors_allowed, check_trust
from ._optimizer import Optimizer
from ._passes import Pass, Rule

_MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}
_SGD = Rule(_scalars.sgd, (Pass(_rules.sgd, "pg", "p"),), {}, saves_step=False)
_MOMENTUM = Rule(
    _scalars.sgd, (Pass(_rules.momentum, "pgb", "pb"),), {"b": "momentum_buffer"}, saves_step=False
)
ADAM = Rule(_scalars.adam, (Pass(_rules.adam, "pgmv", "pmv"),), _MOMENTS)
AMSGRAD = Rule(_scalars.adam, (Pass(_rules.amsgrad, "pgmvw", "pmvw"),), {**_MOMENTS, "w": "max_exp_avg_sq"})
_BERT_ADAM = Rule(_scalars.bert_adam, (Pass(_rules.bert_adam, "pgmv", "pmv"),), _MOMENTS)
LAMB = Rule(
    _scalars.lamb,
    (Pass(_rules.lamb_measure, "pgmv", "mv", "++"), Pass(_rules.lamb, "pmv", "p")),
    _MOMENTS,
    narrow=(Pass(_rules.lamb_measure_only, "pgmv", "", "++"), Pass(_rules.bert_adam, "pgmv", "pmv")),
    reports=("trust_ratio",),
)


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
        max_grad_norm: float | Tensor | None = None,
        norm_type: float = 2.0,
        norm_group: Any = None,
        skip_nonfinite: bool | str = False,
        ema_decay: float | Tensor | None = None,
        statistics: bool = False,
        state_dtype: torch.dtype | str | None = None,
        engine: str | None = None,
    ) -> None:
        check_sgd(lr, momentum, dampening, weight_decay, nesterov)
        super().__init__(locals())

    def rule(self, group: dict[str, Any]) -> Rule:
        return _MOMENTUM if group["momentum"] != 0 else _SGD


class _AdamFamily(Optimizer):
    """What Adam and AdamW share: everything but the default way to decay weights."""

    options = ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay")
    switches = ("amsgrad",)

    def __init__(self, arguments: dict[str, Any]) -> None:
        check_adam(**{name: arguments[name] for name in ("lr", "betas", "eps", "weight_decay")})
        check_tensors_allowed(arguments)
        super().__init__({**arguments, "betas": tuple(map(_to_scalar, arguments["betas"]))})

    def rule(self, group: dict[str, Any]) -> Rule:
        return AMSGRAD if group["amsgrad"] else ADAM


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
        max_grad_norm: float | Tensor | None = None,
        norm_type: float = 2.0,
        norm_group: Any = None,
        skip_nonfinite: bool | str = False,
        ema_decay: float | Tensor | None = None,
        statistics: bool = False,
        state_dtype: torch.dtype | str | None = None,
        engine: str | None = None,
    ) -> None:
        super().__init__(locals())


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
        max_grad_norm: float | Tensor | None = None,
        norm_type: float = 2.0,
        norm_group: Any = None,
        skip_nonfinite: bool | str = False,
        ema_decay: float | Tensor | None = None,
        statistics: bool = False,
        state_dtype: torch.dtype | str | None = None,
        engine: str | None = None,
    ) -> None:
        super().__init__(locals())


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

    options = ("lr", "warmup", "t_total", "schedule", "b1", "b2", "e", "weight_decay")
    words: ClassVar = {"schedule": _scalars.SCHEDULES}
    # NVIDIA's class
    aliases: ClassVar = {"next_m": "exp_avg", "next_v": "exp_avg_sq"}

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
        clip_scope: str = "tensor",
        maximize: bool = False,
        fused: bool | None = None,
        norm_type: float = 2.0,
        norm_group: Any = None,
        skip_nonfinite: bool | str = False,
        ema_decay: float | Tensor | None = None,
        statistics: bool = False,
        state_dtype: torch.dtype | str | None = None,
        engine: str | None = None,
    ) -> None:
        super().__init__(locals())

    def check(self, options: dict[str, Any]) -> None:
        check_adam(options["lr"], (options["b1"], options["b2"]), options["e"], options["weight_decay"])
        check_schedule(options["schedule"], options["warmup"], options["t_total"])

    def rule(self, group: dict[str, Any]) -> Rule:
        return _BERT_ADAM


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

    options = (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "bias_correction",
        "grad_averaging",
        "always_adapt",
        "trust_bounds",
        "max_weight_norm",
    )
    clip_eps = 0.0

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        *,
        max_grad_norm: float | Tensor | None = 1.0,
        trust_bounds: tuple[float, float] = (0.0, float("inf")),
        max_weight_norm: float = float("inf"),
        always_adapt: bool = False,
        maximize: bool = False,
        fused: bool | None = None,
        norm_type: float = 2.0,
        norm_group: Any = None,
        skip_nonfinite: bool | str = False,
        ema_decay: float | Tensor | None = None,
        statistics: bool = False,
        state_dtype: torch.dtype | str | None = None,
        engine: str | None = None,
    ) -> None:
        super().__init__(locals())

    def check(self, options: dict[str, Any]) -> None:
        check_adam(options["lr"], options["betas"], options["eps"], options["weight_decay"])
        check_trust(options["trust_bounds"], options["max_weight_norm"])

    def rule(self, group: dict[str, Any]) -> Rule:
        return LAMB
