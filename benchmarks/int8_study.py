"""How states are kept in 8 bits: the measurements behind the choice.

    python benchmarks/int8_study.py

Trains a small language model on the sources of Python's standard library and stores its moments in many ways,
for about two minutes. What was chosen is the library's own; the others are emulated. Whether training notices
is measured by `quality.py`.
"""

import itertools
import math
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedstep
from fusedstep._algorithm.formats import Int8, turn_of
from fusedstep._engines.foreach.placed import decode, encode

BLOCKS = (32, 64, 128, 256)
B1, B2, EPS, LR, STEPS = 0.9, 0.999, 1e-8, 3e-3, 300
VOCABULARY, WIDTH, LENGTH, BATCH = 1024, 128, 32, 8
Store = Callable[[Tensor], Tensor]


# -- the choice ---
def chosen(x: Tensor, is_signed: bool, floor: bool = True) -> Tensor:
    """What the library reads back of what it has stored."""
    format = Int8(is_signed)
    shapes = {1: x.shape, 64: (-(-x.numel() // 64),)}
    planes = [torch.empty(shapes[plane.block], dtype=plane.dtype) for plane in format.planes("")]
    encode(format, x, planes, turn_of(float(next(_steps))))
    return decode(format, planes)


_steps = itertools.count(1)


# -- candidates: parts of a block's largest to levels 0 ... n and back ---
class Code(NamedTuple):
    encode: Callable[[Tensor, int], Tensor]
    decode: Callable[[Tensor, int], Tensor]


def power(k: float) -> Code:
    return Code(lambda y, n: (y ** (1 / k) * n).round(), lambda c, n: (c / n) ** k)


@cache
def dynamic(n: int) -> Tensor:
    """As bitsandbytes: seven powers of ten, the smaller the fewer bits after them."""
    edges = [torch.linspace(0.1, 1, 2 ** (i + (n > 127)) + 1) * 10.0 ** (i - 6) for i in range(7)]
    return F.pad(torch.cat([*((e[1:] + e[:-1]) / 2 for e in edges), torch.ones(1)])[-n:], (1, 0))


CODES = {
    "linear": power(1),
    "softsign": Code(lambda y, n: (2 * y / (1 + y) * n).round(), lambda c, n: (c / n) / (2 - c / n)),
    "square root": power(2),
    "cube root": power(3),
    "fourth root": power(4),
    "dynamic (bnb)": Code(
        lambda y, n: torch.bucketize(y, (dynamic(n)[1:] + dynamic(n)[:-1]) / 2).float(),
        lambda c, n: dynamic(n)[c.long()],
    ),
}


def stored(
    x: Tensor, code: str, block: int, n: int, floor: bool = False, scale: torch.dtype = torch.float32
) -> Tensor:
    """What is read back, rounded to nearest. With `floor`, only zero gets level 0."""
    magnitudes = F.pad(x.abs(), (0, -x.numel() % block)).view(-1, block)
    largest = magnitudes.amax(1, keepdim=True)
    largest = (largest.sqrt().to(scale).float() ** 2 if n > 127 else largest.to(scale).float()).clamp_min(1e-30)
    level = CODES[code].encode((magnitudes / largest).clamp_max(1), n)
    level = level.maximum((magnitudes > 0).float()) if floor else level
    return (CODES[code].decode(level, n) * largest).flatten()[: x.numel()] * x.sign()


def float8(x: Tensor, dtype: torch.dtype, dithered: bool) -> Tensor:
    """What is read back of floats of 8 bits with a scale of float32 for each block of 64."""
    magnitudes = F.pad(x.abs(), (0, -x.numel() % 64)).view(-1, 64)
    scale = (magnitudes.amax(1, keepdim=True) / torch.finfo(dtype).max).clamp_min(1e-38)
    y = magnitudes / scale
    if dithered:
        # up or down at random, by the bits that are cut off
        cut = 20 if dtype == torch.float8_e4m3fn else 21
        y = (y.view(torch.int32) + torch.randint(0, 1 << cut, y.shape).int() >> cut << cut).view(torch.float32)
    y = y.clamp_max(torch.finfo(dtype).max).to(dtype).float()
    return (y * scale).flatten()[: x.numel()] * x.sign()


def bits4(x: Tensor, root: int, is_signed: bool, dithered: bool) -> Tensor:
    """The same of codes of 4 bits, which are roots; with `is_signed` one bit is the sign."""
    magnitudes, n = F.pad(x.abs(), (0, -x.numel() % 64)).view(-1, 64), 7 if is_signed else 15
    largest = magnitudes.amax(1, keepdim=True).clamp_min(1e-38)
    level = (magnitudes / largest) ** (1 / root) * n
    level = (level + (torch.rand(level.shape) if dithered else 0.5)).floor()
    if not is_signed:
        level = level.maximum((magnitudes > 0).float())
    return ((level / n) ** root * largest).flatten()[: x.numel()] * x.sign()


# -- the model ---
class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = (nn.Embedding(n, WIDTH) for n in (VOCABULARY, LENGTH))
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0, "gelu", 1e-5, True, True) for _ in range(2)
        ]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, VOCABULARY)
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for embedding in self.words, self.places:
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) + self.places.weight
        for layer in self.layers:
            x = layer(x, self.mask, is_causal=True)
        return self.head(F.layer_norm(x, (WIDTH,)))


