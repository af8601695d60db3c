"""The engine for GPUs: two launches of Triton kernels over the plan's tables of addresses, or a few more.

`_prepare` counts the steps and turns hyper-parameters into scalars, for all tensors of the table.
`_sweep` then runs one program per chunk of a tensor, one launch per bucket, whatever the number of
tensors and groups. A program reads its row (addresses, size, scalars) and works through its tiles: full
chunks of aligned tensors unmasked and vectorised, the rest masked. If the pass measures something, every
program leaves the sums over its chunk and `_reduce` adds them up for each tensor, in order. Nothing is
read back to the host.

The shape of a chunk was measured, not tuned at run time: an autotuner would run the update several times.
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
from .._rules import bind
from . import FULL, GROUP, LIMIT, LIMIT_EPS, LIVE, NUMEL, OPTIONS, POINTERS, SEGMENT, SIGN, chunks

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
_LIVE, _GROUP, _SEGMENT, _NUMEL, _FULL, _POINTERS = map(
    tl.constexpr, (LIVE, GROUP, SEGMENT, NUMEL, FULL, POINTERS)
)
_SIGN, _LIMIT, _LIMIT_EPS, _OPTIONS = map(tl.constexpr, (SIGN, LIMIT, LIMIT_EPS, OPTIONS))


@triton.jit
def _fma(a, b, c):
    return tl.fma(a, b, c)


@triton.jit
def _where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def _div(a, b):
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def _sqrt(a):
    if a.dtype == tl.float64:
        return tl.sqrt(a)
    else:
        return tl.sqrt_rn(a)


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _power(base, exponent):
    return tl.exp(exponent.to(tl.float64) * tl.log(base.to(tl.float64))).to(base.dtype)


@triton.jit
def _cos(a):
    return tl.cos(a)


_VOCABULARY = {
    "tl": tl,  # the interpreter looks for it in every function
    "fma": _fma,
    "where": _where,
    "div": _div,
    "sqrt": _sqrt,
    "maximum": _maximum,
    "power": _power,
    "cos": _cos,
}
_compiled = functools.cache(lambda rule: bind(rule, _VOCABULARY, triton.jit))


@triton.jit(do_not_specialize_on_alignment=["scale", "found_inf"])
def _prepare(
    rows,
    steps,
    hyper,
    sums,
    norms,
    segments,
    scalars,
    count,
    everyone,
    scale,
    found_inf,
    RULE: tl.constexpr,
    CLIP: tl.constexpr,
    COUNTS: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    HYPER: tl.constexpr,
    SUMS: tl.constexpr,
    SCALARS: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = rows + t * WIDTH
    live = tl.load(row + _LIVE, t < count, other=0) != 0
    if found_inf is not None:
        # one load per row: the interpreter cannot broadcast a truth value
        live = live & (tl.load(found_inf + t * 0) == 0)
    step = tl.load(steps + t, live, other=0).to(scalars.dtype.element_ty)
    if COUNTS:
        step += 1
        tl.store(steps + t, step, live)
    h = hyper + tl.load(row + _GROUP, live, other=0) * HYPER
    out = scalars + t * SCALARS
    if FIRST:
        gradient = tl.load(h + _SIGN, live, other=1)
        if scale is not None:
            gradient = gradient / tl.load(scale)
        if CLIP is not None:
            squares = _peers(tl.load(row + _SEGMENT, live, other=-1), norms, segments, everyone, OTHERS)
            if scale is not None:
                squares = squares / tl.load(scale) / tl.load(scale)
            limit, eps = tl.load(h + _LIMIT, live, other=0), tl.load(h + _LIMIT_EPS, live, other=1)
            gradient = gradient * CLIP(squares, limit, eps)
        tl.store(out, gradient, live)
    inputs = ()
    for k in tl.static_range(HYPER - _OPTIONS):
        inputs = inputs + (tl.load(h + _OPTIONS + k, live, other=0.5),)
    for k in tl.static_range(1, SUMS):
        inputs = inputs + (tl.load(sums + k * count + t, live, other=0),)
    values = RULE(step, *inputs)
    for k in tl.static_range(SCALARS - 1):
        tl.store(out + 1 + k, values[k], live)


@triton.jit
def _peers(segment, norms, segments, everyone, OTHERS: tl.constexpr):
    """For every row, the sum of squares over all rows it is clipped with."""
    squares = tl.zeros(segment.shape, norms.dtype.element_ty)
    for first in range(0, everyone, OTHERS):
        o = first + tl.arange(0, OTHERS)
        other = tl.load(segments + o, o < everyone, other=-2)
        x = tl.load(norms + o, o < everyone, other=0)
        squares += tl.sum(tl.where(segment[:, None] == other[None, :], x[None, :], 0), 1)
    return squares


@triton.jit
def _addresses(row, ROLES: tl.constexpr, DTYPES: tl.constexpr, ALIGNED: tl.constexpr):
    addresses = ()
    for k in tl.static_range(len(ROLES)):
        address = tl.load(row + _POINTERS + ROLES[k]).to(tl.pointer_type(DTYPES[ROLES[k]]))
        if ALIGNED:
            address = tl.multiple_of(address, 16)
        addresses = addresses + (address,)
    return addresses


@triton.jit
def _tiles(
    sources,
    targets,
    s,
    sums,
    start,
    numel,
    RULE: tl.constexpr,
    GRADIENT: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Update TILES x BLOCK elements from `start`, only those below `numel` unless that is None; returns `sums`
    with what is to be summed added.
    """
    offsets = start + tl.arange(0, BLOCK)
    READS: tl.constexpr = len(sources)
    # all loads first: enough of them in flight to cover the latency of memory
    loaded = ()
    for tile in tl.static_range(TILES):
        o = offsets + tile * BLOCK
        for k in tl.static_range(READS):
            loaded = loaded + (tl.load(sources[k] + o, None if numel is None else o < numel),)
    for tile in tl.static_range(TILES):
        o = offsets + tile * BLOCK
        x = ()
        for k in tl.static_range(READS):
            value = loaded[tile * READS + k].to(COMPUTE)
            x = x + (value * s[0] if k == GRADIENT else value,)
        x = RULE(*x, *s[1:])
        for k in tl.static_range(len(targets)):
            value = x[k]
            if targets[k].dtype.element_ty.primitive_bitwidth == 16:
                # by way of 32 bits, as processors do it
                value = value.to(tl.float32)
            value = value.to(targets[k].dtype.element_ty)
            tl.store(targets[k] + o, value, None if numel is None else o < numel)
        added = ()
        for k in tl.static_range(len(sums)):
            term = x[len(targets) + k]
            # what lies beyond may be no number
            added = added + (sums[k] + (term if numel is None else tl.where(o < numel, term, 0)),)
        sums = added
    return sums


