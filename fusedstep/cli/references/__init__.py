"""References: optimizers in plain tensor operations, from their papers and their authors' descriptions.

Independent of the library on purpose: a reference that shared its rules could not disagree with it. In float64,
results are compared with references if torch.optim lacks the optimizer or its options; in other dtypes they
compute in float32 at least, and show how exact a loop of operations is. Recorded runs of the authors' packages
prove them (tests/test_references.py).
"""

from .adam import Adam, AdamW, BertAdam, Lamb, NpuFusedBertAdam
from .base import Reference, agreeing, averaged, clip_factors, largest
from .by_group import Prodigy, ScheduleFreeAdamW, ScheduleFreeSGD
from .family import ADOPT, LARS, Adan, AdEMAMix, Lion, NovoGrad, StableAdamW
from .muon import BesideMuon, Muon, orthogonalized
from .others import EmaAdamW, NpuFusedAdamP, NpuFusedLamb, NpuFusedRMSpropTF, Words

__all__ = [
    "ADOPT",
    "LARS",
    "AdEMAMix",
    "Adam",
    "AdamW",
    "Adan",
    "BertAdam",
    "BesideMuon",
    "EmaAdamW",
    "Lamb",
    "Lion",
    "Muon",
    "NovoGrad",
    "NpuFusedAdamP",
    "NpuFusedBertAdam",
    "NpuFusedLamb",
    "NpuFusedRMSpropTF",
    "Prodigy",
    "Reference",
    "ScheduleFreeAdamW",
    "ScheduleFreeSGD",
    "StableAdamW",
    "Words",
    "agreeing",
    "averaged",
    "clip_factors",
    "largest",
    "orthogonalized",
]
