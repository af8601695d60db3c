"""What the instructions of PTX do, for all threads at once: those that our kernels are compiled to.

An operation takes the machine, what follows its name (`rn`, `f32`) and its operands; see ptx.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

BITS = {size: np.dtype(f"uint{8 * size}") for size in (1, 2, 4, 8)}
TYPES = {
    **{f"{kind}{8 * size}": dtype for kind in "bu" for size, dtype in BITS.items()},
    **{f"s{8 * size}": np.dtype(f"int{8 * size}") for size in BITS},
    **{f"f{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    "pred": np.dtype(bool),
}
_WARP = 32
OPERATIONS: dict[str, Callable[..., None]] = {}


def _operation(function: Any) -> Any:
    OPERATIONS[function.__name__.strip("_")] = function
    return function


# arithmetic


def _computes(name: str, compute: Callable[..., np.ndarray]) -> None:
    """An operation on numbers of one type."""

    def operation(m: Any, kinds: tuple[str, ...], to: str, *operands: Any) -> None:
        m.put_computed(to, compute(*(m.get(operand, kinds[-1]) for operand in operands)))

    OPERATIONS[name] = operation


_computes("add", np.add)
_computes("sub", np.subtract)
_computes("neg", np.negative)
_computes("rcp", np.reciprocal)
_computes("sqrt", np.sqrt)
_computes("and", np.bitwise_and)
_computes("or", np.bitwise_or)
_computes("xor", np.bitwise_xor)
_computes("not", np.invert)
_computes("copysign", lambda sign, size: np.copysign(size, sign))
# all addresses are those of the host
_computes("cvta", lambda address: address)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    if a.dtype == np.float64:
        return _fma_of_doubles(a, b, c).astype(np.float64)
    # the product is exact, and the sum is rounded to odd, which makes the second rounding the only one
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    of_c = total - product
    error = (product - (total - of_c)) + (c - of_c)
    bits = total.view(np.int64)
    is_off = (error != 0) & np.isfinite(total) & (bits % 2 == 0)
    # bits count the size of a number
    bits = bits + np.where(is_off, np.where((error > 0) == (total > 0), 1, -1), 0)
    return bits.view(np.float64).astype(np.float32)


_libm = ctypes.CDLL(None)
_libm.fma.restype, _libm.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3
_fma_of_doubles = np.frompyfunc(_libm.fma, 3, 1)
_computes("fma", _fma)


@_operation
def div(m: Any, kinds: tuple[str, ...], to: str, a: Any, b: Any) -> None:
    x, y = m.get(a, kinds[-1]), m.get(b, kinds[-1])
    # whole numbers towards zero, which is exact for 32 bits
    found = x / y if x.dtype.kind == "f" else np.trunc(x.astype(np.float64) / y).astype(x.dtype)
    if "ftz" in kinds:
        found = np.where(np.abs(found) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), found), found)
    m.put_computed(to, found)


@_operation
def abs_(m: Any, kinds: tuple[str, ...], to: str, a: Any) -> None:
    if kinds[-1].endswith("x2"):
        m.put(to, m.get(a, "u32") & np.uint32(0x7FFF7FFF))
    else:
        m.put(to, np.abs(m.get(a, kinds[-1])))


def _chooses(name: str, choose: Any, choose_number: Any) -> None:
    """The larger or smaller: of a number and NaN the number, unless NaN is asked for."""

    def operation(m: Any, kinds: tuple[str, ...], to: str, a: Any, b: Any) -> None:
        is_float = kinds[-1][0] == "f" and "NaN" not in kinds
        m.put_computed(to, (choose_number if is_float else choose)(m.get(a, kinds[-1]), m.get(b, kinds[-1])))

    OPERATIONS[name] = operation


_chooses("max", np.maximum, np.fmax)
_chooses("min", np.minimum, np.fmin)


def _product(m: Any, kinds: tuple[str, ...], a: Any, b: Any) -> np.ndarray:
    """Of whole numbers the lower half, the upper one, or all."""
    x, y = m.get(a, kinds[-1]), m.get(b, kinds[-1])
    if kinds[0] not in ("hi", "wide"):
        return x * y
    wide = np.dtype(f"{x.dtype.kind}{2 * x.itemsize}")
    product = x.astype(wide) * y.astype(wide)
    return product if kinds[0] == "wide" else (product >> wide.type(8 * x.itemsize)).astype(x.dtype)


@_operation
def mul(m: Any, kinds: tuple[str, ...], to: str, a: Any, b: Any) -> None:
    m.put_computed(to, _product(m, kinds, a, b))


@_operation
def mad(m: Any, kinds: tuple[str, ...], to: str, a: Any, b: Any, c: Any) -> None:
    product = _product(m, kinds, a, b)
    m.put(to, product + m.get(c, f"u{8 * product.itemsize}").view(product.dtype))


# bits


@_operation
def shl(m: Any, kinds: tuple[str, ...], to: str, a: Any, by: Any) -> None:
    x, far = m.get(a, kinds[-1]), m.get(by, "u32")
    m.put(to, np.where(far < 8 * x.itemsize, x << far.astype(x.dtype), x.dtype.type(0)))


@_operation
def shr(m: Any, kinds: tuple[str, ...], to: str, a: Any, by: Any) -> None:
    x, far = m.get(a, kinds[-1]), m.get(by, "u32")
    assert (far < 8 * x.itemsize).all()
    m.put(to, x >> far.astype(x.dtype))


@_operation
def shf(m: Any, kinds: tuple[str, ...], to: str, low: Any, high: Any, by: Any) -> None:
    assert kinds == ("l", "wrap", "b32")
    x = m.get(high, "u32").astype(np.uint64) << np.uint64(32) | m.get(low, "u32")
    m.put(to, (x << (m.get(by, "u32") & np.uint32(31)).astype(np.uint64) >> np.uint64(32)).astype(np.uint32))


@_operation
def bfe(m: Any, kinds: tuple[str, ...], to: str, a: Any, first: int, count: int) -> None:
    x = m.get(a, kinds[-1])
    m.put(to, x << x.dtype.type(32 - count - first) >> x.dtype.type(32 - count))


@_operation
def lop3(m: Any, kinds: tuple[str, ...], to: str, a: Any, b: Any, c: Any, table: int) -> None:
    """Any function of three bits, by its eight results."""
    x, y, z = (m.get(operand, "u32") for operand in (a, b, c))
    found = np.zeros_like(x)
    for i in range(8):
        if table >> i & 1:
            found |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
    m.put(to, found)


@_operation
def prmt(m: Any, kinds: tuple[str, ...], to: str, a: Any, b: Any, which: int) -> None:
    """Any four of eight bytes, or the sign of one in all bits."""
    given = np.concatenate([m.get(operand, "u32").view(np.uint8).reshape(-1, 4) for operand in (a, b)], 1)
    places = [which >> 4 * i & 15 for i in range(4)]
    found = np.ascontiguousarray(given[:, [place & 7 for place in places]])
    signs = [place & 8 > 0 for place in places]
    found[:, signs] = np.where(found[:, signs] > 127, 255, 0)
    m.put(to, found.view(np.uint32)[:, 0])


# conditions

_COMPARISONS: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
# or one of both is NaN
_OPPOSITES = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt", "num": "nan"}


@_operation
def setp(m: Any, kinds: tuple[str, ...], to: str, a: Any, b: Any) -> None:
    names, pairs = to.split("|"), [(m.get(a, kinds[-1]), m.get(b, kinds[-1]))] if "x2" not in kinds[-1] else []
    if not pairs:
        pairs = [*zip(_halves(m, a, kinds[-1]), _halves(m, b, kinds[-1]), strict=True)]
    for name, (x, y) in zip(names, pairs, strict=True):
        opposite = _OPPOSITES.get(kinds[0])
        m.put(name, ~_COMPARISONS[opposite](x, y) if opposite else _COMPARISONS[kinds[0]](x, y))


def _halves(m: Any, operand: Any, kind: str) -> list[np.ndarray]:
    """Both numbers of a register that holds two."""
    both = m.get(operand, "u32")
    if kind == "f16x2":
        return [(both >> np.uint32(by)).astype(np.uint16).view(np.float16) for by in (0, 16)]
    return [(both << np.uint32(16)).view(np.float32), (both & np.uint32(0xFFFF0000)).view(np.float32)]


@_operation
def selp(m: Any, kinds: tuple[str, ...], to: str, a: Any, b: Any, condition: str) -> None:
    m.put(to, np.where(m.get(condition, "pred"), m.get(a, kinds[-1]), m.get(b, kinds[-1])))


# other types


@_operation
def mov(m: Any, kinds: tuple[str, ...], to: Any, given: Any) -> None:
    kind = kinds[-1]
    if isinstance(to, list):
        parts = m.get(given, kind).view(BITS[TYPES[kind].itemsize // len(to)]).reshape(-1, len(to))
        for i, name in enumerate(to):
            m.put(name, parts[:, i])
    elif isinstance(given, list):
        parts = np.stack([m.get(name, f"u{8 * TYPES[kind].itemsize // len(given)}") for name in given], 1)
        m.put(to, parts.view(TYPES[kind])[:, 0])
    else:
        m.put(to, m.get(given, kind))


@_operation
def cvt(m: Any, kinds: tuple[str, ...], to: str, *operands: Any) -> None:
    *how, wanted, given = kinds
    values = [m.get(operand, given) for operand in operands]
    if wanted.endswith("x2"):
        # the first operand is the upper half
        halves = [_narrowed(value, wanted[:-2]) for value in reversed(values)]
        m.put(to, np.stack(halves, 1).view(np.uint32)[:, 0])
    elif wanted in ("bf16", "f16"):
        m.put(to, _narrowed(values[0], wanted))
    elif values[0].dtype.kind == "f" and TYPES[wanted].kind in "iu":
        limits = np.iinfo(TYPES[wanted])
        whole = np.clip(_TO_WHOLE[how[0]](values[0].astype(np.float64)), limits.min, limits.max)
        m.put(to, np.nan_to_num(whole).astype(TYPES[wanted]))
    else:
        whole = next((_TO_WHOLE[each] for each in how if each in _TO_WHOLE), np.positive)
        m.put_computed(to, whole(values[0]).astype(TYPES[wanted]))


_TO_WHOLE: dict[str, Any] = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def _narrowed(value: np.ndarray, kind: str) -> np.ndarray:
    """The bits of a float32 rounded to 16 bits, to nearest even."""
    if kind == "f16":
        bits = value.astype(np.float16).view(np.uint16)
    else:
        wide = value.view(np.uint32)
        bits = (wide + (wide >> np.uint32(16) & np.uint32(1)) + np.uint32(0x7FFF) >> np.uint32(16)).astype(
            np.uint16
        )
    return np.where(np.isnan(value), np.uint16(0x7FFF), bits)


# memory


@_operation
def ld(m: Any, kinds: tuple[str, ...], to: Any, place: tuple[str, int]) -> None:
    space, *_, kind = kinds
    if space == "param":
        m.put(to, m.argument(place[0], kind))
        return
    names = to if isinstance(to, list) else [to]
    values, places = m.memory(space, place, TYPES[kind], len(names))
    # before a register is written that the address may be in
    for name, found in zip(names, [values[places + i] for i in range(len(names))], strict=True):
        m.put_loaded(name, found)


@_operation
def st(m: Any, kinds: tuple[str, ...], place: tuple[str, int], given: Any) -> None:
    space, *_, kind = kinds
    names = given if isinstance(given, list) else [given]
    values, places = m.memory(space, place, TYPES[kind], len(names))
    for i, name in enumerate(names):
        values[places + i] = m.get(name, kind)[m.mask]


@_operation
def atom(m: Any, kinds: tuple[str, ...], to: str, place: tuple[str, int], given: Any) -> None:
    assert kinds[-2:] == ("add", "u64")
    values, places = m.memory(kinds[0], place, TYPES["u64"], 1)
    before = values[places]
    # several may be at one place
    for at, number in zip(places, m.get(given, "u64")[m.mask], strict=True):
        values[at] += number
    m.put_loaded(to, before)


# threads of a warp or program together


def _check_warps(m: Any) -> None:
    warps = m.mask.reshape(-1, _WARP)
    assert (warps.all(1) | ~warps.any(1)).all(), "a warp is divided"


@_operation
def bar(m: Any, kinds: tuple[str, ...], *_: Any) -> None:
    programs = m.mask.reshape(-1, m.kernel.threads)
    assert (programs.all(1) | ~programs.any(1)).all(), "not all threads of a program are at a barrier"


@_operation
def elect(m: Any, kinds: tuple[str, ...], to: str, members: int) -> None:
    m.put(to.split("|")[1], m.threads % _WARP == 0)


@_operation
def shfl(m: Any, kinds: tuple[str, ...], to: str, given: Any, across: int, *limits: int) -> None:
    assert kinds == ("sync", "bfly", "b32")
    assert limits == (31, -1)
    _check_warps(m)
    m.put(to, m.get(given, "b32")[m.threads ^ across])


@_operation
def ldmatrix(m: Any, kinds: tuple[str, ...], to: list[str], place: tuple[str, int]) -> None:
    values, places = _matrices(m, kinds, place)
    for i, name in enumerate(to):
        m.put_loaded(name, values[places[:, i]].view(np.uint32)[:, 0])


@_operation
def stmatrix(m: Any, kinds: tuple[str, ...], place: tuple[str, int], given: list[str]) -> None:
    values, places = _matrices(m, kinds, place)
    for i, name in enumerate(given):
        values[places[:, i]] = m.get(name, "u32")[m.mask].view(np.uint16).reshape(-1, 2)


def _matrices(m: Any, kinds: tuple[str, ...], place: tuple[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Shared memory, and where in it are the numbers of each thread: two neighbours of a row, or of a column,
    of each of up to four matrices of 8 x 8. Threads 8 i to 8 i + 7 of a warp say where rows of matrix i are.
    """
    assert kinds[:3] == ("sync", "aligned", "m8n8")
    _check_warps(m)
    values, places = m.memory("shared", place, TYPES["b16"], 1)
    count = int(kinds[3][1:])
    matrices = places.reshape(-1, 4, 8)[:, :count, :, None] + np.arange(8)
    if "trans" in kinds:
        matrices = matrices.swapaxes(2, 3)
    return values, matrices.reshape(-1, count, _WARP, 2).swapaxes(1, 2).reshape(-1, count, 2)
