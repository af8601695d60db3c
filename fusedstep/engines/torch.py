"""The engine for everything: a rule called with tensors, one parameter after the other, on any device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import _scalars
from .._rules import bind
from . import GROUP, LIVE, compute_dtype

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
    "cos": torch.cos,
}
_bound = functools.cache(lambda rule: bind(rule, _VOCABULARY))


def unavailable(device_type: str) -> str | None:
    return None


def compile(table) -> None:
    pass


@torch.no_grad()
def prepare(table, amp, first: bool) -> None:
    if first and table.counts:
        live = table.rows[:, LIVE]
        taken = live if amp.found_inf is None else live * (amp.found_inf == 0)
        table.steps += taken.to(table.steps.dtype)
    sign, limit, limit_eps, *options = table.hyper[table.rows[:, GROUP]].unbind(1)
    gradient = sign if amp.scale is None else sign / amp.scale
    if table.clips:
        squares = _peers(table) if amp.scale is None else _peers(table) / amp.scale.square()
        gradient = gradient * _bound(_scalars.clip)(squares, limit, limit_eps)
    values = _bound(table.rule.scalars)(table.steps.to(sign.dtype), *options, *table.sums[1:])
    values = [v if isinstance(v, Tensor) else torch.full_like(sign, v) for v in (gradient, *values)]
    table.scalars = torch.stack(values, 1)


def _peers(table) -> Tensor:
    """For every row, the sum of squares over all rows it is clipped with."""
    norms, segments = table.everyone
    totals = {s: torch.where(segments == s, norms, 0).sum() for s in {*table.segments.tolist()}}
    return torch.stack([totals[s] for s in table.segments.tolist()])


@torch.no_grad()
def sweep(table, k: int, amp) -> None:
    # numbers where the host has them: exactly what torch.optim computes with
    on_host = type(table.scalars) is Tensor and table.scalars.is_cpu
    rows = table.scalars.tolist() if on_host else table.scalars
    table.sums[table.columns(k)] = 0
    for i, (entry, scalars) in enumerate(zip(table.entries, rows, strict=True)):
        terms = () if entry.grad is None else _update(entry, entry.rule.all_passes[k], scalars, amp)
        for sums, term in zip(table.sums[table.columns(k)], terms, strict=False):
            total = term.to(sums.dtype).sum()
            # of a sharded tensor, over all its shards
            sums[i] = total.full_tensor() if hasattr(total, "full_tensor") else total


def _update(entry, a_pass, scalars: list[float] | Tensor, amp) -> tuple:
    """Update one parameter; returns the terms to be summed over it."""
    dtype = compute_dtype(entry.dtypes)
    scale, *rest = scalars.to(dtype).unbind() if isinstance(scalars, Tensor) else scalars
    stored = {"p": entry.param, "g": entry.grad}
    stored |= {letter: entry.state[name] for letter, name in entry.rule.states.items()}
    values = [_real(stored[letter]).to(dtype) for letter in a_pass.reads]
    if "g" in a_pass.reads and not a_pass.raw:
        i = a_pass.reads.index("g")
        values[i] = values[i] * scale
    results = _bound(a_pass.update)(*values, *rest[: a_pass.scalar_count])
    written = len(a_pass.writes)
    for letter, new in zip(a_pass.writes, results[:written], strict=True):
        target = _real(stored[letter])
        target.copy_(new if amp.found_inf is None else torch.where(amp.found_inf == 0, new, target))
        if stored[letter].is_conj() or stored[letter].is_neg():
            # written to a copy so far
            stored[letter].copy_(torch.view_as_complex(target) if stored[letter].is_complex() else target)
    return results[written:]


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.resolve_neg()
