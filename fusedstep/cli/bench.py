"""`fusedstep bench`: our step beside torch's fused one, in one run."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import fusedstep

from . import timing
from .shapes import MODELS


class Work(NamedTuple):
    """One row of the benchmark."""

    model: str
    optimizer: str
    options: dict[str, Any]
    dtype: str


OPTIMIZERS: dict[str, dict[str, Any]] = {"AdamW": {}, "Adam": {}, "SGD": {"momentum": 0.9}}
# of parameter and gradient, and of the states
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16/fp32": (torch.bfloat16, torch.float32),
}
CPU = [Work("bert-base", o, k, d) for d in ("fp32", "bf16", "fp16") for o, k in OPTIMIZERS.items()]
CPU += [Work("1000 x 64", o, k, "fp32") for o, k in OPTIMIZERS.items()]
GPU = [
    Work(model, o, k, dtype)
    for model in ("bert-large", "llama-1b", "resnet-50", "400 x 1024", "465 groups")
    for dtype in ("fp32", "bf16", "bf16/fp32")
    for o, k in OPTIMIZERS.items()
]


def bench(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one")] = None,
    only: Annotated[str, typer.Option(help="only work whose name contains this")] = "",
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
    works = [w for w in (CPU if device == "cpu" else GPU) if only in f"{w.model} {w.optimizer} {w.dtype}"]
    bandwidth = timing.copy_bandwidth() if device == "cuda" else None
    results = [measure(w, device, rounds, bandwidth) for w in track(works, "timing", console=console)]
    console.print(table(results, device))
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        path = output / f"{device}-{facts['device'].lower().replace(' ', '-')}.json"
        path.write_text(json.dumps({**facts, "copy_bandwidth": bandwidth, "results": results}, indent=1) + "\n")
        chart(results, facts, path.with_suffix(".png"))
        console.print(f"raw result: {path}, chart: {path.with_suffix('.png')}")


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
    ours = _optimizer(fusedstep, work, device, state_dtype=DTYPES[work.dtype][1])
    # torch keeps states in the parameter's dtype: the nearest it has to the mixed case
    theirs = _optimizer(torch.optim, work, device, fused=True)
    check(work, device)
    for step in (ours.step, theirs.step) * 2:  # compiled and allocated before the clock starts
        step()
    measured = (timing.on_cpu if device == "cpu" else timing.on_gpu)((ours.step, theirs.step), rounds)
    result = {**work._asdict(), "ours": measured[0]._asdict(), "torch": measured[1]._asdict()}
    if bandwidth is not None:
        result["limit"] = _bytes(ours) / bandwidth
    return result


def _optimizer(module: Any, work: Work, device: str, **options: Any) -> torch.optim.Optimizer:
    generator = torch.Generator(device).manual_seed(0)
    params = [_parameter(shape, DTYPES[work.dtype][0], generator) for shape in MODELS[work.model]]
    groups = [{"params": [p]} for p in params] if work.model.endswith("groups") else params
    return getattr(module, work.optimizer)(groups, lr=1e-3, **work.options, **options)


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Any:
    device = generator.device
    p = torch.nn.Parameter((0.02 * torch.randn(shape, device=device, generator=generator)).to(dtype))
    p.grad = (0.01 * torch.randn(shape, device=device, generator=generator)).to(dtype)
    return p


def check(work: Work, device: str) -> None:
    """No time is reported for a wrong result: three steps must agree with torch.optim in float64."""
    of_param, of_state = DTYPES[work.dtype]
    generator = torch.Generator(device).manual_seed(1)
    ours = [_parameter(shape, of_param, generator) for shape in ((3000,), (33, 7))]
    exact = [torch.nn.Parameter(p.detach().double()) for p in ours]
    for p, q in zip(ours, exact, strict=True):
        p.grad += p.grad.sign()  # or the squares of gradients would vanish in fp16
        q.grad = p.grad.double()
    options = {"lr": 1e-3, **work.options}
    optimizers = (
        getattr(fusedstep, work.optimizer)(ours, state_dtype=of_state, **options),
        getattr(torch.optim, work.optimizer)(exact, **options),
    )
    for optimizer in optimizers * 3:
        optimizer.step()
    for p, q in zip(ours, exact, strict=True):
        error = float((p.detach() - q.detach()).abs().max())
        if not error <= 4 * torch.finfo(of_param).eps * float(q.detach().abs().max()):
            raise RuntimeError(f"{work} is off by {error} and is not timed; please report this")


def _params(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _bytes(optimizer: torch.optim.Optimizer) -> int:
    """What an update must move: everything read once, all but the gradient written once."""
    total = 0
    for p in _params(optimizer):
        states = [t for name, t in optimizer.state[p].items() if name != "step"]
        total += p.grad.nbytes + 2 * sum(t.nbytes for t in (p, *states))
    return total


def table(results: list[dict], device: str) -> Table:
    view = Table(title="milliseconds a step, medians; torch = torch.optim with fused=True")
    columns = ["model", "optimizer", "dtype", "ours", "torch", "speed-up"]
    if device == "cuda":
        columns[3:] = ["device", "of the limit", "torch", "speed-up", "host", "torch host", "host ratio"]
    for i, column in enumerate(columns):
        view.add_column(column, justify="left" if i < 3 else "right")
    for r in results:
        ours, torch_ = r["ours"], r["torch"]
        row = [r["model"], r["optimizer"], r["dtype"], f"{ours['device']:.3f}"]
        row += [f"{100 * r['limit'] / ours['device']:.1f} %"] if device == "cuda" else []
        row += [f"{torch_['device']:.3f}", f"{torch_['device'] / ours['device']:.2f} x"]
        if device == "cuda":
            row += [f"{ours['host']:.3f}", f"{torch_['host']:.3f}", f"{torch_['host'] / ours['host']:.1f} x"]
        view.add_row(*row)
    return view


def chart(results: list[dict], facts: dict[str, str], path: Path) -> None:
    """Speed-up over torch's fused step, a bar for each row of the first optimizer."""
    results = [r for r in results if r["optimizer"] == results[0]["optimizer"]]
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [f"{r['model']}  {r['optimizer']}  {r['dtype']}" for r in results]
    # steps in a row take as long as the slower of device and host
    ratios = [max(r["torch"].values()) / max(r["ours"].values()) for r in results]
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
