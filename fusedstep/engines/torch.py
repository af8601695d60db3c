"""The engine for everything: a rule called with tensors, one parameter after the other, on any device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .._rules import bind
from . import compute_dtype

BY_ADDRESS = False


def _fma(a, b, c):
    # add with a number rounds once on CPU, as torch.optim's own updates do
    return torch.add(c, b, alpha=a) if isinstance(a, float) else torch.addcmul(c, b, a)


def _where(condition, a, b):
    return torch.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b


_VOCABULARY = {
    "fma": _fma,
    "where": _where,
    "div": torch.div,
    "maximum": torch.maximum,
    "sqrt": torch.sqrt,
    "power": torch.pow,
}
_bound = functools.cache(lambda rule: bind(rule, _VOCABULARY))


def unavailable(device_type: str) -> str | None:
    return None


def compile(table) -> None:
    pass


@torch.no_grad()
def step(table, amp) -> None:
    rows = torch.from_numpy(table.host_rows[:, :2].copy()).to(table.device)
    live, group = rows.unbind(1)
    taken = live if amp.found_inf is None else live * (amp.found_inf == 0)
    table.steps += taken.to(table.steps.dtype)
    sign, *hyper = table.hyper[group].unbind(1)
    scale = sign if amp.scale is None else sign / amp.scale
    scalars = torch.stack((scale, *_bound(table.rule.scalars)(table.steps.to(scale.dtype), *hyper)), 1)
    # numbers where the host has them: exactly what torch.optim computes with
    on_host = type(scalars) is Tensor and scalars.is_cpu
    entries = zip(table.entries, scalars.tolist() if on_host else scalars, strict=True)
    for entry, row in entries:
        if entry.param.grad is not None:
            _update(entry, row, amp.found_inf)


def _update(entry, scalars: list[float] | Tensor, found_inf: Tensor | None) -> None:
    dtype = compute_dtype(entry.dtypes)
    scale, *rest = scalars.to(dtype).unbind() if isinstance(scalars, Tensor) else scalars
    targets = [_real(t) for t in (entry.param, *(entry.state[name] for name in entry.rule.states))]
    p, *states = (t.to(dtype) for t in targets)
    g = _real(entry.param.grad).to(dtype) * scale
    results = _bound(entry.rule.update)(p, g, *states, *rest[: entry.rule.scalar_count])
    for target, new in zip(targets, results, strict=True):
        target.copy_(new if found_inf is None else torch.where(found_inf == 0, new, target))


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.resolve_neg()
