"""References of optimizers that keep numbers for a group."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import ADAM, Members, Reference


class ScheduleFreeSGD(Reference):
    """Defazio et al. 2024: gradients at y, steps of z, and x, the average, which y stays near."""

    options: ClassVar = {
        "lr": 1.0,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "warmup_steps": 0,
        "r": 0.0,
        "weight_lr_power": 2.0,
    }
    keeps: ClassVar[tuple[str, ...]] = ("z",)

    def before(self, group, o):
        k = group["k"] = group.get("k", 0) + 1
        o["k"], o["rate"] = k, o["lr"] * (min(k / o["warmup_steps"], 1.0) if o["warmup_steps"] else 1.0)
        highest = group["lr_max"] = max(group.get("lr_max", -math.inf), o["rate"])
        weight = k ** o["r"] * highest ** o["weight_lr_power"]
        total = group["weight_sum"] = group.get("weight_sum", 0.0) + weight
        o["share"] = weight / total if total > 0 else 0.0
        o["near"] = o["momentum"] if "momentum" in o else o["betas"][0]

    def update(self, p, g, s, t, o):
        z, near = p if t == 1 else s["z"], o["near"]
        x = (p - (1 - near) * z) / near
        z = s["z"] = z - o["rate"] * (self.direction(g, s, o) + o["weight_decay"] * p)
        x = (1 - o["share"]) * x + o["share"] * z
        return near * x + (1 - near) * z

    def direction(self, g: Tensor, s: dict[str, Any], o: dict[str, Any]) -> Tensor:
        return g

    @torch.no_grad()
    def eval(self) -> None:
        """Show the average."""
        for group in self.param_groups:
            near = group["momentum"] if "momentum" in group else group["betas"][0]
            for p in (p for p in group["params"] if self.state.get(p)):
                p.copy_((p - (1 - near) * self.state[p]["z"]) / near)


class ScheduleFreeAdamW(ScheduleFreeSGD):
    options: ClassVar = {
        **{name: value for name, value in ScheduleFreeSGD.options.items() if name != "momentum"},
        **ADAM,
        "lr": 0.0025,
    }
    keeps = ("z", "exp_avg_sq")

    def direction(self, g, s, o):
        beta2 = o["betas"][1]
        v = s["exp_avg_sq"] = beta2 * s["exp_avg_sq"] + (1 - beta2) * g.square()
        return g / ((v / (1 - beta2 ** o["k"])).sqrt() + o["eps"])


class Prodigy(Reference):
    """Mishchenko and Defazio 2023, as prodigyopt: one estimate of the distance, over all groups."""

    options: ClassVar = {
        **ADAM,
        "lr": 1.0,
        "beta3": None,
        "decouple": True,
        "use_bias_correction": False,
        "safeguard_warmup": False,
        "d0": 1e-6,
        "d_coef": 1.0,
        "growth_rate": math.inf,
    }
    keeps = ("exp_avg", "exp_avg_sq", "s", "p0")

    def step_groups(self, groups):
        first = self.param_groups[0]
        (beta1, beta2), d0 = first["betas"], first["d0"]
        d, k = first.setdefault("d", d0), first.setdefault("k", 0)
        bias = math.sqrt(1 - beta2 ** (k + 1)) / (1 - beta1 ** (k + 1)) if first["use_bias_correction"] else 1.0
        rate = d * float(first["lr"]) * bias
        beta3 = math.sqrt(beta2) if first["beta3"] is None else first["beta3"]
        first["numerator"], denominator = beta3 * first.get("numerator", 0.0), 0.0
        for p, g, s, _ in self.members(groups):
            s["exp_avg"] = beta1 * s["exp_avg"] + d * (1 - beta1) * g
            s["exp_avg_sq"] = beta2 * s["exp_avg_sq"] + d**2 * (1 - beta2) * g.square()
            s["s"] = beta3 * s["s"] + d / d0 * (d if first["safeguard_warmup"] else rate) * g
            first["numerator"] += d / d0 * rate * float((g * (s["p0"] - p)).sum())
            denominator += float(s["s"].abs().sum())
        if denominator == 0:
            return
        found = first["d_coef"] * first["numerator"] / denominator
        d = max(d, found) if d == d0 else d
        first["d_max"] = max(first.get("d_max", d0), found)
        first["d"], first["k"] = d, _ = min(first["d_max"], d * first["growth_rate"]), k + 1
        for p, g, s, group in self.members(groups):
            u = s["exp_avg"] if beta1 else d * g
            decay = group["weight_decay"] if group["decouple"] else 0.0
            p.copy_(p - rate * decay * p - rate * u / (s["exp_avg_sq"].sqrt() + d * group["eps"]))

    def members(self, groups: Members) -> Any:
        """Every parameter with its gradient, decayed, its states and its group."""
        for group, p in ((group, p) for group, params in groups for p in params):
            if not self.state[p]:
                self.state[p].update({name: torch.zeros_like(p) for name in self.keeps}, p0=p.clone())
            decay = 0.0 if group["decouple"] else group["weight_decay"]
            yield p, self.grads[p] + decay * p, self.state[p], group
