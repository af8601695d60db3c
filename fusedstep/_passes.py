"""What an optimizer does to every element, as data: a rule is a few passes over memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from . import _rules


class Pass(NamedTuple):
    """One pass over memory: a function of roles and scalars, the roles it writes, what it sums.

    Roles are the letters of `_rules`. The function returns what is written, then `sums` terms that are added
    up over each tensor, in an order that never changes. With `raw` the gradient is taken as it is stored.
    """

    update: Callable
    reads: str
    writes: str
    sums: int = 0
    raw: bool = False

    @property
    def scalar_count(self) -> int:
        return self.update.__code__.co_argcount - len(self.reads)


# for clipping, before any other
MEASURE = Pass(_rules.square, "g", "", sums=1, raw=True)


class Rule(NamedTuple):
    """An optimizer's mathematics: how scalars are prepared, the passes of a step, what it remembers.

    `states` names the letters of its states. `saves_step` says whether the step count is part of the saved
    state. Where it is not, the rule may ask only whether this is the first step, and after loading a
    checkpoint it is not. `narrow` are the passes for 16-bit states, if others.
    """

    scalars: Callable
    passes: tuple[Pass, ...]
    states: dict[str, str]
    saves_step: bool = True
    narrow: tuple[Pass, ...] = ()

    @property
    def roles(self) -> str:
        """Tensors of one parameter: itself, its gradient, its states."""
        return "pg" + "".join(self.states)

    @property
    def sums(self) -> int:
        return sum(p.sums for p in self.passes)

    @property
    def all_passes(self) -> tuple[Pass, ...]:
        return (MEASURE, *self.passes)

    def for_dtypes(self, dtypes: tuple[torch.dtype, ...]) -> Rule:
        """This rule for roles stored so."""
        narrow = self.narrow and any(dtype.itemsize == 2 for dtype in dtypes[2:])
        return self._replace(passes=self.narrow) if narrow else self
