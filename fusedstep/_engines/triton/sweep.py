"""`fusedstep_sweep` runs one program per chunk of a tensor: one launch for all tensors and groups of a bucket.

A program reads its row (addresses, size, scalars) and works through its tiles: full chunks of aligned tensors
unmasked and vectorised, the rest masked. If the sweep sums something, every program leaves the sums over its
chunk. Where elements share numbers, a tile is a matrix whose rows are blocks, and shared numbers are a column.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import FIRST_INDEX, FIRST_POINTER, NUMEL, POSITION, SEED, SKIP, UNMASKED_NUMEL
from .sums import folded, joined
from .words import laid_out_like

_NUMEL, _UNMASKED_NUMEL, _FIRST_POINTER, _SKIP = map(tl.constexpr, (NUMEL, UNMASKED_NUMEL, FIRST_POINTER, SKIP))
_SEED, _POSITION, _FIRST_INDEX = map(tl.constexpr, (SEED, POSITION, FIRST_INDEX))


@triton.jit
def _addresses(row, PLANES: tl.constexpr, DTYPES: tl.constexpr, ALIGNED: tl.constexpr):
    addresses = ()
    for k in tl.static_range(len(PLANES)):
        address = tl.load(row + _FIRST_POINTER + PLANES[k]).to(tl.pointer_type(DTYPES[PLANES[k]]))
        if ALIGNED:
            address = tl.multiple_of(address, 16)
        addresses = addresses + (address,)
    return addresses


@triton.jit
def _elements(start, SIZE: tl.constexpr, SHARE: tl.constexpr):
    """Places of a tile's elements; in rows of SHARE, if that many share a number."""
    if SHARE == 1:
        return start + tl.arange(0, SIZE)
    else:
        return start + tl.arange(0, SIZE // SHARE)[:, None] * SHARE + tl.arange(0, SHARE)[None, :]


@triton.jit
def _offsets(start, SIZE: tl.constexpr, SHARE: tl.constexpr, SHARED: tl.constexpr):
    """`_elements` for a plane, which may have one number for each row."""
    if SHARED == 1:
        return _elements(start, SIZE, SHARE)
    else:
        return start // SHARE + tl.arange(0, SIZE // SHARE)[:, None]


@triton.jit
def _halves(a):
    return a.to(tl.int32), (a >> 32).to(tl.int32)


@triton.jit
def _narrowed(value, dtype: tl.constexpr, EXACT: tl.constexpr):
    if EXACT and dtype == tl.bfloat16:
        # nothing is lost, but the compiler does not know
        return (value.to(tl.float32).to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(dtype, bitcast=True)
    elif dtype.is_floating() and dtype.primitive_bitwidth == 16:
        # through 32 bits, as processors do it
        return value.to(tl.float32).to(dtype)
    else:
        return value.to(dtype)


@triton.jit
def _tiles(
    row,
    sources,
    targets,
    s,
    drawn_from,
    sums,
    start,
    numel,
    RULE: tl.constexpr,
    LOAD_SHARES: tl.constexpr,
    STORE_SHARES: tl.constexpr,
    EXACT: tl.constexpr,
    DRAWS: tl.constexpr,
    MAXES: tl.constexpr,
    COMPUTE: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Update TILES x BLOCK elements from `start`, only those below `numel` unless that is None; returns `sums`
    with theirs added.
    """
    LOADS: tl.constexpr = len(sources)
    STORES: tl.constexpr = len(targets)
    # all loads first: enough of them in flight to cover the latency of memory
    loaded = ()
    for tile in tl.static_range(TILES):
        for k in tl.static_range(LOADS):
            o = _offsets(start + tile * BLOCK, BLOCK, SHARE, LOAD_SHARES[k])
            loaded = loaded + (tl.load(sources[k] + o, None if numel is None else o * LOAD_SHARES[k] < numel),)
    for tile in tl.static_range(TILES):
        x = ()
        for k in tl.static_range(LOADS):
            if sources[k].dtype.element_ty.is_int():
                x = x + (loaded[tile * LOADS + k].to(tl.int32),)
            else:
                x = x + (loaded[tile * LOADS + k].to(COMPUTE),)
        elements = _elements(start + tile * BLOCK, BLOCK, SHARE)
        mask = None if numel is None else elements < numel
        draw_inputs = ()
        if DRAWS:
            draw_inputs = drawn_from[:3] + _halves(laid_out_like(elements + drawn_from[3], x[0].to(tl.float32)))
        x = RULE(mask, draw_inputs, *(x + s))
        for k in tl.static_range(STORES):
            o = _offsets(start + tile * BLOCK, BLOCK, SHARE, STORE_SHARES[k])
            value = _narrowed(x[k], targets[k].dtype.element_ty, EXACT[k])
            tl.store(targets[k] + o, value, None if numel is None else o * STORE_SHARES[k] < numel)
        more = ()
        for k in tl.static_range(len(sums)):
            term = x[STORES + k]
            # elements beyond the end may be NaN
            term = term if numel is None else tl.where(mask, term, 0)
            more = more + (joined(sums[k], term, MAXES[k]),)
        sums = more
    return sums


@triton.jit(do_not_specialize=["first_chunk"])
def fusedstep_sweep(
    cells,
    scalars,
    status,
    steps,
    places,
    partials,
    first_chunk,
    RULE: tl.constexpr,
    LOADS: tl.constexpr,
    STORES: tl.constexpr,
    LOAD_SHARES: tl.constexpr,
    STORE_SHARES: tl.constexpr,
    EXACT: tl.constexpr,
    DRAWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAXES: tl.constexpr,
    SKIPS: tl.constexpr,
    CLEARS: tl.constexpr,
    DTYPES: tl.constexpr,
    COMPUTE: tl.constexpr,
    SHARE: tl.constexpr,
    CELLS_WIDTH: tl.constexpr,
    SCALARS_WIDTH: tl.constexpr,
    BACKWARDS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    LOOPS: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    if BACKWARDS:
        chunk = tl.num_programs(0) - 1 - chunk
    chunk += first_chunk
    t = tl.load(places + chunk * 2)
    start = tl.load(places + chunk * 2 + 1).to(tl.int64) * (BLOCK * TILES * LOOPS)
    row = cells + t * CELLS_WIDTH
    if SKIPS:  # noqa: SIM102  (known when compiling, unlike the next condition)
        if tl.load(status + _SKIP) != 0:
            if CLEARS is not None:
                _clear(row, start, CLEARS, DTYPES, BLOCK, TILES * LOOPS)
            return
    s = ()
    for k in tl.static_range(len(COLUMNS)):
        s = s + (tl.load(scalars + t * SCALARS_WIDTH + COLUMNS[k]).to(COMPUTE),)
    drawn_from = ()
    if DRAWS:
        seed, position = tl.load(row + _SEED).to(tl.int32), tl.load(row + _POSITION).to(tl.int32)
        drawn_from = (seed, position, tl.load(steps + t).to(tl.int32), tl.load(row + _FIRST_INDEX))
    sums = ()
    for _ in tl.static_range(len(MAXES)):
        sums = sums + (tl.zeros([BLOCK] if SHARE == 1 else [BLOCK // SHARE, SHARE], COMPUTE),)
    if start < tl.load(row + _UNMASKED_NUMEL):
        sources, targets = _addresses(row, LOADS, DTYPES, True), _addresses(row, STORES, DTYPES, True)
        for i in range(LOOPS):
            sums = _tiles(
                row,
                sources,
                targets,
                s,
                drawn_from,
                sums,
                start + i * (BLOCK * TILES),
                None,
                RULE,
                LOAD_SHARES,
                STORE_SHARES,
                EXACT,
                DRAWS,
                MAXES,
                COMPUTE,
                SHARE,
                BLOCK,
                TILES,
            )
        _put(sums, partials, chunk, MAXES)
    else:
        sources, targets = _addresses(row, LOADS, DTYPES, False), _addresses(row, STORES, DTYPES, False)
        numel = tl.load(row + _NUMEL)
        # one tile at a time: this path is rare, and must not cost the other one registers
        for first in range(start, tl.minimum(start + BLOCK * TILES * LOOPS, numel), BLOCK):
            sums = _tiles(
                row,
                sources,
                targets,
                s,
                drawn_from,
                sums,
                first,
                numel,
                RULE,
                LOAD_SHARES,
                STORE_SHARES,
                EXACT,
                DRAWS,
                MAXES,
                COMPUTE,
                SHARE,
                BLOCK,
                1,
            )
        _put(sums, partials, chunk, MAXES)


@triton.jit
def _clear(row, start, PLANE: tl.constexpr, DTYPES: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Fill a chunk of a tensor with zeros."""
    target = tl.load(row + _FIRST_POINTER + PLANE).to(tl.pointer_type(DTYPES[PLANE]))
    numel = tl.load(row + _NUMEL)
    for first in range(start, tl.minimum(start + BLOCK * TILES, numel), BLOCK):
        o = first + tl.arange(0, BLOCK)
        tl.store(target + o, tl.zeros([BLOCK], DTYPES[PLANE]), o < numel)


@triton.jit
def _put(sums, partials, chunk, MAXES: tl.constexpr):
    SUMS: tl.constexpr = len(sums)
    for k in tl.static_range(SUMS):
        tl.store(partials + chunk * SUMS + k, folded(tl.ravel(sums[k]), 0, MAXES[k]))
