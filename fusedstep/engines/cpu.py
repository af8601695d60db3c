"""The engine for CPU tensors: rules compiled by Numba over the plan's tables of addresses.

One call updates all tensors of a bucket. Large tensors are cut into chunks and small ones packed, into
ranges of about equal work that threads take one after the other; who takes which does not change a bit
of the result. The threads are the OpenMP team that torch itself runs on, honouring
`torch.get_num_threads()`: after a backward they are still awake, and threads of our own would fight them
for the cores (measured: 4 ms a step). Where that team cannot be had (another compiler's OpenMP, a forked
child), Python's threads do the work.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray
from numba.core import types as nb
from numba.extending import intrinsic
from numba.np.unsafe.ndarray import to_fixed_tuple

from .._cache import kept_on_disk
from .._rules import bind
from . import GROUP, LIVE, NUMEL, POINTERS, _vector, chunks, compute_dtype
from ._vector import LANES

BY_ADDRESS = True
# elements: a chunk fits the caches, a range is worth a turn of a thread
CHUNK, _RANGE = 1 << 16, 1 << 19


def unavailable(device_type: str) -> str | None:
    return None if device_type == "cpu" else "the cpu engine takes parameters on the CPU"


_njit = functools.partial(numba.njit, error_model="numpy", nogil=True)
_inline = functools.partial(_njit, forceinline=True)

# for rules, on vectors
_VECTORS = {name: getattr(_vector, name) for name in ("fma", "div", "where", "maximum", "sqrt")}
# for their scalars, on numbers
_NUMBERS = {
    "where": _inline(lambda condition, a, b: a if condition else b),
    "sqrt": math.sqrt,
    "power": math.pow,
}


@intrinsic
def _pointer(typing_context, address, kind):
    """An address as a pointer to numbers of `kind`."""
    pointer = nb.CPointer(kind.dtype)
    return pointer(address, kind), lambda context, builder, signature, args: builder.inttoptr(
        args[0], context.get_value_type(pointer)
    )


@intrinsic
def _take(typing_context, counter):
    """Add one to what `counter` points to, at once for all threads, and return what it was."""
    return nb.int64(counter), lambda context, builder, signature, args: builder.atomic_rmw(
        "add", args[0], ir.IntType(64)(1), "monotonic"
    )


# the two kernels; these names are bound anew for each rule and signature by `_bound`
prepare: Any = None
update: Any = None
load: Any = None
store: Any = None
load_tail: Any = None
store_tail: Any = None
fill: Any = None
OPTIONS, ROLES, SCALARS = 0, 0, 0


def _prepare(rows, steps, hyper, scalars, scale):
    """Count the step of every live row and prepare its scalars."""
    for t in range(rows.shape[0]):
        if rows[t, LIVE] != 0:
            steps[t] += 1
            h = hyper[rows[t, GROUP]]
            scalars[t, 0] = h[0] / scale
            values = prepare(np.float64(steps[t]), *to_fixed_tuple(h[1:], OPTIONS))
            for k in range(scalars.shape[1] - 1):
                scalars[t, k + 1] = values[k]


# a job: the next range to take, how many there are, then address and shape of the four tables
_NEXT, _RANGES, _CUTS, _CHUNKS, _ROWS, _WIDTH, _SCALARS, _COLUMNS = range(8)


def _update(job):
    """Take range after range and update the elements of its chunks, until none is left."""
    j = carray(job, 8)
    cuts = carray(_pointer(j[_CUTS], np.int64), j[_RANGES] + 1)
    places = carray(_pointer(j[_CHUNKS], np.int64), (cuts[j[_RANGES]], 2))
    rows = carray(_pointer(j[_ROWS], np.int64), (1 << 62, j[_WIDTH]))
    scalars = carray(_pointer(j[_SCALARS], np.float64), (1 << 62, j[_COLUMNS]))
    while True:
        r = _take(job)
        if r >= j[_RANGES]:
            break
        for c in range(cuts[r], cuts[r + 1]):
            t, begin = places[c]
            end = min(begin + CHUNK, rows[t, NUMEL])
            roles = to_fixed_tuple(rows[t, POINTERS:], ROLES)
            targets = roles[:1] + roles[2:]
            s = fill(to_fixed_tuple(scalars[t], SCALARS))
            full = begin + (end - begin) // LANES * LANES
            for i in range(begin, full, LANES):
                x = load(roles, i, LANES)
                x = x[:1] + (x[1] * s[0],) + x[2:]
                store(targets, i, LANES, update(*(x + s[1:])))
            if full < end:
                x = load_tail(roles, full, end - full)
                x = x[:1] + (x[1] * s[0],) + x[2:]
                store_tail(targets, full, end - full, update(*(x + s[1:])))


def _bound(kernel: Callable, names: dict[str, Any], key: str) -> Callable:
    """`kernel` with `names` bound, called by a name for all that its code depends on: its place on disk."""
    bound = types.FunctionType(kernel.__code__, {**globals(), **names}, kernel.__name__)
    bound.__qualname__, bound.__module__ = f"{kernel.__name__}_{key}", __name__
    return bound


@functools.cache
def _prepare_kernel(rule: Callable, steps_dtype: np.dtype) -> Callable:
    names = {"prepare": bind(rule, _NUMBERS, _inline), "OPTIONS": rule.__code__.co_argcount - 1}
    bound = _bound(_prepare, names, rule.__name__)
    table = nb.float64[:, ::1]
    signature = nb.void(nb.int64[:, ::1], numba.from_dtype(steps_dtype)[::1], table, table, nb.float64)
    return kept_on_disk(bound, lambda f, cache: _njit(signature, cache=cache)(f))


@functools.cache
def _update_kernel(rule: Callable, scalars: int, dtypes: tuple[torch.dtype, ...]) -> Any:
    compute = _vector.FLOATS[compute_dtype(dtypes)]
    names = {
        "update": bind(rule, _VECTORS, _inline),
        "load": _vector.loader(dtypes, compute, masked=False),
        "load_tail": _vector.loader(dtypes, compute, masked=True),
        "store": _vector.storer(dtypes[:1] + dtypes[2:], masked=False),
        "store_tail": _vector.storer(dtypes[:1] + dtypes[2:], masked=True),
        "fill": _vector.filler(compute),
        "ROLES": len(dtypes),
        "SCALARS": 1 + scalars,
    }
    stored = "_".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    bound = _bound(_update, names, f"{rule.__name__}_{stored}")
    signature = nb.void(nb.CPointer(nb.int64))
    return kept_on_disk(bound, lambda f, cache: numba.cfunc(signature, cache=cache, error_model="numpy")(f))


def compile(table) -> None:
    first = 0
    rows, scalars = table.host_rows, table.scalars.numpy()
    for bucket in table.buckets:
        kernel = _update_kernel(bucket.rule.update, bucket.rule.scalar_count, bucket.dtypes)
        places, cuts = _ranges(bucket.numels)
        places[:, 0] += first
        first += len(bucket.numels)
        job = [0, len(cuts) - 1, cuts.ctypes.data, places.ctypes.data]
        job += [rows.ctypes.data, rows.shape[1], scalars.ctypes.data, scalars.shape[1]]
        # the tables are named here so that they live as long as the job that points to them
        bucket.launch = kernel, np.array(job, np.int64), (cuts, places)
    _prepare_kernel(table.rule.scalars, table.steps.numpy().dtype)


def _ranges(numels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tensor, first element) of every chunk, and where to cut that list into ranges of about equal work."""
    tensors, within = chunks(numels, CHUNK)
    starts = within * CHUNK
    sizes = np.minimum(numels[tensors] - starts, CHUNK)
    ends = np.flatnonzero(np.diff(np.cumsum(sizes) // _RANGE, append=-1)) + 1
    return np.stack((tensors, starts), 1).astype(np.int64), np.array([0, *ends], np.int64)


def step(table, amp) -> None:
    # both live on the host already: reading them waits for nothing
    if amp.found_inf is not None and float(amp.found_inf):
        return
    scale = 1.0 if amp.scale is None else float(amp.scale)
    steps, scalars = table.steps.numpy(), table.scalars.numpy()
    prepare = _prepare_kernel(table.rule.scalars, steps.dtype)
    prepare(table.host_rows, steps, table.hyper.numpy(), scalars, scale)
    for bucket in table.buckets:
        kernel, job, _ = bucket.launch
        job[_NEXT] = 0
        _run(kernel, job, min(torch.get_num_threads(), int(job[_RANGES])))


def _run(kernel: Any, job: np.ndarray, threads: int) -> None:
    """Let `threads` threads work on a job together."""
    parallel = None if _forked else _openmp()
    if threads <= 1:
        kernel.ctypes(job.ctypes.data_as(_JOB))
    elif parallel is not None:
        parallel(kernel.address, job.ctypes.data, threads, 0)
    else:
        futures = [_pool().submit(kernel.ctypes, job.ctypes.data_as(_JOB)) for _ in range(threads)]
        for future in futures:
            future.result()


_JOB = ctypes.POINTER(ctypes.c_int64)


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
    global _forked
    _forked = True
    _pool.cache_clear()


_forked = False


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork either
    os.register_at_fork(after_in_child=_after_fork)
