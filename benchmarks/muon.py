"""Muon's step beside torch's and, where it can be imported, microsoft/dion's, on a GPU.

Milliseconds on the device and on the host, in turn, medians; TFLOP/s, of what is computed; and how far one
orthogonalisation is from the same iteration in float64, ours and torch's. `python benchmarks/muon.py FOLDER`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

import fusedstep
from fusedstep.cli import timing
from fusedstep.cli.environment import environment
from fusedstep.cli.shapes import MODELS
from fusedstep.rules import NewtonSchulz

KELLER = (3.4445, -4.7750, 2.0315)


def convolutions() -> list[tuple[int, ...]]:
    """126 small ones, as a detector has them."""
    channels = (16, 32, 64, 128, 256)
    return [(channels[(7 * i + 2) % 5], channels[i % 5], *((3, 3) if i % 3 else (1, 1))) for i in range(126)]


WORKS = {
    "llama-1b": [s for s in MODELS["llama-1b"] if len(s) == 2 and s[0] < 100_000],
    "bert-large": [s for s in MODELS["bert-large"] if len(s) == 2 and min(s) >= 1024 and s[0] < 30_000],
    "126 convolutions": convolutions(),
}


def flops(shapes: list[tuple[int, ...]]) -> float:
    """As we do them: half of symmetric products, the Gram form for what is wide."""
    return sum(NewtonSchulz(flatten=True).flops(shape) for shape in shapes)


def params(shapes: list[tuple[int, ...]], dtype: torch.dtype, flat: bool = False) -> list[Any]:
    torch.manual_seed(0)
    made = []
    for shape in shapes:
        values, grad = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
        p = torch.nn.Parameter(0.02 * (values.flatten(1) if flat else values))
        p.grad = grad.flatten(1) if flat else grad
        made.append(p)
    return made


def steps(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> dict[str, Any]:
    ours = fusedstep.Muon(params(shapes, dtype), lr=1e-3, flatten=True if len(shapes[0]) > 2 else None)
    found = {"ours": ours.step, "torch.optim.Muon": torch.optim.Muon(params(shapes, dtype, True), lr=1e-3).step}
    try:
        from dion import Muon
    except ImportError as error:
        print(f"dion is left out: {error}", file=sys.stderr)
        return found
    # five iterations, with its Triton kernels; its default has as many, and is compiled for minutes
    dion = Muon(params(shapes, dtype, True), lr=1e-3, use_triton=True, use_polar_express=False)
    return {**found, "dion.Muon": dion.step}


def distances(shape: tuple[int, int]) -> dict[str, float]:
    """Of a random matrix, relative to the iteration in float64."""
    g = torch.randn(shape, device="cuda").bfloat16()
    x = g.double() if shape[0] <= shape[1] else g.double().T
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = KELLER[0] * x + (KELLER[1] * a + KELLER[2] * a @ a) @ x
    right, found = (x if shape[0] <= shape[1] else x.T), {}
    for name, cls in (("ours", fusedstep.Muon), ("torch.optim.Muon", torch.optim.Muon)):
        p = torch.nn.Parameter(torch.zeros(shape, device="cuda"))
        p.grad = g.float()
        cls([p], lr=1.0, momentum=0.0, weight_decay=0.0).step()
        update = -p.detach().double() / max(1, shape[0] / shape[1]) ** 0.5
        found[name] = float((update - right).norm() / right.norm())
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", nargs="?", type=Path, default=Path("benchmarks"))
    arguments.add_argument("--commit")
    arguments.add_argument("--only", default="")
    given = arguments.parse_args()
    results = []
    for model, shapes in WORKS.items():
        for dtype in (torch.bfloat16, torch.float32):
            if given.only not in f"{model} {dtype}":
                continue
            torch._dynamo.reset()
            each = steps(shapes, dtype)
            for _ in range(4):
                for step in each.values():
                    step()
            times = dict(zip(each, timing.on_gpu([*each.values()], 4), strict=True))
            ms = times["ours"].device.median
            row = {"model": model, "dtype": str(dtype).removeprefix("torch."), "matrices": len(shapes)}
            row |= {name: {"device": t.device.median, "host": t.host.median} for name, t in times.items()}
            row["tflops"] = flops(shapes) / ms / 1e9
            results.append(row)
            print(json.dumps(row), flush=True)
            del each
    square = torch.randn(16, 4096, 4096, device="cuda").half()
    peak = statistics.median(timing._device_times(lambda: torch.bmm(square, square), 8, 0.1))
    away = {f"{a}x{b}": distances((a, b)) for a, b in ((2048, 2048), (8192, 2048), (512, 2048), (1024, 4096))}
    facts = {**environment("cuda", given.commit), "cublas_tflops": 16 * 2 * 4096**3 / peak / 1e9}
    given.folder.mkdir(parents=True, exist_ok=True)
    path = given.folder / "muon-cuda-nvidia-h200.json"
    path.write_text(json.dumps({**facts, "distance": away, "results": results}, indent=1) + "\n")
    print(json.dumps(away), facts["cublas_tflops"])


if __name__ == "__main__":
    main()
