"""Parameters, states and step counts, which mostly stay from step to step: are they what and where they were?

Nothing here keeps a state alive: whoever moves states to the host while something else needs the device gets
the memory back at once.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import numpy as np
from torch import Tensor

from .._algorithm.step import GRAD, PARAM
from .._engines import CHANGED, OTHER, SAME
from . import shards, watch
from .row import Row

_local_part = attrgetter("_local_tensor")


def parts_of(tensors: list[Any], all_distributed: bool) -> list[Tensor]:
    """The parts of tensors that are here."""
    if all_distributed:
        parts = [*map(_local_part, tensors)]
        # others are still on their way, from other ranks
        if {*map(type, parts)} <= {Tensor}:
            return parts
    return [*map(shards.local, tensors)]


class Kept:
    """What rows with the same program keep, as it is when this is made."""

    def __init__(self, rows: list[Row]) -> None:
        program = rows[0].program
        self._params, self.states = [row.param for row in rows], [row.state for row in rows]
        self._find_states = _finder([plane.name for plane in program.state_planes])
        self._kept_once = [itemgetter(name) for name in program.kept_once]
        # what stages keep: not of its shape, and never by address
        self._find_others = _finder([*rows[0].stage_states])
        distributed = shards.are_distributed(self._params)
        self._any_distributed, self._all_distributed = any(distributed), all(distributed)
        tensors = self._params + self._find_states(self.states)
        self._specs = shards.specs_of(tensors) if self._any_distributed else []
        others = [*map(shards.local, self._find_others(self.states))]
        kinds = [row.kinds[PARAM] for row in rows]
        kinds += chain.from_iterable([row.kinds[GRAD + 1 :] for row in rows])
        kinds += [row.once_kinds[name] for name in program.kept_once for row in rows]
        self._look = watch.Look(kinds)
        # of rows that have just been made, or looked at in this step
        self._look.sign_is_known = True
        self._look_at_others = watch.Look(watch.kinds_of(others))
        # of what is looked at, the first that is a count; and where counts are to be, as they are at first
        self._first_step = len(tensors)
        self._step_addresses: np.ndarray | None = None
        # whether somebody has taken note of where everything is
        self.is_noted = False
        # whether a state has another count than the one its row counts on
        self._counts_elsewhere = False
        self._is_complete = True

    def look(self) -> list[Tensor] | None:
        """The parts that are here of all parameters, then of the states of each row in turn. None if anything
        is not of the kind it was, or counts are elsewhere: see `find_changes`.
        """
        self._is_complete = False
        try:
            parts = tensors = self._params + self._find_states(self.states)
            steps = [*chain.from_iterable([map(get, self.states) for get in self._kept_once])]
            others = self._find_others(self.states)
        except KeyError:
            return None
        if others and self._look_at_others([*map(shards.local, others)]) == CHANGED:
            return None
        if self._any_distributed:
            if not all(map(is_, shards.specs_of(tensors), self._specs)):
                return None
            parts = parts_of(tensors, self._all_distributed)
        found = self._look(parts + steps)
        self._is_complete = True
        if self._step_addresses is None:
            self._step_addresses = self._look.addresses[self._first_step :].copy()
        if found != SAME:
            self.is_noted, self._counts_elsewhere = False, bool(self._is_elsewhere().any())
        return None if found == CHANGED or self._counts_elsewhere else parts

    def _is_elsewhere(self) -> np.ndarray:
        return self._look.addresses[self._first_step :] != self._step_addresses

    def find_changes(self) -> tuple[list[int], list[int]] | None:
        """After a look: rows with a tensor of another kind, and with counts elsewhere; None: not known."""
        if not self._is_complete:
            return None
        is_other = (self.address_table() == OTHER).any(1)
        is_elsewhere = self._is_elsewhere().reshape(-1, len(self._params)).any(0)
        return np.flatnonzero(is_other).tolist(), np.flatnonzero(is_elsewhere).tolist()

    def address_table(self) -> np.ndarray:
        """Where parameters and states are: a row for each parameter, a column for each plane but gradients."""
        count, found = len(self._params), self._look.addresses[: self._first_step]
        return np.concatenate((found[:count, None], found[count:].reshape(count, -1)), axis=1)


def _finder(names: list[str]) -> Callable[[list[dict]], list[Any]]:
    """find(states): what each state has by these names."""
    if not names:
        return lambda states: []
    get = itemgetter(*names)
    if len(names) == 1:
        return lambda states: [*map(get, states)]
    return lambda states: [*chain.from_iterable(map(get, states))]
