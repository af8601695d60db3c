"""Has anything changed since the last step? Asked by calls that Python offers, for all tensors at once.

Every step must look at every tensor again: parameters, gradients and states may be re-allocated, replaced or
changed in place at will. It asks for the kind of each (dtype, device, sizes, strides, dispatch keys) and, where
an engine works by address, for its address. Nothing is compared by identity, so nothing is kept alive.
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
    return lambda *found: [*map(attributes, found)] == expected


def make_check(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """check(*tensors): whether others are of the same kinds as these, in turn."""
    return (_python_check if TensorGuards is None else _compiled_check)(tensors)


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
    if check is None:
        if len(_checks) >= _MOST_CHECKS:
            _checks.clear()
        check = _checks[kind] = make_check([t])
    return check
