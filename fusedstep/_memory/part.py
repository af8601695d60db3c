"""Some parameters of an optimizer, stepped apart from the others, as if it had no others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from .._algorithm.program import StepSpec
from .names import names_in
from .plan import Plan
from .taking import Way, take_step


class Part:
    """Takes the place of an optimizer for a plan: everything is the whole optimizer's, except that groups and
    states are only those of these parameters. It refers to the whole optimizer only during a step.
    """

    param_groups: list[dict[str, Any]]
    state: _States

    def __init__(self, optimizer: Any, params: Sequence[Tensor], waited: bool) -> None:
        """`waited` says whether their gradients have waited for each other."""
        self.waited = waited
        mine = {id(p) for p in params}
        names = names_in(optimizer.param_groups)
        members = ([p for p in group["params"] if id(p) in mine] for group in optimizer.param_groups)
        # by the place of their group
        self._members = {i: each for i, each in enumerate(members) if each}
        self._names = {i: [names[p] for p in each if p in names] for i, each in self._members.items()}
        self.params = [*chain.from_iterable(self._members.values())]
        self._plan: Plan | None = None
        self._whole: Any = None

    def __getattr__(self, name: str) -> Any:
        # called only for names that are not found here
        return getattr(self._whole, name)

    def groups_of(self, optimizer: Any) -> list[dict[str, Any]]:
        """The groups of its parameters."""
        return [optimizer.param_groups[i] for i in self._members]

    def place_of_group(self, i: int) -> int:
        return [*self._members][i]

    def step(self, optimizer: Any, spec: StepSpec, status: Tensor | None) -> Tensor:
        """Step the parameters that have a gradient; returns the status."""
        groups = optimizer.param_groups
        self.param_groups = [
            {**groups[i], "params": members, "param_names": self._names[i]}
            for i, members in self._members.items()
        ]
        self.state = _States(optimizer.state, self.params)
        # kept only if the step succeeds
        plan, self._plan, self._whole = self._plan, None, optimizer
        try:
            self._plan = take_step(self, plan, spec, Way(status=status))
        finally:
            del self.param_groups, self.state
            self._whole = None
        return self._plan.status

    def forget_states(self) -> None:
        """Stop keeping states alive, which are about to be replaced."""
        if self._plan is not None:
            self._plan.forget_states()

    def close(self) -> None:
        if self._plan is not None:
            self._plan.close()
        self._plan = None


class _States(dict):
    """The present states of some parameters; a state that is added is added to the whole optimizer."""

    def __init__(self, whole: dict[Tensor, dict[str, Any]], params: list[Tensor]) -> None:
        super().__init__({p: state for p in params if (state := whole.get(p)) is not None})
        self._all = whole

    def setdefault(self, p: Tensor, state: Any = None) -> Any:
        return super().setdefault(p, self._all.setdefault(p, state))
