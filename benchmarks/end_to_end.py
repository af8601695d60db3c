"""What the optimizer changes in a whole iteration of training GPT-2 (124 million parameters).

    python benchmarks/end_to_end.py --output benchmarks

Compiled, under bf16 autocast, with weight decay for matrices only (two groups), gradients clipped to a norm of
1, a warm-up that sets another learning rate at every step, 8 x 1024 random tokens, gradients dropped after
every step. Ours clips within its step (`max_grad_norm=1.0`); beside it torch's fused AdamW after
`clip_grad_norm_`. Both train the same model in turns, a block of iterations each, so that both see the slow and
the fast seconds of a machine. Takes two or three minutes on a GPU; `--device cpu --small` is a smoke test.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from transformers import GPT2Config, GPT2LMHeadModel

import fusedstep
from fusedstep.cli.environment import environment
from fusedstep.cli.timing import Spread

LR, LIMIT, DECAY, BETAS = 6e-4, 1.0, 0.1, (0.9, 0.95)
WARM_UP_STEPS = 2000
# of a block: the first find caches as the other has left them, and are not counted
NOT_COUNTED = 3
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 32, "vocab_size": 256}


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    params = [*model.parameters()]
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def sides(model: torch.nn.Module) -> dict[str, Callable[[], None]]:
    """What is done after a backward: all of it, by the name of who does it."""
    ours = fusedstep.AdamW(groups(model), lr=LR, betas=BETAS, max_grad_norm=LIMIT)
    torchs = torch.optim.AdamW(groups(model), lr=LR, betas=BETAS, fused=True)
    params = [*model.parameters()]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
        for each in (ours, torchs)
    ]

    def step_ours() -> None:
        ours.step()
        schedules[0].step()
        ours.zero_grad()

    def step_torchs() -> None:
        torch.nn.utils.clip_grad_norm_(params, LIMIT)
        torchs.step()
        schedules[1].step()
        torchs.zero_grad()

    return {"ours": step_ours, "torch fused": step_torchs}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds an iteration of both sides, from blocks in turn."""
    torch.manual_seed(0)
    config = GPT2Config(**DROPOUT, **(SMALL if args.small else {}), use_cache=False)
    model = GPT2LMHeadModel(config).to(args.device).train()
    run = model if args.small else torch.compile(model)
    shape = (2, 32) if args.small else (8, 1024)
    batches = [torch.randint(config.vocab_size, shape, device=args.device) for _ in range(8)]
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    losses: list[torch.Tensor] = []

    def iteration(i: int, after: Callable[[], None]) -> None:
        tokens = batches[i % len(batches)]
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        after()
        losses.append(loss.detach())

    steps = sides(model)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for block in track(range(args.blocks), "blocks"):
        for name, after in steps.items():
            for i in range(NOT_COUNTED):
                iteration(i, after)
            wait()
            begin = time.perf_counter()
            for i in range(args.iterations):
                iteration(i, after)
            wait()
            # the first compiles
            if block or args.blocks == 1:
                times[name].append(1e3 * (time.perf_counter() - begin) / args.iterations)
    last = float(losses[-1])
    if not math.isfinite(last):
        raise SystemExit(f"the loss is {last} after {len(losses)} iterations; nothing is reported")
    return {
        "model": "GPT-2" + (", small" if args.small else ""),
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": list(shape),
        "blocks": args.blocks,
        "iterations": args.iterations,
        "loss": [float(losses[0]), last],
        **{name: Spread.of(found)._asdict() for name, found in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Milliseconds an iteration, ours beside torch fused.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="two tiny layers, not compiled: a smoke test")
    parser.add_argument("--blocks", type=int, default=9, help="of each side; the first is not counted")
    parser.add_argument("--iterations", type=int, default=20, help="of each block")
    parser.add_argument("--output", type=Path, help="folder for the raw result")
    parser.add_argument("--commit", help="commit to record; git is asked for it")
    args = parser.parse_args()
    console = Console()
    facts = environment(args.device, args.commit)
    console.print(" | ".join(f"{name} {value}" for name, value in facts.items() if name != "commit"))
    result = {**facts, **measure(args)}
    for name in ("ours", "torch fused"):
        found = result[name]
        console.print(f"{name:>12}: {found['median']:.2f} ms ({found['low']:.2f} to {found['high']:.2f})")
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        small = "-small" if args.small else ""
        name = f"end-to-end{small}-{args.device}-{facts['device'].lower().replace(' ', '-')}.json"
        (args.output / name).write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"raw result: {args.output / name}")


if __name__ == "__main__":
    main()
