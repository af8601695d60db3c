"""Trains a small language model with Muon for its hidden matrices and AdamW for the rest, in one optimizer.

    python examples/muon.py

`muon_groups` decides which parameters go where; printed, it says so, and why. The learning rates of both are
options of groups: there is one scheduler, one `step()` and one checkpoint. benchmarks/muon_quality.py shows how
many steps Muon saves. The model is that of `fusedstep demo`: pip install '.[cli]'.
"""

import argparse

import torch

import fusedstep
from fusedstep.cli.demo import Model, random_batches, sonnets


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of Muon")
    parser.add_argument("--adamw-lr", type=float, default=0.02, help="learning rate of AdamW")
    parser.add_argument("--steps", type=int, default=150, help="of training")
    parser.add_argument("--every", type=int, default=25, help="steps between two reports")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        # so small a model has too little work for more
        torch.set_num_threads(1)
    text, characters = sonnets()
    model = Model(characters).to(device)

    groups = fusedstep.muon_groups(model, lr=args.lr, adamw={"lr": args.adamw_lr})
    print(groups)
    # clipping, schedules, checkpoints and all the rest work for both kinds of groups
    optimizer = fusedstep.Muon(groups, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        [group["lr"] for group in optimizer.param_groups],
        total_steps=args.steps,
        cycle_momentum=False,
    )

    losses = []
    for step, batch in enumerate(random_batches(text, args.steps).to(device), 1):
        loss = model(batch)
        loss.backward()
        optimizer.step(zero_grad=True)
        scheduler.step()
        losses.append(loss.detach())
        if step % args.every == 0 or step == args.steps:
            mean, lr = torch.stack(losses).mean().item(), [f"{lr:.4f}" for lr in scheduler.get_last_lr()]
            print(f"step {step} loss {mean:.4f} rates {' '.join(lr)}")
            losses = []


if __name__ == "__main__":
    main()
