"""What `fusedstep check` checks besides classes: operators on tensors, and every word of rules."""

from __future__ import annotations

import builtins
from typing import Any

import torch

import fusedstep
from fusedstep import functional, npu
from fusedstep.rules import (
    abs,
    clamp,
    cos,
    exp,
    largest,
    log,
    maximum,
    minimum,
    mix,
    power,
    report,
    rule,
    sign,
    sqrt,
    tanh,
    total,
    total_over_all,
    where,
)


class _Operator(torch.optim.Optimizer):
    """An optimizer that calls an operator for each parameter."""

    keeps: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            if "betas" in options:
                options["beta1"], options["beta2"] = options.pop("betas")
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, **{name: self.begun(name, p) for name in self.keeps})
                state["step"] += 1
                self.apply(p, [state[name] for name in self.keeps], state["step"], options)

    def begun(self, name: str, p: Any) -> Any:
        return p.detach().clone() if name == "s" else torch.zeros_like(p)

    def apply(self, p: Any, states: list[Any], step: int, options: dict[str, Any]) -> None:
        raise NotImplementedError


class _AdamW(_Operator):
    keeps = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def __init__(self, params: Any, engine: str | None = None, **options: Any) -> None:
        super().__init__(params, engine=engine, **options)

    def apply(self, p, states, step, options):
        functional.adamw_(p, p.grad, *states, step=step, **options)


class _AdamWV2(_Operator):
    keeps = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def apply(self, p, states, step, options):
        m, v, largest = states
        largest = largest if options.get("amsgrad") else None
        npu.npu_apply_fused_adamw_v2(p, p.grad, m, v, largest, step, **options)


class _EmaAdamW(_Operator):
    keeps = ("exp_avg", "exp_avg_sq", "s")

    def apply(self, p, states, step, options):
        m, v, s = states
        npu.npu_apply_fused_ema_adamw(p.grad, p, m, v, s, step, **options)


class _PlainNumbers(_Operator):
    """The rule below, called as a function of plain numbers: its sums then have one element."""

    keeps = ("a", "b", "rate")

    def apply(self, p, states, step, options):
        numbers = [t.reshape(-1).tolist()[0] for t in (p, p.grad, *states)]
        for t, value in zip((p, *states), words(*numbers, step=step, numel=1, **options), strict=True):
            t.fill_(value)


@rule(states={"a": "a", "b": "b", "rate": "rate"})
def words(p, g, a, b, rate, *, step, numel, lr, low, high):
    a = mix(a, clamp(tanh(g), low, high), 0.3)
    # Python's own function works, too
    size = 0.5 * abs(g) + 0.5 * builtins.abs(g)
    b = exp(-size) + log(1 + size) * cos(p) + power(2 + size, 1.5) - 2**a + size**1.2
    b = b + maximum(a, g) * minimum(p, g) + sign(g) * (1 / (3 - a)) + (1 - g) - +(-g)
    for condition, k in ((g < a, 1), (g <= 0, 2), (g > low, 3), (g >= 0.0, 4), (g == 0, 5), (g != 0, 6)):
        b = b + k * where(condition, 1.0, 0.0) if k % 2 else b + condition * (k / 2) + (k / 2) * condition
    b = b + where(p > 0, g > a, g <= a)
    # whole powers of numbers below 0
    b = b + 0.1 * g**2 - 0.1 * g**3 + 0.1 * tanh(g) ** 5 + 0.1 * (-1) ** step
    size = report("trust_ratio", sqrt(total(g * g)) / numel) + 0.01 * total_over_all(abs(g))
    # the rate of the step before, which is the same for all elements, and kept for each
    u = (a + b / step + rate + total(g > 0) / numel) / (1 + largest(g) + size)
    return p - lr * u, a, b, lr


class Words(fusedstep.Optimizer):
    """Every word and operator in one rule."""

    lr: float = 0.1
    low: float = -0.5
    high: float = 0.5

    rule = words


OPERATORS: dict[str, Any] = {
    "functional.adamw_": _AdamW,
    "npu.npu_apply_fused_adamw_v2": _AdamWV2,
    "npu.npu_apply_fused_ema_adamw": _EmaAdamW,
    "rules": Words,
    "plain numbers": _PlainNumbers,
}
