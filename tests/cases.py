"""THE table: every optimizer with the options that change what it computes. A new optimizer is a new row.

The tests of a property (numerics, round trip, late gradient, found_inf, ...) run for every row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import fusedstep
from tests import reference


class Case(NamedTuple):
    """An optimizer of ours, the one it replaces, and a float64 reference, all taking these options."""

    name: str
    ours: type
    theirs: type
    reference: Callable
    options: dict[str, Any]


_SGD = fusedstep.SGD, torch.optim.SGD, reference.sgd
_ADAM = fusedstep.Adam, torch.optim.Adam, reference.adam
_ADAMW = fusedstep.AdamW, torch.optim.AdamW, reference.adamw

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
]
# one of each kind of rule, for properties that do not depend on options
KINDS = [case for case in CASES if case.name in ("sgd", "sgd-momentum", "adam-amsgrad", "adamw")]


def name_of(case: Case) -> str:
    return case.name
