"""THE table: every optimizer with the options that change what it computes. A new optimizer is a new row.

The tests of a property (numerics, round trip, late gradient, found_inf, ...) run for every row, or for one row
of every rule. What they have to know of an optimizer they ask its case.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import fusedstep
from fusedstep._algorithm.program import Rule
from fusedstep.cli import references
from tests import reference


class Case(NamedTuple):
    """An optimizer of ours, the one it replaces, and a float64 reference, all taking these options."""

    name: str
    ours: type
    theirs: type
    reference: Callable
    options: dict[str, Any]

    @property
    def rule(self) -> Rule:
        optimizer = self.ours([torch.nn.Parameter(torch.empty(0))], **self.options)
        return optimizer.rule_of(optimizer.param_groups[0])

    @property
    def sums(self) -> bool:
        """Whether an update depends on sums over tensors: the order of adding then shows in the last bits."""
        limit, _, _ = reference.clipping(self.reference, self.options)
        return self.rule.needs_sums or (limit is not None and limit > 0)

    @property
    def clip_eps(self) -> float:
        """What is added to a norm before the limit is divided by it."""
        return reference.clipping(self.reference, self.options)[2]

    @property
    def has_trust_ratios(self) -> bool:
        return self.reference is reference.lamb

    def with_options(self, name: str | None = None, **options: Any) -> "Case":
        """The same with these options too, by another name if one is given."""
        return self._replace(name=name or self.name, options={**self.options, **options})

    def with_limit(self, limit: float | None) -> "Case":
        """Ours with its gradients clipped together, as torch's clip_grad_norm_ does."""
        _, scope, _ = reference.clipping(self.reference, {})
        return self.with_options(max_grad_norm=limit, **({} if scope == "global" else {"clip_scope": "global"}))

    def unlimited(self) -> "Case":
        """The case with its gradients as they are."""
        if self.reference in reference.CLIPPING:
            return self.with_options(max_grad_norm=None)
        # those that do not limit anything by themselves replace some that cannot
        return self._replace(options={k: v for k, v in self.options.items() if k != "max_grad_norm"})


_SGD = fusedstep.SGD, torch.optim.SGD, reference.sgd
_ADAM = fusedstep.Adam, torch.optim.Adam, reference.adam
_ADAMW = fusedstep.AdamW, torch.optim.AdamW, reference.adamw
_BERT_ADAM = fusedstep.BertAdam, references.BertAdam, reference.bert_adam
_LAMB = fusedstep.Lamb, references.Lamb, reference.lamb
# the warm-up ends within the first steps of a test, and the schedule before the last
_WARM = {"lr": 1e-2, "warmup": 0.2, "t_total": 30}

