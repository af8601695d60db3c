"""Options of groups as numbers: a row of a matrix for each group, a column for each name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import is_, is_not
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._engines import is_capturing, is_traced, to_device
from .storage import IN_GROUPS

# columns that every optimizer has, before those of its rule
COMMON = ("maximize", "max_grad_norm", "clip_eps", "ema_decay")


class TensorOption(NamedTuple):
    """An option that lives on a device, and the column it belongs to."""

    column: int
    value: Tensor


@dataclass(slots=True)
class GroupOptions:
    """The options of a group as they were read."""

    names: tuple[str, ...]
    values: list[Any]
    numbers: list[float]
    tensors: list[TensorOption]
    # whether one is a tensor or a list, which may change in place
    is_mutable: bool

    def in_table(self) -> tuple[list[float], list[int]]:
        """The numbers as tables have them, and the columns in which they are placeholders of tensors."""
        return self.numbers, [tensor.column for tensor in self.tensors]

    @property
    def limit(self) -> float:
        return self.numbers[COMMON.index("max_grad_norm")]

    @property
    def has_host_tensors(self) -> bool:
        flat = (v for value in self.values for v in (value if isinstance(value, tuple) else (value,)))
        return any(isinstance(v, Tensor) and v.device.type == "cpu" for v in flat)

    def changed(self, group: dict[str, Any]) -> list[Any] | None:
        """The values that these options have now, if one may have changed."""
        values = [*map(group.get, self.names)]
        return values if self.is_mutable or not all(map(is_, values, self.values)) else None

    def changed_numbers(self, values: list[Any], columns: dict[str, int]) -> dict[int, float] | None:
        """The numbers that differ from those that were read, by column; None if not only numbers may differ."""
        if self.is_mutable:
            return None
        changed = [*compress(range(len(values)), map(is_not, values, self.values))]
        if not all(type(values[k]) is float and self.names[k] in columns for k in changed):
            return None
        return {columns[self.names[k]]: values[k] for k in changed}

    def take(self, values: list[Any], numbers: dict[int, float]) -> None:
        self.values = values
        for column, number in numbers.items():
            self.numbers[column] = number


class Options:
    """The options of all groups, and their numbers as tables have them: a row for each group."""

    _groups: list[GroupOptions]

    def __init__(self, optimizer: Any, known: Options | None) -> None:
        """Groups that are `known` from an earlier plan, and have not changed, are not read again."""
        groups, before = optimizer.param_groups, [] if known is None else known._groups
        self._groups = [
            before[i] if i < len(before) and before[i].changed(group) is None else read_group(optimizer, i)
            for i, group in enumerate(groups)
        ]
        self.numbers = np.array([options.numbers for options in self._groups])
        # groups whose numbers tables do not have yet
        self._stale: set[int] = set()

    def take_in(self, optimizer: Any) -> None:
        """Read the options of groups that were added."""
        seen = len(self._groups)
        self._groups += [read_group(optimizer, i) for i in range(seen, len(optimizer.param_groups))]
        self.numbers = np.array([options.numbers for options in self._groups])

    @property
    def clips(self) -> bool:
        """Whether any group has a limit for the norm of its gradients."""
        return any(options.limit > 0 for options in self._groups)

    @property
    def has_host_tensors(self) -> bool:
        return any(options.has_host_tensors for options in self._groups)

    @property
    def is_stale(self) -> bool:
        return bool(self._stale)

    def changed(self, groups: Sequence[dict[str, Any]]) -> dict[int, list[Any]]:
        """The options of groups in which one may have changed, by the places of the groups."""
        pairs = enumerate(zip(self._groups, groups, strict=True))
        return {i: now for i, (options, group) in pairs if (now := options.changed(group)) is not None}

    def read_again(self, optimizer: Any, changed: dict[int, list[Any]]) -> None:
        """Read the options of these groups, for the next `upload`."""
        numbers = {i: self._groups[i].changed_numbers(now, optimizer.columns) for i, now in changed.items()}
        read = {i: read_group(optimizer, i) for i, found in numbers.items() if found is None}
        # columns of tensors are compared, too: a number may equal the placeholder of a tensor
        stale = [i for i in changed if i not in read or read[i].in_table() != self._groups[i].in_table()]
        _check_upload(stale)
        # whatever can raise has done so
        for i, found in numbers.items():
            if found is None:
                self._groups[i] = read[i]
            else:
                self._groups[i].take(changed[i], found)
        self._stale.update(stale)

    def replace(self, i: int, options: GroupOptions) -> GroupOptions:
        """Give group `i` these options, for the next `upload`; returns those that it had."""
        before, self._groups[i] = self._groups[i], options
        if options.in_table() != before.in_table():
            self._stale.add(i)
        return before

    def upload(self, tables: Sequence[Any]) -> None:
        """Copy to the tables options that have changed, and options that are tensors on a device."""
        if self._stale:
            stale = [*self._stale]
            self.numbers[stale] = [self._groups[i].numbers for i in stale]
            self._stale.clear()
            for table in tables:
                table.set_options(self.numbers)
        devices = {table.device for table in tables}
        for i, options in enumerate(self._groups):
            for column, value in options.tensors:
                # once for all tables of a device: to the host, it waits
                there = {device: to_device(value, device) for device in devices}
                for table in tables:
                    table.set_tensor_option(i, column, there[table.device])


def _check_upload(stale: list[int]) -> None:
    """Raise if options of these groups cannot be copied to the device."""
    if stale and is_capturing():
        raise RuntimeError(
            "an option of a group has changed since the last step, and cannot be copied to the device while "
            "a CUDA graph is captured; take one more step() before the capture, or change the option after "
            "it, which needs no new capture"
        )


def is_sequence(value: Any) -> bool:
    """Whether an option is several values: a tuple, or whatever a configuration file makes of one."""
    return (
        hasattr(value, "__len__")
        and hasattr(value, "__getitem__")
        and not isinstance(value, (str, Tensor, Mapping))
    )


def read_group(optimizer: Any, i: int) -> GroupOptions:
    """The options of group `i`, in the columns of `COMMON` and then of the optimizer's `scalar_options`."""
    group, place = optimizer.param_groups[i], optimizer.place_of_group(i)
    limit, decay = optimizer.limit(group), group.get("ema_decay")
    numbers: list[float] = [float(bool(group["maximize"]))]
    tensors: list[TensorOption] = []
    common = ("max_grad_norm", limit), ("clip_eps", optimizer.clip_eps), ("ema_decay", decay)
    own = ((name, optimizer.number(name, optimizer.option(group, name))) for name in optimizer.options)
    for name, value in (*((name, 0 if value is None else value) for name, value in common), *own):
        for number in _numbers(name, value, place, len(optimizer.options.get(name, (name,)))):
            if isinstance(number, Tensor):
                tensors.append(TensorOption(len(numbers), number))
            # a placeholder; not 0, which turns some options off
            numbers.append(1.0 if isinstance(number, Tensor) else number)
    names = (*optimizer.all_options, *IN_GROUPS)
    values = [*map(group.get, names)]
    return GroupOptions(names, values, numbers, tensors, any(map(_is_mutable, values)))


def _is_mutable(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_is_mutable, value))
    return not isinstance(value, (int, float, str, type(None), torch.dtype))


def _numbers(name: str, option: Any, group: int, count: int) -> Iterable[float | Tensor]:
    """The numbers in a group's option: one, or a pair; a tensor on a device stays a tensor."""
    if count > 1 and not (is_sequence(option) and len(option) == count):
        words = {2: "two", 3: "three"}
        raise ValueError(f"group {group} has {name}={option!r}; {words[count]} numbers are needed")
    for value in option if count > 1 else (option,):
        # the usual case
        if type(value) is float:
            yield value
            continue
        try:
            if isinstance(value, Tensor) and value.numel() == 1 and (not value.is_cpu or is_traced()):
                yield value.detach().reshape(())
            else:
                # plus 0: a string is no number, though float() would read it
                yield float(value.detach() if isinstance(value, Tensor) else value + 0)
        except (TypeError, ValueError, RuntimeError) as error:
            message = f"group {group} has {name}={option!r}; use a number or a one-element tensor"
            raise TypeError(message) from error
