"""python benchmarks/instructions.py [NAME ...]: instructions of our kernels for an H200, without one.

Compiles what a step would launch, and counts what the fast path of a sweep takes for an element. Each of the
528 schedulers starts one instruction for 32 elements per clock; ALU and IMAD take two clocks, conversions and
roots (XU) eight. `benchmarks/INT8_STUDY.md` has counts beside measured times.
"""

from __future__ import annotations

import collections
import os
import re
import sys
from typing import Any

# before anything imports triton, or our kernels
os.environ["TRITON_INTERPRET"] = "0"
from tests import h200  # isort: skip

import torch
from rich.console import Console
from rich.table import Table

import fusedstep
from fusedstep._engines.triton import fingerprint
from fusedstep.stages import kernels

_INT8 = {"state_dtype": "int8"}
SETTINGS: dict[str, tuple[Any, torch.dtype, dict]] = {
    "AdamW": (fusedstep.AdamW, torch.float32, {}),
    "clipped": (fusedstep.AdamW, torch.float32, {"max_grad_norm": 1.0, "skip_nonfinite": True}),
    "stochastic": (fusedstep.AdamW, torch.bfloat16, {"rounding": "stochastic"}),
    "int8": (fusedstep.AdamW, torch.bfloat16, _INT8),
    "int8-stochastic": (fusedstep.AdamW, torch.bfloat16, {**_INT8, "rounding": "stochastic"}),
    "int8-split": (fusedstep.AdamW, torch.bfloat16, {**_INT8, "master": "split"}),
    "int8-split8": (fusedstep.AdamW, torch.bfloat16, {**_INT8, "master": "split8"}),
    "float16": (fusedstep.NAdam, torch.float16, {"rounding": "stochastic", "statistics": True}),
    "float64": (fusedstep.SGD, torch.float64, {"momentum": 0.9, "ema_decay": 0.9}),
    "Lamb": (fusedstep.Lamb, torch.bfloat16, {"master": "split"}),
    "Muon": (fusedstep.Muon, torch.bfloat16, {}),
}
PIPES = {
    "ALU": "LOP3 SHF IADD3 VIADD LEA PRMT VIMNMX VIADDMNMX FMNMX ISETP FSETP FSEL SEL I2FP F2FP SGXT MOV",
    "FMA": "FADD FMUL FFMA",
    "IMAD": "IMAD",
    "XU": "MUFU I2F F2I F2F",
    "memory": "LDG STG LDS STS LDL STL SHFL STSM LDSM",
}


def take_step(cls: Any, dtype: torch.dtype, options: dict) -> None:
    p = torch.nn.Parameter(torch.ones(64, 1024, dtype=dtype))
    p.grad = torch.ones_like(p)
    optimizer = cls([p], engine="triton", **options)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
    optimizer.step()


def call_the_others() -> None:
    """The kernels that no setting above needs, or not on a CPU's tensors."""
    fingerprint.fingerprints([torch.ones(64)])
    x = torch.ones(2, 256, 256, dtype=torch.bfloat16)
    kernels.scale(x, torch.ones(2), torch.empty_like(x))
    for transposed in (False, True):
        kernels.multiply(x, x, [(1.0, x), (2.0, x)], torch.empty_like(x), 1.0, transposed)


def fast_path(sass: str) -> list[str]:
    """The instructions that move vectors, not single elements: those of a loop, or all up to an end."""
    names: list[str] = []
    starts: dict[str, int] = {}
    loops, parts, begin = [], [], 0
    for line in sass.splitlines():
        if line.endswith(":"):
            starts[line[:-1]] = len(names)
        elif found := re.search(r"\t(?:@\S+ )?([A-Z0-9_.]+)(?: (\w+))?.*;", line):
            names.append(found[1])
            end = len(names)
            if found[1] == "BRA" and starts.get(found[2], end) < end:
                loops.append(names[starts[found[2]] : end])
            elif found[1] == "EXIT":
                parts.append(names[begin:end])
                begin = end

    def vectors(part: list[str]) -> int:
        return len([name for name in part if re.match(r"(STG|LDG)\.E\.(64|128)", name)])

    return max([*filter(vectors, loops)] or parts, key=vectors)


def count(name: str, number: int, kernel: Any, given: dict) -> list[str]:
    """A row of the table, for the sweep that is the `number`-th of a setting."""
    path = [operation.split(".")[0] for operation in fast_path(kernel.asm["sass"])]
    elements = given["BLOCK"] * given["TILES"] / (32 * kernel.metadata.num_warps)
    pipe_of = {operation: pipe for pipe, operations in PIPES.items() for operation in operations.split()}
    per_pipe = collections.Counter(pipe_of.get(operation, "others") for operation in path)
    spilled = sum(operation in ("LDL", "STL") for operation in path)
    counts = [len(path), *(per_pipe[pipe] for pipe in (*PIPES, "others"))]
    return [f"{name}, sweep {number}", str(spilled), *(f"{n / elements:.1f}" for n in counts)]


def main(names: list[str]) -> None:
    found: list[tuple[str, Any, dict]] = []
    h200.install(
        lambda kernel, grid, args: found.append(
            (kernel.metadata.name, kernel, dict(zip(kernel.src.fn.arg_names, args, strict=True)))
        )
    )
    table = Table("", "spills", "all", *PIPES, "others", title="instructions for an element")
    for name in names or SETTINGS:
        first = len(found)
        take_step(*SETTINGS[name])
        sweeps = [(kernel, given) for kind, kernel, given in found[first:] if kind == "fusedstep_sweep"]
        for number, (kernel, given) in enumerate(sweeps, 1):
            table.add_row(*count(name, number, kernel, given))
    call_the_others()
    console = Console()
    console.print(table)
    console.print("compiled:", *sorted({kind for kind, *_ in found}))


if __name__ == "__main__":
    main(sys.argv[1:])