@cache
def corpus() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    words = re.findall(r"\w+|\s+|[^\w\s]", "".join(file.read_text(errors="ignore") for file in files))
    known = {word: i for i, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1), 1)}
    return torch.tensor([known.get(word, 0) for word in words])


class Run(NamedTuple):
    moments: list[tuple[int, Sequence[Tensor], Sequence[Tensor]]]  # m and v of every matrix, at three steps
    gradients: Tensor  # of 2048 elements of every matrix, at every step


def train() -> Run:
    torch.manual_seed(0)
    model, words, draws = Model(), corpus(), torch.Generator().manual_seed(0)
    matrices = [p for p in model.parameters() if p.numel() >= 4096]
    optimizer = fusedstep.AdamW(model.parameters(), lr=LR, betas=(B1, B2), eps=EPS, weight_decay=0.1)
    moments, gradients = [], []
    for step in range(1, STEPS + 1):
        start = torch.randint(len(words) - LENGTH - 1, (BATCH, 1), generator=draws)
        batch = words[start + torch.arange(LENGTH + 1)]
        F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        rate = LR * min(1, step / 20) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))
        optimizer.param_groups[0]["lr"] = rate
        gradients.append(torch.cat([p.grad.flatten()[:2048] for p in matrices]))
        optimizer.step(zero_grad=True)
        if step in (30, 100, STEPS):
            names = ("exp_avg", "exp_avg_sq")
            m, v = ([optimizer.state[p][name].flatten().clone() for p in matrices] for name in names)
            moments.append((step, m, v))
    return Run(moments, torch.stack(gradients))


def update(m: Tensor, v: Tensor, step: int) -> Tensor:
    return m / (1 - B1**step) / ((v / (1 - B2**step)).sqrt() + EPS)


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


# -- what is measured ---
nearest = {dtype: lambda x, dtype=dtype: x.to(dtype).float() for dtype in (torch.bfloat16, torch.float16)}
M, V = partial(chosen, is_signed=True), partial(chosen, is_signed=False)
ROOTS = (
    partial(stored, code="square root", block=64, n=127),
    partial(stored, code="square root", block=64, n=255, floor=True),
)
EIGHTS = (torch.float8_e4m3fn, torch.float8_e5m2)
FLASH = [
    partial(stored, code=c, block=32, n=n, scale=torch.float16)
    for c, n in (("softsign", 127), ("square root", 255))
]


def show(title: str, header: str, rows: list[tuple[str, list[str]]]) -> None:
    print(f"\n## {title}\n\n| {header} |\n|{'---|' * (header.count('|') + 1)}")
    print("\n".join(f"| {name} | {' | '.join(cells)} |" for name, cells in rows), flush=True)


