"""Has anything changed since the last step? Asked by calls that Python offers, for all tensors at once.

Every step must look at every tensor again: parameters, gradients and states may be re-allocated, replaced or
changed in place at will. The questions are: is it of the kind it was (dtype, device, sizes, strides, dispatch
keys), and, where an engine works by address, where is it now?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

try:
    # private, but an interface of torch's compiler: it compares dtype, device, sizes, strides, dispatch keys
    # and type of many tensors in one call, 0.04 us each. Reading these attributes in Python takes 1 us each
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards: Any = None  # type: ignore[no-redef]

address = Tensor.data_ptr


def attributes(t: Tensor) -> tuple:
    """What makes the kind of a tensor: where it is equal, another can take its place in a row."""
    if t.layout != torch.strided:
        return type(t), t.layout, t.dtype, t.device, t.shape
    return type(t), t.dtype, t.device, t.shape, t.stride(), t.requires_grad, t.is_conj(), t.is_neg()


def _compiled_check(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    if any(t.layout != torch.strided for t in tensors):
        return _python_check(tensors)
    sizes: Any = [[*t.shape] for t in tensors]
    strides: Any = [[*t.stride()] for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _python_check(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    expected = [*map(attributes, tensors)]
    return lambda *found: all(isinstance(t, Tensor) for t in found) and [*map(attributes, found)] == expected


def make_check(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """check(*tensors): whether others are of the same kinds as these, in turn."""
    return (_python_check if TensorGuards is None else _compiled_check)(tensors)


class Kinds:
    """Whether tensors are of the kinds that `checks` look for, in turn."""

    def __init__(self, checks: Sequence[Callable[[Tensor], bool]]) -> None:
        self._checks = checks
        # one that takes all tensors at once: it costs as much to make as ten rounds of asking one by one
        self._check_all: Callable[..., bool] | None = None
        self._rounds = 0

    def in_one_call(self, tensors: list[Any]) -> bool:
        """Whether there is such a check, and they pass it."""
        return self._check_all is not None and self._check_all(*tensors)

    def __call__(self, tensors: list[Any]) -> bool:
        if self.in_one_call(tensors):
            return True
        # a list: twice as fast as a generator, and seldom cut short
        if not all([check(t) for check, t in zip(self._checks, tensors, strict=True)]):  # noqa: C419
            return False
        self._rounds += 1
        if self._rounds == _ROUNDS and tensors:
            self._check_all = make_check(tensors)
        return True


# after which tensors are expected to stay of these kinds
_ROUNDS = 3


def has_memory(t: Any) -> bool:
    """Whether a tensor has memory of its own: not one on meta, or of a subclass."""
    return type(t) is Tensor and not t.is_meta


# most tensors of a model are of a few kinds
_checks: dict[tuple, Callable[[Tensor], bool]] = {}
_MOST_CHECKS = 4096


def check_of(t: Tensor) -> Callable[[Tensor], bool]:
    """check(tensor): whether another is of the same kind as `t`."""
    kind = attributes(t)
    try:
        check = _checks.get(kind)
    except TypeError:  # sizes that are symbols cannot be looked up
        return _python_check([t])
    # guards also compare which modes are on, and what else torch keeps by thread
    if check is None or not check(t):
        if len(_checks) >= _MOST_CHECKS:
            _checks.clear()
        check = _checks[kind] = make_check([t])
    return check


def checks_of(tensors: list[Tensor]) -> list[Callable[[Tensor], bool]]:
    """The same for tensors of which most are of one kind."""
    first = check_of(tensors[0]) if tensors else None
    return [first if first is not None and first(t) else check_of(t) for t in tensors]
