"""References of Ascend's optimizers, and of the rules of operators.py."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from .adam import Lamb
from .base import ADAM, Reference, averaged, largest


class NpuFusedLamb(Lamb):
    """Ascend's: no bias correction, no weight larger than 10, and with `adam` no trust ratio."""

    options: ClassVar = {**Lamb.options, "weight_decay": 0.0, "max_grad_norm": None, "bias_correction": False}
    options |= {"always_adapt": True, "max_weight_norm": 10.0, "adam": False}

    def __init__(self, params: Any, use_global_grad_norm: bool = False, **options: Any) -> None:
        super().__init__(params, **options, max_grad_norm=1.0 if use_global_grad_norm else None)

    def step_groups(self, groups):
        for group, _ in groups:
            group["trust_bounds"] = (1.0, 1.0) if group["adam"] else (0.0, math.inf)
        super().step_groups(groups)


class NpuFusedRMSpropTF(Reference):
    """RMSprop as TensorFlow's: squares begin as 1, eps is below the root."""

    options: ClassVar = {
        "lr": 1e-2,
        "alpha": 0.9,
        "eps": 1e-10,
        "weight_decay": 0.0,
        "momentum": 0.0,
        "centered": False,
        "decoupled_decay": False,
        "lr_in_momentum": True,
    }
    keeps = ("square_avg", "grad_avg", "momentum_buffer")

    def update(self, p, g, s, t, o):
        alpha, rate = o["alpha"], o["lr"]
        if o["decoupled_decay"]:
            p = p - o["weight_decay"] * p
        else:
            g = g + o["weight_decay"] * p
        v = torch.ones_like(g) if t == 1 else s["square_avg"]
        v = s["square_avg"] = alpha * v + (1 - alpha) * g.square()
        if o["centered"]:
            s["grad_avg"] = alpha * s["grad_avg"] + (1 - alpha) * g
            v = v - s["grad_avg"].square()
        u = g / (v + o["eps"]).sqrt()
        if not o["momentum"]:
            return p - rate * u
        inside, outside = (rate, 1.0) if o["lr_in_momentum"] else (1.0, rate)
        s["momentum_buffer"] = o["momentum"] * s["momentum_buffer"] + inside * u
        return p - outside * s["momentum_buffer"]


class NpuFusedAdamP(Reference):
    """Heo et al. 2021: what of the update lies along rows, or along the whole tensor, is taken off."""

    options: ClassVar = {**ADAM, "delta": 0.1, "wd_ratio": 0.1, "nesterov": False}

    def update(self, p, g, s, t, o):
        (beta1, beta2), keep = o["betas"], 1.0
        m, v = averaged(s, g, beta1, beta2)
        u = beta1 * m + (1 - beta1) * g if o["nesterov"] else m
        u = u / ((v / (1 - beta2**t)).sqrt() + o["eps"])
        for rows in (len(p), 1) if p.dim() > 1 and p.numel() else ():
            x, y, z = (tensor.reshape(rows, -1) for tensor in (p, g, u))
            of_p, of_g = (torch.linalg.vector_norm(each, dim=1, keepdim=True) + o["eps"] for each in (x, y))
            cos = (x * y).sum(1, keepdim=True) / of_p / of_g
            if largest(cos) < o["delta"] / math.sqrt(x.shape[1]):
                u = (z - x / of_p * (x / of_p * z).sum(1, keepdim=True)).view_as(p)
                keep = o["wd_ratio"]
                break
        return (1 - o["lr"] * o["weight_decay"] * keep) * p - o["lr"] / (1 - beta1**t) * u


class EmaAdamW(Reference):
    """MindSpeed's npu_apply_fused_ema_adamw: decay in the update (mode 1) or the gradient, and an average."""

    options: ClassVar = {**ADAM, "ema_decay": 0.9999, "mode": 1, "bias_correction": True}
    keeps = ("exp_avg", "exp_avg_sq", "s")

    def update(self, p, g, s, t, o):
        before = p if t == 1 else s["s"]
        g = g if o["mode"] else g + o["weight_decay"] * p
        m, v = averaged(s, g, *o["betas"])
        if o["bias_correction"]:
            m, v = (x / (1 - beta**t) for x, beta in zip((m, v), o["betas"], strict=True))
        u = m / (v.sqrt() + o["eps"]) + (o["weight_decay"] * p if o["mode"] else 0.0)
        p = p - o["lr"] * u
        s["s"] = o["ema_decay"] * before + (1 - o["ema_decay"]) * p
        return p


class Words(Reference):
    """The rule of operators.py in torch's operations."""

    options: ClassVar = {"lr": 0.1, "low": -0.5, "high": 0.5}
    keeps = ("a", "b", "rate")

    def update(self, p, g, s, t, o):
        low, high, lr = o["low"], o["high"], o["lr"]
        a = s["a"] = 0.3 * s["a"] + (1 - 0.3) * torch.tanh(g).clamp(low, high)
        size = g.abs()
        b = torch.exp(-size) + torch.log(1 + size) * torch.cos(p) + (2 + size) ** 1.5 - 2**a + size**1.2
        b = b + torch.maximum(a, g) * torch.minimum(p, g) + g.sign() * (1 / (3 - a)) + (1 - g) - (-g)
        for condition, k in ((g < a, 1), (g <= 0, 2), (g > low, 3), (g >= 0.0, 4), (g == 0, 5), (g != 0, 6)):
            b = b + k * condition.to(b.dtype)
        b = b + ((p > 0) == (g > a)).to(b.dtype)
        b = b + 0.1 * g.square() - 0.1 * g * g * g + 0.1 * torch.tanh(g) ** 5 + (0.1 if t % 2 == 0 else -0.1)
        rate, s["b"], s["rate"] = s["rate"], b, torch.full_like(p, lr)
        size = g.square().sum().sqrt() / max(g.numel(), 1)
        size = size + 0.01 * sum(float(each.abs().sum()) for each in self.grads.values())
        above = (g > 0).to(b.dtype).mean() if g.numel() else 0.0
        return p - lr * (a + b / t + rate + above) / (1 + largest(g) + size)
