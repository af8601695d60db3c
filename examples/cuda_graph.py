"""Trains with forward, backward, clipping, step and zeroing in one CUDA graph: the host launches once a step.

    python examples/cuda_graph.py

The learning rate follows a schedule between replays, without another capture. Batches are written to where the
graph reads them. Gradients are zeroed, not dropped, because the graph adds to them where they were. Without a
GPU the same function runs step by step.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import mse_loss

import fusedstep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, WIDTH, LAYERS, WARM_UP = 256, 64, 8, 3


def captured(train: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of one step, after some on another stream, as torch asks for; and where it leaves the loss."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            train()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train()
    return graph, loss


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--no-graph", action="store_true", help="step by step on a GPU too, to compare")
    args = parser.parse_args()

    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())
    blocks = [block() for _ in range(LAYERS)]
    model = nn.Sequential(nn.Linear(8, WIDTH), *blocks, nn.Linear(WIDTH, 1)).to(DEVICE)
    inputs, targets = torch.zeros(BATCH, 8, device=DEVICE), torch.zeros(BATCH, 1, device=DEVICE)
    optimizer = fusedstep.AdamW(model.parameters(), lr=2e-3, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    def next_batch() -> None:
        inputs.normal_()
        targets.copy_(inputs.sum(1, keepdim=True).sin())

    def train() -> torch.Tensor:
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step(zero_grad=True, set_to_none=False)
        return loss.detach()

    uses_graph = DEVICE == "cuda" and not args.no_graph
    next_batch()
    with torch.no_grad():
        first = mse_loss(model(inputs), targets).item()
    if uses_graph:
        graph, loss = captured(train)
    begin = time.perf_counter()
    for _ in range(args.steps):
        next_batch()
        if uses_graph:
            graph.replay()
        else:
            loss = train()
        scheduler.step()  # the next replay has the new rate
    last = loss.item()
    milliseconds = 1e3 * (time.perf_counter() - begin) / args.steps
    how = "replays of one CUDA graph" if uses_graph else f"steps one by one on {DEVICE}, without a CUDA graph"
    print(f"{args.steps} {how}: loss {first:.4f} -> {last:.4f}, {milliseconds:.3f} ms each")


if __name__ == "__main__":
    main()
