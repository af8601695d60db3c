"""One side of a row: a step, ours or a peer's, over parameters that all sides share."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fusedstep
from fusedstep import functional

from .parameters import groups
from .peer import AS_PARAMETERS, Peer, Stored
from .shapes import with_gradients
from .sharded import sharded
from .timing import Prepared, Step
from .works import Work

LR = 1e-3


class Made(NamedTuple):
    """What was constructed, and its step."""

    holder: Any
    step: Step


class Contender(NamedTuple):
    """A step that is ready to be timed, what it allocated, and a note."""

    name: str
    step: Step
    # on a GPU the peak of constructing it and two steps, on a CPU what its states take
    memory: int | None
    note: str = ""


def known(cls: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a class has: the others are about what happens around a step."""
    taken = inspect.signature(cls).parameters
    return {name: value for name, value in options.items() if name in taken}


def ours(work: Work, params: list[Any]) -> Made:
    """Our optimizer, or the function that is one."""
    if work.options.get("sharded"):
        params = [*map(sharded, params)]
    if work.optimizer == "functional.adamw_":
        lists = params, [p.grad for p in params], *([torch.zeros_like(p) for p in params] for _ in range(2))
        count = torch.ones(1, device=params[0].device)
        return Made(lists[2:], functools.partial(functional.adamw_, *lists, step=count))
    cls = getattr(fusedstep, work.optimizer)
    options = {"lr": LR, "state_dtype": work.states, **known(cls, work.options)}
    optimizer = cls(groups(work, params), **options)
    return Made(optimizer, _around(optimizer, optimizer.step, params, work))


def of_peer(peer: Peer, work: Work, params: list[Any]) -> Made | None:
    """A peer made from our options; None if it lacks one of them."""
    arguments = peer.arguments(work.optimizer, {"lr": LR, **work.options}, stored(work, params))
    if arguments is None:
        return None
    if work.options.get("sharded"):
        params = [*map(sharded, params)]
    made = [{**group, **peer.group} for group in groups(work, params)]
    optimizer = peer.made(peer.cls(work.optimizer), made, arguments)
    step = peer.step(optimizer)
    limit = limit_of(work)
    if limit is not None and not peer.clips(work.optimizer) and "scaler" not in work.options:
        step = _clipped(step, params, limit)
    return Made(optimizer, _around(optimizer, step, params, work))


def plain(work: Work) -> Work:
    """The work of our class as its own peer: without options or, if they shard it, only without sharding."""
    options = dict(work.options)
    kept = options if options.pop("sharded", False) else {}
    return work._replace(optimizer=work.optimizer.replace("functional.adamw_", "AdamW"), options=kept)


def dtype_of_all(params: list[Any]) -> torch.dtype | str:
    return params[0].dtype if len({p.dtype for p in params}) == 1 else AS_PARAMETERS


def stored(work: Work, params: list[Any]) -> Stored:
    states = work.states or dtype_of_all(params)
    return Stored(str(states).removeprefix("torch."), work.options.get("master"))


def limit_of(work: Work) -> float | None:
    """The limit of the norm of gradients; some classes have one by default."""
    if "max_grad_norm" in work.options or work.optimizer == "functional.adamw_":
        return work.options.get("max_grad_norm")
    return inspect.signature(getattr(fusedstep, work.optimizer)).parameters["max_grad_norm"].default


def _clipped(step: Step, params: list[Any], limit: float) -> Step:
    def both() -> None:
        torch.nn.utils.clip_grad_norm_(params, limit)
        step()

    return both


def _around(optimizer: Any, step: Step, params: list[Any], work: Work) -> Step:
    """The step, with what its row has around it: scales, or gradients that come and go."""
    if "grad_scale" in work.options:
        # set as torch's scaler sets them around its call
        numbers = work.options["grad_scale"], 0.0
        optimizer.grad_scale, optimizer.found_inf = (
            torch.tensor(number, device=params[0].device) for number in numbers
        )
    if "scaler" in work.options:
        return _whole(optimizer, params, work.options["max_grad_norm"])
    chosen = with_gradients(work.model)
    if chosen is None:
        return step
    grads = [p.grad for p in params]

    def before() -> None:
        for p, grad, has in zip(params, grads, next(chosen), strict=True):
            p.grad = grad if has else None

    return Prepared(before, step)


def _whole(optimizer: Any, params: list[Any], limit: float) -> Prepared:
    """Everything between a backward and the next: one step with ours, several calls with others."""
    is_ours = isinstance(optimizer, fusedstep.Optimizer)
    device, grads = params[0].device, [p.grad for p in params]
    scaler = (fusedstep.GradScaler if is_ours else torch.amp.GradScaler)(device.type, init_scale=1024.0)
    scaler.scale(torch.ones((), device=device))

    def before() -> None:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad

    def step() -> None:
        if is_ours:
            scaler.step(optimizer, zero_grad=True)
        else:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, limit)
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()

    return Prepared(before, step)


def started(name: str, make: Callable[[], Made | None], device: str, note: str = "") -> Contender | None:
    """A contender after two steps: everything is compiled and allocated before any clock starts."""
    gc.collect()
    before = 0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    found = make()
    if found is None:
        return None
    for _ in range(2):
        found.step()
    if device == "cuda":
        torch.cuda.synchronize()
        return Contender(name, found.step, torch.cuda.max_memory_allocated() - before, note)
    return Contender(name, found.step, held(found.holder), note)


def held(holder: Any) -> int | None:
    """Bytes of all tensors that an optimizer, or some, keep for their parameters, each piece of memory once."""
    if isinstance(holder, list) and all(isinstance(each, torch.optim.Optimizer) for each in holder):
        return sum(held(each) or 0 for each in holder)
    if not isinstance(holder, torch.optim.Optimizer):
        return None
    pieces = {}
    for state in holder.state.values():
        for tensor in _tensors(state.values() if isinstance(state, dict) else [state]):
            memory = tensor.untyped_storage()
            pieces[memory.data_ptr()] = memory.nbytes()
    return sum(pieces.values())


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """All tensors in these values, and those that a wrapper is made of, such as codes and scales."""
    found = []
    for value in values:
        if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            found += _tensors(getattr(value, name) for name in names)
        elif isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found
