"""Kinds and addresses of many tensors in one call, through DLPack's table of C functions.

`torch.Tensor.__dlpack_c_exchange_api__` is the public and versioned way for compiled code to ask a tensor for
its address, device, dtype, sizes and strides (see "exchange protocol" in dlpack.h); the same questions take
many times as long from Python. Asking for its address gives a lazy clone memory of its own. The objects come
from a Python list, through CPython's C interface; torch is not shown an object of an unexpected type.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from torch import Tensor

from .. import CHANGED, MOVED, OTHER, SAME, SOME_ABSENT
from . import build
from .build import I8, I32, I64
from .objects import OBJECT, callable_from_python, function, has_lock

_NAME, _MAJOR, _FIRST_MINOR = b"dlpack_exchange_api", 1, 3
_TEXT, _WORDS = I8.as_pointer(), I64.as_pointer()
# DLTensor: address, device, the number of dimensions with the dtype, sizes, strides, offset
_TENSOR = ir.LiteralStructType([I64, I64, I64, _WORDS, _WORDS, I64])
_ADDRESS, _DEVICE, _DIMS_AND_DTYPE, _SIZES, _STRIDES, _OFFSET = range(6)
# DLPackExchangeAPI: the version, an older table, five functions
_TABLE = ir.LiteralStructType([I32, I32, I64, I64, I64, I64, I64, I64])
_MAJOR_AT, _MINOR_AT, _DESCRIBE_AT = 0, 1, 6
# layout of a kind in memory: these, then sizes and strides
_ON, _DIMS, _HAS_ELEMENTS, _FIRST_SIZE = range(4)


class Table:
    """torch's functions, and our functions that call them."""

    def __init__(self, capsule: Any) -> None:
        """Raises RuntimeError if its version is not known."""
        self._compiled = [_compile_open(), _compile_describe(), _compile_look()]
        pointer, text, objects = ctypes.c_void_p, ctypes.c_char_p, ctypes.py_object
        takes: tuple[Any, ...] = (
            (objects, text, pointer),
            (pointer, objects, pointer),
            (pointer, objects, objects, objects),
        )
        open_, self._describe, self._look = (
            callable_from_python(compiled, ctypes.c_int64, *arguments)
            for compiled, arguments in zip(self._compiled, takes, strict=True)
        )
        version = np.zeros(2, np.int64)
        self._table = open_(capsule, _NAME, version.ctypes.data)
        major, minor = version.tolist()
        if major != _MAJOR or minor < _FIRST_MINOR:
            raise RuntimeError(f"DLPack {major}.{minor} is not known here")

    def kind(self, t: Tensor) -> np.ndarray | None:
        """What `looker` compares a tensor with; None if it cannot be described."""
        found = np.zeros(2, np.int64)
        if self._describe(self._table, [t], found.ctypes.data) != 0:
            return None
        kind = np.array([*found, t.numel() > 0, *t.shape, *t.stride()], np.int64)
        # does torch describe it in the same way again?
        look = self.looker([type(t)], np.array([kind.ctypes.data], np.int64), np.zeros(1, np.int64), OTHER)
        return None if look([t]) & CHANGED else kind

    def looker(
        self, types: list[Any], kinds: np.ndarray, addresses: np.ndarray, absent: int
    ) -> Callable[[list[Any]], int]:
        """look(tensors): the worst that it found, and SOME_ABSENT if there is a None. It writes the
        `addresses` of these tensors, OTHER for one of another type or kind, and `absent` for None.

        `kinds` has the address of a kind for each, or 0 where only None is expected.
        """
        job = np.array([self._table, len(kinds), kinds.ctypes.data, addresses.ctypes.data, absent], np.int64)
        call, at, count = self._look, job.ctypes.data, len(kinds)

        # the job points to these
        def look(tensors: list[Any], arrays: Any = (job, kinds, addresses)) -> int:
            # against our own mistakes: nothing beyond its end may be read
            assert len(tensors) == len(types) == count
            return call(at, tensors, types, None)

        return look


