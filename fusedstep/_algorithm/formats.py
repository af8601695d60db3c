"""How a slot is stored: a format names the tensors (planes) it consists of, and how to read and write them.

`load` and `store` are written in the language of rules and traced with them, so engines know planes, not
formats. Rules know neither. Why these formats and no others: benchmarks/INT8_STUDY.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from .bits import (
    bits,
    block_largest,
    both,
    byte,
    from_bits,
    number,
    number_bits,
    rounded,
    shifted_left,
    shifted_right,
    signed,
    whole,
    with_sign,
)
from .language import abs, maximum, minimum, where

# elements of an 8-bit state that share a scale
BLOCK = 64

_MAGNITUDE, _INFINITY, _NAN, _ONE = 0x7FFFFFFF, 0x7F800000, 0x7FC00000, 0x3F800000
_HALF = 0x3F000000
# an exponent that reads as NaN, because 1 / scale would not be a normal number
_NO_SCALE = 254


class Plane(NamedTuple):
    """One tensor of a slot: its name in the state, its dtype, and how many elements share one number of it."""

    name: str
    dtype: torch.dtype
    block: int = 1
    # whether what is stored has been rounded to the dtype already
    is_exact: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it holds whole numbers."""
        return not self.dtype.is_floating_point


class Format(Protocol):
    """How a slot is stored."""

    @property
    def loses_bits(self) -> bool:
        """Whether what is read back is less precise than what was computed."""

    @property
    def draws(self) -> bool:
        """Whether `store` takes random bits."""

    @property
    def rounds_by_step(self) -> bool:
        """Whether the same number may be rounded differently at another step."""

    def planes(self, name: str) -> tuple[Plane, ...]:
        """The planes of the slot of this name; the first plane of a parameter is the parameter itself."""

    def load(self, *planes: Any) -> Any:
        """The number that is stored."""

    def store(self, x: Any, draw: Any, turn: Any) -> tuple[Any, ...]:
        """What each plane stores of a number; `turn` differs at every step."""


class Plain(NamedTuple):
    """One tensor of the parameter's shape; a complex number is stored as two of this dtype."""

    dtype: torch.dtype
    draws: bool = False

    @property
    def loses_bits(self) -> bool:
        return self.dtype.itemsize < 4

    @property
    def rounds_by_step(self) -> bool:
        return self.draws

    def planes(self, name: str) -> tuple[Plane, ...]:
        return (Plane(name, self.dtype, is_exact=self.draws),)

    def load(self, x: Any) -> Any:
        return x

    def store(self, x: Any, draw: Any, turn: Any) -> tuple[Any, ...]:
        # rounded to the dtype here: engines round it again, to nearest, which changes nothing
        return (_DRAWN[self.dtype](x, draw) if self.draws else x,)


def _drawn_bfloat16(x, draw):
    # infinity stays what it is: its lower bits are 0
    return from_bits(both(number_bits(x) + shifted_right(draw, 16), signed(0xFFFF0000)))


def _drawn_float16(x, draw):
    b = both(bits(x), _MAGNITUDE)
    up = from_bits(shifted_left(shifted_right(b + shifted_right(draw, 19), 13), 13))
    up = where(up >= 65536.0, float("inf"), up)
    # below the smallest normal number all are multiples of 2**-24
    fixed = from_bits(b) * 2.0**24
    nearest = (fixed + 2.0**23) - 2.0**23
    whole = where(nearest > fixed, nearest - 1.0, nearest)
    whole = where(number(shifted_right(draw, 8)) * 2.0**-24 < fixed - whole, whole + 1.0, whole)
    size = where(b < 0x38800000, whole * 2.0**-24, up)
    return where(b < _INFINITY, where(x < 0, -size, size), x)


_DRAWN = {torch.bfloat16: _drawn_bfloat16, torch.float16: _drawn_float16}
# dtypes that can be rounded at random
DRAWN = (*_DRAWN,)


