"""Which tables an optimizer's step works on, built once and checked every step.

A gradient that vanishes switches its row off; one that moves rewrites its address; anything else that changes
(another parameter, dtype, shape, rule) builds the plan anew. A plan keeps no gradient alive, and a state only
until the next step finds it gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import _scan, _shards
from ._arguments import is_sequence
from ._entry import Entry, Known, Settings, make_entry
from ._passes import Besides, complete
from ._table import Amp, clips, make_tables, new_status, step, upload
from .engines import FOUND, OPTIONS, SKIP, SKIPPED, is_capturing, is_traced, is_watched

_params = itemgetter("params")


def _numbers(name: str, option: Any, group: int, pair: bool) -> Iterable[float | Tensor]:
    """The numbers in a group's option: one, or a pair; a tensor on a device stays a tensor."""
    if pair and not (is_sequence(option) and len(option) == 2):
        raise ValueError(f"group {group} has {name}={option!r}; two numbers are needed")
    stays = is_traced()
    for value in option if pair else (option,):
        try:
            if isinstance(value, Tensor) and value.numel() == 1 and (value.device.type != "cpu" or stays):
                yield value.detach().reshape(())
            else:
                # plus 0: a string is no number, though float() would read it
                yield float(value.detach() if isinstance(value, Tensor) else value + 0)
        except (TypeError, ValueError, RuntimeError) as error:
            message = f"group {group} has {name}={option!r}; use a number or a one-element tensor"
            raise TypeError(message) from error


def _values(optimizer: Any) -> Iterable[Any]:
    """All options of all groups, pairs one by one."""
    for group in optimizer.param_groups:
        for value in map(group.get, optimizer.all_options):
            yield from value if isinstance(value, tuple) else (value,)


def names_in(groups: Sequence[dict[str, Any]]) -> dict[Tensor, str]:
    """Of parameters that were given with their names, as `model.named_parameters()` does."""
    named = (zip(group["params"], group.get("param_names", ()), strict=False) for group in groups)
    return dict(chain.from_iterable(named))


# how many an error lists
_MOST_NAMES = 8

# group, column and value of a hyper-parameter that lives on a device
Cell = tuple[int, int, Tensor]


def _place(cell: Cell) -> tuple[int, int, int]:
    return *cell[:2], cell[2].data_ptr()


def _status(settings: Settings, previous: Tensor | None) -> Tensor:
    """The status of an optimizer that has nothing to step."""
    here = torch.device("cpu") if previous is None else previous.device
    return new_status(here if settings.others is None else settings.others.device)


