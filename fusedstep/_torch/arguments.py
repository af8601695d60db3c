"""Constructor arguments, declared once as annotated attributes of a class.

    class AdamW(Adam):
        weight_decay: float = 1e-2

An argument is an option of every group unless it is declared `for_all`. `inspect.signature` shows arguments as
if they had been written out, with those that every optimizer takes at the end.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import dataclass_transform  # in typing from Python 3.11; torch depends on it, too

from .._memory.offload import PLACES
from .._memory.options import is_sequence
from .._memory.storage import MASTERS

STATE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8)
ROUNDINGS = ("nearest", "stochastic")


class Argument(NamedTuple):
    """A constructor argument. `scalars` are the names by which rules take the numbers in it."""

    default: Any
    kw_only: bool = False
    for_all: bool = False
    # held fixed by the class, or kept for each group by a rule: no argument of a constructor
    fixed: bool = False
    is_entry: bool = False
    # in a group only if it is not the default
    is_extra: bool = False
    scalars: tuple[str, ...] = ()
    annotation: Any = inspect.Parameter.empty


def keyword(*, default: Any, kw_only: Literal[True], scalar: str = "") -> Any:
    """An option that is passed by keyword only; rules may take it by another name."""
    return Argument(default, kw_only=kw_only, scalars=(scalar,) if scalar else ())


def extra(*, default: Any, kw_only: Literal[True]) -> Any:
    """The same, and a group has it only if it is not the default: groups then read as those of the optimizer
    that this one replaces.
    """
    return Argument(default, kw_only=kw_only, is_extra=True)


def for_all(*, default: Any, kw_only: Literal[True]) -> Any:
    """An argument that holds for all groups, passed by keyword only."""
    return Argument(default, kw_only=kw_only, for_all=True)


def fixed(*, default: Any, init: Literal[False]) -> Any:
    """An option that makes the class what it is, whatever a checkpoint says."""
    return Argument(default, fixed=not init)


def group_entry(*, default: Any, init: Literal[False]) -> Any:
    """What every group has, this at first, and no constructor takes."""
    return Argument(default, kw_only=True, is_entry=not init)


def pair(first: str, second: str, default: tuple, *, kw_only: bool = False) -> Any:
    """An option of two numbers, which rules take by these names."""
    return Argument(default, kw_only=kw_only, scalars=(first, second))


def triple(first: str, second: str, third: str, default: tuple, *, kw_only: bool = False) -> Any:
    """An option of three numbers, which rules take by these names."""
    return Argument(default, kw_only=kw_only, scalars=(first, second, third))


@dataclass_transform(field_specifiers=(keyword, extra, for_all, fixed, group_entry, pair, triple))
class Declared:
    """For type checkers: subclasses have a constructor that takes what they declare."""


class Common(Declared):
    """The arguments that every optimizer takes; `fusedstep.optimizers` describes them."""

    params: ParamsT
    maximize: bool = keyword(default=False, kw_only=True)
    max_grad_norm: float | Tensor | None = extra(default=None, kw_only=True)
    norm_type: float = for_all(default=2.0, kw_only=True)
    norm_group: Any = for_all(default=None, kw_only=True)
    skip_nonfinite: bool | str = for_all(default=False, kw_only=True)
    ema_decay: float | Tensor | None = extra(default=None, kw_only=True)
    statistics: bool = for_all(default=False, kw_only=True)
    state_dtype: torch.dtype | str | Mapping[str, torch.dtype | str] | None = for_all(
        default=None, kw_only=True
    )
    master: str | None = for_all(default=None, kw_only=True)
    rounding: str = for_all(default="nearest", kw_only=True)
    seed: int = for_all(default=0, kw_only=True)
    engine: str | None = for_all(default=None, kw_only=True)
    offload: str | None = for_all(default=None, kw_only=True)


def declared_arguments(cls: type, inherited: dict[str, Argument]) -> dict[str, Argument]:
    """What a class declares, among what it inherits: each in its place, those of every optimizer last."""
    arguments = dict(inherited)
    for name, annotation in inspect.get_annotations(cls).items():
        if name not in vars(cls) or "ClassVar" in str(annotation):
            continue
        value = vars(cls)[name]
        own = value if isinstance(value, Argument) else Argument(value)
        old = inherited.get(name)
        scalars = own.scalars or (old.scalars if old else ()) or (name,)
        own = own._replace(scalars=scalars, annotation=annotation)
        if old is None or old.kw_only != own.kw_only:
            arguments.pop(name, None)
        arguments[name] = own
        delattr(cls, name)
    return arguments


def signature_of(arguments: dict[str, Argument], common: dict[str, Argument]) -> inspect.Signature:
    made = {
        name: inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY if a.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=a.default,
            annotation=a.annotation,
        )
        for name, a in arguments.items()
        if not a.fixed and not a.is_entry
    }
    first = inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="ParamsT")
    order = sorted(made, key=lambda name: (made[name].kind, arguments[name].kw_only and name in common))
    return inspect.Signature([first, *(made[name] for name in order)])


def bound(signature: inspect.Signature, owner: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that were given, by name."""
    check_names(owner, kwargs, [*signature.parameters])
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{owner}.__init__(): {error}") from None


