"""`fusedstep bench`: our step beside torch's fused one and other peers, in one run."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import math
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import fusedstep
from fusedstep import functional

from . import cold, host, timing
from .shapes import MODELS
from .sharded import sharded
from .works import CPU, DTYPES, GPU, Work, text_of

# what is timed otherwise, and chosen by its name
_OTHERS: dict[str, Any] = {"host": host, "cold": cold}


def bench(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one")] = None,
    only: Annotated[
        str, typer.Option(help="only work whose name contains this; host: loops; cold: new processes")
    ] = "",
    rounds: Annotated[int, typer.Option(help="samples of each time")] = 20,
    output: Annotated[Path | None, typer.Option(help="folder for the raw result and the chart")] = None,
    commit: Annotated[str | None, typer.Option(help="commit to record; git is asked for it")] = None,
) -> None:
    """Time our steps beside torch's fused ones, interleaved, and against the memory limit on a GPU."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"found {device!r}; use cpu or cuda", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no GPU here; use --device cpu", param_hint="--device")
    console = Console(width=None if sys.stdout.isatty() else 132)
    facts = environment(device, commit)
    console.print(" | ".join(f"{name} {value}" for name, value in facts.items() if name != "commit"))
    kind, _, part = only.partition(" ")
    if kind in _OTHERS:
        other = _OTHERS[kind]
        if not other.named(part, device):
            raise typer.BadParameter(f"found no part of {kind} named {part!r}", param_hint="--only")
        results = other.run(part, device, rounds, functools.partial(track, description=kind, console=console))
        console.print(other.table(results, device))
        if output is not None:
            path = save(output, (kind, device, facts["device"].lower(), part), facts, results)
            console.print(f"raw result: {path}")
        return
    works = [work for work in (CPU if device == "cpu" else GPU) if only in str(work)]
    if not works:
        raise typer.BadParameter(f"found no work named {only!r}; use a part of '{CPU[0]}'", param_hint="--only")
    bandwidth = timing.copy_bandwidth() if device == "cuda" else None
    results = [measure(w, device, rounds, bandwidth) for w in track(works, "timing", console=console)]
    console.print(table(results, device))
    if output is not None:
        # of a part under another name: it does not replace the whole
        path = save(
            output, (device, facts["device"].lower(), only), {**facts, "copy_bandwidth": bandwidth}, results
        )
        chart(results, facts, path.with_suffix(".png"))
        console.print(f"raw result: {path}, chart: {path.with_suffix('.png')}")


def save(output: Path, name: tuple[str, ...], facts: dict[str, Any], results: list[dict]) -> Path:
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{'-'.join(filter(None, name)).replace('/', '-').replace(' ', '-')}.json"
    path.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    return path


def environment(device: str, commit: str | None) -> dict[str, str]:
    if commit is None:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = git.stdout.strip() if git.returncode == 0 else "unknown"
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    versions = {"torch": torch.__version__, "numpy": np.__version__, "fusedstep": fusedstep.__version__}
    threads = {} if device == "cuda" else {"threads": str(torch.get_num_threads())}
    return {"device": name, **versions, **threads, "commit": commit}


