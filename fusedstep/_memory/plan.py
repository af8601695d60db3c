"""Which tables an optimizer's step works on: built once, and brought up to date before every step.

A gradient that goes or comes switches its row; what moved has its address written again; a gradient of another
layout changes its row; a first gradient, or a state of another kind, has its row made anew. Only what changes
the set of rows or their programs builds new tables, and even these take over the rows that are still right.
A plan keeps no gradient alive, and no state that was replaced in its dict; it holds the dicts until the next
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from .._algorithm.program import StepSpec
from .._engines import FOUND, SKIP, SKIPPED, Amp, is_watched, to_device
from . import group_scalars, offload, shards
from .bucket import Bucket
from .options import COMMON, Options, TensorOption, read_group
from .row import Memory, Row, Settings, check_sums, make_row, program_of
from .stages import take_turns
from .stepping import step
from .table import Table, make_tables, new_status

_params = itemgetter("params")
# how many parameters an error lists
_MOST_NAMES = 8


def names_in(groups: Sequence[dict[str, Any]]) -> dict[Tensor, str]:
    """Of parameters that were given with their names, as `model.named_parameters()` does."""
    named = (zip(group["params"], group.get("param_names", ()), strict=False) for group in groups)
    return dict(chain.from_iterable(named))


def _status(settings: Settings, previous: Tensor | None) -> Tensor:
    """The status of an optimizer that has nothing to step."""
    here = torch.device("cpu") if previous is None else previous.device
    return new_status(here if settings.norm_ranks is None else settings.norm_ranks.device)


class Plan:
    """The tables of an optimizer, and whether they still describe it."""

    tables: list[Table]
    _options: Options

    # inference tensors cannot be written outside inference mode, so none is allocated here
    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, optimizer: Any, spec: StepSpec, status: Tensor | None, old: Plan | None = None) -> None:
        """`spec` without `clips`, which options tell; rows of an `old` plan are taken over if they can be."""
        groups = optimizer.param_groups
        self._names = names_in(groups)
        memory = Memory(optimizer.state, optimizer.unsaved_steps, self._names)
        self._members = [[*members] for members in map(_params, groups)]
        params = [*chain.from_iterable(self._members)]
        if len(set(map(id, params))) != len(params):
            raise ValueError(
                f"{optimizer.settings.owner} was given a parameter twice and would update it twice at once; "
                "pass every parameter once, for example list(dict.fromkeys(params))"
            )
        everything = optimizer.all_params
        for gone in optimizer.unsaved_steps.keys() - set(everything):
            del optimizer.unsaved_steps[gone]
        self.updates = [*map(optimizer.update_of, groups)]
        group_scalars.place(groups, self.updates)
        self._options = Options(optimizer, None if old is None else old._options)
        self.spec, self._watched, self._norm_group = spec, is_watched(), optimizer.norm_group
        self._storage = optimizer.storage
        self._settings = optimizer.settings._replace(spec=spec._replace(clips=self._options.clips))
        if self._norm_group is not None:
            shards.check_counted_once(self._norm_group, params, self._settings.owner)
        kept = {} if old is None or self._watched else old.rows_for(self._settings, optimizer)
        rows = [
            self._row(p, i, kept.get(id(p)), memory)
            for i, members in enumerate(self._members)
            for p in members
            if p.grad is not None or _expects_gradient(p)
        ]
        positions = {id(p): i for i, p in enumerate(everything)}
        for row in rows:
            row.position = positions[id(row.param)]
        # of those without gradient nothing is known where every operation is watched
        rows = [row for row in rows if row.started or not self._watched]
        take_turns(rows, self._settings.workspace_bytes)
        offload.take_turns(rows)
        # others have no row, and get one with their first gradient
        self._frozen = [p for p in params if p.grad is None and (self._watched or not _expects_gradient(p))]
        names = [*COMMON, *optimizer.scalar_options]
        self.tables = make_tables(rows, self._options.numbers, names, self._settings)

        self._check_sums_over_all()
        offload.check_away(optimizer, rows)
        self._group_scalars = group_scalars.found_in(self.tables)
        # everything is allocated and compiled
        statuses = [table.status for table in self.tables] or [_status(self._settings, status)]
        self.status = statuses[0]
        if status is not None:
            for each in statuses:
                each[SKIPPED] = to_device(status[SKIPPED], each.device)
        for row in rows:
            if row.started and row.kinds:
                row.keep_once(memory)
            elif row.started:
                row.commit(memory)
        self._options.upload(self.tables)
        self._note_states(optimizer.state)
        for bucket in self.buckets:
            bucket.start()

    def _check_sums_over_all(self) -> None:
        programs = [bucket.program for bucket in self.buckets]
        if not any(program.sums_over_all for program in programs):
            return
        owner = self._settings.owner
        if len({update.rule for update in self.updates}) > 1:
            raise TypeError(
                f"{owner} has groups with different rules, and one of them sums over all tensors; use one rule "
                "for all groups, or an optimizer for each rule"
            )
        if self._norm_group is not None:
            raise TypeError(f"{owner} has a rule that sums over all tensors, which norm_group does not reach")
        places = {tuple(p.summed_over_all(k) for k in range(len(p.sweeps))) for p in programs}
        assert len(places) == 1, "programs of one rule that have their sums in different places"

    def _row(self, p: Tensor, group: int, kept: Row | None, memory: Memory) -> Row:
        update = self.updates[group]
        if kept is None or kept.update != update:
            return make_row(p, update, group, memory, self._settings)
        check_sums(p, update.rule, self._settings)
        kept.group, kept.program = group, program_of(update, self._settings.spec, kept.formats)
        return kept

    def rows_for(self, settings: Settings, optimizer: Any) -> dict[int, Row]:
        """Rows that a plan with these settings may take over, by the identity of their parameter."""
        if settings._replace(spec=self._settings.spec) != self._settings or self._watched:
            return {}
        self._find_states(optimizer.state)
        right: dict[int, Row] = {}
        for bucket in self.buckets:
            changes = None if bucket.refresh() else bucket.find_changes()
            changed = {*changes.kept, *changes.grads} if changes else ()
            for i, row in enumerate(bucket.rows):
                if row.started and (i not in changed or row.is_right()):
                    right[id(row.param)] = row
                    row.once |= {name: row.state.get(name, 0.0) for name in row.program.kept_once}
        return right

    @property
    def buckets(self) -> list[Bucket]:
        return [bucket for table in self.tables for bucket in table.buckets]

    def refresh(self, optimizer: Any, spec: StepSpec) -> bool:
        """Bring everything up to date; False if another plan is needed."""
        if spec != self.spec or is_watched() != self._watched or optimizer.norm_group is not self._norm_group:
            return False
        if optimizer.storage is not self._storage or optimizer.seed != self._settings.seed:
            return False
        return (
            self._has_members(optimizer.param_groups)
            and self._refresh_options(optimizer)
            and not any(p.grad is not None for p in self._frozen)
            and self._refresh_rows(optimizer)
        )

    def _has_members(self, groups: list[dict[str, Any]]) -> bool:
        """Whether the groups have the parameters they had."""
        members = [*map(_params, groups)]
        return [*map(len, members)] == [*map(len, self._members)] and all(
            map(is_, chain.from_iterable(members), chain.from_iterable(self._members))
        )

    # rows

    def _refresh_rows(self, optimizer: Any) -> bool:
        self._find_states(optimizer.state)
        changed = [(table, each) for table in self.tables for each in table.buckets if not each.refresh()]
        if any(counts.has_moved() for table in self.tables for counts in table.counters):
            return False
        return not changed or self._settle(changed, optimizer)

    @torch.no_grad()
    def _settle(self, changed: list[tuple[Table, Bucket]], optimizer: Any) -> bool:
        """Make rows anew where that is needed in these buckets, and note what all of their rows have."""
        changes = [bucket.find_changes() for _, bucket in changed]
        doubtful = [sorted({*each.kept, *each.grads, *each.recounted}) for each in changes]
        for (table, bucket), places in zip(changed, doubtful, strict=True):
            if any(counts.has_lost([bucket.first_row + i for i in places]) for counts in table.counters):
                return False
        memory = Memory(optimizer.state, optimizer.unsaved_steps, self._names)
        # all of them before a state or table is changed
        made = [
            {i: self._make_again(bucket.rows[i], memory) for i in bucket.stale_rows(each, self._settings)}
            for (_, bucket), each in zip(changed, changes, strict=True)
        ]
        for (_, bucket), rows in zip(changed, made, strict=True):
            if not all(row.fits_in_place_of(bucket.rows[i]) for i, row in rows.items()):
                return False
        for (_, bucket), rows in zip(changed, made, strict=True):
            for i, row in rows.items():
                bucket.rows[i] = row
        # all of them before one is written: rows may have exchanged their states, and so their counts
        started = [
            {bucket.first_row + i: bucket.rows[i] for i in places if bucket.rows[i].started}
            for (_, bucket), places in zip(changed, doubtful, strict=True)
        ]
        for (table, _), by_place in zip(changed, started, strict=True):
            table.find_counts(by_place)
        for (table, bucket), by_place, rows, places in zip(changed, started, made, doubtful, strict=True):
            table.adopt_counts(by_place, memory)
            for row in rows.values():
                row.commit(memory)
            bucket.settle(places)
        self._note_states(optimizer.state)
        return all(bucket.refresh() for _, bucket in changed)

    def _make_again(self, row: Row, memory: Memory) -> Row:
        made = make_row(row.param, row.update, row.group, memory, self._settings, row.explicit_grad)
        made.position, made.turn = row.position, row.turn
        return made

    def _find_states(self, state: dict[Tensor, dict[str, Any]]) -> None:
        """Follow state dicts that were replaced."""
        same_keys = len(state) == len(self._state_keys) and all(map(is_, state, self._state_keys))
        if same_keys and all(map(is_, state.values(), self._states)):
            return
        for bucket in self.buckets:
            for row in bucket.rows:
                found = state.get(row.param)
                if found is not row.state and (found is not None or row.state):
                    row.state = {} if found is None else found
            bucket.follow_states()
        self._note_states(state)

    def _note_states(self, state: dict[Tensor, dict[str, Any]]) -> None:
        self._states, self._state_keys = [*state.values()], [*state]

    def forget_states(self) -> None:
        """Keep none alive that is about to be replaced."""
        self._states, self._state_keys = [], []
        for bucket in self.buckets:
            for row in bucket.rows:
                row.state = {}
                # one whose count is not saved starts over, as it would in another process; so does one on the
                # host, for what is loaded is not pinned
                row.started = row.started and row.program.saves_step and not row.home.is_away
            if all(row.started for row in bucket.rows):
                bucket.follow_states()
            else:
                bucket.forget()

    def close(self) -> None:
        """Let go of everything, when another plan takes its place or a step has failed."""
        self._states, self._state_keys = [], []
        for table in self.tables:
            # the two hold each other, and with them every tensor, until the garbage collector comes
            del table.executable
            for bucket in table.buckets:
                bucket.tensors = []

    def keep_group_scalars(self, groups: list[dict[str, Any]]) -> None:
        if self._group_scalars:
            group_scalars.keep(self._group_scalars, groups)

    # options

    def _refresh_options(self, optimizer: Any) -> bool:
        """Bring to the device what has changed in the groups' options; False if they need another plan."""
        groups = optimizer.param_groups
        if not group_scalars.are_placed(self._group_scalars, groups):
            return False
        changed = self._options.changed(groups)
        if not changed and not self._options.is_stale:
            return True
        if any(optimizer.update_of(groups[i]) != self.updates[i] for i in changed):
            return False
        self._options.read_again(optimizer, changed)
        if self._options.clips != self._settings.spec.clips:
            return False
        self._options.upload(self.tables)
        return True

    def refresh_group(self, optimizer: Any, i: int) -> None:
        """The same for one group, between replays of a captured step."""
        found = read_group(optimizer, i)
        before = self._options.replace(i, found)
        problem = None
        if optimizer.update_of(optimizer.param_groups[i]) != self.updates[i] or (
            self._options.clips != self._settings.spec.clips
        ):
            problem = (
                "this option makes it another one; call optimizer.release_graph() first, and capture anew "
                "afterwards"
            )
        elif [*map(_place, found.tensors)] != [*map(_place, before.tensors)]:
            problem = (
                "reads options that were tensors from them; fill them in place instead of setting others, or "
                "call optimizer.release_graph() and capture anew"
            )
        if problem is not None:
            self._options.replace(i, before)
            raise RuntimeError(f"a CUDA graph has captured step(), and {problem}")
        self._options.upload(self.tables)

    def check_capturable(self, optimizer: Any) -> None:
        """Raise where a replay would not do what a step does."""
        if self._options.has_host_tensors:
            raise RuntimeError(
                "an option of a group is a tensor on the CPU, which a CUDA graph would not read again; use a "
                "number, or a tensor on the device"
            )
        ranks = self._settings.norm_ranks
        if ranks is not None and ranks.device.type == "cpu":
            raise RuntimeError(
                "the ranks of norm_group talk on the host, which a CUDA graph does not replay; use one that "
                "talks on the device, such as torch.distributed.new_group(backend='nccl')"
            )

    # a step

    def step(self, amp: Amp, raises: bool = False) -> None:
        """Take a step; if it `raises`, not where a gradient holds NaN or inf, which waits for the device."""
        found = step(self.tables, amp, self._settings, self._check_finite if raises else None)
        for bucket in self.buckets:
            if bucket.engine.BY_ADDRESS:
                bucket.count_writes(self.spec)
            bucket.tensors = []
        if not self.tables:
            # filled where they are: a number or tensor of the host that is assigned waits for the device
            self.status[FOUND].zero_()
            for number in found:
                self.status[FOUND].add_(number)
            self.status[SKIP] = self.status[FOUND] != 0
            self.status[SKIPPED] += self.status[SKIP]

    def _check_finite(self, measured: Sequence[Tensor]) -> None:
        """Raise where gradients are not finite, here or on other ranks."""
        found = []
        for table in self.tables:
            for bucket in table.buckets:
                counts = table.sums[dict(bucket.program.fold_names)["nonfinite"]].tolist()
                found += [
                    self._called(bucket.rows[i]) for i in bucket.live if counts[bucket.first_row + i] != 0
                ]
        if not found and self._settings.norm_ranks is not None and any(float(t[1].sum()) for t in measured):
            found = ["parameters of other ranks"]
        if found:
            more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
            raise FloatingPointError(
                f"{self._settings.owner} found NaN or inf in the gradients of {', '.join(found[:_MOST_NAMES])}"
                f"{more}, and has updated nothing; look for what made them, or use skip_nonfinite=True to skip "
                "such steps"
            )

    def _called(self, row: Row) -> str:
        """A parameter as a reader knows it: by its name, if it has one."""
        if row.param in self._names:
            return repr(self._names[row.param])
        place = [*map(id, self._members[row.group])].index(id(row.param))
        return f"parameter {place} of group {row.group}, shape {tuple(row.param.shape)}"

    @property
    def has_rows(self) -> bool:
        """Whether any parameter has ever had a gradient."""
        return any(row.started for table in self.tables for row in table.rows)

    @property
    def has_status(self) -> bool:
        """Whether there is anybody to decide whether a step is taken."""
        return self.has_rows or self._norm_group is not None


def _expects_gradient(p: Tensor) -> bool:
    """Not a frozen parameter, nor one of a lazy module, which has no shape yet."""
    return p.requires_grad and not isinstance(p, UninitializedParameter)


def _place(option: TensorOption) -> tuple[int, int]:
    return option.column, option.value.data_ptr()
