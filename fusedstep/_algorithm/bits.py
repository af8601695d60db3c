"""Words for how numbers are stored: whole numbers of 32 bits that wrap around, and blocks of elements.

Rules do not need them; formats (formats.py) are written with them and the words of language.py, and traced in
the same way. `+`, `-`, `*`, comparisons, `where`, `maximum`, `minimum` and `abs` take whole numbers, too. A
constant has the kind of the operand beside it.
"""

from __future__ import annotations

import functools
from typing import Any

from .code import Code, linear
from .value import Value, operation


def bits(a):
    """The bits of a number, rounded to float32."""
    return operation("bits", a)


def number_bits(a):
    """`bits`, but any NaN gives bits that can be added to without overflow."""
    return operation("number_bits", a)


def from_bits(a):
    """The float32 that has these bits."""
    return operation("from_bits", a)


def number(a):
    """A whole number as a float; exact below 2**24."""
    return operation("number", a)


def whole(a):
    """A float without a fraction, in the range of 32 bits, as a whole number."""
    value = operation("whole", a)
    # even if `a` is the same for all elements: the table of scalars has no whole numbers
    value.per_element = True
    return value


def shifted_left(a, by: int):
    return operation("shift_left", a, by)


def shifted_right(a, by: int):
    """Zeros come in from above."""
    return operation("shift_right", a, by)


def both(a, b):
    """The bits that are set in both."""
    return operation("and", a, b)


def xor(a, b):
    """The bits that are set in one of them, but not in the other."""
    return operation("xor", a, b)


def with_sign(a, b):
    """A whole number that is not negative, with the upper bit of another."""
    return operation("with_sign", a, b)


def byte(a, which: int):
    """What a plane of 8 bits stores of a whole number: this byte, counted from the lowest."""
    return operation("byte", a, which)


def product_high(a, b):
    """The upper 32 bits of the product of two unsigned whole numbers."""
    return operation("product_high", a, b)


def rounded(a, dtype: str):
    """A number rounded to a narrower dtype, to nearest even."""
    return operation(f"round_{dtype}", a)


def block_largest(a):
    """The bits of the largest |a| of each block; NaN is above all. A single number for all elements of a block,
    which operations combine with a number of each.
    """
    return operation("block_largest", a)


def draw(slot: int):
    """32 random bits for each element of a slot. Those of two slots share bits, but not the upper 16."""
    value = Value("draw", slot)
    value.per_element = True
    return value


# what random bits are drawn from, in the order in which engines pass it: the table, the row and the element.
# `index` counts the elements of the whole tensor, row by row
DRAW_INPUTS = ("seed", "position", "step", "index_low", "index_high")
# slots that share a draw
DRAWN_TOGETHER = 4
_MULTIPLIER, _KEY_STEP = 0xD256D193, 0x9E3779B9
# the fewest rounds that pass BigCrush: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011
ROUNDS = 7


def signed(number: int) -> int:
    """The signed whole number of 32 bits that has the same bits."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >> 31 else number


def philox(counter: Any, key: Any) -> Any:
    """Philox2x32: two random words from the two words of a counter."""
    low, high = counter
    for i in range(ROUNDS):
        upper, lower = product_high(low, signed(_MULTIPLIER)), low * signed(_MULTIPLIER)
        low, high = xor(xor(upper, key + signed(i * _KEY_STEP)), high), lower
    return low, high


def drawn(fours, seed, position, step, index_low, index_high):
    """A word for each of four slots, after `fours` such groups; see `DRAW_INPUTS`.

    A tensor begins at a random place of one long stream, another one at every step, and its elements follow.
    """
    low, high = philox((step, position + (fours << 24)), seed)
    low, high = philox((low + index_low, high + index_high), 0)
    return low, _turned(low), high, _turned(high)


def short_seed(seed: int) -> int:
    """The 32 bits that are drawn from for a seed. Longer seeds are mixed: the two halves of one that somebody
    composed may be alike.
    """
    return seed if seed < 2**32 else (seed * 0x9E3779B97F4A7C15 & (2**64 - 1)) >> 32


def _turned(a):
    return xor(shifted_left(a, 16), shifted_right(a, 16))


@functools.cache
def draw_code(fours: int) -> Code:
    """`drawn` as instructions on its inputs, in their order."""
    inputs = [operation("input", i) for i in range(len(DRAW_INPUTS))]
    places = {value: i for i, value in enumerate(inputs)}

    def leaf(value: Value) -> Any:
        return ("input", places[value]) if value in places else None

    return linear(drawn(fours, *inputs), leaf, rank=lambda at: at[1])
