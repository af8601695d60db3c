"""Has anything changed since the last step? Asked in machine code.

Every step must look at every gradient, address, state and option again: all of them may be re-allocated
or replaced at will. In Python that look costs more than the launch it precedes, so the loop over these
Python objects is compiled by Numba and talks to CPython's C interface. It only reads, but for one thing:
after a step it counts what was written in the counters by which autograd notices. What it is not sure about
it leaves to the plan, which looks again in Python; where it cannot run (another interpreter, a torch that
lays out its tensors otherwise), the plan always does.

Options, parameters and state dicts are compared by identity, and kept alive so that no other object can
take their place. Gradients and states are not kept: they are compared by dtype, device, sizes, strides,
dispatch keys (sparse, conjugate, wrapped, ...) and address, read straight from torch's structures, whose
offsets are found by looking at tensors of known contents.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._entry import Entry
from ._shards import is_distributed

SAME, MOVED, UNSURE = range(3)

# what the compiled loops are handed in one array: addresses of C functions and Python objects, offsets
_FUNCTIONS = ("PyDict_GetItemWithError", "PyDict_Next", "PyErr_Clear")
GET_ITEM, NEXT, CLEAR = range(3)
_OBJECTS = ("params", "step", Tensor, torch.nn.Parameter)
PARAMS, STEP, TENSOR, PARAMETER = range(3, 7)
IMPL, SHAPE, KEYS, STORAGE, DATA, META, GRAD, NO_GRAD, COUNTER, WRITES, OBJECT = range(7, 18)
# 0 until there is one: the type of distributed tensors, where they have the part that is here and their spec
DISTRIBUTED, PART, SPEC = range(18, 21)

# columns of what is remembered of a parameter; its states follow
# (of a distributed one, also how its gradient is)
PARAM, STATE, VERSION, COUNT, GRAD_SPEC, STATES = range(6)
# of a group: itself, its list of parameters and how long that is, its version
GROUP, MEMBERS, LENGTH, GROUP_VERSION = range(4)
# and of a tensor: dimensions, sizes and strides, dtype with device, dispatch keys, bytes of an element
MOST_DIMS = 5
DIMS, SIZES, STRIDES = 0, 1, 1 + MOST_DIMS
KIND, DISPATCH, BYTES, WORDS = range(1 + 2 * MOST_DIMS, 5 + 2 * MOST_DIMS)
KIND_BYTES = 0xFFFFFFFFFF


def _words(address: int, count: int) -> list[int]:
    return [ctypes.c_int64.from_address(address + 8 * i).value for i in range(count)]


def _offsets() -> list[int] | None:
    """Where a Python tensor points to torch's, and where that has what we look at; None if unclear.

    Shape and offset are found by their values, and so is the memory; the keys are what conjugation alone
    changes; the gradient hangs on what a tensor gets when it requires one, and there is something that stands
    there instead of a gradient. Last come where writes are counted, and Python's tensor.
    """
    t = torch.empty(3, 5, 7, 11, 13, device="cpu")
    z = torch.empty(1, dtype=torch.complex64, device="cpu")
    inside, tensor = _words(id(t), 6), _words(t._cdata, 25)
    plain, conjugate = _words(z._cdata, 25), _words(z.conj()._cdata, 25)
    shape = [5, *t.shape, *t.stride(), 0, t.numel()]
    starts = [i for i in range(len(tensor) - len(shape)) if tensor[i : i + len(shape)] == shape]
    memory, storage = t.untyped_storage().data_ptr(), t.untyped_storage()._cdata
    if inside.count(t._cdata) != 1 or len(starts) != 1 or tensor[: starts[0]].count(storage) != 1:
        return None
    after = starts[0] + len(shape)
    # the word after numel begins with dtype and device; the rest of it is left as it was found
    keys = [i for i in range(after + 1, len(tensor)) if (plain[i] ^ conjugate[i]).bit_count() == 1]
    same = all(plain[i] == conjugate[i] for i in (starts[0], starts[0] + 1))
    same = same and not (plain[after] ^ conjugate[after]) & KIND_BYTES
    requiring = _words(t.requires_grad_()._cdata, starts[0])
    meta = [i for i in range(starts[0]) if tensor[i] != requiring[i]]
    if not keys or keys[0] > after + 3 or not same or len(meta) != 1 or memory not in _words(storage, 6):
        return None
    without = _words(_words(t._cdata, 25)[meta[0]], 8)
    t.grad = torch.empty_like(t)
    with_grad = _words(_words(t._cdata, 25)[meta[0]], 8)
    # another word may happen to read the same: not all are initialised
    grads = [i for i in range(8) if without[i] != with_grad[i] == t.grad._cdata]
    if len(grads) != 1:
        return None
    grad = grads[0]
    places = [inside.index(t._cdata), starts[0], keys[0], tensor.index(storage)]
    places += [_words(storage, 6).index(memory), meta[0], grad]
    counter = _write_counter()
    if counter is None or tensor[: starts[0]].count(id(t)) != 1:
        return None
    return [*(8 * place for place in places), without[grad], *counter, 8 * tensor.index(id(t))]


def _write_counter() -> tuple[int, int] | None:
    """Where a tensor points to its count of writes, and where that has the number.

    A tensor shares it with its views and with what is detached from it, but not with its `data`.
    """
    t, writes = torch.empty(3, 5, device="cpu"), 777
    torch.autograd.graph.increment_version([t] * writes)
    own, view, detached, data = (_words(x._cdata, 8) for x in (t, t.view(-1), t.detach(), t.data))
    places = [i for i in range(8) if own[i] == view[i] == detached[i] != data[i]]
    if len(places) != 1:
        return None
    halves = [ctypes.c_uint32.from_address(own[places[0]] + 4 * i).value for i in range(6)]
    return (8 * places[0], 4 * halves.index(writes)) if halves.count(writes) == 1 else None


# where CPython's dicts have a number that is another after every change; none has it from 3.13 on
_DICT_VERSION = 24


def _version(mapping: dict) -> int:
    """That number, 0 where there is none."""
    return _words(id(mapping) + _DICT_VERSION, 1)[0] if _DICTS_HAVE_VERSIONS else 0


def _dicts_have_versions() -> bool:
    seen: set[int] = set()
    mapping: dict[str, float] = {"a": 1}
    for value in (1.5, 2.5, 3.5):
        mapping["a"] = value
        before, after = (_words(id(mapping) + _DICT_VERSION, 1)[0] for _ in range(2))
        if before != after or before in seen or before == 0:
            return False
        seen.add(before)
    return True


_DICTS_HAVE_VERSIONS = sys.implementation.name == "cpython" and _dicts_have_versions()


def _api() -> np.ndarray | None:
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    offsets = _offsets()
    if offsets is None:
        return None
    functions = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    return np.array([*functions, *map(id, _OBJECTS), *offsets, 0, 0, 0], np.int64)


API = _api()


def _knows_parts(t: Any) -> bool:
    """Whether the compiled loop can find the part of a distributed tensor that is here."""
    assert API is not None
    if API[DISTRIBUTED] == 0:
        words = _words(id(t), type(t).__basicsize__ // 8)
        if words.count(id(t._local_tensor)) != 1 or words.count(id(t._spec)) != 1:
            return False
        API[PART], API[SPEC] = (8 * words.index(id(x)) for x in (t._local_tensor, t._spec))
        API[DISTRIBUTED] = id(type(t))
    return API[DISTRIBUTED] == id(type(t)) and type(t._local_tensor) is Tensor


def _kernels() -> ModuleType:
    """The compiled loops; not imported before there is something to look at: they need Numba."""
    from . import _scan_kernels

    return _scan_kernels


def _has_own_grad(p: Tensor) -> bool:
    """Whether the gradient is where torch keeps it, and not what a subclass makes of it."""
    return type(p).grad is Tensor.grad


def _read(tensors: Sequence[Sequence[Tensor]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The kinds of tensors there are, which of them each is, and where.

    Most models have a few kinds only: these stay in the cache, and what is kept of each tensor is small.
    """
    ids = np.array([[*map(id, roles)] for roles in tensors], np.int64)
    sizes = np.array([[t.element_size() for t in roles] for roles in tensors], np.int64)
    words, addresses = _kernels().read_tensors(API, ids, sizes)
    # by their bytes: np.unique takes ten times as long
    numbers: dict[bytes, int] = {}
    kind_of = [numbers.setdefault(kind.tobytes(), len(numbers)) for kind in words.reshape(-1, WORDS)]
    kinds = np.frombuffer(b"".join(numbers), np.int64).reshape(-1, WORDS)
    return kinds, np.array(kind_of, np.int64).reshape(ids.shape), addresses


