"""`fusedstep doctor`: this machine, and which engine serves it, or why not, for bug reports."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import typer

import fusedstep

from .. import _engines
from . import timing
from .environment import environment

_PACKAGES = ("fusedstep", "torch", "triton", "llvmlite", "numpy", "typer", "rich", "matplotlib")
# without these nothing runs
_ESSENTIAL = ("torch", "llvmlite", "numpy")
_VARIABLES = ("CUDA_", "NVIDIA_", "HIP_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "MKL_", "KMP_", "GOMP_")
# the engine that a type of device should have, and the package that it needs
_BEST = {"cpu": ("cpu", "llvmlite"), "cuda": ("triton", "triton")}


def doctor() -> None:
    """Print versions, devices, engines, folders, speeds and settings; fail if something essential is broken."""
    broken: list[str] = []
    for title, lines in (
        ("versions", _versions(broken)),
        ("devices", _devices(broken)),
        ("engines", _served(broken)),
        ("threads", _threads()),
        ("caches", _caches()),
        ("environment", _variables()),
        ("one AdamW step", _steps(broken)),
    ):
        typer.echo(title)
        for line in lines:
            typer.echo(f"  {line}")
    for problem in broken:
        typer.echo(f"broken: {problem}")
    if broken:
        raise typer.Exit(1)
    typer.echo("nothing essential is broken; `fusedstep check` looks at the numbers")


def shortened(path: str | Path) -> str:
    """A path without the name of its user's home."""
    home, text = str(Path.home()), str(path)
    return f"~{text[len(home) :]}" if home != "/" and text.startswith(home) else text


def _versions(broken: list[str]) -> Iterator[str]:
    yield f"python {platform.python_version()} ({platform.python_implementation()}), {platform.platform()}"
    for name in _PACKAGES:
        version = _version(name)
        yield f"{name} {version or 'is not installed'}"
        if version is None and name in _ESSENTIAL:
            broken.append(f"{name} is not installed; pip install {name}")
    built = {"CUDA": torch.version.cuda, "HIP": torch.version.hip}
    told = [f"{name} {version}" for name, version in built.items() if version]
    yield f"torch is built for {' and '.join(told) or 'CPUs only'}; the driver is {_driver()}"


def _version(name: str) -> str | None:
    # their own versions say more than their metadata: what torch is built for
    if name in ("fusedstep", "torch"):
        return str(sys.modules[name].__version__)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].partition("Module")[2].split()[0]
    except (OSError, IndexError):
        return "not found"


def _devices(broken: list[str]) -> Iterator[str]:
    name, bandwidth = environment("cpu", "")["device"], timing.copy_bandwidth("cpu", 1 << 24)
    yield f"cpu: {name}, copies {bandwidth / 1e6:.0f} GB/s"
    if not torch.cuda.is_available():
        yield "cuda: torch sees no GPU"
        if _driver() != "not found" and not os.environ.get("CUDA_VISIBLE_DEVICES", "-"):
            yield "cuda: CUDA_VISIBLE_DEVICES hides all"
        return
    for i in range(torch.cuda.device_count()):
        try:
            facts = torch.cuda.get_device_properties(i)
            free, total = torch.cuda.mem_get_info(i)
            with torch.cuda.device(i):
                speed = f"copies {timing.copy_bandwidth('cuda', _elements(free)) / 1e6:.0f} GB/s"
        except RuntimeError as error:
            broken.append(f"cuda:{i} cannot be used: {str(error).splitlines()[0]}; see nvidia-smi")
            yield f"cuda:{i}: cannot be used"
            continue
        memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        yield f"cuda:{i}: {facts.name}, sm_{facts.major}{facts.minor}, {memory}, {speed}"


def _elements(free: int) -> int:
    """How many float32 to copy: many, if source and target have room."""
    return min(1 << 28, max(1 << 20, free // 32))


def _served(broken: list[str]) -> Iterator[str]:
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        reasons = {name: _engines.load(name, device)[1] for name in _engines.NAMES}
        able = [name for name, reason in reasons.items() if reason is None]
        best, package = _BEST[device]
        if not able:
            broken.append(f"no engine takes tensors on {device}: {reasons['torch']}; reinstall torch")
        elif best not in able and _version(package) is not None:
            broken.append(f"{best} does not run on {device}: {reasons[best]}; reinstall {package}")
        elif best not in able:
            yield f"{device}: plain tensor operations, slower; pip install {package} for the {best} engine"
        yield f"{device}: {best if best in able else able[0] if able else 'none'} serves it"
        for name, reason in reasons.items():
            yield f"  {name}: {'available' if reason is None else f'not available: {reason}'}"


def _threads() -> Iterator[str]:
    within, between = torch.get_num_threads(), torch.get_num_interop_threads()
    yield f"torch uses {within} within an operator, {between} between operators"
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limit = _quota()
    told = f"; its container limits it to the time of {limit:g}" if limit is not None else ""
    yield f"this process may use {here} of {os.cpu_count()} cores{told}"
    if limit is not None and torch.get_num_threads() > max(1, round(limit)):
        yield f"more threads than that wait for each other: try OMP_NUM_THREADS={max(1, int(limit))}"


def _quota() -> float | None:
    """The number of cores whose time the control group of this process gives it, if it says."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _caches() -> Iterator[str]:
    chosen = os.environ.get("TRITON_CACHE_DIR")
    folder = (
        Path(chosen) if chosen else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
    )
    if not folder.is_dir():
        yield f"triton: {shortened(folder)}, not there yet"
        return
    writable = "" if os.access(folder, os.W_OK) else ", which cannot be written: every process compiles anew"
    yield f"triton: {shortened(folder)}, {sum(1 for _ in folder.iterdir())} kernels{writable}"


def _variables() -> Iterator[str]:
    found = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    for name in sorted(found):
        yield f"{name}={shortened(found[name])}"
    if not found:
        yield f"none that begins with {', '.join(_VARIABLES)}"
    if os.environ.get("TRITON_INTERPRET") == "1" and torch.cuda.is_available():
        yield "TRITON_INTERPRET=1 runs kernels in Python, thousands of times slower: unset it"


def _steps(broken: list[str]) -> Iterator[str]:
    """One AdamW step on every device, by the engine that is chosen for it."""
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        try:
            p = torch.nn.Parameter(torch.ones(4, device=device))
            p.grad = torch.ones_like(p)
            # its first step is as large as `lr`
            fusedstep.AdamW([p], lr=0.5, weight_decay=0.0).step()
            is_right = torch.allclose(p.cpu(), torch.tensor(0.5))
        except Exception as error:
            is_right, why = False, f"{type(error).__name__}: {str(error).splitlines()[0]}"
        else:
            why = "its result is wrong"
        yield f"{device}: {'ok' if is_right else why}"
        if not is_right:
            broken.append(f"an AdamW step on {device} failed: {why}; please report this with all of the above")
