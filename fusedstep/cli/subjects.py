"""What `fusedstep check` checks: every optimizer, with options that together reach all that it computes.

A new optimizer needs an entry in `OPTIONS`, and a class of its name in `references` unless torch.optim has
one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import fusedstep
from fusedstep import npu

from . import operators, references

_CLIPPED = {"max_grad_norm": 0.5}
_SCHEDULE = {"e": 0.02, "lr": 0.05, "warmup": 0.4, "t_total": 5, "weight_decay": 0.1}
_TRUST = {"lr": 0.2, "trust_coeff": 0.05, "weight_decay": 0.1, "eps": 0.3}

# options of each optimizer, by its name; rates are so large that steps show in sixteen bits
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "SGD": (
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.2, "maximize": True},
        {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.2},
        {"lr": 0.1, "momentum": 0.8, "nesterov": True},
    ),
    "Adam": (
        {"lr": 0.05, "betas": (0.7, 0.9), "eps": 0.1},
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "maximize": True},
        {"lr": 0.05, "weight_decay": 0.3, "betas": (0.4, 0.5), "amsgrad": True, "eps": 0.01},
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "betas": (0.6, 0.8), "cautious": True},
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "decoupled_weight_decay": True},
    ),
    "AdamW": (
        {"lr": 0.05, "weight_decay": 0.3, "eps": 0.1},
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "betas": (0.4, 0.5), "amsgrad": True},
        {"lr": 0.05, "weight_decay": 0.3, "betas": (0.6, 0.8), "cautious": True, "eps": 0.01},
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "corrected_decay": True, "peak_lr": 0.2},
        {
            "eps": 0.02,
            "lr": 0.05,
            "weight_decay": 0.3,
            "corrected_decay": True,
            "peak_lr": 0.2,
            "amsgrad": True,
        },
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "corrected_decay": True, "cautious": True},
    ),
    "RMSprop": (
        {"lr": 0.05, "alpha": 0.8, "eps": 0.1},
        {"eps": 0.02, "lr": 0.05, "momentum": 0.7, "weight_decay": 0.3},
        {"lr": 0.05, "alpha": 0.8, "centered": True, "eps": 0.1, "weight_decay": 0.3},
        {"lr": 0.05, "alpha": 0.9, "momentum": 0.7, "centered": True, "eps": 0.1, "maximize": True},
    ),
    "Adagrad": (
        {"lr": 0.1, "eps": 0.1},
        {"lr": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.4, "weight_decay": 0.3},
    ),
    "Adadelta": ({"lr": 1.0, "eps": 0.01}, {"lr": 0.7, "rho": 0.7, "eps": 0.05, "weight_decay": 0.3}),
    "Adamax": ({"lr": 0.05, "eps": 0.1}, {"lr": 0.05, "eps": 0.02, "betas": (0.7, 0.6), "weight_decay": 0.3}),
    "NAdam": (
        {"lr": 0.05, "eps": 0.1, "momentum_decay": 0.3},
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "betas": (0.7, 0.9)},
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "decoupled_weight_decay": True},
    ),
    "RAdam": (
        # no early step is rectified, every later one is
        {"lr": 0.05, "eps": 0.1, "betas": (0.7, 0.9)},
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "maximize": True},
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "decoupled_weight_decay": True},
    ),
    "Rprop": (
        {"lr": 0.05},
        {"lr": 0.05, "etas": (0.6, 1.4), "step_sizes": (0.04, 0.08)},
    ),
    "ASGD": (
        {"lr": 0.1},
        {"lr": 0.1, "t0": 2, "lambd": 0.3, "alpha": 0.6, "weight_decay": 0.3},
    ),
    "BertAdam": (
        {"lr": 0.05, "e": 0.1, **_CLIPPED},
        {"lr": 0.05, "e": 0.02, "b1": 0.6, "b2": 0.8, "weight_decay": 0.0, "clip_scope": "group"},
        {**_SCHEDULE, "schedule": "warmup_linear"},
        {**_SCHEDULE, "schedule": "warmup_poly", "clip_scope": "global"},
        {**_SCHEDULE, "schedule": "warmup_cosine", "max_grad_norm": None},
        {**_SCHEDULE, "schedule": "warmup_constant", "maximize": True},
    ),
    "Lamb": (
        {"lr": 0.05, "eps": 0.1, **_CLIPPED},
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "trust_bounds": (0.9, 1.3), "betas": (0.6, 0.8)},
        {"eps": 0.02, "lr": 0.05, "bias_correction": False, "grad_averaging": False, "max_weight_norm": 1.5},
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.0, "max_grad_norm": None},
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.0, "always_adapt": True},
        {"eps": 0.02, "lr": 0.05, "weight_decay": 1.0, "always_adapt": True, "trust_bounds": (0.0, 2.0)},
    ),
    "LARS": (
        {"lr": 0.1, "weight_decay": 0.0},
        {**_TRUST, "trust_clip": True},
        {**_TRUST, "momentum": 0.8, "nesterov": True},
        {**_TRUST, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.0, "always_adapt": True},
        {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.0},
    ),
    "NovoGrad": (
        {"lr": 0.05, "weight_decay": 0.3, "eps": 0.1, "betas": (0.7, 0.8)},
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "reg_inside_moment": True, "bias_correction": False},
        {"lr": 0.05, "by_largest": True, "grad_averaging": False, "betas": (0.7, 0.8), "eps": 0.1},
        {
            "eps": 0.02,
            "lr": 0.05,
            "by_largest": True,
            "init_zero": True,
            "reg_inside_moment": True,
            "weight_decay": 0.3,
        },
        {"eps": 0.02, "lr": 0.05, "init_zero": True, "betas": (0.7, 0.8)},
    ),
    "Lion": (
        {"lr": 0.02, "weight_decay": 0.3},
        {"lr": 0.02, "betas": (0.6, 0.7), "maximize": True},
        {"lr": 0.02, "cautious": True, "weight_decay": 0.3},
    ),
    # few iterations: more would turn rounding errors into differences that mutants could hide in
    "Muon": (
        {"lr": 0.05, "ns_steps": 2, "weight_decay": 0.3, "momentum": 0.7},
        {"lr": 0.05, "ns_steps": 2, "nesterov": False, "adjust_lr_fn": "match_rms_adamw", "maximize": True},
        {"lr": 0.05, "ns_steps": 1, "adjust_lr_fn": "spectral_unclamped", "cautious_decay": True},
        {"lr": 0.05, "ns_steps": 3, "normalize_rows": 0.6, "eps": 1.5},
        {"lr": 0.05, "use_muon": False, "weight_decay": 0.3, "betas": (0.6, 0.8), "eps": 0.1},
    ),
    "AdEMAMix": (
        {"lr": 0.02, "eps": 0.1, "betas": (0.7, 0.9, 0.95), "alpha": 3.0},
        {"eps": 0.02, "lr": 0.02, "weight_decay": 0.3, "t_alpha_beta3": 4, "betas": (0.7, 0.9, 0.95)},
        {"eps": 0.02, "lr": 0.02, "t_alpha_beta3": 40, "betas": (0.9, 0.9, 0.8)},
    ),
    "ADOPT": (
        {"lr": 0.05, "eps": 0.4, "betas": (0.7, 0.9), "clip_exp": 0.0},
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "clip_exp": 0.1},
        {"lr": 0.05, "weight_decay": 0.3, "decouple": True, "clip_exp": None, "eps": 0.01},
    ),
    "StableAdamW": (
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "betas": (0.7, 0.9)},
        {"lr": 0.05, "eps": 0.6, "betas": (0.5, 0.97)},
    ),
    "Adan": (
        {"eps": 0.02, "lr": 0.02, "weight_decay": 0.3, "betas": (0.7, 0.8, 0.9)},
        {"lr": 0.02, "weight_decay": 0.3, "no_prox": True, "eps": 0.1},
    ),
    "ScheduleFreeAdamW": (
        {"lr": 0.05, "eps": 0.1, "weight_decay": 0.3},
        {"eps": 0.02, "lr": 0.05, "betas": (0.7, 0.9), "warmup_steps": 4, "r": 0.7, "weight_lr_power": 1.5},
    ),
    "ScheduleFreeSGD": (
        {"lr": 0.1, "weight_decay": 0.3},
        {"lr": 0.1, "momentum": 0.7, "warmup_steps": 4, "r": 0.7, "weight_lr_power": 1.5},
    ),
    "Prodigy": (
        {"d0": 0.01, "weight_decay": 0.3, "eps": 0.1},
        {"d0": 0.01, "lr": 0.7, "weight_decay": 0.3, "decouple": False, "beta3": 0.6, "d_coef": 1.5},
        {"d0": 0.001, "use_bias_correction": True, "betas": (0.6, 0.8), "growth_rate": 1.1},
        {
            "d0": 0.001,
            "weight_decay": 0.3,
            "safeguard_warmup": True,
            "betas": (0.0, 0.9),
            "growth_rate": 1.5,
            "beta3": 0.0,
        },
    ),
    "npu.NpuFusedSGD": ({"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.2},),
    "npu.NpuFusedAdam": ({"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "amsgrad": True},),
    "npu.NpuFusedAdamW": ({"lr": 0.05, "weight_decay": 0.3, "eps": 0.1},),
    "npu.NpuFusedBertAdam": (
        {**_SCHEDULE, "schedule": "warmup_linear"},
        {"lr": 0.05, "e": 0.02, "weight_decay": 0.3, **_CLIPPED},
    ),
    "npu.NpuFusedLamb": (
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "use_global_grad_norm": True},
        {"eps": 0.02, "lr": 0.05, "adam": True, "betas": (0.6, 0.8)},
    ),
    "npu.NpuFusedAdadelta": ({"lr": 0.7, "rho": 0.7, "eps": 0.05, "weight_decay": 0.3},),
    "npu.NpuFusedRMSprop": ({"lr": 0.05, "alpha": 0.8, "eps": 0.1, "momentum": 0.7},),
    "npu.NpuFusedRMSpropTF": (
        {"lr": 0.05, "alpha": 0.8, "eps": 0.1, "weight_decay": 0.3},
        {"eps": 0.02, "lr": 0.05, "alpha": 0.8, "momentum": 0.7, "weight_decay": 0.1, "decoupled_decay": True},
        {"lr": 0.05, "alpha": 0.8, "eps": 0.3, "centered": True},
        {"lr": 0.05, "alpha": 0.8, "eps": 0.3, "centered": True, "momentum": 0.7, "lr_in_momentum": False},
    ),
    "npu.NpuFusedAdamP": (
        # at some steps rows are projected, at others all, or nothing; no cosine is near its threshold
        {"lr": 0.03, "weight_decay": 0.3, "eps": 0.02, "betas": (0.7, 0.9), "delta": 0.84},
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "delta": 20.0, "wd_ratio": 0.4, "nesterov": True},
    ),
    # their scalars are float32, in which 1 - 0.999 is inexact
    "functional.adamw_": (
        {"lr": 0.05, "weight_decay": 0.3, "eps": 0.1, "betas": (0.7, 0.9)},
        {"eps": 0.02, "lr": 0.05, "weight_decay": 0.3, "betas": (0.4, 0.5), "amsgrad": True, "maximize": True},
    ),
    "npu.npu_apply_fused_adamw_v2": (
        {"lr": 0.05, "weight_decay": 0.3, "eps": 0.1, "betas": (0.7, 0.9)},
        {"lr": 0.05, "weight_decay": 0.3, "eps": 0.1, "betas": (0.4, 0.5), "amsgrad": True},
    ),
    "npu.npu_apply_fused_ema_adamw": (
        {"lr": 0.05, "weight_decay": 0.3, "eps": 0.1, "betas": (0.7, 0.9), "ema_decay": 0.7},
        {
            "eps": 0.02,
            "lr": 0.05,
            "weight_decay": 0.3,
            "betas": (0.7, 0.9),
            "mode": 0,
            "ema_decay": 0.7,
            "bias_correction": False,
        },
    ),
    "rules": ({"lr": 0.1, "low": -0.4, "high": 0.5},),
    "plain numbers": ({"lr": 0.1, "low": -0.4, "high": 0.5},),
}


class Subject(NamedTuple):
    """An optimizer with one of its sets of options, the `number`-th, from 1."""

    name: str
    number: int
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name}.{self.number}"

    @property
    def ours(self) -> Callable[..., Any]:
        if self.name in operators.OPERATORS:
            return operators.OPERATORS[self.name]
        module, _, name = self.name.rpartition(".")
        return getattr(npu if module else fusedstep, name)

    @property
    def reference(self) -> type[torch.optim.Optimizer]:
        return reference_of(self.name, self.options)

    def takes(self, *options: str) -> bool:
        """Whether it has these arguments."""
        return {*options} <= _arguments(self.ours)

    def option(self, name: str) -> Any:
        """The value that it is given, or its default."""
        found = inspect.signature(self.ours).parameters.get(name)
        return self.options.get(name, None if found is None else found.default)

    @property
    def jumps(self) -> bool:
        """Whether rounding may flip the sign of a whole step of an element."""
        return self.name in ("Lion", "Rprop", "rules", "plain numbers") or any(
            self.options.get(name) for name in ("cautious", "cautious_decay")
        )


@functools.cache
def _arguments(cls: Callable) -> frozenset[str]:
    return frozenset(inspect.signature(cls).parameters)


# names of references, where they differ
_NAMES = {
    "npu.NpuFusedSGD": "SGD",
    "npu.NpuFusedAdam": "Adam",
    "npu.NpuFusedAdamW": "AdamW",
    "npu.NpuFusedAdadelta": "Adadelta",
    "npu.NpuFusedRMSprop": "RMSprop",
    "npu.NpuFusedBertAdam": "NpuFusedBertAdam",
    "functional.adamw_": "AdamW",
    "npu.npu_apply_fused_adamw_v2": "AdamW",
    "npu.npu_apply_fused_ema_adamw": "EmaAdamW",
    "rules": "Words",
    "plain numbers": "Words",
}


def reference_of(name: str, options: dict[str, Any]) -> type[torch.optim.Optimizer]:
    """torch.optim's class, where it has one that takes these options; else that of `references`."""
    plain = _NAMES.get(name, name.rpartition(".")[2])
    if options.get("use_muon") is False:
        return references.BesideMuon
    # torch's Muon multiplies matrices in bfloat16, whatever its parameters are
    theirs = getattr(torch.optim, plain, None) if plain != "Muon" else None
    if theirs is not None and options.keys() <= inspect.signature(theirs).parameters.keys():
        return theirs
    return getattr(references, plain)


SUBJECTS = [Subject(name, i, row) for name, rows in OPTIONS.items() for i, row in enumerate(rows, 1)]
