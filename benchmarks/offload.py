"""AdamW with offload="cpu" beside torchao's CPUOffloadOptimizer and torch's fused step on the host with copies.

    python benchmarks/offload.py --peers-path FOLDER_WITH_TORCHAO

Seconds from gradients that are ready until parameters are back on the device, all contenders in turn, medians.
Gradients are handed over as a backward does, so that hooks fire; what that takes alone is measured and taken
off. Beside them what bounds a step: the copies alone (gradients down and parameters up at once, from and to
pinned memory), and the host's memory, for what the update loads and stores. Each work runs in a process of its
own, since what is pinned is not given back. Without a GPU, `--small` shows that the script runs, and no more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusedstep
from fusedstep.cli.counting import predicted
from fusedstep.cli.environment import environment
from fusedstep.cli.moved import bytes_per_parameter
from fusedstep.cli.shapes import MODELS
from fusedstep.cli.works import Work

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
MODEL = "llama-1b"
SMALL = [(256, 64), (64,), (64, 64)]
# what is computed; in the first two alike by all, but that torchao has tensors of less than 4,096 elements
# stepped by the GPU
WORKS = {
    "fp32": "parameters, gradients and states of float32",
    "bf16": "parameters, gradients and states of bfloat16",
    "master": "parameters and gradients of bfloat16, float32 states and masters, or 8 bits and split masters",
}
OURS: dict[str, dict[str, dict[str, Any]]] = {
    "fp32": {"ours": {}},
    "bf16": {"ours": {}},
    "master": {
        "ours": {"state_dtype": "float32", "master": "float32"},
        "ours, int8 and split8": {"state_dtype": "int8", "master": "split8"},
    },
}


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def own(params: list[Tensor]) -> list[nn.Parameter]:
    """Copies, which no other contender writes to."""
    return [nn.Parameter(p.clone()) for p in params]


def pinned(like: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.empty(t.shape, dtype=dtype or t.dtype, device="cpu", pin_memory=GPU) for t in like]


def copy(targets: list[Any], sources: list[Any]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


class Contender:
    """Parameters, which a backward gives gradients, and a step of them."""

    def __init__(
        self, params: list[nn.Parameter], step: Callable[[], Any], expected: int | None = None
    ) -> None:
        self.params, self.step, self.expected = params, step, expected

    def seconds(self, grads: list[Tensor]) -> float:
        for p in self.params:
            p.grad = None
        synchronize()
        begin = time.perf_counter()
        torch.autograd.backward(self.params, grads)
        self.step()
        synchronize()
        return time.perf_counter() - begin


def ours(params: list[Tensor], options: dict[str, Any]) -> Contender:
    those = own(params)
    optimizer = fusedstep.AdamW(those, lr=1e-5, offload="cpu", **options)
    return Contender(those, optimizer.step, predicted(optimizer).at_rest)


class WithCopies:
    """torch's fused step on the host as a careful user writes it, with a master of float32 if that is asked."""

    def __init__(self, params: list[nn.Parameter], has_master: bool) -> None:
        self.params, self.host, self.grads = params, pinned(params), pinned(params)
        copy(self.host, [p.detach() for p in params])
        synchronize()
        self.master = [nn.Parameter(t.float() if has_master else t) for t in self.host]
        for p, g in zip(self.master, self.grads, strict=True):
            p.grad = torch.empty_like(p) if has_master else g
        self.has_master = has_master
        self.optimizer = torch.optim.AdamW(self.master, lr=1e-5, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        copy(self.grads, [p.grad for p in self.params])
        synchronize()
        if self.has_master:
            torch._foreach_copy_([p.grad for p in self.master], self.grads)
        self.optimizer.step()
        if self.has_master:
            torch._foreach_copy_(self.host, self.master)
        copy(self.params, self.host)


def contenders(work: str, params: list[Tensor]) -> dict[str, Contender]:
    found = {name: ours(params, options) for name, options in OURS[work].items()}
    those = own(params)
    found["torch fused and copies"] = Contender(those, WithCopies(those, work == "master").step)
    if work == "master" or not GPU:
        return found
    try:
        from torchao.optim import CPUOffloadOptimizer
    except ImportError as error:
        print(f"torchao is left out: {error}", file=sys.stderr)
        return found
    those = own(params)
    found["torchao"] = Contender(those, CPUOffloadOptimizer(those, torch.optim.AdamW, lr=1e-5).step)
    return found


# bounds


def copy_seconds(params: list[Tensor], grads: list[Tensor]) -> float:
    """Gradients down and parameters up at once."""
    down, up = (torch.cuda.Stream(), torch.cuda.Stream()) if GPU else (None, None)
    there, host = pinned(grads), pinned(params)
    # what is on the device stays
    params = [torch.empty_like(p) for p in params]
    synchronize()
    found = []
    for _ in range(4):
        begin = time.perf_counter()
        with torch.cuda.stream(down):
            copy(there, grads)
        with torch.cuda.stream(up):
            copy(params, host)
        synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def host_bandwidth(size: int) -> float:
    """Bytes a second of a sum of two vectors on the host, read and written."""
    a, b, c = (torch.ones(size // 4, device="cpu") for _ in range(3))
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        torch.add(a, b, out=c)
        found.append(3 * size / (time.perf_counter() - begin))
    return max(found)


def moved(work: str, options: dict[str, Any]) -> float:
    """Bytes a parameter that the update loads and stores, of those on the host."""
    dtype = "fp32" if work == "fp32" else "bf16"
    return bytes_per_parameter(Work(MODEL, "AdamW", options, dtype, ()))


# measurements


def peak_of(contender: Contender, grads: list[Tensor], beside: int) -> int:
    """The most that parameters, gradients and a step took on the device, without what is there `beside`."""
    torch.cuda.reset_peak_memory_stats()
    contender.seconds(grads)
    for p in contender.params:
        p.grad = None
    return torch.cuda.max_memory_allocated() - beside


def measure(work: str, shapes: list[tuple[int, ...]], rounds: int) -> dict[str, Any]:
    dtype = torch.float32 if work == "fp32" else torch.bfloat16
    params = [torch.randn(shape, device=DEVICE).mul_(0.02).to(dtype) for shape in shapes]
    grads = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    size = sum(p.numel() for p in params)
    bytes_of_params = size * dtype.itemsize
    row: dict[str, Any] = {"work": work, "what": WORKS[work], "elements": size}
    row["copies_ms"] = 1e3 * copy_seconds(params, grads)
    row["host_gb_per_s"] = host_bandwidth(min(bytes_of_params, 1 << 30)) / 1e9
    started = time.perf_counter()
    each = contenders(work, params)
    handing_over = Contender(own(params), lambda: None)
    found: dict[str, list[float]] = {name: [] for name in each}
    alone = []
    for i in range(rounds + 2):
        alone.append(handing_over.seconds(grads))
        for p in handing_over.params:
            p.grad = None
        for name, contender in each.items():
            # the first two allocate and compile
            seconds = contender.seconds(grads)
            found[name] += [seconds] * (i > 1)
            for p in contender.params:
                p.grad = None
    row["handing_over_ms"] = 1e3 * statistics.median(alone[2:])
    row["contenders"] = {}
    for name, seconds in found.items():
        ms = [1e3 * s - row["handing_over_ms"] for s in seconds]
        told: dict[str, Any] = {"ms": statistics.median(ms), "all_ms": ms}
        told["share_of_copies"] = row["copies_ms"] / told["ms"]
        if name in OURS[work]:
            host = moved(work, OURS[work][name]) * size / row["host_gb_per_s"] / 1e6
            told |= {"host_bound_ms": host, "predicted_bytes": each[name].expected}
        if name in OURS[work] and GPU:
            # all but its own parameters
            beside = torch.cuda.memory_allocated() - bytes_of_params
            told["peak_bytes"] = peak_of(each[name], grads, beside)
        row["contenders"][name] = told
    row["seconds_in_all"] = time.perf_counter() - started
    return row


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("folder", nargs="?", type=Path, default=Path("benchmarks"))
    arguments.add_argument("--commit")
    arguments.add_argument("--peers-path", help="a folder that torchao can be imported from")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--only", choices=WORKS, help="one work, in this process, printed and not kept")
    arguments.add_argument("--small", action="store_true", help="a few tensors, to see that it runs")
    given = arguments.parse_args()
    if given.peers_path:
        sys.path.append(given.peers_path)
    if not GPU and not given.small:
        raise SystemExit("there is no GPU to offload from; --small shows that the script runs")
    if given.only:
        if not GPU:
            warnings.filterwarnings("ignore", ".*on the CPU already")
        print(json.dumps(measure(given.only, SMALL if given.small else MODELS[MODEL], given.rounds)))
        return
    results = []
    for work in WORKS:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", work]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        print(done.stdout.splitlines()[-1], flush=True)
        if GPU and not given.small:
            # after each: a run that is cut short leaves what it has
            facts = {**environment(DEVICE, given.commit), "model": MODEL, "rounds": given.rounds}
            facts["threads"] = str(torch.get_num_threads())
            given.folder.mkdir(parents=True, exist_ok=True)
            path = given.folder / "offload-cuda-nvidia-h200.json"
            path.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
