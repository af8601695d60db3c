"""The loops of `_scan`, compiled. Apart from it because Numba is imported on first use only."""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba.core import types as nb
from numba.extending import intrinsic

from ._cache import kept_on_disk
from ._scan import (
    _DICT_VERSION,
    BYTES,
    CLEAR,
    COUNT,
    COUNTER,
    DATA,
    DIMS,
    DISPATCH,
    DISTRIBUTED,
    GET_ITEM,
    GRAD,
    GRAD_SPEC,
    GROUP,
    GROUP_VERSION,
    IMPL,
    KEYS,
    KIND,
    KIND_BYTES,
    LENGTH,
    MEMBERS,
    META,
    MOST_DIMS,
    MOVED,
    NEXT,
    NO_GRAD,
    OBJECT,
    PARAM,
    PARAMETER,
    PARAMS,
    PART,
    SAME,
    SHAPE,
    SIZES,
    SPEC,
    STATE,
    STATES,
    STEP,
    STORAGE,
    STRIDES,
    TENSOR,
    UNSURE,
    VERSION,
    WORDS,
    WRITES,
)

# offsets in CPython's objects: the type of any, size and items of a list
_TYPE, _SIZE, _ITEMS = 8, 16, 24
# in torch's, from its number of dimensions, which sizes and strides follow: the offset into its memory, and
# after the number of elements the word that begins with dtype (2 bytes) and device (3 bytes)
_SIZES, _STRIDES = 8, 8 * (1 + MOST_DIMS)
_OFFSET = 8 * (1 + 2 * MOST_DIMS)
_KIND = _OFFSET + 16


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


@intrinsic
def _count(typing_context, address):
    """Add one to the four bytes at an address, at once for all threads."""

    def codegen(context, builder, signature, values):
        number = builder.inttoptr(values[0], ir.IntType(32).as_pointer())
        builder.atomic_rmw("add", number, ir.IntType(32)(1), "monotonic")
        return context.get_dummy_value()

    return nb.void(address), codegen


def _compiled(function):
    return kept_on_disk(function, lambda f, cache: numba.njit(cache=cache)(f))


_inline = numba.njit(forceinline=True)


@_inline
def _item(api, mapping, key):
    """What a dict has under a key, 0 if nothing."""
    found = _call(api[GET_ITEM], (mapping, key))
    if found == 0:
        _call(api[CLEAR], ())
    return found


@_inline
def _is_unchanged(mapping, version):
    """Whether a dict is still as it was when it had this version; False if dicts have none."""
    return version != 0 and _word(mapping + _DICT_VERSION) == version


@_inline
def _address_by(api, impl, size):
    """Where a tensor's first element lies; only for those that have memory."""
    return _word(_word(impl + api[STORAGE]) + api[DATA]) + size * _word(impl + api[SHAPE] + _OFFSET)


@_compiled
def read_tensors(api, tensors, sizes):
    """What kind of tensor each is; only as many sizes and strides as it has dimensions mean anything."""
    words = np.zeros((tensors.shape[0], tensors.shape[1], WORDS), np.int64)
    addresses = np.zeros(tensors.shape, np.int64)
    for i in range(tensors.shape[0]):
        for k in range(tensors.shape[1]):
            impl = _word(tensors[i, k] + api[IMPL])
            shape = impl + api[SHAPE]
            words[i, k, DIMS] = _word(shape)
            for d in range(min(words[i, k, DIMS], MOST_DIMS)):
                words[i, k, SIZES + d] = _word(shape + _SIZES + 8 * d)
                words[i, k, STRIDES + d] = _word(shape + _STRIDES + 8 * d)
            words[i, k, KIND] = _word(shape + _KIND) & KIND_BYTES
            words[i, k, DISPATCH] = _word(impl + api[KEYS])
            words[i, k, BYTES] = sizes[i, k]
            addresses[i, k] = _address_by(api, impl, sizes[i, k])
    return words, addresses


@_inline
def _is_still(api, impl, kinds, kind):
    """Whether a tensor is of this kind; then it has memory, and an address."""
    shape = impl + api[SHAPE]
    different = _word(shape) ^ kinds[kind, DIMS]
    different |= (_word(shape + _KIND) & KIND_BYTES) ^ kinds[kind, KIND]
    different |= _word(impl + api[KEYS]) ^ kinds[kind, DISPATCH]
    for d in range(kinds[kind, DIMS]):
        different |= _word(shape + _SIZES + 8 * d) ^ kinds[kind, SIZES + d]
        different |= _word(shape + _STRIDES + 8 * d) ^ kinds[kind, STRIDES + d]
    return different == 0


@_inline
def _address(api, impl, kinds, kind):
    return _address_by(api, impl, kinds[kind, BYTES])


@_inline
def _grad(api, impl):
    """torch's gradient of torch's tensor, 0 if there is none."""
    meta = _word(impl + api[META])
    if meta == 0:
        return 0
    grad = _word(meta + api[GRAD])
    return 0 if grad == api[NO_GRAD] else grad


@_inline
def _any_grad(api, params):
    found = 0
    for i in range(len(params)):
        found |= _grad(api, _word(params[i] + api[IMPL]))
    return found != 0


@_inline
def _part(api, tensor):
    """torch's tensor of the part of a distributed one that is here, 0 if that is not a plain one."""
    part = _word(tensor + api[PART])
    return _word(part + api[IMPL]) if part != 0 and _word(part + _TYPE) == api[TENSOR] else 0


