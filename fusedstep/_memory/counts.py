"""What a table keeps once for each row, such as step counts: a vector on its device, of which every row has a
view in its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._engines import is_traced, to_device
from . import watch
from .known_steps import KnownSteps
from .row import Row
from .transfer import upload


class Counts:
    """Numbers that an engine writes where they are, and the tensors that states hold of them."""

    def __init__(self, vector: Tensor) -> None:
        self.vector, self._device, size = vector, vector.device, len(vector)
        # select, not unbind: a view that may itself be written in place
        self.views = [self.vector[i] for i in range(size)]
        has_memory = type(vector) is Tensor and not vector.is_meta and not is_traced()
        self._address = vector.data_ptr() if has_memory else None
        self._kind = watch.kind_of(self.views[0])
        # the same memory, if it is the host's: reading that waits for nothing
        self._on_host = self.vector.numpy() if has_memory and self.vector.is_cpu else None
        self.known = KnownSteps(self.vector)
        # whether states have the views by now
        self._are_held = False
        # counts that other processes see too, by row
        self._shared: dict[int, Tensor] = {}

    def has_moved(self) -> bool:
        """Whether the vector is elsewhere, as after it was sent to another process."""
        return self._address is not None and self.vector.data_ptr() != self._address

    def has_lost(self, places: Iterable[int]) -> bool:
        """Whether one of these views is no view of the vector any more."""
        if self._address is None:
            return False
        first, size = self._address, self.vector.element_size()
        return any(self._kind.place(self.views[i]) != first + i * size for i in places)

    def adopt(self, rows: dict[int, Row], name_of: Callable[[Row], str]) -> None:
        """Have these rows, by their places, go on here from what they have by these names."""
        for row in rows.values():
            row.once_kinds[name_of(row)] = self._kind
        found = {i: row.once[name_of(row)] for i, row in rows.items()}
        found = {i: count for i, count in found.items() if count is not self.views[i]}
        for count in found.values():
            _check(count)
        if not found:
            return
        self.known.check()
        self._give_away([*found])
        self._write(found)
        traced = is_traced()
        for i, count in found.items():
            self._shared.pop(i, None)
            if not traced and is_shared(count):
                _check_shared(count, rows[i])
                self._shared[i], rows[i].once_kinds[name_of(rows[i])] = count, watch.kind_of(count)
            else:
                rows[i].once[name_of(rows[i])] = self.views[i]

    # what is given away is no inference tensor either
    @torch.inference_mode(False)
    @torch.no_grad()
    def _give_away(self, places: list[int]) -> None:
        """Whoever holds what was the count of these rows keeps it as it is."""
        if self._are_held and not is_traced():
            counts = self.vector.clone()
            for i in places:
                self.views[i].data, self.views[i] = counts[i], self.vector[i]
        self._are_held = True

    @torch.no_grad()
    def _write(self, counts: dict[int, Any]) -> None:
        # a tensor of the host that goes to a device is read, as a number
        is_elsewhere = self._device.type != "cpu" and not is_traced()
        numbers = {
            i: float(count)
            for i, count in counts.items()
            if not isinstance(count, Tensor) or (is_elsewhere and _is_on_host(count))
        }
        tensors = {
            i: count if count.dim() == 0 else count.reshape(())
            for i, count in counts.items()
            if i not in numbers
        }
        if self._on_host is not None:
            self._on_host[[*numbers]] = [*numbers.values()]
        elif len(numbers) == len(self.views):
            upload(np.array([numbers[i] for i in range(len(numbers))]), self.vector)
        elif numbers:
            columns = zip(*numbers.items(), strict=True)
            places, values = (torch.tensor(column, device="cpu") for column in columns)
            self.vector[to_device(places, self._device)] = to_device(values.to(self.vector.dtype), self._device)
        if tensors:
            torch._foreach_copy_([self.views[i] for i in tensors], [*tensors.values()], non_blocking=True)
        if self._on_host is not None:
            numbers = dict(zip(counts, self._on_host[[*counts]].tolist(), strict=True))
        self.known.adopt([*counts], [numbers.get(i) for i in counts])

    def fetch_shared(self) -> None:
        """Go on from what other processes have counted."""
        if self._shared:
            torch._foreach_copy_(*self._both())

    def publish_shared(self) -> None:
        if self._shared:
            ours, theirs = self._both()
            torch._foreach_copy_(theirs, ours)

    def _both(self) -> tuple[list[Tensor], list[Tensor]]:
        """Counts that other processes see: here, and there."""
        shared = self._shared
        return [self.views[i] for i in shared], [count.detach().view(()) for count in shared.values()]


def _is_on_host(count: Any) -> bool:
    return type(count) is Tensor and count.is_cpu


def is_shared(count: Any) -> bool:
    """Whether a count is in memory of the host that other processes see, too; all of a GPU could be."""
    return _is_on_host(count) and count.untyped_storage().is_shared()


def apart(count: Any) -> Any:
    """A count that is about to be taken over, while others may be written: as a number, or a copy. Memory that
    processes share stays what it is.
    """
    if not isinstance(count, Tensor) or is_traced():
        return count
    _check(count)
    if is_shared(count):
        return count
    return float(count) if _is_on_host(count) else count.clone()


def _check(count: Any) -> None:
    if isinstance(count, Tensor) and (
        count.layout != torch.strided or count.numel() != 1 or count.is_complex()
    ):
        raise RuntimeError(
            f"a step count, or what is kept beside it, is a tensor of {tuple(count.shape)}, {count.dtype} "
            f"and {count.layout}; it must be one real number: load a matching checkpoint, or delete "
            "optimizer.state[p]"
        )


def _check_shared(count: Tensor, row: Row) -> None:
    if count.numel() != 1 or row.device.type != "cpu":
        raise RuntimeError(
            f"a step count of shape {tuple(count.shape)} is in the host's shared memory, its parameter on "
            f"{row.device}; processes can share the count of one that is on the CPU, as one number. Otherwise "
            "use one that is not shared"
        )
