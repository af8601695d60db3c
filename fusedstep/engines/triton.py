"""The engine for GPUs: two launches of Triton kernels over the plan's tables of addresses.

`_prepare` counts the steps and turns hyper-parameters into scalars, for all tensors of the table.
`_update` then runs one program per chunk of a tensor, one launch per bucket, whatever the number of
tensors and groups. A program reads its row (addresses, size, scalars) and works through its tiles: full
chunks of aligned tensors unmasked and vectorised, the rest masked. Nothing is read back to the host.

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

from .._rules import bind
from . import FULL, GROUP, LIVE, NUMEL, POINTERS, chunks

BY_ADDRESS = True
# read once: every look at a knob of Triton's is a look at the environment
_INTERPRET = triton.knobs.runtime.interpret
# the best for every mix of dtypes on an H200: benchmarks/MEASURED.md
_BLOCK, _TILES, _WARPS = 256, 4, 2
CHUNK = _BLOCK * _TILES
# tensors for which one program prepares scalars
_ROWS = 128

_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_LIVE, _GROUP, _NUMEL, _FULL, _POINTERS = map(tl.constexpr, (LIVE, GROUP, NUMEL, FULL, POINTERS))


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
    return tl.exp(exponent * tl.log(base))


_VOCABULARY = {
    "tl": tl,  # the interpreter looks for it in every function
    "fma": _fma,
    "where": _where,
    "div": _div,
    "sqrt": _sqrt,
    "maximum": _maximum,
    "power": _power,
}
_compiled = functools.cache(lambda rule: bind(rule, _VOCABULARY, triton.jit))


@triton.jit(do_not_specialize_on_alignment=["scale", "found_inf"])
def _prepare(
    rows,
    steps,
    hyper,
    scalars,
    count,
    scale,
    found_inf,
    RULE: tl.constexpr,
    WIDTH: tl.constexpr,
    OPTIONS: tl.constexpr,
    SCALARS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = rows + t * WIDTH
    live = tl.load(row + _LIVE, t < count, other=0) != 0
    if found_inf is not None:
        # one load per row: the interpreter cannot broadcast a truth value
        live = live & (tl.load(found_inf + t * 0) == 0)
    step = tl.load(steps + t, live, other=0).to(scalars.dtype.element_ty) + 1
    tl.store(steps + t, step, live)
    h = hyper + tl.load(row + _GROUP, live, other=0) * (1 + OPTIONS)
    sign = tl.load(h, live, other=1)
    if scale is not None:
        sign = sign / tl.load(scale)
    out = scalars + t * SCALARS
    tl.store(out, sign, live)
    options = ()
    for k in tl.static_range(OPTIONS):
        options = options + (tl.load(h + 1 + k, live, other=0.5),)
    values = RULE(step, *options)
    for k in tl.static_range(SCALARS - 1):
        tl.store(out + 1 + k, values[k], live)


@triton.jit
def _addresses(row, DTYPES: tl.constexpr, ALIGNED: tl.constexpr):
    addresses = ()
    for role in tl.static_range(len(DTYPES)):
        address = tl.load(row + _POINTERS + role).to(tl.pointer_type(DTYPES[role]))
        if ALIGNED:
            address = tl.multiple_of(address, 16)
        addresses = addresses + (address,)
    return addresses


@triton.jit
def _tiles(
    addresses,
    s,
    start,
    numel,
    RULE: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Update TILES x BLOCK elements from `start`, only those below `numel` unless that is None."""
    offsets = start + tl.arange(0, BLOCK)
    ROLES: tl.constexpr = len(addresses)
    # all loads first: enough of them in flight to cover the latency of memory
    loaded = ()
    for tile in tl.static_range(TILES):
        o = offsets + tile * BLOCK
        for role in tl.static_range(ROLES):
            loaded = loaded + (tl.load(addresses[role] + o, None if numel is None else o < numel),)
    targets = addresses[:1] + addresses[2:]
    for tile in tl.static_range(TILES):
        o = offsets + tile * BLOCK
        x = ()
        for role in tl.static_range(ROLES):
            x = x + (loaded[tile * ROLES + role].to(COMPUTE),)
        x = RULE(x[0], x[1] * s[0], *x[2:], *s[1:])
        for k in tl.static_range(ROLES - 1):
            value = x[k].to(targets[k].dtype.element_ty)
            tl.store(targets[k] + o, value, None if numel is None else o < numel)


