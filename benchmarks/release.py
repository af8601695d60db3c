"""What released gradients save, and what they cost: the peak of memory, and the time of an iteration.

    python benchmarks/release.py run benchmarks            # on a GPU: less than a minute; --small on a CPU
    python benchmarks/release.py write benchmarks/release-cuda-nvidia-h200.json

Memory: layers of the shapes of Llama 8B in bfloat16, AdamW with states of 8 bits and a master of 24, a batch of
one token, so that there is little but parameters, gradients and states. Beside it what `fusedstep memory`
predicts. Time: forward and backward of BERT large, alone, with a step after them, and with it in backward; in
blocks in turn, so that all see the slow and the fast seconds of a machine. `write` puts the tables of a
result into docs/release.md.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import BertConfig, BertModel

import fusedstep
from fusedstep._torch.release import BUCKET_BYTES
from fusedstep.cli.counting import predicted
from fusedstep.cli.environment import environment
from fusedstep.cli.timing import Spread

PAGE = Path(__file__).parent.parent / "docs" / "release.md"
BEGIN, END = "<!-- written by benchmarks/release.py -->", "<!-- until here -->"
STORED = {"state_dtype": "int8", "master": "split8"}
# of Llama 8B: width, what four of its heads of keys and values take, and the width between
WIDTH, KEYS, BETWEEN, LAYERS = 4096, 1024, 14336, 16
# of a block: the first find caches as the others have left them, and are not counted
NOT_COUNTED = 2


class Layer(nn.Module):
    """The seven matrices of a layer, one after the other: nothing attends to anything here."""

    def __init__(self, width: int, keys: int, between: int) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, keys, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, between, bias=False) for _ in range(2))
        self.down = nn.Linear(between, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (self.k(x) * self.v(x)).sum(-1, keepdim=True)
        x = x + self.o(self.q(x) + heads)
        return x + self.down(self.gate(x) * self.up(x))


@contextlib.contextmanager
def released(model: nn.Module, optimizer: Any, wanted: bool, bucket_bytes: int) -> Iterator[None]:
    """Whether gradients are released, as a choice."""
    if not wanted:
        yield
        return
    with fusedstep.release_gradients(model, optimizer, bucket_bytes):
        yield


def memory(args: argparse.Namespace, release: bool) -> dict[str, Any]:
    """The most bytes of an iteration, when states are there, and how many were predicted."""
    on_gpu = args.device == "cuda"
    width, keys, between, layers = (64, 16, 224, 3) if args.small else (WIDTH, KEYS, BETWEEN, LAYERS)
    bucket_bytes = 8192 if args.small else BUCKET_BYTES
    gc.collect()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    with torch.device(args.device):
        model = nn.Sequential(*(Layer(width, keys, between).bfloat16() for _ in range(layers)))
        inputs = torch.ones(1, width, dtype=torch.bfloat16)
    optimizer = fusedstep.AdamW(model.parameters(), lr=1e-5, **STORED)
    expected = predicted(optimizer, bucket_bytes if release else None)
    elements = sum(p.numel() for p in model.parameters())
    largest = max(p.numel() for p in model.parameters())
    with released(model, optimizer, release, bucket_bytes):
        for i in range(4):
            if on_gpu and i == 2:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            model(inputs).float().square().mean().backward()
            optimizer.step(zero_grad=True)
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else None
    total = expected.at_rest + expected.during_a_step
    return {
        "released": release,
        "parameters": elements,
        "largest_of_all": largest / elements,
        "bucket_bytes": bucket_bytes,
        "predicted": total / elements,
        "measured": None if peak is None else peak / elements,
        "deviation": None if peak is None else peak / total - 1,
    }


def timing(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds an iteration, of all three ways."""
    torch.manual_seed(0)
    small = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    large = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    config = BertConfig(**(small if args.small else large))
    with torch.device(args.device):
        model = BertModel(config, add_pooling_layer=False).bfloat16().train()
        shape = (2, 16) if args.small else (16, 512)
        tokens = torch.randint(config.vocab_size, shape)
    optimizer = fusedstep.AdamW(model.parameters(), lr=1e-5, **STORED)
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None

    def iteration(after: Callable[[], None]) -> None:
        model(tokens).last_hidden_state.float().square().mean().backward()
        after()

    # by who is released, and what follows a backward
    ways = {
        "forward + backward": (False, optimizer.zero_grad),
        "with step()": (False, lambda: optimizer.step(zero_grad=True)),
        "released": (True, optimizer.step),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for block in range(args.blocks):
        for name, (release, after) in ways.items():
            with released(model, optimizer, release, 8192 if args.small else BUCKET_BYTES):
                for _ in range(NOT_COUNTED):
                    iteration(after)
                wait()
                begin = time.perf_counter()
                for _ in range(args.iterations):
                    iteration(after)
                wait()
                # the first compiles
                if block or args.blocks == 1:
                    times[name].append(1e3 * (time.perf_counter() - begin) / args.iterations)
    if not all(p.isfinite().all() for p in model.parameters()):
        raise SystemExit("a parameter is not finite after training; nothing is reported")
    found = {name: Spread.of(samples)._asdict() for name, samples in times.items()}
    ratio = found["released"]["median"] / found["forward + backward"]["median"]
    facts = {"parameters": sum(p.numel() for p in model.parameters()), "tokens": [*shape], "ratio": ratio}
    return {**facts, "blocks": args.blocks, "iterations": args.iterations, "ms": found}


def tables(result: dict[str, Any]) -> str:
    """A result in Markdown."""
    device = result["device"].removeprefix("NVIDIA ")
    lines = [
        f"On one {device}. Layers of Llama 8B's shapes, {result['memory'][0]['parameters'] / 1e9:.1f} billion",
        'bfloat16 parameters, `AdamW(state_dtype="int8", master="split8")`, the peak of an iteration:',
        "",
        "| gradients | bytes a parameter, measured | predicted | off by |",
        "|---|---|---|---|",
    ]
    for row in result["memory"]:
        bucket = f"buckets of {row['bucket_bytes'] >> 20} MiB"
        name = f"released, {bucket}" if row["released"] else "kept until `step()`"
        measured = "" if row["measured"] is None else f"{row['measured']:.2f}"
        off_by = "" if row["deviation"] is None else f"{100 * row['deviation']:+.1f} %"
        lines.append(f"| {name} | {measured} | {row['predicted']:.2f} | {off_by} |")
    found = result["time"]
    batch, length = found["tokens"]
    alone = found["ms"]["forward + backward"]["median"]
    lines += [
        "",
        f"BERT large, {found['parameters'] / 1e6:.0f} million bfloat16 parameters, {batch} x {length} tokens:",
        "",
        "| an iteration | ms | to the first |",
        "|---|---|---|",
    ]
    names = {"with step()": "forward + backward, then `step()`", "released": "released: the step in backward"}
    for name, spread in found["ms"].items():
        row = f"{spread['median']:.1f} | {spread['median'] / alone:.3f}"
        lines.append(f"| {names.get(name, name + ', no step')} | {row} |")
    return "\n".join(lines)


def written(page: str, result: dict[str, Any]) -> str:
    """The page with the tables of a result."""
    found = re.compile(f"({re.escape(BEGIN)}\n).*({re.escape(END)})", re.DOTALL)
    if not found.search(page):
        raise SystemExit(f"the page has no lines {BEGIN} and {END}; put them where the tables belong")
    return found.sub(lambda match: f"{match[1]}\n{tables(result)}\n\n{match[2]}", page)


def run(args: argparse.Namespace) -> None:
    console, facts = Console(), environment(args.device, args.commit)
    console.print(" | ".join(f"{name} {value}" for name, value in facts.items() if name != "commit"))
    result = {**facts, "memory": [memory(args, release) for release in (False, True)], "time": timing(args)}
    console.print(tables(result), markup=False, soft_wrap=True)
    args.output.mkdir(parents=True, exist_ok=True)
    small = "-small" if args.small else ""
    name = f"release{small}-{args.device}-{facts['device'].lower().replace(' ', '-')}.json"
    (args.output / name).write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"raw result: {args.output / name}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory and time with released gradients.")
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="measure")
    running.add_argument("output", type=Path, help="folder for the raw result")
    running.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    running.add_argument("--small", action="store_true", help="tiny layers: a smoke test")
    running.add_argument("--blocks", type=int, default=7, help="of each way; the first is not counted")
    running.add_argument("--iterations", type=int, default=8, help="of each block")
    running.add_argument("--commit", help="commit to record; git is asked for it")
    running.set_defaults(command=run)
    writing = commands.add_parser("write", help="put the tables of a result into docs/release.md")
    writing.add_argument("result", type=Path)
    writing.set_defaults(
        command=lambda args: PAGE.write_text(written(PAGE.read_text(), json.loads(args.result.read_text())))
    )
    args = parser.parse_args()
    args.command(args)


if __name__ == "__main__":
    main()