@functools.cache
def table() -> Table | None:
    """None if torch has no such table, or ours cannot be compiled, or Python has no lock to hold."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    try:
        return None if capsule is None or not has_lock() else Table(capsule)
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError):
        return None


def _field(b: ir.IRBuilder, pointer: ir.Value, which: int) -> ir.Value:
    return b.load(b.gep(pointer, [I32(0), I32(which)]))


class _Asker:
    """Asks torch for one object of a list after the other."""

    def __init__(self, b: ir.IRBuilder, table: ir.Value, objects: ir.Value) -> None:
        self._builder, self._objects, self.tensor = b, objects, build.variable(b, _TENSOR)
        asks = ir.FunctionType(I32, [OBJECT, _TENSOR.as_pointer()]).as_pointer()
        self._ask = b.inttoptr(_field(b, b.bitcast(table, _TABLE.as_pointer()), _DESCRIBE_AT), asks)
        self._item = function(b, "PyList_GetItem", OBJECT, OBJECT, I64)
        self._type = function(b, "PyObject_Type", OBJECT, OBJECT)
        self._release = function(b, "Py_DecRef", ir.VoidType(), OBJECT)
        self._clear = function(b, "PyErr_Clear", ir.VoidType())

    def item(self, i: ir.Value, of: ir.Value | None = None) -> ir.Value:
        return self._builder.call(self._item, [self._objects if of is None else of, i])

    def is_of_type(self, item: ir.Value, type_: ir.Value) -> ir.Value:
        b = self._builder
        found = b.call(self._type, [item])
        # the item itself keeps its type alive
        b.call(self._release, [found])
        return b.icmp_unsigned("==", found, type_)

    def succeeds(self, item: ir.Value) -> ir.Value:
        """Have torch fill in `tensor`; returns whether it could."""
        b = self._builder
        failed = b.icmp_signed("!=", b.call(self._ask, [item, self.tensor]), I32(0))
        with b.if_then(failed, likely=False):
            b.call(self._clear, [])
        return b.not_(failed)

    def __getitem__(self, which: int) -> ir.Value:
        return _field(self._builder, self.tensor, which)


def _compile_open() -> build.Compiled:
    """open(capsule, name, version): writes the table's version, and returns its address. CPython raises
    ValueError if the capsule has another name.
    """
    b = build.function("fusedstep_dlpack_open", I64, [OBJECT, _TEXT, _WORDS])
    capsule, name, version = b.function.args
    table = b.call(function(b, "PyCapsule_GetPointer", OBJECT, OBJECT, _TEXT), [capsule, name])
    with b.if_then(b.icmp_unsigned("!=", table, ir.Constant(OBJECT, None))):
        for i, at in enumerate((_MAJOR_AT, _MINOR_AT)):
            part = _field(b, b.bitcast(table, _TABLE.as_pointer()), at)
            b.store(b.zext(part, I64), b.gep(version, [I64(i)]))
    b.ret(b.ptrtoint(table, I64))
    return build.Compiled(b, ctypes.c_int64, [ctypes.c_void_p] * 3)


def _compile_describe() -> build.Compiled:
    """describe(table, [tensor], found): writes its device, and its number of dimensions with its dtype; returns
    0, or 1 if torch cannot describe it.
    """
    b = build.function("fusedstep_dlpack_describe", I64, [OBJECT, OBJECT, _WORDS])
    table, objects, found = b.function.args
    asker = _Asker(b, table, objects)
    with b.if_then(asker.succeeds(asker.item(I64(0)))):
        for i, which in enumerate((_DEVICE, _DIMS_AND_DTYPE)):
            b.store(asker[which], b.gep(found, [I64(i)]))
        b.ret(I64(0))
    b.ret(I64(1))
    return build.Compiled(b, ctypes.c_int64, [ctypes.c_void_p] * 3)


def _compile_look() -> build.Compiled:
    """look(job, objects, types, None): see `Table.looker`."""
    b = build.function("fusedstep_dlpack_look", I64, [_WORDS, OBJECT, OBJECT, OBJECT])
    job, objects, types, none = b.function.args
    table, count, *arrays, absent = (b.load(b.gep(job, [I64(i)])) for i in range(5))
    kinds, addresses = (b.inttoptr(array, _WORDS) for array in arrays)
    asker = _Asker(b, b.inttoptr(table, OBJECT), objects)
    worst, absences, found, differs = (build.variable(b, I64) for _ in range(4))
    b.store(I64(SAME), worst)
    b.store(I64(0), absences)
    with build.loop(b, I64(0), count) as i:
        item, kind = asker.item(i), b.load(b.gep(kinds, [i]))
        is_none = b.icmp_unsigned("==", item, none)
        b.store(b.select(is_none, absent, I64(OTHER)), found)
        b.store(b.select(is_none, I64(SOME_ABSENT), b.load(absences)), absences)
        with (
            b.if_then(b.and_(b.not_(is_none), b.icmp_signed("!=", kind, I64(0)))),
            b.if_then(asker.is_of_type(item, asker.item(i, types))),
        ):
            _store_address(b, asker, item, b.inttoptr(kind, _WORDS), found, differs)
        place, address = b.gep(addresses, [i]), b.load(found)
        result = b.select(b.icmp_signed("!=", b.load(place), address), I64(MOVED), I64(SAME))
        result = b.select(b.icmp_signed("==", address, I64(OTHER)), I64(CHANGED), result)
        b.store(address, place)
        b.store(build.larger(b, b.load(worst), result), worst)
    b.ret(b.or_(b.load(worst), b.load(absences)))
    return build.Compiled(b, ctypes.c_int64, [ctypes.c_void_p] * 4)


def _store_address(b: ir.IRBuilder, asker: _Asker, item: Any, kind: Any, found: Any, differs: Any) -> None:
    """Store the address of a tensor in `found` if it is of this kind."""
    expected: Callable[[Any], ir.Value] = lambda at: b.load(b.gep(kind, [at]))
    equal = functools.partial(b.icmp_signed, "==")
    with (
        b.if_then(asker.succeeds(item)),
        b.if_then(
            b.and_(
                equal(asker[_DEVICE], expected(I64(_ON))), equal(asker[_DIMS_AND_DTYPE], expected(I64(_DIMS)))
            )
        ),
    ):
        dims = b.and_(asker[_DIMS_AND_DTYPE], I64(0xFFFFFFFF))
        first_stride = b.add(dims, I64(_FIRST_SIZE))
        sizes, strides = asker[_SIZES], asker[_STRIDES]
        b.store(I64(0), differs)
        with build.loop(b, I64(0), dims) as k:
            size = b.xor(b.load(b.gep(sizes, [k])), expected(b.add(k, I64(_FIRST_SIZE))))
            stride = b.xor(b.load(b.gep(strides, [k])), expected(b.add(k, first_stride)))
            b.store(b.or_(b.load(differs), b.or_(size, stride)), differs)
        address = b.add(asker[_ADDRESS], asker[_OFFSET])
        # no address: it has lost its memory, or never had any, such as a lazy tensor of zeros
        is_there = b.or_(b.icmp_signed("!=", address, I64(0)), equal(expected(I64(_HAS_ELEMENTS)), I64(0)))
        with b.if_then(b.and_(equal(b.load(differs), I64(0)), is_there)):
            b.store(address, found)
