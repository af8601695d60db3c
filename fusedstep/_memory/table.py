"""Tables of addresses, sizes, step counts and scalars: what an engine works on.

    Table     what one engine steps on one device
    Bucket    the rows of a table that share a program and formats: what one launch updates

Before each sweep, scalars are computed from the step count, the options and what earlier sweeps summed over
every tensor. Groups do not split buckets: options are columns of a table with one row per group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import _get_scalar_dtype

from .._algorithm.program import Scalars, StepSpec
from .._engines import (
    CLIP_ID,
    FIRST_POINTER,
    FOUND,
    GROUP,
    LIVE,
    NUMEL,
    UNMASKED_NUMEL,
    Amp,
    Executable,
    is_capturing,
    is_plain,
    is_traced,
    to_device,
)
from . import shards, watch
from .formats import compute_dtype
from .known_steps import KnownSteps
from .layout import overlaps_itself
from .row import Row, Settings

_grad, _local_part = attrgetter("grad"), attrgetter("_local_tensor")


def _is_new(t: Tensor) -> bool:
    """In place of a check, until there is one."""
    return False


class Bucket:
    """The rows of a table that share a program and the format of every slot."""

    def __init__(self, rows: list[Row], first_row: int, cells: np.ndarray) -> None:
        self.rows, self.first_row, self.cells = rows, first_row, cells
        self.program, self.formats, self.engine = rows[0].program, rows[0].formats, rows[0].engine
        self.compute_dtype = compute_dtype(self.formats)
        self.numels = np.array([row.numel for row in rows], np.int64)
        self.params = [row.param for row in rows]
        # which rows have a gradient, and which of these work on copies
        self.live: list[int] = []
        self.staged: list[Row] = []
        # tensors of the live rows by slot, during a step of an engine that works on tensors
        self.tensors: list[list[Tensor]] = []
        self.cells_changed = True
        self._state_names = [slot.name for slot in self.program.states]
        self._has_explicit_grads = any(row.explicit_grad is not None for row in rows)
        self._distributed = [*map(shards.is_distributed, self.params)]
        self._everything = [*range(len(rows))]
        # whether all tensors of the live rows are of the kinds they were, in one call
        self._check_all: Callable[..., bool] | None = None
        self._was_same = False
        self._addresses: list[int] = []
        # how tensors were distributed, by the objects that say so
        self._specs: list[Any] = []
        self.record()

    @property
    def end_row(self) -> int:
        return self.first_row + len(self.rows)

    def scalars(self, k: int) -> Scalars | None:
        """What is computed for its rows before sweep `k`, if anything."""
        return self.program.sweeps[k].scalars if k < len(self.program.sweeps) else None

    def folds(self, k: int) -> tuple[int, tuple[str, ...]] | None:
        """The first row of the sums of sweep `k`, and how each is summed; None if it has no such sweep."""
        if k >= len(self.program.sweeps):
            return None
        sweep = self.program.sweeps[k]
        return sweep.first_fold, tuple(fold.kind for fold in sweep.folds)

    @property
    def live_rows(self) -> list[Row]:
        return self.rows if len(self.live) == len(self.rows) else [self.rows[i] for i in self.live]

    def record(self) -> None:
        """Remember what rows have that a step asks of all of them."""
        self._states = [row.state for row in self.rows]
        self._steps = [row.step for row in self.rows]
        self._checks = [[row.checks[k] or _is_new for row in self.rows] for k in range(len(self.formats))]
        self._has_staged = any(row.staged for row in self.rows)
        self._has_unstarted = not all(row.started for row in self.rows)

    def replace(self, i: int, row: Row) -> None:
        """Another row for the same parameter, in the same place."""
        self.rows[i] = row
        self._check_all, self._addresses = None, []
        self.record()

    def _live(self, items: list[Any]) -> list[Any]:
        return items if len(self.live) == len(items) else [items[i] for i in self.live]

    def refresh(self) -> list[int]:
        """Read again where everything is. Returns the rows that are not what they were made for, if any."""
        grads = [row.grad for row in self.rows] if self._has_explicit_grads else [*map(_grad, self.params)]
        self._switch(grads)
        stale = [i for i in self.live if not self.rows[i].started] if self._has_unstarted else []
        if stale:
            return stale
        states = self._live(self._states)
        try:
            of_states = [[*map(itemgetter(name), states)] for name in self._state_names]
        except KeyError:
            return [i for i in self.live if not all(name in self._states[i] for name in self._state_names)]
        columns = [self._live(self.params), self._live(grads), *of_states]
        if any(self._distributed):
            stale = self._rows_of_other_placements(columns)
            if stale:
                return stale
            columns = [self._local_parts(column) for column in columns]
        stale = self._rows_of_other_kinds(columns)
        if stale:
            return stale
        self.staged = [row for row in self.live_rows if row.staged] if self._has_staged else []
        if self.engine.BY_ADDRESS:
            self._read_addresses(columns)
        else:
            self.tensors = columns
        return []

    def _switch(self, grads: list[Any]) -> None:
        """Switch on the rows that have a gradient, and the others off."""
        # not `None in grads`, which would compare tensors
        if any(map(is_, grads, repeat(None))):
            live = [i for i, g in enumerate(grads) if g is not None]
        else:
            live = self._everything
        if live is not self.live and live != self.live:
            self._check_all, self._addresses, self._was_same = None, [], False
            self.cells[:, LIVE] = self.cells[:, UNMASKED_NUMEL] = 0
            self.cells[live, LIVE] = 1
            self.cells[:, NUMEL] = np.where(self.cells[:, LIVE], self.numels, 0)
            self.cells_changed = True
        self.live = live

    def rows_with_other_steps(self) -> list[int]:
        """Rows that count in another tensor than their state has."""
        if not self.program.saves_step:
            return []
        try:
            found = map(itemgetter("step"), self._live(self._states))
            if all(map(is_, found, self._live(self._steps))):
                return []
        except KeyError:
            pass
        return [i for i in self.live if self.rows[i].state.get("step") is not self.rows[i].step]

    def _rows_of_other_placements(self, columns: list[list[Any]]) -> list[int]:
        """Rows whose tensors are not distributed as their parameter is."""
        specs = [*map(shards.spec_of, chain.from_iterable(columns))]
        if len(specs) == len(self._specs) and all(map(is_, specs, self._specs)):
            return []
        stale = [
            i
            for i, (p, *others) in zip(self.live, zip(*columns, strict=True), strict=True)
            if not all(shards.lies_alike(p, t) for t in others)
        ]
        # objects that say nothing are no proof for the next time
        self._specs = [] if stale or not all(self._distributed) else specs
        return stale

    def _local_parts(self, column: list[Any]) -> list[Any]:
        if all(self._distributed):
            parts = [*map(_local_part, column)]
            # others are still on their way, from other ranks
            if {*map(type, parts)} <= {Tensor}:
                return parts
        return [*map(shards.local, column)]

    def _rows_of_other_kinds(self, columns: list[list[Any]]) -> list[int]:
        if self._check_all is not None:
            if self._check_all(*chain.from_iterable(columns)):
                return []
            self._check_all = None
        stale: set[int] = set()
        for k, column in enumerate(columns):
            checks = self._live(self._checks[k])
            # a list: twice as fast as a generator, and seldom cut short
            if not all([check(t) for check, t in zip(checks, column, strict=True)]):  # noqa: C419
                stale.update(self._rows_of_other_kind(k, column))
        if self._was_same and self.live and not stale:
            # the same rows for the third time: from now on all in one call, which takes as long to make as ten
            self._check_all = watch.make_check([*chain.from_iterable(columns)])
        self._was_same = True
        return sorted(stale)

    def _rows_of_other_kind(self, k: int, column: list[Any]) -> Iterator[int]:
        """The same for one slot; rows that are new are of the kind they are."""
        for i, t in zip(self.live, column, strict=True):
            row = self.rows[i]
            if row.checks[k] is None and isinstance(t, Tensor) and (is_plain(t) or not self.engine.BY_ADDRESS):
                row.checks[k] = self._checks[k][i] = watch.check_of(t)
            elif row.checks[k] is None or not row.checks[k](t):
                yield i

    def _read_addresses(self, columns: list[list[Any]]) -> None:
        addresses = [*map(watch.address, chain.from_iterable(columns))]
        if addresses == self._addresses:
            return
        found = np.array(addresses, np.int64).reshape(len(columns), len(self.live))
        for at, row in enumerate(self.live_rows if self._has_staged else ()):
            for slot, copy in enumerate((row.param_copy, row.grad_copy)):
                if copy is not None:
                    found[slot, at] = copy.data_ptr()
        self.write_addresses(found.T)
        self._addresses = addresses

    def write_addresses(self, addresses: np.ndarray) -> None:
        # full chunks are for aligned tensors: they are read and written sixteen bytes at a time
        misaligned = np.bitwise_or.reduce(addresses, axis=1) & 15
        rows: Any = slice(None) if len(self.live) == len(self.rows) else self.live
        chunk = self.engine.CHUNK
        self.cells[rows, UNMASKED_NUMEL] = np.where(misaligned, 0, self.numels[rows] // chunk * chunk)
        self.cells[rows, FIRST_POINTER : FIRST_POINTER + addresses.shape[1]] = addresses
        self.cells_changed = True

    def local_grads(self) -> list[Tensor]:
        return [shards.local(row.grad) for row in self.live_rows]

    def count_writes(self, spec: StepSpec) -> None:
        """Tell autograd that the parameters were written, and gradients if they were cleared."""
        if self.live:
            torch.autograd.graph.increment_version(self._live(self.params))
        if self.live and spec.zero_grads:
            torch.autograd.graph.increment_version([row.grad for row in self.live_rows])

    def release(self) -> None:
        """Let go of all tensors; what is left are their addresses and how they are stored."""
        self.params, self.tensors, self._states, self._steps, self.staged = [], [], [], [], []
        for row in self.rows:
            row.param, row.state, row.explicit_grad, row.fresh = None, {}, None, {}  # type: ignore[assignment]


class FoldRun(NamedTuple):
    """Buckets that follow each other and sum alike: into these rows of the table's sums, in these ways."""

    first_fold: int
    kinds: tuple[str, ...]
    buckets: list[Bucket]


