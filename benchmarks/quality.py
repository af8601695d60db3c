"""Does training notice how states and masters are stored? A small language model, every setting, five seeds.

    python benchmarks/quality.py run quality.json     # on a GPU: about two minutes; on a CPU much longer
    python benchmarks/quality.py draw quality.json docs/quality.png

Every setting of a seed starts from the same weights and sees the same batches of the sources of Python's
standard library, in bfloat16 autocast. Parameters are bfloat16, but for the settings called float32.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import sysconfig
from collections import Counter
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedstep

VOCABULARY, WIDTH, LAYERS, LENGTH, BATCH = 2048, 256, 4, 64, 32
STEPS, STRESS_STEPS, SEEDS, TAIL, PROCESSES = 1500, 5000, 5, 100, 12
# losses that are kept as one
MEAN_OF = 10
_ADAMW = {"lr": 2e-3, "betas": (0.9, 0.999), "weight_decay": 0.01}
_SGD = {"lr": 0.05, "momentum": 0.9}
_INT8 = {"state_dtype": "int8"}


class Setting(NamedTuple):
    """An optimizer, the dtype of parameters, and how everything is stored."""

    name: str
    options: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16
    optimizer: str = "AdamW"
    steps: int = STEPS
    # starts one unit in the last place away
    is_nudged: bool = False
    # zero gradients, one that is 1e4 times as large, one step of ten times the rate
    is_stressed: bool = False


SETTINGS = [
    Setting("float32", _ADAMW, torch.float32),
    Setting("float32, one ulp apart", _ADAMW, torch.float32, is_nudged=True),
    Setting("int8 + split8", {**_ADAMW, **_INT8, "master": "split8"}),
    Setting("int8 + split", {**_ADAMW, **_INT8, "master": "split"}),
    Setting("int8 + split, stochastic", {**_ADAMW, **_INT8, "master": "split", "rounding": "stochastic"}),
    Setting("bfloat16 states + split", {**_ADAMW, "state_dtype": "bfloat16", "master": "split"}),
    Setting(
        "bfloat16 states + split, stochastic",
        {**_ADAMW, "state_dtype": "bfloat16", "master": "split", "rounding": "stochastic"},
    ),
    Setting("float32 states + split", {**_ADAMW, "state_dtype": "float32", "master": "split"}),
    Setting("bfloat16, stochastic, no master", {**_ADAMW, "rounding": "stochastic"}),
    Setting("bfloat16, no master", _ADAMW),
    Setting("SGD float32", _SGD, torch.float32, "SGD"),
    Setting("SGD int8 + split8", {**_SGD, **_INT8, "master": "split8"}, optimizer="SGD"),
    Setting("stress: float32", _ADAMW, torch.float32, steps=STRESS_STEPS, is_stressed=True),
    Setting(
        "stress: int8 + split8",
        {**_ADAMW, **_INT8, "master": "split8"},
        steps=STRESS_STEPS,
        is_stressed=True,
    ),
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", 1e-5, True, True)
            for _ in range(LAYERS)
        ]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x, self.mask, is_causal=True)
        return self.head(F.layer_norm(x, (WIDTH,)))


@cache
def corpus() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    words = re.findall(r"\w+|\s+|[^\w\s]", "".join(file.read_text(errors="ignore") for file in files))
    known = {word: i for i, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1), 1)}
    return torch.tensor([known.get(word, 0) for word in words])


def losses_of(setting: Setting, seed: int, device: str) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(seed)
    model = Model()
    if setting.is_nudged:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.nextafter(p, torch.tensor(float("inf"))))
    model.to(device, setting.dtype)
    optimizer = getattr(fusedstep, setting.optimizer)(model.parameters(), **setting.options)
    data, batches = corpus().to(device), torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(data) - LENGTH - 1, (setting.steps, BATCH), generator=batches).to(device)
    reach, losses = torch.arange(LENGTH + 1, device=device), []
    rate = setting.options["lr"]
    for step in range(setting.steps):
        # a warm-up of a tenth, then down to a tenth
        share = step / setting.steps
        optimizer.param_groups[0]["lr"] = rate * min(1.0, 10 * share + 0.01) * (1 - 0.9 * share)
        tokens = data[starts[step][:, None] + reach]
        with torch.autocast(device, torch.bfloat16):
            scores = model(tokens[:, :-1])
        loss = F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if setting.is_stressed:
            _disturb(model, optimizer, step, rate)
        optimizer.step(zero_grad=True)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def _disturb(model: nn.Module, optimizer: Any, step: int, rate: float) -> None:
    factor = 0.0 if 500 <= step < 600 else 1e4 if step == 1000 else 1.0
    if factor != 1.0:
        for p in model.parameters():
            p.grad.mul_(factor)
    if step == 1500:
        optimizer.param_groups[0]["lr"] = 10 * rate


def _job(setting_and_seed: tuple[int, int]) -> tuple[str, int, list[float]]:
    place, seed = setting_and_seed
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    setting = SETTINGS[place]
    return setting.name, seed, losses_of(setting, seed, device)


def run(file: str, part: str = "") -> None:
    """Settings with this part in their names; what the file has of others stays."""
    chosen = [i for i, setting in enumerate(SETTINGS) if part in setting.name]
    jobs = [(i, s) for i in chosen for s in range(1 if SETTINGS[i].is_stressed else SEEDS)]
    # the longest first
    jobs.sort(key=lambda job: -SETTINGS[job[0]].steps)
    found: dict[str, dict[str, list[float]]] = {}
    if part and Path(file).exists():
        found = json.loads(Path(file).read_text())["losses"]
    with get_context("spawn").Pool(PROCESSES) as pool:
        for name, seed, losses in pool.imap_unordered(_job, jobs):
            means = [statistics.mean(losses[i : i + MEAN_OF]) for i in range(0, len(losses), MEAN_OF)]
            found.setdefault(name, {})[str(seed)] = [round(loss, 5) for loss in means]
            print(f"{name}, seed {seed}: {final({'': means})[0]:.4f}", flush=True)
            facts = {"device": _device(), "torch": torch.__version__, "mean_of_steps": MEAN_OF}
            Path(file).write_text(json.dumps({**facts, "losses": found}))


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def final(losses: dict[str, list[float]]) -> list[float]:
    return [statistics.mean(each[-TAIL // MEAN_OF :]) for _, each in sorted(losses.items())]


def table(found: dict[str, dict[str, list[float]]]) -> list[tuple[str, float, float, float]]:
    """Of every setting the mean final loss, its difference to float32 in percent, and the largest of a seed."""
    rows = []
    for name, losses in found.items():
        head = "SGD float32" if name.startswith("SGD") else "float32"
        head = "stress: float32" if name.startswith("stress") else head
        base, own = final(found[head]), final(losses)
        apart = [100 * (b / a - 1) for a, b in zip(base, own, strict=True)]
        difference = 100 * (statistics.mean(own) / statistics.mean(base) - 1)
        rows.append((name, statistics.mean(own), difference, max(map(abs, apart))))
    return rows


def _smooth(losses: dict[str, list[float]]) -> Tensor:
    return torch.tensor([each for _, each in sorted(losses.items())]).mean(0).unfold(0, 10, 1).mean(1)


def draw(source: str, target: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = json.loads(Path(source).read_text())["losses"]
    order = {setting.name: i for i, setting in enumerate(SETTINGS)}
    found = {name: found[name] for name in sorted(found, key=order.__getitem__)}
    for name, loss, difference, largest in table(found):
        print(f"| {name} | {loss:.4f} | {difference:+.2f} % | {largest:.2f} % |")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    shown = [name for name in found if not name.startswith(("SGD", "stress", "float32, one"))]
    smooth = {name: _smooth(found[name]) for name in shown}
    for name in shown[1:]:
        above = 100 * (smooth[name] / smooth["float32"] - 1)
        steps = range(50, 50 + MEAN_OF * len(above), MEAN_OF)
        dash = "--" if "no master" in name else "-"
        left.plot(steps, above, dash, label=name, linewidth=1.2)
    left.axhline(0, color="black", linewidth=0.8, label="float32")
    left.set(xlabel="step", ylabel="% above float32", title="training loss, mean of 5 seeds")
    left.legend(fontsize=8)
    rows = [row for row in table(found) if row[0] in shown[1:]]
    right.barh([row[0] for row in rows], [row[2] for row in rows], color="tab:blue")
    right.axvline(0, color="black", linewidth=0.8)
    right.invert_yaxis()
    right.set(xlabel="final loss, % above float32", title="difference of the means")
    figure.tight_layout()
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    {"run": run, "draw": draw}[sys.argv[1]](*sys.argv[2:])
