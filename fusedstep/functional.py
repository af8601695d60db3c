"""Updates without an optimizer: every call is given its tensors, and nothing keeps them alive."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ._algorithm.program import NORM_TYPES
from ._algorithm.step import StepSpec
from ._engines import NAMES as NAMES_OF_ENGINES
from ._memory.call import Job, Lists, call
from ._memory.options import COMMON
from ._memory.settings import Settings, Update
from ._memory.shards import local
from ._memory.storage import real_dtype
from .optimizers.adam import adamw, adamw_amsgrad
from .rules import Rule, rule

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NO_OPTIONS = dict.fromkeys(COMMON, 0.0)
_ADAMW_OPTIONS = ("lr", "beta1", "beta2", "eps", "weight_decay")
_NOT_CORRECTED = {"corrected_decay": 0.0, "peak_lr": 1.0}


@rule()
def _scaled(p, g):
    """Gradients clipped in place: `p` is the gradient itself."""
    return (g,)


Tensors = Tensor | Sequence[Tensor]


def adamw_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors | None = None,
    *,
    step: Tensor | int,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    amsgrad: bool = False,
    maximize: bool = False,
    engine: str | None = None,
) -> None:
    r"""One AdamW update of a tensor, or of lists of tensors at once, in place.

    .. math::
        p &\leftarrow (1 - \gamma \lambda) p \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \frac{\gamma}{1 - \beta_1^t}\, \frac{m}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    All arithmetic is done in float32, that of the scalars too. `torch.compile` can trace it; the numbers are
    then constants, and another number compiles again.

    Args:
        params: float32, float16 or bfloat16, of any strides
        grads: each of its parameter's shape; the dtype may be another of the three
        exp_avgs, exp_avg_sqs: :math:`m` and :math:`v`, in the parameter's dtype or float32
        max_exp_avg_sqs: the largest :math:`v` so far, of any of the three dtypes; used only if `amsgrad`
        step: :math:`t`, the number of this update, from 1; an integer, or a one-element tensor, which is only
            read, and never waited for
        lr, beta1, beta2, weight_decay, eps: :math:`\gamma, \beta_1, \beta_2, \lambda, \epsilon`, numbers
        amsgrad: divide by the largest :math:`v` so far
        maximize: ascend instead of descend
        engine: "torch", "cpu" or "triton" to insist on one

    >>> import torch
    >>> from fusedstep import functional
    >>> p, g, m, v = (torch.full((2,), x) for x in (0.5, 0.5, 0.9, 0.9))
    >>> functional.adamw_(p, g, m, v, step=1, beta1=0.9999, beta2=0.9999)
    >>> p
    tensor([0.4051, 0.4051])

    Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019.
    """
    if amsgrad and max_exp_avg_sqs is None:
        raise ValueError("amsgrad=True needs max_exp_avg_sqs, the largest exp_avg_sqs so far; start from zeros")
    largest = max_exp_avg_sqs if amsgrad and max_exp_avg_sqs is not None else []
    given = (params, grads, exp_avgs, exp_avg_sqs, largest)
    lists = [_as_list(name, tensors) for name, tensors in zip(_NAMES, given, strict=True)]
    if engine is not None and engine not in NAMES_OF_ENGINES:
        raise ValueError(f"Invalid engine: {engine!r}; use one of {NAMES_OF_ENGINES}, or None")
    named = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    names = _NAMES if isinstance(params, Tensor) else _NAMES_IN_LISTS
    _update(lists, names, step, named, amsgrad, maximize, engine)


def _update(
    lists: Lists,
    names: Sequence[str],
    step: Tensor | int,
    named: dict[str, float],
    amsgrad: bool,
    maximize: bool,
    engine: str | None = None,
) -> None:
    """`adamw_` of tensors that errors call by `names`, with its numbers in `named`."""
    values = [_number(name, value) for name, value in named.items()]
    count = _count(step)
    _check_step(count, lists[0][:1])
    with torch.no_grad():
        if _is_traced(lists[0]):
            torch.ops.fusedstep.adamw_(*lists, count, values, amsgrad, maximize, engine)
        else:
            _adamw(lists, names, count, values, amsgrad, maximize, engine)


def _is_traced(tensors: list[Tensor]) -> bool:
    fake = len(tensors) > 0 and isinstance(tensors[0], FakeTensor)
    return fake or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


@torch.library.custom_op(
    "fusedstep::adamw_", mutates_args=("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
)
def _operator(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    step: Tensor,
    values: Sequence[float],
    amsgrad: bool,
    maximize: bool,
    engine: str | None,
) -> None:
    lists = [*map(list, (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs))]
    _adamw(lists, _NAMES_IN_LISTS, step, values, amsgrad, maximize, engine)


@_operator.register_fake
def _fake(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, step, values, amsgrad, maximize, engine):
    lists = [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs]
    _check_lists(lists[: 5 if amsgrad else 4], _NAMES_IN_LISTS)


def _adamw(
    lists: Lists,
    names: Sequence[str],
    step: Tensor,
    values: Sequence[float],
    amsgrad: bool,
    maximize: bool,
    engine: str | None,
) -> None:
    update, lists = (adamw_amsgrad, lists) if amsgrad else (adamw, lists[:4])
    options = {"maximize": float(maximize)} | dict(zip(_ADAMW_OPTIONS, values, strict=True)) | _NOT_CORRECTED
    _step(update, lists, names, step, options, engine)


@torch.no_grad()
def _apply_rule(
    rule: Rule, lists: Lists, names: Sequence[str], step: Tensor | int, named: dict[str, Any]
) -> None:
    """One update by a rule, in place, like `adamw_`; errors call the tensors by `names`."""
    count = _count(step)
    _check_step(count, lists[0][:1])
    _step(rule, lists, names, count, {name: _number(name, value) for name, value in named.items()}, None)


def _step(
    rule: Rule,
    lists: Lists,
    names: Sequence[str],
    step: Tensor,
    options: dict[str, float],
    engine: str | None,
) -> None:
    # float32, as operators on Ascend compute their scalars
    settings = Settings(f"functional.{rule.update.__name__}_", engine, exact=torch.float32, counts=False)
    ends = [*lists[0][:1], *lists[0][-1:]]
    places = [t.data_ptr() for t in ends if isinstance(t, Tensor) and t.layout == torch.strided]
    key = (rule, engine, len(lists[0]), *places)

    def check() -> None:
        _check_lists(lists, names)
        _check_step(step, lists[0])

    call(key, lists, Job(Update(rule), settings, _NO_OPTIONS | options), step, check)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    r"""Scale the gradients of `parameters` down, in place, until together they have a norm of `max_norm`.

    As `torch.nn.utils.clip_grad_norm_` does, with 16-bit gradients squared in float32. Optimizers take
    `max_grad_norm` themselves and then need no pass for scaling.

    .. math::
        g \leftarrow g \cdot \min(1, c / (\lVert g \rVert + 10^{-6}))

    Args:
        parameters: a tensor or an iterable of them; those without a gradient are left out
        max_norm: :math:`c`; 0 leaves nothing of the gradients, unlike an optimizer's `max_grad_norm=0`
        norm_type: 2 or inf; others need operations for each gradient, and so does `error_if_nonfinite`
        error_if_nonfinite: raise if the norm is no finite number, which waits for the device

    Returns the norm before clipping, a tensor of no dimensions.

    >>> import torch
    >>> from fusedstep import functional
    >>> p = torch.zeros(2, requires_grad=True)
    >>> p.grad = torch.tensor([3.0, 4.0])
    >>> functional.clip_grad_norm_([p], max_norm=1.0)
    tensor(5.)
    >>> p.grad
    tensor([0.6000, 0.8000])
    """
    if torch.compiler.is_compiling():
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
    # torch takes the word "inf" too
    norm_type = float(norm_type)
    parameters = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    # a shared gradient counts once
    by_grad = {id(p.grad): p for p in parameters if p.grad is not None}
    grads: list[Any] = [p.grad for p in by_grad.values()]
    if not grads:
        return _on_host(0.0)
    dtype = functools.reduce(torch.promote_types, map(real_dtype, grads), torch.float32)
    if not error_if_nonfinite and _can_clip(grads, max_norm, norm_type):
        return _clip(grads, max_norm, norm_type).to(grads[0].device, dtype)
    wide = [torch.linalg.vector_norm(g, norm_type, dtype=torch.promote_types(g.dtype, dtype)) for g in grads]
    total = torch.linalg.vector_norm(torch.stack([n.to(grads[0].device, dtype) for n in wide]), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so they "
            "cannot be clipped. Pass error_if_nonfinite=False to scale them by it anyway"
        )
    torch.nn.utils.clip_grads_with_norm_([*by_grad.values()], max_norm, total)
    return total


def _can_clip(grads: list[Tensor], max_norm: Any, norm_type: float) -> bool:
    """Whether gradients can be clipped all at once."""
    known = norm_type == 2 or (norm_type in NORM_TYPES and not any(g.is_complex() for g in grads))
    limited = isinstance(max_norm, (int, float)) and max_norm > 0
    return known and limited and all(g.layout == torch.strided for g in grads)


@torch.no_grad()
def _clip(grads: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Clip gradients in place; returns their norm before."""
    settings = Settings("functional.clip_grad_norm_", counts=False, spec=StepSpec(norm_type, clips=True))
    options = {**_NO_OPTIONS, "max_grad_norm": float(max_norm), "clip_eps": 1e-6}
    key, job = ("clip", norm_type, len(grads), grads[0].shape), Job(Update(_scaled), settings, options)
    tables = call(key, (grads, grads), job, _on_host(1.0), lambda: None)
    measured = torch.cat([table.sums[0].to(tables[0].device) for table in tables])
    return torch.sqrt(measured.sum()) if norm_type == 2 else measured.amax()