# pinned memory that graphs copy from at every replay. It is never freed: nothing tells when the last replay is
# over, and memory that others write meanwhile would have it update whatever lies at their numbers
_READ_BY_GRAPHS: list[Tensor] = []


def new_status(device: torch.device) -> Tensor:
    # numbers that a GradScaler can be given
    return torch.zeros(FOUND + 1, dtype=torch.float32, device=device)


class Table:
    """Step counts, options, scalars, sums and addresses of what one engine steps on one device."""

    executable: Executable

    def __init__(
        self,
        rows: list[Row],
        clip_ids: Sequence[int],
        options: np.ndarray,
        names: Sequence[str],
        settings: Settings,
    ) -> None:
        self.engine, self.device, self.counts = rows[0].engine, rows[0].param.device, settings.counts
        self.spec, self.option_columns = settings.spec, {name: i for i, name in enumerate(names)}
        # programs in the order of the groups, which is the same on all ranks; equal ones are one object
        numbers = {key: i for i, key in enumerate(dict.fromkeys(id(row.program) for row in rows))}
        keys = {id(row): (numbers[id(row.program)], [*map(str, row.formats)]) for row in rows}
        order = sorted(range(len(rows)), key=lambda i: keys[id(rows[i])])
        self.rows = [rows[i] for i in order]
        params, places = [row.param for row in rows], np.argsort(order).tolist()
        self.reduce_groups = shards.reduce_groups(params, places, self.device)
        self.owner_groups = shards.owner_groups(params)
        width = FIRST_POINTER + max(len(row.formats) for row in rows)
        self.host_cells = np.zeros((len(rows), width), np.int64)
        self.host_cells[:, GROUP] = [row.group for row in self.rows]
        self.clip_ids = np.array([clip_ids[i] for i in order], np.int64)
        self.host_cells[:, CLIP_ID] = self.clip_ids
        self.buckets: list[Bucket] = []
        for _, same in groupby(self.rows, key=lambda row: keys[id(row)]):
            members, first = [*same], sum(len(bucket.rows) for bucket in self.buckets)
            self.buckets.append(Bucket(members, first, self.host_cells[first : first + len(members)]))
        programs = [bucket.program for bucket in self.buckets]
        self.sweep_count = max(len(program.sweeps) for program in programs)
        # mps has no float64
        exact = torch.float32 if self.device.type == "mps" else settings.exact
        self.cells = from_host(self.host_cells, self.device)
        # where the next graph that captures a step will find them
        self._cells_to_capture: Tensor | None = None
        columns, folds = max(p.column_count for p in programs), max(p.fold_count for p in programs)
        self.scalars = torch.zeros(len(rows), columns, dtype=exact, device=self.device)
        # of every sweep in turn, one row per sum
        self.sums = torch.zeros(folds, len(rows), dtype=exact, device=self.device)
        # what tables and ranks tell each other of their gradients, and how that is added up
        self.shared_kinds = self.spec.shared_kinds
        self.measured = self.sums[: len(self.shared_kinds)]
        # what was measured of all gradients that may be clipped together, and who goes with whom
        self.shared = self.measured, from_host(self.clip_ids, self.device)
        self.reductions = [[*self._reductions(k)] for k in range(self.sweep_count)]
        self.status = new_status(self.device)
        self.options = from_host(options, self.device, exact).clone()
        # the same on the host, for engines that compute there; NaN: a tensor on the device
        self.host_options = options.copy()
        self._make_steps()

    def set_options(self, numbers: np.ndarray) -> None:
        """Options of all groups; those that are tensors follow by `set_tensor_option`."""
        upload(numbers, self.options)
        self.host_options[:] = numbers

    def set_tensor_option(self, group: int, column: int, value: Tensor) -> None:
        self.options[group, column].copy_(value, non_blocking=True)
        self.host_options[group, column] = np.nan

    def buckets_with(self, k: int) -> list[Bucket]:
        """Those that have a sweep `k`."""
        return [bucket for bucket in self.buckets if k < len(bucket.program.sweeps)]

    def scalar_runs(self, k: int) -> Iterator[tuple[Scalars, int, int]]:
        """Scalars that are computed before sweep `k`, and the first and last row that have them."""
        for scalars, same in groupby(self.buckets, key=lambda bucket: bucket.scalars(k)):
            run = [*same]
            if scalars is not None:
                yield scalars, run[0].first_row, run[-1].end_row

    def fold_runs(self, k: int) -> Iterator[FoldRun]:
        """Buckets that follow each other and sum alike in sweep `k`."""
        for folds, same in groupby(self.buckets, key=lambda bucket: bucket.folds(k)):
            if folds is not None:
                first, kinds = folds
                yield FoldRun(first, kinds, [*same])

    def _reductions(self, k: int) -> Iterator[tuple[Tensor, tuple[str, ...], shards.ReduceGroup]]:
        """Sums of sweep `k` that ranks with parts of a tensor add up: where, how, and with whom."""
        for first, kinds, buckets in self.fold_runs(k) if self.reduce_groups else ():
            begin, end = buckets[0].first_row, buckets[-1].end_row
            for group in self.reduce_groups if kinds else ():
                part = group if end - begin == len(self.rows) else group.within(begin, end, self.device)
                if part is not None:
                    yield self.sums[first : first + len(kinds)], kinds, part

    # step counts

    def _make_steps(self) -> None:
        """One vector of step counts, of which each row gets a view."""
        counts = [row.step for row in self.rows]
        self.steps = torch.zeros(len(counts), dtype=_get_scalar_dtype(), device=self.device)
        self.known_steps = KnownSteps(self.steps)
        # select, not unbind: a view that may itself be written in place
        self._views = [self.steps[i] for i in range(len(counts))]
        # a tensor without memory (traced, meta, of a subclass) does not move
        self._has_addresses = type(self.steps) is Tensor and not self.steps.is_meta and not is_traced()
        self._step_addresses = self._addresses_of_steps()
        self._check_steps = watch.make_check([self.steps, *self._views]) if self._has_addresses else None
        # counts that other processes see too, by row
        self._shared_steps: dict[int, Tensor] = {}
        self._adopt(range(len(counts)), counts)

    def _adopt(self, places: Sequence[int], counts: Sequence[Any]) -> None:
        """Go on from these counts in these places of the vector."""
        for count in counts:
            _check_count(count)
        self.known_steps.check()
        traced = is_traced()
        # can be read without waiting for a device
        known = [not isinstance(c, Tensor) or (type(c) is Tensor and c.is_cpu and not traced) for c in counts]
        numbers = [float(count) for count, is_known in zip(counts, known, strict=True) if is_known]
        if len(numbers) == len(self._views):
            upload(np.array(numbers), self.steps)
        elif numbers:
            of_numbers = [i for i, is_known in zip(places, known, strict=True) if is_known]
            self.steps[to_device(torch.tensor(of_numbers, device="cpu"), self.device)] = to_device(
                torch.tensor(numbers, dtype=self.steps.dtype, device="cpu"), self.device
            )
        for i, count, is_known in zip(places, counts, known, strict=True):
            self._shared_steps.pop(i, None)
            if not is_known:
                self._views[i].copy_(count.reshape(()), non_blocking=True)
            # in memory that other processes see too; all of a GPU could be
            is_shared = is_known and isinstance(count, Tensor) and count.is_shared()
            if is_shared:
                _check_shared(count, self.rows[i])
                self._shared_steps[i] = count
            self.rows[i].step = count if is_shared else self._views[i]
        self.known_steps.adopt(
            places, [float(count) if is_known else None for count, is_known in zip(counts, known, strict=True)]
        )
        for bucket in self.buckets:
            bucket.record()

    def adopt_steps(self, bucket: Bucket, rows: list[int]) -> None:
        """Go on from the counts that the states of these rows hold now."""
        self._adopt([bucket.first_row + i for i in rows], [bucket.rows[i].state.get("step", 0.0) for i in rows])
        for i in rows:
            bucket.rows[i].state["step"] = bucket.rows[i].step

    def replace(self, bucket: Bucket, i: int, row: Row) -> None:
        """Another row for the same parameter, in the same place."""
        place = bucket.first_row + i
        bucket.replace(i, row)
        self.rows[place] = row
        if row.step is not self._views[place]:
            self._adopt([place], [row.step])

    def _addresses_of_steps(self) -> list[int]:
        return [*map(watch.address, (self.steps, *self._views))] if self._has_addresses else []

    def steps_have_moved(self) -> bool:
        """Whether the vector or one of its views is elsewhere, as after it was sent to another process."""
        if self._check_steps is None:
            return False
        return (
            not self._check_steps(self.steps, *self._views)
            or self._addresses_of_steps() != self._step_addresses
        )

    # a step

    def _check_grads(self) -> None:
        """Raise where gradients cannot be written one by one, as this step is to."""
        grads = [g for bucket in self.buckets for g in bucket.local_grads()]
        if self.spec.unscale_grads and any(map(overlaps_itself, grads)):
            raise RuntimeError(
                "elements of a gradient share memory, as those of an expanded one do, and cannot be unscaled "
                "there; use p.grad = p.grad.clone(), or fusedstep.GradScaler, which leaves gradients scaled"
            )
        addresses = [g.data_ptr() for g in grads if g.numel()]
        if len({*addresses}) != len(addresses):
            if self.spec.unscale_grads:
                raise RuntimeError(
                    "two parameters share a gradient, which would be unscaled twice; give one of them a clone, "
                    "or use fusedstep.GradScaler, which leaves gradients as they are"
                )
            raise RuntimeError(
                "two parameters share a gradient, which would be zero for the second of them; call zero_grad() "
                "after step() instead of step(zero_grad=True, set_to_none=False)"
            )

    def begin(self) -> None:
        """Bring to the device what a step needs."""
        changed = any(bucket.cells_changed for bucket in self.buckets)
        writes_grads = self.spec.zero_grads or self.spec.unscale_grads
        if writes_grads and (changed or not self.engine.BY_ADDRESS) and not is_traced():
            self._check_grads()
        if self._cells_to_capture is None and self.device.type == "cuda" and not is_capturing():
            self._cells_to_capture = torch.empty_like(self.cells, device="cpu", pin_memory=True)
        # on the host they are the same memory, unless that is none
        if changed and (self.device.type != "cpu" or is_traced()):
            self._upload_cells()
        elif changed:
            for bucket in self.buckets:
                bucket.cells_changed = False
        if self._shared_steps:
            ours, theirs = self._both_steps()
            torch._foreach_copy_(ours, theirs)
        for bucket in self.buckets:
            for row in bucket.staged:
                row.copy_in()

    def _both_steps(self) -> tuple[list[Tensor], list[Tensor]]:
        """Counts that other processes see: here, and there."""
        return [self._views[i] for i in self._shared_steps], [
            count.detach().view(()) for count in self._shared_steps.values()
        ]

    def sweep(self, k: int, skips: bool) -> None:
        """Sweep `k`, with its sums taken over all ranks that hold parts of a tensor."""
        self.executable.sweep(k, skips)
        for reduction in self.reductions[k]:
            shards.all_reduce_rows_(*reduction)

    def _upload_cells(self) -> None:
        captures = is_capturing()
        if not captures:
            upload(self.host_cells, self.cells)
        elif self._cells_to_capture is None:
            raise RuntimeError("between two captures of a step() one must be taken that is not captured")
        else:
            source, self._cells_to_capture = self._cells_to_capture, None
            _READ_BY_GRAPHS.append(source)
            source.copy_(torch.from_numpy(self.host_cells))
            self.cells.copy_(source, non_blocking=True)
        for bucket in self.buckets:
            # a capture only says what a replay will do
            bucket.cells_changed = captures

    def update(self, amp: Amp) -> None:
        """Update everything live, in place."""
        skips = self.spec.skip_nonfinite or amp.found_inf is not None
        for k in range(int(self.spec.measures_first), self.sweep_count):
            self.executable.prepare(k, amp)
            self.sweep(k, skips)
        for bucket in self.buckets:
            for row in bucket.staged:
                row.copy_out(self.spec)
        if self._shared_steps:
            ours, theirs = self._both_steps()
            torch._foreach_copy_(theirs, ours)


