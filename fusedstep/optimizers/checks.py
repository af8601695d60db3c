"""Checks of options. Classes that torch.optim has raise its errors, word for word: handlers and tests depend on
them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def check_lr(lr: float | Tensor) -> None:
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")


def check_not_negative(options: dict[str, Any], *names: str) -> None:
    for name in names:
        if not options[name] >= 0.0:
            raise ValueError(f"Invalid {'epsilon' if name == 'eps' else name} value: {options[name]}")


def is_tuple_of(count: int, value: Any) -> bool:
    """Whether an option has this many values: a tuple, or what a configuration file makes of one."""
    is_sequence = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return is_sequence and not isinstance(value, (str, Tensor, dict)) and len(value) == count


def check_betas(betas: Any, count: int = 2) -> None:
    if not is_tuple_of(count, betas):
        words, such = {2: ("two", (0.9, 0.999)), 3: ("three", (0.9, 0.999, 0.9999))}[count]
        raise ValueError(f"Invalid betas: {betas!r}; {words} numbers are needed, such as {such}")
    for i, beta in enumerate(betas):
        if isinstance(beta, Tensor) and beta.numel() != 1:
            raise ValueError(f"Tensor betas[{i}] must be 1-element")
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")


def check_adam(lr: float | Tensor, betas: Any, eps: float, weight_decay: float) -> None:
    check_lr(lr)
    check_not_negative({"eps": eps}, "eps")
    check_betas(betas)
    check_not_negative({"weight_decay": weight_decay}, "weight_decay")
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


def as_scalar(value: Any) -> Any:
    """A tensor of one element without its dimensions; anything else as it is."""
    return value.squeeze() if isinstance(value, Tensor) and value.dim() > 0 else value
