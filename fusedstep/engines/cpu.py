"""The engine for CPU tensors: rules compiled by Numba over the plan's tables of addresses.

One call updates all tensors of a bucket. Large tensors are cut into chunks and small ones packed, into
ranges of about equal work that `torch.get_num_threads()` threads take one after the other; who takes
which does not change a bit of the result. The threads are Python's (the kernels release its lock):
Numba's own thread layers break after a fork or when two threads call them at once.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types as nb
from numba.extending import intrinsic
from numba.np.unsafe.ndarray import to_fixed_tuple

from .._rules import bind
from . import GROUP, LIVE, NUMEL, POINTERS

BY_ADDRESS = True
# elements: a chunk fits the caches, a range is worth waking a thread for
_CHUNK, _RANGE = 1 << 16, 1 << 19

_FLOATS = {torch.float32: nb.float32, torch.float64: nb.float64}


def unavailable(device_type: str) -> str | None:
    return None if device_type == "cpu" else "the cpu engine takes parameters on the CPU"


def chunk(bucket) -> int:
    return _CHUNK


# how values are stored: the one place that knows


def _widen(builder: ir.IRBuilder, value: ir.Value, stored: torch.dtype, to: ir.Type) -> ir.Value:
    if stored == torch.bfloat16:
        bits = builder.shl(builder.zext(value, ir.IntType(32)), ir.IntType(32)(16))
        value, stored = builder.bitcast(bits, ir.FloatType()), torch.float32
    if value.type == to:
        return value
    return builder.fptrunc(value, to) if stored == torch.float64 else builder.fpext(value, to)


def _narrow(builder: ir.IRBuilder, value: ir.Value, stored: torch.dtype) -> ir.Value:
    to = _IR_TYPES[stored]
    if stored == torch.bfloat16:
        if value.type != ir.FloatType():
            value = builder.fptrunc(value, ir.FloatType())
        bits, i32 = builder.bitcast(value, ir.IntType(32)), ir.IntType(32)
        # round to nearest even: add half of what is cut off, and the last kept bit for a tie
        last = builder.and_(builder.lshr(bits, i32(16)), i32(1))
        rounded = builder.lshr(builder.add(bits, builder.add(last, i32(0x7FFF))), i32(16))
        is_nan = builder.fcmp_unordered("uno", value, value)
        return builder.trunc(builder.select(is_nan, i32(0x7FC0), rounded), to)
    if value.type == to:
        return value
    return builder.fpext(value, to) if to == ir.DoubleType() else builder.fptrunc(value, to)


_IR_TYPES = {
    torch.float64: ir.DoubleType(),
    torch.float32: ir.FloatType(),
    torch.float16: ir.HalfType(),
    torch.bfloat16: ir.IntType(16),
}


def _place(context, builder, addresses: ir.Value, index: ir.Value, role: int, dtype: torch.dtype) -> ir.Value:
    base = builder.inttoptr(builder.extract_value(addresses, role), _IR_TYPES[dtype].as_pointer())
    return builder.gep(base, [index])


def _loader(dtypes: tuple[torch.dtype, ...], compute: nb.Float) -> Callable:
    """load(addresses, i): element i of every role, as a tuple of `compute`."""

    @intrinsic
    def load(typing_context, addresses, i):
        def codegen(context, builder, signature, args):
            to = context.get_value_type(compute)
            values = []
            for role, dtype in enumerate(dtypes):
                place = _place(context, builder, *args, role, dtype)
                values.append(_widen(builder, builder.load(place), dtype, to))
            return context.make_tuple(builder, signature.return_type, values)

        return nb.UniTuple(compute, len(dtypes))(addresses, i), codegen

    return load


def _storer(dtypes: tuple[torch.dtype, ...]) -> Callable:
    """store(addresses, i, values): write element i of every role, rounded to its dtype."""

    @intrinsic
    def store(typing_context, addresses, i, values):
        def codegen(context, builder, signature, args):
            *where, values = args
            for role, dtype in enumerate(dtypes):
                value = _narrow(builder, builder.extract_value(values, role), dtype)
                builder.store(value, _place(context, builder, *where, role, dtype))
            return context.get_dummy_value()

        return nb.void(addresses, i, values), codegen

    return store


@intrinsic
def _fma(typing_context, a, b, c):
    def codegen(context, builder, signature, args):
        kind = context.get_value_type(signature.return_type)
        name = "llvm.fma.f64" if kind == ir.DoubleType() else "llvm.fma.f32"
        function = builder.module.declare_intrinsic(name, fnty=ir.FunctionType(kind, [kind] * 3))
        return builder.call(function, args)

    return a(a, a, a), codegen


_njit = functools.partial(numba.njit, error_model="numpy", nogil=True)
_inline = functools.partial(_njit, forceinline=True)

_VOCABULARY = {
    "fma": _inline(lambda a, b, c: _fma(a, b, c)),
    "div": _inline(lambda a, b: a / b),
    "where": _inline(lambda condition, a, b: a if condition else b),
    "maximum": _inline(lambda a, b: a if a > b or a != a else b),
    "sqrt": math.sqrt,
    "power": math.pow,
}


# the two kernels; these names are bound anew for each rule and signature by `_specialised`
prepare: Any = None
update: Any = None
load: Any = None
store: Any = None
COMPUTE: Any = None
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


def _update(rows, scalars, chunks, first, last):
    """Update the elements of chunks first:last."""
    for c in range(first, last):
        t = chunks[c, 0]
        begin, end = chunks[c, 1], min(chunks[c, 1] + _CHUNK, rows[t, NUMEL])
        roles = to_fixed_tuple(rows[t, POINTERS:], ROLES)
        targets = roles[:1] + roles[2:]
        s = to_fixed_tuple(scalars[t].astype(COMPUTE), SCALARS)
        for i in range(begin, end):
            values = load(roles, i)
            values = values[:1] + (values[1] * s[0],) + values[2:]
            store(targets, i, update(*(values + s[1:])))


def _specialised(kernel: Callable, names: dict[str, Any], key: str, signature: tuple) -> Callable:
    """`kernel` compiled with `names` bound, kept on disk under a name for all its code depends on."""
    bound = types.FunctionType(kernel.__code__, {**globals(), **names}, kernel.__name__)
    bound.__qualname__, bound.__module__ = f"{kernel.__name__}_{key}", __name__
    try:
        compiled = _njit(cache=True)(bound)
        compiled.compile(signature)
    except (RuntimeError, OSError):  # nowhere to write: for this process alone
        compiled = _njit(bound)
        compiled.compile(signature)
    return compiled


def _fingerprint(function: Callable) -> str:
    """The byte code of a rule and of whatever it calls."""
    called = (function.__globals__.get(name) for name in function.__code__.co_names)
    code = [function.__code__.co_code.hex(), repr(function.__code__.co_consts)]
    code += [_fingerprint(f) for f in called if isinstance(f, types.FunctionType)]
    return hashlib.sha1("".join(code).encode()).hexdigest()[:12]


_ROWS, _DOUBLES = nb.int64[:, ::1], nb.float64[:, ::1]


@functools.cache
def _prepare_kernel(rule: Callable, steps_dtype: np.dtype) -> Callable:
    names = {"prepare": bind(rule, _VOCABULARY, _inline), "OPTIONS": rule.__code__.co_argcount - 1}
    signature = (_ROWS, numba.from_dtype(steps_dtype)[::1], _DOUBLES, _DOUBLES, nb.float64)
    return _specialised(_prepare, names, f"{rule.__name__}_{_fingerprint(rule)}", signature)


@functools.cache
def _update_kernel(rule: Callable, scalars: int, dtypes: tuple[torch.dtype, ...]) -> Callable:
    compute = torch.float64 if torch.float64 in dtypes else torch.float32
    names = {
        "update": bind(rule, _VOCABULARY, _inline),
        "load": _loader(dtypes, _FLOATS[compute]),
        "store": _storer(dtypes[:1] + dtypes[2:]),
        "COMPUTE": np.float64 if compute == torch.float64 else np.float32,
        "ROLES": len(dtypes),
        "SCALARS": 1 + scalars,
    }
    stored = "_".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    key = f"{rule.__name__}_{stored}_{_fingerprint(rule)}"
    return _specialised(_update, names, key, (_ROWS, _DOUBLES, _ROWS, nb.int64, nb.int64))


def compile(table) -> None:
    first = 0
    for bucket in table.buckets:
        kernel = _update_kernel(bucket.rule.update, bucket.rule.scalar_count, bucket.dtypes)
        counts = -(-bucket.numels // _CHUNK)
        tensors = np.repeat(np.arange(len(counts)), counts)
        starts = (np.arange(len(tensors)) - np.repeat(np.cumsum(counts) - counts, counts)) * _CHUNK
        sizes = np.minimum(bucket.numels[tensors] - starts, _CHUNK)
        # cut where the running number of elements passes a multiple of _RANGE
        ends = np.flatnonzero(np.diff(np.cumsum(sizes) // _RANGE, append=-1)) + 1
        chunks = np.stack((tensors + first, starts), 1).astype(np.int64)
        bucket.launch = kernel, chunks, [0, *ends.tolist()]
        first += len(counts)
    _prepare_kernel(table.rule.scalars, table.steps.numpy().dtype)


def step(table, amp) -> None:
    if amp.found_inf is not None and float(amp.found_inf):
        return
    rows, steps, scalars = table.host_rows, table.steps.numpy(), table.scalars.numpy()
    scale = 1.0 if amp.scale is None else float(amp.scale)
    _prepare_kernel(table.rule.scalars, steps.dtype)(rows, steps, table.hyper.numpy(), scalars, scale)
    for bucket in table.buckets:
        kernel, chunks, cuts = bucket.launch
        ranges = iter(zip(cuts, cuts[1:]))
        helpers = min(torch.get_num_threads(), len(cuts) - 1) - 1

        def work(kernel=kernel, chunks=chunks, ranges=ranges) -> None:
            for first, last in ranges:
                kernel(rows, scalars, chunks, first, last)

        futures = [_pool().submit(work) for _ in range(helpers)]
        work()
        for future in futures:
            future.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="fusedstep")


# a child process has none of its parent's threads
os.register_at_fork(after_in_child=_pool.cache_clear)
