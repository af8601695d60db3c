"""Numbers that a table keeps once for each row, such as step counts: a vector on its device. The state of every
row has a view of it.
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
    """A vector of numbers that an engine updates in place, and the views of it that states hold."""

    def __init__(self, vector: Tensor) -> None:
        self.vector, self._device, size = vector, vector.device, len(vector)
        # select, not unbind: a view that may itself be written in place
        self.views = [self.vector[i] for i in range(size)]
        has_memory = type(vector) is Tensor and not vector.is_meta and not is_traced()
        self._address = vector.data_ptr() if has_memory else None
        self._kind = watch.kind_of(self.views[0])
        # the same memory, if it is on the host: reading it waits for nothing
        self._on_host = self.vector.numpy() if has_memory and self.vector.is_cpu else None
        self.known = KnownSteps(self.vector)
        # places whose views are in states
        self._held: set[int] = set()
        # counts in memory that other processes share, by row
        self._shared: dict[int, Tensor] = {}

    def has_moved(self) -> bool:
        """Whether the vector has another address, as after it was sent to another process."""
        return self._address is not None and self.vector.data_ptr() != self._address

    def has_lost(self, places: Iterable[int]) -> bool:
        """Whether one of these views no longer is a view of the vector."""
        if self._address is None:
            return False
        first, size = self._address, self.vector.element_size()
        return any(self._kind.place(self.views[i]) != first + i * size for i in places)

    def adopt(self, rows: dict[int, Row], name_of: Callable[[Row], str]) -> None:
        """Copy the numbers that these rows, by their places, have by these names, and keep them here."""
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

    # tensors that are given away must not be inference tensors either
    @torch.inference_mode(False)
    @torch.no_grad()
    def _give_away(self, places: list[int]) -> None:
        """Give the views of these rows memory of their own, for whoever holds them, and make new views."""
        held = [i for i in places if i in self._held]
        if held and not is_traced():
            counts = self.vector.clone()
            for i in held:
                self.views[i].data, self.views[i] = counts[i], self.vector[i]
        self._held.update(places)

    @torch.no_grad()
    def _write(self, counts: dict[int, Any]) -> None:
        # a tensor on the host that goes to a device is read, as a number
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
        """Copy here what other processes have counted."""
        if self._shared:
            torch._foreach_copy_(*self._both())

    def publish_shared(self) -> None:
        if self._shared:
            ours, theirs = self._both()
            torch._foreach_copy_(theirs, ours)

    def _both(self) -> tuple[list[Tensor], list[Tensor]]:
        """Our views of the counts that processes share, and the shared tensors."""
        shared = self._shared
        return [self.views[i] for i in shared], [count.detach().view(()) for count in shared.values()]


def _is_on_host(count: Any) -> bool:
    return type(count) is Tensor and count.is_cpu


def is_shared(count: Any) -> bool:
    """Whether a count is in host memory that processes share; any memory of a GPU could be shared."""
    return _is_on_host(count) and count.untyped_storage().is_shared()


def apart(count: Any) -> Any:
    """A count that will be adopted, as a number or a copy: writing other counts must not change it. A count in
    memory that processes share is returned itself.
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
            f"a step count, or a number kept beside it, is a tensor of shape {tuple(count.shape)}, "
            f"{count.dtype} and {count.layout}; it must be one real number: load a matching checkpoint, or "
            "delete optimizer.state[p]"
        )


def _check_shared(count: Tensor, row: Row) -> None:
    if count.numel() != 1 or row.device.type != "cpu":
        raise RuntimeError(
            f"a step count of shape {tuple(count.shape)} is in shared host memory, and its parameter on "
            f"{row.device}; processes can only share a count that is one number, of a parameter on the CPU. "
            "Use a count that is not shared"
        )
