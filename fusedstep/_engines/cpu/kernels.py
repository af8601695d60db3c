"""The three kernels of the cpu engine, each compiled for a part of a program.

    prepare   scalars of every row from its step count, options and sums
    sweep     takes range after range of chunks, and updates their elements
    reduce    the sums of every tensor from those of its chunks

A kernel is told where everything is by an array of integers, its job.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from llvmlite import ir

from ..._algorithm.formats import Plane, compute_dtype
from ..._algorithm.program import Scalars, Sweep
from .. import CLIP_ID, FIRST_INDEX, FIRST_POINTER, GROUP, LIVE, NUMEL, POSITION, SEED, SIZES
from . import build
from . import planes as stored
from .build import F32, F64, FLOATS, I32, I64, LANES, Compiled
from .emit import Emitter, added, folded

# elements of a chunk, which fits into caches
CHUNK = 1 << 16

PREPARE_JOB = (
    *("rows", "steps", "kept", "options", "sums", "clip_totals", "all_totals", "scalars"),
    *("rows_width", "kept_width", "options_width", "sums_width", "clip_totals_width", "scalars_width"),
    *("first_row", "end_row"),
)
JOB = (
    "next",
    "ranges",
    "cuts",
    "places",
    "rows",
    "scalars",
    "steps",
    "partials",
    "rows_width",
    "scalars_width",
)

_VOID, _POINTER = ir.VoidType(), I64.as_pointer()


class _Job:
    """The fields of a job by name, and elements of the matrices it points to."""

    def __init__(self, builder: ir.IRBuilder, names: tuple[str, ...]) -> None:
        self.builder, self.array = builder, builder.function.args[0]
        fields = [builder.load(builder.gep(self.array, [I64(i)])) for i in range(len(names))]
        self.fields = dict(zip(names, fields, strict=True))

    def __getitem__(self, name: str) -> ir.Value:
        return self.fields[name]

    def at(self, name: str, kind: ir.Type, row: Any, column: Any = None) -> ir.Value:
        """The address of an element of a vector, or of a matrix."""
        b = self.builder
        index = row
        if column is not None:
            index = b.add(
                b.mul(row, self[f"{name}_width"]), column if isinstance(column, ir.Value) else I64(column)
            )
        return b.gep(b.inttoptr(self[name], kind.as_pointer()), [index])

    def load(self, name: str, kind: ir.Type, row: Any, column: Any = None) -> ir.Value:
        return self.builder.load(self.at(name, kind, row, column))


@functools.cache
def compile_prepare(
    scalars: Scalars, option_columns: tuple[int, ...], counts: bool, steps: torch.dtype, exact: torch.dtype
) -> Compiled:
    """prepare(job, scale, found_inf): returns a number that is not 0 if the step is to be skipped.

    Computed in float64, even if the tables are float32.
    """
    b = build.function("fusedstep_prepare", F64, [_POINTER, F64, F64])
    job, (_, scale, found_inf) = _Job(b, PREPARE_JOB), b.function.args
    number, count_type = FLOATS[exact], FLOATS[steps]
    skip = build.variable(b, F64)
    b.store(F64(0.0), skip)

    def widened(value: ir.Value) -> ir.Value:
        return value if value.type == F64 else b.fpext(value, F64)

    with build.loop(b, job["first_row"], job["end_row"]) as t:
        group, clip_id = (job.load("rows", I64, t, column) for column in (GROUP, CLIP_ID))
        count = job.load("steps", count_type, t)
        step = b.fadd(count, count_type(1.0)) if counts else count
        columns = iter(option_columns)
        values = []
        for kind, which in scalars.inputs:
            if kind == "step":
                values.append(widened(step))
            elif kind == "scale":
                values.append(scale)
            elif kind == "found_inf":
                values.append(found_inf)
            elif kind == "option":
                values.append(widened(job.load("options", number, group, next(columns))))
            elif kind == "kept":
                values.append(widened(job.load("kept", count_type, I64(which), t)))
            elif kind in SIZES:
                values.append(b.sitofp(job.load("rows", I64, t, SIZES[kind]), F64))
            elif kind == "fold":
                values.append(widened(job.load("sums", number, I64(which), t)))
            elif kind == "clip_total":
                values.append(job.load("clip_totals", F64, I64(which), clip_id))
            else:
                values.append(job.load("all_totals", F64, I64(which)))
        emitter = Emitter(b, F64, rounds_power=exact == torch.float32)
        values = emitter.run(scalars.code, values)

        def result(number_of: int | float) -> ir.Value:
            return emitter.constant(number_of) if isinstance(number_of, float) else values[number_of]

        for i, value in enumerate(map(result, scalars.columns)):
            value = value if number == F64 else b.fptrunc(value, number)
            b.store(value, job.at("scalars", number, t, scalars.first_column + i))
        live = b.icmp_signed("!=", job.load("rows", I64, t, LIVE), I64(0))
        for i, value in enumerate(map(result, scalars.kept)):
            at = job.at("kept", count_type, I64(i), t)
            value = value if count_type == F64 else b.fptrunc(value, count_type)
            b.store(b.select(live, value, b.load(at)), at)
        if scalars.skip is not None:
            b.store(result(scalars.skip), skip)
            if counts:
                taken = b.fcmp_ordered("==", result(scalars.skip), F64(0.0))
                b.store(b.select(b.and_(taken, live), step, count), job.at("steps", count_type, t))
    b.ret(b.load(skip))
    return Compiled(b, ctypes.c_double, [ctypes.c_void_p, ctypes.c_double, ctypes.c_double])


@functools.cache
def compile_sweep(sweep: Sweep, planes: tuple[Plane, ...], steps: torch.dtype, exact: torch.dtype) -> Compiled:
    """sweep(job): threads take ranges until none is left."""
    b = build.function("fusedstep_sweep", _VOID, [_POINTER])
    job = _Job(b, JOB)
    again, turn, done = (b.function.append_basic_block(name) for name in ("again", "turn", "done"))
    b.branch(again)
    b.position_at_end(again)
    taken = b.atomic_rmw("add", job.array, I64(1), "monotonic")
    b.cbranch(b.icmp_signed("<", taken, job["ranges"]), turn, done)
    b.position_at_end(turn)
    first, last = job.load("cuts", I64, taken), job.load("cuts", I64, b.add(taken, I64(1)))
    with build.loop(b, first, last) as chunk:
        _emit_chunk(b, job, chunk, sweep, planes, steps, exact)
    b.branch(again)
    b.position_at_end(done)
    b.ret_void()
    return Compiled(b, None, [ctypes.c_void_p])


def _emit_chunk(
    b: ir.IRBuilder,
    job: _Job,
    chunk: ir.Value,
    sweep: Sweep,
    planes: tuple[Plane, ...],
    steps: torch.dtype,
    exact: torch.dtype,
) -> None:
    compute = FLOATS[compute_dtype(planes)]
    at = b.mul(chunk, I64(2))
    t, begin = job.load("places", I64, at), job.load("places", I64, b.add(at, I64(1)))
    numel, most = job.load("rows", I64, t, NUMEL), b.add(begin, I64(CHUNK))
    end = b.select(b.icmp_signed("<", most, numel), most, numel)
    # a row without a gradient counts no elements
    end = b.select(b.icmp_signed("<", end, begin), begin, end)
    addresses = [job.load("rows", I64, t, FIRST_POINTER + k) for k in range(len(planes))]
    scalars = []
    for column in sweep.columns:
        value = job.load("scalars", FLOATS[exact], t, column)
        if value.type != compute:
            value = (b.fptrunc if compute == F32 else b.fpext)(value, compute)
        scalars.append(build.fill(b, value))
    totals = [build.variable(b, build.wide(F64)) for _ in sweep.folds]
    for total in totals:
        b.store(ir.Constant(build.wide(F64), None), total)
    drawn_from = _drawn_from(b, job, t, FLOATS[steps]) if sweep.draws else None
    needs_block, first_result = _needs_block(sweep), len(sweep.loads) + len(sweep.columns)

    def sixteen(i: ir.Value, mask: Any) -> _Sixteen:
        place = stored.Place(mask, drawn_from.inputs(b, i) if drawn_from else ())
        return _Sixteen(Emitter(b, build.wide(compute)), [None] * (first_result + len(sweep.code)), i, place)

    def run(part: _Sixteen, first: _Sixteen, after: bool) -> None:
        """Emit what comes before a whole block is known, or after; values that it shares once, in `first`."""
        for k, (op, args) in enumerate(sweep.code, first_result):
            if needs_block[k] == after and op != "block_largest":
                is_shared = part is not first and not isinstance(first.values[k].type, ir.VectorType)
                own = first.values[k] if is_shared else None
                part.values[k] = own or part.emitter.emit(op, args, part.values, part.place)
        for k, value in sweep.stores:
            if needs_block[value] == after and (part is first or planes[k].block == 1):
                stored.store(b, addresses[k], part.index, planes[k], part.values[value], part.place)

    def load(part: _Sixteen, first: _Sixteen) -> None:
        for at, k in enumerate(sweep.loads):
            is_shared = part is not first and planes[k].block > 1
            own = first.values[at] if is_shared else None
            to = build.wide(compute)
            part.values[at] = own or stored.load(b, addresses[k], part.index, planes[k], to, part.place)
        part.values[len(sweep.loads) : first_result] = scalars

    def block(first: ir.Value, masks: list[Any]) -> None:
        parts = [sixteen(b.add(first, I64(k * LANES)), mask) for k, mask in enumerate(masks)]
        for part in parts:
            load(part, parts[0])
            run(part, parts[0], after=False)
        for k, (op, args) in enumerate(sweep.code, first_result):
            if op == "block_largest":
                largest = stored.block_largest(b, [part.values[int(args[0])] for part in parts], masks)
                for part in parts:
                    part.values[k] = largest
        for part in parts:
            if any(needs_block):
                run(part, parts[0], after=True)
            for total, (value, way) in zip(totals, sweep.folds, strict=True):
                more = added(b, way, b.load(total), part.values[value], part.place.mask)
                b.store(more, total)

    # elements that are worked on together
    size = max(LANES, *(plane.block for plane in planes))
    full = b.add(begin, b.and_(b.sub(end, begin), I64(-size)))
    with build.loop(b, begin, full, size) as i:
        block(i, [None] * (size // LANES))
    with b.if_then(b.icmp_signed("<", full, end)):
        rest = b.sub(end, full)
        block(full, [stored.below(b, b.sub(rest, I64(k))) for k in range(0, size, LANES)])
    for k, (total, (_, way)) in enumerate(zip(totals, sweep.folds, strict=True)):
        at = b.add(b.mul(chunk, I64(len(totals))), I64(k))
        b.store(folded(b, way, b.load(total)), job.at("partials", F64, at))


class _Sixteen(NamedTuple):
    """Sixteen elements from an index on, and all values of a sweep for them."""

    emitter: Emitter
    values: list[Any]
    index: ir.Value
    place: stored.Place


def _needs_block(sweep: Sweep) -> list[bool]:
    """For every value of a sweep, whether it depends on a whole block."""
    found = [False] * (len(sweep.loads) + len(sweep.columns))
    for op, args in sweep.code:
        of_args = [found[arg] for arg in args if not isinstance(arg, float)]
        assert op != "block_largest" or not any(of_args), "block_largest of a value that depends on a block"
        found.append(op == "block_largest" or any(of_args))
    return found


class _DrawnFrom(NamedTuple):
    """What the random bits of a row are drawn from: those of `bits.DRAW_INPUTS` that its elements share."""

    shared: tuple[ir.Value, ...]
    first_index: ir.Value

    def inputs(self, b: ir.IRBuilder, i: ir.Value) -> tuple[ir.Value, ...]:
        """`bits.DRAW_INPUTS` of the elements from `i` on."""
        numbers = ir.Constant(build.wide(I64), [*range(LANES)])
        return *self.shared, *_halves(b, b.add(build.fill(b, b.add(self.first_index, i)), numbers))


def _drawn_from(b: ir.IRBuilder, job: _Job, t: ir.Value, count: ir.Type) -> _DrawnFrom:
    seed, position, first = (job.load("rows", I64, t, column) for column in (SEED, POSITION, FIRST_INDEX))
    step = b.fptosi(job.load("steps", count, t), I32)
    return _DrawnFrom((b.trunc(seed, I32), b.trunc(position, I32), step), first)


def _halves(b: ir.IRBuilder, value: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The lower and the upper 32 bits."""
    half = build.of_elements(I32, value.type)
    return b.trunc(value, half), b.trunc(b.lshr(value, build.constant(value.type, 32)), half)


