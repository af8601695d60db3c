"""Models of the user's own, named on a command line as module:factory."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import typer
from torch import nn

from .shapes import MODELS


def factory(model: str) -> Callable[[], Any]:
    """The function of this name; modules of the current folder are found, too."""
    module, _, name = model.partition(":")
    if not name:
        message = f"found {model!r}; use one of {', '.join(MODELS)}, or module:factory, as mine.models:make"
        raise typer.BadParameter(message, param_hint="--model")
    # as `python -m` does
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        return functools.reduce(getattr, name.split("."), found)
    except (ImportError, AttributeError) as error:
        message = (
            f"{model} cannot be found: {error}; use module:factory, where `python -c 'import module'` works"
        )
        raise typer.BadParameter(message, param_hint="--model") from error


def made(model: str) -> nn.Module:
    """What the function makes, which must be a model with parameters to train."""
    make = factory(model)
    missing = _without_default(make)
    if missing:
        message = (
            f"{model} needs arguments ({', '.join(missing)}); "
            "name a function that takes none and calls it, as `def make(): return Model(width=512)`"
        )
        raise typer.BadParameter(message, param_hint="--model")
    found = make()
    if not isinstance(found, nn.Module):
        message = f"{model} returned {type(found).__name__}; name a function that returns a torch.nn.Module"
        raise typer.BadParameter(message, param_hint="--model")
    if not any(p.requires_grad for p in found.parameters()):
        raise typer.BadParameter(f"{model} has no parameters to train", param_hint="--model")
    return found


def _without_default(make: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        # written in C, some do not tell
        return []
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