def _check_count(count: Any) -> None:
    if isinstance(count, Tensor) and (
        count.layout != torch.strided or count.numel() != 1 or count.is_complex()
    ):
        raise RuntimeError(
            f"a step count is a tensor of shape {tuple(count.shape)}, {count.dtype} and {count.layout}; it "
            "must be one real number: load a matching checkpoint, or delete optimizer.state[p]"
        )


def _check_shared(count: Tensor, row: Row) -> None:
    if count.numel() != 1 or row.device.type != "cpu":
        raise RuntimeError(
            f"a step count of shape {tuple(count.shape)} is in the host's shared memory, its parameter on "
            f"{row.device}; processes can share the count of one that is on the CPU, as one number. Otherwise "
            "use one that is not shared"
        )


# which gradients are clipped together, by their rows
CLIP_SCOPES: dict[str, Callable[[Row], Any]] = {
    "tensor": lambda row: id(row),
    "group": lambda row: (row.group, row.param.dtype),
    "global": lambda row: None,
}


def make_tables(rows: list[Row], options: np.ndarray, names: Sequence[str], settings: Settings) -> list[Table]:
    """Tables of these rows, ready to be stepped."""
    keys = [*map(CLIP_SCOPES[settings.clip_scope], rows)]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    by_table: dict[tuple, list[tuple[Row, int]]] = {}
    for row, key in zip(rows, keys, strict=True):
        by_table.setdefault(row.table_key, []).append((row, numbers[key]))
    tables = [
        Table([row for row, _ in members], [i for _, i in members], options, names, settings)
        for members in by_table.values()
    ]
    if settings.norm_ranks is not None or len(tables) > 1:
        # with other ranks all are clipped together, and one column tells of them
        clip_ids = np.zeros(1, np.int64)
        if settings.norm_ranks is None:
            clip_ids = np.concatenate([table.clip_ids for table in tables])
        for table in tables:
            shared = table.sums.new_zeros(len(table.measured), len(clip_ids))
            table.shared = shared, from_host(clip_ids, table.device)
    for table in tables:
        table.executable = table.engine.bind(table)
    return tables