def _ids(objects: Iterable[Any]) -> np.ndarray:
    return np.array([*map(id, objects)], np.int64)


class Groups:
    """The groups as they were: which parameters and option values they hold, and all states there are."""

    def __init__(self, groups: list[dict], options: Sequence[str], state: dict, absent: list[Tensor]) -> None:
        self._kernels = _kernels()
        lists = [group["params"] for group in groups]
        params, states = [p for members in lists for p in members], [*state.values()]
        self._kept, self._options = (groups, lists, params, states, absent), options
        columns = _ids(groups), _ids(lists), [*map(len, lists)], [0] * len(groups)
        self._groups = np.stack(columns, 1).astype(np.int64)
        self._version = _version(state)
        self.renew_options(groups)
        self._arrays = _ids(params), _ids(options), _ids(states), _ids(absent)

    @staticmethod
    def can_read(groups: Any, state: Any) -> bool:
        """Whether these are the lists and dicts whose structure the compiled loop knows."""
        return (
            API is not None
            and type(groups) is list
            and isinstance(state, dict)
            and all(isinstance(group, dict) and type(group["params"]) is list for group in groups)
            and all(_has_own_grad(p) for group in groups for p in group["params"])
        )

    def look(self, groups: Any, state: Any) -> int:
        """SAME, MOVED if only options are others, else UNSURE: also if a gradient came where there was none."""
        if type(groups) is not list or not isinstance(state, dict):
            return UNSURE
        facts = self._version, self._groups, self._values
        return self._kernels.scan_groups(API, id(groups), id(state), *facts, *self._arrays)

    def renew_options(self, groups: list[dict]) -> None:
        """Remember other options of the same groups."""
        self._kept_values = [[group.get(name) for name in self._options] for group in groups]
        # 0 where there is none
        ids = [[id(group[name]) if name in group else 0 for name in self._options] for group in groups]
        self._values = np.array(ids, np.int64).reshape(len(groups), len(self._options))
        self._groups[:, GROUP_VERSION] = [*map(_version, groups)]


