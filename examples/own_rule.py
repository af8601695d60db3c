"""Trains a small model with a rule of its own, and with AdamW beside it.

    python examples/own_rule.py

The rule is signed momentum whose step is a fraction of the size of the weights: the sign of Lion, the scale of
LAMB. docs/own_rules.md explains what a rule may do.
"""

import torch

import fusedstep
from fusedstep.rules import maximum, mix, pair, rule, sign, sqrt, total

STEPS = 200


@rule(states={"m": "exp_avg"})
def signed(p, g, m, *, numel, lr, beta1, beta2, smallest):
    size = maximum(sqrt(total(p * p) / numel), smallest)
    return p - lr * size * sign(mix(m, g, beta1)), mix(m, g, beta2)


class Signed(fusedstep.Optimizer):
    """The root mean square of a step is `lr` times that of the tensor, or times `smallest`."""

    rule = signed
    lr: float = 1e-2
    betas: tuple[float, float] = pair("beta1", "beta2", (0.9, 0.99))
    smallest: float = 1e-2


def trained(make: type[fusedstep.Optimizer], **options: object) -> tuple[float, float]:
    """The loss before and after training."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    inputs = torch.randn(256, 8, device=device)
    targets = torch.sin(inputs.sum(1, keepdim=True))
    # clipping, schedules and all the rest work for every class
    optimizer = make(model.parameters(), max_grad_norm=1.0, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step(zero_grad=True)
        scheduler.step()
        losses.append(loss.detach())
    return losses[0].item(), losses[-1].item()


def main() -> None:
    for make, lr in ((Signed, 0.05), (fusedstep.AdamW, 0.02)):
        first, last = trained(make, lr=lr)
        print(f"{make.__name__:8} loss {first:.4f} -> {last:.4f}")


if __name__ == "__main__":
    main()
