"""How steps are timed: interleaved with the peer's, medians of many, on the device and on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

Step = Callable[[], object]


@dataclass
class Prepared:
    """A step that needs something before it which is not timed on the host."""

    before: Step
    step: Step

    def __call__(self) -> None:
        self.before()
        self.step()


def _parts(step: Step) -> tuple[Step, Step]:
    return (step.before, step.step) if isinstance(step, Prepared) else (lambda: None, step)


class Times(NamedTuple):
    """Milliseconds: busy on the device, and until step() returns. On a CPU both are the same."""

    device: float
    host: float


def on_cpu(steps: Sequence[Step], rounds: int) -> list[Times]:
    """The steps in turn, so that all of them see the same noise."""
    samples: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for (before, step), times in zip(map(_parts, steps), samples, strict=True):
            before()
            begin = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - begin))
    return [Times(statistics.median(times), statistics.median(times)) for times in samples]


# how often all steps take turns on a GPU: its host has slow and fast seconds, which all must see
_TURNS = 6
# on the host the first of a turn find the caches as another step has left them, and are not counted
_WARM_UP = 2


def on_gpu(steps: Sequence[Step], rounds: int) -> list[Times]:
    """A few of each in turn, about three times as many as `rounds` in all."""
    device: list[list[float]] = [[] for _ in steps]
    host: list[list[float]] = [[] for _ in steps]
    in_turn = max(1, 3 * rounds // _TURNS)
    for _ in range(_TURNS):
        for step, on_host, on_device in zip(steps, host, device, strict=True):
            on_host += _host_times(step, in_turn)
            on_device += _device_times(step, in_turn, statistics.median(on_host))
    return [Times(statistics.median(d), statistics.median(h)) for d, h in zip(device, host, strict=True)]


def _host_times(step: Step, rounds: int) -> list[float]:
    times, (before, step) = [], _parts(step)
    for _ in range(_WARM_UP + rounds):
        before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begin))
    return times[_WARM_UP:]


def _device_times(step: Step, rounds: int, host: float) -> list[float]:
    """With the queue filled before it starts, so that the host cannot hold the device up."""
    # a step that takes the host long launches many kernels, and the queue holds about a thousand
    rounds = min(rounds, max(1, int(6 / host)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    torch.cuda.synchronize()
    cycles_per_millisecond = 2e6
    torch.cuda._sleep(int(cycles_per_millisecond * (1 + 1.5 * rounds * host)))
    for mark in marks[:-1]:
        mark.record()
        step()
    marks[-1].record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(marks)]


def copy_bandwidth(numel: int = 1 << 28) -> float:
    """Bytes read and written per millisecond by a large copy on the GPU: the limit of any update."""
    source = torch.randn(numel, device="cuda")
    target = torch.empty_like(source)
    milliseconds = statistics.median(_device_times(lambda: target.copy_(source), 20, host=0.05))
    return 2 * source.numel() * source.element_size() / milliseconds


def cpu_copy_bandwidth(numel: int = 1 << 24) -> float:
    """The same on the CPU, of more than its caches hold."""
    source = torch.ones(numel)
    target = torch.empty_like(source).copy_(source)
    (times,) = on_cpu([lambda: target.copy_(source)], 5)
    return 2 * source.numel() * source.element_size() / times.device
