"""The kernels of the triton engine. Profilers show their names, so these say whose they are.

`fusedstep_prepare` counts the steps and turns options into scalars, for all tensors of the table.
`fusedstep_sweep` then runs one program per chunk of a tensor, one launch per bucket, whatever the number of
tensors and groups. A program reads its row (addresses, size, scalars) and works through its tiles: full
chunks of aligned tensors unmasked and vectorised, the rest masked. If the sweep sums something, every
program leaves the sums over its chunk and `fusedstep_reduce` adds them up for each tensor, in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._algorithm.bits import DRAWN_TOGETHER, ROUNDS
from .. import (
    CLIP_ID,
    FIRST_INDEX,
    FIRST_POINTER,
    FOUND,
    GROUP,
    LIVE,
    NUMEL,
    POSITION,
    SCALE,
    SEED,
    SKIP,
    SKIPPED,
    UNMASKED_NUMEL,
)
from .source import maximum

_LIVE, _GROUP, _CLIP_ID, _NUMEL, _UNMASKED_NUMEL, _FIRST_POINTER = map(
    tl.constexpr, (LIVE, GROUP, CLIP_ID, NUMEL, UNMASKED_NUMEL, FIRST_POINTER)
)
_SEED, _POSITION, _FIRST_INDEX, _ROUNDS = map(tl.constexpr, (SEED, POSITION, FIRST_INDEX, ROUNDS))
_SKIP, _SCALE, _SKIPPED, _FOUND = map(tl.constexpr, (SKIP, SCALE, SKIPPED, FOUND))

# what scalars are computed from
INPUTS = ("step", "scale", "found_inf", "option", "fold", "clip_total", "all_total")
_STEP, _SCALE_INPUT, _FOUND_INF, _OPTION, _FOLD, _CLIP_TOTAL, _ALL_TOTAL = map(tl.constexpr, range(len(INPUTS)))


# parts of nested constants, which Triton cannot take apart itself


@triton.constexpr_function
def _part(nested, *places):
    for place in places:
        nested = nested[place]
    return nested


@triton.constexpr_function
def _fours(slot):
    return slot // DRAWN_TOGETHER


@triton.constexpr_function
def _word(slot):
    return slot % DRAWN_TOGETHER


@triton.jit(
    do_not_specialize=["first", "end", "rows", "others"], do_not_specialize_on_alignment=["scale", "found_inf"]
)
def fusedstep_prepare(
    cells,
    steps,
    option_values,
    sums,
    measured,
    clip_ids,
    scalars,
    status,
    first,
    end,
    rows,
    others,
    scale,
    found_inf,
    SCALARS: tl.constexpr,
    SOURCES: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIRST_COLUMN: tl.constexpr,
    DECIDES: tl.constexpr,
    COUNTS: tl.constexpr,
    TELLS: tl.constexpr,
    CELLS_WIDTH: tl.constexpr,
    OPTIONS_WIDTH: tl.constexpr,
    SCALARS_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):
    t = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = t < end
    row = cells + t * CELLS_WIDTH
    group = tl.load(row + _GROUP, here, other=0)
    count = tl.load(steps + t, here, other=0)
    zero = (t * 0).to(scalars.dtype.element_ty)
    step = count.to(scalars.dtype.element_ty)
    if COUNTS:
        step += 1
    # one per row: the interpreter cannot broadcast a single number
    scaled, bad = zero + 1, zero
    if scale is not None:
        scaled = tl.load(scale + t * 0).to(zero.dtype)
    if found_inf is not None:
        bad = tl.load(found_inf + t * 0).to(zero.dtype)
    inputs = ()
    for k in tl.static_range(len(SOURCES)):
        if _part(SOURCES, k, 0) == _STEP:
            inputs = inputs + (step,)
        elif _part(SOURCES, k, 0) == _SCALE_INPUT:
            inputs = inputs + (scaled,)
        elif _part(SOURCES, k, 0) == _FOUND_INF:
            inputs = inputs + (bad,)
        elif _part(SOURCES, k, 0) == _OPTION:
            option = group * OPTIONS_WIDTH + _part(SOURCES, k, 1)
            inputs = inputs + (tl.load(option_values + option, here, other=0.5),)
        elif _part(SOURCES, k, 0) == _FOLD:
            inputs = inputs + (tl.load(sums + _part(SOURCES, k, 1) * rows + t, here, other=0),)
        elif _part(SOURCES, k, 0) == _CLIP_TOTAL:
            clip_id, x = tl.load(row + _CLIP_ID, here, other=-1), measured + _part(SOURCES, k, 1) * others
            inputs = inputs + (_clip_totals(clip_id, x, clip_ids, others, _part(SOURCES, k, 2), OTHERS),)
        else:
            x = measured + _part(SOURCES, k, 1) * others
            inputs = inputs + (zero + _all_total(x, others, OTHERS),)
    values = SCALARS(*inputs)
    for k in tl.static_range(COLUMNS):
        tl.store(scalars + t * SCALARS_WIDTH + FIRST_COLUMN + k, values[k], here)
    if DECIDES:
        skip = values[COLUMNS] != 0
        if COUNTS:
            live = tl.load(row + _LIVE, here, other=0) != 0
            tl.store(steps + t, count + 1, here & live & (values[COLUMNS] == 0))
        if TELLS:
            # all programs find the same: one tells
            tells = t == first
            tl.store(status + _SKIP + t * 0, skip.to(tl.float32), tells)
            tl.store(status + _FOUND + t * 0, skip.to(tl.float32), tells)
            tl.store(status + _SCALE + t * 0, scaled.to(tl.float32), tells)
            skipped = tl.load(status + _SKIPPED + t * 0, tells, other=0)
            tl.store(status + _SKIPPED + t * 0, skipped + skip.to(tl.float32), tells)


@triton.jit
def _clip_totals(clip_id, measured, clip_ids, others, MAX: tl.constexpr, OTHERS: tl.constexpr):
    """For every row, what was measured of all rows it is clipped with."""
    total = tl.zeros(clip_id.shape, measured.dtype.element_ty)
    for first in range(0, others, OTHERS):
        o = first + tl.arange(0, OTHERS)
        other = tl.load(clip_ids + o, o < others, other=-2)
        x = tl.load(measured + o, o < others, other=0)
        x = tl.where(clip_id[:, None] == other[None, :], x[None, :], 0)
        total = _joined(total, _folded(x, 1, MAX), MAX)
    return total


@triton.jit
def _all_total(counts, others, OTHERS: tl.constexpr):
    """The sum over all rows."""
    total = tl.zeros([OTHERS], counts.dtype.element_ty)
    for first in range(0, others, OTHERS):
        o = first + tl.arange(0, OTHERS)
        total += tl.load(counts + o, o < others, other=0)
    return tl.sum(total)


@triton.jit
def _joined(total, x, MAX: tl.constexpr):
    if MAX:
        return maximum(total, x)
    else:
        return total + x


@triton.jit
def _folded(x, axis: tl.constexpr, MAX: tl.constexpr):
    if MAX:
        return tl.reduce(x, axis, maximum)
    else:
        return tl.sum(x, axis)


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
    """Places of a tile's elements; in rows of SHARE, if so many share a number."""
    if SHARE == 1:
        return start + tl.arange(0, SIZE)
    else:
        return start + tl.arange(0, SIZE // SHARE)[:, None] * SHARE + tl.arange(0, SHARE)[None, :]


@triton.jit
def _offsets(start, SIZE: tl.constexpr, SHARE: tl.constexpr, SHARED: tl.constexpr):
    """The same for a plane, which may have one number for each row."""
    if SHARED == 1:
        return _elements(start, SIZE, SHARE)
    else:
        return start // SHARE + tl.arange(0, SIZE // SHARE)[:, None]


@triton.jit
def _words(row, step, o, DRAWS: tl.constexpr):
    """Random bits of every element for these slots: `bits.drawn`."""
    seed, position, i = tl.load(row + _SEED), tl.load(row + _POSITION), o + tl.load(row + _FIRST_INDEX)
    low, high = i.to(tl.uint32), (i >> 32).to(tl.uint32)
    step, position = step + low * 0, position.to(tl.uint32) + low * 0
    words = ()
    for k in tl.static_range(len(DRAWS)):
        # one draw for four slots: the compiler sees that it is the same
        four = tl.philox(seed, low, high + (_fours(DRAWS[k]) << 18), step, position, _ROUNDS)
        words = words + (four[_word(DRAWS[k])].to(tl.int32, bitcast=True),)
    return words


@triton.jit
def _tiles(
    row,
    sources,
    targets,
    s,
    step,
    sums,
    start,
    numel,
    RULE: tl.constexpr,
    LOAD_SHARES: tl.constexpr,
    STORE_SHARES: tl.constexpr,
    DRAWS: tl.constexpr,
    MAXES: tl.constexpr,
    COMPUTE: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Update TILES x BLOCK elements from `start`, only those below `numel` unless that is None; returns `sums`
    with what is to be summed added.
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
        words = ()
        if len(DRAWS) > 0:
            words = _words(row, step, _elements(start + tile * BLOCK, BLOCK, SHARE), DRAWS)
        mask = None if numel is None else _elements(start + tile * BLOCK, BLOCK, SHARE) < numel
        x = RULE(mask, words, *(x + s))
        for k in tl.static_range(STORES):
            value = x[k]
            if (
                targets[k].dtype.element_ty.is_floating()
                and targets[k].dtype.element_ty.primitive_bitwidth == 16
            ):
                # by way of 32 bits, as processors do it
                value = value.to(tl.float32)
            o = _offsets(start + tile * BLOCK, BLOCK, SHARE, STORE_SHARES[k])
            value = value.to(targets[k].dtype.element_ty)
            tl.store(targets[k] + o, value, None if numel is None else o * STORE_SHARES[k] < numel)
        joined = ()
        for k in tl.static_range(len(sums)):
            term = x[STORES + k]
            # what lies beyond may be NaN
            term = term if numel is None else tl.where(mask, term, 0)
            joined = joined + (_joined(sums[k], term, MAXES[k]),)
        sums = joined
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
    step = None
    if len(DRAWS) > 0:
        step = tl.load(steps + t).to(tl.uint32)
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
                step,
                sums,
                start + i * (BLOCK * TILES),
                None,
                RULE,
                LOAD_SHARES,
                STORE_SHARES,
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
                step,
                sums,
                first,
                numel,
                RULE,
                LOAD_SHARES,
                STORE_SHARES,
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
        tl.store(partials + chunk * SUMS + k, _folded(tl.ravel(sums[k]), 0, MAXES[k]))


@triton.jit(do_not_specialize=["count"])
def fusedstep_reduce(partials, firsts, sums, count, MAXES: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of a tensor from those of its chunks."""
    t = tl.program_id(0)
    begin, end = tl.load(firsts + t), tl.load(firsts + t + 1)
    for k in tl.static_range(len(MAXES)):
        total = tl.zeros([BLOCK], sums.dtype.element_ty)
        for first in range(begin, end, 4 * BLOCK):
            # four loads at once, again for the latency of memory
            for j in tl.static_range(4):
                c = first + j * BLOCK + tl.arange(0, BLOCK)
                x = tl.load(partials + c * len(MAXES) + k, c < end, other=0)
                total = _joined(total, x.to(total.dtype), MAXES[k])
        tl.store(sums + k * count + t, _folded(total, 0, MAXES[k]))


@triton.jit
def probe(x):
    tl.store(x, 1)
