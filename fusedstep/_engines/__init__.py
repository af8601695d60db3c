"""The three engines, which run the same programs, and the choice of one for a parameter.

An engine is a module with

NAME                       as `engine=` takes it
unavailable(device_type)   why it cannot run on this type of device; None if it can
BY_ADDRESS                 whether it works on addresses (dense, plain tensors) or on tensors
chunk(program)             if by address, how many elements one unit of its work covers
bind(table)                an `Executable`, with everything compiled: may raise, nothing has been written yet
"""

from __future__ import annotations

import functools
import importlib
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

# as users name them, and their modules; a module `torch` would hide torch itself in this package
_MODULES = {"torch": "foreach", "cpu": "cpu", "triton": "triton"}
NAMES = (*_MODULES,)

# columns of a table's rows: NUMEL counts the elements of the local part, WHOLE_NUMEL those of the whole tensor;
# ROWS and COLUMNS are the size of its matrices. Random bits are drawn from a seed, the parameter's position in
# its optimizer, and an element's index in the whole tensor: FIRST_INDEX is that of the first. The addresses of
# all planes follow
LIVE, GROUP, CLIP_ID, NUMEL, UNMASKED_NUMEL, WHOLE_NUMEL, ROWS, COLUMNS = range(8)
SEED, POSITION, FIRST_INDEX, FIRST_POINTER = range(8, 12)
# columns that scalars may be computed from, by their names in rules
SIZES = {"numel": WHOLE_NUMEL, "rows": ROWS, "columns": COLUMNS}
# status of a table: whether its last step was skipped, the scale of its gradients, how many steps were skipped;
# and the first again, for a GradScaler
SKIP, SCALE, SKIPPED, FOUND = range(4)
# what a look at tensors writes instead of an address: no tensor, or one of another kind; and what it returns:
# the worst that it found, and whether some are absent
ABSENT, OTHER = -2, -1
SAME, MOVED, CHANGED, SOME_ABSENT = 0, 1, 2, 4

# for npu, triton-ascend installs itself as triton
_DEFAULT = {"cpu": "cpu", "cuda": "triton", "npu": "triton", "xpu": "triton"}
# types of devices that our tests run on; AMD's GPUs are not tested, but have type cuda, too
_TESTED = {"cpu", "cuda"} if torch.version.hip is None else {"cpu"}
# why an engine must not be used on a type of device; None if it may. The layer above, which can take a step,
# sets this
trial: Callable[[str, str], str | None] = lambda name, device_type: "it cannot be tried out"
_verdicts: dict[tuple[str, str], str | None] = {}
_trying = threading.RLock()

# types whose tensors are nothing more than tensors
PLAIN_TYPES = {Tensor, torch.nn.Parameter}
_DTYPES = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex32,
    torch.complex64,
    torch.complex128,
}


class Amp(NamedTuple):
    """What a GradScaler hands over: divide gradients by `scale`, skip the step where `found_inf` is not 0."""

    scale: Tensor | None = None
    found_inf: Tensor | None = None

    @staticmethod
    def of(scale: Any, found_inf: Any) -> Amp:
        """From tensors or numbers: torch passes 0 if there were no gradients to look at."""
        return Amp(_tensor(scale), _tensor(found_inf))

    def to(self, device: torch.device) -> Amp:
        if self.scale is None and self.found_inf is None:
            return self
        return Amp(*(t if t is None else to_device(t, device) for t in self))


def _tensor(number: Any) -> Tensor | None:
    if number is None or isinstance(number, Tensor):
        return number
    return torch.tensor(float(number), device="cpu")


def to_device(t: Tensor, device: torch.device) -> Tensor:
    # what comes to the host must have arrived before it is read there
    return t.to(device, non_blocking=device.type != "cpu")


