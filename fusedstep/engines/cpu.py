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

from .. import _rules, _scalars
from .._cache import kept_on_disk
from . import (
    AVERAGE,
    FOUND,
    GRADIENT,
    GROUP,
    KEEP,
    LIMIT,
    LIMIT_EPS,
    LIVE,
    NUMEL,
    OPTIONS,
    OWN,
    POINTERS,
    RATE,
    SCALE,
    SCALED,
    SEGMENT,
    SIGN,
    SKIP,
    SKIPPED,
    _vector,
    chunk_starts,
    chunks,
    compute_dtype,
)
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
    "where": _inline(_rules.where),
    "sqrt": math.sqrt,
    "cos": math.cos,
    "power": math.pow,
}
# where scalars are float32, what cancels (1 - beta^t) must be rounded before it does
_SINGLE = {**_NUMBERS, "power": _inline(lambda a, b: np.float64(np.float32(math.pow(a, b))))}


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


# the three kernels; these names are bound anew for each rule and signature by `_bound`
scalars_of: Any = None
average: Any = None
clip: Any = None
joined: Any = None
results: Any = None
fill: Any = None
load: Any = None
store: Any = None
load_tail: Any = None
store_tail: Any = None
zeros: Any = None
add: Any = None
add_tail: Any = None
put: Any = None
EXACT: Any = None
INPUTS, ROLES, SCALARS = 0, 0, 0


def _prepare(
    rows, steps, hyper, sums, inputs, everyone, scalars, status, scale, found_inf, counts, first, clips, guards
):
    """Decide whether the step is taken, count it, and prepare the scalars of every live row."""
    measured, segments = everyone
    if first:
        skip = found_inf or (guards and measured[1].sum() != 0)
        status[SKIP], status[FOUND], status[SCALE] = skip, skip, scale
        status[SKIPPED] += skip
    totals = np.zeros(segments.max() + 1 if clips else 0)
    if clips:
        for t in range(len(segments)):
            totals[segments[t]] = joined(totals[segments[t]], np.float64(measured[0, t]))
    options, known = hyper.shape[1] - OPTIONS, np.empty(INPUTS)
    for t in range(rows.shape[0]):
        if rows[t, LIVE] != 0 and status[SKIP] == 0:
            steps[t] += counts
            h = hyper[rows[t, GROUP]]
            if first:
                scalars[t, GRADIENT] = h[SIGN] / scale
                if clips:
                    limit, eps = np.float64(h[LIMIT]), np.float64(h[LIMIT_EPS])
                    scalars[t, GRADIENT] *= clip(totals[rows[t, SEGMENT]], scale, limit, eps)
                keep, rate = average(np.float64(h[AVERAGE]))
                scalars[t, SCALED], scalars[t, KEEP], scalars[t, RATE] = scale, keep, rate
            known[:options] = h[OPTIONS:]
            for k in range(len(inputs)):
                known[options + k] = sums[inputs[k], t]
            values = scalars_of(np.float64(steps[t]), *to_fixed_tuple(known, INPUTS))
            for k in range(scalars.shape[1] - OWN):
                scalars[t, OWN + k] = values[k]


# a job: the next range to take, how many there are, then address and shape of its tables
_NEXT, _RANGES, _CUTS, _CHUNKS, _ROWS, _WIDTH, _SCALARS, _COLUMNS, _PARTIALS = range(9)


def _sweep(job):
    """Take range after range and update the elements of its chunks, until none is left."""
    j = carray(job, 9)
    cuts = carray(_pointer(j[_CUTS], np.int64), j[_RANGES] + 1)
    places = carray(_pointer(j[_CHUNKS], np.int64), (cuts[j[_RANGES]], 2))
    rows = carray(_pointer(j[_ROWS], np.int64), (1 << 62, j[_WIDTH]))
    scalars = carray(_pointer(j[_SCALARS], EXACT), (1 << 62, j[_COLUMNS]))
    while True:
        r = _take(job)
        if r >= j[_RANGES]:
            break
        for c in range(cuts[r], cuts[r + 1]):
            t, begin = places[c]
            end = min(begin + CHUNK, rows[t, NUMEL])
            roles = to_fixed_tuple(rows[t, POINTERS:], ROLES)
            s = fill(to_fixed_tuple(scalars[t], SCALARS))
            full = begin + (end - begin) // LANES * LANES
            sums = zeros()
            for i in range(begin, full, LANES):
                x = results(load(roles, i, LANES), s)
                store(roles, i, LANES, x)
                sums = add(sums, x, LANES)
            if full < end:
                x = results(load_tail(roles, full, end - full), s)
                store_tail(roles, full, end - full, x)
                sums = add_tail(sums, x, end - full)
            put(j[_PARTIALS], c, sums)