CASES = [
    Case("sgd", *_SGD, {"lr": 1e-2}),
    Case("sgd-decay", *_SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    Case("sgd-momentum", *_SGD, {"lr": 1e-2, "momentum": 0.9}),
    Case("sgd-damped", *_SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    Case("sgd-nesterov", *_SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    # stands for the rule that it shares with Adam: the one that most people use
    Case("adamw", *_ADAMW, {"lr": 1e-2}),
    Case("adam", *_ADAM, {"lr": 1e-2}),
    Case("adam-decay", *_ADAM, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    Case("adam-amsgrad", *_ADAM, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    Case("adam-small-beta", *_ADAM, {"lr": 1e-2, "betas": (0.2, 0.7), "eps": 1e-3}),
    Case("adam-decoupled", *_ADAM, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    Case("adamw-amsgrad", *_ADAMW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    Case("adamw-no-momentum", *_ADAMW, {"lr": 1e-2, "betas": (0.0, 0.99)}),
    Case("bert-adam", *_BERT_ADAM, {"lr": 1e-2, "warmup": 0, "t_total": 100}),
    Case("bert-adam-no-schedule", *_BERT_ADAM, {"lr": 1e-2, "b1": 0.8, "b2": 0.95, "e": 1e-4}),
    Case("bert-adam-constant", *_BERT_ADAM, {**_WARM, "schedule": "warmup_constant"}),
    Case("bert-adam-linear", *_BERT_ADAM, {**_WARM, "schedule": "warmup_linear", "clip_scope": "global"}),
    Case("bert-adam-poly", *_BERT_ADAM, {**_WARM, "schedule": "warmup_poly", "clip_scope": "group"}),
    Case("bert-adam-cosine", *_BERT_ADAM, {**_WARM, "schedule": "warmup_cosine", "maximize": True}),
    Case("bert-adam-half-rate", *_BERT_ADAM, {"lr": 1e-2, "t_total": 30, "weight_decay": 0.0}),
    Case("bert-adam-unclipped", *_BERT_ADAM, {**_WARM, "weight_decay": 0.1, "max_grad_norm": None}),
    Case("lamb", *_LAMB, {"lr": 1e-2}),
    Case("lamb-unclipped", *_LAMB, {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": None}),
    Case("lamb-uncorrected", *_LAMB, {"lr": 1e-2, "bias_correction": False, "betas": (0.8, 0.95)}),
    Case("lamb-no-averaging", *_LAMB, {"lr": 1e-2, "grad_averaging": False}),
    Case("lamb-bounds", *_LAMB, {"lr": 1e-2, "trust_bounds": (1.0, 1.1)}),
    Case("lamb-no-decay", *_LAMB, {"lr": 1e-2, "weight_decay": 0.0}),
    Case("lamb-always", *_LAMB, {"lr": 1e-2, "weight_decay": 0.0, "always_adapt": True}),
    Case("lamb-max-weight", *_LAMB, {"lr": 1e-2, "max_weight_norm": 2.0, "maximize": True}),
]
# of every rule its first row, for properties that do not depend on options
KINDS = [*{case.rule: case for case in reversed(CASES)}.values()][::-1]
CLASSES = [*dict.fromkeys(case.ours for case in CASES)]
# those that torch has too
TORCH_CLASSES = [cls for cls in CLASSES if hasattr(torch.optim, cls.__name__)]


# the others: their numbers are compared with recorded runs of references (test_family.py), and on every engine
# with their own rules, for each of these rows
FAMILY = [
    (fusedstep.RMSprop, {}),
    (fusedstep.RMSprop, {"momentum": 0.9, "weight_decay": 0.1}),
    (fusedstep.RMSprop, {"centered": True, "eps": 1e-3}),
    (fusedstep.RMSprop, {"momentum": 0.9, "centered": True, "eps": 1e-3}),
    (fusedstep.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1, "weight_decay": 0.1}),
    (fusedstep.Adadelta, {"weight_decay": 0.1}),
    (fusedstep.Adamax, {"weight_decay": 0.1}),
    (fusedstep.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (fusedstep.RAdam, {"weight_decay": 0.1, "maximize": True}),
    (fusedstep.Rprop, {}),
    (fusedstep.ASGD, {"t0": 2, "lambd": 0.1}),
    (fusedstep.Lion, {"weight_decay": 0.1}),
    (fusedstep.Lion, {"cautious": True}),
    (fusedstep.LARS, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (fusedstep.LARS, {"always_adapt": True, "trust_clip": True}),
    (fusedstep.NovoGrad, {"weight_decay": 0.1}),
    (fusedstep.NovoGrad, {"by_largest": True, "reg_inside_moment": True}),
    (fusedstep.AdEMAMix, {"weight_decay": 0.1, "t_alpha_beta3": 30}),
    (fusedstep.ADOPT, {"weight_decay": 0.1, "decouple": True}),
    (fusedstep.StableAdamW, {"lr": 0.1}),
    (fusedstep.Adan, {"weight_decay": 0.1}),
    (fusedstep.ScheduleFreeAdamW, {"warmup_steps": 3, "weight_decay": 0.1}),
    (fusedstep.ScheduleFreeSGD, {"lr": 0.1, "r": 0.5}),
    (fusedstep.Prodigy, {"d0": 1e-3, "weight_decay": 0.1}),
    (fusedstep.AdamW, {"cautious": True}),
    (fusedstep.AdamW, {"corrected_decay": True, "peak_lr": 0.1}),
    (fusedstep.Adam, {"cautious": True, "weight_decay": 0.1}),
]


def by_name(name: str) -> Case:
    """For tests that one case is enough for, or two."""
    return next(case for case in CASES if case.name == name)


def name_of(case: Case) -> str:
    return case.name