def codes(run: Run, n: int) -> list[tuple[str, list[str]]]:
    """Errors of updates, mean and worst of matrices; of v also how many times too large one gets."""
    rows = []
    ways = [(code, block, partial(stored, code=code, block=block, n=n)) for code in CODES for block in BLOCKS]
    for code, block, kept in [*ways, ("chosen, dithered", 64, M if n == 127 else V)]:
        errors, ratios = [], []
        for step, m, v in ((step, *pair) for step, ms, vs in run.moments for pair in zip(ms, vs, strict=True)):
            true, outlier = update(m, v, step), v.clone()
            outlier[::256] = 1e8 * v.max()
            if n == 127:
                errors.append((rms(kept(m) - m) / rms(m), rms(update(kept(m), v, step) - true) / rms(true)))
                continue
            errors.append((0, rms(update(m, kept(v, floor=True), step) - true) / rms(true)))
            for w, floor in ((v, False), (v, True), (outlier, False), (outlier, True)):
                beside = torch.arange(len(m)) % 256 < block  # in a block with an outlier, in two of the four
                ratio = (update(m, kept(w, floor=floor), step) / update(m, w, step))[(m != 0) & beside]
                ratios.append((ratio.max().item(), ratio.median().item()))
        mean, worst = np.mean(errors, 0), np.max(errors, 0)
        cells = [str(block), *([f"{mean[0]:.2%}"] if n == 127 else []), f"{mean[1]:.2%}", f"{worst[1]:.2%}"]
        cells += [f"{max(r for r, _ in ratios[i::4]):.3g}" for i in range(4) if ratios]
        rows.append((code, cells + ([f"{np.mean([r for _, r in ratios[3::4]]):.3f}"] if ratios else [])))
    return rows


def replay(gradients: Tensor, kept_m: Store, kept_v: Store) -> tuple[Tensor, Tensor]:
    m, v = torch.zeros(2, gradients.shape[1])
    for g in gradients:
        m, v = kept_m(B1 * m + (1 - B1) * g), kept_v(B2 * v + (1 - B2) * g * g)
    return update(m, v, len(gradients)), v


def tracked(real: Tensor) -> list[tuple[str, list[str]]]:
    """Real gradients; then made ones, whose sizes change after 500 steps, an eighth of them to zero."""
    sizes = torch.randn(2, 1024, generator=torch.Generator().manual_seed(0)).mul(1.5).exp()
    sizes[1, ::8] = 0
    made = torch.randn(4000, 1024, generator=torch.Generator().manual_seed(1)) * sizes[0]
    made[500:] *= sizes[1] / sizes[0]
    near, fourth = (
        partial(stored, block=64, n=127, code="square root"),
        partial(stored, block=64, n=255, floor=True, code="fourth root"),
    )
    ways = {
        "fp32": (torch.clone, torch.clone), "bf16": (nearest[torch.bfloat16],) * 2, "FlashOptim's": FLASH,
        "square roots": ROOTS, "square, fourth root": (near, fourth),
        "the same, fp16 scale": [partial(way, scale=torch.float16) for way in (near, fourth)],
        "the same, bf16 scale": [partial(way, scale=torch.bfloat16) for way in (near, fourth)],
        "m nearest, v chosen": (near, V), "chosen": (M, V),
        "fp8: e4m3, e5m2, nearest": [partial(float8, dtype=t, dithered=False) for t in EIGHTS],
        "fp8: e4m3, e5m2, dithered": [partial(float8, dtype=t, dithered=True) for t in EIGHTS],
        "m chosen, v fp8 e5m2 dithered": (M, partial(float8, dtype=EIGHTS[1], dithered=True)),
        "4 bits, nearest": [partial(bits4, root=k, is_signed=k == 2, dithered=False) for k in (2, 4)],
        "4 bits, dithered": [partial(bits4, root=k, is_signed=k == 2, dithered=True) for k in (2, 4)],
        "m of 4 bits, dithered, v chosen": (partial(bits4, root=2, is_signed=True, dithered=True), V),
    }  # fmt: skip
    rows = []
    for name, way in ways.items():
        cells = []
        for gradients in real, made:
            (u, v), (true, w) = replay(gradients, *way), replay(gradients, torch.clone, torch.clone)
            live = gradients[-1000:].abs().amax(0) > 0
            ratio = (v / w).sqrt()[live & (w > 1e-20)]
            cells += [
                f"{rms((u - true)[live]) / rms(true[live]):.3f}",
                " - ".join(f"{ratio.quantile(q):.2f}" for q in (0.01, 0.99)),
            ]
        rows.append((name, [*cells, f"{u[~live].abs().max():.2g}"]))
    return rows


def main() -> None:
    run = train()
    show("A. m", "code | block | error of m | of the update | worst matrix", codes(run, 127))
    header = "code | block | error of the update | worst matrix | largest ratio to true, no floor | floor"
    show("B. v", f"{header} | with an outlier, no floor | floor | median beside it", codes(run, 255))
    header = "states | update's error, real gradients | sqrt(v) to true, 1 - 99 % | error, made gradients"
    show("Tracking", f"{header} | sqrt(v) | largest update where gradients ended", tracked(run.gradients))


if __name__ == "__main__":
    main()
