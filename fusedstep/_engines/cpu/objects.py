"""Questions about many Python objects at once, as machine code that uses CPython's C interface."""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Sequence
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

from . import build
from .build import I8, I64

OBJECT = I8.as_pointer()


def function(b: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Type) -> ir.Value:
    """A function of CPython's C interface."""
    llvm.add_symbol(name, ctypes.cast(getattr(ctypes.PyDLL(None), name), ctypes.c_void_p).value)
    return ir.Function(b.module, ir.FunctionType(result, arguments), name)


def callable_from_python(compiled: build.Compiled, result: Any, *arguments: Any) -> Any:
    """Called by a thread that holds the lock of the interpreter, as functions of extension modules are."""
    return ctypes.PYFUNCTYPE(result, *arguments)(compiled.address)


def has_lock() -> bool:
    """Whether this Python has a lock of the interpreter."""
    return not sysconfig.get_config_var("Py_GIL_DISABLED")


class Questions(NamedTuple):
    """What `_engines/objects.py` asks, with the counts of what it passes."""

    same: Any
    values_of: Any
    # these own the code
    engines: Sequence[build.Compiled]


def compiled() -> Questions | None:
    """None if these cannot be compiled, or Python has no lock to hold."""
    try:
        engines = (_compile_same(), _compile_values_of()) if has_lock() else ()
    except (AttributeError, OSError, RuntimeError):
        return None
    if not engines:
        return None
    any_, count = ctypes.py_object, ctypes.c_int64
    return Questions(
        callable_from_python(engines[0], count, any_, any_, count),
        callable_from_python(engines[1], any_, any_, any_, count, count, any_, any_),
        engines,
    )


def _compile_same() -> build.Compiled:
    """same(a, b, count): 1 or 0."""
    b = build.function("fusedstep_same", I64, [OBJECT, OBJECT, I64])
    left, right, count = b.function.args
    item = function(b, "PyList_GetItem", OBJECT, OBJECT, I64)
    differs = build.variable(b, I64)
    b.store(I64(0), differs)
    with build.loop(b, I64(0), count) as i:
        pair = (b.ptrtoint(b.call(item, [each, i]), I64) for each in (left, right))
        b.store(b.or_(b.load(differs), b.xor(*pair)), differs)
    b.ret(b.zext(b.icmp_signed("==", b.load(differs), I64(0)), I64))
    return build.Compiled(b, ctypes.c_int64, [ctypes.c_void_p] * 3)


def _compile_values_of() -> build.Compiled:
    """values_of(dicts, names, how many dicts and names, dict, None): a new list; None if anything is missing,
    or a dict is of a subclass.
    """
    b = build.function("fusedstep_values_of", OBJECT, [OBJECT, OBJECT, I64, I64, OBJECT, OBJECT])
    dicts, names, dict_count, name_count, dict_type, none = b.function.args
    type_of = function(b, "PyObject_Type", OBJECT, OBJECT)
    item = function(b, "PyList_GetItem", OBJECT, OBJECT, I64)
    get = function(b, "PyDict_GetItemWithError", OBJECT, OBJECT, OBJECT)
    new = function(b, "PyList_New", OBJECT, I64)
    put = function(b, "PyList_SetItem", build.I32, OBJECT, I64, OBJECT)
    hold, release = (function(b, name, ir.VoidType(), OBJECT) for name in ("Py_IncRef", "Py_DecRef"))
    forget_error = function(b, "PyErr_Clear", ir.VoidType())
    lacks: Any = lambda pointer: b.icmp_unsigned("==", pointer, ir.Constant(OBJECT, None))
    is_complete = build.variable(b, I64)
    b.store(I64(1), is_complete)
    found = b.call(new, [b.mul(dict_count, name_count)])
    with b.if_then(lacks(found), likely=False):
        # too little memory: CPython has set the error
        b.ret(found)
    with build.loop(b, I64(0), dict_count) as i:
        each = b.call(item, [dicts, i])
        its_type = b.call(type_of, [each])
        # the dict itself keeps its type alive
        b.call(release, [its_type])
        with b.if_then(b.icmp_unsigned("!=", its_type, dict_type), likely=False):
            b.store(I64(0), is_complete)
        with build.loop(b, I64(0), name_count) as k:
            value = b.call(get, [each, b.call(item, [names, k])])
            is_missing = lacks(value)
            with b.if_then(is_missing, likely=False):
                b.store(I64(0), is_complete)
            value = b.select(is_missing, none, value)
            b.call(hold, [value])
            # the list takes over the hold
            b.call(put, [found, b.add(b.mul(i, name_count), k), value])
    with b.if_then(b.icmp_signed("!=", b.load(is_complete), I64(0)), likely=True):
        b.ret(found)
    b.call(forget_error, [])
    b.call(release, [found])
    b.call(hold, [none])
    b.ret(none)
    return build.Compiled(b, ctypes.c_void_p, [ctypes.c_void_p] * 2)
