"""The engine for GPUs: two launches of Triton kernels over the plan's tables of addresses.

`_prepare` counts the steps and turns hyper-parameters into scalars, for all tensors of the table.
`_update` then runs one program per chunk of a tensor, one launch per bucket, whatever the number of
tensors and groups. A program reads its row (addresses, size, scalars) and works through its tiles: full
chunks of aligned tensors unmasked and vectorised, the rest masked. Nothing is read back to the host.

The shape of a chunk was measured, not tuned at run time: an autotuner would run the update several times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from .._rules import bind
from . import FULL, GROUP, LIVE, NUMEL, POINTERS

BY_ADDRESS = True
_BLOCK, _TILES, _WARPS = 512, 4, 4

_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_LIVE, _GROUP, _NUMEL, _FULL, _POINTERS = map(tl.constexpr, (LIVE, GROUP, NUMEL, FULL, POINTERS))


def chunk(bucket) -> int:
    return _BLOCK * _TILES


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


@triton.jit
def _prepare(
    rows,
    steps,
    hyper,
    scalars,
    scale,
    found_inf,
    count,
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
        live = live & (tl.load(found_inf) == 0)
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
def _tile(addresses, s, offsets, mask, RULE: tl.constexpr, COMPUTE: tl.constexpr):
    """Update the elements at `offsets`, all of them if mask is None."""
    x = ()
    for role in tl.static_range(len(addresses)):
        x = x + (tl.load(addresses[role] + offsets, mask).to(COMPUTE),)
    x = RULE(x[0], x[1] * s[0], *x[2:], *s[1:])
    targets = addresses[:1] + addresses[2:]
    for k in tl.static_range(len(targets)):
        tl.store(targets[k] + offsets, x[k].to(targets[k].dtype.element_ty), mask)


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
def _update(
    rows,
    scalars,
    chunks,
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
    if found_inf is not None:
        if tl.load(found_inf) != 0:
            return
    chunk = chunks + tl.program_id(0) * 2
    t = tl.load(chunk)
    start = tl.load(chunk + 1).to(tl.int64) * (BLOCK * TILES)
    row = rows + t * WIDTH
    s = ()
    for k in tl.static_range(SCALARS):
        s = s + (tl.load(scalars + t * COLUMNS + k).to(COMPUTE),)
    offsets = start + tl.arange(0, BLOCK)
    if start < tl.load(row + _FULL):
        addresses = _addresses(row, DTYPES, True)
        for tile in tl.static_range(TILES):
            _tile(addresses, s, offsets + tile * BLOCK, None, RULE, COMPUTE)
    else:
        addresses = _addresses(row, DTYPES, False)
        numel = tl.load(row + _NUMEL)
        for tile in tl.static_range(TILES):
            o = offsets + tile * BLOCK
            _tile(addresses, s, o, o < numel, RULE, COMPUTE)


def unavailable(device_type: str) -> str | None:
    if triton.knobs.runtime.interpret:
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
    first = 0
    for bucket in table.buckets:
        bucket.launch = torch.from_numpy(_chunks(bucket.numels, first)).to(table.device)
        first += len(bucket.numels)


def _chunks(numels: np.ndarray, first: int) -> np.ndarray:
    """(tensor, number of the chunk in it) of every chunk."""
    counts = -(-numels // (_BLOCK * _TILES))
    tensors = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(tensors)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack((tensors + first, within), 1).astype(np.int32)


def step(table, amp) -> None:
    count, width = table.rows.shape
    columns = table.scalars.shape[1]
    _prepare[(triton.cdiv(count, 128),)](
        table.rows,
        table.steps,
        table.hyper,
        table.scalars,
        amp.scale,
        amp.found_inf,
        count,
        _compiled(table.rule.scalars),
        width,
        table.hyper.shape[1] - 1,
        columns,
        128,
    )
    for bucket in table.buckets:
        if len(bucket.launch):
            _update[(len(bucket.launch),)](
                table.rows,
                table.scalars,
                bucket.launch,
                amp.found_inf,
                _compiled(bucket.rule.update),
                tuple(_TYPES[dtype] for dtype in bucket.dtypes),
                _TYPES[bucket.compute_dtype],
                width,
                columns,
                1 + bucket.rule.scalar_count,
                _BLOCK,
                _TILES,
                num_warps=_WARPS,
                enable_fp_fusion=False,
            )
