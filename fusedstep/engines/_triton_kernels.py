"""The kernels of the triton engine. Profilers show their names, so these say whose they are.

`fusedstep_prepare` counts the steps and turns hyper-parameters into scalars, for all tensors of the table.
`fusedstep_sweep` then runs one program per chunk of a tensor, one launch per bucket, whatever the number of
tensors and groups. A program reads its row (addresses, size, scalars) and works through its tiles: full
chunks of aligned tensors unmasked and vectorised, the rest masked. If the pass measures something, every
program leaves the sums over its chunk and `fusedstep_reduce` adds them up for each tensor, in order.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from .._rules import bind
from . import (
    AVERAGE,
    FOUND,
    FULL,
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
)

_LIVE, _GROUP, _SEGMENT, _NUMEL, _FULL, _POINTERS = map(
    tl.constexpr, (LIVE, GROUP, SEGMENT, NUMEL, FULL, POINTERS)
)
_SIGN, _LIMIT, _LIMIT_EPS, _AVERAGE, _OPTIONS = map(tl.constexpr, (SIGN, LIMIT, LIMIT_EPS, AVERAGE, OPTIONS))
_GRADIENT, _SCALED, _KEEP, _RATE, _OWN = map(tl.constexpr, (GRADIENT, SCALED, KEEP, RATE, OWN))
_SKIP, _SCALE, _SKIPPED, _FOUND = map(tl.constexpr, (SKIP, SCALE, SKIPPED, FOUND))


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
in_triton = functools.cache(lambda rule: bind(rule, _VOCABULARY, triton.jit))


# parts of nested constants, which Triton cannot take apart itself


@triton.constexpr_function
def _part(nested, *places):
    for place in places:
        nested = nested[place]
    return nested


@triton.constexpr_function
def _length(nested, *places):
    for place in places:
        nested = nested[place]
    return len(nested)


@triton.jit(do_not_specialize_on_alignment=["scale", "found_inf"])
def fusedstep_prepare(
    rows,
    steps,
    hyper,
    sums,
    measured,
    segments,
    scalars,
    status,
    count,
    everyone,
    scale,
    found_inf,
    RULE: tl.constexpr,
    AVERAGE: tl.constexpr,
    CLIP: tl.constexpr,
    LARGEST: tl.constexpr,
    GUARDS: tl.constexpr,
    COUNTS: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    HYPER: tl.constexpr,
    INPUTS: tl.constexpr,
    SCALARS: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = rows + t * WIDTH
    live = tl.load(row + _LIVE, t < count, other=0) != 0
    h = hyper + tl.load(row + _GROUP, live, other=0) * HYPER
    out = scalars + t * SCALARS
    step = tl.load(steps + t, live, other=0).to(scalars.dtype.element_ty)
    if COUNTS:
        step += 1
    if FIRST:
        factor = tl.load(h + _SIGN, live, other=1)
        # one per row: the interpreter cannot broadcast a truth value
        bad, scaled = factor * 0, factor * 0 + 1
        if found_inf is not None:
            bad += tl.load(found_inf + t * 0).to(bad.dtype)
        if GUARDS:
            bad += _odd(measured + everyone, everyone, OTHERS)
        if scale is not None:
            scaled = tl.load(scale + t * 0).to(bad.dtype)
        skip = bad != 0
        if COUNTS:
            tl.store(steps + t, step, live & (bad == 0))
        if CLIP is not None:
            total = _peers(
                tl.load(row + _SEGMENT, live, other=-1), measured, segments, everyone, LARGEST, OTHERS
            )
            limit, eps = tl.load(h + _LIMIT, live, other=0), tl.load(h + _LIMIT_EPS, live, other=1)
            factor = factor * CLIP(total, scaled, limit, eps)
        tl.store(out + _GRADIENT, factor / scaled, live)
        tl.store(out + _SCALED, scaled, live)
        keep, rate = AVERAGE(tl.load(h + _AVERAGE, live, other=0))
        tl.store(out + _KEEP, keep, live)
        tl.store(out + _RATE, rate, live)
        # all programs find the same: one tells
        tells = t == 0
        tl.store(status + _SKIP + t, skip.to(tl.float32), tells)
        tl.store(status + _FOUND + t, skip.to(tl.float32), tells)
        tl.store(status + _SCALE + t, scaled.to(tl.float32), tells)
        skipped = tl.load(status + _SKIPPED + t, tells, other=0)
        tl.store(status + _SKIPPED + t, skipped + skip.to(tl.float32), tells)
    inputs = ()
    for k in tl.static_range(HYPER - _OPTIONS):
        inputs = inputs + (tl.load(h + _OPTIONS + k, live, other=0.5),)
    for k in tl.static_range(len(INPUTS)):
        inputs = inputs + (tl.load(sums + INPUTS[k] * count + t, live, other=0),)
    values = RULE(step, *inputs)
    for k in tl.static_range(SCALARS - _OWN):
        tl.store(out + _OWN + k, values[k], live)


@triton.jit
def _peers(segment, measured, segments, everyone, LARGEST: tl.constexpr, OTHERS: tl.constexpr):
    """For every row, what was measured of all rows it is clipped with."""
    total = tl.zeros(segment.shape, measured.dtype.element_ty)
    for first in range(0, everyone, OTHERS):
        o = first + tl.arange(0, OTHERS)
        other = tl.load(segments + o, o < everyone, other=-2)
        x = tl.load(measured + o, o < everyone, other=0)
        x = tl.where(segment[:, None] == other[None, :], x[None, :], 0)
        total = _joined(total, _folded(x, 1, LARGEST), LARGEST)
    return total


@triton.jit
def _odd(counts, everyone, OTHERS: tl.constexpr):
    """How many of all gradients' elements are no number."""
    total = tl.zeros([OTHERS], counts.dtype.element_ty)
    for first in range(0, everyone, OTHERS):
        o = first + tl.arange(0, OTHERS)
        total += tl.load(counts + o, o < everyone, other=0)
    return tl.sum(total)


