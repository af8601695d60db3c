"""Says whether a model fits into memory with AdamW, by how states are stored, and trains a small one so.

    python examples/less_memory.py --model llama-1b --gigabytes 16

A model of yours is --model module:function. Predictions allocate nothing; they are those of `fusedstep memory`,
so this needs pip install '.[cli]'. Activations, and what the model keeps besides parameters, come on top.
"""

import argparse
from importlib import resources

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fusedstep
from fusedstep.cli.counting import parameters_of, predicted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = {"state_dtype": "float32", "master": "float32"}
SMALL = {"state_dtype": "int8", "master": "split8"}
CONTEXT, WIDTH = 8, 256


def words(options: dict[str, str]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def bytes_kept(optimizer: fusedstep.AdamW, params: list[nn.Parameter]) -> int:
    """Parameters, their gradients and all that the optimizer keeps for them."""
    states = [t for p in params for t in optimizer.state[p].values()]
    return sum(t.numel() * t.itemsize for t in (*params, *(p.grad for p in params), *states))


def trained(options: dict[str, str], steps: int) -> tuple[float, float]:
    """The last loss of a small bfloat16 model that learns to write, and the bytes a parameter takes."""
    torch.manual_seed(0)
    text = torch.tensor([*(resources.files("fusedstep.cli") / "sonnets.txt").read_bytes()])
    model = nn.Sequential(
        nn.Embedding(256, 64), nn.Flatten(), nn.Linear(64 * CONTEXT, WIDTH), nn.GELU(), nn.Linear(WIDTH, 256)
    ).to(DEVICE, torch.bfloat16)
    params = [*model.parameters()]
    optimizer = fusedstep.AdamW(params, lr=2e-3, max_grad_norm=1.0, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        batch = text[torch.randint(len(text) - CONTEXT, (256, 1)) + torch.arange(CONTEXT + 1)].to(DEVICE)
        loss = cross_entropy(model(batch[:, :-1]).float(), batch[:, -1])
        loss.backward()
        optimizer.step()
    return loss.item(), bytes_kept(optimizer, params) / sum(p.numel() for p in params)


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="llama-1b", help="as `fusedstep memory` takes it")
    parser.add_argument("--gigabytes", type=float, default=16.0, help="of memory that there are")
    parser.add_argument("--steps", type=int, default=150, help="of the small model")
    args = parser.parse_args()

    named = parameters_of(args.model, torch.bfloat16)
    for options in (EXACT, SMALL):
        needed = predicted(fusedstep.AdamW([p for _, p in named], **options)).at_rest / 1e9
        fits = "fits into" if needed <= args.gigabytes else "does not fit into"
        print(f"{args.model} {fits} {args.gigabytes:g} GB with {words(options)}: it takes {needed:.2f} GB")
    for options in (EXACT, SMALL):
        loss, size = trained(options, args.steps)
        print(f"a small model with {words(options)}: loss {loss:.4f}, {size:.2f} bytes a parameter")


if __name__ == "__main__":
    main()
