"""Stand-ins for the modules `torch_npu` and `mindspeed`, and "npu" as a name for this machine's device.

    the modules  sys.modules gets the names that scripts import; `torch.npu` forwards to torch.cuda or torch.cpu
    the device   "npu" and "npu:1" become "cuda" and "cuda:1", or "cpu", in every call that torch lets a
                 function mode see: torch.device, factory functions, .to. Other calls are wrapped
    methods      tensor.npu(), module.npu(), tensor.is_npu

A tensor reports its real device: `x.device.type` is "cuda" or "cpu". A mode covers one thread: in others, use
devices that were made in the main one. Nothing is ever undone, so use this in a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import npu as ours

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def is_needed() -> bool:
    """Whether there is no real torch_npu."""
    return importlib.util.find_spec("torch_npu") is None


def install() -> None:
    """From here on, this process has a torch_npu."""
    npu = _torch_npu_module()
    npu.amp = _module("torch.npu.amp", GradScaler=GradScaler, autocast=autocast)
    operators = {name: getattr(ours, name) for name in ours.__all__ if name.startswith("npu_apply")}
    optim = {name: getattr(ours, name) for name in ours.__all__ if name.startswith("NpuFused")}
    _register("torch.npu", npu)
    _register("torch.npu.amp", npu.amp)
    _register("torch_npu", _module("torch_npu", __path__=[], **operators))
    _register("torch_npu.npu", npu)
    _register("torch_npu.npu.amp", npu.amp)
    _register("torch_npu.optim", _module("torch_npu.optim", **optim))
    _register("torch_npu.contrib", _module("torch_npu.contrib", __path__=[]))
    _register("torch_npu.contrib.transfer_to_npu", _module("torch_npu.contrib.transfer_to_npu"))
    _register("mindspeed", _module("mindspeed", __path__=[]))
    _register("mindspeed.ops", _module("mindspeed.ops", __path__=[]))
    for name, operator in operators.items():
        _register(f"mindspeed.ops.{name}", _module(f"mindspeed.ops.{name}", **{name: operator}))

    torch.Tensor.npu = torch.nn.Module.npu = _npu  # type: ignore[attr-defined]
    torch.Tensor.is_npu = property(lambda t: t.device.type == DEVICE)  # type: ignore[attr-defined]
    for kind in (torch.amp.autocast, torch.amp.GradScaler):
        kind.__init__ = _translated(kind.__init__)  # type: ignore[method-assign]
    # for torch.load, of a file from an NPU or with map_location="npu"
    torch.serialization.register_package(5, lambda storage: None, _restored)
    _Translation().__enter__()


# the device


def here(device: Any) -> Any:
    """The device that the name of an NPU stands for; anything else as it is.

    >>> here("npu").partition(":")[0] == here("npu:0").partition(":")[0] == DEVICE, here("cpu"), here(3)
    (True, 'cpu', 3)
    """
    if not isinstance(device, str) or not (device == "npu" or device.startswith("npu:")):
        return device
    return DEVICE if DEVICE == "cpu" else DEVICE + device[3:]


class _Translation(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, given = [here(arg) for arg in args], args
        kwargs = {name: here(arg) for name, arg in (kwargs or {}).items()}
        if func is torch.device and DEVICE == "cpu" and given and given[0] is not args[0]:
            # torch.device("npu", 0); the CPU has no index
            args, kwargs = args[:1], {}
        return func(*args, **kwargs)


def _translated(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(here, args), **{name: here(arg) for name, arg in kwargs.items()})

    return call


def _restored(storage: Any, location: str) -> Any:
    device = here(location)
    return None if device == location else torch.serialization.default_restore_location(storage, device)


def _npu(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    """Move to the NPU, as `cuda()` moves to a GPU."""
    device = "npu" if device is None else f"npu:{device}" if isinstance(device, int) else device
    return self.to(here(device), non_blocking=non_blocking)


# the modules


def _module(name: str, **contents: Any) -> Any:
    module = ModuleType(name, f"Stands in for {name}, from fusedstep.npu.")
    vars(module).update(contents)
    return module


def _register(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _torch_npu_module() -> Any:
    """torch.npu: the functions of torch.cuda, or on the CPU those that make sense there."""
    backend = torch.get_device_module(DEVICE)

    def forward(name: str) -> Any:
        try:
            # names such as __file__ are not forwarded
            return getattr(backend, "" if name.startswith("__") else name)
        except AttributeError:
            message = (
                f"torch.npu.{name}: fusedstep's stand-in forwards to {backend.__name__}, which has no such name"
            )
            raise AttributeError(message) from None

    module = _module("torch.npu", __path__=[], __getattr__=forward, set_compile_mode=_nothing)
    if DEVICE == "cpu":
        module.current_device = lambda: 0
        module.device = lambda device: contextlib.nullcontext()
        module.get_device_name = lambda device=None: "cpu"
        module.manual_seed = module.manual_seed_all = torch.manual_seed
        for name in ("set_device", "empty_cache", "reset_peak_memory_stats"):
            setattr(module, name, _nothing)
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
            setattr(module, name, lambda device=None: 0)
    return module


def _nothing(*args: Any, **kwargs: Any) -> None:
    """There is nothing to do here."""


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler with the arguments of torch_npu's: both leave gradients unscaled."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        dynamic: bool = True,
        enabled: bool = True,
    ) -> None:
        super().__init__(DEVICE, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._dynamic = dynamic

    def update(self, new_scale: Any = None) -> None:
        # a scale that is not dynamic stays
        super().update(self._scale if new_scale is None and not self._dynamic else new_scale)


class autocast(torch.amp.autocast):
    """torch's autocast, for this machine's device."""

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> None:
        super().__init__(DEVICE, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