class Int8(NamedTuple):
    """Codes of 8 bits for fractions of a scale, which is the power of two above the largest number of a block.

    A code is about a square root, or a fourth root where no number is negative, so that small numbers keep some
    precision. The root is taken of a float's bits, which are nearly a logarithm: halving them gives a root that
    is linear between powers of two, cheap and the same everywhere. A hash of the number and the step, or random
    bits, choose between two codes: rounded to nearest, a number that changes by less than half a code at a step
    would never change. Where no number is negative, none is stored below 2**-32 of the scale: updates are
    divided by its root. A block with a number that is not below 8e37 reads as NaN.
    """

    is_signed: bool
    draws: bool = False

    @property
    def loses_bits(self) -> bool:
        return True

    @property
    def rounds_by_step(self) -> bool:
        return True

    @property
    def _root(self) -> tuple[int, int]:
        """How far bits are shifted to take a root, and what is then added so that 1 is 128 or 256 levels."""
        shift, doublings = (1, 7) if self.is_signed else (2, 8)
        return shift, (_ONE - (_ONE >> shift)) + (doublings << 23)

    def planes(self, name: str) -> tuple[Plane, ...]:
        codes = torch.int8 if self.is_signed else torch.uint8
        # a scale is stored as its exponent in a float
        return Plane(f"{name}_codes", codes), Plane(f"{name}_scales", torch.uint8, BLOCK)

    def load(self, code: Any, exponent: Any) -> Any:
        shift, levels = self._root
        scale = from_bits(where(exponent < _NO_SCALE, shifted_left(exponent, 23), _NAN))
        b = bits(number(code))
        part = shifted_left(b, shift) - signed(levels << shift)
        if not self.is_signed:
            # in a new state, codes and scales are 0
            return from_bits(part) * scale
        return from_bits(with_sign(maximum(part, 0), b)) * scale

    def store(self, x: Any, draw: Any, turn: Any) -> tuple[Any, ...]:
        shift, levels = self._root
        # so that the largest number becomes the last level at most
        exponent = shifted_right(block_largest(x) + (0x7FFFFF + 0x40000), 23)
        # so large that no code stands for a subnormal number, even after a few steps
        exponent = minimum(maximum(exponent, 20 if self.is_signed else 40), _NO_SCALE)
        part = bits(abs(x) * from_bits(shifted_left(254 - exponent, 23)))
        level = shifted_right(part, shift) + levels
        # `fixed` has 16 bits after the point, the last two are 0; its bits above the code are not stored
        magic, x_or_size = (768.0, with_sign(level, bits(x))) if self.is_signed else (512.0, level)
        fixed = shifted_left(bits(from_bits(x_or_size) + magic), 2)
        # a number below 2**16, from the upper bits of a hash, which are the random ones. It depends on the
        # step, or a number that stays the same would always be rounded to the same side
        up = draw if self.draws else bits(x) * signed(0x9E3779B1) + whole(turn)
        fixed = fixed + shifted_right(up, 16)
        if self.is_signed:
            # below half a code numbers become 0: rounded up, they would grow too much
            return byte(where(level < _HALF, 0, fixed), 2), exponent
        return byte(maximum(fixed, 0x10010000), 2), exponent


class Split(NamedTuple):
    """A float32 master in two parts: a bfloat16 parameter, and the rest that it was rounded by.

    The parameter is the master rounded half away from zero; together with a rest of 16 bits, it is
    exactly the master. For a rest of 8 bits the master is first rounded to 24 bits in the same way.
    """

    rest_bits: int

    @property
    def loses_bits(self) -> bool:
        return self.rest_bits < 16

    @property
    def draws(self) -> bool:
        return False

    @property
    def rounds_by_step(self) -> bool:
        return False

    def planes(self, name: str) -> tuple[Plane, ...]:
        rest = torch.int16 if self.rest_bits == 16 else torch.int8
        return Plane(name, torch.bfloat16, is_exact=True), Plane("master_rest", rest)

    def load(self, x: Any, rest: Any) -> Any:
        b = bits(x)
        rest = rest if self.rest_bits == 16 else shifted_left(rest, 8)
        # never below 0, even if a zero was written from outside
        size = maximum(both(b, _MAGNITUDE) + rest, 0)
        return from_bits(with_sign(size, b))

    def store(self, x: Any, draw: Any, turn: Any) -> tuple[Any, ...]:
        b = number_bits(x)
        b = b if self.rest_bits == 16 else b + 0x80
        top = both(b + 0x8000, signed(0xFFFF0000))
        # the plane stores the lowest bits, which are those of the difference
        return from_bits(top), b if self.rest_bits == 16 else byte(b, 1)


class Copied(NamedTuple):
    """A float32 master beside a parameter of 16 bits, which is the master rounded to nearest."""

    dtype: torch.dtype

    @property
    def loses_bits(self) -> bool:
        return False

    @property
    def draws(self) -> bool:
        return False

    @property
    def rounds_by_step(self) -> bool:
        return False

    def planes(self, name: str) -> tuple[Plane, ...]:
        return Plane(name, self.dtype), Plane("master", torch.float32)

    def load(self, x: Any, master: Any) -> Any:
        # a parameter that was written from outside replaces the master
        return where(rounded(master, str(self.dtype).removeprefix("torch.")) == x, master, x)

    def store(self, x: Any, draw: Any, turn: Any) -> tuple[Any, ...]:
        return x, x


def turn_of(step):
    """A multiple of 2**20 between -2**31 and 2**31, as if drawn at random at every step. Counting up would not
    do: after a number has changed, it would change again too soon.
    """
    # the golden ratio in 32 bits: products with steps are exact, whether or not a compiler fuses an addition
    part = _fraction(step * (0x9E3779B9 / 2**32))
    return _nearest(_fraction(part * part * 1e6) * 4094.0) * 2.0**20


def _fraction(a):
    return a - _nearest(a)


def _nearest(a):
    # scalars are float64
    return (a + 1.5 * 2.0**52) - 1.5 * 2.0**52


def compute_dtype(planes: tuple[Plane, ...]) -> torch.dtype:
    """The dtype that an update of these planes is computed in."""
    return torch.float64 if any(plane.dtype == torch.float64 for plane in planes) else torch.float32
