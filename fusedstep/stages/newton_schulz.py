"""Newton-Schulz iterations: the orthogonal matrix nearest to a given one, by products of matrices alone.

An iteration takes every singular value s to a s + b s^3 + c s^5, and with well chosen coefficients all of them
come near 1. In the standard form that is, for a wide X,

    A = X X^T        X <- a X + (b A + c A^2) X

and in the Gram form only small symmetric matrices are multiplied, until the end: with G = X X^T and
Z = a I + b G + c G^2, the next G is Z G Z, and the last X is Q X, with Q the product of all Z. That is less
work the wider X is. Each G forgets a little of the small singular values, so Q is brought to X, and G computed
anew, once on the way.

On GPUs all is done in 16 bits: float16, because the Gram form needs its eleven bits, with everything scaled so
that nothing falls below its smallest numbers. Elsewhere in what the rule is computed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._algorithm.stage import Stage
from .streams import STREAMS, beside_each_other
from .symmetric import kernels_for, symmetric_product

Coefficients = tuple[float, float, float]

KELLER: Coefficients = (3.4445, -4.7750, 2.0315)
# Amsel et al., arXiv 2505.16932: the best polynomials one after the other, for singular values from 1e-3 to 1;
# a margin of 1 % keeps the largest ones from growing by errors of rounding
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_MARGIN = 1.01
NAMES = ("keller", "polar_express")

# the state of row normalisation, as microsoft/dion calls it, and what keeps it from dividing by 0
ROW_SQUARES = "variance_neuron"
_LEAST = 1e-8

# powers of two that keep matrices of norm 1 away from both ends of what float16 holds
_SCALE = 2.0**12
# iterations of the Gram form before it starts anew: after two it takes as long, and is half as precise
_RESTART = 3
# from this size on the Gram form takes less time, also of square matrices; in 16 bits it is less precise for
# smaller ones, so these take it only where they are computed in more
_GRAM = 1024
_WIDE = 1.5


def named_coefficients(name: str, steps: int) -> tuple[Coefficients, ...]:
    """The coefficients of so many iterations, "keller"'s or those of "polar_express"."""
    if name not in NAMES:
        raise ValueError(f"there are no coefficients {name!r}; use one of {NAMES}")
    if name == "keller":
        return (KELLER,) * steps
    *first, last = _POLAR_EXPRESS
    scaled = [(a / _MARGIN, b / _MARGIN**3, c / _MARGIN**5) for a, b, c in first]
    return (*scaled[:steps], *(last,) * (steps - len(first)))


