"""What `fusedstep bench` times: models, optimizers with their options, dtypes, and peers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch


def text_of(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


class Work(NamedTuple):
    """One row of the benchmark: one of our optimizers, and the peers that it is timed beside.

    Peers that are found need not be named. `peers` names those that take long to start, and our own class
    without what this row adds to it ("fusedstep.AdamW").
    """

    model: str
    optimizer: str
    options: dict[str, Any]
    dtype: str
    peers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.model} {self.optimizer}({text_of(self.options)}) {self.dtype}"

    @property
    def states(self) -> torch.dtype | str | None:
        """How states are to be stored; None: as the parameters."""
        return self.options.get("state_dtype", DTYPES[self.dtype][1] if self.dtype in DTYPES else None)


Row = tuple[str, dict[str, Any], tuple[str, ...]]
_TORCH: list[Row] = [("AdamW", {}, ()), ("Adam", {}, ()), ("SGD", {"momentum": 0.9}, ())]
_NORMS: list[Row] = [
    ("Lamb", {}, ()),
    ("Lamb", {"max_grad_norm": None}, ()),
    ("BertAdam", {}, ()),
    ("AdamW", {"max_grad_norm": 1.0}, ()),
]
_FUNCTIONAL: Row = ("functional.adamw_", {}, ("fusedstep.AdamW",))
# unscale, look for infinities, clip, update, drop gradients
_WHOLE: Row = ("AdamW", {"max_grad_norm": 1.0, "scaler": True}, ())
# as torch's scaler calls an optimizer with fused=True, after a pass of its own that is not timed: gradients are
# unscaled in place, by 1 so that they do not shrink
_UNSCALED: Row = ("AdamW", {"grad_scale": 1.0}, ())
# what goes along with the update
_ALONG: list[Row] = [
    ("AdamW", {"statistics": True}, ("fusedstep.AdamW",)),
    ("AdamW", {"ema_decay": 0.999}, ()),
    ("AdamW", {"max_grad_norm": 1.0, "norm_type": math.inf}, ()),
    ("AdamW", {"max_grad_norm": 1.0, "skip_nonfinite": True, "statistics": True}, ()),
]
# parameters as DTensors, on a single rank
_SHARDED: list[Row] = [
    ("AdamW", {"sharded": True}, ("fusedstep.AdamW",)),
    ("AdamW", {"sharded": True, "max_grad_norm": 1.0}, ("fusedstep.AdamW",)),
    ("Lamb", {"sharded": True}, ("fusedstep.Lamb",)),
]
# how states, masters and roundings are stored
_STORED: list[Row] = [
    ("AdamW", {"state_dtype": "int8", "master": "split8"}, ("fusedstep.AdamW",)),
    ("AdamW", {"state_dtype": "int8", "master": "split"}, ()),
    ("AdamW", {"state_dtype": "int8"}, ()),
    ("AdamW", {"state_dtype": "int8", "master": "split8", "max_grad_norm": 1.0}, ()),
    ("AdamW", {"state_dtype": "float32", "master": "split"}, ()),
    ("AdamW", {"state_dtype": "float32", "master": "float32"}, ()),
    ("AdamW", {"master": "split"}, ()),
    ("AdamW", {"rounding": "stochastic"}, ()),
    ("AdamW", {"state_dtype": "int8", "rounding": "stochastic"}, ()),
    ("SGD", {"momentum": 0.9, "state_dtype": "int8", "master": "split8"}, ()),
    ("Lamb", {"state_dtype": "int8", "master": "split8"}, ()),
]
_FAMILY: list[Row] = [
    (name, options, ())
    for name, options in (
        ("RMSprop", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Adagrad", {}),
        ("Adadelta", {}),
        ("Adamax", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("Rprop", {}),
        ("ASGD", {}),
        ("Lion", {}),
        ("Lion", {"cautious": True}),
        ("LARS", {"momentum": 0.9, "weight_decay": 1e-4}),
        ("NovoGrad", {}),
        ("AdEMAMix", {}),
        ("ADOPT", {}),
        ("StableAdamW", {}),
        ("Adan", {}),
        ("ScheduleFreeAdamW", {}),
        ("ScheduleFreeSGD", {}),
        ("Prodigy", {}),
        ("AdamW", {"cautious": True}),
    )
]
# torch's names of dtypes, and those of rows
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# dtypes of parameter and gradient, and of states
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16/fp32": (torch.bfloat16, torch.float32),
}
CPU = [Work("bert-base", o, k, d, p) for d in ("fp32", "bf16", "fp16") for o, k, p in _TORCH]
CPU += [Work("bert-base", o, k, "fp32", p) for o, k, p in (*_NORMS, _FUNCTIONAL, _WHOLE, _UNSCALED)]
CPU += [Work("1000 x 64", o, k, "fp32", p) for o, k, p in (*_TORCH, _NORMS[0])]
CPU += [Work("400 x 1024", o, k, "fp32", p) for o, k, p in _SHARDED]
GPU = [
    Work(model, o, k, dtype, p)
    for model in ("bert-large", "llama-1b", "resnet-50", "400 x 1024", "465 groups")
    for dtype in ("fp32", "bf16", "bf16/fp32")
    for o, k, p in _TORCH
]
GPU += [
    Work(model, o, k, "fp32", p)
    for model in ("bert-large", "400 x 1024")
    for o, k, p in (*_NORMS, _FUNCTIONAL, _WHOLE, _UNSCALED, *_ALONG, *_SHARDED)
]
GPU += [Work(model, o, k, "bf16", p) for model in ("bert-large", "llama-1b") for o, k, p in _STORED]
CPU += [Work("bert-base", o, k, "bf16", p) for o, k, p in _STORED]
CPU += [Work("bert-base", "AdamW", {"state_dtype": "int8"}, "fp32", ("fusedstep.AdamW",))]
GPU += [Work(model, o, k, "fp32", p) for model in ("bert-large", "llama-1b") for o, k, p in _FAMILY]
# beside torch's alone: microsoft/dion's has coefficients of its own, and so other results
GPU += [Work(model, "Muon", {}, "bf16") for model in ("bert-large", "llama-1b")]
CPU += [Work("bert-base", o, k, "fp32", p) for o, k, p in _FAMILY]
GPU += [
    Work(model, "AdamW", {}, dtype)
    for model in ("llama-8b/8", "vit-l", "moe", "400 tiny")
    for dtype in ("fp32", "bf16", "bf16/fp32")
]
CPU += [Work("moe", "AdamW", {}, "fp32"), Work("400 tiny", "AdamW", {}, "fp32")]

# peers that take long to start, or are not the fastest of their package, are timed once
_ASKED: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({}, "fp32", ("torch foreach", "torch compiled", "dion")),
    ({}, "bf16", ("torch foreach", "torch compiled")),
    (_STORED[0][1], "bf16", ("torchao 8-bit",)),
]
for _options, _dtype, _names in _ASKED:
    _work = Work("bert-large", "AdamW", _options, _dtype)
    GPU = [w._replace(peers=(*w.peers, *_names)) if w._replace(peers=()) == _work else w for w in GPU]