def _reduce(partials, firsts, largest, sums):
    """The sums of every tensor from those of its chunks."""
    for k in range(sums.shape[0]):
        for t in range(sums.shape[1]):
            if largest[k]:
                sums[k, t] = 0
                for c in range(firsts[t], firsts[t + 1]):
                    sums[k, t] = _larger(sums[k, t], partials[c, k])
            else:
                sums[k, t] = partials[firsts[t] : firsts[t + 1], k].sum()


def _bound(kernel: Callable, names: dict[str, Any], key: str) -> Callable:
    """`kernel` with `names` bound, called by a name for all that its code depends on: its place on disk."""
    bound = types.FunctionType(kernel.__code__, {**globals(), **names}, kernel.__name__)
    bound.__qualname__, bound.__module__ = f"{kernel.__name__}_{key}", __name__
    return bound


@functools.cache
def _prepare_kernel(
    rule: Callable, clip: Callable, largest: bool, inputs: int, steps: np.dtype, exact: np.dtype
) -> Callable:
    words = _NUMBERS if exact == np.float64 else _SINGLE
    names = {name: _rules.bind(f, words, _inline) for name, f in (("scalars_of", rule), ("clip", clip))}
    names |= {"average": _rules.bind(_scalars.average, words, _inline), "joined": _larger if largest else _sum}
    key = f"{rule.__module__}_{rule.__name__}_{clip.__name__}_{largest}_{inputs}_{steps}_{exact}"
    bound = _bound(_prepare, {**names, "INPUTS": inputs}, key)
    number = numba.from_dtype(exact)
    table, integers = number[:, ::1], nb.int64[:, ::1]
    everyone = nb.Tuple((table, nb.int64[::1]))
    counts, switches = numba.from_dtype(steps)[::1], [nb.boolean] * 5
    signature = nb.void(
        integers, counts, table, table, nb.int64[::1], everyone, table, nb.float32[::1], nb.float64, *switches
    )
    return kept_on_disk(bound, lambda f, cache: _njit(signature, cache=cache)(f))


_sum = _inline(lambda a, b: a + b)
_larger = _inline(_rules.maximum)


@functools.cache
def _sweep_kernel(a_pass: Any, roles: str, dtypes: tuple[torch.dtype, ...], exact: np.dtype) -> Any:
    compute = _vector.FLOATS[compute_dtype(dtypes)]
    reads = [(roles.index(letter), dtypes[roles.index(letter)]) for letter in a_pass.loads]
    writes = [(roles.index(letter), dtypes[roles.index(letter)], i) for letter, i in a_pass.stores]
    names = {
        "results": _results(a_pass),
        "fill": _vector.filler(compute),
        "load": _vector.loader(reads, compute, masked=False),
        "load_tail": _vector.loader(reads, compute, masked=True),
        "store": _vector.storer(writes, masked=False),
        "store_tail": _vector.storer(writes, masked=True),
        "zeros": _vector.zeros(len(a_pass.summed)),
        "add": _vector.adder(a_pass.summed, masked=False),
        "add_tail": _vector.adder(a_pass.summed, masked=True),
        "put": _vector.putter(a_pass.summed),
        "ROLES": len(dtypes),
        "SCALARS": OWN + a_pass.scalar_count,
        "EXACT": exact.type,
    }
    stored = "_".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    called = "_".join(call.update.__name__ for call in a_pass.calls)
    bound = _bound(_sweep, names, f"{called}_{stored}_{exact}")
    signature = nb.void(nb.CPointer(nb.int64))
    return kept_on_disk(bound, lambda f, cache: numba.cfunc(signature, cache=cache, error_model="numpy")(f))


def _results(a_pass: Any) -> Callable:
    """results(loaded, scalars): what the update of a pass gives out, then its extras."""
    results = _inline(lambda x, s: ())
    for call in a_pass.calls:
        results = _with_call(results, _rules.bind(call.update, _VECTORS, _inline), call.takes, call.scalars)
    if a_pass.gradient < 0:
        return results
    given: Any = results
    at, after = a_pass.gradient, a_pass.gradient + 1
    return _inline(lambda x, s: given(x[:at] + (x[at] * s[GRADIENT],) + x[after:] + (x[at],), s))


def _with_call(
    results: Callable, update: Callable, takes: tuple[int, ...], scalars: tuple[int, ...]
) -> Callable:
    taken, numbers = _picker(takes), _picker(scalars)

    def with_call(x, s):
        given = results(x, s)
        return given + update(*(taken(x + given) + numbers(s)))

    return _inline(with_call)