@dataclass(frozen=True)
class NewtonSchulz(Stage):
    """The orthogonal matrix nearest to each matrix in a tensor, whose last two dimensions are rows and columns.

    Args:
        coefficients: of each iteration
        eps: the least that a matrix is divided by, instead of its norm
        flatten: whether all dimensions but the first are the columns of one matrix, as of a convolution
        heads: into how many matrices the rows of each are cut
        sections: how many rows each of its matrices has, if they are not the same; otherwise none
        row_decay: how much of the mean square of each row is kept from step to step, where rows are divided by
            its root (NorMuon); None: they are not
    """

    coefficients: tuple[Coefficients, ...] = (KELLER,) * 5
    eps: float = 1e-7
    flatten: bool = False
    heads: int = 1
    sections: tuple[int, ...] = ()
    row_decay: float | None = None

    def dtypes(self, device: torch.device, compute: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        # with the range of bfloat16, because its norm is not known yet; memory is predicted on meta
        narrow = device.type in ("cuda", "meta")
        return (torch.bfloat16, torch.float16) if narrow else (compute, compute)

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, int]:
        rows, columns = self._whole(shape)
        if self.sections and sum(self.sections) != rows:
            raise ValueError(
                f"split_sizes={self.sections} add up to {sum(self.sections)}, and a matrix has {rows} rows; "
                "give sizes of all its parts, in a group of matrices that are cut in this way"
            )
        if rows % self.heads:
            raise ValueError(
                f"num_heads={self.heads} does not divide the {rows} rows of a matrix; use the number of heads "
                "that it has, in a group of such matrices"
            )
        return (max(self.sections) if self.sections else rows // self.heads), columns

    def _whole(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return super().matrix((shape[0], math.prod(shape[1:])) if self.flatten and len(shape) > 1 else shape)

    def joins_rows(self, shape: tuple[int, ...]) -> bool:
        return self.flatten or len(shape) == 2

    def flops(self, shape: tuple[int, ...]) -> float:
        rows, columns = self.matrix(shape)
        n, m = min(rows, columns), max(rows, columns)
        return math.prod(shape) / max(1, n * m) * len(self.coefficients) * (3 * m * n * n + n**3)

    def states(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        if self.row_decay is None:
            return {}
        return {ROW_SQUARES: (shape[0], 1) if self.flatten else (*shape[:-1], 1)}

    def run(self, source: Tensor, target: Tensor, workspace_bytes: int) -> None:
        if source.numel() == 0:
            return
        for x, out in zip(self._matrices(source), self._matrices(target), strict=True):
            pieces, at_once = _pieces(x, out, workspace_bytes)
            with beside_each_other(x.device, at_once) as streams:
                for (part, out_part), stream in zip(pieces, streams, strict=False):
                    with stream:
                        orthogonalize(part, out_part, self.coefficients, self.eps)

    @torch.no_grad()
    def finish(
        self,
        target: Tensor,
        states: list[dict[str, Any]],
        skip: Tensor,
        add_up: Callable[[Tensor], None] | None,
    ) -> None:
        if self.row_decay is None:
            return
        x = target.flatten(2) if self.flatten else target
        found = [state[ROW_SQUARES] for state in states]
        before = torch.stack(found)
        means = x.to(before.dtype).square().mean(-1, keepdim=True)
        squares = before.lerp(means, 1 - self.row_decay)
        torch._foreach_copy_(found, [*torch.where(skip, before, squares)])
        factors = 1 / (squares.sqrt() + _LEAST)
        # as much of an update as before, however it is divided among rows
        sizes = torch.stack([means.sum(-2, keepdim=True), (means * factors.square()).sum(-2, keepdim=True)])
        if add_up is not None:
            add_up(sizes)
        # a row of zeros has a factor that sixteen bits do not hold
        x.copy_(x.to(before.dtype) * (factors * (sizes[0] / sizes[1].clamp_(min=_LEAST**2)).sqrt()))

    def _matrices(self, stack: Tensor) -> Iterator[Tensor]:
        """A stack of tensors as stacks of matrices of one shape."""
        rows, columns = self._whole(stack.shape[1:])
        stack = stack.view(-1, rows, columns)
        if self.sections:
            yield from stack.split(self.sections, dim=1)
        else:
            yield stack.view(-1, rows // self.heads, columns)


def _pieces(x: Tensor, out: Tensor, workspace_bytes: int) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """As many matrices at a time as what is allocated for them fits, and about as many every time; and how
    many of these pieces may be under way at a time.
    """
    low, high = sorted(x.shape[1:])
    # X on its way, and three small matrices beside it; or five of these, while X is where the result will be
    each = max(high + 3 * low, 5 * low) * low * out.itemsize
    if not out.is_contiguous():
        # the result is made elsewhere, and copied
        each += high * low * out.itemsize
    most = workspace_bytes // max(1, each)
    # not even two matrices fit: one after the other
    at_once = STREAMS if len(x) > most >= STREAMS else 1
    most = max(1, most // at_once)
    count = -(-len(x) // -(-len(x) // most))
    return [*zip(x.split(count), out.split(count), strict=True)], at_once


@torch.no_grad()
def orthogonalize(x: Tensor, out: Tensor, coefficients: tuple[Coefficients, ...], eps: float) -> None:
    """Fill `out` with the nearest orthogonal matrices to those of `x`; both may be the same memory."""
    if not out.is_contiguous():
        # sections of larger matrices: products are faster where matrices follow each other
        whole = torch.empty_like(out, memory_format=torch.contiguous_format)
        orthogonalize(x, whole, coefficients, eps)
        out.copy_(whole)
        return
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=_precise(x.dtype))
    factors = _SCALE / norms.clamp_(min=eps)
    rows, columns = x.shape[1:]
    low, high = sorted((rows, columns))
    is_gram = low >= _GRAM or (high > _WIDE * low and out.itemsize > 2)
    ways = 1 + (len(coefficients) > _RESTART) if is_gram else len(coefficients)
    # X goes to and fro between two places, and ends in `out`
    scaled = out if ways % 2 == 0 else torch.empty(x.shape, dtype=out.dtype, device=x.device)
    _scale(x, factors, scaled)
    (_gram if is_gram else _standard)(_Matrices(scaled, rows > columns), out, coefficients)


def _scale(x: Tensor, factors: Tensor, out: Tensor) -> None:
    """Fill `out`, which may be the same memory, with every matrix times its factor."""
    kernels = kernels_for(x)
    if kernels is not None:
        # three times as fast where the types differ
        kernels.scale(x, factors, out)
    elif x.dtype == out.dtype:
        torch.mul(x, factors, out=out)
    else:
        out.copy_(x * factors)


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Matrices(NamedTuple):
    """Matrices of norm 1 times the scale; where they are tall, what is said of X is meant of its transpose."""

    x: Tensor
    is_tall: bool

    def gram(self) -> Tensor:
        """X X^T, times the scale."""
        return symmetric_product(self.x, self.x, alpha=1 / _SCALE, transposed=self.is_tall)

    def after(self, q: Tensor, keep: float, scale: float, out: Tensor) -> _Matrices:
        """Put scale * (keep X + Q X) into `out`."""
        a, b = (self.x, q.mT) if self.is_tall else (q, self.x)
        torch.baddbmm(self.x if keep else out, a, b, beta=scale * keep, alpha=scale, out=out)
        return self._replace(x=out)


def _standard(x: _Matrices, out: Tensor, coefficients: tuple[Coefficients, ...]) -> None:
    other = torch.empty_like(out) if x.x is out and coefficients else out
    for i, (a, b, c) in enumerate(coefficients):
        g = x.gram()
        # of norms near 1: from here on without the scale
        polynomial = symmetric_product(g, g, alpha=c / _SCALE**2, beta=b / _SCALE, addend=g)
        is_last = i == len(coefficients) - 1
        x, other = x.after(polynomial, a, 1 / _SCALE if is_last else 1.0, other), x.x


def _gram(x: _Matrices, out: Tensor, coefficients: tuple[Coefficients, ...]) -> None:
    last, g, q = len(coefficients) - 1, x.gram(), None
    for i, (a, b, c) in enumerate(coefficients):
        if i == _RESTART and q is not None:
            x, q = x.after(q, 0.0, 1.0, torch.empty_like(out)), None
            g = x.gram()
        z = symmetric_product(g, g, alpha=c / _SCALE**2, beta=b / _SCALE, addend=g, diagonal=a)
        q = z if q is None else symmetric_product(z, q)
        if i != last and i + 1 != _RESTART:
            # in two lines: what is done with gives its memory to the next
            g = symmetric_product(g, z)
            g = symmetric_product(g, z)
    if q is not None:
        x.after(q, 0.0, 1 / _SCALE, out)
