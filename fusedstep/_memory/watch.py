"""Has anything changed since the last step? All tensors are checked at once.

Every step must check every tensor again: parameters, gradients and states may be re-allocated, replaced or
changed in place at will. Does a tensor have the same kind as before (type, dtype, device, sizes, strides), and
where is it now? Compiled code finds out through DLPack, in about 0.04 us per tensor. If that is not available,
or DLPack cannot describe a tensor, Python does it, in 2 us.
"""

from __future__ import annotations

from array import array
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._engines import CHANGED, MOVED, OTHER, PLAIN_TYPES, SAME, SOME_ABSENT, is_traced, is_watched, is_wrapper

_is_neg, _type, _described_at = Tensor.is_neg, attrgetter("type"), attrgetter("described_at")


class Kind:
    """What a tensor is: a tensor of the same kind can take its place."""

    __slots__ = ("_attributes", "_described", "described_at", "has_memory", "type")

    def __init__(self, t: Tensor) -> None:
        self.type: type | None = type(t)
        self._attributes, self.has_memory = _attributes(t), _is_of_memory(t) and _address(t) != OTHER
        table = _table()
        # DLPack does not show whether numbers are lazily negated or conjugated
        can_be = table is not None and self.has_memory and not t.is_complex() and not t.is_neg()
        self._described = table.kind(t) if table is not None and can_be else None
        # the address where compiled code finds the description; None if Python must compare
        self.described_at: int | None = None if self._described is None else self._described.ctypes.data

    @property
    def is_plain(self) -> bool:
        """Whether such a tensor surely holds real numbers as they are in its memory, and nothing else."""
        return self.described_at is not None and self.type in PLAIN_TYPES

    def place(self, t: Any) -> int:
        """The address of a tensor, 0 if its kind has none; OTHER if it has another kind."""
        if not isinstance(t, Tensor) or _attributes(t) != self._attributes:
            return OTHER
        return _address(t) if self.has_memory else 0

    def __call__(self, t: Any) -> bool:
        """Whether a tensor has this kind."""
        return self.place(t) != OTHER


def _attributes(t: Tensor) -> tuple:
    if t.layout != torch.strided:
        return type(t), t.layout, t.dtype, t.device, t.shape
    return type(t), t.dtype, t.device, t.shape, t.stride(), t.is_conj(), t.is_neg()


def _address(t: Tensor) -> int:
    """The address of its memory; OTHER if it has none: it was freed, `t` is a lazy tensor of zeros, torch.func
    has wrapped it, or its device has no addresses.
    """
    try:
        found = t.data_ptr()
    except RuntimeError:
        return OTHER
    return found if found or not t.numel() else OTHER


def _is_of_memory(t: Tensor) -> bool:
    """Whether tensors with its attributes have memory of their own: not wrappers, and not in a trace."""
    return t.layout == torch.strided and not t.is_meta and not is_wrapper(t) and not is_traced()


def has_numbers(t: Tensor) -> bool:
    """False for a tensor that lacks memory although others with its attributes have some."""
    if is_wrapper(t) or _address(t) != OTHER:
        return True
    return not _is_of_memory(t) or t.device.type not in ("cpu", "cuda")


def _table() -> Any:
    # imported here, because it compiles code, and `import fusedstep` should not
    from .._engines.cpu import dlpack

    return dlpack.table()


# most tensors of a model have one of a few kinds
_kinds: dict[tuple, Kind] = {}
_MOST_KINDS = 4096


def kind_of(t: Tensor) -> Kind:
    key = _attributes(t)
    # a tensor that is traced, transformed or without memory may have the same attributes as others
    if is_watched() or not has_numbers(t):
        return Kind(t)
    if key not in _kinds:
        if len(_kinds) >= _MOST_KINDS:
            _kinds.clear()
        _kinds[key] = Kind(t)
    return _kinds[key]


def kinds_of(tensors: list[Tensor]) -> list[Kind]:
    """The kinds of tensors, most of which have the same kind."""
    if not tensors:
        return []
    first = kind_of(tensors[0])
    look = Look([first] * len(tensors))
    look(tensors)
    return [kind_of(t) if at == OTHER else first for t, at in zip(tensors, look.addresses, strict=True)]


class _Nothing(Kind):
    """A kind that no tensor has: expected where there must be none."""

    __slots__ = ()

    def __init__(self) -> None:
        self.type, self.described_at, self.has_memory = None, 0, False

    def place(self, t: Any) -> int:
        return OTHER


NOTHING = _Nothing()


class Look:
    """Checks that tensors have these kinds, in this order, and keeps their addresses."""

    def __init__(self, kinds: list[Kind], absent: int = OTHER, changes_sign: bool = False) -> None:
        """`absent` is noted as the address of None. If it `changes_sign`, a tensor may become lazily negated
        without moving, as autograd negates some gradients.
        """
        self._kinds, self._absent, self._changes_sign = kinds, absent, changes_sign
        # set just before a look, if it is known already which tensors are negated
        self.sign_is_known = False
        # OTHER for a tensor of another kind, ABSENT for a gradient that is missing
        self.addresses = np.full(len(kinds), OTHER, np.int64)
        table, self._compiled = _table(), None
        described_at: list[Any] = [*map(_described_at, kinds)]
        if table is not None and None not in described_at:
            # from an array, which holds only numbers, numpy makes its own three times as fast as from a list
            self._described_at = np.frombuffer(array("q", described_at), np.int64)
            self._types = [*map(_type, kinds)]
            self._compile(table)

    def _compile(self, table: Any) -> None:
        self._compiled = table.looker(self._types, self._described_at, self.addresses, self._absent)

    def expect(self, kinds: dict[int, Kind]) -> bool:
        """Expect tensors of these kinds in these places from now on; False if that needs another `Look`."""
        described_at: list[Any] = [*map(_described_at, kinds.values())]
        if self._compiled is None or None in described_at:
            return False
        for (i, kind), at in zip(kinds.items(), described_at, strict=True):
            self._kinds[i], self._types[i] = kind, kind.type
            self._described_at[i], self.addresses[i] = at, OTHER
        return True

    def insert(self, kinds: dict[int, Kind]) -> bool:
        """Expect additional tensors of these kinds, whose places count the added tensors, too; False if that
        needs another `Look`.
        """
        described_at: list[Any] = [*map(_described_at, kinds.values())]
        if self._compiled is None or None in described_at:
            return False
        for i, kind in kinds.items():
            self._kinds.insert(i, kind)
            self._types.insert(i, kind.type)
        before = [i - others for others, i in enumerate(kinds)]
        self._described_at = np.insert(self._described_at, before, described_at)
        self.addresses = np.insert(self.addresses, before, OTHER)
        self._compile(_table())
        return True

    def __call__(self, tensors: list[Any]) -> int:
        """CHANGED if a tensor has another kind; MOVED if an address has changed or a gradient has come or gone;
        else SAME.
        """
        if self._compiled is None:
            return self._in_python(tensors)
        told = self._compiled(tensors)
        found = told & ~SOME_ABSENT
        was_asked, self.sign_is_known = self.sign_is_known, False
        if self._changes_sign or (found != SAME and not was_asked):
            # the bit for lazy negation, which DLPack does not show
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
