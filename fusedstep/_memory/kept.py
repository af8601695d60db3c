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

from .._engines import is_traced
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
        program, self._by_address = rows[0].program, rows[0].engine.BY_ADDRESS
        self._params, self.states = [row.param for row in rows], [row.state for row in rows]
        self._find_states = _finder([plane.name for plane in program.state_planes])
        self._find_steps = _finder([*program.kept_once])
        # what stages keep: not of its shape, and never by address
        self._find_others = _finder([*rows[0].stage_states])
        distributed = [*map(shards.is_distributed, self._params)]
        self._any_distributed, self._all_distributed = any(distributed), all(distributed)
        tensors = self._params + self._find_states(self.states)
        self._specs = [*map(shards.spec_of, tensors)] if self._any_distributed else []
        parts = parts_of(tensors, self._all_distributed) if self._any_distributed else tensors
        self.addresses = [*map(watch.address, parts)] if self._by_address else []
        of_params, _, *of_states = zip(*(row.checks for row in rows), strict=True)
        steps = self._find_steps(self.states)
        # one that is traced, or of a subclass, has no memory of its own
        self._asks_for_steps = not is_traced() and all(map(watch.has_memory, steps))
        self._step_addresses = [*map(watch.address, steps)] if self._asks_for_steps else []
        self._check = watch.Kinds([*of_params, *chain.from_iterable(zip(*of_states, strict=True))])
        self._check_steps = watch.Kinds(watch.checks_of(steps))
        self._check_others = watch.Kinds(watch.checks_of([*map(shards.local, self._find_others(self.states))]))
        # whether a state has another count than the one its row counts on
        self.counts_elsewhere = False

    def look(self) -> list[Tensor] | None:
        """The parts that are here of all parameters, then of the states of each row in turn, and notes their
        `addresses`. None if anything is not of the kind it was.
        """
        try:
            parts = tensors = self._params + self._find_states(self.states)
            steps = self._find_steps(self.states)
            others = [*map(shards.local, self._find_others(self.states))]
        except KeyError:
            return None
        if others and not self._check_others(others):
            return None
        if self._any_distributed:
            if not all(map(is_, map(shards.spec_of, tensors), self._specs)):
                return None
            parts = parts_of(tensors, self._all_distributed)
        if not self._check(parts):
            return None
        self.counts_elsewhere = not self._check_steps(steps) or (
            self._asks_for_steps and [*map(watch.address, steps)] != self._step_addresses
        )
        if self._by_address:
            self.addresses = [*map(watch.address, parts)]
        return parts

    def address_table(self) -> np.ndarray:
        """Where parameters and states are: a row for each parameter, a column for each plane but gradients."""
        count, found = len(self._params), np.array(self.addresses, np.int64)
        return np.concatenate((found[:count, None], found[count:].reshape(count, -1)), axis=1)


def _finder(names: list[str]) -> Callable[[list[dict]], list[Any]]:
    """find(states): what each state has by these names."""
    if not names:
        return lambda states: []
    get = itemgetter(*names)
    if len(names) == 1:
        return lambda states: [*map(get, states)]
    return lambda states: [*chain.from_iterable(map(get, states))]