@triton.jit(do_not_specialize_on_alignment=["found_inf"])
def _update(
    rows,
    scalars,
    places,
    found_inf,
    RULE: tl.constexpr,
    DTYPES: tl.constexpr,
    COMPUTE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALARS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    if found_inf is not None:  # noqa: SIM102  (known when compiling, unlike the next condition)
        if tl.load(found_inf) != 0:
            return
    place = places + tl.program_id(0).to(tl.int64) * 2
    t = tl.load(place)
    start = tl.load(place + 1).to(tl.int64) * (BLOCK * TILES)
    row = rows + t * WIDTH
    s = ()
    for k in tl.static_range(SCALARS):
        s = s + (tl.load(scalars + t * COLUMNS + k).to(COMPUTE),)
    if start < tl.load(row + _FULL):
        _tiles(_addresses(row, DTYPES, True), s, start, None, RULE, COMPUTE, BLOCK, TILES)
    else:
        addresses, numel = _addresses(row, DTYPES, False), tl.load(row + _NUMEL)
        # one tile at a time: this path is rare, and must not cost the other one registers
        for first in range(start, tl.minimum(start + BLOCK * TILES, numel), BLOCK):
            _tiles(addresses, s, first, numel, RULE, COMPUTE, BLOCK, 1)


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
    columns = table.scalars.shape[1]
    constants = _compiled(table.rule.scalars), width, table.hyper.shape[1] - 1, columns, _ROWS
    tables = table.rows, table.steps, table.hyper, table.scalars, count
    table.launch = _Launch(_prepare, triton.cdiv(count, _ROWS), tables, constants, {})
    first = 0
    with _on(table.device):
        table.launch.ready(None, None)
        for bucket in table.buckets:
            tensors, within = chunks(bucket.numels, CHUNK)
            places = np.stack((tensors + first, within), 1).astype(np.int32)
            places = torch.from_numpy(places).to(table.device)
            first += len(bucket.numels)
            dtypes = tuple(_TYPES[dtype] for dtype in bucket.dtypes)
            constants = _compiled(bucket.rule.update), dtypes, _TYPES[bucket.compute_dtype]
            constants += width, columns, 1 + bucket.rule.scalar_count, _BLOCK, _TILES
            options = {"num_warps": _WARPS, "enable_fp_fusion": False}
            tables = table.rows, table.scalars, places
            bucket.launch = _Launch(_update, len(places), tables, constants, options)
            bucket.launch.ready(None)


class _Launch:
    """A kernel with its tables and constants, compiled once for each set of optional arguments.

    A compiled kernel is launched directly: Triton's own look-up costs 13 us more for the same arguments.
    """

    def __init__(self, kernel: Any, programs: int, tables: tuple, constants: tuple, options: dict) -> None:
        self._kernel, self._grid = kernel, (programs, 1, 1)
        self._tables, self._constants, self._options = tables, constants, options
        self._compiled: dict[tuple, Any] = {}

    def ready(self, *optional: torch.Tensor | None) -> Any:
        """The compiled kernel for these, not yet launched."""
        if _INTERPRET:
            return None
        key = tuple(t if t is None else t.dtype for t in optional)
        if key not in self._compiled:
            args = (*self._tables, *optional, *self._constants)
            compiled = self._kernel.warmup(*args, grid=self._grid, **self._options)
            self._compiled[key] = compiled[self._grid]
        return self._compiled[key]

    def __call__(self, *optional: torch.Tensor | None) -> None:
        args = (*self._tables, *optional, *self._constants)
        if _INTERPRET:
            self._kernel[self._grid](*args, **self._options)
        elif self._grid[0]:
            self.ready(*optional)(*args)


def _on(device: torch.device) -> Any:
    """Triton launches on the current device."""
    if device.type == "cpu" or device.index in (None, torch.accelerator.current_device_index()):
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


def step(table, amp) -> None:
    with _on(table.device):
        table.launch(amp.scale, amp.found_inf)
        for bucket in table.buckets:
            bucket.launch(amp.found_inf)
