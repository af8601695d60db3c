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
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import fusedstep

# what is compared: a class that fusedstep and torch.optim both have, and the arguments both get
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.3, "momentum": 0.9, "nesterov": True},
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
    """Attention to the characters so far, then a layer of neurons, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
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


@dataclass
class Pair:
    """Ours and torch's, from the same weights on the same batches."""

    name: str
    ours: Run
    torch: Run

    @property
    def difference(self) -> float:
        both = zip(self.ours.model.parameters(), self.torch.model.parameters(), strict=True)
        return max((a - b).abs().max().item() for a, b in both)


def demo(
    steps: Annotated[int, typer.Option(min=2 * WARMUP, help="Training steps of each model.")] = 300,
    output: Annotated[Path, typer.Option(dir_okay=False, help="The picture of the losses.")] = Path("demo.png"),
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="Such as cpu or cuda:1; default: a GPU if there is one.")
    ] = None,
) -> None:
    """Train a small language model with our optimizers and with torch's, side by side."""
    target = _device(device)
    _check_picture(output)
    console = Console(highlight=False)
    console.print(f"{_name(target)}, torch {torch.__version__}, fusedstep {fusedstep.__version__}")
    torch.manual_seed(seed)
    text, characters = _text()
    model = Model(characters).to(target)
    batches = _batches(text, steps).to(target)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _one_thread(), Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(OPTIMIZERS) * steps)
        pairs = []
        for name in OPTIMIZERS:
            progress.update(bar, description=f"training with {name}")
            pair = Pair(
                name, _start(model, getattr(fusedstep, name)), _start(model, getattr(torch.optim, name))
            )
            pairs.append(pair)
            for batch in batches:
                pair.ours.train(batch)
                pair.torch.train(batch)
                progress.advance(bar)
    console.print(_table(pairs))
    _draw(pairs).savefig(output)
    console.print(f"loss curves: {output.resolve()}", soft_wrap=True)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        # a device can have a valid name and not be there, or hold no numbers ("meta")
        torch.zeros(1, device=name).item()
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise typer.BadParameter(f"cannot train on {name!r}: {reason}", param_hint="--device") from error
    return torch.device(name)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return "cpu (1 thread)" if device.type == "cpu" else str(device)


def _check_picture(path: Path) -> None:
    # before the training, not after it
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        raise typer.BadParameter(f"{path} must end in one of .{', .'.join(kinds)}", param_hint="--output")
    path.parent.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    # so small a model gains little from a second (9 ms a batch, not 13) and is ten times slower with it
    # on a busy machine, where threads wait for each other
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _text() -> tuple[Tensor, int]:
    """The sonnets as numbers, and how many different characters they have."""
    text = resources.files(__package__).joinpath("sonnets.txt").read_text("utf-8")
    alphabet = sorted(set(text))
    return torch.tensor([alphabet.index(c) for c in text]), len(alphabet)


def _batches(text: Tensor, steps: int) -> Tensor:
    starts = torch.randint(len(text) - CONTEXT, (steps, BATCH, 1))
    return text[starts + torch.arange(CONTEXT + 1)]


def _start(model: Model, kind: type[torch.optim.Optimizer]) -> Run:
    model = copy.deepcopy(model)
    return Run(model, kind(model.parameters(), **OPTIMIZERS[kind.__name__]))


def _table(pairs: list[Pair]) -> Table:
    table = Table(
        caption=f"losses: mean of the last {LAST} batches; |Δp|: largest difference between the two models'\n"
        "parameters, rounding grown over the training; steps: median",
        caption_justify="left",
    )
    table.add_column("optimizer")
    for heading in ("our loss", "torch loss", "|Δp|", "our step", "torch step", "speed-up"):
        table.add_column(heading, justify="right")
    for pair in pairs:
        ours, theirs = pair.ours, pair.torch
        losses = (f"{ours.final_loss:.4f}", f"{theirs.final_loss:.4f}", f"{pair.difference:.1e}")
        times = (f"{ours.step_ms:.3f} ms", f"{theirs.step_ms:.3f} ms", f"{theirs.step_ms / ours.step_ms:.1f}x")
        table.add_row(pair.name, *losses, *times)
    return table


def _draw(pairs: list[Pair]) -> Figure:
    figure = Figure(figsize=(4 * len(pairs), 3.8), dpi=150, layout="constrained")
    for axes, pair in zip(figure.subplots(1, len(pairs), sharey=True, squeeze=False)[0], pairs, strict=True):
        # they coincide: torch's wide and pale, ours thin and dark on top of it
        theirs = f"torch.optim.{pair.name}, {pair.torch.step_ms:.2f} ms a step"
        ours = f"fusedstep.{pair.name}, {pair.ours.step_ms:.2f} ms a step"
        axes.plot(pair.torch.losses, color="#ffb680", linewidth=5, label=theirs)
        axes.plot(pair.ours.losses, color="#14213d", linewidth=1.2, linestyle="--", label=ours)
        axes.set(title=pair.name, xlabel="step")
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("loss (nats per character)")
    return figure
