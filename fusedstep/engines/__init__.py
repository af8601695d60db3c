"""Which engine steps a parameter. An engine is a module with

unavailable(device)    why it cannot run on this type of device; None if it can
BY_ADDRESS             whether it works on addresses (dense, plain tensors) or on tensors
CHUNK                  if so, how many elements one unit of its work covers
compile(table)         make ready to launch; may raise, nothing has been written yet
prepare(table, amp, first)
                       the scalars of every live row, from what was summed so far; the first one decides whether
                       the step is taken, and counts it
sweep(table, k, skips) pass `k` over every live row, in place, its sums into the table; 0 measures gradients.
                       Only if the step is taken; without `skips` it is
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import _C, Tensor, _ops, cuda, empty, float32, float64

NAMES = ("torch", "cpu", "triton")

# columns of a table's rows; the addresses of parameter, gradient and states follow
LIVE, GROUP, SEGMENT, NUMEL, FULL, POINTERS = range(6)
# columns of the hyper-parameters; what the rule's scalars are prepared from follows
SIGN, LIMIT, LIMIT_EPS, AVERAGE, OPTIONS = range(5)
# columns of the scalars: what a gradient is multiplied with, what it was scaled by, what an average keeps and
# takes, then the rule's
GRADIENT, SCALED, KEEP, RATE, OWN = range(5)
# of a table: whether its last step was skipped, the scale of its gradients, how many steps were skipped; and
# the first again, for a GradScaler
SKIP, SCALE, SKIPPED, FOUND = range(4)
# how the terms of a tensor are summed
FOLDS: dict[str, Callable[[Tensor], Tensor]] = {"+": torch.sum, "^": torch.amax}

_DEFAULT = {"cpu": "cpu", "cuda": "triton", "xpu": "triton"}

_DTYPES = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex32,
    torch.complex64,
    torch.complex128,
}


def choose(roles: Sequence[Tensor], requested: str | None) -> ModuleType:
    """The engine for a parameter, its gradient and states: the one asked for, or the best for its device."""
    p = roles[0]
    default = "torch" if is_watched() else _DEFAULT.get(p.device.type, "torch")
    engine, problem = _load(requested or default, p.device.type)
    odd = next((t for t in roles if not is_plain(t)), None)
    if problem is None and engine.BY_ADDRESS and is_watched() and (is_traced() or not is_plain(empty(0))):
        problem = "a dispatch mode traces operations, or makes other tensors (make_fx, LocalTensorMode, ...)"
    if problem is None and engine.BY_ADDRESS and odd is not None:
        if requested is None:
            return _load("torch", p.device.type)[0]
        problem = f"it takes plain float tensors, not a {type(odd).__name__} of {odd.dtype}"
    if problem is None:
        return engine
    if requested is not None:
        raise RuntimeError(
            f"engine={requested!r} cannot step a parameter on {p.device}: {problem}. "
            f"Leave engine=None to let fusedstep choose, or use engine='torch', which takes everything"
        )
    _warn_once(f"fusedstep falls back to plain tensor operations on {p.device.type}, slower: {problem}")
    return _load("torch", p.device.type)[0]


@functools.cache
def _load(name: str, device_type: str) -> tuple[Any, str | None]:
    """An engine, imported on first use, and why it cannot serve this type of device."""
    try:
        engine = importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        return None, f"it needs a package that cannot be imported ({error})"
    return engine, engine.unavailable(device_type)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def is_plain(t: Tensor) -> bool:
    """A tensor whose memory is what it seems: no wrapper (DTensor, FakeTensor, quantized), a dtype we load."""
    return t.dtype in _DTYPES and type(t).__torch_dispatch__ is Tensor.__torch_dispatch__


# not `torch.float64` and `torch.cuda`: once imported, our engine has the name `torch` in this package


def compute_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """What an update with roles of these dtypes is computed in."""
    return float64 if float64 in dtypes else float32


def is_capturing() -> bool:
    """Whether what is launched now becomes part of a CUDA graph."""
    return cuda.is_initialized() and cuda.is_current_stream_capturing()


def is_watched() -> bool:
    """Whether torch shows every operation to somebody: what is done by address would go unseen."""
    return (
        _C._len_torch_dispatch_stack() > 0
        or _C._functorch.maybe_current_level() is not None
        or _ops._len_torch_dispatch_stack_pre_dispatch() > 0
    )


_TRACERS = [getattr(_C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")]


def is_traced() -> bool:
    """Whether somebody also does something else with them: records them, or has tensors without numbers."""
    return is_watched() and (
        any(_C._get_dispatch_mode(key) is not None for key in _TRACERS)
        or _C._functorch.maybe_current_level() is not None
        or _ops._len_torch_dispatch_stack_pre_dispatch() > 0
    )


def chunks(numels: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tensors cut into chunks of `size` elements: of every chunk its tensor, and its number within that.

    >>> [x.tolist() for x in chunks(np.array([5, 0, 2]), 2)]
    [[0, 0, 0, 2], [0, 1, 2, 0]]
    """
    starts = chunk_starts(numels, size)
    counts = np.diff(starts)
    return np.repeat(np.arange(len(counts)), counts), np.arange(starts[-1]) - np.repeat(starts[:-1], counts)


def chunk_starts(numels: np.ndarray, size: int) -> np.ndarray:
    """Of every tensor the number of its first chunk, and how many there are.

    >>> chunk_starts(np.array([5, 0, 2]), 2).tolist()
    [0, 3, 3, 4]
    """
    return np.concatenate(([0], np.cumsum(-(-numels // size)))).astype(np.int64)