# arguments


_NAMES = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
_NAMES_IN_LISTS = tuple(f"{name}[{{}}]" for name in _NAMES)


def _as_list(name: str, tensors: Any) -> list[Tensor]:
    if isinstance(tensors, (list, tuple)):
        return [*tensors]
    if isinstance(tensors, Tensor):
        return [tensors]
    raise TypeError(f"{name} is a {type(tensors).__name__}; use a tensor or a list of tensors")


def _number(name: str, value: Any) -> float:
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{name} is {value!r}; use a number (a tensor's value would have to be waited for)")


def _on_host(value: float) -> Tensor:
    # whatever torch's defaults are
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def _count(step: Any) -> Tensor:
    if isinstance(step, Tensor):
        return step
    if not isinstance(step, numbers.Real):
        raise TypeError(f"step is {step!r}; use the number of this update, or a tensor of it")
    # traced, it may be a number that is not known yet
    if not torch.compiler.is_compiling() and not float(step) >= 1:
        raise ValueError(f"step is {step!r}; use the number of this update, counted from 1")
    return _on_host(float(step))


def _check_step(step: Tensor, params: list[Tensor]) -> None:
    if step.numel() != 1 or step.is_complex() or step.dtype == torch.bool:
        raise ValueError(f"step has shape {tuple(step.shape)} and {step.dtype}; use one real number")
    for p in params:
        if isinstance(p, Tensor) and step.device not in (p.device, torch.device("cpu")):
            raise ValueError(f"step is on {step.device}, its parameter on {p.device}; move it there")


def _check_lists(lists: Sequence[Sequence[Tensor]], names: Sequence[str]) -> None:
    """Raise if these are not what `adamw_` takes, and name the tensor that is wrong."""
    if len({*map(len, lists)}) != 1:
        found = ", ".join(f"{len(x)} {name}" for name, x in zip(_NAMES, lists, strict=False))
        raise ValueError(f"found {found}; give the same number of each")
    for i, roles in enumerate(zip(*lists, strict=True)):
        for k, t in enumerate(roles):
            _check_tensor(names[k].format(i), k, t, roles[0])
    written = [local(t) for k, tensors in enumerate(lists) for t in tensors if k != 1]
    addresses = [t.data_ptr() for t in written if not isinstance(t, FakeTensor) and t.numel()]
    if len({*addresses}) != len(addresses):
        raise ValueError("a tensor that is updated was given twice, and would be updated twice at once")


def _check_tensor(where: str, role: int, t: Any, p: Tensor) -> None:
    """`role` counts parameter, gradient, two moments, largest second moment."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{where} is a {type(t).__name__}; use a tensor")
    if t.layout != torch.strided:
        raise ValueError(f"{where} is {t.layout}; use a dense tensor")
    accepted = {p.dtype, torch.float32} if role in (2, 3) else _DTYPES
    if t.dtype not in accepted or t.dtype not in _DTYPES:
        raise TypeError(f"{where} is {t.dtype}; use one of {(*accepted,)}")
    if t.shape != p.shape:
        raise ValueError(f"{where} has shape {tuple(t.shape)}, its parameter {tuple(p.shape)}; they must agree")
    if t.device != p.device:
        raise ValueError(f"{where} is on {t.device}, its parameter on {p.device}; move it there")
    if role != 1 and any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True)):
        raise ValueError(f"{where} is expanded and cannot be updated in place; use .contiguous()")
