"""The tables that an optimizer's step works on: built once, and brought up to date before every step.

Most changes are handled in place: a gradient that comes or goes switches its row, a tensor that moved has its
address written again, a first gradient or a state of another kind replaces one row. Parameters that come later
get tables of their own, which are joined with the others after a while. Only if a program changes or a row goes
are all tables made again, which take over rows that are still right. A plan keeps no gradient alive, and no
state that was replaced in its dict; it holds the dicts until the next step.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .._algorithm.program import StepSpec
from .._engines import FOUND, SKIP, SKIPPED, Amp, is_watched, to_device
from .._engines.objects import same
from . import group_scalars, offload, shards
from .bucket import Bucket
from .names import names_in
from .needs import Needs, program_of
from .nonfinite import check_finite
from .options import COMMON, Options, TensorOption, read_group
from .row import Memory, Row, check_sums, has_row, make_row
from .settings import Settings, Update
from .stages import take_turns
from .stepping import check_sums_over_all, step
from .table import Table, make_tables, new_status

_params = itemgetter("params")
# how many tables may come later, and how many steps after the last of them all tables are joined
_MOST_LATER, _STEPS_TO_JOIN = 8, 100


def _status(settings: Settings, previous: Tensor | None) -> Tensor:
    """The status of an optimizer that has nothing to step."""
    here = torch.device("cpu") if previous is None else previous.device
    return new_status(here if settings.norm_ranks is None else settings.norm_ranks.device)


class Plan:
    """The tables of an optimizer, and whether they still describe it."""

    tables: list[Table]
    options: Options

    # inference tensors cannot be written outside inference mode, so none is allocated here
    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, optimizer: Any, spec: StepSpec, status: Tensor | None, old: Plan | None = None) -> None:
        """`spec` leaves out `clips`, which options decide; rows of an `old` plan are taken over if possible."""
        groups = optimizer.param_groups
        self._names = names_in(groups)
        self._needs: dict[tuple, Needs] = {}
        memory = self._memory_of(optimizer)
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
        self.options = Options(optimizer, None if old is None else old.options)
        self.spec, self._watched, self._norm_group = spec, is_watched(), optimizer.norm_group
        self._storage = optimizer.storage
        self.settings = optimizer.settings._replace(spec=spec._replace(clips=self.options.clips))
        if self._norm_group is not None:
            shards.check_counted_once(self._norm_group, params, self.settings.owner)
        kept = {} if old is None or self._watched else old.rows_for(self.settings, optimizer)
        rows = self._rows(self._members, kept, memory, everything)
        # if every operation is watched, nothing is known of rows without a gradient
        rows = [row for row in rows if row.started or not self._watched]
        take_turns(rows, self.settings.workspace_bytes)
        offload.take_turns(rows)
        # parameters without a row, which get one with their first gradient
        with_row = {id(row.param) for row in rows}
        self._frozen = [p for p in params if p.grad is None and (self._watched or id(p) not in with_row)]
        self.tables = self._make_tables(rows, optimizer)
        # tables that came later, and in how many steps all are joined
        self._later, self._steps_to_join = 0, _STEPS_TO_JOIN

        check_sums_over_all(self.tables, {update.rule for update in self.updates}, self.settings)
        offload.check_away(optimizer, rows)
        self._group_scalars = group_scalars.found_in(self.tables)
        # everything is allocated and compiled
        self.status = self.tables[0].status if self.tables else _status(self.settings, status)
        self._begin(rows, self.tables, memory, self.status if status is None else status)

    def _memory_of(self, optimizer: Any) -> Memory:
        return Memory(optimizer.state, optimizer.unsaved_steps, self._names, self._needs)

    def _make_tables(self, rows: list[Row], optimizer: Any) -> list[Table]:
        return make_tables(rows, self.options.numbers, [*COMMON, *optimizer.scalar_options], self.settings)

    def _begin(self, rows: list[Row], tables: list[Table], memory: Memory, status: Tensor) -> None:
        """Give the optimizer what rows of new tables keep, and write all addresses."""
        for each in {id(t): t for t in (self.status, *(table.status for table in tables))}.values():
            each[SKIPPED] = to_device(status[SKIPPED], each.device)
        for row in (row for row in rows if row.started):
            if row.kinds:
                row.keep_once(memory)
            else:
                row.commit(memory)
        self.options.upload(self.tables)
        self._note_states(memory.state)
        for bucket in (bucket for table in tables for bucket in table.buckets):
            bucket.start()

    def _rows(
        self, members: list[list[Tensor]], kept: dict[int, Row], memory: Memory, everything: list[Tensor]
    ) -> list[Row]:
        """The rows of these members of each group, which may be taken from those that are kept."""
        positions = {id(p): i for i, p in enumerate(everything)}
        rows = [
            self._row(p, i, kept.get(id(p)), memory)
            for i, of_group in enumerate(members)
            for p in of_group
            if p.grad is not None or has_row(p, self.updates[i], memory)
        ]
        for row in rows:
            row.position = positions[id(row.param)]
        return rows

    def _row(self, p: Tensor, group: int, kept: Row | None, memory: Memory) -> Row:
        update = self.updates[group]
        if kept is None or kept.update != update:
            return make_row(p, update, group, memory, self.settings)
        check_sums(p, update.rule, self.settings)
        kept.group, kept.program = group, program_of(update, self.settings.spec, kept.formats)
        return kept

    def rows_for(self, settings: Settings, optimizer: Any) -> dict[int, Row]:
        """Rows that a plan with these settings may take over, by the identity of their parameter."""
        if settings._replace(spec=self.settings.spec) != self.settings or self._watched:
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

    def refresh(self, optimizer: Any, spec: StepSpec, settles: bool = True) -> bool:
        """Bring everything up to date; False if another plan is needed. Unless it `settles`, also if rows have
        to be made again, which copies and allocates what a graph must not repeat.
        """
        if spec != self.spec or is_watched() != self._watched or optimizer.norm_group is not self._norm_group:
            return False
        if optimizer.storage is not self._storage or optimizer.seed != self.settings.seed:
            return False
        return (
            self._has_members(optimizer.param_groups)
            and self._refresh_options(optimizer)
            and not (self._frozen and any(p.grad is not None for p in self._frozen))
            and self._refresh_rows(optimizer, settles)
        )

    @property
    def is_scattered(self) -> bool:
        """Whether it is time to join the tables that came later with the others."""
        return self._later > 0 and (self._later > _MOST_LATER or self._steps_to_join < 0)

    @torch.inference_mode(False)
    @torch.no_grad()
    def grow(self, optimizer: Any, spec: StepSpec) -> bool:
        """Bring everything up to date, with new tables for parameters of new groups and for frozen parameters
        with a first gradient; False if another plan is needed.
        """
        groups, seen = optimizer.param_groups, len(self._members)
        thawed = {id(p) for p in self._frozen if p.grad is not None}
        updates = [*map(optimizer.update_of, groups)]
        if (not thawed and len(groups) == seen) or not self._can_grow(spec, updates):
            return False
        if not self._has_members(groups[:seen]):
            return False
        later = [[p for p in members if id(p) in thawed] for members in self._members]
        later += [[*group["params"]] for group in groups[seen:]]
        everything = optimizer.all_params
        if len({*map(id, everything)}) != len(everything):
            return False
        self._names = names_in(groups)
        memory = self._memory_of(optimizer)
        self._members, self.updates = self._members + later[seen:], updates
        rows = self._rows(later, {}, memory, everything)
        self.options.take_in(optimizer)
        came = {id(row.param) for row in rows}
        self._frozen = [p for p in (*self._frozen, *chain(*later[seen:])) if id(p) not in came]
        # it may raise: what new rows keep is given to the optimizer only afterwards
        if self.options.clips != self.settings.spec.clips or not self.refresh(optimizer, spec):
            return False
        if rows:
            tables = self._make_tables(rows, optimizer)
            self.tables += tables
            self._later, self._steps_to_join = self._later + len(tables), _STEPS_TO_JOIN
            self._begin(rows, tables, memory, self.status)
        return True

    def _can_grow(self, spec: StepSpec, updates: list[Update]) -> bool:
        """Whether groups have the updates they had, and nothing of what is done now is done for all tables."""
        rules = {update.rule for update in updates}
        return (
            bool(self.tables)
            and updates[: len(self.updates)] == self.updates
            and not (self.is_scattered or self._watched or is_watched())
            and not (self.settings.offload or self._norm_group is not None)
            and not (self.settings.spec.measures_first or spec.measures_first or spec.collect_statistics)
            and not any(rule.stages or rule.sums_over_all or rule.group_scalars for rule in rules)
        )

    def _has_members(self, groups: list[dict[str, Any]]) -> bool:
        """Whether the groups have the parameters they had."""
        members = [*map(_params, groups)]
        if len(members) != len(self._members):
            return False
        if len(members) == 1:
            return same(members[0], self._members[0])
        there, before = ([*chain.from_iterable(each)] for each in (members, self._members))
        return [*map(len, members)] == [*map(len, self._members)] and same(there, before)

    # rows

    def _refresh_rows(self, optimizer: Any, settles: bool) -> bool:
        self._find_states(optimizer.state)
        changed = [(table, each) for table in self.tables for each in table.buckets if not each.refresh()]
        if any(counts.has_moved() for table in self.tables for counts in table.counters):
            return False
        return not changed or (settles and self._settle(changed, optimizer))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _settle(self, changed: list[tuple[Table, Bucket]], optimizer: Any) -> bool:
        """Make rows of these buckets again where that is needed, and note the tensors of all their rows."""
        changes = [bucket.find_changes() for _, bucket in changed]
        doubtful = [sorted({*each.kept, *each.grads, *each.recounted}) for each in changes]
        for (table, bucket), places in zip(changed, doubtful, strict=True):
            if any(counts.has_lost([bucket.first_row + i for i in places]) for counts in table.counters):
                return False
        memory = self._memory_of(optimizer)
        # all rows are made before a state or table is changed: this may raise
        made = [
            {i: self._make_again(bucket.rows[i], memory) for i in bucket.stale_rows(each, self.settings)}
            for (_, bucket), each in zip(changed, changes, strict=True)
        ]
        for (_, bucket), rows in zip(changed, made, strict=True):
            if not all(row.fits_in_place_of(bucket.rows[i]) for i, row in rows.items()):
                return False
        for (_, bucket), rows in zip(changed, made, strict=True):
            for i, row in rows.items():
                bucket.rows[i] = row
        # all counts are found before one is written: rows may have exchanged their states
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
        made = make_row(row.param, row.update, row.group, memory, self.settings, row.explicit_grad)
        made.position, made.turn = row.position, row.turn
        return made

    def _find_states(self, state: dict[Tensor, dict[str, Any]]) -> None:
        """Follow state dicts that were replaced."""
        if same([*state], self._state_keys) and same([*state.values()], self._states):
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
        """Stop keeping states alive, which are about to be replaced."""
        self._states, self._state_keys = [], []
        for bucket in self.buckets:
            for row in bucket.rows:
                row.state = {}
                # a row whose count is not saved starts over, as in another process; so does a row that the host
                # steps for a device, since loaded states are not pinned
                row.started = row.started and row.program.saves_step and not row.home.is_away
            if all(row.started for row in bucket.rows):
                bucket.follow_states()
            else:
                bucket.forget()

    def close(self) -> None:
        """Let go of everything, when another plan takes its place or a step has failed."""
        self._states, self._state_keys = [], []
        for table in self.tables:
            # it and its table refer to each other: they would keep every tensor until garbage is collected
            del table.executable
            for bucket in table.buckets:
                bucket.end_step()

    def keep_group_scalars(self, groups: list[dict[str, Any]]) -> None:
        if self._group_scalars:
            group_scalars.keep(self._group_scalars, groups)

    # options

    def _refresh_options(self, optimizer: Any) -> bool:
        """Copy the groups' options that have changed to the device; False if they need another plan."""
        groups = optimizer.param_groups
        if not group_scalars.are_placed(self._group_scalars, groups):
            return False
        changed = self.options.changed(groups)
        if not changed and not self.options.is_stale:
            return True
        if any(optimizer.update_of(groups[i]) != self.updates[i] for i in changed):
            return False
        self.options.read_again(optimizer, changed)
        if self.options.clips != self.settings.spec.clips:
            return False
        self.options.upload(self.tables)
        return True

    def refresh_group(self, optimizer: Any, i: int) -> None:
        """Copy changed options of one group to the device, between replays of a captured step."""
        found = read_group(optimizer, i)
        before = self.options.replace(i, found)
        problem = None
        if optimizer.update_of(optimizer.param_groups[i]) != self.updates[i] or (
            self.options.clips != self.settings.spec.clips
        ):
            problem = "this option would change it; call optimizer.release_graph() first, and capture anew"
        elif [*map(_place, found.tensors)] != [*map(_place, before.tensors)]:
            problem = (
                "reads options from the tensors they were set to; fill these in place instead of setting "
                "others, or call optimizer.release_graph() and capture anew"
            )
        if problem is not None:
            self.options.replace(i, before)
            raise RuntimeError(f"a CUDA graph has captured step(), and {problem}")
        self.options.upload(self.tables)

    # a step

    def step(self, amp: Amp, raises: bool = False) -> None:
        """Take a step, or if it `raises`, raise if a gradient holds NaN or inf, which waits for the device."""
        self._steps_to_join -= 1
        look = partial(check_finite, self.tables, self.settings, self._names, self._members) if raises else None
        found = step(self.tables, amp, self.settings, look)
        for bucket in self.buckets:
            if bucket.engine.BY_ADDRESS:
                bucket.count_writes(self.spec)
            bucket.end_step()
        if not self.tables:
            # in place: assigning a number or tensor of the host would wait for the device
            self.status[FOUND].zero_()
            for number in found:
                self.status[FOUND].add_(number)
            self.status[SKIP] = self.status[FOUND] != 0
            self.status[SKIPPED] += self.status[SKIP]

    @property
    def has_rows(self) -> bool:
        """Whether any parameter has ever had a gradient."""
        return any(row.started for table in self.tables for row in table.rows)

    @property
    def has_status(self) -> bool:
        """Whether anything decides whether a step is taken: gradients here, or other ranks."""
        return self.has_rows or self._norm_group is not None


def _place(option: TensorOption) -> tuple[int, int]:
    return option.column, option.value.data_ptr()
