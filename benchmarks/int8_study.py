"""How states are kept in 8 bits, masters split and roundings drawn: the measurements behind the choice.

    python benchmarks/int8_study.py

Trains a small language model on the sources of Python's standard library, in two processes, for three minutes.
Everything is emulated with torch and numpy: no kernel of the library runs. `encode`, `decode`, `split`, `join`,
`philox`, `word`, `to_bf16` and `to_fp16` are the specification: engines must give the same bits.
"""

import math
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

BLOCK = 64
B1, B2, EPS, LR, STEPS, SEEDS = 0.9, 0.999, 1e-8, 3e-3, 300, 3
VOCABULARY, WIDTH, LENGTH, BATCH = 1024, 128, 32, 8
INF, NAN = 0x7F800000, 0x7FC00000
Store = Callable[[Tensor], Tensor]
Words = NDArray[np.uint32]
u32 = np.uint32


# -- the choice: states ---
def encode(x: Tensor, signed: bool, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales of blocks. `draws`: 12 random bits an element; else they are a hash of the value."""
    n, floor = (127, 2.0**-112) if signed else (255, 2.0**-94)
    x = x.reshape(-1, BLOCK)
    bits = x.view(torch.int32) & 0x7FFFFFFF
    largest = bits.amax(1, keepdim=True)  # of integers: exact, in any order, and NaN is above all
    scale = torch.where(largest < INF, largest, NAN).view(torch.float32).maximum(torch.tensor(floor))
    part = bits.view(torch.float32) * (torch.tensor(float(n**2 if signed else n**4)) / scale)
    level = part.sqrt() if signed else part.sqrt().sqrt()
    fixed = (level + 2048.0).view(torch.int32) - 0x45000000  # 12 bits after the point
    draws = (bits * (0x9E3779B1 - 2**32)) >> 20 & 0xFFF if draws is None else draws
    code = (fixed + draws.minimum(fixed)) >> 12 if signed else ((fixed + draws) >> 12).maximum((bits > 0).int())
    code = torch.where(largest < INF, code, 0)
    return (torch.where(x < 0, -code, code).to(torch.int8) if signed else code.to(torch.uint8)), scale


def decode(code: Tensor, scale: Tensor, signed: bool) -> Tensor:
    c = code.int()
    part = (c * c.abs()).float() * torch.tensor(1 / (127**2 if signed else 255**2))
    return ((part if signed else part * part) * scale).flatten()


def chosen(x: Tensor, signed: bool) -> Tensor:
    return decode(*encode(x, signed), signed)


# -- the choice: masters ---
def split(master: Words, rest_bits: int = 16) -> tuple[Words, NDArray[np.int32]]:
    """Bits of the parameter, and the rest, of bits of float32."""
    x = np.where(master & u32(0x7FFFFFFF) > INF, u32(NAN), master)
    drop = u32(16 - rest_bits)
    if drop:
        x = x + u32(0x7F) + (x >> u32(8) & u32(1)) >> drop
    p = (x + (u32(1) << u32(rest_bits - 1))) >> u32(rest_bits)
    return p, (x - (p << u32(rest_bits))).view(np.int32)


def join(p: Words, rest: NDArray[np.int32], rest_bits: int = 16) -> Words:
    """Whatever was written to the parameter meanwhile: a zero takes no negative rest, for that would be NaN."""
    rest = np.where(p & u32(0x7FFF) == 0, np.maximum(rest, 0), rest)
    return (p << u32(16)) + (rest.view(u32) << u32(16 - rest_bits))


# -- the choice: random bits ---
def philox(counter: list[Words], key: tuple[int, int], rounds: int = 7) -> list[Words]:
    a, b, c, d = counter
    for i in range(rounds):
        k0, k1 = u32(key[0] + i * 0x9E3779B9 & 0xFFFFFFFF), u32(key[1] + i * 0xBB67AE85 & 0xFFFFFFFF)
        x, y = a.astype(np.uint64) * np.uint64(0xD2511F53), c.astype(np.uint64) * np.uint64(0xCD9E8D57)
        a, b = (y >> np.uint64(32)).astype(u32) ^ b ^ k0, y.astype(u32)
        c, d = (x >> np.uint64(32)).astype(u32) ^ d ^ k1, x.astype(u32)
    return [a, b, c, d]


def word(seed: int, position: int, slot: int, step: int, index: NDArray[np.uint64]) -> Words:
    """32 random bits of every element; `index` counts in the whole tensor, row by row, below 2**50."""
    group = index >> np.uint64(2)
    high = (group >> np.uint64(32)).astype(u32) | u32(slot << 16)
    counter = [group.astype(u32), high, np.full_like(high, step), np.full_like(high, position)]
    lanes = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return np.choose((index & np.uint64(3)).astype(np.int64), lanes)


def to_bf16(x: Words, draw: Words) -> Words:
    magnitude = x & u32(0x7FFFFFFF)
    drawn = np.where(magnitude < INF, x + (draw >> u32(16)), x) >> u32(16)
    return np.where(magnitude > INF, u32(NAN >> 16), drawn)


def to_fp16(x: Words, draw: Words) -> NDArray[np.float16]:
    magnitude = x & u32(0x7FFFFFFF)
    normal = np.where(magnitude < INF, magnitude + (draw >> u32(19)) & u32(0xFFFFE000), magnitude).view(
        np.float32
    )
    normal = np.where(normal >= np.float32(65536), np.float32(np.inf), normal)
    fixed = np.minimum(magnitude, u32(0x38800000)).view(np.float32) * np.float32(2**24)
    whole = np.floor(fixed)
    whole = whole + ((draw >> u32(8)).astype(np.float32) * np.float32(2**-24) < fixed - whole)
    small = whole * np.float32(2**-24)
    value = np.where(magnitude < 0x38800000, small, np.where(magnitude > INF, np.float32(np.nan), normal))
    return np.copysign(value, x.view(np.float32)).astype(np.float16)


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


class Setting(NamedTuple):
    """How states and masters are kept, and what the model sees of a master."""

    name: str
    m: Store = torch.clone
    v: Store = torch.clone
    master: Store = torch.clone
    seen: Store = torch.clone
    sgd: bool = False
    ulp: bool = False  # starts one unit in the last place away
    stress: bool = False  # zero gradients, one 1e4 times as large, a step of ten times the rate


class Run(NamedTuple):
    loss: float
    finite: bool
    moments: list[tuple[int, Sequence[Tensor], Sequence[Tensor]]]  # m and v of every matrix, at three steps
    gradients: Tensor  # of 2048 elements of every matrix, at every step


def train(setting: Setting, seed: int, record: bool = False) -> Run:
    """All parameters lie in one buffer, matrices first: only these are kept in other ways."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, words, draws = Model(), corpus(), torch.Generator().manual_seed(seed)
    parameters = sorted(model.parameters(), key=lambda p: p.numel() < 4096)
    sizes = [p.numel() for p in parameters]
    matrices = [size for size in sizes if size >= 4096]
    large = sum(matrices)
    master = torch.cat([p.detach().flatten() for p in parameters])
    master = master.nextafter(torch.tensor(9.0)) if setting.ulp else master
    weights, gradient, m, v = master.clone(), *(torch.zeros_like(master) for _ in range(3))
    for p, value, slope in zip(parameters, weights.split(sizes), gradient.split(sizes), strict=True):
        p.data, p.grad = value.view(p.shape), slope.view(p.shape)
    losses, moments, gradients = [], [], []
    for step in range(1, STEPS + 1):
        start = torch.randint(len(words) - LENGTH - 1, (BATCH, 1), generator=draws)
        batch = words[start + torch.arange(LENGTH + 1)]
        gradient.zero_()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        rate = LR * min(1, step / 20) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))
        if setting.stress:
            gradient *= 0 if 60 <= step < 90 else 1e4 if step == 120 else 1
            rate *= 10 if step == 150 else 1
        if setting.sgd:
            master.sub_(m.mul_(B1).add_(gradient), alpha=20 * rate)
        else:
            m.mul_(B1).add_(gradient, alpha=1 - B1)
            v.mul_(B2).addcmul_(gradient, gradient, value=1 - B2)
            master.mul_(1 - 0.1 * rate).sub_(update(m, v, step), alpha=rate)
        if record:
            gradients.append(torch.cat([part[:2048] for part in gradient[:large].split(matrices)]))
            if step in (30, 100, STEPS):
                moments.append((step, m[:large].clone().split(matrices), v[:large].clone().split(matrices)))
        m[:large], v[:large] = setting.m(m[:large]), setting.v(v[:large])
        master = torch.cat([setting.master(master[:large]), master[large:]])
        weights.copy_(torch.cat([setting.seen(master[:large]), master[large:]]))
    return Run(sum(losses[-50:]) / 50, bool(master.isfinite().all()), moments, torch.stack(gradients or [m]))