@triton.jit(do_not_specialize_on_alignment=["found_inf"])
def _sweep(
    rows,
    scalars,
    places,
    partials,
    found_inf,
    RULE: tl.constexpr,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
    SUMS: tl.constexpr,
    GRADIENT: tl.constexpr,
    DTYPES: tl.constexpr,
    COMPUTE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALARS: tl.constexpr,
    BACKWARDS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    if found_inf is not None:  # noqa: SIM102  (known when compiling, unlike the next condition)
        if tl.load(found_inf) != 0:
            return
    chunk = tl.program_id(0).to(tl.int64)
    if BACKWARDS:
        chunk = tl.num_programs(0) - 1 - chunk
    t = tl.load(places + chunk * 2)
    start = tl.load(places + chunk * 2 + 1).to(tl.int64) * (BLOCK * TILES)
    row = rows + t * WIDTH
    s = ()
    for k in tl.static_range(SCALARS):
        s = s + (tl.load(scalars + t * COLUMNS + k).to(COMPUTE),)
    sums = ()
    for _ in tl.static_range(SUMS):
        sums = sums + (tl.zeros([BLOCK], COMPUTE),)
    if start < tl.load(row + _FULL):
        sources, targets = _addresses(row, READS, DTYPES, True), _addresses(row, WRITES, DTYPES, True)
        sums = _tiles(sources, targets, s, sums, start, None, RULE, GRADIENT, COMPUTE, BLOCK, TILES)
        _put(sums, partials, chunk)
    else:
        sources, targets = _addresses(row, READS, DTYPES, False), _addresses(row, WRITES, DTYPES, False)
        numel = tl.load(row + _NUMEL)
        # one tile at a time: this path is rare, and must not cost the other one registers
        for first in range(start, tl.minimum(start + BLOCK * TILES, numel), BLOCK):
            sums = _tiles(sources, targets, s, sums, first, numel, RULE, GRADIENT, COMPUTE, BLOCK, 1)
        _put(sums, partials, chunk)


@triton.jit
def _put(sums, partials, chunk):
    SUMS: tl.constexpr = len(sums)
    for k in tl.static_range(SUMS):
        tl.store(partials + chunk * SUMS + k, tl.sum(sums[k]))


@triton.jit
def _reduce(partials, firsts, sums, count, SUMS: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of a tensor from those of its chunks."""
    t, k = tl.program_id(0), tl.arange(0, SUMS)
    end = tl.load(firsts + t + 1)
    total = tl.zeros([BLOCK, SUMS], sums.dtype.element_ty)
    for first in range(tl.load(firsts + t), end, 4 * BLOCK):
        # four loads at once, again for the latency of memory
        for j in tl.static_range(4):
            c = first + j * BLOCK + tl.arange(0, BLOCK)
            total += tl.load(partials + c[:, None] * SUMS + k[None, :], c[:, None] < end, other=0)
    tl.store(sums + k * count + t, tl.sum(total, 0))


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


@triton.jit
def _probe(x):
    tl.store(x, 1)


def compile(table) -> None:
    count, width = table.rows.shape
    tables = table.rows, table.steps, table.hyper, table.sums, *table.everyone, table.scalars
    tables += count, len(table.everyone[0])
    clip = _compiled(_scalars.clip) if table.clips else None
    constants = width, table.hyper.shape[1], len(table.sums), table.scalars.shape[1], _ROWS, _OTHERS
    with _on(table.device):
        table.prepare = {}
        for first in {True, len(table.rule.passes) == 1}:
            rule = _compiled(table.rule.scalars), clip, first and table.counts, first
            programs = triton.cdiv(count, _ROWS)
            table.prepare[first] = _Launch(_prepare, programs, tables, 2, rule + constants, {})
        table.sweeps = {k: _Sweep(table, k) for k in table.used_passes}


class _Sweep:
    """A pass over a table: one launch per bucket, and one that adds up what they summed."""

    def __init__(self, table: Any, k: int) -> None:
        sums = table.sums[table.columns(k)]
        # a chunk is small enough to be summed in what it is computed in
        dtype = max((bucket.compute_dtype for bucket in table.buckets), key=lambda dtype: dtype.itemsize)
        tensors, within = chunks(np.concatenate([bucket.numels for bucket in table.buckets]), CHUNK)
        firsts = np.searchsorted(tensors, np.arange(len(table.entries) + 1)).astype(np.int64)
        places = torch.from_numpy(np.stack((tensors, within), 1).astype(np.int32)).to(table.device)
        partials = torch.empty(len(tensors), len(sums), dtype=dtype, device=table.device)
        self._launches, first = [], 0
        for bucket in table.buckets:
            a_pass, roles = bucket.rule.all_passes[k], bucket.rule.roles
            begin, end = firsts[first], firsts[first + len(bucket.numels)]
            first += len(bucket.numels)
            constants = (
                _compiled(a_pass.update),
                *(tuple(map(roles.index, letters)) for letters in (a_pass.reads, a_pass.writes)),
            )
            constants += a_pass.sums, -1 if a_pass.raw else a_pass.reads.find("g")
            constants += tuple(_TYPES[dtype] for dtype in bucket.dtypes), _TYPES[bucket.compute_dtype]
            constants += table.rows.shape[1], table.scalars.shape[1], 1 + a_pass.scalar_count
            # every other pass starts where the last one ended, with what is still in the cache
            constants += k % 2 == 1, _BLOCK, _TILES
            tables = table.rows, table.scalars, places[begin:end], partials[begin:end]
            options = {"num_warps": _WARPS, "enable_fp_fusion": False}
            self._launches.append(_Launch(_sweep, int(end - begin), tables, 1, constants, options))
        self._reduce = None
        if len(sums):
            tables = partials, torch.from_numpy(firsts).to(table.device), sums, len(table.entries)
            options = {"num_warps": _ADDING_WARPS}
            self._reduce = _Launch(_reduce, len(table.entries), tables, 0, (len(sums), _ADDED), options)

    def __call__(self, found_inf: torch.Tensor | None) -> None:
        for launch in self._launches:
            launch(found_inf)
        if self._reduce is not None:
            self._reduce()


class _Launch:
    """A kernel with its tables and constants, compiled once for each set of optional arguments."""

    def __init__(
        self, kernel: Any, programs: int, tables: tuple, optional: int, constants: tuple, options: dict
    ) -> None:
        self._kernel, self._grid = kernel, (programs, 1, 1)
        self._tables, self._constants, self._options = tables, constants, options
        # a tensor would be asked for its address at every launch, and the driver for that
        self._addresses = tuple(map(_address, tables))
        # compiled now, so that nothing can fail once something has been written
        self._compiled = {} if _INTERPRET else {(None,) * optional: self._compile((None,) * optional)}

    def _compile(self, optional: tuple) -> Any:
        args = (*self._tables, *optional, *self._constants)
        compiled = self._kernel.warmup(*args, grid=self._grid, **self._options)
        return _launcher(compiled, self._grid, self._tables[0].device.index)

    def __call__(self, *optional: torch.Tensor | None) -> None:
        if _INTERPRET:
            self._kernel[self._grid](*self._tables, *optional, *self._constants, **self._options)
        elif self._grid[0]:
            key = tuple([t if t is None else t.dtype for t in optional])
            if key not in self._compiled:
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
        table.prepare[first](amp.scale, amp.found_inf)


def sweep(table, k: int, amp) -> None:
    with _on(table.device):
        table.sweeps[k](amp.found_inf)
