"""How many steps does Muon save? The model of `fusedstep demo`, beside AdamW and torch's Muon, five seeds.

    python benchmarks/muon_quality.py run     # the raw result goes beside this file, the picture to docs
    python benchmarks/muon_quality.py draw benchmarks/muon-quality-cuda-nvidia-h200.json
    python benchmarks/muon_quality.py tune    # final losses with other learning rates

All optimizers of a seed start from the same weights and see the same batches, in float32. Losses are those of
training. A CPU takes minutes; `--seeds 2 --steps 150` is enough to see it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import fusedstep
from fusedstep.cli.demo import LAST, Model, random_batches, sonnets
from fusedstep.cli.environment import environment

HERE = Path(__file__).parent
PICTURE = HERE.parent / "docs" / "muon.png"
ADAMW, OURS, TORCHS = "fusedstep.AdamW", "fusedstep.Muon", "torch.optim.Muon"
# the best of those that `tune` tries, by final losses; with seed 0, on a CPU:
#   AdamW    0.005: 2.094    0.01: 1.980     0.02: 1.959   0.04: 2.053
#   Muon    0.0125: 1.894   0.025: 1.739     0.05: 1.664    0.1: 1.705
# AdamW has its rate beside Muon, too, and everywhere the decay and betas that `muon_groups` gives it
ADAMW_RATE, MUON_RATE = 0.02, 0.05
ADAMW_RATES = (0.005, 0.01, 0.02, 0.04)
MUON_RATES = (0.0125, 0.025, 0.05, 0.1)

# of all commands
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DeviceName = Annotated[str, typer.Option(help="cpu or cuda; the GPU if there is one")]
Seeds = Annotated[int, typer.Option(min=1, help="how many, of weights and batches")]
Steps = Annotated[int, typer.Option(min=2 * LAST, help="of each training")]


class Trained(NamedTuple):
    """An optimizer, its learning rate, and how to make it for a model."""

    name: str
    lr: float
    make: Callable[[nn.Module, float], list[Optimizer]]


def adamw(model: nn.Module, lr: float) -> list[Optimizer]:
    groups = fusedstep.muon_groups(model, takes=lambda name, p: False, adamw={"lr": lr})
    return [fusedstep.AdamW([_as_torchs(group) for group in groups])]


def muon(model: nn.Module, lr: float) -> list[Optimizer]:
    return [fusedstep.Muon(_muon_groups(model, lr))]


def torchs_muon(model: nn.Module, lr: float) -> list[Optimizer]:
    """Two optimizers for the same groups."""
    groups = _muon_groups(model, lr)
    matrices, others = ([_as_torchs(g) for g in groups if g["use_muon"] is which] for which in (True, False))
    return [torch.optim.Muon(matrices), torch.optim.AdamW(others)]


def _muon_groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    return fusedstep.muon_groups(model, lr=lr, adamw={"lr": ADAMW_RATE})


def _as_torchs(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "use_muon"}


BEST = [
    Trained(ADAMW, ADAMW_RATE, adamw),
    Trained(OURS, MUON_RATE, muon),
    Trained(TORCHS, MUON_RATE, torchs_muon),
]
TUNED = [Trained(ADAMW, lr, adamw) for lr in ADAMW_RATES] + [Trained(OURS, lr, muon) for lr in MUON_RATES]


def train(trained: list[Trained], seeds: int, steps: int, device: str) -> Tensor:
    """The loss of every optimizer, seed and step. All models are computed at once, as a batch of models."""
    models, batches = _begin(seeds, steps)
    # every optimizer has the models of all seeds: what it does to one tensor depends on no other
    copies = [copy.deepcopy(models).to(device) for _ in trained]
    optimizers = [o for each, mine in zip(trained, copies, strict=True) for o in each.make(mine, each.lr)]
    # up for a twentieth of the steps, then down to zero
    schedule = lambda step: min(1.0, 20 * (step + 1) / steps) * (1 - step / steps)
    schedulers = [LambdaLR(optimizer, schedule) for optimizer in optimizers]
    losses_of = torch.vmap(lambda weights, batch: functional_call(models[0], weights, batch))
    losses = []
    # vmap takes attention written out, on every device
    with sdpa_kernel(SDPBackend.MATH):
        for batch in track(batches.to(device), f"training {len(trained)} x {seeds} models"):
            loss = losses_of(_stacked([m for mine in copies for m in mine]), batch.repeat(len(trained), 1, 1))
            loss.sum().backward()
            losses.append(loss.detach())
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    return torch.stack(losses, 1).unflatten(0, (len(trained), seeds)).cpu()


def _begin(seeds: int, steps: int) -> tuple[nn.ModuleList, Tensor]:
    """A model of every seed, and the batches of every step and seed."""
    text, characters = sonnets()
    models, batches = nn.ModuleList(), []
    for seed in range(seeds):
        torch.manual_seed(seed)
        models.append(Model(characters))
        batches.append(random_batches(text, steps))
    return models, torch.stack(batches, 1)


def _stacked(models: list[nn.Module]) -> dict[str, Tensor]:
    """The weights of all models, by their names in one; gradients go back to each."""
    return {
        name: torch.stack([m.get_parameter(name) for m in models]) for name, _ in models[0].named_parameters()
    }


class Curves(NamedTuple):
    """Losses of one optimizer, of every seed and step, each the mean of the last steps: one batch is noisy."""

    name: str
    lr: float
    smooth: Tensor

    @classmethod
    def of(cls, name: str, lr: float, losses: Any) -> Curves:
        return cls(name, lr, torch.as_tensor(losses).unfold(1, LAST, 1).mean(2))

    @property
    def final(self) -> Tensor:
        return self.smooth[:, -1]

    @property
    def spread(self) -> float:
        """Of the final losses over seeds: their standard deviation."""
        return self.final.std(correction=0).item()

    @property
    def steps(self) -> range:
        return range(LAST, LAST + self.smooth.shape[1])

    def reaches(self, loss: float) -> int | None:
        """The first step at which the mean of all seeds is this low."""
        return next(
            (s for s, m in zip(self.steps, self.smooth.mean(0).tolist(), strict=True) if m <= loss), None
        )


def run(
    device: DeviceName = DEVICE,
    seeds: Seeds = 5,
    steps: Steps = 300,
    commit: Annotated[str | None, typer.Option(help="to record; git is asked for it")] = None,
    output: Annotated[Path, typer.Option(help="folder for the raw result")] = HERE,
    picture: Annotated[Path, typer.Option(help="PNG with the loss curves")] = PICTURE,
) -> None:
    """Train with the best learning rates, and record and draw the losses."""
    facts = environment(device, commit)
    losses = train(BEST, seeds, steps, device)
    results = [
        {"optimizer": each.name, "lr": each.lr, "losses": [[round(x, 4) for x in seed] for seed in of_seeds]}
        for each, of_seeds in zip(BEST, losses.tolist(), strict=True)
    ]
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"muon-quality-{device}-{facts['device'].lower().replace(' ', '-')}.json"
    path.write_text(json.dumps({**facts, "lr_of_adamw_beside_muon": ADAMW_RATE, "results": results}) + "\n")
    draw(path, picture)


def draw(
    result: Annotated[Path, typer.Argument(help="what `run` has left")],
    picture: Annotated[Path, typer.Option(help="PNG with the loss curves")] = PICTURE,
) -> None:
    """Show what a run has found, as a table and a picture."""
    found = json.loads(result.read_text())
    curves = {r["optimizer"]: Curves.of(r["optimizer"], r["lr"], r["losses"]) for r in found["results"]}
    goal = curves[ADAMW].final.mean().item()
    show(list(curves.values()), goal)
    apart = curves[OURS].final - curves[TORCHS].final
    print(
        f"{OURS} - {TORCHS}: {apart.mean():+.4f}, of a seed at most {apart.abs().max():.4f}; "
        f"seeds differ by {curves[TORCHS].spread:.4f}"
    )
    facts = f"{found['device']}, torch {found['torch']}, fusedstep {found['fusedstep']}"
    _figure(curves, goal, facts).savefig(picture)
    print(f"raw result: {result}, picture: {picture}")


def tune(device: DeviceName = DEVICE, seeds: Seeds = 5, steps: Steps = 300) -> None:
    """Show the final losses with other learning rates."""
    losses = train(TUNED, seeds, steps, device)
    curves = [Curves.of(each.name, each.lr, of_seeds) for each, of_seeds in zip(TUNED, losses, strict=True)]
    show(curves, min(c.final.mean().item() for c in curves if c.name == ADAMW))


def show(curves: list[Curves], goal: float) -> None:
    seeds, steps = len(curves[0].final), curves[0].steps[-1]
    table = Table(title=f"{seeds} seeds, {steps} steps; losses: mean of the last {LAST} batches")
    for heading in ("", "lr", "final loss", "over seeds", f"reaches {goal:.4f}"):
        table.add_column(heading, justify="right" if heading else "left")
    for each in curves:
        reached = each.reaches(goal)
        when = "not" if reached is None else f"at step {reached}"
        table.add_row(each.name, f"{each.lr:g}", f"{each.final.mean():.4f}", f"±{each.spread:.4f}", when)
    Console(width=112).print(table)


def _figure(curves: dict[str, Curves], goal: float, facts: str) -> Figure:
    seeds, steps = len(curves[ADAMW].final), curves[ADAMW].steps
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    # both Muons coincide: torch's wide and pale, ours thin and dark on top of it
    looks = {
        ADAMW: {"color": "#2a7f62", "linewidth": 1.6},
        TORCHS: {"color": "#ff9f5a", "linewidth": 5, "alpha": 0.8},
        OURS: {"color": "#14213d", "linewidth": 1.4, "linestyle": "--"},
    }
    for name, look in looks.items():
        smooth = curves[name].smooth
        label = f"{name}, lr {curves[name].lr:g}: {curves[name].final.mean():.3f} ± {curves[name].spread:.3f}"
        axes.plot(steps, smooth.mean(0), label=label, **look)
        axes.fill_between(steps, smooth.amin(0), smooth.amax(0), color=look["color"], alpha=0.15, linewidth=0)
    axes.axhline(goal, color="gray", linewidth=0.8)
    reached = curves[OURS].reaches(goal)
    if reached is not None:
        axes.plot(reached, goal, "o", color="#14213d", markersize=5)
        text = f"AdamW's loss after {steps[-1]} steps: Muon has it after {reached}"
        axes.annotate(text, (reached, goal), (-6, -14), textcoords="offset points", ha="right", fontsize=9)
    # from where the first fall is over
    top, bottom = curves[ADAMW].smooth[:, len(steps) // 12].max(), curves[OURS].smooth.min()
    axes.set(xlabel="step", ylabel="loss (nats per character)", xlim=(0, steps[-1]), ylim=(bottom - 0.05, top))
    title = f"Learning Shakespeare's sonnets: mean and range of seeds 0 to {seeds - 1}"
    axes.set_title(f"{title}\n{facts}", fontsize=10, color="gray")
    axes.legend(frameon=False, title="final loss, standard deviation over seeds", alignment="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    for command in (run, draw, tune):
        app.command()(command)
    app()
