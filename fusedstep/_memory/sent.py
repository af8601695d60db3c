"""Which parameters are still what was sent back to them, and need not be brought to the host again."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._engines import load
from .layout import lies_like
from .shards import local

if TYPE_CHECKING:
    from .row import Row


class Sent:
    """Fingerprints of parameters, taken on their device when they were sent back and again when they are due.

    Anything may have written to them, and torch counts only some of it. What the comparison says comes to the
    host with the gradients. A parameter that had changed the last time is brought without waiting for that;
    others are brought when it is known that they have changed.
    """

    def __init__(self, device: torch.device) -> None:
        engine, problem = load("triton", device.type)
        self._engine: Any = None if problem else engine
        if self._engine is not None:
            # compiles, before anything is written
            self._engine.fingerprints([torch.zeros(1, device=device)])
        # where on the host those rows are that were sent back last, and their fingerprints then
        self._copies: list[Tensor | None] = []
        self._then: Tensor | None = None
        # whether each had changed the last time
        self._changed: list[bool] = []
        # those that are being compared, and the answer on its way
        self._rows: list[Row] = []
        self._answer: Tensor | None = None

    def note(self, rows: Sequence[Row]) -> None:
        """These have been sent back, in the current stream."""
        rows = self._comparable(rows)
        if not self._are_those(rows):
            self._copies, self._changed = [row.param_copy for row in rows], [False] * len(rows)
        self._then = self._fingerprints(rows) if rows else None

    def compare(self, rows: Sequence[Row]) -> list[Row]:
        """Begin to find out, in the current stream, which have changed since; gives those that are to be
        brought whatever the answer.
        """
        self._answer, self._rows = None, self._comparable(rows)
        if self._then is None or not self._are_those(self._rows):
            return [*rows]
        now = self._fingerprints(self._rows)
        self._answer = torch.empty(now.shape, dtype=torch.bool, device="cpu", pin_memory=now.is_cuda)
        self._answer.copy_(now != self._then, non_blocking=True)
        waits = {id(row) for row, changed in zip(self._rows, self._changed, strict=True) if not changed}
        return [row for row in rows if id(row) not in waits]

    def changed(self) -> list[Row]:
        """Those that waited for the answer and have changed. Asked when it is there."""
        # not before: the device has compared with it
        self._then = None
        if self._answer is None:
            return []
        before, self._changed = self._changed, self._answer.tolist()
        self._answer = None
        known = zip(self._rows, self._changed, before, strict=True)
        return [row for row, is_changed, was_changed in known if is_changed and not was_changed]

    def _are_those(self, rows: list[Row]) -> bool:
        return len(rows) == len(self._copies) and all(map(is_, [row.param_copy for row in rows], self._copies))

    def _comparable(self, rows: Sequence[Row]) -> list[Row]:
        return [row for row in rows if self._engine is not None and self._is_comparable(row)]

    def _is_comparable(self, row: Row) -> bool:
        """Whether it lies as its copy does, in whole words."""
        part = local(row.param)
        word = self._engine.WORD
        is_in_words = part.numel() * part.itemsize % word == 0 and part.data_ptr() % word == 0
        return is_in_words and lies_like(part, row.strides)

    def _fingerprints(self, rows: list[Row]) -> Tensor:
        return self._engine.fingerprints([local(row.param).detach() for row in rows])
