"""The engine for GPUs: two launches of Triton kernels over a table of addresses, or a few more.

Nothing is read back to the host, and nothing is asked twice: whatever a launch needs is bound when the table is
built. The shape of a chunk was measured, not tuned at run time: an autotuner would run the update several
times.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from ..._algorithm.formats import Plane
from ..._algorithm.program import Program, Scalars
from .. import SIZES, Amp, chunk_starts, chunks, is_capturing, sent
from .prepare import INPUTS, fusedstep_prepare
from .source import scalars_function, sweep_function
from .sums import fusedstep_reduce
from .sweep import fusedstep_sweep

NAME = "triton"
BY_ADDRESS = True
# read once: Triton reads the environment each time
_INTERPRET = triton.knobs.runtime.interpret


class _Shape(NamedTuple):
    """How a chunk is worked through: elements of a tile, tiles at once, warps, registers of a thread."""

    tile: int
    tiles: int
    warps: int
    registers: int | None = None


def _shape(planes: Sequence[Plane]) -> _Shape:
    """The best for such planes on an H200: benchmarks/MEASURED.md."""
    if all(plane.block == 1 for plane in planes):
        return _Shape(256, 4, 2)
    # decoding 8 bits takes so many instructions that more warps help, as long as nothing is spilled
    rest = next((plane.dtype for plane in planes if plane.name == "master_rest"), None)
    return _Shape(512, 2, 2, {None: 64, torch.int8: 68, torch.int16: 72}[rest])


# rows that one program prepares scalars for, and how many other rows it reads at once
_ROWS, _OTHERS = 32, 256
# chunks that a program adds up at once
_ADDED, _ADDING_WARPS = 2048, 16

_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int16: tl.int16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}


@triton.jit
def _probe(x):
    tl.store(x, 1)


def unavailable(device_type: str) -> str | None:
    if _INTERPRET:
        return None
    if device_type == "cpu":
        return "Triton runs on CPU tensors only in its interpreter; set TRITON_INTERPRET=1 before importing it"
    try:
        _probe[(1,)](torch.zeros(1, dtype=torch.int32, device=device_type))
    except Exception as error:  # no compiler, no driver, an unknown device: Triton has no common error
        return f"Triton cannot run a kernel there ({type(error).__name__}: {error})"
    return None


def chunk(program: Program) -> int:
    """More for 8 bits: there are fewer bytes to move, and as much to do before."""
    return 1024 if program.block == 1 else 4096


def bind(table: Any) -> Executable:
    with on(table.device):
        return Executable(table)


class Executable:
    """The launches of a table's programs."""

    def __init__(self, table: Any) -> None:
        self._device = table.device
        numels = np.concatenate([bucket.numels for bucket in table.buckets])
        sizes = np.concatenate([np.full(len(bucket.rows), chunk(bucket.program)) for bucket in table.buckets])
        # the row of every chunk of the table, and its number within that
        places = sent(torch.from_numpy(np.stack(chunks(numels, sizes), 1).astype(np.int32)), table.device)
        firsts = chunk_starts(numels, sizes)
        self._prepares: list[list[_Launch]] = []
        self._sweeps: list[list[_Launch]] = []
        for k in range(table.sweep_count):
            runs = [*table.scalar_runs(k)]
            self._prepares.append([_prepare(table, run, tells=i == 0) for i, run in enumerate(runs)])
            runs_of_folds = table.fold_runs(k)
            self._sweeps.append(
                [launch for run in runs_of_folds for launch in _sweep(table, k, run, places, firsts)]
            )

    def prepare(self, k: int, amp: Amp) -> None:
        given = () if amp.scale is None and amp.found_inf is None else amp
        with on(self._device):
            for launch in self._prepares[k]:
                launch(*given)

    def sweep(self, k: int, skips: bool) -> None:
        with on(self._device):
            for launch in self._sweeps[k]:
                launch()


