"""The parameter shapes of models people train, for benchmarks."""

from __future__ import annotations

Shapes = list[tuple[int, ...]]


def bert(layers: int, width: int) -> Shapes:
    block = [(width, width), (width,)] * 4 + [(width,)] * 2
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,), (width,), (width,)]
    return [(30522, width), (512, width), (2, width), (width,), (width,), *block * layers]


def llama_1b() -> Shapes:
    width, inner, keys = 2048, 8192, 512
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    block = [*attention, (inner, width), (inner, width), (width, inner), (width,), (width,)]
    return [(128256, width), *block * 16, (width,)]


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


MODELS: dict[str, Shapes] = {
    "bert-base": bert(12, 768),
    "bert-large": bert(24, 1024),
    "llama-1b": llama_1b(),
    "resnet-50": resnet50(),
    "400 x 1024": [(1024,)] * 400,
    "1000 x 64": [(64,)] * 1000,
    "465 groups": [(4096,)] * 465,
}
