"""Trains a small residual network to tell directions of stripes: SGD, and blocks that are left out at random.

    python examples/images.py --leave-out 0.5

Stochastic depth: a block that a step leaves out has no gradients there. Its parameters and momenta stay as they
are in that step, and the next one takes them along again, without new tables or kernels.
"""

import argparse
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu

import fusedstep

CLASSES, SIZE, WIDTH, BLOCKS = 4, 16, 32, 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, left_out: float) -> None:
        super().__init__()
        self.left_out = left_out
        convolution = lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.layers = nn.Sequential(
            convolution(), nn.BatchNorm2d(WIDTH), nn.ReLU(), convolution(), nn.BatchNorm2d(WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # decided on the host: nothing of the block runs
        if self.training and torch.rand(()).item() < self.left_out:
            return x
        share = 1.0 if self.training else 1.0 - self.left_out
        return relu(x + share * self.layers(x))


def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stripes of random width and place in four directions, under noise."""
    kinds = torch.randint(CLASSES, (count,))
    angles = (math.pi / CLASSES * kinds + 0.2 * torch.randn(count)).view(-1, 1, 1)
    y, x = torch.meshgrid(*2 * [torch.arange(SIZE)], indexing="ij")
    phase, rate = 2 * math.pi * torch.rand(count, 1, 1), 0.6 + torch.rand(count, 1, 1)
    stripes = torch.sin(rate * (x * angles.cos() + y * angles.sin()) + phase)
    pixels = stripes[:, None] * torch.rand(count, 3, 1, 1) + 0.5 * torch.randn(count, 3, SIZE, SIZE)
    return pixels.to(DEVICE, memory_format=torch.channels_last), kinds.to(DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--leave-out", type=float, default=0.5, help="chance of the last block to be left out")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    torch.manual_seed(0)
    # the deeper a block, the more often it is left out
    blocks = [Block(args.leave_out * (i + 1) / BLOCKS) for i in range(BLOCKS)]
    stem, head = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1), nn.Linear(WIDTH, CLASSES)
    model = nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    model.to(DEVICE, memory_format=torch.channels_last)
    optimizer = fusedstep.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    present = []
    for step in range(1, args.steps + 1):
        pixels, kinds = images(args.batch)
        loss = cross_entropy(model(pixels), kinds)
        loss.backward()
        present.append(sum(p.grad is not None for p in model.parameters()))
        optimizer.step(zero_grad=True)
        scheduler.step()
        if step % 20 == 0 or step in (1, args.steps):
            print(f"step {step}: loss {loss:.4f}", flush=True)
    model.eval()
    with torch.no_grad():
        pixels, kinds = images(512)
        right = (model(pixels).argmax(1) == kinds).float().mean()
    gradients = f"{min(present)} to {max(present)} of {len([*model.parameters()])} gradients"
    print(f"{right:.1%} of new images are told right; steps had {gradients}")


if __name__ == "__main__":
    main()
