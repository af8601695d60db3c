"""`fusedstep bench --only cold`: seconds until the second step is taken, in a new process with empty caches.

Everything from before `import fusedstep` to after the second step counts. `import torch`, the modules that
torch's own optimizers import when the first is constructed (torch._dynamo), and the CUDA context do not count,
and are shown beside it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

# what counts in each process, in seconds; then what does not
PARTS = ("import fusedstep", "constructor", "first step", "second step")
BESIDE = ("import torch", "torch's own constructor", "context")
_MOST_PROCESSES = 5

_PROCESS = """
import json, sys, time

device, options = sys.argv[1], json.loads(sys.argv[2])
marks = [("", time.perf_counter())]
mark = lambda name: marks.append((name, time.perf_counter()))
import torch
mark("import torch")
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
mark("torch's own constructor")
params = [torch.nn.Parameter(torch.ones(shape, device=device)) for shape in ((64, 64), (64,), (10, 64), (10,))]
for p in params:
    p.grad = torch.ones_like(p)
wait = torch.cuda.synchronize if device == "cuda" else lambda: None
wait()
mark("context")
before = [name for name in ("triton", "llvmlite", "numpy", "sympy") if name in sys.modules]
mark("")
import fusedstep
mark("import fusedstep")
optimizer = fusedstep.AdamW(params, **options)
mark("constructor")
for name in ("first step", "second step"):
    optimizer.step()
    wait()
    mark(name)
seconds = {name: end - begin for (_, begin), (name, end) in zip(marks, marks[1:]) if name}
print(json.dumps({"seconds": seconds, "imported before": before}))
"""


class Start(NamedTuple):
    """A start of a process: its options, whether another process has filled its caches, and its target."""

    name: str
    options: dict[str, Any]
    warm: bool
    target: dict[str, float]


_ALONG = {"max_grad_norm": 1.0, "ema_decay": 0.999, "statistics": True}
STARTS = [
    Start("AdamW", {}, False, {"cpu": 1.0, "cuda": 4.0}),
    Start("AdamW, warm", {}, True, {"cuda": 0.5}),
    Start("AdamW, clipped, averaged, with statistics", _ALONG, False, {"cpu": 1.5, "cuda": 4.0}),
    Start("AdamW, clipped, averaged, with statistics, warm", _ALONG, True, {"cuda": 0.5}),
]


def measure(start: Start, device: str, processes: int) -> dict[str, Any]:
    found = [_process(start, device) for _ in range(processes)]
    seconds = {name: statistics.median(f["seconds"][name] for f in found) for name in (*BESIDE, *PARTS)}
    totals = [sum(f["seconds"][name] for name in PARTS) for f in found]
    return {
        "start": start.name,
        "total": statistics.median(totals),
        "totals": totals,
        "target": start.target.get(device),
        "seconds": seconds,
        "imported before": found[0]["imported before"],
    }


def _process(start: Start, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: f"{folder}/{name}" for name in ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH")}
        package = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-c", _PROCESS, device, json.dumps(start.options)]
        for _ in range(2 if start.warm else 1):
            done = subprocess.run(
                command, env={**os.environ, **caches, "PYTHONPATH": paths}, capture_output=True, text=True
            )
            if done.returncode != 0:
                raise RuntimeError(f"{start.name!r} cannot be timed, its process ended with:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def named(part: str, device: str) -> list[Start]:
    # the cpu engine keeps nothing that could be warm
    return [start for start in STARTS if part in start.name and not (device == "cpu" and start.warm)]


def run(starts: Iterable[Start], device: str, rounds: int) -> Iterator[dict[str, Any]]:
    for start in starts:
        yield measure(start, device, min(rounds, _MOST_PROCESSES))


def table(results: list[dict[str, Any]], device: str) -> Table:
    view = Table(title=f"seconds until the second step of a new process, {device}; in brackets: not counted")
    numbers = ("total", "target", "", *PARTS, *(f"({name})" for name in BESIDE))
    view.add_column("start")
    for column in numbers:
        view.add_column(column, justify="right" if column else "left")
    for r in results:
        target = "" if r["target"] is None else f"{r['target']:g}"
        parts = [f"{r['seconds'][name]:.3f}" for name in (*PARTS, *BESIDE)]
        view.add_row(r["start"], f"{r['total']:.3f}", target, verdict(r), *parts)
    return view


def verdict(result: dict[str, Any]) -> str:
    if result["target"] is None:
        return ""
    return "met" if result["total"] <= result["target"] else "above"
