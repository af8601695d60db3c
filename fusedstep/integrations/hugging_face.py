"""Arguments for our optimizers from those of Hugging Face's Trainer and its subclasses, such as TRL's."""

from __future__ import annotations

from typing import Any

from ..registry import CLASSES, by_name
from ..rules import Optimizer

# begins the names of our optimizers in configuration files and on command lines
PREFIX = "fused_"


def optimizer_cls_and_kwargs(
    args: Any, name: str = "adamw", **options: Any
) -> tuple[type[Optimizer], dict[str, Any]]:
    """A Trainer's argument of this name, from its other arguments.

    Learning rate, betas and eps are those of `args`, if the optimizer has them. `args.optim_args` overrides
    these, and `options` overrides both. The weight decay stays with the Trainer, as an option of its groups.

    `args.max_grad_norm` moves into the step, which clips while it reads gradients, and is set to 0. It stays in
    `args` with DeepSpeed and FSDP, and if `options` has a `max_grad_norm`.

    Args:
        args: TrainingArguments, or a subclass: SFTConfig, DPOConfig and others
        name: as `fusedstep.by_name` takes it; `fused_adamw` is adamw
        options: options of the optimizer; strings are understood

    >>> from transformers import TrainingArguments
    >>> args = TrainingArguments("out", learning_rate=1e-4, optim_args="statistics=true", use_cpu=True)
    >>> cls, options = optimizer_cls_and_kwargs(args, "lion", betas=(0.95, 0.98))
    >>> options
    {'lr': 0.0001, 'betas': (0.95, 0.98), 'statistics': True, 'max_grad_norm': 1.0}
    >>> args.max_grad_norm
    0.0
    """
    cls = by_name(name.removeprefix(PREFIX))
    found: dict[str, Any] = {"lr": args.learning_rate}
    if "betas" in cls.arguments and len(cls.arguments["betas"].scalars) == 2:
        found["betas"] = (args.adam_beta1, args.adam_beta2)
    if "eps" in cls.arguments and cls.arguments["eps"].scalars == ("eps",):
        found["eps"] = args.adam_epsilon
    found |= _in_words(args.optim_args) | options
    if "max_grad_norm" not in found and args.max_grad_norm and not _is_sharded_by_the_trainer(args):
        found["max_grad_norm"], args.max_grad_norm = args.max_grad_norm, 0.0
    return cls, by_name(cls.__name__, **found).keywords


def names() -> dict[str, str]:
    """The names of our optimizers in trainers, and in `fusedstep.by_name`.

    >>> names()["fused_adamw"]
    'adamw'
    """
    return {f"{PREFIX}{name}": name for name in CLASSES}


def _in_words(optim_args: Any) -> dict[str, Any]:
    """`betas=(0.9, 0.95), eps=1e-6` as a dictionary of strings; a dictionary as it is."""
    if not optim_args or isinstance(optim_args, dict):
        return dict(optim_args or {})
    found: dict[str, str] = {}
    last = ""
    for part in optim_args.split(","):
        key, equals, value = part.partition("=")
        if not equals and not last:
            raise ValueError(f"Invalid optim_args: {optim_args!r}; use name=value, separated by commas")
        if equals:
            last = key.strip()
            found[last] = value
        else:
            # a comma within a tuple
            found[last] += f",{part}"
    return found


def _is_sharded_by_the_trainer(args: Any) -> bool:
    # DeepSpeed clips over ranks that our step does not know of; FSDP1 hides where tensors are cut
    return any(getattr(args, name, None) for name in ("deepspeed", "deepspeed_plugin", "fsdp"))
