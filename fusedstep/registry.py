"""Optimizers by their names, for configuration files and for libraries that look them up."""

from __future__ import annotations

import ast
import functools
import inspect
from typing import Any

from . import optimizers
from ._torch.arguments import check_names
from .rules import Optimizer

# by their names in configuration files
CLASSES: dict[str, type[Optimizer]] = {name.lower(): getattr(optimizers, name) for name in optimizers.__all__}
_WORDS = {"true": True, "false": False, "none": None, "null": None, "inf": float("inf"), "-inf": float("-inf")}


def by_name(name: str, **options: Any) -> Any:
    """The class of this name, however it is written; with `options`, a partial of it that has these.

    Options may be strings, as in some configuration files and on command lines: numbers, tuples of them,
    `true`, `false`, `none`.

    >>> import torch, fusedstep
    >>> fusedstep.by_name("adamw") is fusedstep.AdamW
    True
    >>> make = fusedstep.by_name("schedule-free_SGD", lr="1e-1", weight_decay="0.1")
    >>> make([torch.nn.Parameter(torch.ones(1))]).param_groups[0]["lr"]
    0.1
    """
    key = "".join(c for c in str(name).lower() if c.isalnum())
    if key not in CLASSES:
        raise ValueError(f"there is no optimizer {name!r}; there are {', '.join(optimizers.__all__)}")
    cls = CLASSES[key]
    if not options:
        return cls
    _, *taken = inspect.signature(cls).parameters
    check_names(cls.__name__, options, taken)
    return functools.partial(cls, **{option: _understood(value) for option, value in options.items()})


def _understood(value: Any) -> Any:
    """The value that a string stands for; the string itself if it is no literal."""
    if not isinstance(value, str):
        return value
    if value.strip().lower() in _WORDS:
        return _WORDS[value.strip().lower()]
    try:
        return ast.literal_eval(value.strip())
    except (ValueError, SyntaxError):
        return value


def register_with_timm(prefix: str = "fused") -> list[str]:
    """Have `timm.optim.create_optimizer_v2(model, opt="fusedlion")` make our optimizers; returns their names.

    Call it once, before timm makes an optimizer. The prefix must have no underscore: timm takes what is before
    one for a wrapper. timm passes `eps`, `momentum` and `betas` to classes that take them, and weight decay to
    all: Rprop, which takes none, and Muon, which takes only matrices, are left out.
    """
    from timm.optim import OptimInfo
    from timm.optim._optim_factory import default_registry

    names = []
    for name, cls in CLASSES.items():
        if "weight_decay" not in cls.arguments or "use_muon" in cls.arguments:
            continue
        betas = cls.arguments["betas"].scalars if "betas" in cls.arguments else ()
        info = OptimInfo(
            name=f"{prefix}{name}",
            opt_class=cls,
            description=f"fusedstep's {cls.__name__}",
            has_eps="eps" in cls.arguments,
            has_momentum="momentum" in cls.arguments,
            has_betas=bool(betas),
            num_betas=len(betas) or 2,
        )
        default_registry.register(info)
        names.append(info.name)
    return names