def sent(t: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without waiting for what the device has to do."""
    # in pinned memory of its own, which is used again only when the copy is done
    return to_device(t.pin_memory() if device.type == "cuda" else t, device)


class Executable(Protocol):
    """A table's programs, compiled and bound to its memory."""

    def prepare(self, k: int, amp: Amp) -> None:
        """Compute the scalars that sweep `k` takes; the first time in a step, decide whether it is skipped."""

    def sweep(self, k: int, skips: bool) -> None:
        """Pass over every live row, in place, and leave sums in the table; `skips`: unless the step is."""


class Engine(Protocol):
    """What a module of this package offers."""

    NAME: str
    BY_ADDRESS: bool

    def chunk(self, program: Any) -> int: ...

    def unavailable(self, device_type: str) -> str | None: ...

    def bind(self, table: Any) -> Executable: ...


def choose(roles: Sequence[Tensor], requested: str | None, device: torch.device) -> Engine:
    """The engine for a parameter, its gradient and states: the one asked for, or the best for a device."""
    default = "torch" if is_watched() else _DEFAULT.get(device.type, "torch")
    engine, problem = load(requested or default, device.type)
    odd = next((t for t in roles if not is_plain(t)), None)
    if problem is None and engine.BY_ADDRESS and is_watched() and (is_traced() or not is_plain(torch.empty(0))):
        problem = "a dispatch mode traces operations, or makes other tensors (make_fx, LocalTensorMode, ...)"
    if problem is None and engine.BY_ADDRESS and odd is not None:
        if requested is None:
            return load("torch", device.type)[0]
        problem = f"it takes plain float tensors, not a {type(odd).__name__} of {odd.dtype}"
    if problem is None and engine.BY_ADDRESS and device.type not in _TESTED:
        problem = _verdict(engine.NAME, device.type)
    if problem is None:
        return engine
    if requested is not None:
        raise RuntimeError(
            f"engine={requested!r} cannot step a parameter on {device}: {problem}. "
            f"Leave engine=None to let fusedstep choose, or use engine='torch', which takes everything"
        )
    _warn_once(f"fusedstep falls back to plain tensor operations on {device.type}, slower: {problem}")
    return load("torch", device.type)[0]


@functools.cache
def load(name: str, device_type: str) -> tuple[Any, str | None]:
    """An engine, imported on first use, and why it cannot serve this type of device."""
    try:
        engine = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ImportError as error:
        return None, f"it needs a package that cannot be imported ({error})"
    return engine, engine.unavailable(device_type)


def _verdict(name: str, device_type: str) -> str | None:
    """The result of the one trial of an engine on this type of device; other threads wait for it."""
    key = name, device_type
    with _trying:
        if key not in _verdicts:
            # the trial's own steps choose the engine too
            _verdicts[key] = None
            try:
                _verdicts[key] = trial(name, device_type)
            except BaseException:  # interrupted
                del _verdicts[key]
                raise
        return _verdicts[key]


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def is_wrapper(t: Tensor) -> bool:
    """Whether a tensor has no memory of its own, such as a DTensor or a FakeTensor."""
    return type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_plain(t: Tensor) -> bool:
    """Whether a tensor has memory of its own, and a dtype that engines load."""
    return t.dtype in _DTYPES and not is_wrapper(t)


def is_capturing() -> bool:
    """Whether what is launched now becomes part of a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_watched() -> bool:
    """Whether a mode of torch sees every operation: it would not see work by address."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or _records_before_dispatch()
    )


def _records_before_dispatch() -> bool:
    """Whether a mode sees operations before autograd does, as for torch.export, which includes this key."""
    return torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)


_TRACERS = [getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")]


def is_traced() -> bool:
    """Whether such a mode also records operations, or has tensors without numbers."""
    return is_watched() and (
        any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)
        or torch._C._functorch.maybe_current_level() is not None
        or _records_before_dispatch()
    )


def clip_totals(kind: str, measured: np.ndarray, clip_ids: np.ndarray) -> np.ndarray:
    """What was measured, over all rows that are clipped together, by clip id.

    >>> clip_totals("sum", np.array([1.0, 2.0, 4.0]), np.array([1, 0, 1])).tolist()
    [2.0, 5.0]
    >>> clip_totals("max", np.array([1.0, 2.0, 4.0]), np.array([1, 0, 1])).tolist()
    [2.0, 4.0]
    """
    count = int(clip_ids.max(initial=0)) + 1
    if kind == "sum":
        return np.bincount(clip_ids, measured, count)
    totals = np.zeros(count)
    np.maximum.at(totals, clip_ids, measured)
    return totals


def chunks(numels: np.ndarray, size: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut tensors into chunks of `size` elements: the tensor of every chunk, and its number within that. Each
    tensor may have its own size.

    >>> [x.tolist() for x in chunks(np.array([5, 0, 2]), 2)]
    [[0, 0, 0, 2], [0, 1, 2, 0]]
    """
    starts = chunk_starts(numels, size)
    counts = np.diff(starts)
    return np.repeat(np.arange(len(counts)), counts), np.arange(starts[-1]) - np.repeat(starts[:-1], counts)


def chunk_starts(numels: np.ndarray, size: int | np.ndarray) -> np.ndarray:
    """The number of the first chunk of every tensor, and of all chunks.

    >>> chunk_starts(np.array([5, 0, 2]), 2).tolist()
    [0, 3, 3, 4]
    """
    return np.concatenate(([0], np.cumsum(-(-numels // size)))).astype(np.int64)
