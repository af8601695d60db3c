"""References of the family: optimizers that torch lacks."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from .base import ADAM, Reference, agreeing, averaged, largest


class LARS(Reference):
    """You et al. 2017, as timm has it: SGD with a gradient scaled to the norm of its parameter."""

    options: ClassVar = {
        "lr": 1.0,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "trust_coeff": 0.001,
        "eps": 1e-8,
        "trust_clip": False,
        "always_adapt": False,
    }
    keeps = ("momentum_buffer",)

    def update(self, p, g, s, t, o):
        of_weights, of_grad = float(p.norm()), float(g.norm())
        if o["weight_decay"] or o["always_adapt"]:
            ratio = 1.0
            if of_weights > 0 and of_grad > 0:
                ratio = o["trust_coeff"] * of_weights / (of_grad + of_weights * o["weight_decay"] + o["eps"])
            ratio = min(ratio, o["lr"]) / (o["lr"] or 1.0) if o["trust_clip"] else ratio
            g = ratio * (g + o["weight_decay"] * p)
        if o["momentum"]:
            b = s["momentum_buffer"]
            b = s["momentum_buffer"] = g if t == 1 else o["momentum"] * b + (1 - o["dampening"]) * g
            g = g + o["momentum"] * b if o["nesterov"] else b
        return p - o["lr"] * g


class Lion(Reference):
    """Chen et al. 2023."""

    options: ClassVar = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "cautious": False}
    keeps = ("exp_avg",)

    def update(self, p, g, s, t, o):
        (beta1, beta2), m = o["betas"], s["exp_avg"]
        u = (beta1 * m + (1 - beta1) * g).sign()
        s["exp_avg"] = beta2 * m + (1 - beta2) * g
        u = agreeing(u, g) if o["cautious"] else u
        return p - o["lr"] * (u + o["weight_decay"] * p)


class NovoGrad(Reference):
    """Ginsburg et al. 2019, with Apex's options: a second moment of each tensor's norm."""

    options: ClassVar = {
        **ADAM,
        "bias_correction": True,
        "reg_inside_moment": False,
        "grad_averaging": True,
        "by_largest": False,
        "init_zero": False,
    }

    def update(self, p, g, s, t, o):
        beta1, beta2 = o["betas"]
        size = largest(g) if o["by_largest"] else g.square().sum()
        before = s["exp_avg_sq"].reshape(-1)[:1].sum() if t > 1 else 0 * size if o["init_zero"] else size
        n = s["exp_avg_sq"] = beta2 * before + (1 - beta2) * size
        bias1, bias2 = (1 - beta**t if o["bias_correction"] else 1.0 for beta in o["betas"])
        norm = (n if o["by_largest"] else n.sqrt()) / math.sqrt(bias2) + o["eps"]
        take = 1 - beta1 if o["grad_averaging"] else 1.0
        if o["reg_inside_moment"]:
            s["exp_avg"] = beta1 * s["exp_avg"] + take * (g / norm + o["weight_decay"] * p)
            return p - o["lr"] * s["exp_avg"] / bias1
        s["exp_avg"] = beta1 * s["exp_avg"] + take * g
        return p - o["lr"] * (s["exp_avg"] / bias1 / norm + o["weight_decay"] * p)


class AdEMAMix(Reference):
    """Pagliardini et al. 2024: a fast and a slow average, whose share and length rise at first."""

    options: ClassVar = {**ADAM, "betas": (0.9, 0.999, 0.9999), "alpha": 5.0, "t_alpha_beta3": None}
    keeps = ("exp_avg", "exp_avg_sq", "exp_avg_slow")

    def update(self, p, g, s, t, o):
        (beta1, beta2, beta3), alpha, end = o["betas"], o["alpha"], o["t_alpha_beta3"]
        if end:
            part, low, high = min(t / end, 1.0), math.log(beta1), math.log(beta3)
            alpha = min(t * alpha / end, alpha)
            beta3 = min(math.exp(low * high / ((1 - part) * high + part * low)), beta3)
        m, v = averaged(s, g, beta1, beta2)
        s["exp_avg_slow"] = beta3 * s["exp_avg_slow"] + (1 - beta3) * g
        u = m / (1 - beta1**t) + alpha * s["exp_avg_slow"]
        u = u / ((v / (1 - beta2**t)).sqrt() + o["eps"])
        return p - o["lr"] * (u + o["weight_decay"] * p)


class ADOPT(Reference):
    """Taniguchi et al. 2024: divides by the second moment before this gradient is in it."""

    options: ClassVar = {**ADAM, "betas": (0.9, 0.9999), "eps": 1e-6, "decouple": False, "clip_exp": 0.25}

    def update(self, p, g, s, t, o):
        (beta1, beta2), decay = o["betas"], o["weight_decay"]
        g = g + decay * p if decay and not o["decouple"] else g
        if t == 1:
            s["exp_avg_sq"] = g.square()
            return p
        u = g / s["exp_avg_sq"].sqrt().clamp(min=o["eps"])
        if o["clip_exp"] is not None:
            limit = (t - 1) ** o["clip_exp"]
            u = u.clamp(-limit, limit)
        s["exp_avg"] = beta1 * s["exp_avg"] + (1 - beta1) * u
        s["exp_avg_sq"] = beta2 * s["exp_avg_sq"] + (1 - beta2) * g.square()
        return p - o["lr"] * (s["exp_avg"] + (decay * p if o["decouple"] else 0.0))


class StableAdamW(Reference):
    """Wortsman et al. 2023, as optimi has it."""

    options: ClassVar = {**ADAM, "betas": (0.9, 0.99), "weight_decay": 1e-2}

    def update(self, p, g, s, t, o):
        eps = o["eps"]
        m, v = averaged(s, g, *(beta * (1 - beta ** (t - 1)) / (1 - beta**t) for beta in o["betas"]))
        lag = float((g.square() / v.clamp(min=eps**2)).mean().sqrt())
        rate = o["lr"] / max(1.0, lag)
        return p - rate * (m / (v.sqrt() + eps) + o["weight_decay"] * p)


class Adan(Reference):
    """Xie et al. 2022, as the authors' and timm's."""

    options: ClassVar = {**ADAM, "betas": (0.98, 0.92, 0.99), "no_prox": False}
    keeps = ("exp_avg", "exp_avg_diff", "exp_avg_sq", "neg_pre_grad")

    def update(self, p, g, s, t, o):
        beta1, beta2, beta3 = o["betas"]
        change = torch.zeros_like(g) if t == 1 else g - (-s["neg_pre_grad"])
        s["exp_avg_diff"] = beta2 * s["exp_avg_diff"] + (1 - beta2) * change
        s["exp_avg"] = beta1 * s["exp_avg"] + (1 - beta1) * g
        s["exp_avg_sq"] = beta3 * s["exp_avg_sq"] + (1 - beta3) * (g + beta2 * change).square()
        s["neg_pre_grad"] = -g
        u = s["exp_avg"] / (1 - beta1**t) + beta2 * s["exp_avg_diff"] / (1 - beta2**t)
        u = o["lr"] * u / ((s["exp_avg_sq"] / (1 - beta3**t)).sqrt() + o["eps"])
        decay = o["lr"] * o["weight_decay"]
        return p - decay * p - u if o["no_prox"] else (p - u) / (1 + decay)