@triton.jit
def _joined(total, x, LARGEST: tl.constexpr):
    if LARGEST:
        return _maximum(total, x)
    else:
        return total + x


@triton.jit
def _folded(x, axis: tl.constexpr, LARGEST: tl.constexpr):
    if LARGEST:
        return tl.reduce(x, axis, _maximum)
    else:
        return tl.sum(x, axis)


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
    CALLS: tl.constexpr,
    STORES: tl.constexpr,
    SUMMED: tl.constexpr,
    GRADIENT: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Update TILES x BLOCK elements from `start`, only those below `numel` unless that is None; returns `sums`
    with what is to be summed added.
    """
    offsets = start + tl.arange(0, BLOCK)
    LOADS: tl.constexpr = len(sources)
    # all loads first: enough of them in flight to cover the latency of memory
    loaded = ()
    for tile in tl.static_range(TILES):
        o = offsets + tile * BLOCK
        for k in tl.static_range(LOADS):
            loaded = loaded + (tl.load(sources[k] + o, None if numel is None else o < numel),)
    for tile in tl.static_range(TILES):
        o = offsets + tile * BLOCK
        x = ()
        for k in tl.static_range(LOADS):
            value = loaded[tile * LOADS + k].to(COMPUTE)
            x = x + (value * s[_GRADIENT] if k == GRADIENT else value,)
        if GRADIENT >= 0:
            x = x + (loaded[tile * LOADS + GRADIENT].to(COMPUTE),)
        x = _results(x, s, CALLS)
        for k in tl.static_range(len(STORES)):
            value = x[STORES[k]]
            if targets[k].dtype.element_ty.primitive_bitwidth == 16:
                # by way of 32 bits, as processors do it
                value = value.to(tl.float32)
            value = value.to(targets[k].dtype.element_ty)
            tl.store(targets[k] + o, value, None if numel is None else o < numel)
        joined = ()
        for k in tl.static_range(len(sums)):
            term = x[_part(SUMMED, k, 0)]
            # what lies beyond may be no number
            term = term if numel is None else tl.where(o < numel, term, 0)
            joined = joined + (_joined(sums[k], term, _part(SUMMED, k, 1)),)
        sums = joined
    return sums


@triton.jit
def _results(x, s, CALLS: tl.constexpr):
    """What the update of a pass gives out, then its extras."""
    results = ()
    for k in tl.static_range(len(CALLS)):
        known, taken = x + results, ()
        for j in tl.static_range(_length(CALLS, k, 1)):
            taken = taken + (known[_part(CALLS, k, 1, j)],)
        for j in tl.static_range(_length(CALLS, k, 2)):
            taken = taken + (s[_part(CALLS, k, 2, j)],)
        results = results + _part(CALLS, k, 0)(*taken)
    return results


@triton.jit
def fusedstep_sweep(
    rows,
    scalars,
    status,
    places,
    partials,
    CALLS: tl.constexpr,
    CODE: tl.constexpr,
    LOADS: tl.constexpr,
    WRITES: tl.constexpr,
    STORES: tl.constexpr,
    SUMMED: tl.constexpr,
    GRADIENT: tl.constexpr,
    SKIPS: tl.constexpr,
    CLEARS: tl.constexpr,
    DTYPES: tl.constexpr,
    COMPUTE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALARS: tl.constexpr,
    BACKWARDS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    if BACKWARDS:
        chunk = tl.num_programs(0) - 1 - chunk
    t = tl.load(places + chunk * 2)
    start = tl.load(places + chunk * 2 + 1).to(tl.int64) * (BLOCK * TILES)
    row = rows + t * WIDTH
    if SKIPS:  # noqa: SIM102  (known when compiling, unlike the next condition)
        if tl.load(status + _SKIP) != 0:
            if CLEARS is not None:
                _clear(row, start, CLEARS, DTYPES, BLOCK, TILES)
            return
    s = ()
    for k in tl.static_range(SCALARS):
        s = s + (tl.load(scalars + t * COLUMNS + k).to(COMPUTE),)
    sums = ()
    for _ in tl.static_range(len(SUMMED)):
        sums = sums + (tl.zeros([BLOCK], COMPUTE),)
    if start < tl.load(row + _FULL):
        sources, targets = _addresses(row, LOADS, DTYPES, True), _addresses(row, WRITES, DTYPES, True)
        sums = _tiles(
            sources, targets, s, sums, start, None, CALLS, STORES, SUMMED, GRADIENT, COMPUTE, BLOCK, TILES
        )
        _put(sums, partials, chunk, SUMMED)
    else:
        sources, targets = _addresses(row, LOADS, DTYPES, False), _addresses(row, WRITES, DTYPES, False)
        numel = tl.load(row + _NUMEL)
        # one tile at a time: this path is rare, and must not cost the other one registers
        for first in range(start, tl.minimum(start + BLOCK * TILES, numel), BLOCK):
            sums = _tiles(
                sources, targets, s, sums, first, numel, CALLS, STORES, SUMMED, GRADIENT, COMPUTE, BLOCK, 1
            )
        _put(sums, partials, chunk, SUMMED)


@triton.jit
def _clear(row, start, ROLE: tl.constexpr, DTYPES: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Fill a chunk of a tensor with zeros."""
    target, numel = tl.load(row + _POINTERS + ROLE).to(tl.pointer_type(DTYPES[ROLE])), tl.load(row + _NUMEL)
    for first in range(start, tl.minimum(start + BLOCK * TILES, numel), BLOCK):
        o = first + tl.arange(0, BLOCK)
        tl.store(target + o, tl.zeros([BLOCK], DTYPES[ROLE]), o < numel)


@triton.jit
def _put(sums, partials, chunk, SUMMED: tl.constexpr):
    SUMS: tl.constexpr = len(sums)
    for k in tl.static_range(SUMS):
        tl.store(partials + chunk * SUMS + k, _folded(sums[k], 0, _part(SUMMED, k, 1)))


@triton.jit
def fusedstep_reduce(partials, firsts, sums, count, SUMMED: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of a tensor from those of its chunks."""
    t = tl.program_id(0)
    begin, end = tl.load(firsts + t), tl.load(firsts + t + 1)
    for k in tl.static_range(len(SUMMED)):
        total = tl.zeros([BLOCK], sums.dtype.element_ty)
        for first in range(begin, end, 4 * BLOCK):
            # four loads at once, again for the latency of memory
            for j in tl.static_range(4):
                c = first + j * BLOCK + tl.arange(0, BLOCK)
                x = tl.load(partials + c * len(SUMMED) + k, c < end, other=0)
                total = _joined(total, x.to(total.dtype), _part(SUMMED, k, 1))
        tl.store(sums + k * count + t, _folded(total, 0, _part(SUMMED, k, 1)))


@triton.jit
def probe(x):
    tl.store(x, 1)
