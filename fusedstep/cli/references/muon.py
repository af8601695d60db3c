"""References of Muon, and of AdamW beside it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from .adam import Adam
from .base import Reference


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
