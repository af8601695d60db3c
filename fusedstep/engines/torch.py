"""The engine for everything: a rule called with tensors, one parameter after the other, on any device."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import _scalars
from .._rules import bind
from . import FOLDS, FOUND, GRADIENT, GROUP, LIVE, OWN, SCALE, SKIP, SKIPPED, compute_dtype, is_traced

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
    sign, limit, limit_eps, decay, *options = table.hyper[table.rows[:, GROUP]].unbind(1)
    step = table.steps
    if first:
        skip = table.status.new_zeros(()) if amp.found_inf is None else amp.found_inf != 0
        if table.besides.guards:
            skip = skip + table.everyone[0][1].sum() != 0
        table.status[SKIP] = table.status[FOUND] = skip
        table.status[SCALE] = table.status.new_ones(()) if amp.scale is None else amp.scale
        table.status[SKIPPED] += table.status[SKIP]
        if table.counts:
            step += (table.rows[:, LIVE] * (table.status[SKIP] == 0)).to(step.dtype)
        scale = table.status[SCALE]
        gradient = sign / scale
        if table.clip is not None:
            gradient = gradient * _bound(table.clip)(_peers(table), scale, limit, limit_eps)
        made = (gradient, scale.to(sign.dtype).expand_as(sign), *_bound(_scalars.average)(decay))
    else:
        made = table.scalars[:, :OWN].unbind(1)
    sums = [table.sums[i] for i in table.rule.inputs]
    values = _bound(table.rule.scalars)(step.to(sign.dtype), *options, *sums)
    values = [v if isinstance(v, Tensor) else torch.full_like(sign, v) for v in (*made, *values)]
    table.scalars = torch.stack(values, 1)


def _peers(table) -> Tensor:
    """For every row, what was measured of all rows it is clipped with."""
    (measured, *_), segments = table.everyone
    fold = FOLDS[table.rule.measure.sums]
    totals = {s: fold(torch.where(segments == s, measured, 0)) for s in {*table.segments.tolist()}}
    return torch.stack([totals[s] for s in table.segments.tolist()])


@torch.no_grad()
def sweep(table, k: int, skips: bool) -> None:
    # numbers where the host has them: exactly what torch.optim computes with; but a trace would keep them
    on_host = type(table.scalars) is Tensor and table.scalars.is_cpu and not is_traced()
    rows = table.scalars.tolist() if on_host else table.scalars
    skip = table.status[SKIP] != 0 if skips else None
    sums = table.sums[table.rule.rows(k)]
    sums.zero_()
    for i, (entry, scalars) in enumerate(zip(table.entries, rows, strict=True)):
        a_pass = entry.rule.all_passes[k]
        results = () if entry.grad is None else _update(entry, a_pass, scalars, skip)
        for row, (kind, at) in enumerate(a_pass.summed if results else ()):
            term = results[at].to(sums.dtype)
            # of nothing there is no largest; no branch: ranks in one process may have other numbers of elements
            sums[row, i] = FOLDS[kind](term if kind == "+" else torch.cat((term.flatten(), term.new_zeros(1))))


def _update(entry, a_pass, scalars: Any, skip: Tensor | None) -> tuple:
    """Update one parameter; returns what the pass gives out."""
    dtype = compute_dtype(entry.dtypes)
    scalars = scalars.to(dtype).unbind() if isinstance(scalars, Tensor) else scalars
    stored = entry.here
    known = [_real(stored[letter]).to(dtype) for letter in a_pass.loads]
    g = a_pass.gradient
    if g >= 0:
        known.append(known[g])
        known[g] = known[g] * scalars[GRADIENT]
    loaded = len(known)
    for update, takes, columns in a_pass.calls:
        known += _bound(update)(*(known[i] for i in takes), *(scalars[i] for i in columns))
    for letter, at in a_pass.stores:
        tensor, new = stored[letter], known[loaded + at]
        if letter == "g" and a_pass.clears:
            # whether or not the step is taken, and though it may be expanded
            tensor.zero_()
            continue
        if letter == "g":
            # unscaled, which autograd is not told, as by torch's fused optimizers
            tensor = tensor.data
        target = _real(tensor)
        target.copy_(new if skip is None else torch.where(skip, target, new))
        if tensor.is_conj() or tensor.is_neg():
            # written to a copy so far
            tensor.copy_(torch.view_as_complex(target) if tensor.is_complex() else target)
    return tuple(known[loaded:])


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.resolve_neg()