def step(
    tables: list[Table],
    amp: Amp,
    settings: Settings,
    look: Callable[[Sequence[Tensor]], None] | None = None,
) -> list[Tensor]:
    """One step of everything in these tables. Where there are none: what has other ranks skip it, if not 0.

    Before anything is written, `look` is shown what tables and ranks have told each other of their gradients.
    """
    ranks_of_norm = [] if settings.norm_ranks is None else [settings.norm_ranks]
    if amp.found_inf is not None:
        told = dict.fromkeys(ranks for table in tables for ranks in table.owner_groups)
        amp = amp._replace(found_inf=shards.any_rank_found_inf(amp.found_inf, [*told, *ranks_of_norm]))
    amps = [amp.to(table.device) for table in tables]
    for table in tables:
        table.begin()
    measured: list[Tensor] = []
    if settings.spec.measures_first:
        for table in tables:
            table.sweep(0, skips=False)
        if ranks_of_norm or len(tables) > 1:
            measured = [table.measured for table in tables]
        for ranks in ranks_of_norm:
            # also where nothing was measured: the others wait for this one
            measured = [shards.reduce_to_column(measured, settings.spec.shared_kinds, ranks)]
        if look is not None:
            look(measured)
        for table in tables if measured else ():
            torch.cat([to_device(t, table.device) for t in measured], 1, out=table.shared[0])
    for table, there in zip(tables, amps, strict=True):
        table.update(there)
    if tables or not ranks_of_norm:
        return []
    found = [] if amp.found_inf is None else [amp.found_inf]
    return found + [column[1, 0] for column in measured if settings.spec.skip_nonfinite]


def from_host(host: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of these numbers, on the host in the same memory if it can."""
    if is_traced():
        # one that is made by an operation, which then knows it
        return torch.tensor(host.tolist(), dtype=dtype, device=device)
    return torch.from_numpy(host).to(device, dtype)


def upload(host: np.ndarray, device: Tensor) -> None:
    source = from_host(host, torch.device("cpu"), device.dtype)
    if device.is_cuda:
        # a fresh pinned block for each upload: the allocator reuses it only when the copy is done
        source = source.pin_memory()
    device.copy_(source, non_blocking=True)
