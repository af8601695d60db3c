"""Has anything changed since the last step? Asked in machine code, at about 0.15 us a parameter.

Every step must look at every gradient, address, state and option again: all of them may be re-allocated
or replaced at will. In Python that look costs more than the launch it precedes, so the loop over these
Python objects is compiled by Numba and talks to CPython's C interface. It only reads. What it is not
sure about it leaves to the plan, which looks again in Python; where it cannot run (another interpreter,
a torch without the one C function it needs), the plan always does.

Objects are compared by address. Those that were recorded are kept alive, so that no other object can
take their place; gradients and states are not kept, and are compared by what they are and where they lie.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._entry import Entry

SAME, MOVED, UNSURE = range(3)

# what the compiled loops are handed in one array: addresses of C functions, then of Python objects
_FUNCTIONS = (
    "PyObject_GetAttr",
    "PyObject_VectorcallMethod",
    "PyObject_RichCompareBool",
    "PyDict_GetItemWithError",
    "PyDict_Next",
    "PyErr_Clear",
    "Py_DecRef",
)
GET_ATTR, CALL_METHOD, COMPARE, GET_ITEM, NEXT, CLEAR, DEC_REF, DATA_PTR = range(8)
_OBJECTS = ("grad", "dtype", "is_contiguous", "stride", "params", "step", None, True, Tensor)
GRAD, DTYPE, IS_CONTIGUOUS, STRIDE, PARAMS, STEP, NONE, TRUE, TENSOR = range(8, 17)


def _api() -> np.ndarray | None:
    data_ptr = getattr(torch._C._dynamo.guards, "_torchinductor_pyobject_tensor_data_ptr", None)
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED") or not data_ptr:
        return None
    functions = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    return np.array([*functions, data_ptr, *map(id, _OBJECTS)], np.int64)


API = _api()


def _ids(objects: Iterable[Any]) -> np.ndarray:
    return np.array([*map(id, objects)], np.int64)


class Groups:
    """The groups as they were: which parameters and option values they hold, and all states there are."""

    def __init__(self, groups: list[dict], options: Sequence[str], state: dict, absent: list[Tensor]) -> None:
        lists = [group["params"] for group in groups]
        values = [group[name] for group in groups for name in options]
        params, states = [p for members in lists for p in members], [*state.values()]
        self._kept = groups, lists, values, params, states, options, absent
        self._groups = np.stack((_ids(groups), _ids(lists), [*map(len, lists)]), 1).astype(np.int64)
        self._values = _ids(values).reshape(len(groups), len(options))
        self._arrays = _ids(params), _ids(options), _ids(states), _ids(absent)

    def same(self, groups: list[dict], state: dict) -> bool:
        """Whether all of that still holds, and no gradient has appeared where there was none."""
        from ._scan_kernels import scan_groups

        return scan_groups(API, id(groups), id(state), self._groups, self._values, *self._arrays)


class Entries:
    """Parameters with their gradients, states and step counts as they were, and where."""

    def __init__(self, entries: Sequence[Entry], names: Sequence[str], absent: list[Tensor]) -> None:
        params, states = [e.param for e in entries], [e.state for e in entries]
        steps = [e.step if e.rule.counts else None for e in entries]
        grads: list[Any] = [p.grad for p in params]
        strides = [None if g.is_contiguous() else g.stride() for g in grads]
        dtypes = [g.dtype for g in grads]
        # to know the very same gradient object again without keeping it alive
        known = [*map(weakref.ref, grads)]
        self._kept = params, states, steps, names, absent, strides, dtypes, known
        columns: tuple[list, ...] = params, states, dtypes, strides, known, steps
        self._facts = np.stack([*map(_ids, columns)], 1)
        self._names, self._absent = _ids(names), _ids(absent)
        self.addresses = np.array([e.addresses() for e in entries], np.int64)

    def look(self) -> int:
        """SAME, MOVED if only gradients lie elsewhere (`addresses` then says where), else UNSURE.

        A gradient where there was none is a reason to be unsure too.
        """
        from ._scan_kernels import scan_entries

        return scan_entries(API, self._facts, self._names, self._absent, self.addresses)
