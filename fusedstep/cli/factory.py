"""Models of the user's own, named on a command line as module:factory."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import typer
from torch import nn

from .shapes import MODELS


def factory(model: str) -> Callable[[], Any]:
    """The function of this name, which needs no arguments; modules of the current folder are found, too."""
    module, _, name = model.partition(":")
    if not name:
        message = f"found {model!r}; use one of {', '.join(MODELS)}, or module:factory, like mine.models:make"
        raise typer.BadParameter(message, param_hint="--model")
    # as `python -m` does
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        message = (
            f"{model} cannot be found: {error}; use module:factory, where `python -c 'import module'` works"
        )
        raise typer.BadParameter(message, param_hint="--model") from error
    except Exception as error:  # code of the user's own
        message = f"{module} raised {_told(error)}; `python -c 'import {module}'` shows where"
        raise typer.BadParameter(message, param_hint="--model") from error
    _check_callable(model, found)
    return found


def made(model: str, without_memory: bool = False) -> nn.Module:
    """The model that the function makes, which must have parameters to train; `without_memory` if it can be."""
    found = _called(model, factory(model), without_memory)
    if not isinstance(found, nn.Module):
        message = f"{model} returned {type(found).__name__}; name a function that returns a torch.nn.Module"
        raise typer.BadParameter(message, param_hint="--model")
    if not any(p.requires_grad for p in found.parameters()):
        message = f"{model} has no parameters to train; name a function whose model has some"
        raise typer.BadParameter(message, param_hint="--model")
    return found


def _called(model: str, make: Callable[[], Any], without_memory: bool) -> Any:
    if without_memory:
        # some read numbers, or ask for a device: each fails in its own way
        with contextlib.suppress(Exception), torch.device("meta"):
            return make()
    try:
        return make()
    except Exception as error:  # code of the user's own
        module, _, name = model.partition(":")
        message = f"{model} raised {_told(error)}; `python -c 'import {module}; {module}.{name}()'` shows where"
        raise typer.BadParameter(message, param_hint="--model") from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _check_callable(model: str, found: Any) -> None:
    """Refuse what cannot be called without arguments."""
    # a module can be called, but that is its forward
    if not callable(found) or isinstance(found, nn.Module):
        message = f"{model} is of type {type(found).__name__}; name a function that returns a torch.nn.Module"
        raise typer.BadParameter(message, param_hint="--model")
    missing = _without_default(found)
    if missing:
        message = (
            f"{model} needs arguments ({', '.join(missing)}); "
            "name a function that takes none and calls it, such as `def make(): return Model(width=512)`"
        )
        raise typer.BadParameter(message, param_hint="--model")


def _without_default(make: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        # some functions written in C have no signature
        return []
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