def check_names(owner: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise if an argument that is `given` is not known, with the name that was perhaps meant."""
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        near = _near(unknown, known)
        meant = f"; did you mean {near[0]!r}?" if near else ";"
        raise TypeError(
            f"{owner} got an unexpected keyword argument {unknown!r}{meant} It takes {', '.join(known)}"
        )


def check_spelling(owner: str, given: Iterable[str], known: Sequence[str]) -> None:
    """The same for options of groups, which may have entries of the user's own: raise for a name that is nearly
    known.
    """
    check_names(owner, (name for name in given if name not in known and _near(name, known)), known)


def _near(name: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(name, known, 1)


# what values mean


def as_state_dtype(value: Any, states: Collection[str] = ()) -> Any:
    """A `state_dtype`, by its name if it comes from a configuration file; or one for some of the `states`.

    >>> as_state_dtype("float32"), as_state_dtype("torch.bfloat16"), as_state_dtype(None)
    (torch.float32, torch.bfloat16, None)
    >>> as_state_dtype({"exp_avg": "int8"}, ["exp_avg", "exp_avg_sq"])
    {'exp_avg': torch.int8}
    """
    if isinstance(value, Mapping):
        unknown = [name for name in value if name not in states]
        if unknown:
            raise ValueError(
                f"Invalid state_dtype: there is no state {unknown}; this optimizer has {[*states]}"
            )
        return {name: as_state_dtype(dtype) for name, dtype in value.items()}
    names = {str(dtype): dtype for dtype in STATE_DTYPES}
    dtype = names.get(f"torch.{value.removeprefix('torch.')}") if isinstance(value, str) else value
    if value is not None and (not isinstance(dtype, torch.dtype) or dtype not in STATE_DTYPES):
        raise ValueError(
            f"Invalid state_dtype: {value}; use one of {STATE_DTYPES}, its name, None, or a mapping of these "
            "by the names of states"
        )
    return dtype


def as_master(value: Any) -> str | None:
    """A `master`: how what a parameter of 16 bits was rounded from is kept."""
    if value is not None and value not in MASTERS:
        raise ValueError(f"Invalid master: {value!r}; use one of {MASTERS}, or None")
    return value


def as_offload(value: Any, engine: str | None) -> str | None:
    """An `offload`: where parameters are stepped that are elsewhere, by one of the host's engines."""
    if value is not None and value not in PLACES:
        raise ValueError(f"Invalid offload: {value!r}; use one of {PLACES}, or None")
    if value is not None and engine == "triton":
        raise ValueError(
            f'offload={value!r} steps parameters on the host, and engine is "triton", which runs on devices; '
            'use engine=None, "cpu" or "torch", or leave out offload'
        )
    return value


def as_rounding(value: Any) -> str:
    if value not in ROUNDINGS:
        raise ValueError(f"Invalid rounding: {value!r}; use one of {ROUNDINGS}")
    return value


def as_seed(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"Invalid seed: {value!r}; use a whole number from 0 to 2**63 - 1")
    return value


def as_skip(value: Any) -> bool | str:
    """A `skip_nonfinite`: whether a step is skipped, or "raise"."""
    if isinstance(value, str) and value != "raise":
        raise ValueError(f'Invalid skip_nonfinite: {value!r}; use True, False or "raise"')
    return value if isinstance(value, str) else bool(value)


def with_tuples(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a group in which all sequences are tuples, as torch.optim's are, which never change.

    >>> with_tuples({"lr": 0.1, "betas": [0.9, 0.99]})
    {'lr': 0.1, 'betas': (0.9, 0.99)}
    """
    return {
        name: tuple(value) if is_sequence(value) and name not in ("params", "param_names") else value
        for name, value in options.items()
    }


# checks


def check_types(
    owner: str, given: Mapping[str, Any], arguments: Mapping[str, Argument], numbers: Collection[str]
) -> None:
    """Raise where a string is given for a flag, or for one of the options that are `numbers`."""
    for name, value in given.items():
        default = arguments[name].default if name in arguments else None
        if isinstance(default, bool) and name != "skip_nonfinite":
            kind = "True or False"
        elif name in numbers:
            kind = f"{len(default)} numbers" if isinstance(default, tuple) else "a number"
        else:
            continue
        # how many numbers there must be is another question
        parts = value if is_sequence(value) else () if isinstance(default, tuple) else (value,)
        if any(isinstance(part, str) for part in parts):
            raise TypeError(
                f"{owner} was given {name}={value!r}; use {kind}. (fusedstep.by_name reads strings, such as "
                "those of configuration files)"
            )


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
