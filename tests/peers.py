"""What people use today for the optimizers that torch.optim lacks: loops over ordinary tensor operations.

BertAdam after NVIDIA's, Lamb after Apex's and timm's, both in float32 or wider, with torch's names of states
and all of our options: the measure of how exact such an optimizer usually is.
"""

import math

import torch


class _Loop(torch.optim.Optimizer):
    """Groups, states and clipping; a subclass says how far to go from `p`."""

    clip_eps = 1e-6

    def __init__(self, params, defaults, clip_scope="global"):
        self.clip_scope = clip_scope
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        members = [(p, i) for i, group in enumerate(self.param_groups) for p in group["params"]]
        members = [(p, i) for p, i in members if p.grad is not None]
        grads = {p: p.grad.to(wide(p)) for p, _ in members}
        label = {"tensor": lambda p, i: p, "group": lambda p, i: (i, p.dtype), "global": lambda p, i: 0}
        together = {}
        for p, i in members:
            together.setdefault(label[self.clip_scope](p, i), []).append(grads[p])
        norms = {key: torch.nn.utils.get_total_norm(same) for key, same in together.items()}
        for p, i in members:
            group, g = self.param_groups[i], grads[p]
            limit = group.get("max_grad_norm")
            if limit is not None and limit > 0:
                norm = norms[label[self.clip_scope](p, i)]
                g = g * torch.clamp(limit / (norm + self.clip_eps), max=1.0).to(g)
            self._step(p, -g if group["maximize"] else g, group)

    def _step(self, p, g, group):
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        m, v, value = (t.to(g.dtype) for t in (state["exp_avg"], state["exp_avg_sq"], p))
        update = self.update(value, g, m, v, float(state["step"]), group)
        state["step"] += 1
        for stored, new in ((p, value - update), (state["exp_avg"], m), (state["exp_avg_sq"], v)):
            stored.copy_(new)

    def update(self, p, g, m, v, step, group):
        """What to subtract from `p` after `step` steps; `m` and `v` are updated in place."""
        raise NotImplementedError


def wide(t):
    return torch.promote_types(t.dtype, torch.float32)


class BertAdam(_Loop):
    def __init__(
        self,
        params,
        lr=1e-3,
        warmup=-1,
        t_total=-1,
        schedule="warmup_linear",
        b1=0.9,
        b2=0.999,
        e=1e-6,
        weight_decay=0.01,
        max_grad_norm=1.0,
        clip_scope="tensor",
        maximize=False,
        foreach=None,
        fused=None,
    ):
        names = ("lr", "warmup", "t_total", "schedule", "b1", "b2", "e", "weight_decay", "max_grad_norm")
        values = lr, warmup, t_total, schedule, b1, b2, e, weight_decay, max_grad_norm
        super().__init__(params, {**dict(zip(names, values, strict=True)), "maximize": maximize}, clip_scope)

    def update(self, p, g, m, v, step, group):
        m.mul_(group["b1"]).add_(g, alpha=1 - group["b1"])
        v.mul_(group["b2"]).addcmul_(g, g, value=1 - group["b2"])
        u = m / (v.sqrt() + group["e"])
        if group["weight_decay"] > 0:
            u += group["weight_decay"] * p
        rate = group["lr"]
        if group["t_total"] != -1:
            rate = rate * factor(step / group["t_total"], group["warmup"], group["schedule"])
        return rate * u


def factor(x, warmup, schedule):
    if x < warmup:
        return x / warmup
    if schedule == "warmup_linear":
        return max((x - 1.0) / (warmup - 1.0), 0.0)
    if schedule == "warmup_poly":
        return max(1.0 - x, 0.0) ** 0.5
    return 0.5 * (1.0 + math.cos(math.pi * x)) if schedule == "warmup_cosine" else 1.0


class Lamb(_Loop):
    # Apex divides by the norm itself
    clip_eps = 0.0

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-6,
        weight_decay=0.01,
        bias_correction=True,
        grad_averaging=True,
        max_grad_norm=1.0,
        trust_bounds=(0.0, float("inf")),
        max_weight_norm=float("inf"),
        always_adapt=False,
        maximize=False,
        foreach=None,
        fused=None,
    ):
        names = ("lr", "betas", "eps", "weight_decay", "bias_correction", "grad_averaging", "max_grad_norm")
        values = lr, betas, eps, weight_decay, bias_correction, grad_averaging, max_grad_norm
        trust = {"trust_bounds": trust_bounds, "max_weight_norm": max_weight_norm, "always_adapt": always_adapt}
        super().__init__(params, {**dict(zip(names, values, strict=True)), **trust, "maximize": maximize})

    def update(self, p, g, m, v, step, group):
        beta1, beta2 = group["betas"]
        m.mul_(beta1).add_(g, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        bias1, bias2 = 1.0, 1.0
        if group["bias_correction"]:
            bias1, bias2 = 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)
        u = (m / bias1) / (v.sqrt() / math.sqrt(bias2) + group["eps"])
        if group["weight_decay"] != 0:
            u += group["weight_decay"] * p
        if group["weight_decay"] != 0 or group["always_adapt"]:
            of_weights, of_update = p.norm(), u.norm()
            ratio = of_weights.clamp(max=group["max_weight_norm"]) / of_update
            ratio = ratio.clamp(*group["trust_bounds"])
            u = u * torch.where((of_weights > 0) & (of_update > 0), ratio, 1.0)
        return group["lr"] * u
