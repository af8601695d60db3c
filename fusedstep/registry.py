"""Optimizers by their names, for configuration files and for libraries that look them up."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from . import optimizers
from ._torch.arguments import check_names
from .rules import Optimizer

# by their names in configuration files
CLASSES: dict[str, type[Optimizer]] = {name.lower(): getattr(optimizers, name) for name in optimizers.__all__}
_WORDS = {"true": True, "false": False, "none": None, "null": None, "inf": float("inf"), "-inf": float("-inf")}
# other names of dtypes: short ones, and those that torch has beside its own
_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}


def by_name(name: str, **options: Any) -> Any:
    """The class of this name, however it is written; with `options`, a partial of it that has these.

    Options may be strings, as in some configuration files and on command lines, or lists with strings: numbers,
    tuples of them, `true`, `false`, `none`. Dtypes have torch's names, or short ones, such as `bf16`.

    >>> import torch, fusedstep
    >>> fusedstep.by_name("adamw") is fusedstep.AdamW
    True
    >>> make = fusedstep.by_name("schedule-free_SGD", lr="1e-1", weight_decay="0.1")
    >>> make([torch.nn.Parameter(torch.ones(1))]).param_groups[0]["lr"]
    0.1
    """
    key = key_of(name)
    if key not in CLASSES:
        raise ValueError(f"there is no optimizer {name!r}; there are {', '.join(optimizers.__all__)}")
    cls = CLASSES[key]
    if not options:
        return cls
    _, *taken = inspect.signature(cls).parameters
    check_names(cls.__name__, options, taken)
    return functools.partial(cls, **{option: understood(value, option) for option, value in options.items()})


def key_of(name: Any) -> str:
    """A name without what people write differently: capitals, and signs between words.

    >>> key_of("Schedule-Free_AdamW")
    'schedulefreeadamw'
    """
    return "".join(c for c in str(name).lower() if c.isalnum())


def understood(value: Any, option: str = "") -> Any:
    """The value of an option in which strings stand for literals; a string that stands for none stays.

    >>> understood("(0.9, 0.95)"), understood(["1e-6", 50]), understood("True"), understood("yes")
    ((0.9, 0.95), [1e-06, 50], True, 'yes')
    """
    if isinstance(value, Mapping):
        return {name: understood(part, option) for name, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        parts = (understood(part, option) for part in value)
        return tuple(parts) if isinstance(value, tuple) else [*parts]
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if text in _WORDS:
        return _WORDS[text]
    try:
        found = ast.literal_eval(value.strip())
    except (ValueError, SyntaxError):
        found = value
    if isinstance(found, str):
        # also one that had quotes of its own: it stands for no number
        return torch_name(found) if option == "state_dtype" else found
    return understood(found, option)


def torch_name(dtype: str) -> str:
    """torch's name of a dtype, or of what is none, however it is written.

    >>> torch_name("bf16"), torch_name("torch.half"), torch_name("torch.float32"), torch_name("int8")
    ('bfloat16', 'float16', 'float32', 'int8')
    """
    name = dtype.strip().removeprefix("torch.")
    return _DTYPES.get(name.lower(), name)


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