def update(m: Tensor, v: Tensor, step: int) -> Tensor:
    return m / (1 - B1**step) / ((v / (1 - B2**step)).sqrt() + EPS)


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


# -- what is measured ---
def bits_of(kept: Callable[[Words], Words]) -> Store:
    return lambda x: torch.from_numpy(kept(x.numpy().view(u32)).view(np.float32))


nearest = {dtype: lambda x, dtype=dtype: x.to(dtype).float() for dtype in (torch.bfloat16, torch.float16)}
M, V = partial(chosen, signed=True), partial(chosen, signed=False)
ROOTS = (
    partial(stored, code="square root", block=64, n=127),
    partial(stored, code="square root", block=64, n=255, floor=True),
)
FLASH = [
    partial(stored, code=c, block=32, n=n, scale=torch.float16)
    for c, n in (("softsign", 127), ("square root", 255))
]
SPLITS = {b: bits_of(lambda x, b=b: join(*split(x, b), b)) for b in (8, 16)}
SEEN = bits_of(lambda x: split(x)[0] << u32(16))
SETTINGS = [
    Setting("fp32"),
    Setting("fp32, one ulp apart", ulp=True),
    Setting("bf16 states", nearest[torch.bfloat16], nearest[torch.bfloat16]),
    Setting("int8 chosen", M, V),
    Setting("int8 nearest: square roots", *ROOTS),
    Setting("int8 nearest: FlashOptim's", *FLASH),
    Setting("int8 chosen, split8", M, V, SPLITS[8], SEEN),
    Setting("bf16 parameters, no master", master=nearest[torch.bfloat16]),
    Setting("SGD fp32", sgd=True),
    Setting("SGD int8", M, sgd=True),
    Setting("stress fp32", stress=True),
    Setting("stress int8 chosen, split8", M, V, SPLITS[8], SEEN, stress=True),
]


