"""Training loops as users write them: the bodies of `loops.py`.

A body is a generator: its work between two yields is the user's own and is not timed; what it yields is called
and timed. A body that ends is a run: the mean over all its steps is one sample.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import fusedstep

from .shapes import MODELS
from .sharded import sharded
from .side import Side

Body = Iterator[Callable[[], object]]
# how many groups are added, and parameters unfrozen, before a loop starts over
_ADDED = 20


def _groups(params: list) -> list[dict[str, Any]]:
    return [{"params": [p]} for p in params]


def _halves(params: list) -> list[list]:
    return [params[: len(params) // 2], params[len(params) // 2 :]]


def _give(params: list, grads: Sequence[Tensor | None]) -> None:
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad


def steady(side: Side) -> Body:
    optimizer = side.optimizer(side.params())
    while True:
        yield optimizer.step


def bert(side: Side) -> Body:
    # one matrix is enough for tests, which have few parameters
    optimizer = side.optimizer(side.params(MODELS["bert-base"] if side.size > 100 else [(64, 64)]))
    while True:
        yield optimizer.step


def of_groups(side: Side) -> Body:
    optimizer = side.optimizer(_groups(side.params()))
    while True:
        yield optimizer.step


def fresh_gradients(side: Side) -> Body:
    params = side.params()
    optimizer = side.optimizer(params)
    while True:
        # the old ones are freed after the new ones are made, so all addresses change
        _give(params, [p.grad.clone() for p in params])
        yield optimizer.step


def zero_grad_each_step(side: Side) -> Body:
    params = side.params()
    optimizer, grads = side.optimizer(params), [p.grad for p in params]

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    while True:
        _give(params, [grad.clone() for grad in grads])
        yield step


def random_half_missing(side: Side) -> Body:
    params, chance = side.params(), random.Random(0)
    optimizer, grads = side.optimizer(params), [p.grad for p in params]
    yield optimizer.step
    while True:
        _give(params, [grad if chance.random() < 0.5 else None for grad in grads])
        yield optimizer.step


def one_other_missing(side: Side) -> Body:
    params = side.params()
    optimizer, grads = side.optimizer(params), [p.grad for p in params]
    yield optimizer.step
    while True:
        for i in range(len(params)):
            _give(params, [*grads[:i], None, *grads[i + 1 :]])
            yield optimizer.step


def halves_in_turn(side: Side) -> Body:
    """Like the two players of a game, or experts, under one optimizer."""
    params = side.params()
    optimizer, grads = side.optimizer(params), [p.grad for p in params]
    yield optimizer.step
    while True:
        for half in _halves([*range(len(params))]):
            _give(params, [grad if i in half else None for i, grad in enumerate(grads)])
            yield optimizer.step


def first_gradients_one_by_one(side: Side) -> Body:
    params = side.params()
    optimizer, grads = side.optimizer(params), [p.grad for p in params]
    _give(params, [None] * len(params))
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
        yield optimizer.step


def unfrozen_one_by_one(side: Side) -> Body:
    params = side.params()
    optimizer, grads = side.optimizer(params), [p.grad for p in params]
    frozen = [*range(len(params))][-_ADDED:]
    for i in frozen:
        params[i].grad = None
        params[i].requires_grad_(False)
    optimizer.step()
    for i in frozen:
        params[i].requires_grad_(True)
        params[i].grad = grads[i]
        yield optimizer.step


def half_frozen(side: Side) -> Body:
    params = side.params()
    optimizer = side.optimizer(params)
    for p in _halves(params)[1]:
        p.grad = None
        p.requires_grad_(False)
    while True:
        yield optimizer.step


def first_step(side: Side) -> Body:
    """An optimizer that is constructed and takes one step, in a process that has seen others."""
    params = side.params()
    while True:
        yield lambda: side.optimizer(params).step()


def _scheduled(side: Side, params: Any, **options: Any) -> Body:
    optimizer = side.optimizer(params, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.999**step)

    def step() -> None:
        optimizer.step()
        scheduler.step()

    while True:
        yield step


def scheduler_of_one_group(side: Side) -> Body:
    return _scheduled(side, side.params())


def scheduler_of_groups(side: Side) -> Body:
    return _scheduled(side, _groups(side.params()))


def scheduler_of_tensor_lr(side: Side) -> Body:
    return _scheduled(side, side.params(), lr=torch.tensor(1e-3, device=side.device))


def lr_set_in_groups(side: Side) -> Body:
    optimizer, lr = side.optimizer(_groups(side.params())), 1e-3
    while True:
        lr *= 0.999
        for group in optimizer.param_groups:
            group["lr"] = lr
        yield optimizer.step


def several_options_set(side: Side) -> Body:
    optimizer, lr = side.optimizer(side.params()), 1e-3
    while True:
        lr *= 0.999
        optimizer.param_groups[0].update(lr=lr, weight_decay=lr, betas=(0.9 - lr, 0.999 - lr))
        yield optimizer.step


def tensor_lr(side: Side) -> Body:
    lr = torch.tensor(1e-3, device=side.device)
    optimizer = side.optimizer(side.params(), lr=lr)
    while True:
        lr.mul_(0.999)
        yield optimizer.step


def step_hook(side: Side) -> Body:
    optimizer = side.optimizer(side.params())
    optimizer.register_step_post_hook(lambda *_: None)
    while True:
        yield optimizer.step


def closure(side: Side) -> Body:
    optimizer = side.optimizer(side.params())
    while True:
        yield lambda: optimizer.step(lambda: 1.0)


class _Parameter(torch.nn.Parameter):
    """A parameter of a library that tells its parameters apart by their class."""


class _Overriding(torch.Tensor):
    """A tensor that sees every function which is called with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def parameter_subclass(side: Side) -> Body:
    optimizer = side.optimizer(side.params(kind=_Parameter))
    while True:
        yield optimizer.step


