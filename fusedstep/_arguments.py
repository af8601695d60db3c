"""What a constructor accepts. Of torch.optim's classes the errors are torch.optim's, word for word: handlers
and tests out there depend on them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._scalars import SCHEDULES

STATE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def as_state_dtype(value: Any) -> torch.dtype | None:
    """A `state_dtype`, by its name if it comes from a configuration file.

    >>> as_state_dtype("float32"), as_state_dtype("torch.bfloat16"), as_state_dtype(None)
    (torch.float32, torch.bfloat16, None)
    """
    names = {str(dtype): dtype for dtype in STATE_DTYPES}
    dtype = names.get(f"torch.{value.removeprefix('torch.')}") if isinstance(value, str) else value
    if value is not None and dtype not in STATE_DTYPES:
        raise ValueError(f"Invalid state_dtype: {value}; use one of {STATE_DTYPES}, its name, or None")
    return dtype


def as_skip(value: Any) -> bool | str:
    """A `skip_nonfinite`: whether a step is skipped, or "raise"."""
    if isinstance(value, str) and value != "raise":
        raise ValueError(f'Invalid skip_nonfinite: {value!r}; use True, False or "raise"')
    return value if isinstance(value, str) else bool(value)


def is_sequence(value: Any) -> bool:
    """Whether an option is several values: a tuple, or whatever a configuration file makes of one."""
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str)


def with_tuples(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a group in which all sequences are tuples, as torch.optim's are, which never change.

    >>> with_tuples({"lr": 0.1, "betas": [0.9, 0.99]})
    {'lr': 0.1, 'betas': (0.9, 0.99)}
    """
    return {
        name: tuple(value) if is_sequence(value) and name not in ("params", "param_names") else value
        for name, value in options.items()
    }


def _is_pair(value: Any) -> bool:
    return is_sequence(value) and len(value) == 2


def check_lr(lr: float | Tensor) -> None:
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")


def check_sgd(
    lr: float | Tensor, momentum: float, dampening: float, weight_decay: float | Tensor, nesterov: bool
) -> None:
    check_lr(lr)
    if momentum < 0.0:
        raise ValueError(f"Invalid momentum value: {momentum}")
    if weight_decay < 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")


def check_adam(lr: float | Tensor, betas: tuple, eps: float, weight_decay: float) -> None:
    check_lr(lr)
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    if not _is_pair(betas):
        raise ValueError(f"Invalid betas: {betas!r}; two numbers are needed, such as (0.9, 0.999)")
    for i, beta in enumerate(betas):
        if isinstance(beta, Tensor) and beta.numel() != 1:
            raise ValueError(f"Tensor betas[{i}] must be 1-element")
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")
    if len({isinstance(beta, Tensor) for beta in betas}) != 1:
        raise ValueError("betas must be either both floats or both Tensors")


def check_tensors_allowed(options: dict[str, Any]) -> None:
    # torch's restriction, not ours: code that relies on the error must keep working
    if options["foreach"] and not options["capturable"]:
        for name, value in (
            ("lr", options["lr"]),
            *((f"betas[{i}]", b) for i, b in enumerate(options["betas"])),
        ):
            if isinstance(value, Tensor):
                raise ValueError(f"{name} as a Tensor is not supported for capturable=False and foreach=True")


def check_schedule(schedule: str, warmup: float, t_total: float) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"Invalid schedule: {schedule!r}; use one of {SCHEDULES}")
    if not 0.0 <= warmup < 1.0 and warmup != -1:
        raise ValueError(f"Invalid warmup: {warmup}; use a fraction in [0, 1), or -1")
    if not t_total > 0 and t_total != -1:
        raise ValueError(f"Invalid t_total: {t_total}; use the number of all steps, or -1 for no schedule")


def check_trust(bounds: tuple[float, float], max_weight_norm: float) -> None:
    if not _is_pair(bounds) or not 0 <= bounds[0] <= bounds[1]:
        raise ValueError(
            f"Invalid trust_bounds: {bounds!r}; two numbers are needed, the smallest and the largest ratio, "
            "not below 0"
        )
    if not max_weight_norm > 0:
        raise ValueError(f"Invalid max_weight_norm: {max_weight_norm}; use a positive number")


def arguments_of(cls: type) -> dict[str, inspect.Parameter]:
    """The arguments of a constructor and of those it builds on."""
    constructors = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]
    signatures = reversed([*map(inspect.signature, constructors)])
    return {name: p for signature in signatures for name, p in signature.parameters.items()}


def check_flags(options: dict[str, Any]) -> None:
    if options.get("fused") and options.get("differentiable"):
        raise RuntimeError("`fused` does not support `differentiable`")
    if options.get("fused") and options.get("foreach"):
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    if options.get("differentiable"):
        raise RuntimeError(
            "differentiable=True is not supported: the fused update is not recorded by autograd; "
            "use torch.optim for differentiating through an optimizer step"
        )
