"""Formats of states and parameters once more, in NumPy, written from what fusedstep/_algorithm/formats.py says.

Independent of the library on purpose, as reference.py is: in float64 where the library shifts bits.
"""

import numpy as np
import torch

BLOCK = 64


def _blocks(x):
    """A matrix whose rows are blocks, with zeros beyond the last element."""
    flat = np.asarray(x, np.float32).reshape(-1)
    return np.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)


def _bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


def exponents(x, signed):
    """Of each block's scale, as a float has it: a power of two that the largest is at most 63/64 of."""
    largest = np.abs(_blocks(x)).max(1)
    with np.errstate(invalid="ignore"):
        mantissa, exponent = np.frexp(largest.astype(np.float64))
        found = exponent + 127 + (mantissa > 63 / 64)
        found = np.where(largest == 0, 1, found)
        found = np.clip(found, 20 if signed else 40, 254)
        return np.where(np.isfinite(largest), found, 254)


def levels(x, exponent, signed):
    """Where numbers lie between codes: 128 times a root, or 256 times a fourth root, of parts of the scale.

    Roots are straight lines between powers of two.
    """
    part = np.abs(_blocks(x)).astype(np.float64) * 2.0 ** (127 - exponent.astype(np.float64))[:, None]
    # no code stands for what is smaller
    part = np.maximum(part, 2.0**-126)
    mantissa, power = np.frexp(part)
    logarithm = (power - 1) + (2 * mantissa - 1)
    root = np.floor(logarithm / (2 if signed else 4) * 2**23) / 2**23
    whole = np.floor(root)
    return (128 if signed else 256) * 2.0**whole * (1 + root - whole)


def turn(step):
    """What a hash takes in of the step."""
    part = step * (0x9E3779B9 / 2**32)
    part -= np.round(part)
    part *= part * 1e6
    return int(np.round((part - np.round(part)) * 4094)) << 20


def encoded(x, signed, draws=None, step=None):
    """Codes and exponents of numbers; `draws`, if given, are random words, or a hash decides."""
    x = np.asarray(x, np.float32)
    exponent = exponents(x, signed)
    level = levels(x, exponent, signed).reshape(-1)[: x.size].reshape(x.shape)
    later = 0 if step is None else turn(step) % 2**32
    hashed = (_bits(x).astype(np.uint64) * 0x9E3779B1 + later) % 2**32
    words = hashed if draws is None else draws.astype(np.uint64)
    # of a code, in parts of 2**16
    up = (words >> np.uint64(16)).astype(np.float64)
    # in parts of 2**14; np.round takes halves to even, as a float does
    fixed = np.round(np.where(np.signbit(x) & signed, -level, level) * 2**14)
    code = np.floor((4 * fixed + up) / 2**16)
    code = np.where(level < 0.5, 0, code) if signed else np.maximum(code, 1)
    return code.astype(np.int64), exponent.astype(np.int64)


def decoded(code, exponent, signed):
    """The numbers that codes and exponents stand for, in float32."""
    code = np.asarray(code, np.float64)
    level = np.abs(code) / (128 if signed else 256)
    mantissa, power = np.frexp(np.where(level == 0, 1, level))
    root = ((power - 1) + (2 * mantissa - 1)) * (2 if signed else 4)
    whole = np.floor(root)
    part = np.where(level == 0, 0, 2.0**whole * (1 + root - whole))
    exponent = np.repeat(np.asarray(exponent, np.float64).reshape(-1), BLOCK)[: code.size].reshape(code.shape)
    scale = np.where(exponent >= 254, np.nan, np.where(exponent == 0, 0, 2.0 ** (exponent - 127)))
    return (np.sign(code) * part * scale).astype(np.float32)


def split(master):
    """A bfloat16 that a float32 master rounds to, half away from zero."""
    b = master.contiguous().view(torch.int32)
    return ((b + 0x8000) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def joined(p, rest):
    """The master of a bfloat16 parameter and its rest, which adds to the bits of its size."""
    b = p.detach().float().contiguous().view(torch.int32)
    rest = rest.int() << (16 - 8 * rest.dtype.itemsize)
    size = ((b & 0x7FFFFFFF) + rest).clamp(min=0)
    return (size | (b & ~0x7FFFFFFF)).view(torch.float32)


def philox(counter, key, rounds=7):
    """Philox2x32 of Salmon et al. 2011: two words of a counter, arrays, and one of a key."""
    low, high = (np.asarray(word, np.uint64) & 0xFFFFFFFF for word in counter)
    for _ in range(rounds):
        product = low * np.uint64(0xD256D193)
        low, high = (product >> 32) ^ key ^ high, product & 0xFFFFFFFF
        key = (key + 0x9E3779B9) & 0xFFFFFFFF
    return low, high


def drawn(seed, position, slot, step, shape, first=0):
    """The random word of every element of a tensor, whose first is `first` in the whole one.

    An element has two words at a step, of which two slots each take the halves in another order.
    """
    index = np.arange(first, first + int(np.prod(shape)), dtype=np.uint64)
    start = philox(
        (step, position + (slot // 4 << 24)),
        seed if seed < 1 << 32 else seed * 0x9E3779B97F4A7C15 >> 32 & 0xFFFFFFFF,
    )
    word = philox((start[0] + index, start[1] + (index >> 32)), 0)[slot % 4 // 2]
    word = word >> 16 | word << 16 & 0xFFFFFFFF if slot % 2 else word
    return word.astype(np.uint32).reshape(shape)


def bfloat16_by(x, draws):
    """float32 numbers up or down to bfloat16, by random words: up with the probability of what is cut off."""
    b = _bits(x).astype(np.uint64) + (draws >> np.uint32(16))
    cut = (b & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return torch.from_numpy(cut.copy()).to(torch.bfloat16)
