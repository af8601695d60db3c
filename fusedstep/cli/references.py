"""References: optimizers in plain tensor operations, from their papers and their authors' descriptions.

Independent of the library on purpose: a reference that shared its rules could not disagree with it. In float64,
results are compared with references if torch.optim lacks the optimizer or its options; in other dtypes they
compute in float32 at least, and show how exact a loop of operations is. Recorded runs of the authors' packages
prove them (tests/test_references.py).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

Members = list[tuple[dict[str, Any], list[Tensor]]]


def clip_factors(
    grads: list[Tensor], labels: list[Any], limits: list[Any], norm_type: float, eps: float
) -> Any:
    """A factor for each gradient: those of one label share a norm. A limit of None, 0 or less is none."""
    together: dict[Any, list[Tensor]] = {}
    for g, label in zip(grads, labels, strict=True):
        together.setdefault(label, []).append(g)
    # torch measures no empty tensors
    some = {label: [g for g in same if g.numel()] for label, same in together.items()}
    norms = {label: float(torch.nn.utils.get_total_norm(same, norm_type)) for label, same in some.items()}
    factors = []
    for label, limit in zip(labels, limits, strict=True):
        norm, limited = norms[label] + eps, limit is not None and limit > 0
        # a norm that is NaN poisons all gradients, as in torch's clipping
        factors.append(float(limit) / norm if limited and not norm <= limit else 1.0)
    return factors


class Reference(torch.optim.Optimizer):
    """Groups, states and clipping; a subclass has options, and the update."""

    options: ClassVar[dict[str, Any]] = {}
    keeps: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    clip_eps: ClassVar[float] = 1e-6

    def __init__(self, params: Any, clip_scope: str = "global", norm_type: float = 2.0, **options: Any) -> None:
        self.clip_scope, self.norm_type = clip_scope, norm_type
        common = {"max_grad_norm": None, "maximize": False, "foreach": None, "fused": None}
        known = {**common, **self.options}
        if not options.keys() <= known.keys():
            raise TypeError(f"{type(self).__name__} takes no {sorted(options.keys() - known.keys())}")
        super().__init__(params, {**known, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        members = [(p, group, i) for i, (group, params) in enumerate(groups) for p in params]
        label = {"tensor": lambda p, i: p, "group": lambda p, i: (i, p.dtype), "global": lambda p, i: 0}
        labels = [label[self.clip_scope](p, i) for p, _, i in members]
        grads = [p.grad.to(torch.promote_types(p.dtype, torch.float32)) for p, _, _ in members]
        limits = [group["max_grad_norm"] for _, group, _ in members]
        factors = self.factors = clip_factors(grads, labels, limits, self.norm_type, self.clip_eps)
        self.grads = {
            p: (-factor if group["maximize"] else factor) * g
            for (p, group, _), g, factor in zip(members, grads, factors, strict=True)
        }
        self.step_groups([(group, params) for group, params in groups if params])
        return loss

    def step_groups(self, groups: Members) -> None:
        for group, params in groups:
            numbers = {k: x.item() if isinstance(x, Tensor) else x for k, x in group.items()}
            self.before(group, numbers)
            for p in params:
                self.step_one(p, numbers)

    def before(self, group: dict[str, Any], o: dict[str, Any]) -> None:
        """What a group keeps, and what it adds to its numbers."""

    def step_one(self, p: Tensor, o: dict[str, Any]) -> None:
        g, state = self.grads[p], self.state[p]
        if not state:
            state.update(step=torch.tensor(0.0), **{name: torch.zeros_like(p) for name in self.keeps})
        state["step"] += 1
        s = {name: state[name].to(g.dtype) for name in self.keeps}
        p.copy_(self.update(p.to(g.dtype), g, s, float(state["step"]), o))
        state.update({name: value.to(p.dtype) for name, value in s.items()})

    def update(self, p: Tensor, g: Tensor, s: dict[str, Any], t: float, o: dict[str, Any]) -> Any:
        """`p` after its step number `t` with these options; the states in `s` are replaced."""
        raise NotImplementedError


def agreeing(u: Tensor, g: Tensor) -> Tensor:
    """A cautious update: nothing against the gradient, the rest scaled up to make up for it."""
    mask = (u * g > 0).to(u.dtype)
    return u * mask / mask.mean().clamp(min=1e-3)


def largest(g: Tensor) -> Tensor:
    """The largest absolute value; 0 if there are no elements."""
    return torch.cat([g.abs().reshape(-1), g.new_zeros(1)]).max()


def averaged(s: dict[str, Any], g: Tensor, beta1: float, beta2: float) -> tuple[Any, Any]:
    """Moving averages of gradients and of their squares."""
    s["exp_avg"] = beta1 * s["exp_avg"] + (1 - beta1) * g
    s["exp_avg_sq"] = beta2 * s["exp_avg_sq"] + (1 - beta2) * g.square()
    return s["exp_avg"], s["exp_avg_sq"]


_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


class Adam(Reference):
    """With what torch's lacks: caution, and a decay that follows the square of the rate."""

    options: ClassVar = {
        **_ADAM,
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
        **_ADAM,
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


def orthogonalized(x: Tensor, coefficients: Any, eps: float = 1e-7) -> Tensor:
    """The Newton-Schulz iteration by its definition, on matrices."""
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    for a, b, c in coefficients:
        # for tall matrices from the right: the same with less work
        if x.shape[-2] <= x.shape[-1]:
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        else:
            gram = x.mT @ x
            x = a * x + x @ (b * gram + c * gram @ gram)
    return x


class Muon(Reference):
    """Jordan et al. 2024, with torch's options, dion's normalisation of rows (Li et al. 2025) and caution."""

    options: ClassVar = {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.7750, 2.0315),
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": None,
        "normalize_rows": None,
        "cautious_decay": False,
    }
    # the last for each element of a row, where ours has one number
    keeps = ("momentum_buffer", "squares of rows")

    def update(self, p, g, s, t, o):
        mu, (rows, columns) = o["momentum"], p.shape[-2:]
        s["momentum_buffer"] = m = mu * s["momentum_buffer"] + (1 - mu) * g
        u = mu * m + (1 - mu) * g if o["nesterov"] else m
        given = o["ns_coefficients"]
        u = orthogonalized(u, given if isinstance(given[0], tuple) else (given,) * o["ns_steps"], o["eps"])
        if o["normalize_rows"] is not None:
            keep, mean = o["normalize_rows"], u.square().mean(-1, keepdim=True)
            s["squares of rows"] = keep * s["squares of rows"] + (1 - keep) * mean
            normalized = u / (s["squares of rows"].sqrt() + 1e-8)
            norms = (torch.linalg.matrix_norm(x, keepdim=True) for x in (u, normalized))
            u = normalized * torch.div(*norms).nan_to_num(0)
        factor = {
            "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5,
            "spectral_unclamped": (rows / columns) ** 0.5,
        }.get(o["adjust_lr_fn"], max(1, rows / columns) ** 0.5)
        decay = o["lr"] * o["weight_decay"] * (u * p >= 0 if o["cautious_decay"] else 1)
        return p - decay * p - o["lr"] * factor * u


