"""How steps are timed: interleaved with the peers', many of each, on the device, on the host and in a row."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

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


class Spread(NamedTuple):
    """Milliseconds: the median of samples, their quartiles, and how many there are."""

    median: float
    low: float
    high: float
    samples: int

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        found = sorted(samples)
        low, high = (found[len(found) * quarter // 4] for quarter in (1, 3))
        return Spread(statistics.median(found), low, high, len(found))


class Times(NamedTuple):
    """Busy on the device, until step() returns, and of one step of many in a row. On a CPU all are the same.

    In a row counts what is done before a step, too, if it needs something: as little as handing over gradients.
    """

    device: Spread
    host: Spread
    wall: Spread

    def raw(self) -> dict[str, Any]:
        """Medians by their names, and beside them how far samples are apart."""
        medians = {kind: spread.median for kind, spread in self._asdict().items()}
        quartiles = {kind: [spread.low, spread.high] for kind, spread in self._asdict().items()}
        return {**medians, "quartiles": quartiles, "samples": self.device.samples}


# seconds after which a step that takes long has had its share: of all rounds on a CPU, of a turn on a GPU
_LONGEST = 4.0
_LONGEST_TURN = 0.25
_FEWEST = 3


def on_cpu(steps: Sequence[Step], rounds: int) -> list[Times]:
    """The steps in turn, so that all of them see the same noise; one that takes long not in every round."""
    samples: list[list[float]] = [[] for _ in steps]
    every = [1] * len(steps)
    for i in range(rounds):
        for k, (before, step) in enumerate(map(_parts, steps)):
            if i % every[k]:
                continue
            before()
            begin = time.perf_counter()
            step()
            seconds = time.perf_counter() - begin
            samples[k].append(1e3 * seconds)
            if i == 0:
                every[k] = max(1, min(rounds // _FEWEST, math.ceil(rounds * seconds / _LONGEST)))
    return [Times(*[Spread.of(found)] * 3) for found in samples]


# how often all steps take turns on a GPU: its host has slow and fast seconds, which all must see
_TURNS = 6
# on the host the first of a turn find the caches as another step has left them, and are not counted
_WARM_UP = 2


def on_gpu(steps: Sequence[Step], rounds: int) -> list[Times]:
    """A few of each in turn, about three times as many as `rounds` in all; fewer of one that takes long."""
    device: list[list[float]] = [[] for _ in steps]
    host: list[list[float]] = [[] for _ in steps]
    wall: list[list[float]] = [[] for _ in steps]
    in_turn = [min(max(1, 3 * rounds // _TURNS), max(1, int(_LONGEST_TURN / _seconds(s)))) for s in steps]
    for _ in range(_TURNS):
        for k, step in enumerate(steps):
            host[k] += _host_times(step, in_turn[k])
            device[k] += _device_times(step, in_turn[k], statistics.median(host[k]))
            wall[k].append(_wall_time(step, in_turn[k]))
    return [Times(*map(Spread.of, found)) for found in zip(device, host, wall, strict=True)]


def _seconds(step: Step) -> float:
    """About what a step takes, the device waited for."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _host_times(step: Step, rounds: int) -> list[float]:
    times, (before, step) = [], _parts(step)
    # where one is so long that it is taken alone, caches do not matter
    warm_up = _WARM_UP if rounds > 1 else 0
    for _ in range(warm_up + rounds):
        before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begin))
    return times[warm_up:]


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


def _wall_time(step: Step, rounds: int) -> float:
    """Of one of several in a row, the device waited for once: what a loop around nothing but steps takes."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(rounds):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin) / rounds


def copy_bandwidth(device: str, numel: int | None = None) -> float:
    """Bytes read and written per millisecond by a large copy on this device: the limit of any update."""
    # on a CPU eight times what its caches hold, mostly; a copy takes as many threads as torch has
    source = torch.randn(numel or 1 << (28 if device == "cuda" else 26), device=device)
    target = torch.empty_like(source)
    copy = lambda: target.copy_(source)
    copy()
    if device == "cuda":
        milliseconds = statistics.median(_device_times(copy, 20, host=0.05))
    else:
        # the fastest: what others do on the same cores at times is not the limit's
        milliseconds = min(on_cpu([copy], 1)[0].device.median for _ in range(20))
    return 2 * source.numel() * source.element_size() / milliseconds
