"""References of Adam, and of optimizers that are Adam with something around it."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import ADAM, Reference, agreeing, averaged


class Adam(Reference):
    """With what torch's lacks: caution, and a decay that follows the square of the rate."""

    options: ClassVar = {
        **ADAM,
        "amsgrad": False,
        "decoupled_weight_decay": False,
        "cautious": False,
        "corrected_decay": False,
        "peak_lr": None,
    }
    keeps = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def update(self, p, g, s, t, o):
        if o["decoupled_weight_decay"]:
            peak = self.defaults["lr"] if o["peak_lr"] is None else o["peak_lr"]
            rate = o["lr"] ** 2 / peak if o["corrected_decay"] else o["lr"]
            p = p - rate * o["weight_decay"] * p
        else:
            g = g + o["weight_decay"] * p
        m, v = averaged(s, g, *o["betas"])
        if o["amsgrad"]:
            v = s["max_exp_avg_sq"] = torch.maximum(s["max_exp_avg_sq"], v)
        m = agreeing(m, g) if o["cautious"] else m
        bias1, bias2 = (1 - beta**t for beta in o["betas"])
        return p - o["lr"] * (m / bias1) / ((v / bias2).sqrt() + o["eps"])


class AdamW(Adam):
    options: ClassVar = {**Adam.options, "weight_decay": 1e-2, "decoupled_weight_decay": True}


class BertAdam(Reference):
    """NVIDIA's: no bias correction, schedules by the number of all steps."""

    options: ClassVar = {
        "lr": 1e-3,
        "warmup": -1,
        "t_total": -1,
        "schedule": "warmup_linear",
        "b1": 0.9,
        "b2": 0.999,
        "e": 1e-6,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
    }

    def __init__(self, params: Any, clip_scope: str = "tensor", **options: Any) -> None:
        super().__init__(params, clip_scope, **options)

    def update(self, p, g, s, t, o):
        m, v = averaged(s, g, o["b1"], o["b2"])
        rate = o["lr"]
        if o["t_total"] != -1:
            rate = rate * self.scheduled((t - 1) / o["t_total"], o["warmup"], o["schedule"])
        u = m / (v.sqrt() + o["e"])
        return p - rate * (u + o["weight_decay"] * p if o["weight_decay"] else u)

    @staticmethod
    def scheduled(x: float, warmup: float, schedule: str) -> float:
        if x < warmup:
            return x / warmup
        if schedule == "warmup_linear":
            return max((x - 1) / (warmup - 1), 0.0)
        if schedule == "warmup_poly":
            return max(1 - x, 0.0) ** 0.5
        return 0.5 * (1 + math.cos(math.pi * x)) if schedule == "warmup_cosine" else 1.0


class NpuFusedBertAdam(BertAdam):
    """Ascend's: gradients of a group share a norm."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, "group", **options)


class Lamb(Reference):
    """You et al. 2020, with what Apex's and timm's offer."""

    options: ClassVar = {
        **ADAM,
        "eps": 1e-6,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "bias_correction": True,
        "grad_averaging": True,
        "trust_bounds": (0.0, math.inf),
        "max_weight_norm": math.inf,
        "always_adapt": False,
    }
    # clipping divides by the norm itself
    clip_eps = 0.0

    def update(self, p, g, s, t, o):
        beta1, beta2 = o["betas"]
        m, v = averaged(s, g, beta1, beta2)
        if not o["grad_averaging"]:
            m = s["exp_avg"] = m + beta1 * g
        if o["bias_correction"]:
            m, v = m / (1 - beta1**t), v / (1 - beta2**t)
        u = m / (v.sqrt() + o["eps"]) + o["weight_decay"] * p
        return p - o["lr"] * self.trust(p, u, o) * u

    def trust(self, p: Tensor, u: Tensor, o: dict[str, Any]) -> float:
        of_weights, of_update = float(p.norm()), float(u.norm())
        # as in timm, also if a norm is NaN
        if not (o["weight_decay"] or o["always_adapt"]) or not (of_weights > 0 and of_update > 0):
            return 1.0
        lowest, highest = o["trust_bounds"]
        return min(max(min(of_weights, o["max_weight_norm"]) / of_update, lowest), highest)