@functools.cache
def compile_reduce(kinds: tuple[str, ...], exact: torch.dtype) -> Compiled:
    """reduce(partials, firsts, sums, count, width): adds up the chunks of each tensor, in order."""
    b = build.function(
        "fusedstep_reduce", _VOID, [F64.as_pointer(), _POINTER, FLOATS[exact].as_pointer(), I64, I64]
    )
    partials, firsts, sums, count, width = b.function.args
    total = build.variable(b, F64)
    with build.loop(b, I64(0), count) as t:
        first, last = b.load(b.gep(firsts, [t])), b.load(b.gep(firsts, [b.add(t, I64(1))]))
        for k, kind in enumerate(kinds):
            b.store(F64(0.0), total)
            with build.loop(b, first, last) as chunk:
                part = b.load(b.gep(partials, [b.add(b.mul(chunk, I64(len(kinds))), I64(k))]))
                so_far = b.load(total)
                b.store(build.larger(b, so_far, part) if kind == "max" else b.fadd(so_far, part), total)
            value = b.load(total)
            value = value if exact == torch.float64 else b.fptrunc(value, FLOATS[exact])
            b.store(value, b.gep(sums, [b.add(b.mul(width, I64(k)), t)]))
    b.ret_void()
    pointers = [ctypes.c_void_p] * 3
    return Compiled(b, None, [*pointers, ctypes.c_int64, ctypes.c_int64])
