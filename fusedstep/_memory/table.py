"""Tables of addresses, sizes, step counts and scalars: what an engine works on.

    Table     what one engine steps on one device
    Bucket    the rows of a table that share a program: what one launch updates

Before each sweep, scalars are computed from the step count, the options and what earlier sweeps summed over
every tensor. Groups do not split buckets: options are columns of a table with one row per group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import _get_scalar_dtype

from .._algorithm.bits import short_seed
from .._algorithm.program import Program, Scalars
from .._algorithm.step import GRAD, PARAM
from .._engines import (
    CLIP_ID,
    COLUMNS,
    FIRST_INDEX,
    FIRST_POINTER,
    FOUND,
    GROUP,
    POSITION,
    ROWS,
    SEED,
    WHOLE_NUMEL,
    Amp,
    Executable,
    is_capturing,
    is_traced,
)
from . import shards
from .bucket import Bucket
from .counts import Counts, apart
from .offload import copies_of
from .ranks import ReduceGroup, all_reduce_rows_
from .row import Memory, Row
from .settings import Settings
from .stages import Stages, give_workspaces, matrix_of
from .transfer import from_host, upload


class FoldRun(NamedTuple):
    """Consecutive buckets with the same sums: the row of the first sum in its table, and the kind of each."""

    first_fold: int
    kinds: tuple[str, ...]
    buckets: list[Bucket]


# pinned memory that graphs copy addresses from at every replay. It is never freed: we cannot know when the last
# replay is over, and if the memory were reused, a replay would take other numbers for addresses and write there
_READ_BY_GRAPHS: list[Tensor] = []


def new_status(device: torch.device) -> Tensor:
    # float32, because a GradScaler can be given these numbers
    return torch.zeros(FOUND + 1, dtype=torch.float32, device=device)


def _stored(program: Program) -> list[str]:
    """How a row of a program is stored, as a sort key."""
    return [str(plane) for plane in program.planes]


class Table:
    """Step counts, options, scalars, sums and addresses of what one engine steps on one device."""

    executable: Executable
    stages: Stages | None = None

    def __init__(
        self,
        rows: list[Row],
        clip_ids: Sequence[int],
        options: np.ndarray,
        names: Sequence[str],
        settings: Settings,
    ) -> None:
        self.engine, self.device, self.counts = rows[0].engine, rows[0].device, settings.counts
        # `_has_params`: whether parameters have been copied to their stand-ins
        self.copies, self.turn, self._has_params = copies_of(rows[0]), rows[0].turn, False
        self.spec, self.option_columns = settings.spec, {name: i for i, name in enumerate(names)}
        # equal programs are one object
        programs = {id(row.program): row.program for row in rows}
        # in the order of groups, which is the same on all ranks; programs with the same scalars together
        scalars = {at: tuple(sweep.scalars for sweep in program.sweeps) for at, program in programs.items()}
        numbers = {each: i for i, each in enumerate(dict.fromkeys(scalars.values()))}
        order_of = {
            at: (numbers[scalars[at]], _stored(program), i) for i, (at, program) in enumerate(programs.items())
        }
        keys = {id(row): order_of[id(row.program)] for row in rows}
        # rows of one shape together, because stages work on them together
        shapes = {id(row): (*row.param.shape,) if row.program.stages else () for row in rows}
        order = sorted(range(len(rows)), key=lambda i: (keys[id(rows[i])], shapes[id(rows[i])]))
        ordered = [rows[i] for i in order]
        params, places = [row.param for row in rows], np.argsort(order).tolist()
        self.reduce_groups = shards.reduce_groups(params, places, self.device)
        self.owner_groups = shards.owner_groups(params)
        width = FIRST_POINTER + max(len(program.planes) for program in programs.values())
        self.host_cells = np.zeros((len(rows), width), np.int64)
        self.host_cells[:, GROUP] = [row.group for row in ordered]
        self.host_cells[:, WHOLE_NUMEL] = [row.param.numel() * (1 + row.param.is_complex()) for row in ordered]
        self.host_cells[:, ROWS : COLUMNS + 1] = [*map(matrix_of, ordered)]
        self.host_cells[:, SEED] = short_seed(settings.seed)
        self.host_cells[:, POSITION] = [row.position for row in ordered]
        self.host_cells[:, FIRST_INDEX] = [row.first_index for row in ordered]
        self.clip_ids = np.array([clip_ids[i] for i in order], np.int64)
        self.host_cells[:, CLIP_ID] = self.clip_ids
        self.buckets: list[Bucket] = []
        for _, same in groupby(ordered, key=lambda row: id(row.program)):
            members, first = [*same], sum(len(bucket.rows) for bucket in self.buckets)
            self.buckets.append(Bucket(members, first, self.host_cells[first : first + len(members)]))
        # whether a sweep over gradients alone comes first, while parameters are on their way
        loaded = [{*bucket.program.sweeps[0].loads} for bucket in self.buckets]
        measures = self.spec.measures_first and all(places <= {GRAD} for places in loaded)
        self.measures_grads = measures and settings.offload
        self.sweep_count = max(len(program.sweeps) for program in programs.values())
        # mps has no float64
        exact = torch.float32 if self.device.type == "mps" else settings.exact
        self.cells = from_host(self.host_cells, self.device)
        # pinned memory for cells, which the next graph that captures a step will copy from
        self._cells_to_capture: Tensor | None = None
        columns = max(program.column_count for program in programs.values())
        folds = max(program.fold_count for program in programs.values())
        self.scalars = torch.zeros(len(rows), columns, dtype=exact, device=self.device)
        # a row for every sum, sweep by sweep
        self.sums = torch.zeros(folds, len(rows), dtype=exact, device=self.device)
        # sums over gradients that tables and ranks exchange, and their kinds
        self.shared_kinds = self.spec.shared_kinds
        self.measured = self.sums[: len(self.shared_kinds)]
        # the sums of all tables that are stepped together, and which of their rows are clipped together
        self.shared = self.sums, from_host(self.clip_ids, self.device)
        self.reductions = [[*self._reductions(k)] for k in range(self.sweep_count)]
        # for every sweep, the rows of sums over all tensors, which are the same for all programs
        program = self.buckets[0].program
        self.summed_over_all = [program.summed_over_all(k) for k in range(len(program.sweeps))]
        self.status = new_status(self.device)
        self.options = from_host(options, self.device, exact).clone()
        # the same on the host; NaN for options that are only known on a device
        self.host_options = options.copy()
        # step counts, and numbers that rules keep once for each tensor: the first of each rule, the second, ...
        self.steps = torch.zeros(len(rows), dtype=_get_scalar_dtype(), device=self.device)
        most = max(len(program.scalars) for program in programs.values())
        # at least one: kernels take its address
        self.kept = self.steps.new_zeros(max(1, most), len(rows))
        self.counters = [*map(Counts, (self.steps, *self.kept[:most]))]
        self._adopt(dict(enumerate(self.rows)))
        self.known_steps = self.counters[0].known

    def set_options(self, numbers: np.ndarray) -> None:
        """Set the options of the groups this table knows; `set_tensor_option` sets those that are tensors."""
        upload(numbers[: len(self.host_options)], self.options)
        self.host_options[:] = numbers[: len(self.host_options)]

    def set_tensor_option(self, group: int, column: int, value: Tensor) -> None:
        # a group that was added later has no row here
        if group < len(self.host_options):
            self.options[group, column].copy_(value, non_blocking=True)
            self.host_options[group, column] = np.nan

    @property
    def cells_changed(self) -> bool:
        return any(bucket.cells_changed for bucket in self.buckets)

    def buckets_with(self, k: int) -> list[Bucket]:
        """Buckets that have a sweep `k`."""
        return [bucket for bucket in self.buckets if bucket.has_sweep(k)]

    def scalar_runs(self, k: int) -> Iterator[tuple[Scalars, int, int]]:
        """Scalars that are computed before sweep `k`, and the range of rows that have them: first and end."""
        for scalars, same in groupby(self.buckets, key=lambda bucket: bucket.scalars(k)):
            run = [*same]
            if scalars is not None:
                yield scalars, run[0].first_row, run[-1].end_row

    def fold_runs(self, k: int) -> Iterator[FoldRun]:
        """Runs of consecutive buckets that have the same sums in sweep `k`."""
        for folds, same in groupby(self.buckets, key=lambda bucket: bucket.folds(k)):
            if folds is not None:
                first, kinds = folds
                yield FoldRun(first, kinds, [*same])

    def _reductions(self, k: int) -> Iterator[tuple[Tensor, tuple[str, ...], ReduceGroup]]:
        """Sums of sweep `k` that are added up over ranks with parts of a tensor: sums, kinds, and ranks."""
        for first, kinds, buckets in self.fold_runs(k) if self.reduce_groups else ():
            begin, end = buckets[0].first_row, buckets[-1].end_row
            for group in self.reduce_groups if kinds else ():
                part = group if end - begin == len(self.rows) else group.within(begin, end, self.device)
                if part is not None:
                    yield self.sums[first : first + len(kinds)], kinds, part

    @property
    def rows(self) -> list[Row]:
        return [row for bucket in self.buckets for row in bucket.rows]

    def find_counts(self, rows: dict[int, Row]) -> None:
        """Note the counts that are in the states of these rows, by their places, now."""
        for place, row in rows.items():
            counters = dict(zip(("step", *row.program.scalars), self.counters, strict=False))
            for name in row.program.kept_once:
                count = row.state.get(name, 0.0)
                is_own = count is counters[name].views[place]
                row.once[name] = count if is_own else apart(count)

    def adopt_counts(self, rows: dict[int, Row], memory: Memory) -> None:
        """Copy here the counts that these rows, by their places, have, and keep them here."""
        self._adopt(rows)
        for row in rows.values():
            row.keep_once(memory)

    def _adopt(self, rows: dict[int, Row]) -> None:
        self.counters[0].adopt(rows, lambda row: "step")
        for k, counts in enumerate(self.counters[1:]):
            having = {i: row for i, row in rows.items() if k < len(row.program.scalars)}
            counts.adopt(having, lambda row, k=k: row.program.scalars[k])  # type: ignore[misc]

    def _live_rows_with_stand_ins(self) -> list[Row]:
        buckets = [bucket for bucket in self.buckets if bucket.has_stand_ins]
        return [row for bucket in buckets for row in bucket.live_rows if row.has_stand_ins]

    # a step

    def begin(self) -> None:
        """Copy to the device what a step needs."""
        changed = self.cells_changed
        if self._cells_to_capture is None and self.device.type == "cuda" and not is_capturing():
            self._cells_to_capture = torch.empty_like(self.cells, device="cpu", pin_memory=True)
        # on the host, `cells` and `host_cells` are the same memory, except in a trace
        if changed and (self.device.type != "cpu" or is_traced()):
            self._upload_cells()
        elif changed:
            for bucket in self.buckets:
                bucket.cells_changed = False
        for counts in self.counters:
            counts.fetch_shared()
        rows = self._live_rows_with_stand_ins()
        if rows:
            self.copies.bring(rows, (GRAD,) if self.measures_grads else (GRAD, PARAM))

    def bring_params(self) -> None:
        """Copy parameters after the gradients of all tables, if gradients are measured meanwhile."""
        rows = self._live_rows_with_stand_ins() if self.measures_grads else []
        if rows:
            self.copies.bring(rows, (PARAM,))

    def sweep(self, k: int, skips: bool) -> None:
        """Take sweep `k`, with its sums over all ranks that hold parts of a tensor."""
        measures_grads = k == 0 and self.measures_grads
        self.copies.wait(GRAD if measures_grads else PARAM)
        self._has_params = not measures_grads
        self.executable.sweep(k, skips)
        for reduction in self.reductions[k]:
            all_reduce_rows_(*reduction)
        if self.stages is not None:
            self.stages.run(k, self.status)

    def _upload_cells(self) -> None:
        captures = is_capturing()
        if not captures:
            upload(self.host_cells, self.cells)
        elif self._cells_to_capture is None:
            raise RuntimeError("between two captures of step(), take a step() that is not captured")
        else:
            source, self._cells_to_capture = self._cells_to_capture, None
            _READ_BY_GRAPHS.append(source)
            source.copy_(torch.from_numpy(self.host_cells))
            self.cells.copy_(source, non_blocking=True)
        for bucket in self.buckets:
            # a capture copies nothing: only its replays do
            bucket.cells_changed = captures

    def update(self, k: int, amp: Amp) -> None:
        """Take sweep `k` for all live rows, in place."""
        if k < self.sweep_count:
            self.executable.prepare(k, amp)
            self.sweep(k, skips=self.spec.skip_nonfinite or amp.found_inf is not None)

    def end(self) -> None:
        """Copy back what a step has written to stand-ins and shared counts, as far as it got."""
        rows = self._live_rows_with_stand_ins() if self._has_params else []
        self._has_params = False
        if rows:
            self.copies.send_back(rows, self.spec)
        for counts in self.counters:
            counts.publish_shared()


# gradients of rows with the same key are clipped together
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
    # in the order in which they are stepped
    tables.sort(key=lambda table: table.turn)
    if settings.norm_ranks is not None or len(tables) > 1:
        # with other ranks, all gradients are clipped together, and one column holds their sums
        clip_ids = np.zeros(1, np.int64)
        if settings.norm_ranks is None:
            clip_ids = np.concatenate([table.clip_ids for table in tables])
        # shared by all tables of a device, because there may be hundreds
        made: dict[tuple, tuple[Tensor, Tensor]] = {}
        for table in tables:
            at = table.device, len(table.sums)
            if at not in made:
                sums = table.sums.new_zeros(len(table.sums), len(clip_ids))
                made[at] = sums, from_host(clip_ids, table.device)
            table.shared = made[at]
    give_workspaces(tables, settings)
    for table in tables:
        table.executable = table.engine.bind(table)
    return tables
