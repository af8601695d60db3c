"""Trains a small model and logs what its steps measure to TensorBoard, and to Weights & Biases if asked.

    python examples/log_to_tensorboard.py [folder]
    tensorboard --logdir folder

    pip install wandb
    WANDB_MODE=offline python examples/log_to_tensorboard.py --wandb [folder]

Every step collects statistics, on the device. They are read, and waited for, only every EVERY steps.
"""

import argparse

import torch
from torch.utils.tensorboard import SummaryWriter

import fusedstep

STEPS, EVERY = 200, 20
OF_ALL = ("grad_norm", "param_norm", "update_norm", "clip_factor", "nonfinite")


def measured(model: torch.nn.Module, optimizer: fusedstep.AdamW) -> dict[str, float]:
    """What the last step measured, by names for a log."""
    seen = optimizer.statistics()
    # one copy to the host, and so one wait, for all of them
    values = torch.stack([getattr(seen, name) for name in OF_ALL]).tolist()
    of_all = {f"step/{name}": value for name, value in zip(OF_ALL, values, strict=True)}
    of_all["step/skipped"] = optimizer.skipped_steps.item()
    names = [f"grad_norm/{name}" for name, _ in model.named_parameters()]
    return of_all | dict(zip(names, seen.grad_norms.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", nargs="?", default="runs", help="of TensorBoard's files")
    parser.add_argument("--wandb", action="store_true", help="log to Weights & Biases, too")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
    optimizer = fusedstep.AdamW(
        model.parameters(), lr=1e-2, max_grad_norm=1.0, skip_nonfinite=True, statistics=True
    )
    inputs = torch.randn(256, 8, device=device)
    targets = inputs.sum(1, keepdim=True)
    writer, run = SummaryWriter(args.folder), None
    if args.wandb:
        import wandb  # only who asks for it needs it

        run = wandb.init(project="fusedstep", dir=args.folder)
    for step in range(STEPS):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step(zero_grad=True)
        if step % EVERY == 0:
            values = {"loss": loss.item(), **measured(model, optimizer)}
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            if run is not None:
                run.log(values, step=step)
    writer.close()
    if run is not None:
        run.finish()
    print(f"{len(values)} curves of {STEPS} steps: tensorboard --logdir {args.folder}")


if __name__ == "__main__":
    main()
