"""The peers that `fusedstep bench` times our optimizers beside, if installed: each a few lines of adapter."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import typer

from fusedstep import optimizers

from .peer import AROUND, AS_PARAMETERS, FLOAT32, INT8, Class, Peer, Stored
from .works import Work


def named(*names: str, **fixed: Any) -> dict[str, Class]:
    """Classes with the same names as ours."""
    return {name: (name, fixed) for name in names}


def _compiled(optimizer: Any) -> Callable[[], Any]:
    return torch.compile(optimizer.step)


def _trained(optimizer: Any) -> Callable[[], Any]:
    # schedule-free optimizers must be told that they train
    optimizer.train()
    return optimizer.step


def _flash(stored: Stored) -> dict[str, Any]:
    bits = {"split8": 24, "split": 32}.get(stored.master or "")
    return {"quantize": stored.states == INT8, "master_weight_bits": bits}


def _muon_and_adamw(cls: Any, groups: list[dict[str, Any]], arguments: dict[str, Any]) -> list[Any]:
    """torch's Muon takes matrices only: AdamW steps the rest, as ours does."""
    of_muon = lambda wanted: [p for g in groups if g.get("use_muon", True) == wanted for p in g["params"]]
    same = {name: arguments[name] for name in ("lr", "eps", "weight_decay")}
    adamw: Any = functools.partial(torch.optim.AdamW, **same, betas=(0.9, 0.95), fused=True)
    kinds = (functools.partial(cls, **arguments), of_muon(True)), (adamw, of_muon(False))
    return [make(params) for make, params in kinds if params]


def _each(optimizers: list[Any]) -> Callable[[], Any]:
    steps = [optimizer.step for optimizer in optimizers]
    return lambda: [step() for step in steps]


_TORCH = [name for name in optimizers.__all__ if hasattr(torch.optim, name) and name != "Muon"]
_FUSED = [name for name in _TORCH if "fused" in inspect.signature(getattr(torch.optim, name)).parameters]
# fused for the CPU only
_ON_GPU = [name for name in _FUSED if name != "Adagrad"]
_NOT_FUSED, _NOT_ON_GPU = ([name for name in _TORCH if name not in those] for those in (_FUSED, _ON_GPU))
_GPU, _CPU = ("cuda",), ("cpu",)
_ADAMS: dict[str, Class] = {
    "AdamW": ("FusedAdam", {"adam_w_mode": True}),
    "Adam": ("FusedAdam", {"adam_w_mode": False}),
}
_BITS = ("AdamW", "Adam", "SGD", "Lion", "RMSprop", "Adagrad")
_SCHEDULE_FREE: dict[str, Class] = {
    "ScheduleFreeAdamW": ("AdamWScheduleFree", {}),
    "ScheduleFreeSGD": ("SGDScheduleFree", {}),
}

