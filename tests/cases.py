"""THE table: every optimizer with the options that change what it computes. A new optimizer is a new row.

The tests of a property (numerics, round trip, late gradient, found_inf, ...) run for every row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import fusedstep
from tests import peers, reference


class Case(NamedTuple):
    """An optimizer of ours, the one it replaces, and a float64 reference, all taking these options."""

    name: str
    ours: type
    theirs: type
    reference: Callable
    options: dict[str, Any]

    @property
    def sums(self) -> bool:
        """Whether an update depends on sums over tensors: the order of adding then shows in the last bits."""
        limit, _, _ = reference.clipping(self.reference, self.options)
        return self.ours is fusedstep.Lamb or (limit is not None and limit > 0)


_SGD = fusedstep.SGD, torch.optim.SGD, reference.sgd
_ADAM = fusedstep.Adam, torch.optim.Adam, reference.adam
_ADAMW = fusedstep.AdamW, torch.optim.AdamW, reference.adamw
_BERT_ADAM = fusedstep.BertAdam, peers.BertAdam, reference.bert_adam
_LAMB = fusedstep.Lamb, peers.Lamb, reference.lamb
# the warm-up ends within the first steps of a test, and the schedule before the last
_WARM = {"lr": 1e-2, "warmup": 0.2, "t_total": 30}

CASES = [
    Case("sgd", *_SGD, {"lr": 1e-2}),
    Case("sgd-decay", *_SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    Case("sgd-momentum", *_SGD, {"lr": 1e-2, "momentum": 0.9}),
    Case("sgd-damped", *_SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    Case("sgd-nesterov", *_SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    Case("adam", *_ADAM, {"lr": 1e-2}),
    Case("adam-decay", *_ADAM, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    Case("adam-amsgrad", *_ADAM, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    Case("adam-small-beta", *_ADAM, {"lr": 1e-2, "betas": (0.2, 0.7), "eps": 1e-3}),
    Case("adam-decoupled", *_ADAM, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    Case("adamw", *_ADAMW, {"lr": 1e-2}),
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
# one of each kind of rule, for properties that do not depend on options
_NAMES = ("sgd", "sgd-momentum", "adam-amsgrad", "adamw", "bert-adam", "lamb")
KINDS = [case for case in CASES if case.name in _NAMES]


def name_of(case: Case) -> str:
    return case.name
