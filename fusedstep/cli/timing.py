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
    """A step with preparation, which is not timed on the host."""

    before: Step
    step: Step

    def __call__(self) -> None:
        self.before()
        self.step()


class Copy:
    """A large copy: a step like any other, whose speed is the limit of an update that takes turns with it.

    On a CPU in place. A copy to other memory reads that first, because caches hold whole lines, and so moves
    half as much again; an update writes only what it has read.
    """

    def __init__(self, device: str, numel: int | None = None) -> None:
        self._source = torch.randn(numel or _elements(device), device=device)
        self._target = None if device == "cpu" else torch.empty_like(self._source)
        self()

    def __call__(self) -> None:
        if self._target is None:
            self._source.mul_(1.0)
        else:
            self._target.copy_(self._source)

    @property
    def bytes(self) -> int:
        """Read and written."""
        return 2 * self._source.nbytes


def _elements(device: str) -> int:
    """How many float32: on a CPU mostly eight times the size of its caches, on a GPU a part of what is free."""
    if device == "cpu":
        return 1 << 26
    free, _ = torch.cuda.mem_get_info()
    return min(1 << 28, max(1 << 20, free // 128))


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

    The last includes preparation of the step, if it has any, which does no more than set gradients.
    """

    device: Spread
    host: Spread
    wall: Spread

    def raw(self) -> dict[str, Any]:
        """Medians by their names, and quartiles, which show how far samples are apart."""
        medians = {kind: spread.median for kind, spread in self._asdict().items()}
        quartiles = {kind: [spread.low, spread.high] for kind, spread in self._asdict().items()}
        return {**medians, "quartiles": quartiles, "samples": self.device.samples}


# seconds after which a slow step has had its share: of all rounds on a CPU, of a turn on a GPU
_LONGEST = 4.0
_LONGEST_TURN = 0.25
_FEWEST = 3
# milliseconds of a step on a CPU that may find its tensors in the caches
_SHORT = 20.0


def on_cpu(steps: Sequence[Step], rounds: int) -> list[Times]:
    """Time the steps in turn, so that all see the same noise; a slow step not in every round.

    A copy among them must be the last.
    """
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
            if isinstance(step, Copy) and i + 1 < rounds:
                _fill_caches(steps[:k], samples)
    return [Times(*[Spread.of(found)] * 3) for found in samples]


def _fill_caches(steps: Sequence[Step], samples: list[list[float]]) -> None:
    """Take every short step once, untimed: a copy has replaced in the caches what they find there otherwise."""
    for step, found in zip(steps, samples, strict=False):
        if min(found) < _SHORT:
            step()


# how often all steps take turns on a GPU: its host has slow and fast seconds, which all must see
_TURNS = 6
# on the host, the first samples of a turn find the caches of another step, and are not counted
_WARM_UP = 2


def on_gpu(steps: Sequence[Step], rounds: int) -> list[Times]:
    """Time a few of each step in turn, about three times `rounds` in all; fewer of a slow step."""
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
    """About what a step takes, until the device is done."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _host_times(step: Step, rounds: int) -> list[float]:
    times, (before, step) = [], _parts(step)
    # if a step is so slow that a turn has only one, caches do not matter
    warm_up = _WARM_UP if rounds > 1 else 0
    for _ in range(warm_up + rounds):
        before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begin))
    return times[warm_up:]


def _device_times(step: Step, rounds: int, host: float) -> list[float]:
    """Milliseconds with the queue filled before it starts, so that the host cannot hold the device up."""
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
    """Milliseconds of one of several steps in a row, as in a loop of nothing but steps."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(rounds):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin) / rounds


def copy_bandwidth(device: str, numel: int) -> float:
    """Bytes read and written per millisecond by a large copy on this device, now."""
    copy = Copy(device, numel)
    if device == "cuda":
        return copy.bytes / statistics.median(_device_times(copy, 20, host=0.05))
    # the fastest: other processes on the same cores do not change what the memory can do
    return copy.bytes / min(on_cpu([copy], 1)[0].device.median for _ in range(20))
