"""Drop-ins for torch.optim's element-wise optimizers, and those that people pick besides.

    SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam, Rprop, ASGD, Muon
                   torch.optim's signatures, options, states and results
    BertAdam, Lamb, LARS, NovoGrad, Lion, AdEMAMix, ADOPT, StableAdamW, Adan, ScheduleFreeAdamW,
    ScheduleFreeSGD, Prodigy
                   results of their authors' code, or the implementation that is used most

Arguments that every class takes beyond its own:

    maximize       ascend instead of descend
    max_grad_norm  scale gradients down to this norm, taken over all parameters, as they are read: `p.grad`
                   itself stays as it is. None, 0 or less: no limit. A group's own limit holds for that group
    norm_type      which norm that is: 2, or inf for the largest element
    norm_group     process group of ranks that step other parameters of the same model, as those of
                   ZeroRedundancyOptimizer or the stages of a pipeline do: norm and skips are one for all
    skip_nonfinite skip a step, on the device, if a gradient holds NaN or inf; `step_was_skipped` and
                   `skipped_steps` tell
    ema_decay      keep a moving average of the parameters, state `ema`, in float32 at least, from what they are
                   before the first step with it; `ema_parameters()` shows it
    statistics     sum up what `statistics()` then tells: norms of gradients, parameters, updates, and more
    state_dtype    dtype of the states, for example torch.float32 under bfloat16 parameters, or "int8" for a
                   quarter of the memory; or a mapping of these by the names of states. None: the parameter's.
                   It holds through save and load, whatever the checkpoint was saved with. A group may have
                   its own; where it has none, 8 bits are for tensors of 4,096 elements or more
    master         how what a parameter of 16 bits was rounded from is kept: "split", bfloat16 parameters and
                   a rest of 16 bits; "split8", a rest of 8 bits; "float32", a copy; None: not at all. A
                   group may have its own
    rounding       "nearest", or "stochastic" for parameters of 16 bits without a master and narrow states
    seed           of the random bits for that; the same on all ranks
    engine         "torch", "cpu" or "triton" to insist on one; None: the best one for each parameter
    offload        "cpu" to have states and masters in pinned memory of the host, which steps all parameters:
                   a GPU then holds these and their gradients alone. None: all stays on its device

Those that torch.optim has also take what they take there:

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