def _processor() -> str:
    """The model where Linux tells it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def measure(work: Work, device: str, rounds: int, bandwidth: float | None) -> dict[str, Any]:
    check(work, device)
    state_dtype = DTYPES[work.dtype][1]
    steps = {"ours": _step(f"fusedstep.{work.optimizer}", work, device, state_dtype=state_dtype)}
    # torch keeps states in the parameter's dtype: the nearest it has to the mixed case
    for peer in filter(_is_there, work.peers):
        of_peer = _plain(work) if peer.startswith("fusedstep.") else work
        steps[peer] = _step(peer, of_peer, device, **_fastest(peer, device))
    for step in (*steps.values(),) * 2:  # compiled and allocated before the clock starts
        step()
    times = (timing.on_cpu if device == "cpu" else timing.on_gpu)([*steps.values()], rounds)
    ours, *peers = (t._asdict() for t in times)
    result = {**work._asdict(), "ours": ours, "peers": dict(zip([*steps][1:], peers, strict=True))}
    if bandwidth is not None:
        parameters = sum(math.prod(shape) for shape in MODELS[work.model])
        result["limit"] = bytes_per_parameter(work) * parameters / bandwidth
    return result


def _fastest(peer: str, device: str) -> dict[str, bool]:
    """How torch is asked for the fastest it has: fused, else lists on a GPU, one after the other on a CPU."""
    if not peer.startswith("torch."):
        return {}
    # Adagrad's fused step is for the CPU
    on_cpu_only = peer.endswith(".Adagrad") and device != "cpu"
    if "fused" in inspect.signature(_class(peer)).parameters and not on_cpu_only:
        return {"fused": True}
    return {"foreach": device != "cpu"}


def _plain(work: Work) -> Work:
    """What a class of ours is timed beside when it is its own peer: without what goes along, or distributed."""
    options = dict(work.options)
    return work._replace(options=options if options.pop("sharded", False) else {})


def _step(name: str, work: Work, device: str, **options: Any) -> Callable[[], Any]:
    """A step of an optimizer, or of the operation that is one."""
    generator = torch.Generator(device).manual_seed(0)
    params = [_parameter(shape, DTYPES[work.dtype][0], generator) for shape in MODELS[work.model]]
    if "sharded" in work.options:
        params = [*map(sharded, params)]
    if name == "fusedstep.functional.adamw_":
        lists = params, [p.grad for p in params], *([torch.zeros_like(p) for p in params] for _ in range(2))
        return functools.partial(functional.adamw_, *lists, step=torch.ones(1, device=device))
    groups = [{"params": [p]} for p in params] if work.model.endswith("groups") else params
    optimizer = _class(name)(groups, lr=1e-3, **{**options, **_known(name, work.options)})
    _set_scale(optimizer, work.options)
    return _whole(optimizer, params, work.options) if "scaler" in work.options else optimizer.step


def _set_scale(optimizer: Any, options: dict[str, Any]) -> None:
    """Hand over what torch's scaler does around its call."""
    if "grad_scale" in options:
        device = optimizer.param_groups[0]["params"][0].device
        numbers = options["grad_scale"], 0.0
        optimizer.grad_scale, optimizer.found_inf = (torch.tensor(number, device=device) for number in numbers)


def _whole(optimizer: Any, params: list, options: dict[str, Any]) -> timing.Step:
    """All that comes between a backward and the next: with ours in one step, else in one call after another."""
    ours = isinstance(optimizer, fusedstep.AdamW)
    device, grads = params[0].device, [p.grad for p in params]
    scaler = (fusedstep.GradScaler if ours else torch.amp.GradScaler)(device.type, init_scale=1024.0)
    scaler.scale(torch.ones((), device=device))

    def before() -> None:
        for p, g in zip(params, grads, strict=True):
            p.grad = g

    def step() -> None:
        if ours:
            scaler.step(optimizer, zero_grad=True)
        else:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, options["max_grad_norm"])
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()

    return timing.Prepared(before, step)


@functools.cache
def _is_there(name: str) -> bool:
    """Whether a peer can be imported; what is installed and cannot is told once."""
    try:
        _class(name)
    except ModuleNotFoundError:
        return False
    except Exception as error:
        print(f"{name} is left out, it cannot be imported: {error}", file=sys.stderr)
        return False
    return True


def _class(name: str) -> Any:
    module, _, cls = name.rpartition(".")
    return getattr(importlib.import_module(module), cls)


