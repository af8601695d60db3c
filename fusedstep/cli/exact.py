"""The side that ours is compared with: a reference in float64, or as torch or a loop would compute it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .problem import Problem, real
from .references import Reference, clip_factors

EMA_DECAY = 0.7


class Side:
    """Parameters, states and averages after all steps of a problem, as a reference computes them.

    In `dtype` throughout; or in float64, with parameters rounded to `stored` and states to `stored_state` after
    every step: nobody who stores them so can lose less.
    """

    def __init__(
        self, problem: Problem, dtype: torch.dtype, stored: Any = None, stored_state: Any = None
    ) -> None:
        subject, self.problem = problem.case.subject, problem
        self.stored, self.stored_state = stored, stored_state
        self.params = [torch.nn.Parameter(real(p).to(dtype, copy=True)) for p in problem.starts]
        self.averages = [p.detach().clone() for p in self.params]
        self.path = [torch.zeros_like(p) for p in self.params]
        cls, clipping = subject.reference, problem.clipping
        # torch's optimizers do not clip
        self.factors: list[float] = []
        self.clips, self.norm_type = not issubclass(cls, Reference), clipping.get("norm_type", 2.0)
        groups = problem.groups(self.params, subject.options)  # type: ignore[arg-type]
        self.limits = [group.get("max_grad_norm", clipping.get("max_grad_norm")) for group in groups]
        with default_dtype(dtype):
            self.optimizer: Any = cls(groups, **{**subject.options, **({} if self.clips else clipping)})
            self.bases = [group["lr"] for group in self.optimizer.param_groups]
            for t in range(problem.count):
                self._step(t)
        self.shown = self._shown()

    def _shown(self) -> list[Tensor] | None:
        """The parameters that eval() shows, if the optimizer has it."""
        if not hasattr(self.optimizer, "eval"):
            return None
        kept = [p.detach().clone() for p in self.params]
        self.optimizer.eval()
        shown = [p.detach().clone() for p in self.params]
        for p, value in zip(self.params, kept, strict=True):
            p.data = value
        return shown

    @torch.no_grad()
    def _step(self, t: int) -> None:
        for group, base in zip(self.optimizer.param_groups, self.bases, strict=True):
            group["lr"] = self.problem.rate(base, t)
        grads = self.problem.grads(t)
        for p, g in zip(self.params, grads, strict=True):
            p.grad = None if g is None else real(g).to(p.dtype, copy=True)
        self.last = [None if g is None else real(g).double() for g in grads]
        if self.problem.is_skipped(t):
            return
        if self.clips:
            self._clip()
        before = [p.detach().clone() for p in self.params]
        self.optimizer.step()
        if not self.clips:
            self.factors = self.optimizer.factors
        for i, (p, g, old) in enumerate(zip(self.params, grads, before, strict=True)):
            self.path[i] += (p - old).abs().nan_to_num(0)
            if g is not None:
                self.averages[i] = EMA_DECAY * self.averages[i] + (1 - EMA_DECAY) * p
        self.updates = [p.detach() - old for p, old in zip(self.params, before, strict=True)]
        if self.stored is not None:
            self._round()

    def _clip(self) -> None:
        groups = self.optimizer.param_groups
        members = [(p, i) for i, group in enumerate(groups) for p in group["params"] if p.grad is not None]
        grads, limits = [p.grad for p, _ in members], [self.limits[i] for _, i in members]
        self.factors = clip_factors(grads, [0] * len(grads), limits, self.norm_type, 1e-6)
        for g, factor in zip(grads, self.factors, strict=True):
            g.mul_(factor)

    def _round(self) -> None:
        for p in self.params:
            p.copy_(_with_8_more_bits(p) if self.stored == "split8" else p.to(self.stored))
            for state in self.optimizer.state[p].values():
                if isinstance(state, Tensor) and state.shape == p.shape and state.dim():
                    state.copy_(state.to(self.stored_state))


def _with_8_more_bits(p: Tensor) -> Tensor:
    """A number rounded, half away from zero, to what a bfloat16 and a rest of 8 bits hold."""
    bits = (p.to(torch.float32).view(torch.int32) + 0x80) & -0x100
    return bits.view(torch.float32)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Scalars that are kept once for a tensor have torch's default dtype: float64 where everything else is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
    try:
        yield
    finally:
        torch.set_default_dtype(before)
