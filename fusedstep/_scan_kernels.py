"""The loops of `_scan`, compiled. Apart from it because Numba is imported on first use only."""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba.core import types as nb
from numba.extending import intrinsic

from ._scan import (
    CALL_METHOD,
    CLEAR,
    COMPARE,
    DATA_PTR,
    DEC_REF,
    DTYPE,
    GET_ATTR,
    GET_ITEM,
    GRAD,
    IS_CONTIGUOUS,
    MOVED,
    NEXT,
    NONE,
    PARAMS,
    SAME,
    STEP,
    STRIDE,
    TENSOR,
    TRUE,
    UNSURE,
)

# offsets in CPython's objects: the type of any, size and items of a list, the target of a weak reference
_TYPE, _SIZE, _ITEMS, _TARGET = 8, 16, 24, 16


@intrinsic
def _call(typing_context, function, args):
    """Call the C function at an address; pointers and integers travel alike."""

    def codegen(context, builder, signature, values):
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word] * len(args))
        pointer = builder.inttoptr(values[0], kind.as_pointer())
        return builder.call(pointer, [builder.extract_value(values[1], i) for i in range(len(args))])

    return nb.int64(function, args), codegen


@intrinsic
def _word(typing_context, address):
    """The eight bytes at an address."""

    def codegen(context, builder, signature, values):
        return builder.load(builder.inttoptr(values[0], ir.IntType(64).as_pointer()))

    return nb.int64(address), codegen


def _compiled(function):
    try:
        return numba.njit(cache=True)(function)
    except RuntimeError:  # nowhere to write
        return numba.njit(function)


_inline = numba.njit(forceinline=True)


@_inline
def _lies_as(api, grad, facts, scratch):
    """Dtype and strides as recorded; False too for what has none, such as a sparse tensor."""
    dtype = _call(api[GET_ATTR], (grad, api[DTYPE]))
    _call(api[DEC_REF], (dtype,))
    if dtype != facts[2]:
        return False
    scratch[0] = grad
    contiguous = facts[3] == api[NONE]
    name = api[IS_CONTIGUOUS] if contiguous else api[STRIDE]
    found = _call(api[CALL_METHOD], (name, scratch.ctypes.data, 1, 0))
    if found == 0:
        _call(api[CLEAR], ())
        return False
    same = found == api[TRUE] if contiguous else _call(api[COMPARE], (found, facts[3], 2)) & 0xFFFFFFFF == 1
    _call(api[DEC_REF], (found,))
    return same


@_inline
def _any_grad(api, params):
    for i in range(len(params)):
        grad = _call(api[GET_ATTR], (params[i], api[GRAD]))
        if grad == 0:
            _call(api[CLEAR], ())
            return True
        _call(api[DEC_REF], (grad,))
        if grad != api[NONE]:
            return True
    return False


@_compiled
def scan_entries(api, facts, names, absent, addresses):
    verdict, scratch = SAME, np.zeros(1, np.int64)
    for i in range(len(facts)):
        param, state = facts[i, 0], facts[i, 1]
        if _call(api[DATA_PTR], (param,)) != addresses[i, 0]:
            return UNSURE
        grad = _call(api[GET_ATTR], (param, api[GRAD]))
        if grad == 0:
            _call(api[CLEAR], ())
            return UNSURE
        if grad == api[NONE]:
            _call(api[DEC_REF], (grad,))
            return UNSURE
        # a dead weak reference points to None
        known = _word(facts[i, 4] + _TARGET) == grad
        if not known and (_word(grad + _TYPE) != api[TENSOR] or not _lies_as(api, grad, facts[i], scratch)):
            _call(api[DEC_REF], (grad,))
            return UNSURE
        address = _call(api[DATA_PTR], (grad,))
        _call(api[DEC_REF], (grad,))
        if address != addresses[i, 1]:
            addresses[i, 1] = address
            verdict = MOVED
        for k in range(len(names)):
            tensor = _call(api[GET_ITEM], (state, names[k]))
            if tensor == 0 or _word(tensor + _TYPE) != api[TENSOR]:
                return UNSURE
            if _call(api[DATA_PTR], (tensor,)) != addresses[i, 2 + k]:
                return UNSURE
        if facts[i, 5] != api[NONE] and _call(api[GET_ITEM], (state, api[STEP])) != facts[i, 5]:
            return UNSURE
    return UNSURE if _any_grad(api, absent) else verdict


@_compiled
def scan_groups(api, groups, state, facts, values, params, options, states, absent):
    if _word(groups + _SIZE) != len(facts):
        return False
    items, first = _word(groups + _ITEMS), 0
    for i in range(len(facts)):
        group = _word(items + 8 * i)
        if group != facts[i, 0] or _call(api[GET_ITEM], (group, api[PARAMS])) != facts[i, 1]:
            return False
        for k in range(len(options)):
            if _call(api[GET_ITEM], (group, options[k])) != values[i, k]:
                return False
        if _word(facts[i, 1] + _SIZE) != facts[i, 2]:
            return False
        members = _word(facts[i, 1] + _ITEMS)
        for k in range(facts[i, 2]):
            if _word(members + 8 * k) != params[first + k]:
                return False
        first += facts[i, 2]
    if _any_grad(api, absent):
        return False
    # PyDict_Next writes the next position, key and value where it is told
    scratch, count = np.zeros(3, np.int64), 0
    here = scratch.ctypes.data
    while _call(api[NEXT], (state, here, here + 8, here + 16)) & 0xFFFFFFFF != 0:
        if count >= len(states) or _word(here + 16) != states[count]:
            return False
        count += 1
    return count == len(states)
