"""What `fusedstep check` steps: parameters and gradients, and what is done to both sides before a step."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .combinations import DTYPES, Case

STEPS = 7
# one element, a few that begin as zeros, none at all, four dimensions for channels_last
_SMALL = ((), (5,), (0,), (2, 3, 2, 2))
_MATRICES = ((1, 5), (6, 1), (0, 3), (2, 3, 4))
# more elements than an engine works on at once, and enough for states in 8 bits
_LARGE = {"int8": (72, 64), "stochastic": (72, 64)}
# optimizers that update each element by itself
_BEAR_INFINITY = {"SGD", "Adam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "ADOPT"}
_BEAR_INFINITY |= {"BertAdam"}
# the step that finds an infinity, if steps may be skipped
SKIPPED = 3
# gradients are multiplied by this where a scaler divides them; it fits the range of float16
SCALE = 8.0
# limits of two groups; norms are larger at some steps, smaller at others, and 0 is no limit
LIMITS = {"norm": (6.0, 2.0), "largest": (1.0, 0.0)}


class Problem:
    """The first parameters of a case, and its gradients."""

    def __init__(self, case: Case) -> None:
        self.case = case
        param, grad, state = DTYPES[case.dtype]
        self.dtype, self.grad_dtype, self.state_dtype = param, grad or param, state
        large = _LARGE.get(case.feature("storage"), (40, 30))
        one = case.subject.name == "plain numbers"
        small = _MATRICES if case.subject.name == "Muon" else _SMALL
        self.starts, self.steps = _drawn(((),) if one else (*small, large), param, self.grad_dtype)
        if self.has_infinite_weight:
            self.starts = [p.clone() for p in self.starts]
            self.starts[-1][0, 0] = -math.inf
        # one element then moves so far that coarsely rounded states would be off
        is_fine = case.feature("storage") not in _LARGE
        if is_fine and (case.subject.options.get("cautious") or case.subject.name == "Prodigy"):
            self.steps = _turned(self.steps)

    @property
    def count(self) -> int:
        """How many steps are taken."""
        return STEPS if self.case.feature("steps") == "many" else 1

    @property
    def has_infinite_weight(self) -> bool:
        """Whether one of its weights is infinite: without decay, it must not turn anything into NaN."""
        case = self.case
        # norms and averages would be infinite
        is_plain = all(case.feature(name) in ("plain", "no") for name in ("storage", "statistics", "ema"))
        decays = case.subject.option("weight_decay") or case.subject.options.get("cautious")
        return case.subject.name in _BEAR_INFINITY and is_plain and not decays

    def grads(self, t: int) -> list[Tensor | None]:
        """The gradients of step `t`, from 0, in the dtype they are stored in."""
        kind, grads = self.case.feature("grads"), self.steps[t]
        if kind == "late" and t in (0, 5):
            return [torch.zeros_like(g) for g in grads]
        return [None if kind == "missing" and (i + t) % 4 == 1 else g for i, g in enumerate(grads)]

    def is_skipped(self, t: int) -> bool:
        return t == SKIPPED and self.case.feature("skip") != "no"

    def rate(self, base: float, t: int) -> float:
        """The learning rate of a step; schedules begin with 0, those of a tensor with the highest rate."""
        kind = self.case.feature("rate")
        return base if kind == "fixed" else base * (math.sin(t) if kind == "schedule" else math.cos(t)) ** 2

    def groups(self, params: list[Tensor], options: dict[str, Any]) -> list[dict[str, Any]]:
        """One group, or two with options of their own."""
        if self.case.feature("groups") == "one":
            return [{"params": params}]
        own: dict[str, Any] = (
            {} if self.case.subject.name == "Prodigy" else {"lr": 0.5 * options.get("lr", 1.0)}
        )
        if "weight_decay" in options:
            own["weight_decay"] = 0.5 * options["weight_decay"]
        if self.case.feature("clip") != "no":
            own["max_grad_norm"] = LIMITS[self.case.feature("clip")][1]
        return [{"params": params[::2]}, {"params": params[1::2], **own}]

    @property
    def clipping(self) -> dict[str, Any]:
        """Options that limit norms."""
        kind = self.case.feature("clip")
        if kind == "no":
            return {}
        return {"max_grad_norm": LIMITS[kind][0], "norm_type": 2.0 if kind == "norm" else math.inf}


@functools.lru_cache(8)
def _drawn(shapes: Any, param: torch.dtype, grad: torch.dtype) -> tuple[list[Tensor], list[list[Tensor]]]:
    random = torch.Generator().manual_seed(20)

    def draw(shape: Any, dtype: torch.dtype) -> Tensor:
        parts = 2 if dtype.is_complex else 1
        numbers = torch.randn((*shape, parts), generator=random, dtype=torch.float64)
        return (torch.view_as_complex(numbers) if dtype.is_complex else numbers[..., 0]).to(dtype)

    starts = [draw(shape, param) * (0 if i == 1 else 1) for i, shape in enumerate(shapes)]
    scales = [1.0, 0.1, 3.0, 0.5, 0.02, 2.0, 1.0]
    steps = [[scale * draw(shape, grad) for shape in shapes] for scale in scales[:STEPS]]
    for t, step in enumerate(steps):
        for i, g in enumerate(step):
            # now and then, gradients of some elements are 0, and those of some tensors
            g.reshape(-1)[(t + i) % 3 :: 7] = 0
            step[i] = g * 0 if (t, i) in ((1, 3), (4, 0)) else g
    return starts, steps


def _turned(steps: list[list[Tensor]]) -> list[list[Tensor]]:
    """The same, but gradients of the largest tensor agree at all steps but the last, where all but one turn."""
    (*before, end), always = steps, steps[0][-1].clone()
    always[-1, -1] = 1.0
    last = -0.2 * always
    last[-1, -1] = 1.0
    return [*([*step[:-1], always] for step in before), [*end[:-1], last]]


def real(t: Tensor) -> Tensor:
    """A complex number as two."""
    return torch.view_as_real(t) if t.is_complex() else t


def laid_out(t: Tensor, strided: bool) -> Tensor:
    """A copy, in a memory layout of its own if it is to be strided."""
    if not strided or t.dim() == 0:
        return t.clone(memory_format=torch.contiguous_format)
    if t.dim() == 4:
        return t.clone(memory_format=torch.channels_last)
    if t.dim() == 2:
        return t.t().contiguous().t()
    return torch.stack([t, t], dim=-1)[..., 0]