def _picker(places: tuple[int, ...]) -> Callable:
    """pick(values): those at these places."""
    pick = _inline(lambda values: ())
    for place in places:
        pick = _with_value(pick, place)
    return pick


def _with_value(pick: Callable, place: int) -> Callable:
    return _inline(lambda values: pick(values) + (values[place],))


@functools.cache
def _reduce_kernel(exact: np.dtype) -> Callable:
    number = numba.from_dtype(exact)
    signature = nb.void(nb.float64[:, ::1], nb.int64[::1], nb.boolean[::1], number[:, ::1])
    bound = _bound(_reduce, {}, str(exact))
    return kept_on_disk(bound, lambda f, cache: _njit(signature, cache=cache)(f))


class _Sweep:
    """A pass over a table: a kernel and its job for every bucket, and the partial sums they leave."""

    def __init__(self, table: Any, k: int) -> None:
        rows, scalars = table.host_rows, table.scalars.numpy()
        numels = np.concatenate([bucket.numels for bucket in table.buckets])
        self._firsts = chunk_starts(numels, CHUNK)
        self._sums = table.sums.numpy()[table.rule.rows(k)]
        self._largest = np.array([kind == "^" for kind, _ in table.rule.all_passes[k].summed], bool)
        self._partials = np.zeros((self._firsts[-1], len(self._sums)))
        self._reduce = _reduce_kernel(scalars.dtype)
        self._jobs, self._tables, first = [], [], 0
        for bucket in table.buckets:
            a_pass = bucket.rule.all_passes[k]
            kernel = _sweep_kernel(a_pass, bucket.rule.roles, bucket.dtypes, scalars.dtype)
            places, cuts = _ranges(bucket.numels)
            places[:, 0] += first
            partials = self._partials[self._firsts[first] :]
            first += len(bucket.numels)
            job = [0, len(cuts) - 1, cuts.ctypes.data, places.ctypes.data]
            job += [rows.ctypes.data, rows.shape[1], scalars.ctypes.data, scalars.shape[1]]
            self._jobs.append((kernel, np.array([*job, partials.ctypes.data], np.int64)))
            # named here so that they live as long as the job that points to them
            self._tables.append((cuts, places))

    def __call__(self) -> None:
        for kernel, job in self._jobs:
            job[_NEXT] = 0
            _run(kernel, job, min(torch.get_num_threads(), int(job[_RANGES])))
        if len(self._sums):
            self._reduce(self._partials, self._firsts, self._largest, self._sums)


def compile(table) -> None:
    steps, scalars, rule = table.steps.numpy(), table.scalars.numpy(), table.rule
    inputs = table.hyper.shape[1] - OPTIONS + len(rule.inputs)
    clip = table.clip or _scalars.clip
    kernel = _prepare_kernel(rule.scalars, clip, rule.measure.sums == "^", inputs, steps.dtype, scalars.dtype)
    everyone = tuple(t.numpy() for t in table.everyone)
    tables = table.host_rows, steps, table.hyper.numpy(), table.sums.numpy(), np.array(rule.inputs, np.int64)
    table.prepare = functools.partial(kernel, *tables, everyone, scalars, table.status.numpy())
    table.sweeps = {k: _Sweep(table, k) for k in table.used_passes}


def _ranges(numels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tensor, first element) of every chunk, and where to cut that list into ranges of about equal work."""
    tensors, within = chunks(numels, CHUNK)
    starts = within * CHUNK
    sizes = np.minimum(numels[tensors] - starts, CHUNK)
    ends = np.flatnonzero(np.diff(np.cumsum(sizes) // _RANGE, append=-1)) + 1
    return np.stack((tensors, starts), 1).astype(np.int64), np.array([0, *ends], np.int64)


# what tells whether a step is taken lives on the host: reading it waits for nothing


def prepare(table, amp, first: bool) -> None:
    scale = 1.0 if amp.scale is None else float(amp.scale)
    found_inf = amp.found_inf is not None and bool(amp.found_inf)
    counts, clips = first and table.counts, table.clip is not None
    table.prepare(scale, found_inf, counts, first, clips, table.besides.guards)


def sweep(table, k: int, skips: bool) -> None:
    if not skips or table.status.numpy()[SKIP] == 0:
        table.sweeps[k]()
    elif table.rule.all_passes[k].clears:
        torch._foreach_zero_([entry.here["g"] for entry in table.entries if entry.grad is not None])


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
