"""Writes the recorded files: optimizers as an older commit of this repository saved them, and how they went on.

    git worktree add /tmp/older 8c85e86
    cd /tmp/older && PYTHONPATH=/tmp/older python .../tests/recorded/make.py .../tests/recorded

Of every row of ROWS there is `name.pt`, a checkpoint with the parameters it belongs to and the parameters and
states a few steps later, and `name.pickle`, parameters and optimizer pickled together. Gradients come from a
seeded generator and are not stored. Bits that engines agree on are stored once.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fusedstep
from fusedstep import npu

SHAPES = ((4, 3), (5,), (67,))
BEFORE, AFTER = 3, 3
ENGINES = ("cpu", "torch", "triton")


class Row(NamedTuple):
    """An optimizer that was saved."""

    cls: type
    options: dict[str, Any]
    dtype: torch.dtype = torch.float32


_WITH_ALL = {"max_grad_norm": 1.0, "skip_nonfinite": True, "statistics": True, "ema_decay": 0.9}
ROWS = {
    "sgd": Row(fusedstep.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd-momentum": Row(fusedstep.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "sgd-nesterov-all": Row(fusedstep.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, **_WITH_ALL}),
    "adam-amsgrad": Row(fusedstep.Adam, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "adamw": Row(fusedstep.AdamW, {"lr": 1e-2}),
    "adamw-ema": Row(fusedstep.AdamW, {"lr": 1e-2, "ema_decay": 0.9}),
    "adamw-all": Row(fusedstep.AdamW, {"lr": 1e-2, **_WITH_ALL}),
    "adamw-bfloat16": Row(fusedstep.AdamW, {"lr": 1e-2, "ema_decay": 0.9}, torch.bfloat16),
    "adamw-bfloat16-float32": Row(fusedstep.AdamW, {"lr": 1e-2, "state_dtype": torch.float32}, torch.bfloat16),
    "bert-adam": Row(fusedstep.BertAdam, {"lr": 1e-2, "warmup": 0.2, "t_total": 30}),
    "lamb": Row(fusedstep.Lamb, {"lr": 1e-2}),
    "lamb-bfloat16": Row(fusedstep.Lamb, {"lr": 1e-2}, torch.bfloat16),
    "npu-sgd": Row(npu.NpuFusedSGD, {"lr": 1e-2, "momentum": 0.9}),
    "npu-adam": Row(npu.NpuFusedAdam, {"lr": 1e-2}),
    "npu-adamw": Row(npu.NpuFusedAdamW, {"lr": 1e-2, "amsgrad": True}),
    "npu-bert-adam": Row(npu.NpuFusedBertAdam, {"lr": 1e-2, "warmup": 0.1, "t_total": 20}),
    "npu-lamb": Row(npu.NpuFusedLamb, {"lr": 1e-2}),
}


def new_params(row: Row) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(row.dtype)) for shape in SHAPES]


def new_optimizer(row: Row, params: list[torch.nn.Parameter], engine: str) -> Any:
    """Two groups, with learning rates of their own."""
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 2e-2}]
    return row.cls(groups, engine=engine, **row.options)


def train(optimizer: Any, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    for p in params:
        p.grad = None


def results(optimizer: Any, params: list[torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Parameters and states as they are now, those of a name in one tensor."""
    names = dict.fromkeys(name for p in params for name in optimizer.state.get(p, {}))
    found = {name: [optimizer.state[p][name] for p in params] for name in names}
    return {k: torch.cat([t.detach().flatten() for t in ts]) for k, ts in ({"param": params} | found).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two such results are equal bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def record(name: str, row: Row, folder: Path) -> None:
    params = new_params(row)
    optimizer = new_optimizer(row, params, "cpu")
    train(optimizer, params, range(BEFORE))
    pickled, saved = pickle.dumps((params, optimizer)), optimizer.state_dict()
    saved = {
        "params": [p.detach().clone() for p in params],
        "state_dict": {
            "state": {k: {n: v.clone() for n, v in values.items()} for k, values in saved["state"].items()},
            "param_groups": saved["param_groups"],
        },
    }
    found: dict[str, Any] = {}
    for engine in ENGINES:
        others, other = pickle.loads(pickled)
        other.engine = engine
        train(other, others, range(BEFORE, BEFORE + AFTER))
        now = results(other, others)
        alike = next((e for e, then in found.items() if not isinstance(then, str) and same(then, now)), None)
        found[engine] = now if alike is None else alike
    torch.save({**saved, "after": found}, folder / f"{name}.pt")
    (folder / f"{name}.pickle").write_bytes(pickled)
    print(name, {engine: r if isinstance(r, str) else "stored" for engine, r in found.items()}, flush=True)


def main() -> None:
    import tests.conftest  # noqa: F401  Triton's interpreter, rounding as hardware does

    for name, row in ROWS.items():
        record(name, row, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
