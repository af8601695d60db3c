"""The engine for GPUs: two launches of Triton kernels over the plan's tables of addresses, or a few more.

Nothing is read back to the host, and nothing is asked twice: whatever a launch needs is bound when the plan is
built. The shape of a chunk was measured, not tuned at run time: an autotuner would run the update several
times.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from .. import _scalars
from . import OWN, chunk_starts, chunks, is_capturing
from ._triton_kernels import fusedstep_prepare, fusedstep_reduce, fusedstep_sweep, in_triton, probe

BY_ADDRESS = True
# read once: every look at a knob of Triton's is a look at the environment
_INTERPRET = triton.knobs.runtime.interpret
# the best for every mix of dtypes on an H200: benchmarks/MEASURED.md
_BLOCK, _TILES, _WARPS = 256, 4, 2
CHUNK = _BLOCK * _TILES
# tensors for which one program prepares scalars, and how many others it looks at together
_ROWS, _OTHERS = 32, 256
# chunks that a program adds up at once
_ADDED, _ADDING_WARPS = 2048, 16

_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def unavailable(device_type: str) -> str | None:
    if _INTERPRET:
        return None
    if device_type == "cpu":
        return "Triton runs on CPU tensors only in its interpreter; set TRITON_INTERPRET=1 before importing it"
    try:
        probe[(1,)](torch.zeros(1, dtype=torch.int32, device=device_type))
    except Exception as error:  # no compiler, no driver, an unknown device: Triton has no common error
        return f"Triton cannot run a kernel there ({type(error).__name__}: {error})"
    return None


def compile(table) -> None:
    count, width = table.rows.shape
    measured, segments = table.everyone
    tables = table.rows, table.steps, table.hyper, table.sums, measured, segments, table.scalars, table.status
    counted = *tables, count, len(segments)
    numels = np.concatenate([bucket.numels for bucket in table.buckets])
    places = torch.from_numpy(np.stack(chunks(numels, CHUNK), 1).astype(np.int32)).to(table.device)
    firsts = chunk_starts(numels, CHUNK)
    with _on(table.device):
        table.prepare = {}
        for first in {True, len(table.rule.passes) == 1}:
            constants = {
                "RULE": in_triton(table.rule.scalars),
                "AVERAGE": in_triton(_scalars.average),
                "CLIP": None if table.clip is None else in_triton(table.clip),
                "LARGEST": _is_largest(table.rule.measure.sums),
                "GUARDS": table.besides.guards,
                "COUNTS": first and table.counts,
                "FIRST": first,
                "WIDTH": width,
                "HYPER": table.hyper.shape[1],
                "INPUTS": table.rule.inputs,
                "SCALARS": table.scalars.shape[1],
                "BLOCK": _ROWS,
                "OTHERS": _OTHERS,
            }
            programs = triton.cdiv(count, _ROWS)
            table.prepare[first] = _Launch(fusedstep_prepare, programs, counted, 2, constants, {})
        table.sweeps = {k: _Sweep(table, k, places, firsts) for k in table.used_passes}


def _is_largest(kind: str) -> bool:
    return kind == "^"


class _Sweep:
    """A pass over a table: one launch per bucket, and one that adds up what they summed."""

    def __init__(self, table: Any, k: int, places: torch.Tensor, firsts: np.ndarray) -> None:
        sums = table.sums[table.rule.rows(k)]
        # a chunk is small enough to be summed in what it is computed in
        dtype = max((bucket.compute_dtype for bucket in table.buckets), key=lambda dtype: dtype.itemsize)
        partials = torch.empty(len(places), len(sums), dtype=dtype, device=table.device)
        self._launches, first = [], 0
        for bucket in table.buckets:
            begin, end = (int(firsts[i]) for i in (first, first + len(bucket.numels)))
            first += len(bucket.numels)
            a_pass, roles = bucket.rule.all_passes[k], bucket.rule.roles
            calls = tuple((in_triton(call.update), call.takes, call.scalars) for call in a_pass.calls)
            constants = {
                "CALLS": calls,
                # for Triton's cache, which knows functions within a tuple by their names only
                "CODE": "".join(getattr(update, "cache_key", "") for update, *_ in calls),
                "LOADS": tuple(map(roles.index, a_pass.loads)),
                "WRITES": tuple(roles.index(letter) for letter, _ in a_pass.stores),
                "STORES": tuple(i for _, i in a_pass.stores),
                "SUMMED": tuple((i, _is_largest(kind)) for kind, i in a_pass.summed),
                "GRADIENT": a_pass.gradient,
                # gradients are measured before that is decided
                "SKIPS": k > 0,
                "CLEARS": roles.index("g") if a_pass.clears else None,
                "DTYPES": tuple(_TYPES[dtype] for dtype in bucket.dtypes),
                "COMPUTE": _TYPES[bucket.compute_dtype],
                "WIDTH": table.rows.shape[1],
                "COLUMNS": table.scalars.shape[1],
                "SCALARS": OWN + a_pass.scalar_count,
                # every other pass starts where the last one ended, with what is still in the cache
                "BACKWARDS": k % 2 == 1,
                "BLOCK": _BLOCK,
                "TILES": _TILES,
            }
            tables = table.rows, table.scalars, table.status, places[begin:end], partials[begin:end]
            options = {"num_warps": _WARPS, "enable_fp_fusion": False}
            self._launches.append(_Launch(fusedstep_sweep, end - begin, tables, 0, constants, options))
        self._reduce = None
        if len(sums):
            added = partials, torch.from_numpy(firsts).to(table.device), sums, len(table.entries)
            kinds = tuple((i, _is_largest(kind)) for kind, i in table.rule.all_passes[k].summed)
            constants = {"SUMMED": kinds, "BLOCK": _ADDED}
            options = {"num_warps": _ADDING_WARPS}
            self._reduce = _Launch(fusedstep_reduce, len(table.entries), added, 0, constants, options)

    def __call__(self) -> None:
        for launch in self._launches:
            launch()
        if self._reduce is not None:
            self._reduce()


class _Launch:
    """A kernel with its tables and constants, compiled once for each set of optional arguments."""

    def __init__(
        self, kernel: Any, programs: int, tables: tuple, optional: int, constants: dict, options: dict
    ) -> None:
        """`constants` in the order of the kernel's arguments."""
        self._kernel, self._grid = kernel, (programs, 1, 1)
        self._tables, self._constants, self._options = tables, tuple(constants.values()), options
        # a tensor would be asked for its address at every launch, and the driver for that
        self._addresses = tuple(map(_address, tables))
        self._without = (None,) * optional
        self._compiled: dict[tuple, Any] = {}
        # compiled now, so that nothing can fail once something has been written
        if not _INTERPRET:
            arguments = *self._addresses, *self._without, *self._constants
            self._bare = functools.partial(self._compile(self._without), *arguments)

    def _compile(self, optional: tuple) -> Any:
        args = (*self._tables, *optional, *self._constants)
        compiled = self._kernel.warmup(*args, grid=self._grid, **self._options)
        return _launcher(compiled, self._grid, self._tables[0].device.index)

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


def _launcher(compiled: Any, grid: tuple[int, int, int], device: int) -> Any:
    """Launches a compiled kernel as torch's compiler does: 5 us instead of the 21 of Triton's front door."""
    run, stream = compiled.run, triton.runtime.driver.active.get_current_stream
    fixed = compiled.function, compiled.packed_metadata, None, None, None
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    hooked = [getattr(hook, "calls", hook) for hook in hooks]
    front_door = compiled[grid]

    def launch(*args: Any) -> None:
        if any(hooked):  # somebody wants to be told: a profiler
            front_door(*args)
        else:
            run(*grid, stream(device), *fixed, *args)

    return launch


def _address(argument: Any) -> Any:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def _on(device: torch.device) -> Any:
    """Triton launches on the current device."""
    if device.type == "cpu" or device.index in (None, torch.accelerator.current_device_index()):
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


def prepare(table, amp, first: bool) -> None:
    with _on(table.device):
        given = () if amp.scale is None and amp.found_inf is None else amp
        table.prepare[first](*given)


def sweep(table, k: int, skips: bool) -> None:
    with _on(table.device):
        table.sweeps[k]()
