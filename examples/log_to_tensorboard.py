"""Trains a small model and logs what its steps measure to TensorBoard.

    python examples/log_to_tensorboard.py [folder]
    tensorboard --logdir folder

Every step collects statistics, on the device. They are read, and waited for, only every EVERY steps.
"""

import sys

import torch
from torch.utils.tensorboard import SummaryWriter

import fusedstep

STEPS, EVERY = 200, 20
OF_ALL = ("grad_norm", "param_norm", "update_norm", "clip_factor", "nonfinite")


def log(writer: SummaryWriter, model: torch.nn.Module, optimizer: fusedstep.AdamW, step: int) -> None:
    seen = optimizer.statistics()
    # one copy to the host, and so one wait, for all of them
    values = torch.stack([getattr(seen, name) for name in OF_ALL]).tolist()
    for name, value in zip(OF_ALL, values, strict=True):
        writer.add_scalar(f"step/{name}", value, step)
    writer.add_scalar("step/skipped", optimizer.skipped_steps.item(), step)
    names = [name for name, _ in model.named_parameters()]
    for name, norm in zip(names, seen.grad_norms.tolist(), strict=True):
        writer.add_scalar(f"grad_norm/{name}", norm, step)


def main(folder: str) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
    optimizer = fusedstep.AdamW(
        model.parameters(), lr=1e-2, max_grad_norm=1.0, skip_nonfinite=True, statistics=True
    )
    inputs = torch.randn(256, 8, device=device)
    targets = inputs.sum(1, keepdim=True)
    with SummaryWriter(folder) as writer:
        for step in range(STEPS):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step(zero_grad=True)
            if step % EVERY == 0:
                writer.add_scalar("loss", loss.item(), step)
                log(writer, model, optimizer, step)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs")