class Plan:
    """The tables of an optimizer, and whether they still describe it."""

    _hyper: np.ndarray
    _cells: list[Cell]
    _volatile: bool

    # what is made here is written later, in whatever mode
    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, optimizer: Any, besides: Besides, previous: Tensor | None) -> None:
        groups = optimizer.param_groups
        known = Known(optimizer.state, optimizer.unsaved_steps, names_in(groups))
        self._members = [[*members] for members in map(_params, groups)]
        params = [*chain.from_iterable(self._members)]
        if len(set(map(id, params))) != len(params):
            raise ValueError(
                f"{optimizer.settings.owner} was given a parameter twice and would update it twice at once; "
                "pass every parameter once, for example list(dict.fromkeys(params))"
            )
        self._kinds = [*map(optimizer.kind, groups)]
        for gone in optimizer.unsaved_steps.keys() - set(params):
            del optimizer.unsaved_steps[gone]
        self._read_options(optimizer)

        self.besides, self._watched, self._names = besides, is_watched(), known.names
        measures = besides.guards or clips(self._hyper)
        self._settings = settings = optimizer.settings._replace(besides=besides._replace(measures=measures))
        self._norm_group = optimizer.norm_group
        if self._norm_group is not None:
            _shards.check_counted_once(self._norm_group, params, settings.owner)
        self._pending: list[Tensor] = []
        entries: list[Entry] = []
        for i, (rule, averages) in enumerate(self._kinds):
            rule = complete(rule, settings.besides, averages)
            for p in self._members[i]:
                if p.grad is None:
                    self._pending.append(p)
                else:
                    entries.append(make_entry(p, rule, i, known, settings))
        self.tables = make_tables(entries, self._hyper, settings)

        # everything is allocated and compiled
        statuses = [table.status for table in self.tables] or [_status(settings, previous)]
        self.status = statuses[0]
        if previous is not None:
            for status in statuses:
                status[SKIPPED] = _shards.moved(previous[SKIPPED], status.device)
        for entry in entries:
            entry.commit(known)
        for table in self.tables:
            if not all(bucket.survey() for bucket in table.buckets):
                raise RuntimeError(
                    "a parameter changed while its step was prepared; is another thread at work?"
                )
        self._copy_cells()
        self._record(optimizer)

    def _record(self, optimizer: Any) -> None:
        """Remember what the optimizer holds now, for the next step to compare."""
        groups, state = optimizer.param_groups, optimizer.state
        self._states = [values for values in state.values() if values]
        self._scan: Any = None
        if _scan.Groups.can_read(groups, state):
            options = () if self._volatile else optimizer.all_options
            self._scan = _scan.Groups(groups, options, state, self._pending)

    def describes(self, optimizer: Any, besides: Besides) -> bool:
        """Whether this is still the optimizer's plan, once brought up to date with what only moved."""
        if besides != self.besides or is_watched() != self._watched:
            return False
        if optimizer.norm_group is not self._norm_group:
            return False
        groups = optimizer.param_groups
        verdict = _scan.UNSURE if self._scan is None else self._scan.look(groups, optimizer.state)
        was_volatile = self._volatile
        if verdict == _scan.UNSURE and not self._holds(optimizer):
            return False
        if (verdict != _scan.SAME or self._volatile) and not self._refresh_options(optimizer):
            return False
        if not all(table.refresh() for table in self.tables):
            return False
        if verdict == _scan.UNSURE or self._volatile != was_volatile:
            self._record(optimizer)
        elif verdict == _scan.MOVED:
            self._scan.renew_options(groups)
        return True

    def _holds(self, optimizer: Any) -> bool:
        """Whether the optimizer has the parameters and states it had, looked at in Python."""
        members = [*map(_params, optimizer.param_groups)]
        # whoever asks for the state of a parameter without one leaves an empty dict
        states = [values for values in optimizer.state.values() if values]
        return (
            [*map(len, members)] == [*map(len, self._members)]
            and all(map(is_, chain.from_iterable(members), chain.from_iterable(self._members)))
            and len(states) == len(self._states)
            and all(map(is_, states, self._states))
            and all(p.grad is None for p in self._pending)
        )

    def _refresh_options(self, optimizer: Any) -> bool:
        """Bring to the device what has changed in the groups' options; False if they need another plan."""
        if [*map(optimizer.kind, optimizer.param_groups)] != self._kinds:
            return False
        before = self._hyper, self._cells, self._volatile
        self._read_options(optimizer)
        if clips(before[0]) != clips(self._hyper):
            self._hyper, self._cells, self._volatile = before
            return False
        self._upload_options(*before[:2])
        return True

    def refresh_group(self, optimizer: Any, i: int) -> None:
        """The same for one group, between replays of a captured step."""
        group, hyper = optimizer.param_groups[i], self._hyper.copy()
        hyper[i], cells = self._row(optimizer, i)
        if optimizer.kind(group) != self._kinds[i] or clips(hyper) != clips(self._hyper):
            raise RuntimeError(
                "a CUDA graph has captured step(), and this option makes it another one; call "
                "optimizer.release_graph() first, and capture anew afterwards"
            )
        if [*map(_place, cells)] != [_place(cell) for cell in self._cells if cell[0] == i]:
            raise RuntimeError(
                "a CUDA graph has captured step(), and reads options that were tensors from them; fill them in "
                "place instead of setting others, or call optimizer.release_graph() and capture anew"
            )
        before, self._hyper = self._hyper, hyper
        self._upload_options(before, self._cells)

    def _upload_options(self, hyper: np.ndarray, cells: list[Cell]) -> None:
        """Copy to the device unless these were there already."""
        same = [cell[:2] for cell in cells] == [cell[:2] for cell in self._cells]
        if not same or not np.array_equal(hyper, self._hyper):
            if is_capturing():
                raise RuntimeError(
                    "an option of a group has changed since the last step, and cannot be brought to the device "
                    "while a CUDA graph is captured; take one more step() before, or change it afterwards: the "
                    "graph need not be captured again for that"
                )
            for table in self.tables:
                upload(self._hyper, table.hyper)
        self._copy_cells()

    def _read_options(self, optimizer: Any) -> None:
        """Hyper-parameters as a matrix, a row per group, in the columns that engines know."""
        rows, cells = zip(*(self._row(optimizer, i) for i in range(len(self._kinds))), strict=True)
        self._hyper = np.array(rows, np.float64)
        self._cells = [*chain.from_iterable(cells)]
        # anything but numbers and words and tuples of them may change in place, and is read anew every step
        self._volatile = not all(isinstance(v, (int, float, str, type(None))) for v in _values(optimizer))

    def _row(self, optimizer: Any, i: int) -> tuple[list[float], list[Cell]]:
        """A group's numbers, and which of them live on a device."""
        group, (rule, _) = optimizer.param_groups[i], self._kinds[i]
        limit, decay = optimizer.limit(group), group.get("ema_decay")
        common = ("max_grad_norm", limit), ("clip_eps", optimizer.clip_eps), ("ema_decay", decay)
        own = [(name, optimizer.number(name, group[name])) for name in optimizer.options]
        row, cells = [-1.0 if group["maximize"] else 1.0], []
        for name, value in (*((name, 0 if value is None else value) for name, value in common), *own):
            for number in _numbers(name, value, i, isinstance(optimizer.defaults.get(name), tuple)):
                if isinstance(number, Tensor):
                    cells.append((i, len(row), number))
                # not 0, which for some means off
                row.append(1.0 if isinstance(number, Tensor) else number)
        if len(row) != OPTIONS + rule.scalars.__code__.co_argcount - 1 - len(rule.inputs):
            raise ValueError(f"group {i} has too many or too few numbers in its options: {dict(own)}")
        return row, cells

    def check_capturable(self, optimizer: Any) -> None:
        """Raise where a replay would not do what a step does."""
        if any(isinstance(value, Tensor) and value.device.type == "cpu" for value in _values(optimizer)):
            raise RuntimeError(
                "an option of a group is a tensor on the CPU, which a CUDA graph would not read again; use a "
                "number, or a tensor on the device"
            )
        others = self._settings.others
        if others is not None and others.device.type == "cpu":
            raise RuntimeError(
                "the ranks of norm_group talk on the host, which a CUDA graph does not replay; use one that "
                "talks on the device, such as torch.distributed.new_group(backend='nccl')"
            )

    def _copy_cells(self) -> None:
        """Hyper-parameters that live on a device stay there."""
        for table in self.tables:
            for row, column, value in self._cells:
                table.hyper[row, column].copy_(value, non_blocking=True)

    def step(self, amp: Amp, raises: bool = False) -> None:
        """Take a step; if it `raises`, not where a gradient holds NaN or inf, which waits for the device."""
        found = step(self.tables, amp, self._settings, self._check_finite if raises else None)
        if not self.tables:
            # filled where they are: a number or tensor of the host that is assigned waits for the device
            self.status[FOUND].zero_()
            for number in found:
                self.status[FOUND].add_(number)
            self.status[SKIP] = self.status[FOUND] != 0
            self.status[SKIPPED] += self.status[SKIP]

    def _check_finite(self, measured: Sequence[Tensor]) -> None:
        """Raise where gradients are not finite, here or on other ranks."""
        # one that had none may have come to one since: tables keep what they summed
        counts = [table.sums[table.rule.named_sums["nonfinite"]].tolist() for table in self.tables]
        entries = [entry for table in self.tables for entry in table.entries]
        pairs = zip(entries, chain.from_iterable(counts), strict=True)
        found = [self._called(entry) for entry, count in pairs if count != 0 and entry.grad is not None]
        if not found and self._settings.others is not None and any(float(t[1].sum()) for t in measured):
            found = ["parameters of other ranks"]
        if found:
            more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
            raise FloatingPointError(
                f"{self._settings.owner} found NaN or inf in the gradients of {', '.join(found[:_MOST_NAMES])}"
                f"{more}, and has updated nothing; look for what made them, or use skip_nonfinite=True to skip "
                "such steps"
            )

    def _called(self, entry: Entry) -> str:
        """A parameter as a reader knows it: by its name, if it has one."""
        if entry.param in self._names:
            return repr(self._names[entry.param])
        place = [*map(id, self._members[entry.group])].index(id(entry.param))
        return f"parameter {place} of group {entry.group}, shape {tuple(entry.param.shape)}"

    @property
    def decides(self) -> bool:
        """Whether there is anybody to decide whether a step is taken."""
        return bool(self.tables) or self._norm_group is not None
