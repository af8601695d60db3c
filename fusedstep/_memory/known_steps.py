"""What the host knows of step counts on a device, without reading them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class KnownSteps:
    """A label for every count of a vector: the count itself, or if negative, a name for an unknown count.

    Counts with the same label are equal. A step that the device may skip counts all its rows or none of them,
    so equal counts stay equal, although the host does not know them.
    """

    def __init__(self, steps: Tensor) -> None:
        self._steps = steps
        self._is_readable = type(steps) is Tensor
        self.labels = -1.0 - np.arange(len(steps))
        self._seen = self._current_version()

    def _current_version(self) -> int:
        return self._steps._version if self._is_readable else 0

    def check(self) -> None:
        """Call before the counts are used or written: forgets counts that may have changed."""
        if self._current_version() != self._seen:
            # somebody wrote through a view, such as state[p]["step"]
            self.labels = -1.0 - np.arange(len(self.labels))
            self._seen = self._current_version()
        elif torch.distributed.is_available() and torch.distributed.is_initialized():
            # collectives write without changing the version, as when rank 0 broadcasts its state
            self._forget(self.labels >= 0, np.zeros(len(self.labels)))

    def adopt(self, places: Sequence[int], counts: Sequence[float | None]) -> None:
        """Note that the counts in these places have just been set; None: to a number unknown to the host."""
        lowest = min(self.labels.min(initial=0.0), 0.0)
        names = (lowest - 1.0 - i for i in range(len(places)))
        labels = [name if count is None else count for count, name in zip(counts, names, strict=True)]
        self.labels[[*places]] = labels
        self._seen = self._current_version()

    def advance(self, live: np.ndarray, may_skip: bool) -> None:
        """Note that the device has just counted a step of the `live` rows, or perhaps skipped it."""
        is_known = self.labels >= 0
        if may_skip:
            self._forget(is_known & (live != 0), live)
        else:
            self._forget(np.zeros_like(is_known), live)
            self.labels[is_known] += live[is_known]
        self._seen = self._current_version()

    def _forget(self, which: np.ndarray, live: np.ndarray) -> None:
        """Replace these counts by names; equal labels get equal names if they are equal in `live`."""
        which = which | (self.labels < 0)
        labels, live = self.labels[which], live[which]
        if len(labels) and (labels == labels[0]).all() and (live == live[0]).all():
            self.labels[which] = -1.0
        elif len(labels):
            _, names = np.unique(np.stack((labels, live)), axis=1, return_inverse=True)
            self.labels[which] = -1.0 - names.reshape(-1)
