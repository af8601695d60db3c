"""`fusedstep demo`: a small language model trained with our optimizers and with torch's, side by side."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import fusedstep

# what is compared: a class that fusedstep and torch.optim both have, and the arguments both get
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.2, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 5e-3},
    "AdamW": {"lr": 5e-3, "weight_decay": 0.1},
}

WIDTH, HEADS, LAYERS = 64, 4, 3
BATCH, CONTEXT = 16, 32
# the first step of ours compiles kernels, and both allocate their states
WARMUP = 5
# a final loss is the mean over this many batches: one alone is noisy
LAST = 10


class Block(nn.Module):
    """Attention to earlier characters, then a multilayer perceptron, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # no bias: that of the keys has no effect, so Adam would walk it at random, by rounding errors
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A causal transformer over characters."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, text: Tensor) -> Tensor:
        """The loss of predicting each character from those before it."""
        x = self.characters(text[:, :-1]) + self.places.weight
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), text[:, 1:].flatten())


@dataclass
class Run:
    """A model in training, with what was measured at each step."""

    model: Model
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def train(self, batch: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.model(batch)
        loss.backward()
        _wait(batch.device)
        begin = time.perf_counter()
        self.optimizer.step()
        _wait(batch.device)
        self.seconds.append(time.perf_counter() - begin)
        self.losses.append(loss.item())

    @property
    def final_loss(self) -> float:
        return statistics.fmean(self.losses[-LAST:])

    @property
    def step_ms(self) -> float:
        return 1e3 * statistics.median(self.seconds[WARMUP:])


class Pair(NamedTuple):
    """Ours and torch's, from the same weights on the same batches."""

    name: str
    ours: Run
    torch: Run


def demo(
    steps: Annotated[int, typer.Option(min=2 * WARMUP, help="Training steps of each model.")] = 300,
    output: Annotated[Path, typer.Option(dir_okay=False, help="PNG with the loss curves.")] = Path("demo.png"),
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; unset: a GPU if there is one.")] = None,
) -> None:
    """Train a small language model with our optimizers and with torch's, side by side."""
    target = _device(device)
    # a folder that cannot be made fails here, not after the training
    output.parent.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    place = "cpu (one thread)" if target.type == "cpu" else target
    header = f"device {place}, torch {torch.__version__}, fusedstep {fusedstep.__version__}"
    console.print(header)
    torch.manual_seed(seed)
    text, characters = sonnets()
    model, batches = Model(characters).to(target), random_batches(text, steps).to(target)
    pairs = [Pair(name, _run(model, fusedstep, name), _run(model, torch.optim, name)) for name in OPTIMIZERS]
    with _one_thread(), Progress(console=console) as progress:
        bar = progress.add_task("", total=len(pairs) * steps)
        for pair in pairs:
            progress.update(bar, description=f"training with {pair.name}")
            for batch in batches:
                pair.ours.train(batch)
                pair.torch.train(batch)
                progress.advance(bar)
    console.print(_table(pairs))
    console.print(f"loss: mean of the last {LAST} batches; step: median; |Δp|: largest difference")
    console.print("between parameters of the two models: rounding, grown over the training")
    _draw(pairs, header).savefig(output, format="png")
    console.print(f"loss curves: {output.resolve()}", soft_wrap=True)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        # a device can have a valid name and not be there, or hold no numbers ("meta")
        torch.zeros(1, device=name).item()
    except Exception as error:
        # the rest can be a list of every backend there is
        reason = str(error).partition("\n")[0].partition(". ")[0]
        message = f"cannot train on {name!r}: {reason}. Leave it out to train on {_device(None)}"
        raise typer.BadParameter(message, param_hint="--device") from error
    return torch.device(name)


def sonnets() -> tuple[Tensor, int]:
    """The sonnets as numbers, and how many different characters they have."""
    text = resources.files(__package__).joinpath("sonnets.txt").read_text("utf-8")
    alphabet = sorted(set(text))
    return torch.tensor([alphabet.index(c) for c in text]), len(alphabet)


def random_batches(text: Tensor, steps: int) -> Tensor:
    """A batch for every step, drawn by torch's generator."""
    starts = torch.randint(len(text) - CONTEXT, (steps, BATCH, 1))
    return text[starts + torch.arange(CONTEXT + 1)]


def _run(model: Model, library: ModuleType, name: str) -> Run:
    model = copy.deepcopy(model)
    return Run(model, getattr(library, name)(model.parameters(), **OPTIMIZERS[name]))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    # so small a model gains little from a second (9 ms a batch, not 13), and on a busy machine is ten
    # times slower with it, because threads wait for each other
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _table(pairs: list[Pair]) -> Table:
    table = Table("")
    for heading in ("our loss", "torch loss", "|Δp|", "our step", "torch step", "speed-up"):
        table.add_column(heading, justify="right")
    for name, ours, theirs in pairs:
        parameters = zip(ours.model.parameters(), theirs.model.parameters(), strict=True)
        difference = max((a - b).abs().max().item() for a, b in parameters)
        losses = (f"{ours.final_loss:.4f}", f"{theirs.final_loss:.4f}", f"{difference:.2g}")
        times = (f"{ours.step_ms:.3f} ms", f"{theirs.step_ms:.3f} ms", f"{theirs.step_ms / ours.step_ms:.1f}x")
        table.add_row(name, *losses, *times)
    return table


def _draw(pairs: list[Pair], header: str) -> Figure:
    figure = Figure(figsize=(4 * len(pairs), 4), dpi=150, layout="constrained")
    figure.suptitle(f"Learning Shakespeare's sonnets: {header}", fontsize=10, color="gray")
    panels = figure.subplots(1, len(pairs), sharey=True, squeeze=False)[0]
    for axes, (name, ours, theirs) in zip(panels, pairs, strict=True):
        # they coincide: torch's wide and pale, ours thin and dark on top of it
        label = f"torch.optim.{name}, {theirs.step_ms:.2f} ms a step"
        axes.plot(theirs.losses, color="#ffb680", linewidth=5, label=label)
        label = f"fusedstep.{name}, {ours.step_ms:.2f} ms a step"
        axes.plot(ours.losses, color="#14213d", linewidth=1.2, linestyle="--", label=label)
        axes.set(title=name, xlabel="step")
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("loss (nats per character)")
    return figure
