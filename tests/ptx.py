"""Runs kernels compiled for an H200 without one: their PTX, instruction by instruction, on CPU memory.

Triton's interpreter runs a kernel's Python, so it never sees what becomes of that: layouts, exchanges between
threads, inline assembly. Here all threads of a launch take an instruction together, as one NumPy operation.
Where their ways part, those that are behind go first, so that all meet again where ways do; those that have
come to a barrier wait for the others.

A misaligned address, and one that is in no tensor, is an error. Memory and registers that nobody has written
are NaN. What PTX calls approximate is rounded correctly; races between threads are not noticed.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.ptx_operations import BITS, OPERATIONS, TYPES

_FIRST_PAGE = 4096
# what threads do together
_TOGETHER = ("bar", "elect", "shfl", "ldmatrix", "stmatrix")
_NAN = np.uint32(0x7FFFFFFF).view(np.float32)
# the type of a register by the beginning of its name; registers of inline assembly have other names
_WIDTHS = {"%p": "pred", "%rs": "b16", "%r": "b32", "%rd": "b64", "%SP": "b64", "%SPL": "b64"}


class Instruction(NamedTuple):
    """`@guard op.kinds operands`."""

    guard: str
    op: str
    kinds: tuple[str, ...]
    operands: tuple[Any, ...]


class Kernel(NamedTuple):
    # types by name
    params: dict[str, str]
    code: list[Instruction]
    # the places of labels in the code
    labels: dict[str, int]
    # arrays of constants
    constants: dict[str, torch.Tensor]
    # threads of a program, and bytes that each has for itself
    threads: int
    local: int


def parse(text: str) -> Kernel:
    text = re.sub(r"//.*", "", text)
    head, limits, body = re.search(r"\.entry \w+\((.*?)\)(.*?)\{(.*?)\n}", text, re.S).groups()  # type: ignore
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in body.splitlines():
        if found := re.match(r"(\$\w+):", line):
            labels[found[1]] = len(code)
        else:
            code += map(_instruction, _statements(line))
    arrays = re.findall(r"\.global .*? (\w+)\[\d+\] = \{(.*?)\}", text)
    return Kernel(
        params={name: kind for kind, name in re.findall(r"\.param \.(\w+).*? (\w+)(?:,|\n|$)", head)},
        code=code,
        labels=labels,
        constants={name: torch.tensor([*map(int, row.split(","))], dtype=torch.uint8) for name, row in arrays},
        threads=int(re.search(r"\.reqntid (\d+)", limits)[1]),  # type: ignore[index]
        local=sum(map(int, re.findall(r"\.local .*\[(\d+)\];", body))),
    )


def _statements(line: str) -> Iterator[str]:
    """Inline assembly has several on a line, in braces, after the declaration of its registers."""
    if re.match(r"\s*\{\s*\.reg", line):
        line = line.strip()[1:].rstrip("} \t")
    for part in line.split(";"):
        statement = part.strip()
        if statement.strip("{}") and not statement.startswith("."):
            yield statement


def _instruction(text: str) -> Instruction:
    guard, name, rest = re.match(r"(?:@(!?%\w+)\s+)?(\S+)\s*(.*)", text, re.S).groups()  # type: ignore
    op, *kinds = name.split(".")
    # commas in braces are parts of an operand
    operands = re.split(r",\s*(?![^{]*\})", rest) if rest else []
    return Instruction(guard or "", op, tuple(kinds), tuple(map(_operand, operands)))


def _operand(text: str) -> Any:
    """A list of operands, a name and an offset in memory, the bits of a constant, or a name."""
    text = text.strip()
    if text.startswith("{"):
        return [_operand(part) for part in text.strip("{}").split(",")]
    if found := re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]", text):
        return found[1], int(found[2] or 0)
    if found := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", text):
        return int(found[1], 16)
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
        return int(text.rstrip("U"), 0)
    return text


class Memory:
    """The memory of this process, of which a launch may touch what belongs to live tensors."""

    def __init__(self) -> None:
        self._begins, self._ends = np.array(sorted({*_storages()}), np.int64).T

    def at(self, addresses: np.ndarray, dtype: np.dtype, count: int) -> tuple[np.ndarray, np.ndarray]:
        """All memory as numbers of this dtype, and which are at these addresses, the first of `count` each."""
        size = dtype.itemsize * count
        known = addresses + size <= self._ends[np.searchsorted(self._begins, addresses, "right") - 1]
        assert known.all(), (
            f"{(~known).sum()} addresses are in no tensor, the first is {addresses[~known][0]:#x}"
        )
        assert not (addresses % size).any(), "misaligned"
        return _everything(dtype), (addresses - _FIRST_PAGE) // dtype.itemsize


@functools.cache
def _everything(dtype: np.dtype) -> np.ndarray:
    count = (2**47 - _FIRST_PAGE) // dtype.itemsize
    return np.frombuffer((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(_FIRST_PAGE), dtype)


def _storages() -> Iterator[tuple[int, int]]:
    """Where the memory of each tensor begins and ends."""
    for value in gc.get_objects():
        if not issubclass(type(value), torch.Tensor) or value.layout != torch.strided:
            continue
        storage = value.untyped_storage()
        # a FakeTensor's is elsewhere
        if storage.device.type == "cpu":
            try:
                yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            except RuntimeError:
                # a subclass without memory of its own
                continue


_parsed = functools.cache(parse)


def run(ptx: str, grid: Sequence[int], args: Sequence[int | float], shared: int) -> None:
    """Run a kernel to its end. `args` are addresses and numbers, `shared` bytes are for each program."""
    if all(grid):
        Machine(_parsed(ptx), grid, args, shared).run()


class Machine:
    """A launch: registers of all threads, which of them take part in an instruction, and their memory."""

    def __init__(self, kernel: Kernel, grid: Sequence[int], args: Sequence[int | float], shared: int) -> None:
        self.kernel, self.args = kernel, dict(zip(kernel.params, args, strict=True))
        programs = int(np.prod(grid))
        self.threads = np.arange(programs * kernel.threads)
        program = self.threads // kernel.threads
        self._memory = Memory()
        self._registers: dict[str, np.ndarray] = {}
        self._given = {
            "%tid.x": self.threads % kernel.threads,
            "%ctaid.x": program % grid[0],
            "%ctaid.y": program // grid[0],
            "%nctaid.x": np.full_like(program, grid[0]),
            "%nctaid.y": np.full_like(program, grid[1]),
            "global_smem": np.zeros_like(program),
            "__local_depot0": np.zeros_like(program),
            **{name: np.full_like(program, values.data_ptr()) for name, values in kernel.constants.items()},
        }
        # room for the widest number, and to the next of them
        size = (shared // 16 + 1) * 16
        self._spaces = {
            "shared": (np.full(programs * size, 0xFF, np.uint8), program * size),
            "local": (np.full(len(program) * kernel.local, 0xFF, np.uint8), self.threads * kernel.local),
        }
        self.mask = np.ones(len(self.threads), bool)

    def run(self) -> None:
        waiting = {0: self.mask}
        while waiting:
            at = min(waiting, key=lambda at: (self._waits(at, waiting[at]), at))
            self.mask = waiting.pop(at)
            for to, mask in self._run_from(at, {*waiting}):
                if mask.any():
                    waiting[to] = waiting[to] | mask if to in waiting else mask

    def _waits(self, at: int, mask: np.ndarray) -> bool:
        """Whether threads that are here wait for others of their program."""
        programs = mask.reshape(-1, self.kernel.threads)
        is_here = self.kernel.code[at].op in _TOGETHER if at < len(self.kernel.code) else False
        return is_here and not (programs.all(1) | ~programs.any(1)).all()

    def _run_from(self, at: int, meetings: set[int]) -> list[tuple[int, np.ndarray]]:
        """Go on until ways part, or meet that of other threads; the places where threads then are."""
        taking_part = self.mask
        while True:
            guard, op, kinds, operands = self.kernel.code[at]
            guarded = taking_part & self._holds(guard) if guard else taking_part
            if op == "ret":
                return [(at + 1, taking_part & ~guarded)]
            if op == "bra":
                return [(self.kernel.labels[operands[0]], guarded), (at + 1, taking_part & ~guarded)]
            self.mask = guarded
            if guarded.any():
                with np.errstate(all="ignore"):
                    OPERATIONS[op](self, kinds, *operands)
            at += 1
            if at in meetings or (meetings and self._waits(at, taking_part)):
                return [(at, taking_part)]

    def _holds(self, guard: str) -> np.ndarray:
        value = self._registers[guard.lstrip("!")]
        return ~value if guard[0] == "!" else value

    def get(self, operand: Any, kind: str) -> np.ndarray:
        """An operand as a number of this type, for every thread."""
        if kind == "bf16":
            return (self.get(operand, "u16").astype(np.uint32) << np.uint32(16)).view(np.float32)
        dtype = TYPES[kind]
        if isinstance(operand, int):
            value = np.array(operand & (2 ** (8 * dtype.itemsize) - 1), BITS[dtype.itemsize]).view(dtype)
            return np.full(len(self.threads), value)
        if operand in self._given:
            return self._given[operand].astype(dtype)
        found = self._registers.get(operand)
        if found is None:
            found = np.full(len(self.threads), -1).astype(_width(operand))
        if found.itemsize > dtype.itemsize:
            found = found.astype(BITS[dtype.itemsize])
        return found.view(dtype)

    def put(self, name: str, value: np.ndarray) -> None:
        """Write to a register, for the threads that take part."""
        if name == "_":
            return
        width = _width(name)
        if value.dtype != bool:
            # a signed number keeps its sign in a wider register
            wider = width.str.replace("u", "i") if value.dtype.kind == "i" else width
            value = (
                (value.view(BITS[value.itemsize]) if value.dtype.kind == "f" else value)
                .astype(wider)
                .view(width)
            )
        if not self.mask.all():
            old = self._registers.get(name)
            value = np.where(self.mask, value, np.zeros_like(value) if old is None else old)
        self._registers[name] = np.ascontiguousarray(value)

    def put_computed(self, name: str, value: np.ndarray) -> None:
        """Write the result of arithmetic: a float32 that is NaN has all bits set but its sign."""
        self.put(name, np.where(np.isnan(value), _NAN, value) if value.dtype == np.float32 else value)

    def memory(self, space: str, place: tuple[str, int], dtype: np.dtype, count: int) -> Any:
        """Memory as numbers of this dtype, and which of them are at a place, for the threads that take part."""
        name, offset = place
        addresses = self.get(name, "u64" if space == "global" else "u32")[self.mask].astype(np.int64) + offset
        if space == "global":
            return self._memory.at(addresses, dtype, count)
        values, starts = self._spaces[space]
        assert not (addresses % (dtype.itemsize * count)).any(), "misaligned"
        return values.view(dtype), (addresses + starts[self.mask]) // dtype.itemsize

    def put_loaded(self, name: str, values: np.ndarray) -> None:
        """Write numbers of the threads that take part to a register."""
        found = np.zeros(len(self.threads), values.dtype)
        found[self.mask] = values
        self.put(name, found)

    def argument(self, name: str, kind: str) -> np.ndarray:
        arg = self.args[name]
        value = np.array(
            arg, TYPES[self.kernel.params[name].replace("u", "s")] if isinstance(arg, int) else "f4"
        )
        return np.full(len(self.threads), value.view(TYPES[kind]))


def _width(name: str) -> np.dtype:
    return TYPES[_WIDTHS[name.rstrip("0123456789")] if name[0] == "%" else "b32"]