def _prepare(table: Any, run: tuple[Scalars, int, int], tells: bool) -> _Launch:
    """Computes scalars of consecutive rows that have the same code for them."""
    scalars, first, end = run

    def source(kind: str, which: Any) -> tuple[int, ...]:
        if kind in SIZES:
            return INPUTS.index("size"), SIZES[kind], 0
        is_max = kind == "clip_total" and table.shared_kinds[which] == "max"
        place = table.option_columns[which] if kind == "option" else which
        return INPUTS.index(kind), place if isinstance(place, int) else 0, int(is_max)

    measured, clip_ids = table.shared
    tables = (
        table.cells,
        table.steps,
        table.kept,
        table.options,
        table.sums,
        measured,
        clip_ids,
        table.scalars,
        table.status,
    )
    numbers = first, end, len(table.rows), len(clip_ids)
    decides = scalars.skip is not None
    constants = {
        "SCALARS": scalars_function(scalars, table.scalars.dtype == torch.float64),
        "SOURCES": tuple(source(*at) for at in scalars.inputs),
        "COLUMNS": len(scalars.columns),
        "FIRST_COLUMN": scalars.first_column,
        "DECIDES": decides,
        "COUNTS": decides and table.counts,
        "TELLS": tells,
        "KEPT": len(scalars.kept),
        "CELLS_WIDTH": table.cells.shape[1],
        "OPTIONS_WIDTH": table.options.shape[1],
        "SCALARS_WIDTH": table.scalars.shape[1],
        "BLOCK": _ROWS,
        "OTHERS": _OTHERS,
    }
    programs = triton.cdiv(end - first, _ROWS)
    return _Launch(fusedstep_prepare, programs, (*tables, *numbers), 2, constants, {})


def _sweep(table: Any, k: int, run: Any, places: torch.Tensor, firsts: np.ndarray) -> Iterator[_Launch]:
    """One launch per bucket, and one that adds up their sums over chunks."""
    first_fold, kinds, buckets = run
    maxes = tuple(kind == "max" for kind in kinds)
    # a chunk is small enough to be summed in the type computed in
    dtype = max((b.program.compute_dtype for b in table.buckets), key=lambda dtype: dtype.itemsize)
    partials = torch.empty(len(places), len(kinds), dtype=dtype, device=table.device)
    for bucket in buckets:
        begin, end = (int(firsts[bucket.first_row + i]) for i in (0, len(bucket.rows)))
        program, sweep = bucket.program, bucket.program.sweeps[k]
        planes, stores = program.planes, tuple(place for place, _ in sweep.stores)
        touched = [planes[place] for place in (*sweep.loads, *stores)]
        share, shape = max((plane.block for plane in touched), default=1), _shape(touched)
        constants = {
            "RULE": sweep_function(sweep, program.name, planes),
            "LOADS": sweep.loads,
            "STORES": stores,
            "LOAD_SHARES": tuple(planes[place].block for place in sweep.loads),
            "STORE_SHARES": tuple(planes[place].block for place in stores),
            "EXACT": tuple(planes[place].is_exact for place in stores),
            "DRAWS": sweep.draws,
            "COLUMNS": sweep.columns,
            "MAXES": maxes,
            # the sweep that measures gradients comes before the decision
            "SKIPS": k > 0 or not table.spec.measures_first,
            "CLEARS": 1 if sweep.clears else None,
            "DTYPES": tuple(_TYPES[plane.dtype] for plane in planes),
            "COMPUTE": _TYPES[program.compute_dtype],
            "SHARE": share,
            "CELLS_WIDTH": table.cells.shape[1],
            "SCALARS_WIDTH": table.scalars.shape[1],
            # every other sweep starts where the last one ended, with what is still in the cache
            "BACKWARDS": (k + int(not table.spec.measures_first)) % 2 == 1,
            "BLOCK": shape.tile,
            "TILES": shape.tiles,
            "LOOPS": chunk(program) // (shape.tile * shape.tiles),
        }
        tables = table.cells, table.scalars, table.status, table.steps, places, partials, begin
        options = {"num_warps": shape.warps, "enable_fp_fusion": False, "maxnreg": shape.registers}
        yield _Launch(fusedstep_sweep, end - begin, tables, 0, constants, options)
    if kinds:
        first_row, end_row = buckets[0].first_row, buckets[-1].end_row
        # views that begin at the first row of the run; the stride between sums is that of the whole table
        sums = table.sums[first_fold : first_fold + len(kinds), first_row:]
        added = partials, sent(torch.from_numpy(firsts[first_row:]), table.device), sums, len(table.rows)
        constants = {"MAXES": maxes, "BLOCK": _ADDED}
        yield _Launch(fusedstep_reduce, end_row - first_row, added, 0, constants, {"num_warps": _ADDING_WARPS})


