"""`fusedstep_prepare` counts the steps and turns options into scalars, for all tensors of the table."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import CLIP_ID, FOUND, GROUP, LIVE, SCALE, SKIP, SKIPPED
from .sums import folded, joined

_LIVE, _GROUP, _CLIP_ID = map(tl.constexpr, (LIVE, GROUP, CLIP_ID))
_SKIP, _SCALE, _SKIPPED, _FOUND = map(tl.constexpr, (SKIP, SCALE, SKIPPED, FOUND))

# what scalars are computed from
INPUTS = ("step", "scale", "found_inf", "option", "kept", "size", "fold", "clip_total", "all_total")
_STEP, _SCALE_INPUT, _FOUND_INF, _OPTION, _KEPT, _SIZE, _FOLD, _CLIP_TOTAL, _ALL_TOTAL = map(
    tl.constexpr, range(len(INPUTS))
)


# parts of nested constants, which Triton cannot take apart itself


@triton.constexpr_function
def _part(nested, *places):
    for place in places:
        nested = nested[place]
    return nested


@triton.jit(
    do_not_specialize=["first", "end", "rows", "others"], do_not_specialize_on_alignment=["scale", "found_inf"]
)
def fusedstep_prepare(
    cells,
    steps,
    kept,
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
    KEPT: tl.constexpr,
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
        elif _part(SOURCES, k, 0) == _KEPT:
            found = tl.load(kept + _part(SOURCES, k, 1) * rows + t, here, other=0)
            inputs = inputs + (found.to(zero.dtype),)
        elif _part(SOURCES, k, 0) == _SIZE:
            inputs = inputs + (tl.load(row + _part(SOURCES, k, 1), here, other=1).to(zero.dtype),)
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
    live = tl.load(row + _LIVE, here, other=0) != 0
    for k in tl.static_range(KEPT):
        value = values[COLUMNS + DECIDES + k].to(kept.dtype.element_ty)
        tl.store(kept + k * rows + t, value, here & live)
    if DECIDES:
        skip = values[COLUMNS] != 0
        if COUNTS:
            tl.store(steps + t, count + 1, here & live & (values[COLUMNS] == 0))
        if TELLS:
            # all programs find the same: one writes it
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
        total = joined(total, folded(x, 1, MAX), MAX)
    return total


@triton.jit
def _all_total(counts, others, OTHERS: tl.constexpr):
    """The sum over all rows."""
    total = tl.zeros([OTHERS], counts.dtype.element_ty)
    for first in range(0, others, OTHERS):
        o = first + tl.arange(0, OTHERS)
        total += tl.load(counts + o, o < others, other=0)
    return tl.sum(total)
