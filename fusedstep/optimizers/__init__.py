"""Drop-ins for torch.optim's element-wise optimizers, and other popular ones.

    SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam, Rprop, ASGD, Muon
                   torch.optim's signatures, options, states and results
    BertAdam, Lamb, LARS, NovoGrad, Lion, AdEMAMix, ADOPT, StableAdamW, Adan, ScheduleFreeAdamW,
    ScheduleFreeSGD, Prodigy
                   the results of their authors' code, or of the most-used implementation

Arguments that every class takes beyond its own:

    maximize       ascend instead of descend
    max_grad_norm  scale gradients down to this norm, taken over all parameters, as they are read: `p.grad`
                   itself does not change. None, 0 or less: no limit. A group may have its own limit
    norm_type      the norm: 2, or inf for the largest element
    norm_group     process group of ranks that step other parameters of the same model, as with
                   ZeroRedundancyOptimizer or pipeline stages: these ranks share the norm, and skip together
    skip_nonfinite skip a step, on the device, if a gradient holds NaN or inf; see `step_was_skipped` and
                   `skipped_steps`
    ema_decay      keep a moving average of the parameters, state `ema`, in float32 at least; it starts from the
                   parameters before the first step with it. `ema_parameters()` shows it
    statistics     collect what `statistics()` returns: norms of gradients, parameters, updates, and more
    state_dtype    dtype of the states, for example torch.float32 under bfloat16 parameters, or "int8" for a
                   quarter of the memory; or a mapping from names of states to dtypes. None: the parameter's.
                   States of a loaded checkpoint are converted to it. A group may have its own; without it, 8
                   bits are only for tensors of 4,096 elements or more
    master         how to keep the numbers that 16-bit parameters are rounded from: "split", a rest of 16 bits
                   beside bfloat16 parameters; "split8", a rest of 8 bits; "float32", a copy; None: not at all.
                   A group may have its own
    rounding       "nearest", or "stochastic" for 16-bit parameters without a master and for narrow states
    seed           seed of stochastic rounding; the same on all ranks
    engine         "torch", "cpu" or "triton" to insist on one; None: the best one for each parameter
    offload        "cpu" to keep states and masters in pinned host memory, and step all parameters there: a GPU
                   then holds only parameters and gradients. None: everything stays on its device

The classes that torch.optim has also take its arguments:

    foreach, fused, capturable
                   accepted so that existing calls keep working. Every step here is fused, and can be
                   captured in a CUDA graph
    differentiable must be False: a fused update is not recorded by autograd
"""

from .adadelta import Adadelta
from .adagrad import Adagrad
from .adam import Adam, AdamW
from .adamax import Adamax
from .adan import Adan
from .ademamix import AdEMAMix
from .adopt import ADOPT
from .asgd import ASGD
from .bert_adam import BertAdam
from .lamb import Lamb
from .lars import LARS
from .lion import Lion
from .muon import Muon
from .nadam import NAdam
from .novograd import NovoGrad
from .prodigy import Prodigy
from .radam import RAdam
from .rmsprop import RMSprop
from .rprop import Rprop
from .schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from .sgd import SGD
from .stable_adamw import StableAdamW

__all__ = [
    "ADOPT",
    "ASGD",
    "LARS",
    "SGD",
    "AdEMAMix",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Adan",
    "BertAdam",
    "Lamb",
    "Lion",
    "Muon",
    "NAdam",
    "NovoGrad",
    "Prodigy",
    "RAdam",
    "RMSprop",
    "Rprop",
    "ScheduleFreeAdamW",
    "ScheduleFreeSGD",
    "StableAdamW",
]
