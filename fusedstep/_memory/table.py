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
from .row import Memory, Row, Settings
from .stages import Stages, give_workspaces, matrix_of
from .transfer import from_host, upload


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


def _stored(program: Program) -> list[str]:
    """How a row of a program is stored, as something to sort by."""
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
        # of rows that work on copies: whether those of parameters are there
        self.copies, self.turn, self._has_params = copies_of(rows[0]), rows[0].turn, False
        self.spec, self.option_columns = settings.spec, {name: i for i, name in enumerate(names)}
        # equal programs are one object
        programs = {id(row.program): row.program for row in rows}
        # in the order of the groups, which is the same on all ranks; together, if they share their scalars
        scalars = {at: tuple(sweep.scalars for sweep in program.sweeps) for at, program in programs.items()}
        numbers = {each: i for i, each in enumerate(dict.fromkeys(scalars.values()))}
        order_of = {
            at: (numbers[scalars[at]], _stored(program), i) for i, (at, program) in enumerate(programs.items())
        }
        keys = {id(row): order_of[id(row.program)] for row in rows}
        # what stages work on together, together
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
        self.host_cells[:, SEED] = settings.seed
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
        # where the next graph that captures a step will find them
        self._cells_to_capture: Tensor | None = None
        columns = max(program.column_count for program in programs.values())
        folds = max(program.fold_count for program in programs.values())
        self.scalars = torch.zeros(len(rows), columns, dtype=exact, device=self.device)
        # of every sweep in turn, one row per sum
        self.sums = torch.zeros(folds, len(rows), dtype=exact, device=self.device)
        # what tables and ranks tell each other of their gradients, and how that is added up
        self.shared_kinds = self.spec.shared_kinds
        self.measured = self.sums[: len(self.shared_kinds)]
        # sums of all that is stepped together, and who is clipped with whom
        self.shared = self.sums, from_host(self.clip_ids, self.device)
        self.reductions = [[*self._reductions(k)] for k in range(self.sweep_count)]
        # of every sweep, the sums that are added up over all tensors: in the same rows for all programs
        program = self.buckets[0].program
        self.summed_over_all = [program.summed_over_all(k) for k in range(len(program.sweeps))]
        self.status = new_status(self.device)
        self.options = from_host(options, self.device, exact).clone()
        # the same on the host; NaN for those that are only known to a device
        self.host_options = options.copy()
        # step counts, and what rules keep once for each tensor: the first of every rule, the second, and so on
        self.steps = torch.zeros(len(rows), dtype=_get_scalar_dtype(), device=self.device)
        most = max(len(program.scalars) for program in programs.values())
        # at least one: kernels take its address
        self.kept = self.steps.new_zeros(max(1, most), len(rows))
        self.counters = [*map(Counts, (self.steps, *self.kept[:most]))]
        self._adopt(dict(enumerate(self.rows)))
        self.known_steps = self.counters[0].known

    def set_options(self, numbers: np.ndarray) -> None:
        """Options of all groups; those that are tensors follow by `set_tensor_option`."""
        upload(numbers, self.options)
        self.host_options[:] = numbers

    def set_tensor_option(self, group: int, column: int, value: Tensor) -> None:
        self.options[group, column].copy_(value, non_blocking=True)
        self.host_options[group, column] = np.nan

    @property
    def cells_changed(self) -> bool:
        return any(bucket.cells_changed for bucket in self.buckets)

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

    def _reductions(self, k: int) -> Iterator[tuple[Tensor, tuple[str, ...], ReduceGroup]]:
        """Sums of sweep `k` that ranks with parts of a tensor add up: where, how, and with whom."""
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
        """Note the counts that the states of these rows, by their places, hold now."""
        for place, row in rows.items():
            counters = dict(zip(("step", *row.program.scalars), self.counters, strict=False))
            for name in row.program.kept_once:
                count = row.state.get(name, 0.0)
                is_own = count is counters[name].views[place]
                row.once[name] = count if is_own else apart(count)

    def adopt_counts(self, rows: dict[int, Row], memory: Memory) -> None:
        """Have these rows, by their places, go on from the counts they have."""
        self._adopt(rows)
        for row in rows.values():
            row.keep_once(memory)

    def _adopt(self, rows: dict[int, Row]) -> None:
        self.counters[0].adopt(rows, lambda row: "step")
        for k, counts in enumerate(self.counters[1:]):
            having = {i: row for i, row in rows.items() if k < len(row.program.scalars)}
            counts.adopt(having, lambda row, k=k: row.program.scalars[k])  # type: ignore[misc]

    @property
    def _staged(self) -> list[Row]:
        """Live rows that work on copies."""
        return [row for bucket in self.buckets for row in bucket.staged]

    # a step

    def begin(self) -> None:
        """Bring to the device what a step needs."""
        changed = self.cells_changed
        if self._cells_to_capture is None and self.device.type == "cuda" and not is_capturing():
            self._cells_to_capture = torch.empty_like(self.cells, device="cpu", pin_memory=True)
        # on the host they are the same memory, unless that is none
        if changed and (self.device.type != "cpu" or is_traced()):
            self._upload_cells()
        elif changed:
            for bucket in self.buckets:
                bucket.cells_changed = False
        for counts in self.counters:
            counts.fetch_shared()
        staged = self._staged
        if staged:
            self.copies.bring(staged, (GRAD,) if self.measures_grads else (GRAD, PARAM))

    def bring_params(self) -> None:
        """What `begin` has left until all gradients are on their way, which are measured meanwhile."""
        staged = self._staged if self.measures_grads else []
        if staged:
            self.copies.bring(staged, (PARAM,))

    def sweep(self, k: int, skips: bool) -> None:
        """Sweep `k`, with its sums taken over all ranks that hold parts of a tensor."""
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
            raise RuntimeError("between two captures of a step() one must be taken that is not captured")
        else:
            source, self._cells_to_capture = self._cells_to_capture, None
            _READ_BY_GRAPHS.append(source)
            source.copy_(torch.from_numpy(self.host_cells))
            self.cells.copy_(source, non_blocking=True)
        for bucket in self.buckets:
            # a capture only says what a replay will do
            bucket.cells_changed = captures

    def update(self, k: int, amp: Amp) -> None:
        """Sweep `k` of everything live, in place."""
        if k < self.sweep_count:
            self.executable.prepare(k, amp)
            self.sweep(k, skips=self.spec.skip_nonfinite or amp.found_inf is not None)

    def end(self) -> None:
        """Bring to where it belongs what a step has written elsewhere, so far as it came."""
        staged = self._staged if self._has_params else []
        self._has_params = False
        if staged:
            self.copies.send_back(staged, self.spec)
        for counts in self.counters:
            counts.publish_shared()


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
    # as they are stepped
    tables.sort(key=lambda table: table.turn)
    if settings.norm_ranks is not None or len(tables) > 1:
        # with other ranks all are clipped together, and one column tells of them
        clip_ids = np.zeros(1, np.int64)
        if settings.norm_ranks is None:
            clip_ids = np.concatenate([table.clip_ids for table in tables])
        # one for all tables of a device, of which there may be hundreds
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
