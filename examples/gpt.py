"""Trains a small GPT on the characters of a text: AdamW that clips, warm-up and cosine, checkpoints.

    python examples/gpt.py --text mine.txt

Interrupted and started again, it goes on from its last checkpoint as if nothing had happened: batches depend on
the number of the step alone. On a GPU the model computes in bfloat16, and parameters stay float32.
"""

import argparse
import math
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fusedstep

WIDTH, HEADS, LAYERS = 128, 4, 2
BATCH, CONTEXT = 8, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SONNETS = resources.files("fusedstep.cli") / "sonnets.txt"


class GPT(nn.Module):
    """Predicts the next byte, so that any text will do."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **options)
        self.blocks = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        x = self.bytes(text) + self.places.weight[:length]
        future = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        return self.head(self.blocks(x, future, is_causal=True))


def sample(text: torch.Tensor, step: int) -> torch.Tensor:
    """Pieces from places that depend on the number of the step alone."""
    places = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return text[places + torch.arange(CONTEXT + 1)]


def write(model: GPT, start: str, length: int = 100) -> str:
    text = torch.tensor([[*start.encode()]], device=DEVICE)
    for _ in range(length):
        chances = model(text[:, -CONTEXT:])[:, -1].softmax(-1)
        text = torch.cat([text, torch.multinomial(chances, 1)], 1)
    return bytes(text[0].tolist()).decode(errors="replace")


def parts(steps: int) -> dict[str, Any]:
    """What is trained, and saved."""
    torch.manual_seed(0)
    model = GPT().to(DEVICE)
    # biases and norms do not decay
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = fusedstep.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), max_grad_norm=1.0)
    warm_up = max(1, steps // 20)
    rate = lambda step: min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * step / steps))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text", type=Path, default=SONNETS, help="file to learn from")
    parser.add_argument("--steps", type=int, default=200, help="in all, with those of a checkpoint")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two reports and checkpoints")
    parser.add_argument("--checkpoint", type=Path, default=Path("gpt.pt"), help="to save to and resume from")
    args = parser.parse_args()

    text, trained, done = torch.tensor([*args.text.read_bytes()]), parts(args.steps), 0
    model, optimizer, scheduler = trained.values()
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=DEVICE)
        done = saved["step"]
        for name, part in trained.items():
            part.load_state_dict(saved[name])
        if done < args.steps:
            print(f"goes on after step {done} of {args.checkpoint}")
        else:
            more = f"give --steps more than {done} to train on, or delete the file to start anew"
            print(f"{args.checkpoint} has all {done} steps: {more}")
    for step in range(done + 1, args.steps + 1):
        batch = sample(text, step).to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step(zero_grad=True)
        scheduler.step()
        if step % args.save_every == 0 or step in (1, args.steps):
            print(f"step {step}: loss {loss:.4f} nats a character", flush=True)
            # under another name first: if that is interrupted, the checkpoint before is still there
            new = args.checkpoint.with_suffix(".new")
            torch.save({"step": step, **{name: part.state_dict() for name, part in trained.items()}}, new)
            new.replace(args.checkpoint)
    with torch.no_grad():
        print(f"it writes: {write(model, 'Shall I ')!r}")


if __name__ == "__main__":
    main()
