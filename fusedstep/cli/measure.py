"""One row of `fusedstep bench`: ours and its peers are checked, started, and timed in turn."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import timing
from .contender import Contender, Made, dtype_of_all, limit_of, of_peer, ours, plain, started, stored
from .moved import bytes_moved
from .parameters import dtype_of, parameters
from .peer import INT8, Peer
from .peers import beside
from .right import Trial
from .works import DTYPES, Work

# peers may round each operation where ours rounds once
_PEERS_MAY_BE_OFF = 16


class Setup(NamedTuple):
    """How rows are measured: where, how often, in turn with which copy, and beside which peers."""

    device: str
    rounds: int = 20
    # None leaves the limit out
    copy: timing.Copy | None = None
    # parts of names; empty: all that start quickly; "all": all
    peers: tuple[str, ...] = ()

    def wants(self, name: str) -> bool:
        return not self.peers or "all" in self.peers or any(part in name for part in self.peers)


def measure(work: Work, setup: Setup) -> dict[str, Any]:
    """A row of the result; one that is wrong, or fails, has the reason and no times."""
    try:
        return _measure(work, setup)
    except Exception as error:  # one row that fails must not cost the others
        return {**_row(work), "failed": f"{type(error).__name__}: {_first_line(error)}"}
    finally:
        _clean_up(setup.device)


def _measure(work: Work, setup: Setup) -> dict[str, Any]:
    params = parameters(work, setup.device)
    if work.dtype not in DTYPES:
        work = work._replace(dtype=dtype_of(params))
    row = {**_row(work), "tensors": len(params), "parameters": sum(p.numel() for p in params)}
    trial = Trial(work, params)
    wrong = trial.disagreement(ours)
    if wrong:
        return {**row, "wrong": wrong}
    # kept for the next contender: some steps drop them
    grads = [p.grad for p in params]
    first = started("ours", functools.partial(ours, work, params), setup.device, trial.note)
    assert first is not None
    others, left_out = _others(work, params, setup, trial, grads)
    steps: list[timing.Step] = [c.step for c in (first, *others)]
    if setup.copy is not None:
        # memory may change its speed from minute to minute, which the limit must see as the steps do
        steps.append(setup.copy)
    times = (timing.on_cpu if setup.device == "cpu" else timing.on_gpu)(steps, setup.rounds)
    found = [_told(c, t) for c, t in zip((first, *others), times, strict=False)]
    row = {**row, "ours": found[0], "peers": dict(zip([c.name for c in others], found[1:], strict=True))}
    row["bytes"] = bytes_moved(work, params)
    if setup.copy is not None:
        row["copy"] = {**times[-1].raw(), "bytes": setup.copy.bytes}
        row["limit"] = row["bytes"] * row["copy"]["device"] / setup.copy.bytes
    return {**row, "left_out": left_out} if left_out else row


def _row(work: Work) -> dict[str, Any]:
    return {name: value for name, value in work._asdict().items() if name != "peers"}


def _told(contender: Contender, times: timing.Times) -> dict[str, Any]:
    note = {"note": contender.note} if contender.note else {}
    return {**times.raw(), "memory": contender.memory, **note}


def _others(
    work: Work, params: list[Any], setup: Setup, trial: Trial, grads: list[Any]
) -> tuple[list[Contender], dict[str, str]]:
    """The peers that could be started and are right, and why others are left out."""
    found: list[Contender] = []
    left_out: dict[str, str] = {}
    makes: dict[str, tuple[Callable[[], Made | None], Peer | None]] = {
        name: (functools.partial(ours, plain(work), params), None)
        for name in work.peers
        if name.startswith("fusedstep.")
    }
    for peer in beside(work.optimizer, setup.device, (*work.peers, *setup.peers)):
        makes[peer.name] = functools.partial(of_peer, peer, work, params), peer
    for name, (make, adapter) in makes.items():
        if not setup.wants(name):
            continue
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        try:
            note, wrong = _looked_at(adapter, work, params, trial)
            if wrong:
                left_out[name] = f"disagrees with float64: {wrong}"
                continue
            made = started(name, make, setup.device, note)
        except Exception as error:  # out of memory, a compiler that is missing: every package has its own
            left_out[name] = f"{type(error).__name__}: {_first_line(error)}"
            continue
        if made is not None:
            found.append(made)
        elif setup.peers:
            left_out[name] = "lacks one of these options, or stores states in another way"
    return found, left_out


def _looked_at(peer: Peer | None, work: Work, params: list[Any], trial: Trial) -> tuple[str, str]:
    """How a peer's work differs from ours, and how far it is off, if it is; None: our own class."""
    if peer is None:
        return "", Trial(plain(work), params).disagreement(ours)
    of_param = str(dtype_of_all(params)).removeprefix("torch.")
    its = stored(work, params)
    stores = peer.note(its, of_param)
    clips = limit_of(work) is not None and not peer.clips(work.optimizer)
    # in 8 bits every implementation rounds differently
    in_8_bits = its.states == INT8 and INT8 in peer.states
    wrong = "" if in_8_bits else trial.disagreement(functools.partial(of_peer, peer), _PEERS_MAY_BE_OFF)
    return ", ".join(filter(None, (stores, "with clip_grad_norm_" if clips else ""))), wrong


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _clean_up(device: str) -> None:
    """Free this row's memory and compiled code: torch compiles a function for eight shapes only."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