class Entries:
    """Parameters with their gradients, states and step counts as they were, and where."""

    def __init__(self, entries: Sequence[Entry], names: Sequence[str], absent: list[Tensor]) -> None:
        self._kernels = _kernels()
        params, states = [e.param for e in entries], [e.state for e in entries]
        counts, self._saves_step = [e.step for e in entries], entries[0].rule.saves_step
        specs = [getattr(e.grad, "_spec", None) for e in entries]
        self._kept = params, states, counts, names, absent, specs
        columns = [_ids(params), _ids(states), np.array([*map(_version, states)], np.int64), _ids(counts)]
        columns += [np.array([0 if spec is None else id(spec) for spec in specs], np.int64)]
        columns += [_ids(state[name] for state in states) for name in names]
        self._facts = np.stack(columns, 1)
        self._names, self._absent = _ids(names), _ids(absent)
        self._kinds, self._kind_of, self._places = _read([[*e.here.values(), e.step] for e in entries])
        self.addresses = self._places[:, :-1]

    @staticmethod
    def can_read(entries: Sequence[Entry]) -> bool:
        if API is None or not entries:
            return False
        dicts = all(e.param.dim() <= MOST_DIMS and isinstance(e.state, dict) for e in entries)
        dicts = dicts and all(_has_own_grad(e.param) for e in entries)
        distributed = [e for e in entries if is_distributed(e.param)]
        whole = [
            t for e in distributed for t in (e.param, e.grad, *(e.state[n] for n in e.rule.states.values()))
        ]
        dicts = dicts and all(map(_knows_parts, whole))
        # a gradient that is not its parameter's is looked at by whoever hands it over
        return dicts and all(e.given is None for e in entries)

    def look(self) -> int:
        """SAME, MOVED if only gradients lie elsewhere (`addresses` then says where), else UNSURE.

        A gradient where there was none is a reason to be unsure too.
        """
        facts = self._facts, self._kinds, self._kind_of, self._names, self._saves_step, self._absent
        return self._kernels.scan_entries(API, *facts, self._places)

    def count_writes(self, grads: bool) -> None:
        """Tell autograd that the parameters were written, and their gradients as well."""
        self._kernels.count_writes(API, self._facts, grads)


class Lists:
    """Lists of tensors as they were, the n-th of each belonging together, and where."""

    def __init__(self, lists: Sequence[list[Tensor]]) -> None:
        self._kernels = _kernels()
        self._kinds, self._kind_of, self.addresses = _read([*zip(*lists, strict=True)])

    @staticmethod
    def can_read(lists: Sequence[list[Tensor]]) -> bool:
        some = API is not None and len(lists[0]) > 0
        every = [t for tensors in lists for t in tensors]
        return some and all(t.dim() <= MOST_DIMS and not is_distributed(t) for t in every)

    def look(self, lists: Sequence[list[Tensor]]) -> int:
        """SAME, MOVED if tensors only lie elsewhere (`addresses` then says where), else UNSURE."""
        return self._kernels.scan_lists(API, _ids(lists), self._kinds, self._kind_of, self.addresses)
