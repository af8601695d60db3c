"""Trains a small BERT to fill in masked characters: LAMB, and large batches by gradient accumulation.

    python examples/bert.py --batch 1024 --at-once 64

A batch is read in pieces of --at-once samples, whose gradients add up before one step: memory is that of a
piece, and the result depends on its size by rounding only. With twice the batch LAMB takes a rate larger by the
root of two. Trust ratios scale updates: a layer moves by a part of its own norm, whatever its gradients.
"""

import argparse
from importlib import resources

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fusedstep

WIDTH, HEADS, LAYERS, LENGTH = 64, 4, 2, 16
MASK, MASKED = 256, 0.15  # a token beyond all bytes, and how many of them are masked
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class BERT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(257, WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        for p in self.parameters():
            # LAMB moves a tensor by a fraction of its own norm: all begin with elements of one size
            if p.ndim > 1:
                nn.init.normal_(p, std=0.1)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(text) + self.places.weight))


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--batch", type=int, default=256, help="samples a step")
    parser.add_argument("--at-once", type=int, default=64, help="samples that fit into memory")
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()

    torch.manual_seed(0)
    text = torch.tensor([*(resources.files("fusedstep.cli") / "sonnets.txt").read_bytes()])
    model = BERT().to(DEVICE)
    # as in the paper: biases and norms neither decay nor have a trust ratio
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    # Lamb clips by a norm of 1 unless told otherwise
    optimizer = fusedstep.Lamb(groups, lr=0.02 * (args.batch / 256) ** 0.5, statistics=True)
    warm_up = max(1, args.steps // 10)
    rate = lambda step: min((step + 1) / warm_up, 1 - step / args.steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    for step in range(1, args.steps + 1):
        batch = text[torch.randint(len(text) - LENGTH, (args.batch, 1)) + torch.arange(LENGTH)]
        masked = torch.rand(batch.shape) < MASKED
        total = torch.zeros((), device=DEVICE)
        for piece, mask in zip(batch.split(args.at_once), masked.split(args.at_once), strict=True):
            piece, mask = piece.to(DEVICE), mask.to(DEVICE)
            logits = model(piece.masked_fill(mask, MASK))
            # a mean over the whole batch: pieces have more masked characters, or fewer
            loss = cross_entropy(logits[mask], piece[mask], reduction="sum") / masked.sum()
            loss.backward()
            total += loss.detach()
        optimizer.step(zero_grad=True)
        scheduler.step()
        if step % 20 == 0 or step in (1, args.steps):
            ratios = optimizer.statistics().trust_ratios[: len(matrices)]
            scaled = f"updates scaled by {ratios.min():.3f} to {ratios.max():.3f}"
            print(f"step {step}: loss {total:.4f} nats a masked character, {scaled}", flush=True)


if __name__ == "__main__":
    main()