def _known(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Of these options those that the optimizer has; others call the limit of the norm otherwise."""
    taken = inspect.signature(_class(name)).parameters
    return {option: value for option, value in options.items() if option in taken}


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Any:
    device = generator.device
    p = torch.nn.Parameter((0.02 * torch.randn(shape, device=device, generator=generator)).to(dtype))
    p.grad = (0.01 * torch.randn(shape, device=device, generator=generator)).to(dtype)
    return p


# options that change what is lost, and not what is computed
_HOW_STORED = ("state_dtype", "master", "rounding")


def check(work: Work, device: str) -> None:
    """No time is reported for a wrong result: three steps must agree with those in float64."""
    if work.optimizer not in fusedstep.__all__:
        return  # timed beside the class that is checked
    of_param, of_state = DTYPES[work.dtype]
    generator = torch.Generator(device).manual_seed(1)
    ours = [_parameter(shape, of_param, generator) for shape in ((3000,), (33, 7), (70, 100))]
    parts = [*map(sharded, ours)] if "sharded" in work.options else ours
    exact = [torch.nn.Parameter(p.detach().double()) for p in ours]
    for p, q in zip(ours, exact, strict=True):
        p.grad += p.grad.sign()  # or the squares of gradients would vanish in fp16
        q.grad = p.grad.double()
    options = {"lr": 1e-3, **_known(f"fusedstep.{work.optimizer}", work.options)}
    optimizers = [getattr(fusedstep, work.optimizer)(parts, **{"state_dtype": of_state, **options})]
    _set_scale(optimizers[0], work.options)
    options = {name: value for name, value in options.items() if name not in _HOW_STORED}
    if hasattr(torch.optim, work.optimizer) and _known(f"torch.optim.{work.optimizer}", options) == options:
        optimizers.append(getattr(torch.optim, work.optimizer)(exact, **options))
    else:  # torch has no such thing: the same in plain tensor operations
        optimizers.append(getattr(fusedstep, work.optimizer)(exact, engine="torch", **options))
    for optimizer in optimizers * 3:
        optimizer.step()
    # with 8 bits, a thirtieth of what three steps change
    slack = 1e-4 if work.options.get("state_dtype") == "int8" else 0.0
    for p, q in zip(ours, exact, strict=True):
        error = float((p.detach() - q.detach()).abs().max())
        if not error <= slack + 4 * torch.finfo(of_param).eps * float(q.detach().abs().max()):
            raise RuntimeError(f"{work} is off by {error} and is not timed; please report this")


def bytes_per_parameter(work: Work) -> float:
    """What an update must move: in every sweep of its program, what it loads and what it stores."""
    of_param, of_state = DTYPES[work.dtype]
    name = "AdamW" if work.optimizer == "functional.adamw_" else work.optimizer
    # large enough for 8 bits
    p = torch.nn.Parameter(torch.ones(64, 64, dtype=of_param))
    p.grad = torch.ones_like(p)
    options = {"lr": 1e-3, "engine": "torch", **_known(f"fusedstep.{name}", work.options)}
    optimizer = getattr(fusedstep, name)([p], **{"state_dtype": of_state, **options})
    _set_scale(optimizer, work.options)
    optimizer.step()
    (bucket,) = optimizer._plan.tables[0].buckets
    sizes = [plane.dtype.itemsize / plane.block for plane in bucket.program.planes]
    moved = [(*sweep.loads, *(place for place, _ in sweep.stores)) for sweep in bucket.program.sweeps]
    return sum(sizes[place] for places in moved for place in places)


def table(results: list[dict], device: str) -> Table:
    view = Table(title="milliseconds a step, medians; torch.optim with fused=True, or the fastest it has")
    columns = ["model", "optimizer", "dtype", "ours", "peer", "its", "speed-up"]
    if device == "cuda":
        columns[3:] = ["device", "of the limit", "host", "peer", "its device", "speed-up", "its host", "ratio"]
    for i, column in enumerate(columns):
        view.add_column(column, justify="left" if i < 3 or column == "peer" else "right")
    for r in results:
        ours = r["ours"]
        row = [r["model"], f"{r['optimizer']}({text_of(r['options'])})", r["dtype"], f"{ours['device']:.3f}"]
        if device == "cuda":
            row += [f"{100 * r['limit'] / ours['device']:.1f} %", f"{ours['host']:.3f}"]
        for peer, its in r["peers"].items() or [("", None)]:
            beside = [peer]
            for kind in ("device", "host")[: 1 if device == "cpu" else 2] if its else ():
                beside += [f"{its[kind]:.3f}", f"{its[kind] / ours[kind]:.2f} x"]
            view.add_row(*row, *beside)
    return view


def _torchs(result: dict) -> Any:
    """The times of torch's optimizer, if it was among the peers."""
    return next((times for peer, times in result["peers"].items() if peer.startswith("torch.")), None)


def chart(results: list[dict], facts: dict[str, str], path: Path) -> None:
    """Speed-up over torch's fused step, a bar for each row of the first optimizer."""
    results = [r for r in results if r["optimizer"] == results[0]["optimizer"] and _torchs(r) is not None]
    if not results:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [f"{r['model']}  {r['optimizer']}({text_of(r['options'])})  {r['dtype']}" for r in results]
    # steps in a row take as long as the slower of device and host
    ratios = [max(_torchs(r).values()) / max(r["ours"].values()) for r in results]
    figure, axes = plt.subplots(figsize=(8, 1 + 0.2 * len(results)), layout="constrained")
    colors = ["#2a6f97" if i % 2 else "#468faf" for i, _ in enumerate(results)]
    bars = axes.barh(names, ratios, color=colors, height=0.85)
    axes.bar_label(bars, fmt="%.2f x", padding=3, fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g} x")
    axes.set_xlim(0.5, 2 * max(ratios))
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("times faster than torch.optim with fused=True, steps in a row (logarithmic)", fontsize=8)
    axes.set_title(f"{facts['device']}, torch {facts['torch']}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)