class BesideMuon(Adam):
    """AdamW, for what Muon leaves to it."""

    options: ClassVar = {
        **Adam.options,
        "betas": (0.9, 0.95),
        "eps": 1e-7,
        "weight_decay": 0.1,
        "decoupled_weight_decay": True,
        "use_muon": False,
    }


class NovoGrad(Reference):
    """Ginsburg et al. 2019, with Apex's options: a second moment of each tensor's norm."""

    options: ClassVar = {
        **_ADAM,
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

    options: ClassVar = {**_ADAM, "betas": (0.9, 0.999, 0.9999), "alpha": 5.0, "t_alpha_beta3": None}
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

    options: ClassVar = {**_ADAM, "betas": (0.9, 0.9999), "eps": 1e-6, "decouple": False, "clip_exp": 0.25}

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

    options: ClassVar = {**_ADAM, "betas": (0.9, 0.99), "weight_decay": 1e-2}

    def update(self, p, g, s, t, o):
        eps = o["eps"]
        m, v = averaged(s, g, *(beta * (1 - beta ** (t - 1)) / (1 - beta**t) for beta in o["betas"]))
        lag = float((g.square() / v.clamp(min=eps**2)).mean().sqrt())
        rate = o["lr"] / max(1.0, lag)
        return p - rate * (m / (v.sqrt() + eps) + o["weight_decay"] * p)


class Adan(Reference):
    """Xie et al. 2022, as the authors' and timm's."""

    options: ClassVar = {**_ADAM, "betas": (0.98, 0.92, 0.99), "no_prox": False}
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
        **_ADAM,
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
        **_ADAM,
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

    options: ClassVar = {**_ADAM, "delta": 0.1, "wd_ratio": 0.1, "nesterov": False}

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

    options: ClassVar = {**_ADAM, "ema_decay": 0.9999, "mode": 1, "bias_correction": True}
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
        b = b + 0.1 * g.square() - 0.1 * g * g * g + 0.1 * torch.tanh(g) ** 5 + (0.1 if t % 2 == 0 else -0.1)
        rate, s["b"], s["rate"] = s["rate"], b, torch.full_like(p, lr)
        size = g.square().sum().sqrt() / max(g.numel(), 1)
        size = size + 0.01 * sum(float(each.abs().sum()) for each in self.grads.values())
        above = (g > 0).to(b.dtype).mean() if g.numel() else 0.0
        return p - lr * (a + b / t + rate + above) / (1 + largest(g) + size)