def show(title: str, header: str, rows: list[tuple[str, list[str]]]) -> None:
    print(f"\n## {title}\n\n| {header} |\n|{'---|' * (header.count('|') + 1)}")
    print("\n".join(f"| {name} | {' | '.join(cells)} |" for name, cells in rows), flush=True)


def codes(run: Run, n: int) -> list[tuple[str, list[str]]]:
    """Errors of updates, mean and worst of matrices; of v also how many times too large one gets."""
    rows = []
    for code, block in ((code, block) for code in CODES for block in (32, 64, 128, 256)):
        kept, errors, ratios = partial(stored, code=code, block=block, n=n), [], []
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


def job(task: tuple[int, int]) -> Run:
    return train(SETTINGS[task[0]], task[1])


def main() -> None:
    tasks = [(i, s) for i, setting in enumerate(SETTINGS) for s in range(1 if setting.stress else SEEDS)]
    corpus()
    with get_context("spawn").Pool(2) as pool:
        results = pool.map_async(job, tasks, 1)
        run = train(SETTINGS[0], 0, True)
        show("A. m", "code | block | error of m | of the update | worst matrix", codes(run, 127))
        header = "code | block | error of the update | worst matrix | largest ratio to true, no floor | floor"
        show("B. v", f"{header} | with an outlier, no floor | floor | median beside it", codes(run, 255))
        header = "states | update's error, real gradients | sqrt(v) to true, 1 - 99 % | error, made gradients"
        show("Tracking", f"{header} | sqrt(v) | largest update where gradients ended", tracked(run.gradients))
        exact()
        runs = dict(zip(tasks, results.get(), strict=True))
    rows = []
    for i, setting in enumerate(SETTINGS):
        losses = [runs[i, s].loss for s in range(SEEDS) if (i, s) in runs]
        base = [runs[{"SGD": 8, "str": 10}.get(setting.name[:3], 0), s].loss for s in range(len(losses))]
        change = [f"{a / b - 1:+.2%}" for a, b in zip(losses, base, strict=True)]
        finite = all(runs[i, s].finite for s in range(len(losses)))
        rows.append(
            (
                setting.name,
                [
                    f"{np.mean(losses):.4f}",
                    f"{np.mean(losses) / np.mean(base) - 1:+.2%}",
                    ", ".join(change),
                    str(finite),
                ],
            )
        )
    show(f"C. Training, {STEPS} steps", "setting | mean loss | to fp32 | by seed | finite", rows)


