"""`fusedstep bench --only host`: the host time of a step in the loops of `loops.py`, ours and torch's."""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table

from . import noise
from .loops import LOOPS, Call, Loop
from .side import Side

# how often both take turns: a host has slow and fast seconds, which both must see
_TURNS = 6
# the first steps of a turn find the caches of the other side, and are not counted
_WARM_UP = 2
# seconds after which a turn ends, even if it has not taken all its samples
_LONGEST_TURN = 0.2
# steps before the clock starts, after which both must have the same parameters
_CHECKED = 5
# on a CPU: torch's fused step hands each tensor to all threads, which takes 1.4 ms with one, 1.9 ms with two,
# and up to seconds if other processes use the cores
_THREADS = 1


class Timed(NamedTuple):
    """Median and quartiles, in microseconds."""

    median: float
    low: float
    high: float
    samples: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Timed:
        found = [1e6 * s for s in sorted(seconds)]
        low, high = (found[len(found) * quarter // 4] for quarter in (1, 3))
        return Timed(statistics.median(found), low, high, len(found))


class Runner:
    """One side of a loop, as a source of samples."""

    def __init__(self, loop: Loop, side: Side) -> None:
        self.loop, self.side = loop, side
        self._body = loop.body(side)
        self._waits: Callable[[], object] = torch.cuda.synchronize if side.device == "cuda" else lambda: None

    def step(self) -> float | None:
        """Seconds that one step took; None where a run has ended."""
        call = next(self._body, None)
        if call is None:
            return None
        self._waits()
        begin = time.perf_counter()
        call()
        if self.loop.waits:
            self._waits()
        return time.perf_counter() - begin

    def samples(self) -> Iterator[float]:
        """Seconds of every step; of runs that end the mean, because their steps differ."""
        if not self.loop.ends:
            while True:
                yield self.step() or 0.0
        while True:
            self._body = self.loop.body(self.side)
            run = [*iter(self.step, None)]
            yield sum(filter(None, run)) / len(run)

    def turn(self, samples: int) -> list[float]:
        """This many samples, or as many as there is time for."""
        until, found = time.perf_counter() + _LONGEST_TURN, []
        warm_up = 0 if self.loop.ends else _WARM_UP
        for seconds in self.samples():
            found.append(seconds)
            if len(found) == warm_up + samples or time.perf_counter() > until:
                # if steps are so long, caches do not matter
                return found[warm_up:] or found[-1:]
        return found


def made_by(call: Call, loop: Loop, device: str) -> Side | None:
    """A side of a loop; None if its package is not installed."""
    name, options = call
    module, _, cls = name.rpartition(".")
    try:
        return Side(getattr(importlib.import_module(module), cls), options, device, loop.size)
    except ImportError:
        return None


def measure(loop: Loop, device: str, rounds: int) -> dict[str, Any]:
    """Both sides in turns, with about six times `rounds` samples of each."""
    threads = torch.get_num_threads()
    if not loop.waits:
        torch.set_num_threads(_THREADS)
    try:
        return {**_measure(loop, device, rounds), "threads": torch.get_num_threads()}
    finally:
        torch.set_num_threads(threads)


def _measure(loop: Loop, device: str, rounds: int) -> dict[str, Any]:
    ours, peer = (made_by(call, loop, device) for call in (loop.ours, loop.peer))
    assert ours is not None
    runners, note = [Runner(loop, ours)], "no peer"
    _warm_up(runners[0])
    if peer is not None:
        usual = loop.peer == Loop("", loop.body).peer
        runners, note = [*runners, Runner(loop, peer)], "" if usual else f"beside {_text(loop.peer)}"
        try:
            _warm_up(runners[1])
        except RuntimeError as error:
            # torch's fused optimizers do not take every layout
            runners, note = runners[:1], f"refused: {str(error).splitlines()[0]}"
        else:
            _check(loop, ours.made, peer.made)
    times: list[list[float]] = [[] for _ in runners]
    for _ in range(_TURNS):
        for runner, found in zip(runners, times, strict=True):
            found += runner.turn(rounds)
    return _result(loop, note, *map(Timed.of, times))


def _warm_up(runner: Runner) -> None:
    """A few steps, or one run: everything is compiled and allocated before the clock starts."""
    for _ in range(1 if runner.loop.ends else _CHECKED):
        next(runner.samples())


def _check(loop: Loop, ours: list[Any], peers: list[Any]) -> None:
    """No time is reported for a wrong result."""
    for p, q in zip(ours, peers, strict=True):
        error = float((p.detach() - q.detach()).abs().max())
        # some loops take hundreds of steps, in each of which `1 - lr * weight_decay` is rounded to float32
        if not error <= 1e-4 * float(q.detach().abs().max()):
            raise RuntimeError(f"{loop.name!r} is off by {error} and is not timed; please report this")


def _result(loop: Loop, note: str, ours: Timed, peer: Timed | None = None) -> dict[str, Any]:
    return {
        "loop": loop.name,
        "timed": loop.timed,
        "parameters": loop.size,
        "ours": ours._asdict(),
        "peer": None if peer is None else peer._asdict(),
        "peer_name": _text(loop.peer),
        "ratio": None if peer is None else peer.median / ours.median,
        "target": loop.target,
        "note": note,
    }


def _text(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{name}={value}' for name, value in call[1].items())})"


def named(part: str, device: str) -> list[Loop]:
    return [loop for loop in LOOPS if part in loop.name]


def run(loops: Iterable[Loop], device: str, rounds: int) -> Iterator[dict[str, Any]]:
    for loop in loops:
        yield measure(loop, device, rounds)
        # garbage of this loop must not cost time in the next
        gc.collect()


def table(results: list[dict[str, Any]], device: str) -> Table:
    view = Table(
        title=f"host time of a step in loops, {device}: microseconds, medians; ±: quartiles; ratio: peer / ours"
    )
    for column in ("loop", "timed", "ours", "±", "torch fused", "±", "ratio", "target", ""):
        view.add_column(column, justify="left" if column in ("loop", "timed", "") else "right")
    for r in results:
        sides = [cell for side in (r["ours"], r["peer"]) for cell in _cells(side)]
        ratio = "" if r["ratio"] is None else f"{r['ratio']:.2f}"
        target = "" if r["target"] is None else f"{r['target']:g}"
        view.add_row(
            r["loop"], r["timed"], *sides, ratio, target, "; ".join(filter(None, (verdict(r), r["note"])))
        )
    return view


def _cells(side: dict[str, Any] | None) -> list[str]:
    return ["", ""] if side is None else [f"{side['median']:.1f}", noise.text_of(side)]


def verdict(result: dict[str, Any]) -> str:
    if result["ratio"] is None or result["target"] is None:
        return ""
    return "met" if result["ratio"] >= result["target"] else "below"
