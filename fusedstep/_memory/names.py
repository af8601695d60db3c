"""Names of parameters in messages: those that they were given with, if any."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from .row import Row


def names_in(groups: Sequence[dict[str, Any]]) -> dict[Tensor, str]:
    """The names of parameters that were given with names, as by `model.named_parameters()`."""
    named = (zip(group["params"], group.get("param_names", ()), strict=False) for group in groups)
    return dict(chain.from_iterable(named))


def name_of(row: Row, names: dict[Tensor, str], members: Sequence[Sequence[Tensor]]) -> str:
    """The name of a row's parameter, or its place among the `members` of its group."""
    if row.param in names:
        return repr(names[row.param])
    place = [*map(id, members[row.group])].index(id(row.param))
    return f"parameter {place} of group {row.group}, shape {tuple(row.param.shape)}"
