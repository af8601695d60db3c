"""The cases that a command line asks `fusedstep bench` for: from its table, or put together from names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import typer

import fusedstep
from fusedstep import _engines
from fusedstep.registry import torch_name

from .factory import made
from .shapes import MODELS
from .works import CPU, DTYPES, GPU, SHORT, Work


class Asked(NamedTuple):
    """A user's own case, as on the command line; several of each make every combination."""

    models: list[str]
    optimizers: list[str]
    # as name=value
    options: list[str]
    dtypes: list[str]
    # options with flags of their own on the command line; None: not given
    stored: dict[str, str | None]


def works_of(asked: Asked, only: str, device: str) -> list[Work]:
    """Cases whose names contain `only`: the user's own, or else those of the table."""
    if asked.models or asked.optimizers:
        works = _own(asked, device)
    else:
        _refuse_alone(asked)
        works = CPU if device == "cpu" else GPU
    found = [work for work in works if only in str(work)]
    if not found:
        message = f"found no case whose name contains {only!r}; use {_names(works, asked)}"
        raise typer.BadParameter(message, param_hint="--only")
    return found


def _names(works: list[Work], asked: Asked) -> str:
    """What `--only` could be."""
    if asked.models or asked.optimizers:
        return f"a part of {' or '.join(repr(str(work)) for work in works)}"
    words = [dict.fromkeys(getattr(work, part) for work in works) for part in ("model", "optimizer", "dtype")]
    models, optimizers, dtypes = map(", ".join, words)
    return (
        f"host (loops), cold (new processes), or a part of a name such as '{works[0]}', "
        f"with a model ({models}), an optimizer ({optimizers}) and a dtype ({dtypes})"
    )


def _own(asked: Asked, device: str) -> list[Work]:
    for model in asked.models:
        if model not in MODELS:
            made(model)  # an error is told before anything is timed
    dtypes = [_dtype(dtype) for dtype in asked.dtypes]
    chosen = [_understood(name, asked, device) for name in asked.optimizers or ["AdamW"]]
    return [
        Work(model, name, options, dtype)
        for model in asked.models or ["bert-base"]
        for dtype in dtypes or ["fp32" if model in MODELS else "own"]
        for name, options in chosen
    ]


def _dtype(found: str) -> str:
    """As rows have it: bf16/fp32 for bfloat16/float32."""
    short = "/".join(SHORT.get(torch_name(part), part) for part in found.split("/"))
    if short not in DTYPES:
        message = f"found {found!r}; use one of {', '.join(DTYPES)}, or torch's names: {', '.join(SHORT)}"
        raise typer.BadParameter(message, param_hint="--dtype")
    return short


def _refuse_alone(asked: Asked) -> None:
    """Refuse options without a case of the user's own: the cases of the table have theirs."""
    names = _given(option=asked.options, dtype=asked.dtypes, **asked.stored)
    if names:
        raise typer.BadParameter(f"found {names} alone; name your own case with --model or --optimizer, too")


def refuse_beside(other: str, asked: Asked, peers: list[str]) -> None:
    """Refuse all that chooses a case beside an option that leaves no choice."""
    own = {"model": asked.models, "optimizer": asked.optimizers, "option": asked.options, "dtype": asked.dtypes}
    names = _given(**own, peer=peers, **asked.stored)
    if names:
        raise typer.BadParameter(f"found {names} beside {other}, which would ignore it; leave out one of them")


def _given(**options: Any) -> str:
    return " and ".join(f"--{name.replace('_', '-')}" for name, value in options.items() if value)


def _understood(name: str, asked: Asked, device: str) -> tuple[str, dict[str, Any]]:
    """The class of this name, and options with values as in configuration files."""
    texts = {key: value for key, value in asked.stored.items() if value is not None}
    for each in asked.options:
        key, equals, value = each.partition("=")
        if not equals or not key.isidentifier():
            message = f"found {each!r}; use name=value, such as momentum=0.9 or betas=0.9,0.99"
            raise typer.BadParameter(message, param_hint="--option")
        texts[key] = value
    try:
        cls = fusedstep.by_name(name)
        options = dict(fusedstep.by_name(name, **texts).keywords) if texts else {}
        # constructed here, so that errors are told before anything is timed; Muon takes matrices
        cls([torch.nn.Parameter(torch.ones(1, 1))], **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from error
    engine = options.get("engine")
    why_not = None if engine is None else _engines.load(engine, device)[1]
    if why_not:
        raise typer.BadParameter(f"{engine} does not run on {device}: {why_not}", param_hint="--engine")
    return cls.__name__, options
