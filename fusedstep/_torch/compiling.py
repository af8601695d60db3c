"""What torch.compile is not to trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def outside_of_graphs(function: F) -> F:
    """Has torch.compile call a function, as it calls the step of torch.optim's optimizers, and not trace it.

    torch's own wrapper, which takes 3 us, is there only while something is compiled.
    """
    untraced = torch._disable_dynamo(function)

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (untraced if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return chosen  # type: ignore[return-value]
