"""Ascend's fused optimizers, by their names and with their results, on any device.

The classes of `torch_npu.optim`, and MindSpeed's `npu_apply_fused_adamw_v2` and `npu_apply_fused_ema_adamw`:
the same signatures, defaults, exceptions, states and, in float32, the same results. `python -m fusedstep.npu
script.py` runs a script that is written for them. What differs from upstream, for all of them:

    memory     parameters, gradients and states may move, vanish, come back, be loaded, pickled or replaced
               between two steps. Upstream flattens them once and goes on stepping the old memory
    numbers    16-bit parameters are computed in float32; upstream computes in float16, where eps=1e-8 is 0.
               bfloat16, float64 and any memory layout work
    step       saved as a tensor, as in torch.optim; checkpoints of both and of upstream can be loaded
    zero_grad  has upstream's default, set_to_none=False. True works too

Two more arguments, by keyword only: `state_dtype` and `engine`, see `fusedstep.optimizers`.
"""

from ._adamp import NpuFusedAdamP
from ._lamb import NpuFusedLamb
from ._operator import npu_apply_fused_adamw_v2, npu_apply_fused_ema_adamw
from ._optimizers import NesterovError, NpuFusedAdam, NpuFusedAdamW, NpuFusedBertAdam, NpuFusedSGD
from ._rmsprop import NpuFusedAdadelta, NpuFusedRMSprop, NpuFusedRMSpropTF

__all__ = [
    "NesterovError",
    "NpuFusedAdadelta",
    "NpuFusedAdam",
    "NpuFusedAdamP",
    "NpuFusedAdamW",
    "NpuFusedBertAdam",
    "NpuFusedLamb",
    "NpuFusedRMSprop",
    "NpuFusedRMSpropTF",
    "NpuFusedSGD",
    "npu_apply_fused_adamw_v2",
    "npu_apply_fused_ema_adamw",
]
