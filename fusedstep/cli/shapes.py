"""The parameter shapes of models people train, for benchmarks."""

from __future__ import annotations

import random
from collections.abc import Iterator

Shapes = list[tuple[int, ...]]


def bert(layers: int, width: int) -> Shapes:
    block = [(width, width), (width,)] * 4 + [(width,)] * 2
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,), (width,), (width,)]
    return [(30522, width), (512, width), (2, width), (width,), (width,), *block * layers]


def llama(layers: int, width: int, inner: int, keys: int) -> Shapes:
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    block = [*attention, (inner, width), (inner, width), (width, inner), (width,), (width,)]
    return [(128256, width), *block * layers, (width,)]


def llama_8b() -> Shapes:
    # with an output layer of its own; the smaller model uses its embedding instead
    return [*llama(32, 4096, 14336, 1024), (128256, 4096)]


def first_part(shapes: Shapes, ranks: int) -> Shapes:
    """What the first of these ranks holds if each tensor is cut along its first dimension."""
    return [(-(-rows // ranks), *rest) for rows, *rest in shapes]


def vit_l() -> Shapes:
    width = 1024
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    ends: Shapes = [(1, 1, width), (1, 197, width), (width, 3, 16, 16), (width,)]
    return [*ends, *block * 24, (width,), (width,), (1000, width), (1000,)]


def resnet50() -> Shapes:
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(blocks):
            convolutions = [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            convolutions += [(4 * width, channels, 1, 1)] if i == 0 else []
            for convolution in convolutions:
                shapes += [convolution, convolution[:1], convolution[:1]]
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


_LAYERS, _EXPERTS, _CHOSEN = 8, 16, 4


def moe() -> Shapes:
    """Eight layers of sixteen experts, four of which have gradients in a step."""
    width, inner = 512, 1024
    always = [(width, width)] * 4 + [(width,)] * 2 + [(_EXPERTS, width)]
    expert = [(inner, width), (inner, width), (width, inner)]
    return [*(always + expert * _EXPERTS) * _LAYERS, (32000, width)]


def with_gradients(model: str) -> Iterator[list[bool]] | None:
    """Which tensors have a gradient, step after step; None if all have one at every step."""
    return _chosen_experts() if model == "moe" else None


def _chosen_experts() -> Iterator[list[bool]]:
    chance, always = random.Random(0), [True] * 7
    while True:
        has: list[bool] = []
        for _ in range(_LAYERS):
            chosen = chance.sample(range(_EXPERTS), _CHOSEN)
            has += always + [expert in chosen for expert in range(_EXPERTS) for _ in range(3)]
        yield [*has, True]


MODELS: dict[str, Shapes] = {
    "bert-base": bert(12, 768),
    "bert-large": bert(24, 1024),
    "llama-1b": llama(16, 2048, 8192, 512),
    # the part of one rank when FSDP2 cuts the model for eight
    "llama-8b/8": first_part(llama_8b(), 8),
    "resnet-50": resnet50(),
    "vit-l": vit_l(),
    "moe": moe(),
    "400 tiny": [(64,)] * 400,
    "400 x 1024": [(1024,)] * 400,
    "1000 x 64": [(64,)] * 1000,
    "465 groups": [(4096,)] * 465,
}