class _Launch:
    """A kernel with its tables and constants, compiled once for each set of optional arguments."""

    def __init__(
        self, kernel: Any, programs: int, tables: tuple, optional: int, constants: dict, options: dict
    ) -> None:
        """`constants` are in the order of the kernel's arguments."""
        self._kernel, self._grid = kernel, (programs, 1, 1)
        self._tables, self._constants, self._options = tables, tuple(constants.values()), options
        # for a tensor, Triton would ask for its address, and the driver about that, at every launch
        self._addresses = tuple(map(_address, tables))
        self._without = (None,) * optional
        self._compiled: dict[tuple, Any] = {}
        # compiled now, so that nothing can fail once something has been written
        if not _INTERPRET:
            arguments = *self._addresses, *self._without, *self._constants
            self._bare = functools.partial(self._compile(self._without), *arguments)

    def _compile(self, optional: tuple) -> Any:
        args = (*self._tables, *optional, *self._constants)
        device = self._tables[0].device
        # new tables mostly need the kernels of earlier ones, and Triton takes long to find these again
        special = map(_specialised, (*self._tables, *optional))
        key = self._kernel, device, *special, *self._constants, *self._options.items()
        if key not in _compiled:
            _compiled[key] = self._kernel.warmup(*args, grid=self._grid, **self._options)
        return _launcher(_compiled[key], self._grid, device)

    def __call__(self, *optional: torch.Tensor | None) -> None:
        """Launch with these optional arguments, or without any."""
        if _INTERPRET:
            arguments = *self._tables, *(optional or self._without), *self._constants
            self._kernel[self._grid](*arguments, **self._options)
        elif self._grid[0] and not optional:
            self._bare()
        elif self._grid[0]:
            key = tuple([t if t is None else t.dtype for t in optional])
            if key not in self._compiled:
                if is_capturing():
                    raise RuntimeError(
                        "a CUDA graph can capture a step() with grad_scale or found_inf only after one with "
                        "them that was not captured: take one, then capture"
                    )
                self._compiled[key] = self._compile(optional)
            self._compiled[key](*self._addresses, *map(_address, optional), *self._constants)


_compiled: dict[tuple, Any] = {}


def _specialised(argument: Any) -> Any:
    """What Triton compiles for: dtype and alignment of memory, special properties of a number."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument.bit_length() < 32
    return argument


def _launcher(compiled: Any, grid: tuple[int, int, int], device: torch.device) -> Any:
    """Launches a compiled kernel as torch's compiler does: 5 us instead of the 21 of Triton's front door."""
    if device.type != "cuda":
        # beyond it, other backends take other arguments
        return compiled[grid]
    run, stream = compiled.run, triton.runtime.driver.active.get_current_stream
    fixed = compiled.function, compiled.packed_metadata, None, None, None
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    hooked = [getattr(hook, "calls", hook) for hook in hooks]
    front_door = compiled[grid]

    def launch(*args: Any) -> None:
        if any(hooked):  # somebody wants to be told: a profiler
            front_door(*args)
        else:
            run(*grid, stream(device.index), *fixed, *args)

    return launch


def _address(argument: Any) -> Any:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def on(device: torch.device) -> Any:
    """Make this device current: Triton launches there."""
    if device.type == "cpu" or device.index in (None, torch.accelerator.current_device_index()):
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)
