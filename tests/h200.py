"""Makes Triton compile for an H200 on a machine without a GPU, and runs what it compiles by `tests.ptx`."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests import ptx

# what a build of torch for NVIDIA says: kernels are written for that when they are imported
torch.version.cuda = torch.version.cuda or "13.0"

from fusedstep._engines import triton as package  # noqa: E402
from fusedstep._engines.triton import engine, words  # noqa: E402

assert words.ON_NVIDIA.value, "our kernels were imported before, as on other machines"


class _Driver:
    """What Triton asks of a driver in order to compile."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def install(launch: Any = None) -> None:
    """From now on the triton engine takes CPU tensors, and what it launches goes to `launch`: a compiled
    kernel, its grid and its arguments. Without one, its PTX is run.
    """
    launch = launch or _launch
    compile_or_launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = compile_or_launch(self, *args, grid=grid, warmup=True, **options)
        if not warmup:
            given = dict(zip(self.arg_names, args, strict=False)) | options
            sides = grid(given) if callable(grid) else grid
            launch(compiled, sides, [given.get(name) for name in self.arg_names])
        return compiled

    def launcher(compiled: Any, grid: Any, device: torch.device) -> Any:
        return lambda *args: launch(compiled, grid, args)

    triton.runtime.driver.set_active(_Driver())
    JITFunction.run = run
    package.unavailable = lambda device_type: None
    engine._launcher = launcher
    torch.cuda.device = engine.on


def _launch(compiled: Any, grid: tuple[int, ...], args: Any) -> None:
    kinds = [compiled.src.signature[name] for name in compiled.src.fn.arg_names]
    given = [engine._address(arg) for arg, kind in zip(args, kinds, strict=True) if kind != "constexpr"]
    # what Triton adds are two addresses of memory that our kernels have no use for
    ptx.run(compiled.asm["ptx"], (*grid, 1, 1)[:3], (*given, 0, 0), compiled.metadata.shared)
