"""The cpu engine: sweeps over a table of addresses, and the threads that share them.

Large tensors are cut into chunks, and chunks are packed into ranges of about equal work that threads take one
after the other; which thread takes which does not change a bit of the result. The threads are the OpenMP team
that torch itself runs on, honouring `torch.get_num_threads()`: after a backward they are still awake, and
threads of our own would fight them for the cores (measured: 4 ms a step). Where that team is not available
(another compiler's OpenMP, a forked child), Python's threads do the work.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..._algorithm.program import Program, Scalars, Sweep
from .. import FOUND, SCALE, SKIP, SKIPPED, Amp, chunk_starts, chunks, clip_totals
from .kernels import CHUNK, JOB, PREPARE_JOB, compile_prepare, compile_reduce, compile_sweep

NAME = "cpu"
BY_ADDRESS = True
# elements of a range: enough for a thread to take a turn
_RANGE = 1 << 19

_compiling = threading.Lock()


def unavailable(device_type: str) -> str | None:
    return None if device_type == "cpu" else "the cpu engine takes parameters on the CPU"


def chunk(program: Program) -> int:
    return CHUNK


def bind(table: Any) -> Executable:
    # one thread at a time: we do not rely on LLVM to be safe for more
    with _compiling:
        return Executable(table)


class Executable:
    """The programs of a table, compiled, and the jobs that tell them where its memory is."""

    def __init__(self, table: Any) -> None:
        self._table, self._status = table, table.status.numpy()
        sweeps = range(max(len(bucket.program.sweeps) for bucket in table.buckets))
        self._prepares = [[_Prepare(table, *run) for run in table.scalar_runs(k)] for k in sweeps]
        # for every sweep, whether what comes before it decides if the step is skipped
        self._decides = [any(prepare.decides for prepare in prepares) for prepares in self._prepares]
        self._sweeps = [[_Sweep(table, bucket, k) for bucket in table.buckets_with(k)] for k in sweeps]

    def prepare(self, k: int, amp: Amp) -> None:
        # what decides whether a step is taken is on the host: reading it waits for nothing
        scale = 1.0 if amp.scale is None else float(amp.scale)
        found_inf = 0.0 if amp.found_inf is None else float(amp.found_inf)
        skips = [prepare(scale, found_inf) for prepare in self._prepares[k]]
        if self._decides[k]:
            # all of them find the same
            skip, status = skips[0] != 0, self._status
            status[SKIP], status[FOUND], status[SCALE] = skip, skip, scale
            status[SKIPPED] += skip

    def sweep(self, k: int, skips: bool) -> None:
        if not skips or self._status[SKIP] == 0:
            for sweep in self._sweeps[k]:
                sweep()
        else:
            for bucket in self._table.buckets_with(k):
                if bucket.program.sweeps[k].clears and bucket.live:
                    torch._foreach_zero_(bucket.local_grads())


class _Prepare:
    """Computes scalars of consecutive rows that have the same code for them."""

    def __init__(self, table: Any, scalars: Scalars, first_row: int, end_row: int) -> None:
        self.decides = scalars.skip is not None
        columns = tuple(table.option_columns[name] for kind, name in scalars.inputs if kind == "option")
        dtypes = table.steps.dtype, table.scalars.dtype
        self._kernel = compile_prepare(scalars, columns, table.counts and self.decides, *dtypes)
        self._table, self._together = table, {kind for kind, _ in scalars.inputs if kind.endswith("_total")}
        # views of the table's memory; the two totals are filled before each call
        self._measured, self._ids = (t.numpy() for t in table.shared)
        self._clip_totals = np.zeros((len(self._measured), int(self._ids.max(initial=0)) + 1))
        self._all_totals = np.zeros(len(self._measured))
        on_host = (t.numpy() for t in (table.steps, table.kept, table.options, table.sums))
        arrays = [table.host_cells, *on_host, self._clip_totals, self._all_totals, table.scalars.numpy()]
        self._keep = arrays
        job = [array.ctypes.data for array in arrays]
        job += [array.shape[1] for array in arrays if array.ndim == 2]
        self._job = np.array([*job, first_row, end_row], np.int64)
        assert len(self._job) == len(PREPARE_JOB)
        self._address = self._job.ctypes.data

    def __call__(self, scale: float, found_inf: float) -> float:
        """Returns a number that is not 0 if the step is to be skipped."""
        if "clip_total" in self._together:
            self._add_up_clip_groups()
        if "all_total" in self._together:
            self._measured.sum(axis=1, out=self._all_totals)
        return self._kernel.call(self._address, scale, found_inf)

    def _add_up_clip_groups(self) -> None:
        kinds = self._table.shared_kinds
        # more sums may be shared than those that decide about a step
        for kind, measured, totals in zip(kinds, self._measured, self._clip_totals, strict=False):
            totals[:] = clip_totals(kind, measured, self._ids)


class _Sweep:
    """A pass over the rows of a bucket: the kernel, its job, and the partial sums it leaves."""

    def __init__(self, table: Any, bucket: Any, k: int) -> None:
        sweep: Sweep = bucket.program.sweeps[k]
        rows, scalars, steps = (
            array[bucket.first_row :]
            for array in (table.host_cells, table.scalars.numpy(), table.steps.numpy())
        )
        planes, dtypes = bucket.program.planes, (table.steps.dtype, table.scalars.dtype)
        self._kernel = compile_sweep(sweep, planes, *dtypes)
        places, cuts = _ranges(bucket.numels)
        self._firsts = chunk_starts(bucket.numels, CHUNK)
        self._partials = np.zeros((self._firsts[-1], len(sweep.folds)))
        arrays = [cuts, places, rows, scalars, steps, self._partials]
        job = [0, len(cuts) - 1, *(array.ctypes.data for array in arrays), rows.shape[1], scalars.shape[1]]
        self._job = np.array(job, np.int64)
        self._address, self._ranges = self._job.ctypes.data, len(cuts) - 1
        assert len(self._job) == len(JOB)
        # the job points to them
        self._keep = arrays
        self._reduce = None
        if sweep.folds:
            sums = table.sums.numpy()[sweep.first_fold :, bucket.first_row :]
            kernel = compile_reduce(tuple(fold.kind for fold in sweep.folds), table.sums.dtype)
            addresses = [array.ctypes.data for array in (self._partials, self._firsts, sums)]
            self._reduce = functools.partial(kernel.call, *addresses, len(bucket.numels), table.sums.shape[1])
            self._keep.append(sums)

    def __call__(self) -> None:
        self._job[0] = 0
        _run(self._kernel, self._address, min(torch.get_num_threads(), self._ranges))
        if self._reduce is not None:
            self._reduce()


def _ranges(numels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tensor, first element) of every chunk, and where to cut that list into ranges of about equal work."""
    tensors, within = chunks(numels, CHUNK)
    starts = within * CHUNK
    sizes = np.minimum(numels[tensors] - starts, CHUNK)
    ends = np.flatnonzero(np.diff(np.cumsum(sizes) // _RANGE, append=-1)) + 1
    return np.stack((tensors, starts), 1).astype(np.int64), np.array([0, *ends], np.int64)


def _run(kernel: Any, job: int, threads: int) -> None:
    """Let `threads` threads work on the job at this address together."""
    parallel = None if _forked else _openmp()
    if threads <= 1:
        kernel.call(job)
    elif parallel is not None:
        parallel(kernel.address, job, threads, 0)
    else:
        futures = [_pool().submit(kernel.call, job) for _ in range(threads)]
        for future in futures:
            future.result()


@functools.cache
def _openmp() -> Any:
    """GOMP_parallel of the OpenMP that torch is linked to; LLVM's and Intel's have it too."""
    try:
        parallel = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="fusedstep")


def _after_fork() -> None:
    """A child has none of its parent's threads, and OpenMP would wait for them forever."""
    global _forked, _compiling
    _forked, _compiling = True, threading.Lock()
    _pool.cache_clear()


_forked = False


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork either
    os.register_at_fork(after_in_child=_after_fork)
