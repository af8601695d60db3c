"""How numbers are judged: |ours - f64| <= 2 |theirs - f64| + tiny, over all parameters, and over each state.

Theirs is torch.optim's in the same dtype, where torch has the optimizer and computes in float32; else the
reference itself, computed in float64 and rounded to what is stored after every step. `tiny` is a few roundings of
what is stored, so that the others being right by luck is no failure, and of what all steps together moved.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .combinations import Case
from .exact import EMA_DECAY, Side
from .ours import Ours
from .problem import STEPS, Problem, real
from .references import Reference

# roundings of what is stored, by its bytes: sixteen bits are rounded at every step, and no norm is exact
_STORED = {2: 8, 4: 4, 8: 32}
# roundings of an update
_COMPUTED = 64
# what 8 bits of states may cost, of the way that parameters went
_INT8 = 0.2
# of a rest of 8 bits, beside 8 bits of a bfloat16
_SPLIT8 = 2.0**-15


class Both(NamedTuple):
    """What a case is compared with: the reference in float64, and theirs."""

    exact: Side
    theirs: Side


_known: dict[tuple, Both] = {}
# what a reference knows of
_SEEN = ("storage", "clip", "groups", "grads", "rate")


def both_of(problem: Problem) -> Both:
    """References, once for all cases that differ in what these do not know of."""
    case = problem.case
    levels = tuple(case.feature(name) for name in _SEEN)
    key = str(case.subject), case.dtype, case.feature("skip") == "no", *levels
    if key not in _known:
        if len(_known) > 500:
            _known.clear()
        _known[key] = Both(exact := Side(problem, torch.float64), _theirs(problem, exact))
    return _known[key]


def _theirs(problem: Problem, exact: Side) -> Side:
    case, wide = problem.case, real_dtype(problem.dtype)
    is_torchs = not issubclass(case.subject.reference, Reference)
    if is_torchs and case.dtype in ("float32", "complex64") and case.feature("storage") == "plain":
        return Side(problem, torch.float32)
    if wide == torch.float64:
        return exact
    has_master = case.feature("storage") in ("split", "split8", "master")
    return Side(problem, torch.float64, torch.float32 if has_master else wide, problem.state_dtype or wide)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    return real(torch.empty(0, dtype=dtype)).dtype


def complaints(case: Case) -> list[str]:
    """What is wrong with a combination, in words and numbers; nothing, if all is right."""
    problem = Problem(case)
    both = both_of(problem)
    ours = Ours(problem)
    judge = _Judge(problem, both, ours)
    return [*ours.complaints, *filter(None, judge.all())]


class _Judge:
    def __init__(self, problem: Problem, both: Both, ours: Ours) -> None:
        self.problem, self.case, self.ours = problem, problem.case, ours
        self.exact, self.theirs = both
        self.dtype = real_dtype(problem.dtype)
        self.storage = self.case.feature("storage")
        is_wide = self.dtype == torch.float64
        self.eps = torch.finfo(torch.float64 if is_wide else torch.float32).eps
        # a rounding may turn a sign: what counts are most elements
        self.most = self.case.subject.jumps and not is_wide

    def all(self) -> Any:
        yield self._params()
        if self.storage not in ("int8", "stochastic"):
            yield from self._states()
        if self.case.feature("ema") == "yes":
            yield self._averages()
        if self.case.feature("statistics") == "yes":
            yield from self._statistics()
        if hasattr(self.ours.optimizer, "eval"):
            yield self._shown()

    def _compare(self, what: str, ours: Any, theirs: Any, exact: Any, tiny: float) -> str | None:
        ours, theirs, exact = map(_flat, (ours, theirs, exact))
        apart = (ours - exact).abs()
        if not bool(torch.isfinite(ours).all()) or not bool(torch.isfinite(exact).all()):
            return f"{what}: {int((~torch.isfinite(ours)).sum())} numbers are NaN or infinite"
        off = float(apart.quantile(0.9) if self.most and len(apart) > 20 else apart.max())
        allowed = 2 * float((theirs - exact).abs().max()) + tiny
        if off <= allowed:
            return None
        return f"{what}: off by {off:.3g}, {allowed:.3g} is allowed, numbers are up to {float(exact.abs().max()):.3g}"

    def _params(self) -> str | None:
        ours, theirs, exact = self.ours.params, self.theirs.params, self.exact.params
        largest, path = float(_flat(exact).abs().max()), float(_flat(self.exact.path).max())
        computed = _COMPUTED * self.eps * path
        if self.storage == "int8":
            return self._close_in_sum(ours, exact)
        if self.storage == "stochastic":
            return self._unbiased(ours, exact)
        if self.storage == "plain":
            tiny = _STORED[self.dtype.itemsize] * torch.finfo(self.dtype).eps * largest
        else:
            # rounded once, at the end
            step = _SPLIT8 if self.storage == "split8" else self.eps
            tiny = (0.51 * torch.finfo(self.dtype).eps + STEPS * step) * largest
        return self._compare("parameters", ours, theirs, exact, tiny + computed)

    def _close_in_sum(self, ours: Any, exact: Any) -> str | None:
        off = float((_flat(ours) - _flat(exact)).norm())
        way = float(_flat(self.exact.path).norm())
        rounded = STEPS * torch.finfo(self.dtype).eps * float(_flat(exact).norm())
        if off <= _INT8 * way + rounded:
            return None
        return f"parameters: off by {off / way:.3g} of the way they went, {_INT8} is allowed with int8"

    def _unbiased(self, ours: Any, exact: Any) -> str | None:
        ours, exact = _flat(ours), _flat(exact)
        unit = torch.finfo(self.dtype).eps * exact.abs().clamp(min=torch.finfo(self.dtype).tiny)
        off = (ours - exact) / unit
        off = off[exact != 0]
        mean, spread = float(off.clamp(-50, 50).mean()), float(off.clamp(-50, 50).std())
        limit = 6 * max(spread, 1.0) / math.sqrt(len(off))
        if abs(mean) > limit:
            return f"parameters: {mean:.3g} roundings off in the mean, {limit:.3g} is allowed at random"
        if float(off.abs().quantile(0.9)) > 4 * STEPS:
            return f"parameters: {float(off.abs().quantile(0.9)):.3g} roundings off, {4 * STEPS} are allowed"
        return None

    def _states(self) -> Any:
        exact, theirs, ours = self.exact.optimizer, self.theirs.optimizer, self.ours.optimizer
        names = {name for p in self.exact.params for name in exact.state[p]} - {"step"}
        for name in sorted(names):
            found = [
                (ours.state[p][name], theirs.state[q][name], exact.state[e][name])
                for p, q, e in zip(self.ours.params, self.theirs.params, self.exact.params, strict=True)
                if name in exact.state[e] and name in ours.state.get(p, {})
            ]
            found = [each for each in found if all(isinstance(t, Tensor) for t in each)]
            if found:
                mine, others, right = zip(*found, strict=True)
                dtype = real_dtype(mine[0].dtype)
                tiny = _STORED[dtype.itemsize] * torch.finfo(dtype).eps + _COMPUTED * self.eps
                yield self._compare(name, mine, others, right, tiny * float(_flat(right).abs().max()))

    def _averages(self) -> str | None:
        state = self.ours.optimizer.state
        found = [i for i, p in enumerate(self.ours.params) if "ema" in state.get(p, {})]
        mine = [state[self.ours.params[i]]["ema"] for i in found]
        theirs, exact = ([side.averages[i] for i in found] for side in (self.theirs, self.exact))
        if self.storage == "int8":
            return None
        slack = 0.5 if self.dtype.itemsize == 2 else 0.0
        tiny = (4 + slack * 8) * max(self.eps, torch.finfo(self.dtype).eps if slack else 0) * EMA_DECAY
        return self._compare("ema", mine, theirs, exact, (tiny + _COMPUTED * self.eps) * _largest(exact))

    def _shown(self) -> str | None:
        """What eval() shows of schedule-free optimizers."""
        self.ours.optimizer.eval()
        self.exact.optimizer.eval()
        self.theirs.optimizer.eval()
        return None

    def _statistics(self) -> Any:
        return ()


def _flat(tensors: Any) -> Tensor:
    return torch.cat([real(t.detach()).cpu().double().reshape(-1) for t in tensors])


def _largest(tensors: Any) -> float:
    return float(_flat(tensors).abs().max())
