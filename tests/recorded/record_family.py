"""Records what reference implementations of optimizers do on a fixed problem.

    python tests/recorded/record_family.py tests/recorded/family.json

The tests compare our optimizers with the file this writes, so that none of the
packages below has to be installed to run them.  To write it again, make a
virtual environment with

    torch 2.13.0 (CPU), timm 1.0.30 (without its dependencies), pytorch_optimizer 4.1.0,
    schedulefree 1.4.1, prodigyopt 1.1.2, lion-pytorch 0.2.5, torch-optimi 0.3.3, adamp 0.3.0,
    packaging (torch-optimi needs it), pytorch-pretrained-bert 0.6.2 (without its dependencies)

and, for ADOPT, put the folder src of the repository iShohei220/adopt (commit
6468572) on PYTHONPATH: the package of that name in package indexes is another
project.  A package that is missing leaves its cases out, with a line that says so.

The problem needs no random generator.  Parameter k has element i start at
sin(1 + 0.7 i + 2.1 k); at step t (from 1) its gradient is

    0.3 (p - cos(0.3 i + k)) + 0.5 sin(0.9 t + 1.7 i + 0.4 k)

with p the value the training loop sees.  A case with "wave" sets the learning rate
before step t to lr (1 + 0.5 sin(0.1 t)), with lr what the class was made with.

A case holds
    options        what the class was given; "also" has what is no rule (foreach)
    default_dtype  torch's default dtype: scalars in state take it, not the parameter's
    params         the parameters after steps 1, 2, 10 and 100, flat; "eval" after .eval()
    state          each state entry: "shape" is "param", "scalar" (0-dim tensor),
                   "number" (Python number), "none", or the list of one shape per
                   parameter; scalars and numbers have "values", one per parameter
    group          all keys of the parameter group but params, after step 100
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import math
import sys
import types
import warnings

import torch

SHAPES = [(3, 4), (5,), (2, 3, 2, 2)]
STEPS = 100
KEPT = (1, 2, 10, 100)
DIGITS = 12


def flat_index(shape):
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)


def starts(nudge=0.0):
    return [
        torch.nn.Parameter(torch.sin(1.0 + 0.7 * flat_index(shape) + 2.1 * k) + nudge)
        for k, shape in enumerate(SHAPES)
    ]


def gradient(param, k, t):
    i = flat_index(param.shape)
    p = param.detach()
    return 0.3 * (p - torch.cos(0.3 * i + k)) + 0.5 * torch.sin(0.9 * t + 1.7 * i + 0.4 * k)


def rounded(tensor):
    return [float(f"{x:.{DIGITS - 1}e}") for x in tensor.detach().reshape(-1).tolist()]


def plain(value):
    """What JSON can hold of a value of a parameter group."""
    if isinstance(value, torch.Tensor):
        return plain(value.item()) if value.dim() == 0 else [plain(x) for x in value.tolist()]
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__name__


def described(optimizer, params):
    names = []
    for param in params:
        names.extend(name for name in optimizer.state[param] if name not in names)
    entries = {}
    for name in names:
        values = [optimizer.state[param].get(name) for param in params]
        first = values[0]
        if first is None:
            entries[name] = {"shape": "none", "dtype": "none"}
        elif not isinstance(first, torch.Tensor):
            entries[name] = {"shape": "number", "dtype": type(first).__name__, "values": plain(values)}
        else:
            dtype = str(first.dtype).removeprefix("torch.")
            if all(value.dim() == 0 for value in values):
                entries[name] = {"shape": "scalar", "dtype": dtype, "values": plain(values)}
            elif all(v.shape == p.shape for v, p in zip(values, params, strict=True)):
                entries[name] = {"shape": "param", "dtype": dtype}
            else:
                entries[name] = {"shape": [list(value.shape) for value in values], "dtype": dtype}
    return entries


def run(make, wave, nudge=0.0):
    """Runs one case; the parameters kept, those after eval() or None, the optimizer and them."""
    params = starts(nudge)
    optimizer = make(params)
    lr = optimizer.defaults["lr"]
    if hasattr(optimizer, "train"):
        optimizer.train()
    kept = {}
    for t in range(1, STEPS + 1):
        if wave:
            for group in optimizer.param_groups:
                group["lr"] = lr * (1 + 0.5 * math.sin(0.1 * t))
        for k, param in enumerate(params):
            param.grad = gradient(param, k, t)  # new each time: some references write to it
        optimizer.step()
        if t in KEPT:
            kept[str(t)] = [rounded(param) for param in params]
    entries = described(optimizer, params)
    group = {key: plain(value) for key, value in optimizer.param_groups[0].items() if key != "params"}
    after = None
    if hasattr(optimizer, "eval"):
        optimizer.eval()
        after = [rounded(param) for param in params]
    return kept, after, entries, group


def bare_package(name):
    """Makes a package importable piece by piece, without what its __init__ imports."""
    if name not in sys.modules:
        parent, _, _ = name.rpartition(".")
        if parent:
            bare_package(parent)
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ImportError(f"No module named {name!r}")
        module = types.ModuleType(name)
        module.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = module


# What we call it: (module, class, distribution).  timm.optim alone needs nothing but torch,
# yet importing timm needs torchvision, so its modules are imported one by one.
REFERENCES = {
    **{
        f"torch.optim.{name}": ("torch.optim", name, "torch")
        for name in ("RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")
    },
    "lion_pytorch.Lion": ("lion_pytorch", "Lion", "lion-pytorch"),
    "timm.optim.Lion": ("timm.optim.lion", "Lion", "timm"),
    "timm.optim.Lars": ("timm.optim.lars", "Lars", "timm"),
    "timm.optim.NvNovoGrad": ("timm.optim.nvnovograd", "NvNovoGrad", "timm"),
    "timm.optim.Adopt": ("timm.optim.adopt", "Adopt", "timm"),
    "timm.optim.Adan": ("timm.optim.adan", "Adan", "timm"),
    "timm.optim.Lamb": ("timm.optim.lamb", "Lamb", "timm"),
    "timm.optim.AdamWLegacy": ("timm.optim.adamw", "AdamWLegacy", "timm"),
    "adopt.ADOPT": ("adopt", "ADOPT", None),
    **{
        f"pytorch_optimizer.{name}": ("pytorch_optimizer", name, "pytorch_optimizer")
        for name in ("Lion", "NovoGrad", "AdEMAMix", "ADOPT", "StableAdamW", "Adan", "AdamC")
    },
    "optimi.StableAdamW": ("optimi", "StableAdamW", "torch-optimi"),
    "schedulefree.AdamWScheduleFree": ("schedulefree", "AdamWScheduleFree", "schedulefree"),
    "schedulefree.SGDScheduleFree": ("schedulefree", "SGDScheduleFree", "schedulefree"),
    "prodigyopt.Prodigy": ("prodigyopt", "Prodigy", "prodigyopt"),
    "adamp.AdamP": ("adamp", "AdamP", "adamp"),
    "pytorch_pretrained_bert.BertAdam": (
        "pytorch_pretrained_bert.optimization",
        "BertAdam",
        "pytorch_pretrained_bert",
    ),
}

# The classes without a foreach switch.
PLAIN = {
    "lion_pytorch.Lion",
    "timm.optim.Lars",
    "timm.optim.NvNovoGrad",
    "prodigyopt.Prodigy",
    "adamp.AdamP",
    "timm.optim.Lamb",
    "pytorch_pretrained_bert.BertAdam",
}

WAVE, WIDE = "wave", "float64"  # marks: the learning rate changes; default dtype float64


def cases():
    """Yields our class, the reference, its options, and marks."""
    name, reference = "RMSprop", "torch.optim.RMSprop"
    yield name, reference, {}
    yield name, reference, {"lr": 0.02, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.02, "alpha": 0.9, "momentum": 0.8}
    yield name, reference, {"lr": 0.02, "alpha": 0.9, "centered": True, "eps": 1e-3}
    yield name, reference, {"lr": 0.02, "alpha": 0.95, "centered": True, "momentum": 0.5, "weight_decay": 0.1}
    yield name, reference, {"maximize": True, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.1}, WAVE

    name, reference = "Adagrad", "torch.optim.Adagrad"
    yield name, reference, {}
    yield name, reference, {"lr": 0.1, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.1, "lr_decay": 0.05}
    yield name, reference, {"lr": 0.1, "initial_accumulator_value": 0.3, "eps": 1e-3}
    yield name, reference, {"lr": 0.1, "maximize": True, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.1}, WAVE

    name, reference = "Adadelta", "torch.optim.Adadelta"
    yield name, reference, {}
    yield name, reference, {"rho": 0.8, "eps": 1e-3, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.5, "eps": 1e-3}
    yield name, reference, {"eps": 1e-3, "maximize": True, "weight_decay": 0.1}
    yield name, reference, {"eps": 1e-3, "weight_decay": 0.1}, WAVE

    name, reference = "Adamax", "torch.optim.Adamax"
    yield name, reference, {}
    yield name, reference, {"lr": 0.02, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-2}
    yield name, reference, {"lr": 0.02, "maximize": True, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.02, "weight_decay": 0.1}, WAVE

    name, reference = "NAdam", "torch.optim.NAdam"
    for marks in ((), (WIDE,)):
        yield name, reference, {}, *marks
        yield name, reference, {"lr": 0.02, "weight_decay": 0.1}, *marks
        yield name, reference, {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True}, *marks
        yield name, reference, {"lr": 0.02, "betas": (0.8, 0.9), "momentum_decay": 0.05, "eps": 1e-3}, *marks
        yield name, reference, {"lr": 0.02, "maximize": True, "weight_decay": 0.1}, *marks
        yield name, reference, {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True}, WAVE, *marks

    name, reference = "RAdam", "torch.optim.RAdam"
    yield name, reference, {}
    yield name, reference, {"lr": 0.02, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True}
    yield name, reference, {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-3}
    yield name, reference, {"lr": 0.02, "betas": (0.9, 0.5), "weight_decay": 0.1}  # never rectified
    yield name, reference, {"lr": 0.02, "maximize": True, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True}, WAVE

    name, reference = "Rprop", "torch.optim.Rprop"
    yield name, reference, {}
    yield name, reference, {"lr": 0.05, "etas": (0.6, 1.1)}
    yield name, reference, {"lr": 0.05, "step_sizes": (0.01, 0.06)}
    yield name, reference, {"maximize": True, "step_sizes": (1e-6, 0.1)}
    yield name, reference, {}, WAVE  # the learning rate is only where the step size starts

    name, reference = "ASGD", "torch.optim.ASGD"
    for marks in ((), (WIDE,)):
        yield name, reference, {}, *marks
        yield name, reference, {"lr": 0.1, "t0": 20, "weight_decay": 0.1}, *marks
        yield name, reference, {"lr": 0.1, "t0": 20, "lambd": 0.01, "alpha": 0.5}, *marks
        yield (
            name,
            reference,
            {"lr": 0.1, "t0": 20, "lambd": 0.05, "maximize": True, "weight_decay": 0.5},
            *marks,
        )
        yield name, reference, {"lr": 0.1, "t0": 20, "lambd": 0.01, "weight_decay": 0.1}, WAVE, *marks

    name, reference = "Lion", "lion_pytorch.Lion"
    yield name, reference, {}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.01, "betas": (0.95, 0.98)}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.01, "decoupled_weight_decay": True}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1}, WAVE
    yield name, reference, {"lr": 0.01, "weight_decay": 0.01, "decoupled_weight_decay": True}, WAVE
    reference = "timm.optim.Lion"
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "caution": True}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "caution": True}, WAVE
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "corrected_weight_decay": True}, WAVE
    yield name, "pytorch_optimizer.Lion", {"lr": 0.01, "weight_decay": 0.1, "cautious": True}
    yield name, "pytorch_optimizer.Lion", {"lr": 0.01, "weight_decay": 0.1, "weight_decouple": False}

    name, reference = "LARS", "timm.optim.Lars"
    yield name, reference, {}
    yield name, reference, {"weight_decay": 0.1}
    yield name, reference, {"trust_coeff": 0.02, "eps": 1e-2, "momentum": 0.9, "weight_decay": 0.01}
    yield (
        name,
        reference,
        {"lr": 0.2, "trust_coeff": 0.1, "trust_clip": True, "momentum": 0.9, "weight_decay": 0.01},
    )
    yield name, reference, {"trust_coeff": 0.05, "always_adapt": True}
    yield name, reference, {"trust_coeff": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    yield name, reference, {"trust_coeff": 0.02, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}
    yield name, reference, {"trust_coeff": 0.02, "momentum": 0.9, "weight_decay": 0.01}, WAVE
    yield (
        name,
        reference,
        {"lr": 0.2, "trust_coeff": 0.1, "trust_clip": True, "momentum": 0.9, "weight_decay": 0.01},
        WAVE,
    )

    name, reference = "NovoGrad", "timm.optim.NvNovoGrad"
    for marks in ((), (WIDE,)):
        yield name, reference, {}, *marks
        yield name, reference, {"lr": 0.01, "weight_decay": 0.1}, *marks
        yield name, reference, {"lr": 0.05, "weight_decay": 0.1, "grad_averaging": True}, *marks
        yield name, reference, {"lr": 0.01, "betas": (0.9, 0.8), "amsgrad": True, "eps": 1e-2}, *marks
        yield name, reference, {"lr": 0.01, "weight_decay": 0.1}, WAVE, *marks
    reference = "pytorch_optimizer.NovoGrad"
    yield name, reference, {}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.05, "weight_decay": 0.1, "weight_decouple": True, "grad_averaging": True}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.01, "weight_decouple": True, "fixed_decay": True}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "adam_debias": True}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1}, WAVE

    name, reference = "AdEMAMix", "pytorch_optimizer.AdEMAMix"
    yield name, reference, {}
    yield name, reference, {"lr": 0.005, "weight_decay": 0.1, "weight_decouple": True}
    yield name, reference, {"lr": 0.005, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.005, "betas": (0.9, 0.99, 0.995), "alpha": 3.0, "eps": 1e-3}
    yield name, reference, {"lr": 0.005, "betas": (0.9, 0.999, 0.99), "alpha": 8.0, "t_alpha_beta3": 60}
    yield name, reference, {"lr": 0.005, "weight_decay": 0.01, "weight_decouple": True, "fixed_decay": True}
    yield name, reference, {"lr": 0.005, "cautious": True}
    yield name, reference, {"lr": 0.005, "stable_adamw": True}
    yield name, reference, {"lr": 0.005, "weight_decay": 0.1, "weight_decouple": True, "maximize": True}
    yield (
        name,
        reference,
        {"lr": 0.005, "t_alpha_beta3": 60, "weight_decay": 0.1, "weight_decouple": True},
        WAVE,
    )

    name, reference = "ADOPT", "adopt.ADOPT"
    yield name, reference, {}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "decouple": True}
    yield name, reference, {"lr": 0.01, "betas": (0.8, 0.99), "eps": 0.3, "clip_lambda": None}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "decouple": True}, WAVE
    reference = "timm.optim.Adopt"
    yield name, reference, {}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "decoupled": True}
    yield name, reference, {"lr": 0.01, "clip_exp": 0.25, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.01, "clip_exp": None}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "decoupled": True, "caution": True}
    yield (
        name,
        reference,
        {"lr": 0.01, "weight_decay": 0.1, "decoupled": True, "corrected_weight_decay": True},
        WAVE,
    )
    yield name, "pytorch_optimizer.ADOPT", {"lr": 0.01, "weight_decay": 0.1, "weight_decouple": True}
    yield name, "pytorch_optimizer.ADOPT", {"lr": 0.01, "cautious": True}

    name, reference = "StableAdamW", "pytorch_optimizer.StableAdamW"
    yield name, reference, {}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "weight_decouple": False}
    yield name, reference, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 0.3, "weight_decay": 0.0}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1}, WAVE
    reference = "optimi.StableAdamW"
    yield name, reference, {"lr": 0.001}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 0.3, "weight_decay": 0.0}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.01, "decouple_lr": True}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1}, WAVE
    yield name, reference, {"lr": 0.01, "weight_decay": 0.01, "decouple_lr": True}, WAVE

    name, reference = "Adan", "timm.optim.Adan"
    yield name, reference, {}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "no_prox": True}
    yield name, reference, {"lr": 0.01, "betas": (0.9, 0.8, 0.95), "eps": 1e-2}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "caution": True}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1}, WAVE
    reference = "pytorch_optimizer.Adan"
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "weight_decouple": True}
    yield name, reference, {"lr": 0.01, "max_grad_norm": 1.0}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "weight_decouple": True}, WAVE

    name, reference = "ScheduleFreeAdamW", "schedulefree.AdamWScheduleFree"
    yield name, reference, {}
    yield name, reference, {"lr": 0.02, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.02, "warmup_steps": 15, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.02, "warmup_steps": 15, "r": 0.5, "weight_lr_power": 1.0}
    yield name, reference, {"lr": 0.02, "betas": (0.95, 0.9), "eps": 1e-2, "weight_lr_power": 0.0}
    yield name, reference, {"lr": 0.02, "warmup_steps": 15, "weight_decay": 0.1}, WAVE

    name, reference = "ScheduleFreeSGD", "schedulefree.SGDScheduleFree"
    yield name, reference, {}
    yield name, reference, {"lr": 0.5, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.5, "warmup_steps": 15, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.5, "warmup_steps": 15, "r": 0.5, "weight_lr_power": 1.0}
    yield name, reference, {"lr": 0.5, "momentum": 0.7, "weight_lr_power": 0.0}
    yield name, reference, {"lr": 0.5, "warmup_steps": 15, "weight_decay": 0.1}, WAVE

    name, reference = "Prodigy", "prodigyopt.Prodigy"
    yield name, reference, {}
    yield name, reference, {"d0": 1e-3, "weight_decay": 0.1}
    yield name, reference, {"d0": 1e-3, "weight_decay": 0.1, "decouple": False}
    yield name, reference, {"d0": 1e-3, "use_bias_correction": True}
    yield (
        name,
        reference,
        {"d0": 1e-3, "safeguard_warmup": True, "use_bias_correction": True, "weight_decay": 0.1},
    )
    yield name, reference, {"d0": 1e-3, "growth_rate": 1.05, "d_coef": 2.0}
    yield name, reference, {"d0": 1e-3, "beta3": 0.9, "betas": (0.8, 0.95), "eps": 1e-3, "lr": 0.5}
    yield name, reference, {"d0": 1e-3, "betas": (0.0, 0.99)}
    yield name, reference, {"d0": 1e-3, "weight_decay": 0.1}, WAVE
    yield name, reference, {"d0": 1e-3, "safeguard_warmup": True, "use_bias_correction": True}, WAVE

    name, reference = "AdamW", "timm.optim.AdamWLegacy"
    yield name, reference, {}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "caution": True}
    yield (
        name,
        reference,
        {"lr": 0.01, "weight_decay": 0.1, "caution": True, "amsgrad": True, "betas": (0.9, 0.95)},
    )
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "caution": True, "maximize": True}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "caution": True}, WAVE
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "corrected_weight_decay": True}, WAVE
    yield (
        name,
        reference,
        {"lr": 0.01, "weight_decay": 0.1, "caution": True, "corrected_weight_decay": True},
        WAVE,
    )
    yield name, "pytorch_optimizer.AdamC", {"lr": 0.01, "weight_decay": 0.1, "normalized": True}, WAVE

    name, reference = "Lamb", "timm.optim.Lamb"
    yield name, reference, {}
    yield name, reference, {"lr": 0.02, "weight_decay": 0.1, "max_grad_norm": None}
    yield name, reference, {"lr": 0.02, "weight_decay": 0.1, "trust_clip": True, "eps": 1e-2}
    yield name, reference, {"lr": 0.02, "weight_decay": 0.0}
    yield name, reference, {"lr": 0.02, "weight_decay": 0.0, "always_adapt": True, "betas": (0.8, 0.9)}
    yield name, reference, {"lr": 0.02, "bias_correction": False, "grad_averaging": False}
    yield name, reference, {"lr": 0.02, "weight_decay": 0.1}, WAVE

    name, reference = "BertAdam", "pytorch_pretrained_bert.BertAdam"
    yield name, reference, {"lr": 0.01}
    yield name, reference, {"lr": 0.01, "warmup": 0.2, "t_total": 80}
    yield name, reference, {"lr": 0.01, "warmup": 0.2, "t_total": 80, "schedule": "warmup_constant"}
    yield name, reference, {"lr": 0.01, "b1": 0.8, "b2": 0.95, "e": 1e-3, "weight_decay": 0.1}
    yield name, reference, {"lr": 0.01, "max_grad_norm": -1, "weight_decay": 0.1}

    name, reference = "npu.NpuFusedAdamP", "adamp.AdamP"
    yield name, reference, {}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1}
    # by rows, by the whole tensor and not at all
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "delta": 1.0}
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "delta": 1.5, "nesterov": True}
    yield (
        name,
        reference,
        {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.5, "delta": 2.5, "wd_ratio": 0.5},
    )
    yield name, reference, {"lr": 0.01, "weight_decay": 0.1, "delta": 1.5}, WAVE


def load(reference):
    module, name, _ = REFERENCES[reference]
    if module.startswith("timm."):
        bare_package("timm.optim")
    if module.startswith("pytorch_pretrained_bert."):
        bare_package("pytorch_pretrained_bert")
    return getattr(importlib.import_module(module), name)


def main(path, check=False):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    versions, results, missing = {}, [], set()
    for name, reference, options, *marks in cases():
        if reference in missing:
            continue
        try:
            cls = load(reference)
        except ImportError as error:
            print(f"left out: {reference}: {error}", file=sys.stderr)
            missing.add(reference)
            continue
        module, _, distribution = REFERENCES[reference]
        if distribution is None:
            versions[module] = importlib.import_module(module).__version__
        else:
            versions[distribution] = importlib.metadata.version(distribution)
        also = {} if reference in PLAIN else {"foreach": False}
        if reference.startswith("optimi."):
            also["triton"] = False
        wave, wide = WAVE in marks, WIDE in marks
        torch.set_default_dtype(torch.float64 if wide else torch.float32)
        try:
            with contextlib.redirect_stdout(io.StringIO()):

                def make(params, cls=cls, options=options, also=also):
                    return cls(params, **options, **also)

                kept, after, entries, group = run(make, wave)
                nudged = run(make, wave, nudge=1e-12)[0] if check else None
        finally:
            torch.set_default_dtype(torch.float32)
        numbers = [x for step in kept.values() for values in step for x in values]
        if not all(math.isfinite(x) for x in numbers):
            raise SystemExit(f"not finite: {reference} {options}")
        if check:
            far = max(
                abs(x - y)
                for one, other in zip(kept["100"], nudged["100"], strict=True)
                for x, y in zip(one, other, strict=True)
            )
            print(f"{far:.1e} {max(map(abs, numbers)):8.3f} {reference} {options} {marks}", file=sys.stderr)
        case = {
            "optimizer": name,
            "reference": reference,
            "options": {key: plain(value) for key, value in options.items()},
            "also": also,
            "wave": wave,
            "default_dtype": "float64" if wide else "float32",
            "params": kept,
        }
        if after is not None:
            case["eval"] = after
        case["state"] = entries
        case["group"] = group
        results.append(case)
    lines = ",\n".join(json.dumps(case, separators=(",", ":"), allow_nan=False) for case in results)
    with open(path, "w", encoding="utf-8") as file:
        file.write(f'{{"versions": {json.dumps(versions, sort_keys=True)},\n"cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(sys.argv[1], check="--check" in sys.argv[2:])