def exact() -> None:
    random = np.random.default_rng(0)
    scales = torch.from_numpy(random.integers(0x11000000, INF, (4096, 1)).astype(np.int32)).view(torch.float32)
    for signed, n in ((True, 127), (False, 255)):
        same = 0
        for first in range(0, n, 63):
            code = F.pad((torch.arange(63) + first).clamp_max(n), (0, 1), value=n).expand(4096, 64)
            code = -code if signed and first else code
            again, scale = encode(decode(code, scales, signed), signed)
            same += torch.equal(again.int(), code.int()) and torch.equal(scale, scales)
        name = "m" if signed else "v"
        print(f"\nD. {name}: {same} of {-(-n // 63)} sets of codes, with 4,096 scales, encode as they were")
    tops = (0, 0x80, 0x3F80, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF)
    edges = np.concatenate([(top << 16) + np.arange(-70000, 70000) for top in tops])
    patterns = np.concatenate([edges, edges + 2**31, random.integers(0, 2**32, 2**24)]) % 2**32
    patterns = patterns.astype(u32)
    finite = patterns & u32(0x7FFFFFFF) < INF
    for b in (16, 8):
        p, rest = split(patterns, b)
        back, value = join(p, rest, b), (p << u32(16)).view(np.float32)
        assert (rest.min(), rest.max()) == (-(2 ** (b - 1)), 2 ** (b - 1) - 1)
        assert np.abs(back.astype(np.int64) - patterns)[finite].max() == (0 if b == 16 else 128)
        assert np.array_equal(np.isnan(value), np.isnan(patterns.view(np.float32)))
        assert np.array_equal(np.isnan(back.view(np.float32)), np.isnan(value))
        again = split(back, b)
        kept = np.array_equal(again[0], p) and np.array_equal(again[1], rest)
        lost = [(np.isinf(y) & finite).sum() for y in (value, back.view(np.float32))]
        same = (back == patterns)[finite].mean()
        print(f"E. rest of {b} bits: {same:.2%} of {finite.sum()} finite join as they were, again: {kept};")
        print(f"   finite with infinite parameter {lost[0]}, with infinite master {lost[1]}")
    index = np.arange(10**6, dtype=np.uint64)
    for x in (0.1, -1.003, 3e-5, 3.1e-6, 65503.9):
        bits = np.full(10**6, np.float32(x)).view(u32)
        draws = word(7, 3, 1, 100, index)
        drawn = (to_bf16(bits, draws) << u32(16)).view(np.float32), to_fp16(bits, draws)
        z = [(y.mean(dtype=float) - np.float32(x)) / y.std(dtype=float) * 1e3 for y in drawn]
        print(f"F. {x}: mean of 10^6 draws is off by {z[0]:+.2f} (bf16), {z[1]:+.2f} (fp16) standard errors")


if __name__ == "__main__":
    main()
