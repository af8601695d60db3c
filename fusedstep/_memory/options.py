"""Options of groups as numbers: a row of a matrix for each group, a column for each name."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._engines import is_traced
from .storage import IN_GROUPS

# columns that every optimizer has, before those of its rule
COMMON = ("maximize", "max_grad_norm", "clip_eps", "ema_decay")


class TensorOption(NamedTuple):
    """An option that lives on a device, and the column it belongs to."""

    column: int
    value: Tensor


class GroupOptions(NamedTuple):
    """The options of a group as they were read."""

    names: tuple[str, ...]
    values: list[Any]
    numbers: list[float]
    tensors: list[TensorOption]
    # whether one is a tensor or a list, which may change in place
    is_mutable: bool

    def in_table(self) -> tuple[list[float], list[int]]:
        """The numbers as tables have them, and the columns in which these only stand for tensors."""
        return self.numbers, [tensor.column for tensor in self.tensors]

    @property
    def limit(self) -> float:
        return self.numbers[COMMON.index("max_grad_norm")]

    @property
    def has_host_tensors(self) -> bool:
        flat = (v for value in self.values for v in (value if isinstance(value, tuple) else (value,)))
        return any(isinstance(v, Tensor) and v.device.type == "cpu" for v in flat)

    def changed(self, group: dict[str, Any]) -> bool:
        return self.is_mutable or not all(map(is_, map(group.get, self.names), self.values))


def is_sequence(value: Any) -> bool:
    """Whether an option is several values: a tuple, or whatever a configuration file makes of one."""
    return (
        hasattr(value, "__len__")
        and hasattr(value, "__getitem__")
        and not isinstance(value, (str, Tensor, dict))
    )


def read_group(optimizer: Any, i: int) -> GroupOptions:
    """The options of group `i`, in the columns of `COMMON` and then of the optimizer's `scalar_options`."""
    group = optimizer.param_groups[i]
    limit, decay = optimizer.limit(group), group.get("ema_decay")
    numbers: list[float] = [float(bool(group["maximize"]))]
    tensors: list[TensorOption] = []
    common = ("max_grad_norm", limit), ("clip_eps", optimizer.clip_eps), ("ema_decay", decay)
    own = ((name, optimizer.number(name, optimizer.option(group, name))) for name in optimizer.options)
    for name, value in (*((name, 0 if value is None else value) for name, value in common), *own):
        for number in _numbers(name, value, i, len(optimizer.options.get(name, (name,)))):
            if isinstance(number, Tensor):
                tensors.append(TensorOption(len(numbers), number))
            # not 0, which for some means off
            numbers.append(1.0 if isinstance(number, Tensor) else number)
    names = (*optimizer.all_options, *IN_GROUPS)
    values = [*map(group.get, names)]
    return GroupOptions(names, values, numbers, tensors, any(map(_is_mutable, values)))


def read_again(optimizer: Any, i: int, before: GroupOptions) -> GroupOptions:
    """The same where some may have changed since `before`: mostly one, and that a number."""
    group, names = optimizer.param_groups[i], before.names
    if not before.is_mutable:
        values = [*map(group.get, names)]
        changed = [k for k, value in enumerate(values) if value is not before.values[k]]
        columns = [optimizer.columns.get(names[k]) for k in changed]
        if None not in columns and all(type(values[k]) is float for k in changed):
            numbers = [*before.numbers]
            for k, column in zip(changed, columns, strict=True):
                numbers[column] = values[k]
            return before._replace(values=values, numbers=numbers)
    return read_group(optimizer, i)


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
        if type(value) is float:  # mostly
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
