"""Has anything changed since the last step? Asked for all tensors at once.

Every step must look at every tensor again: parameters, gradients and states may be re-allocated, replaced or
changed in place at will. The questions are: is it of the kind it was (type, dtype, device, sizes, strides), and
where is it now? Compiled code asks them through DLPack, about 0.04 us a tensor; where that is not to be had, or
a tensor is not as DLPack describes it, Python does, in 2 us.
"""

from __future__ import annotations

from array import array
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._engines import CHANGED, MOVED, OTHER, SAME, SOME_ABSENT, is_traced, is_watched, is_wrapper

_is_neg, _type, _described_at = Tensor.is_neg, attrgetter("type"), attrgetter("described_at")


class Kind:
    """What a tensor is: one of the same kind can take its place."""

    __slots__ = ("_attributes", "_described", "described_at", "has_memory", "type")

    def __init__(self, t: Tensor) -> None:
        self.type: type | None = type(t)
        self._attributes, self.has_memory = _attributes(t), _is_of_memory(t) and _address(t) != OTHER
        table = _table()
        # DLPack does not tell whether numbers are negated or conjugated lazily
        can_be = table is not None and self.has_memory and not t.is_complex() and not t.is_neg()
        self._described = table.kind(t) if table is not None and can_be else None
        # where compiled code finds it; None if Python must compare
        self.described_at: int | None = None if self._described is None else self._described.ctypes.data

    def place(self, t: Any) -> int:
        """The address of a tensor, 0 if its kind has none; OTHER if it is of another kind."""
        if not isinstance(t, Tensor) or _attributes(t) != self._attributes:
            return OTHER
        return _address(t) if self.has_memory else 0

    def __call__(self, t: Any) -> bool:
        """Whether a tensor is of this kind."""
        return self.place(t) != OTHER


def _attributes(t: Tensor) -> tuple:
    if t.layout != torch.strided:
        return type(t), t.layout, t.dtype, t.device, t.shape
    return type(t), t.dtype, t.device, t.shape, t.stride(), t.is_conj(), t.is_neg()


def _address(t: Tensor) -> int:
    """Where its memory is; OTHER if it has none: it was freed, or `t` is a lazy tensor of zeros, was wrapped by
    torch.func, or is of a device without addresses.
    """
    try:
        found = t.data_ptr()
    except RuntimeError:
        return OTHER
    return found if found or not t.numel() else OTHER


def _is_of_memory(t: Tensor) -> bool:
    """Whether tensors with its attributes have memory of their own: not those of subclasses, or in a trace."""
    return t.layout == torch.strided and not t.is_meta and not is_wrapper(t) and not is_traced()


def has_numbers(t: Tensor) -> bool:
    """False for a tensor that lacks the memory which others with its attributes have."""
    if is_wrapper(t) or _address(t) != OTHER:
        return True
    return not _is_of_memory(t) or t.device.type not in ("cpu", "cuda")


def _table() -> Any:
    # imported here, for it compiles, which `import fusedstep` need not
    from .._engines.cpu import dlpack

    return dlpack.table()


# most tensors of a model are of a few kinds
_kinds: dict[tuple, Kind] = {}
_MOST_KINDS = 4096


def kind_of(t: Tensor) -> Kind:
    key = _attributes(t)
    # one that is traced, transformed or without memory may seem to be what others are
    if is_watched() or not has_numbers(t):
        return Kind(t)
    if key not in _kinds:
        if len(_kinds) >= _MOST_KINDS:
            _kinds.clear()
        _kinds[key] = Kind(t)
    return _kinds[key]


def kinds_of(tensors: list[Tensor]) -> list[Kind]:
    """The same for tensors of which most are of one kind."""
    if not tensors:
        return []
    first = kind_of(tensors[0])
    look = Look([first] * len(tensors))
    look(tensors)
    return [kind_of(t) if at == OTHER else first for t, at in zip(tensors, look.addresses, strict=True)]


class _Nothing(Kind):
    """No tensor is of this kind: where none is expected."""

    __slots__ = ()

    def __init__(self) -> None:
        self.type, self.described_at, self.has_memory = None, 0, False

    def place(self, t: Any) -> int:
        return OTHER


NOTHING = _Nothing()


class Look:
    """Looks at tensors of these kinds, in turn, and keeps their addresses."""

    def __init__(self, kinds: list[Kind], absent: int = OTHER, changes_sign: bool = False) -> None:
        """`absent` is noted for None. If a tensor `changes_sign`, it may be negated lazily where it lies, as
        autograd negates some gradients.
        """
        self._kinds, self._absent, self._changes_sign = kinds, absent, changes_sign
        # whether somebody has asked, just before the next look, which of them are negated
        self.sign_is_known = False
        # OTHER for one that is not of its kind, ABSENT for a gradient that is not there
        self.addresses = np.full(len(kinds), OTHER, np.int64)
        table, self._compiled = _table(), None
        described_at: list[Any] = [*map(_described_at, kinds)]
        if table is not None and None not in described_at:
            # an array of numbers only, by which numpy makes its own three times as fast
            self._described_at = np.frombuffer(array("q", described_at), np.int64)
            self._types = [*map(_type, kinds)]
            self._compiled = table.looker(self._types, self._described_at, self.addresses, self._absent)

    def expect(self, kinds: dict[int, Kind]) -> bool:
        """Have tensors of these kinds in these places from now on; False if that takes another look."""
        described_at: list[Any] = [*map(_described_at, kinds.values())]
        if self._compiled is None or None in described_at:
            return False
        for (i, kind), at in zip(kinds.items(), described_at, strict=True):
            self._kinds[i], self._types[i] = kind, kind.type
            self._described_at[i], self.addresses[i] = at, OTHER
        return True

    def __call__(self, tensors: list[Any]) -> int:
        """SAME, MOVED if an address has changed or a gradient has gone or come, CHANGED if one is of another
        kind.
        """
        if self._compiled is None:
            return self._in_python(tensors)
        told = self._compiled(tensors)
        found = told & ~SOME_ABSENT
        was_asked, self.sign_is_known = self.sign_is_known, False
        if self._changes_sign or (found != SAME and not was_asked):
            # lazily negated by a bit that DLPack does not show
            found = CHANGED if self._finds_negated(tensors, all_there=told in (SAME, MOVED)) else found
        return found

    def _finds_negated(self, tensors: list[Any], all_there: bool) -> bool:
        there = tensors if all_there else [tensors[i] for i in np.flatnonzero(self.addresses >= 0).tolist()]
        if not any(map(_is_neg, there)):
            return False
        is_negated = [at >= 0 and t.is_neg() for at, t in zip(self.addresses.tolist(), tensors, strict=True)]
        self.addresses[is_negated] = OTHER
        return True

    def _in_python(self, tensors: list[Any]) -> int:
        before = self.addresses.copy()
        for i, (kind, t) in enumerate(zip(self._kinds, tensors, strict=True)):
            self.addresses[i] = self._absent if t is None else kind.place(t)
        if (self.addresses == OTHER).any():
            return CHANGED
        return MOVED if (self.addresses != before).any() else SAME