@_compiled
def scan_entries(api, facts, kinds, kind_of, names, saves_step, absent, addresses):
    verdict, last = SAME, 2 + len(names)
    for i in range(len(facts)):
        param, state, spec = facts[i, PARAM], facts[i, STATE], facts[i, GRAD_SPEC]
        unchanged = _is_unchanged(state, facts[i, VERSION])
        impl = _word(param + api[IMPL])
        grad = _grad(api, impl)
        if spec != 0:
            whole = 0 if grad == 0 else _word(grad + api[OBJECT])
            if whole == 0 or _word(whole + _TYPE) != api[DISTRIBUTED] or _word(whole + api[SPEC]) != spec:
                return UNSURE
            impl, grad = _part(api, param), _part(api, whole)
        if impl == 0 or grad == 0:
            return UNSURE
        if not _is_still(api, impl, kinds, kind_of[i, 0]) or not _is_still(api, grad, kinds, kind_of[i, 1]):
            return UNSURE
        if _address(api, impl, kinds, kind_of[i, 0]) != addresses[i, 0]:
            return UNSURE
        address = _address(api, grad, kinds, kind_of[i, 1])
        if address != addresses[i, 1]:
            addresses[i, 1] = address
            verdict = MOVED
        for k in range(len(names)):
            tensor = facts[i, STATES + k]
            if not unchanged:
                # looking it up takes longer than all the rest
                tensor = _item(api, state, names[k])
                if tensor == 0 or _word(tensor + _TYPE) != (api[TENSOR] if spec == 0 else api[DISTRIBUTED]):
                    return UNSURE
            impl = _word(tensor + api[IMPL]) if spec == 0 else _part(api, tensor)
            if impl == 0 or not _is_still(api, impl, kinds, kind_of[i, 2 + k]):
                return UNSURE
            if _address(api, impl, kinds, kind_of[i, 2 + k]) != addresses[i, 2 + k]:
                return UNSURE
        if i > 0 and not saves_step:
            # nobody has these counts but we: they can only move together
            continue
        if saves_step and not unchanged and _item(api, state, api[STEP]) != facts[i, COUNT]:
            return UNSURE
        impl = _word(facts[i, COUNT] + api[IMPL])
        if not _is_still(api, impl, kinds, kind_of[i, last]):
            return UNSURE
        if _address(api, impl, kinds, kind_of[i, last]) != addresses[i, last]:
            return UNSURE
    return UNSURE if _any_grad(api, absent) else verdict


@_inline
def _count_write(api, impl):
    counter = 0 if impl == 0 else _word(impl + api[COUNTER])
    if counter != 0:  # inference tensors have none
        _count(counter + api[WRITES])


@_compiled
def count_writes(api, facts, grads):
    for i in range(len(facts)):
        impl = _word(facts[i, PARAM] + api[IMPL])
        _count_write(api, impl)
        if grads:
            _count_write(api, _grad(api, impl))


@_compiled
def scan_groups(api, groups, state, version, facts, values, params, options, states, absent):
    if _word(groups + _SIZE) != len(facts):
        return UNSURE
    verdict = SAME
    items, first = _word(groups + _ITEMS), 0
    for i in range(len(facts)):
        group = _word(items + 8 * i)
        if group != facts[i, GROUP]:
            return UNSURE
        if not _is_unchanged(group, facts[i, GROUP_VERSION]):
            if _item(api, group, api[PARAMS]) != facts[i, MEMBERS]:
                return UNSURE
            for k in range(len(options)):
                if _item(api, group, options[k]) != values[i, k]:
                    verdict = MOVED
        if _word(facts[i, MEMBERS] + _SIZE) != facts[i, LENGTH]:
            return UNSURE
        members = _word(facts[i, MEMBERS] + _ITEMS)
        for k in range(facts[i, LENGTH]):
            if _word(members + 8 * k) != params[first + k]:
                return UNSURE
        first += facts[i, LENGTH]
    if _any_grad(api, absent):
        return UNSURE
    if _is_unchanged(state, version):
        return verdict
    # PyDict_Next writes the next position, key and value where it is told
    scratch, count = np.zeros(3, np.int64), 0
    here = scratch.ctypes.data
    while _call(api[NEXT], (state, here, here + 8, here + 16)) & 0xFFFFFFFF != 0:
        if count >= len(states) or _word(here + 16) != states[count]:
            return UNSURE
        count += 1
    return verdict if count == len(states) else UNSURE


@_compiled
def scan_lists(api, lists, kinds, kind_of, addresses):
    verdict = SAME
    for k in range(len(lists)):
        if _word(lists[k] + _SIZE) != len(kind_of):
            return UNSURE
        items = _word(lists[k] + _ITEMS)
        for i in range(len(kind_of)):
            tensor = _word(items + 8 * i)
            cls = _word(tensor + _TYPE)
            if cls != api[TENSOR] and cls != api[PARAMETER]:
                return UNSURE
            impl = _word(tensor + api[IMPL])
            if not _is_still(api, impl, kinds, kind_of[i, k]):
                return UNSURE
            address = _address(api, impl, kinds, kind_of[i, k])
            if address != addresses[i, k]:
                addresses[i, k] = address
                verdict = MOVED
    return verdict
