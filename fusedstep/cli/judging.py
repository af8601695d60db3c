"""How numbers are judged: |ours - f64| <= 2 |theirs - f64| + tiny, over all parameters, and over each state.

Theirs is torch.optim's result in the same dtype, if torch has the optimizer and computes in float32; else the
reference's, computed in float64 and rounded to the stored dtypes after every step. `tiny` is a few roundings of
stored numbers and of the path of all steps, so that it is no failure if theirs is right by luck.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .combinations import Case
from .exact import Side
from .ours import Ours
from .problem import STEPS, Problem, real
from .references import Reference

# roundings of stored numbers, by their bytes: sixteen bits are rounded at every step, and no norm is exact
_STORED = {2: 8, 4: 4, 8: 32}
# roundings of an update, in the dtype that it is computed in, and in that of its states. In float64, roundings
# are so small that many may be allowed, for sums that grow from step to step
_COMPUTED, _OF_STATES = {torch.float32: 64, torch.float64: 2048}, 2
# what products of matrices in sixteen bits may cost, as a fraction of the path of parameters
_PRODUCTS = 0.01
# what 8 bits of states may cost, as a fraction of the path of parameters
_INT8 = 0.2


class Both(NamedTuple):
    """What a case is compared with: the reference in float64, and theirs."""

    exact: Side
    theirs: Side


_known: dict[tuple, Both] = {}
# features that a reference depends on
_SEEN = ("storage", "clip", "groups", "grads", "rate", "steps", "statistics", "ema")


def both_of(problem: Problem) -> Both:
    """References, computed once for all cases that differ only in other features."""
    case = problem.case
    levels = tuple(case.feature(name) for name in _SEEN)
    key = str(case.subject), case.dtype, case.feature("skip") == "no", *levels
    if key not in _known:
        if len(_known) >= 1000:
            _known.clear()
        exact = Side(problem, torch.float64)
        _known[key] = Both(exact, _theirs(problem, exact))
    return _known[key]


def _theirs(problem: Problem, exact: Side) -> Side:
    case, wide, storage = problem.case, real_dtype(problem.dtype), problem.case.feature("storage")
    is_torchs = not issubclass(case.subject.reference, Reference)
    if is_torchs and case.dtype in ("float32", "complex64") and storage == "plain":
        return Side(problem, torch.float32)
    if wide == torch.float64:
        return exact
    stored = {"split": torch.float32, "master": torch.float32, "split8": "split8"}.get(storage, wide)
    return Side(problem, torch.float64, stored, problem.state_dtype or wide)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    return real(torch.empty(0, dtype=dtype)).dtype


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(real_dtype(dtype)).eps


def complaints(case: Case) -> list[str]:
    """What is wrong with a combination, in words and numbers; empty if all is right."""
    problem = Problem(case)
    both = both_of(problem)
    ours = Ours(problem)
    return [*ours.complaints, *filter(None, Judge(problem, both, ours).all())]


class Judge:
    """Compares the results of a case with what they should be; every string is a complaint."""

    def __init__(self, problem: Problem, both: Both, ours: Ours) -> None:
        self.case, self.ours, (self.exact, self.theirs) = problem.case, ours, both
        self.storage, self.dtype = self.case.feature("storage"), problem.dtype
        self.computed = torch.promote_types(real_dtype(problem.dtype), torch.float32)
        self.is_wide = self.computed == torch.float64
        # rounding may flip a sign: most elements count
        self.most = self.case.subject.jumps and not self.is_wide
        path = float(_flat(self.exact.path).max())
        self.state_dtype = problem.state_dtype or problem.dtype
        self.slack = (_COMPUTED[self.computed] * eps(self.computed) + _OF_STATES * eps(self.state_dtype)) * path
        in_sixteen_bits = self.case.subject.name == "Muon" and self.case.place.device != "cpu"
        self.products = _PRODUCTS if in_sixteen_bits else 0.0
        self.slack += self.products * path

    def all(self) -> Iterator[str | None]:
        yield self._params("parameters", self.theirs.params, self.exact.params)
        if self.storage not in ("int8", "stochastic"):
            yield from self._states()
            if self.case.feature("ema") == "yes":
                yield self._averages()
        if self.case.feature("statistics") == "yes":
            yield from self._statistics()
        if self.exact.shown is not None:
            for _ in range(2):
                # a second call changes nothing
                self.ours.optimizer.eval()
            yield self._params("parameters after eval()", self.theirs.shown, self.exact.shown)
            self.ours.optimizer.train()
            yield self._params("parameters after train()", self.theirs.params, self.exact.params)

    def _compare(self, what: str, ours: Any, theirs: Any, exact: Any, tiny: float) -> str | None:
        ours, theirs, exact = map(_flat, (ours, theirs, exact))
        wrong = (ours != exact) & ~torch.isfinite(ours)
        if wrong.any():
            return f"{what}: {int(wrong.sum())} of {len(ours)} numbers are NaN or infinite"
        off, others = (float(_error(numbers, exact, self.most)) for numbers in (ours, theirs))
        allowed = 2 * others + tiny
        if off <= allowed:
            return None
        size = _largest([exact])
        return f"{what}: off by {off:.3g}, {allowed:.3g} is allowed, the largest number is {size:.3g}"

    def _params(self, what: str, theirs: Any, exact: Any) -> str | None:
        largest = _largest(exact)
        if self.storage == "int8":
            return self._close_in_sum(what, exact)
        if self.storage == "stochastic":
            return self._unbiased(what, exact)
        roundings = _STORED[self.dtype.itemsize if not self.dtype.is_complex else 4] * eps(self.dtype)
        if self.storage != "plain":
            # masters are rounded at every step, parameters once at the end
            roundings = _STORED[4] * eps(torch.float32) + 0.51 * eps(self.dtype)
        return self._compare(what, self.ours.params, theirs, exact, roundings * largest + self.slack)

    def _close_in_sum(self, what: str, exact: Any) -> str | None:
        off = float((_flat(self.ours.params) - _flat(exact)).norm())
        way = float(_flat(self.exact.path).norm())
        allowed = _INT8 * way + STEPS * eps(self.dtype) * float(_flat(exact).norm())
        if off <= allowed:
            return None
        return f"{what}: off by {off:.3g} in all, {allowed:.3g} is allowed with int8; they went {way:.3g}"

    def _unbiased(self, what: str, exact: Any) -> str | None:
        exact = _flat(exact)
        # rounding always towards zero would show in this
        off = (_flat(self.ours.params) - exact) * exact.sign()
        largest, path = float(exact.abs().max()), float(_flat(self.exact.path).max())
        most = float(off.abs().quantile(0.9))
        allowed = eps(self.dtype) * (STEPS * largest + _COMPUTED[self.computed] * path)
        if not most <= allowed:
            return f"{what}: off by {most:.3g}, {allowed:.3g} is allowed with stochastic rounding"
        if what != "parameters":
            # eval() and train() round to nearest
            return None
        mean, allowed = float(off.mean()), 6 * float(off.std()) / math.sqrt(len(off))
        # where nothing has moved, the reference itself is rounded
        allowed += 1e-3 * eps(self.dtype) * largest
        if abs(mean) > allowed:
            return f"{what}: off by {mean:.3g} on average, {allowed:.3g} is allowed with stochastic rounding"
        return None

    def _states(self) -> Iterator[str | None]:
        exact, theirs, ours = self.exact.optimizer, self.theirs.optimizer, self.ours.optimizer
        names = {name for p in self.exact.params for name in exact.state[p]} - {"step"}
        if not issubclass(self.case.subject.reference, Reference):
            yield self._unknown(names)
        for name in sorted(names):
            found = [
                (ours.state[p][name], theirs.state[q][name], exact.state[e][name])
                for p, q, e in zip(self.ours.params, self.theirs.params, self.exact.params, strict=True)
                if name in exact.state[e] and name in ours.state.get(p, {})
            ]
            found = [each for each in found if all(isinstance(t, Tensor) for t in each)]
            if found:
                mine, others, right = zip(*found, strict=True)
                size = mine[0].dtype.itemsize // (2 if mine[0].is_complex() else 1)
                tiny = _STORED[size] * eps(mine[0].dtype) + _COMPUTED[self.computed] * eps(self.computed)
                tiny *= _largest(right)
                # some states are made of parameters
                yield self._compare(
                    f"state {name}", mine, others, right, tiny + self.slack * eps(self.computed)
                )

    def _unknown(self, names: set[str]) -> str | None:
        """Our states that torch does not have."""
        kept = {name for p in self.ours.params for name in self.ours.optimizer.state.get(p, {})}
        more = kept - names - {"step", "ema", "master", "master_rest"}
        return f"states {sorted(more)}, which torch does not have" if more and self._chooses_states else None

    @property
    def _chooses_states(self) -> bool:
        """Operators do not: they are given all states that they might need."""
        return self.case.subject.takes("state_dtype")

    def _averages(self) -> str | None:
        state = self.ours.optimizer.state
        found = [i for i, p in enumerate(self.ours.params) if "ema" in state.get(p, {})]
        if not found:
            return "there are no averages"
        mine = [state[self.ours.params[i]]["ema"] for i in found]
        theirs, exact = ([side.averages[i] for i in found] for side in (self.theirs, self.exact))
        tiny = _STORED[8] * eps(self.computed) * _largest(exact)
        return self._compare("state ema", mine, theirs, exact, tiny + self.slack)

    def _statistics(self) -> Iterator[str | None]:
        seen, exact = self.ours.optimizer.statistics(), self.exact
        live = [i for i, g in enumerate(exact.last) if g is not None and g.numel()]
        grads, params, updates = (
            _flat([x[i] for i in live]) for x in (exact.last, exact.params, exact.updates)
        )
        is_coarse = self.storage in ("int8", "stochastic")
        # coarsely stored states give other updates than float64
        coarse = eps(self.dtype) + eps(self.state_dtype)
        of_update = 0.5 if is_coarse or self.most else 1e-9 if self.is_wide else 1e-3 + 16 * coarse
        of_update += self.products
        measured = max(1e-9, 64 * eps(self.computed))
        expected = {
            "grad_norm": (float(torch.linalg.vector_norm(grads, exact.norm_type)), measured),
            "param_norm": (float(params.norm()), max(of_update, measured)),
            "update_norm": (float(updates.norm()), of_update),
            "clip_factor": (min(exact.factors), measured),
            "nonfinite": (0.0, 0.0),
        }
        largest = _largest(exact.params)
        for name, (number, share) in expected.items():
            found = float(getattr(seen, name))
            if not abs(found - number) <= share * abs(number) + 64 * eps(self.computed) * largest:
                yield f"statistics: {name} is {found:.9g}, expected {number:.9g}"


def _flat(tensors: Any) -> Tensor:
    return torch.cat([real(t.detach()).cpu().double().reshape(-1) for t in tensors])


def _error(numbers: Tensor, exact: Tensor, most: bool = False) -> Tensor:
    """The largest difference, or that of most elements; equal infinities do not differ."""
    apart = torch.where(numbers == exact, 0.0, (numbers - exact).abs())
    return apart.quantile(0.9) if most else apart.max()


def _largest(tensors: Any) -> float:
    """The largest of the finite numbers."""
    return float(_flat(tensors).nan_to_num(0, 0, 0).abs().max())
