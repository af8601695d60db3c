"""What all references are made of: groups, states and clipping, and what several have in common."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

# the options of Adam and its relatives
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
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