PEERS = [
    Peer("torch fused", "torch.optim", named(*_FUSED, fused=True), devices=_CPU, around=AROUND),
    Peer("torch fused", "torch.optim", named(*_ON_GPU, fused=True), devices=_GPU, around=AROUND),
    # the fastest that torch has of its other classes
    Peer("torch loop", "torch.optim", named(*_NOT_FUSED, foreach=False), devices=_CPU),
    Peer("torch loop", "torch.optim", named("Muon"), made=_muon_and_adamw, step=_each),
    Peer("torch foreach", "torch.optim", named(*_NOT_ON_GPU, foreach=True), devices=_GPU),
    Peer("torch foreach", "torch.optim", named(*_ON_GPU, foreach=True), devices=_GPU, only_asked=True),
    Peer("torch foreach", "torch.optim", named(*_TORCH, foreach=True), devices=_CPU, only_asked=True),
    Peer("torch compiled", "torch.optim", named(*_TORCH), step=_compiled, only_asked=True),
    Peer(
        "apex",
        "apex.optimizers",
        {**_ADAMS, "SGD": ("FusedSGD", {}), "Lamb": ("FusedLAMB", {}), "NovoGrad": ("FusedNovoGrad", {})},
        instead_of_none={"max_grad_norm": 0.0},
        devices=_GPU,
        states=(FLOAT32,),
        # built by its own setup, or by benchmarks/build_apex.py
        also=("amp_C",),
    ),
    Peer(
        "transformer engine", "transformer_engine.pytorch.optimizers", _ADAMS, devices=_GPU, states=(FLOAT32,)
    ),
    Peer("deepspeed", "deepspeed.ops.adam", _ADAMS, devices=_GPU),
    Peer(
        "bitsandbytes 32-bit",
        "bitsandbytes.optim",
        named(*_BITS, optim_bits=32),
        devices=_GPU,
        states=(FLOAT32,),
    ),
    Peer(
        "bitsandbytes 8-bit",
        "bitsandbytes.optim",
        {name: (f"{name}8bit", {}) for name in _BITS},
        devices=_GPU,
        states=(INT8,),
    ),
    Peer(
        "torchao 8-bit",
        "torchao.optim",
        {"AdamW": ("AdamW8bit", {}), "Adam": ("Adam8bit", {})},
        states=(INT8,),
        only_asked=True,
    ),
    Peer(
        "optimi",
        "optimi",
        # its defaults differ from torch's, and it adds a sum of rounding errors in 16 bits
        {
            **named("AdamW", "Adam", "Lion", "RAdam", "Adan", kahan_sum=False),
            "SGD": ("SGD", {"torch_init": True, "kahan_sum": False, "dampening": False}),
        },
    ),
    # with Triton only
    Peer("optimi", "optimi", named("StableAdamW", kahan_sum=False), devices=_GPU),
    Peer(
        "flashoptim",
        "flashoptim",
        {name: (f"Flash{name}", {}) for name in ("AdamW", "Adam", "SGD", "Lion")},
        devices=_GPU,
        states=(AS_PARAMETERS, INT8),
        masters=("split", "split8"),
        storing=_flash,
    ),
    Peer(
        "timm",
        "timm.optim",
        {
            "Lamb": ("lamb.Lamb", {}),
            "LARS": ("lars.Lars", {}),
            "ADOPT": ("adopt.Adopt", {"foreach": True}),
            "Adan": ("adan.Adan", {}),
            "Lion": ("lion.Lion", {}),
            "NovoGrad": ("nvnovograd.NvNovoGrad", {}),
        },
        renamed={"cautious": "caution", "decouple": "decoupled"},
        bare=("timm", "timm.optim"),
    ),
    Peer(
        "pytorch_optimizer",
        "pytorch_optimizer",
        {
            **named("Lion", "LARS", "ADOPT", "Adan", "Prodigy", foreach=True),
            "AdEMAMix": ("AdEMAMix", {"weight_decouple": True, "foreach": True}),
            "StableAdamW": ("StableAdamW", {"kahan_sum": False, "foreach": True}),
            "Lamb": ("Lamb", {"pre_norm": True}),
        },
        renamed={
            "trust_coeff": "trust_coefficient",
            "decouple": "weight_decouple",
            "use_bias_correction": "bias_correction",
        },
        instead_of_none={"max_grad_norm": 0.0},
    ),
    Peer(
        "pytorch_optimizer",
        "pytorch_optimizer",
        named("ScheduleFreeAdamW", "ScheduleFreeSGD", foreach=True),
        step=_trained,
    ),
    Peer("schedulefree", "schedulefree", _SCHEDULE_FREE, step=_trained),
    Peer("lion-pytorch", "lion_pytorch", named("Lion")),
    Peer("prodigyopt", "prodigyopt", named("Prodigy")),
    Peer(
        "dion",
        "dion",
        {"AdamW": ("Muon", {})},
        renamed={"eps": "epsilon"},
        group={"algorithm": "adamw"},
        only_asked=True,
    ),
    Peer("dion", "dion", {"Lion": ("Muon", {})}, group={"algorithm": "lion"}, only_asked=True),
]


def add_path(folder: Path | None) -> None:
    """Import peers from a folder of packages, and of checkouts with packages in them."""
    if folder is None:
        return
    base = folder.resolve()
    # a checkout's package lies one folder further down, as apex/apex
    checkouts = [p.parent.parent for p in base.glob("*/*/__init__.py") if p.parent.name == p.parent.parent.name]
    inside = [str(p) for p in checkouts if not (p / "__init__.py").exists()]
    sys.path[:0] = [path for path in (*inside, str(base)) if path not in sys.path]


def check_asked(asked: Sequence[str], works: Sequence[Work], device: str) -> None:
    """Refuse parts of names of which no peer can be timed here beside any of these works."""
    optimizers_of = {work.optimizer for work in works}
    for part in asked:
        # ours may be its own peer
        if part == "all" or any(part in name for work in works for name in work.peers if "fusedstep" in name):
            continue
        found = [peer for peer in PEERS if part in peer.name]
        here = [peer for peer in found if device in peer.devices]
        if not found:
            names = ", ".join(dict.fromkeys(peer.name for peer in PEERS))
            message = f"found {part!r}; use a part of one of these names: {names}; or all"
        elif all(peer.why_not(device) for peer in here):
            told = {peer.name: f"{peer.name} ({peer.why_not(device)})" for peer in here or found}
            message = (
                f"found {part!r}: {', '.join(told.values())} cannot be timed here; see fusedstep bench --peers"
            )
        elif not any(optimizers_of & peer.classes.keys() for peer in here):
            has = ", ".join(sorted({name for peer in here for name in peer.classes}))
            message = f"found {part!r}, which has no {', '.join(sorted(optimizers_of))}; it has {has}"
        else:
            continue
        raise typer.BadParameter(message, param_hint="--peer")


def beside(optimizer: str, device: str, asked: Sequence[str]) -> list[Peer]:
    """The peers of one of our optimizers that can be timed here; `asked` has parts of names, or "all"."""
    here = [p for p in PEERS if optimizer in p.classes and device in p.devices]
    is_asked = lambda p: "all" in asked or any(part in p.name for part in asked)
    wanted = [p for p in here if not p.only_asked or is_asked(p)]
    return [p for p in wanted if not p.why_not(device)]
