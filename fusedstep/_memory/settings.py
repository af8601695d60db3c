"""What holds for all parameters of an optimizer, and what for those of a group."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._algorithm.program import ONLY_UPDATE, Rule, StepSpec
from .ranks import Ranks
from .storage import AS_PARAMETER, Storage


class Settings(NamedTuple):
    """Settings that hold for everything an optimizer steps.

    Scalars are computed in `exact`: float64, so that bias corrections are right at any step. `counts` says
    whether a step is counted before it is taken. `norm_ranks` are ranks that step other parameters, which are
    clipped together with the parameters here.
    """

    owner: str
    engine: str | None = None
    clip_scope: str = "global"
    exact: torch.dtype = torch.float64
    counts: bool = True
    spec: StepSpec = ONLY_UPDATE
    norm_ranks: Ranks | None = None
    # of random bits
    seed: int = 0
    # for the workspaces of stages, and what they allocate
    workspace_bytes: int = 0
    # ranks that have the same parameters, and divide the work of stages
    replicas: Ranks | None = None
    # whether parameters are stepped on the host, wherever they are
    offload: bool = False
    # every rule that a group of the optimizer may have; none if states are passed at every call
    rules: tuple[Rule, ...] = ()


class Update(NamedTuple):
    """What is done to the parameters of a group: a rule, whether they are averaged, how states are stored."""

    rule: Rule
    averages: bool = False
    storage: Storage = AS_PARAMETER
