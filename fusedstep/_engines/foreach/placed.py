"""Tensors of which elements share numbers, hold whole ones or draw random bits: one after the other, in pieces.

A piece is a matrix whose rows are blocks: what elements of a block share is one column beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._algorithm.bits import DRAWN_TOGETHER, draw_code
from ..._algorithm.code import Code, linear
from ..._algorithm.formats import BLOCK, Format, Int8, Plain, Plane
from ..._algorithm.language import plane
from ..._algorithm.program import Program
from ..._algorithm.step import GRAD
from .. import FIRST_INDEX, POSITION, SEED
from .resolve import Operation, Resolved
from .words import filled, on_tensors


class Draws(NamedTuple):
    """What random bits depend on, but for the element and slot; `step` is on the device."""

    seed: int
    position: int
    step: Tensor
    # words of the piece that was drawn for
    drawn: dict[int, list[Tensor]]


class Piece(NamedTuple):
    """Consecutive elements of a tensor, row by row: flat views of all planes, or the planes themselves."""

    tensors: list[Tensor]
    numel: int
    # of the first element, in the whole tensor
    first: int = 0
    draws: Draws | None = None

    def word(self, op: str, args: list[Any], dtype: torch.dtype) -> Any:
        if op == "block_largest":
            magnitudes = args[0].to(torch.float32).view(torch.int32) & 0x7FFFFFFF
            return self._present(magnitudes).amax(1, keepdim=True)
        if op == "draw":
            return self._draw(int(args[0]))
        return on_tensors(op, args, dtype)

    def _present(self, x: Tensor) -> Tensor:
        """0 for elements beyond the last."""
        if x.numel() == self.numel:
            return x
        return torch.where(torch.arange(x.numel(), device=x.device).view_as(x) < self.numel, x, 0)

    def _draw(self, slot: int) -> Tensor:
        assert self.draws is not None
        fours, word = divmod(slot, DRAWN_TOGETHER)
        if fours not in self.draws.drawn:
            device = self.tensors[0].device
            index = torch.arange(self.first, self.first + -(-self.numel // BLOCK) * BLOCK, device=device)
            known = (self.draws.seed, self.draws.position)
            step, index = self.draws.step.to(torch.int32), index.view(-1, BLOCK)
            inputs = [*(_whole(number, device) for number in known), step]
            inputs += [index.to(torch.int32), (index >> 32).to(torch.int32)]
            self.draws.drawn[fours] = evaluated(draw_code(fours), inputs)
        return self.draws.drawn[fours][word]

    def load(self, place: int, stored: Plane, dtype: torch.dtype) -> Tensor:
        """A plane as a matrix, in the type computed in."""
        flat = self.tensors[place].detach().reshape(-1)
        if stored.block == 1 and self.numel % BLOCK:
            flat = torch.nn.functional.pad(flat, (0, -self.numel % BLOCK))
        matrix = flat.view(-1, 1 if stored.block > 1 else BLOCK)
        return matrix.to(torch.int32 if stored.is_whole else dtype)

    def store(self, place: int, new: Any, skip: Tensor | None = None) -> None:
        """A matrix in a plane, unless the device knows that the step is skipped."""
        # gradients that are unscaled: autograd is not told, as by torch's fused optimizers
        target = self.tensors[place].data if place == GRAD else self.tensors[place]
        if isinstance(new, Tensor) and new.dim():
            new = new.reshape(-1)[: target.numel()].view(target.shape).to(target.dtype)
        else:
            new = filled(target, new, target.dtype)
        target.copy_(new if skip is None else torch.where(skip, target, new))


def _whole(number: int, device: torch.device) -> Tensor:
    """The lower 32 bits of a number."""
    return torch.full((), number & 0xFFFFFFFF, dtype=torch.int64, device=device).to(torch.int32)


def pieces(table: Any, bucket: Any, limit: int) -> Iterator[tuple[int, Piece]]:
    """The live rows of a bucket in pieces of at most so many bytes; of each its row in the table."""
    program, columns = bucket.program, bucket.tensors
    for at, i in enumerate(bucket.live):
        row = bucket.first_row + i
        cells = table.host_cells[row]
        seed, position, first = (int(cells[column]) for column in (SEED, POSITION, FIRST_INDEX))
        draws = Draws(seed, position, table.steps[row], {}) if program.draws else None
        tensors = [column[at] for column in columns]
        whole = Piece(tensors, tensors[0].numel(), first, draws)
        yield from ((row, piece) for piece in _cut(whole, program.planes, limit))


def _cut(whole: Piece, planes: Sequence[Plane], limit: int) -> Iterator[Piece]:
    length = limit // 4 // BLOCK * BLOCK
    if whole.numel <= length or not all(t.is_contiguous() for t in whole.tensors):
        yield whole
        return
    flat = [
        t.detach().view(-1).split(length // stored.block)
        for t, stored in zip(whole.tensors, planes, strict=True)
    ]
    for k, tensors in enumerate(zip(*flat, strict=True)):
        draws = None if whole.draws is None else whole.draws._replace(drawn={})
        yield Piece([*tensors], tensors[0].numel(), whole.first + k * length, draws)


def run(
    resolved: Resolved, piece: Piece, program: Program, skip: Tensor | None, clears: bool, fold: Callable
) -> list[list[Tensor]]:
    """A sweep over one piece; returns what `fold` makes of what it sums."""
    planes, dtype = program.planes, program.compute_dtype
    loaded = {place: [piece.load(place, planes[place], dtype)] for _, place in resolved.loads}
    values = resolved.run_one(loaded, piece.word)
    of = dict(zip(resolved.order, values, strict=True))

    def result(x: Any) -> Any:
        found = of[x] if isinstance(x, Operation) else x
        return found[0] if isinstance(found, list) else found

    # before anything is stored: what is summed may be what was loaded
    folded = []
    for kind, x in resolved.folds:
        found = result(x)
        if isinstance(x, Operation):
            found = found.reshape(-1)[: piece.numel]
        else:
            found = filled(piece.tensors[0], found, dtype)
        folded.append(fold(kind, [found], plain=True))
    for place, x in resolved.stores:
        # gradients are cleared whether or not the step is taken
        piece.store(place, result(x), None if place == GRAD and clears else skip)
    return folded


# formats on their own


def evaluated(code: Code, inputs: Sequence[Any], word: Callable = on_tensors) -> list[Any]:
    """The results of code, computed at once in float32."""
    values = [*inputs]
    for op, args in code.code:
        given = [arg if isinstance(arg, float) else values[arg] for arg in args]
        values.append(word(op, given, torch.float32))
    return [number if isinstance(number, float) else values[number] for number in code.numbers]


def _traced(function: Callable, count: int) -> Code:
    """A function of so many values as code."""
    planes = [*map(plane, range(count))]
    found = function(*planes)
    results = found if isinstance(found, tuple) else (found,)

    def leaf(value: Any) -> Any:
        return ("plane", value.args[0]) if value.op == "plane" else None

    code = linear([*planes, *results], leaf, rank=lambda at: at[1])
    return code._replace(numbers=code.numbers[count:])


def decode(stored: Format, tensors: Sequence[Tensor]) -> Tensor:
    """The numbers that are stored so, in float32."""
    planes = stored.planes("")
    piece = Piece([t.contiguous() for t in tensors], tensors[0].numel())
    inputs = [piece.load(i, each, torch.float32) for i, each in enumerate(planes)]
    found = evaluated(_traced(stored.load, len(planes)), inputs, piece.word)[0]
    return found.reshape(-1)[: piece.numel].view(tensors[0].shape)


def encode(stored: Format, numbers: Tensor, tensors: Sequence[Tensor], turn: float = 0.0) -> None:
    """Store numbers so, in these tensors; nothing is drawn."""
    stored = stored._replace(draws=False) if isinstance(stored, (Plain, Int8)) else stored
    source = Piece([numbers.contiguous()], numbers.numel())
    inputs = [source.load(0, Plane("", numbers.dtype), torch.float32)]
    results = evaluated(_traced(lambda x: stored.store(x, None, turn), 1), inputs, source.word)
    target = Piece([*tensors], numbers.numel())
    for i, new in enumerate(results):
        target.store(i, new)