def tensor_subclass(side: Side) -> Body:
    params = side.params(kind=lambda values: torch.nn.Parameter(values.as_subclass(_Overriding)))
    optimizer = side.optimizer(params)
    while True:
        yield optimizer.step


def six_dimensions(side: Side) -> Body:
    optimizer = side.optimizer(side.params([(2,) * 6] * side.size))
    while True:
        yield optimizer.step


def several_dtypes(side: Side) -> Body:
    params = side.params()
    for p in _halves(params)[1]:
        grad, p.grad = p.grad, None
        p.data = p.data.bfloat16()
        p.grad = grad.bfloat16()
    optimizer = side.optimizer(params)
    while True:
        yield optimizer.step


def group_added(side: Side) -> Body:
    params = side.params()
    first = max(1, len(params) - _ADDED)
    optimizer = side.optimizer(params[:first])
    optimizer.step()
    optimizer.step()

    def step(p: Any) -> None:
        optimizer.add_param_group({"params": [p]})
        optimizer.step()

    for p in params[first:]:
        yield functools.partial(step, p)


def state_loaded(side: Side) -> Body:
    optimizer = side.optimizer(side.params())
    optimizer.step()

    def step() -> None:
        optimizer.load_state_dict(saved)
        optimizer.step()

    while True:
        found = optimizer.state_dict()
        saved = {
            "param_groups": found["param_groups"],
            "state": {i: {name: t.clone() for name, t in s.items()} for i, s in found["state"].items()},
        }
        yield step


def state_saved(side: Side) -> Body:
    optimizer = side.optimizer(side.params())

    def step() -> None:
        optimizer.step()
        optimizer.state_dict()

    while True:
        yield step


def parameters_moved(side: Side) -> Body:
    params = side.params()
    optimizer = side.optimizer(params)
    while True:
        for p, values in zip(params, [p.detach().clone() for p in params], strict=True):
            p.data = values
        yield optimizer.step


def states_replaced(side: Side) -> Body:
    params = side.params()
    optimizer = side.optimizer(params)
    yield optimizer.step
    while True:
        for p in params:
            optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].clone()
        yield optimizer.step


def transposed_gradients(side: Side) -> Body:
    params = side.params([(8, 8)] * side.size)
    optimizer = side.optimizer(params)
    for p in params:
        p.grad = p.grad.t()
    while True:
        yield optimizer.step


def layout_changes(side: Side) -> Body:
    """Gradients that have another layout than their parameters at every other step."""
    params = side.params([(8, 8)] * side.size)
    optimizer, grads = side.optimizer(params), [p.grad for p in params]
    while True:
        for lying in (grads, [grad.t().contiguous().t() for grad in grads]):
            _give(params, lying)
            yield optimizer.step


def statistics_each_tenth(side: Side) -> Body:
    optimizer = side.optimizer(side.params())
    optimizer.step()
    for i in range(10):
        optimizer.collect_statistics = i == 0
        yield optimizer.step


def in_backward(side: Side, bucket_bytes: int | None) -> Body:
    """Every parameter gets its gradient from a loss of its own; ours releases gradients if given buckets."""
    params = side.params()
    optimizer = side.optimizer(params)
    if side.is_ours and bucket_bytes is not None:
        fusedstep.release_gradients(torch.nn.ParameterList(params), optimizer, bucket_bytes)
    while True:
        losses = [p.sum() for p in params]

        def iteration(losses: list[Tensor] = losses) -> None:
            torch.autograd.backward(losses)
            optimizer.step()
            optimizer.zero_grad()

        yield iteration


def clipped(side: Side) -> Body:
    params = side.params()
    if side.is_ours:
        step = side.optimizer(params, max_grad_norm=1.0).step
    else:
        optimizer = side.optimizer(params)

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()

    while True:
        yield step


def scaled(side: Side) -> Body:
    optimizer = side.optimizer(side.params())
    scaler = (fusedstep.GradScaler if side.is_ours else torch.amp.GradScaler)(side.device, init_scale=1.0)
    scaler.scale(torch.ones((), device=side.device))

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    while True:
        yield step


def dtensors(side: Side) -> Body:
    params = [*map(sharded, side.params())]
    optimizer = side.optimizer(params)
    while True:
        yield optimizer.step
