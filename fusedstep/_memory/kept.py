"""Parameters, states and step counts mostly stay from step to step: has any of them changed or moved?

Nothing here keeps a state alive: if states are moved to the host while something else needs the device, their
memory is free at once.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
from torch import Tensor

from .._algorithm.step import GRAD, PARAM
from .._engines import CHANGED, MOVED, OTHER, SAME
from .._engines.objects import same, values_of
from . import shards, watch
from .row import Row

_local_part = attrgetter("_local_tensor")


def parts_of(tensors: list[Any], all_distributed: bool) -> list[Any]:
    """The local parts of tensors; None for None."""
    if all_distributed:
        try:
            parts = [*map(_local_part, tensors)]
        except AttributeError:
            parts = [None if t is None else t._local_tensor for t in tensors]
        # parts of another type are still on their way from other ranks
        if {*map(type, parts)} <= {Tensor, type(None)}:
            return parts
    return [*map(shards.local, tensors)]


class Kept:
    """Parameters, states and counts of rows with the same program, as they are on construction."""

    def __init__(self, rows: list[Row]) -> None:
        program = rows[0].program
        self._params, self.states = [row.param for row in rows], [row.state for row in rows]
        self._names = [plane.name for plane in program.state_planes]
        self._kept_once = [*program.kept_once]
        # states of stages, which have other shapes, and whose addresses are not needed
        self._other_names = [*rows[0].stage_states]
        distributed = shards.are_distributed(self._params)
        self._any_distributed, self._all_distributed = any(distributed), all(distributed)
        tensors = self._params + self._found(self._names)
        self._specs = shards.specs_of(tensors) if self._any_distributed else []
        others = [*map(shards.local, self._found(self._other_names))]
        kinds = [row.kinds[PARAM] for row in rows]
        kinds += chain.from_iterable([row.kinds[GRAD + 1 :] for row in rows])
        kinds += [row.once_kinds[name] for row in rows for name in program.kept_once]
        self._look = watch.Look(kinds)
        self._look_at_others = watch.Look(watch.kinds_of(others))
        self._begin()

    def _begin(self) -> None:
        """Expect what the next look finds: the rows have just been made, or looked at."""
        self._look.sign_is_known = self._is_complete = True
        # the addresses that counts must have
        self._step_addresses: np.ndarray | None = None
        # whether a state has another count than the one that its table writes
        self._counts_elsewhere = False
        # whether the caller has noted all addresses
        self.is_noted = False

    def insert(self, k: int, row: Row) -> bool:
        """Add this row as the k-th; False if that needs another `Kept`."""
        if self._any_distributed or shards.is_distributed(row.param) or row.stage_states:
            return False
        names, count = row.program.kept_once, len(self._params) + 1
        states = row.kinds[GRAD + 1 :]
        kinds = {k: row.kinds[PARAM]}
        kinds |= {count + k * len(states) + i: kind for i, kind in enumerate(states)}
        first_step = count + count * len(states)
        kinds |= {first_step + k * len(names) + i: row.once_kinds[name] for i, name in enumerate(names)}
        if not self._look.insert(kinds):
            return False
        self._params.insert(k, row.param)
        self.states.insert(k, row.state)
        self._begin()
        return True

    @property
    def _first_step(self) -> int:
        """The place of the first count among all tensors that are looked at."""
        return len(self._params) * (1 + len(self._names))

    def _found(self, names: list[str]) -> list[Any]:
        """The values of each state by these names; KeyError if one lacks a name."""
        found = values_of(self.states, names) if names else []
        if found is None:
            raise KeyError(names)
        return found

    def look(self) -> list[Tensor] | None:
        """The local parts of all parameters, then of the states of each row in turn. None if a tensor has
        another kind than before, or a count was replaced: see `find_changes`.
        """
        self._is_complete = False
        try:
            parts = tensors = self._params + self._found(self._names)
            steps = self._found(self._kept_once)
            others = self._found(self._other_names)
        except KeyError:
            return None
        if others and self._look_at_others([*map(shards.local, others)]) == CHANGED:
            return None
        if self._any_distributed:
            if not same(shards.specs_of(tensors), self._specs):
                return None
            # parts that are still on their way from other ranks have another type, which the look notices
            parts = [*map(_local_part if self._all_distributed else shards.local, tensors)]
        found = self._look(parts + steps)
        if found == CHANGED and self._all_distributed:
            parts = [*map(shards.local, tensors)]
            # compared with the addresses of the first look, so moved at least
            found = max(MOVED, self._look(parts + steps))
        self._is_complete = True
        if self._step_addresses is None:
            self._step_addresses = self._look.addresses[self._first_step :].copy()
        if found != SAME:
            self.is_noted, self._counts_elsewhere = False, bool(self._is_elsewhere().any())
        return None if found == CHANGED or self._counts_elsewhere else parts

    def _is_elsewhere(self) -> np.ndarray:
        return self._look.addresses[self._first_step :] != self._step_addresses

    def find_changes(self) -> tuple[list[int], list[int]] | None:
        """After a look: rows with a tensor of another kind, and rows with a replaced count; None: not known."""
        if not self._is_complete:
            return None
        is_other = (self.address_table() == OTHER).any(1)
        is_elsewhere = self._is_elsewhere().reshape(len(self._params), -1).any(1)
        return np.flatnonzero(is_other).tolist(), np.flatnonzero(is_elsewhere).tolist()

    def address_table(self) -> np.ndarray:
        """Addresses of parameters and states: a row for each parameter, a column for each of their planes."""
        count, found = len(self._params), self._look.addresses[: self._first_step]
        return np.concatenate((found[:count, None], found[count:].reshape(count, -1)), axis=1)
