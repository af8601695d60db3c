"""Which cases a command line asks `fusedstep bench` for: of its table, or put together from names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import typer

import fusedstep

from .factory import made
from .shapes import MODELS
from .works import CPU, DTYPES, GPU, Work


class Asked(NamedTuple):
    """A case of one's own, in words; several of each are all pairs."""

    models: list[str]
    optimizers: list[str]
    # as name=value
    options: list[str]
    dtypes: list[str]
    # options that have names of their own on the command line; None is not given
    stored: dict[str, str | None]


def works_of(asked: Asked, only: str, device: str) -> list[Work]:
    """Cases whose names contain `only`: those that are asked for, or else of the table."""
    if asked.models or asked.optimizers:
        works = _own(asked)
    else:
        _refuse_alone(asked)
        works = CPU if device == "cpu" else GPU
    found = [work for work in works if only in str(work)]
    if not found:
        message = f"found no work named {only!r}; use a part of '{works[0]}'"
        raise typer.BadParameter(message, param_hint="--only")
    return found


def _own(asked: Asked) -> list[Work]:
    for model in asked.models:
        if model not in MODELS:
            made(model)  # an error is told before anything is timed
    for dtype in asked.dtypes:
        if dtype not in DTYPES:
            raise typer.BadParameter(f"found {dtype!r}; use one of {', '.join(DTYPES)}", param_hint="--dtype")
    chosen = [_understood(name, asked) for name in asked.optimizers or ["AdamW"]]
    return [
        Work(model, name, options, dtype)
        for model in asked.models or ["bert-base"]
        for dtype in asked.dtypes or ["fp32" if model in MODELS else "own"]
        for name, options in chosen
    ]


def _refuse_alone(asked: Asked) -> None:
    """Nothing is accepted and ignored: the table's cases have their own."""
    given = {"option": asked.options, "dtype": asked.dtypes, **asked.stored}
    names = " and ".join(f"--{name.replace('_', '-')}" for name, value in given.items() if value)
    if names:
        raise typer.BadParameter(f"found {names} alone; name your own case with --model or --optimizer, too")


def _understood(name: str, asked: Asked) -> tuple[str, dict[str, Any]]:
    """The class of this name, and options with values as configuration files have them."""
    texts = {key: value for key, value in asked.stored.items() if value is not None}
    for each in asked.options:
        key, equals, value = each.partition("=")
        if not equals or not key.isidentifier():
            message = f"found {each!r}; use name=value, as momentum=0.9 or betas=0.9,0.99"
            raise typer.BadParameter(message, param_hint="--option")
        texts[key] = value
    try:
        cls = fusedstep.by_name(name)
        options = dict(fusedstep.by_name(name, **texts).keywords) if texts else {}
        # as it will be made, so that what it refuses is told before anything is timed
        cls([torch.nn.Parameter(torch.ones(1))], **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from error
    return cls.__name__, options
