"""Newton-Schulz iterations: the orthogonal matrix nearest to a given one, by products of matrices alone.

An iteration maps every singular value s to a s + b s^3 + c s^5; well chosen coefficients bring all of them near
1. For a wide X, the standard form is

    A = X X^T        X <- a X + (b A + c A^2) X

The Gram form multiplies only small matrices, until the end: with G = X X^T and Z = a I + b G + c G^2, the next
G is Z G Z, and the last X is Q X, where Q is the product of all Z. The wider X, the more work this saves. But
each G loses some of the small singular values, so after a few iterations it is computed again, from Q X.

Where singular values are small, Z and Q are large, and nearly multiples of I. These multiples are kept apart:
added to such large numbers, changes to large singular values would be rounded away.

GPUs compute in float16, because the Gram form needs its eleven bits, with everything scaled so that nothing
falls below its smallest numbers. Elsewhere the dtype is that of the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._algorithm.stage import Stage
from .products import ALIGNED, has_kernel, kernels_for, sums_in_float32, symmetric_product
from .streams import STREAMS, beside_each_other

Coefficients = tuple[float, float, float]

KELLER: Coefficients = (3.4445, -4.7750, 2.0315)
# Amsel et al., arXiv 2505.16932: the best polynomial for each iteration, for singular values from 1e-3 to 1; a
# margin of 1 % keeps rounding errors from making the largest ones grow
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

# a power of two that keeps matrices of norm 1 away from both ends of float16's range
_SCALE = 2.0**12
# iterations of the Gram form before G is computed again, the first time and later: benchmarks/MEASURED.md. At
# first singular values are small, and so are rounding errors in G
_FIRST, _LATER = 3, 2
# for the largest singular values, nearly all of the multiple of I is taken off again. In 16 bits the rounding
# error of that would be too large where the multiple, the product of all a, is above this
_LARGEST = 64
# the Gram form is faster above this ratio of columns to rows. In 16 bits it is less precise with fewer rows
_WIDE, _GRAM = 1.5, 1024


def named_coefficients(name: str, steps: int) -> tuple[Coefficients, ...]:
    """The coefficients of this many iterations, of "keller" or "polar_express"."""
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
        coefficients: three numbers for each iteration
        eps: a matrix is divided by its norm, but not by less than this
        flatten: whether all dimensions but the first are the columns of one matrix, as for a convolution
        heads: number of equal matrices that the rows of a matrix are cut into
        sections: rows of each of these matrices, if they are not equal; otherwise empty
        rate: a function of rows and columns. A rule multiplies a whole tensor by that of `matrix(shape)`, the
            smallest of its sections; here the larger ones are multiplied by what they are to have beyond that
        row_decay: divide rows by the root of their mean square, averaged over steps with this decay (NorMuon);
            None: do not
    """

    coefficients: tuple[Coefficients, ...] = (KELLER,) * 5
    eps: float = 1e-7
    flatten: bool = False
    heads: int = 1
    sections: tuple[int, ...] = ()
    rate: Callable[[int, int], float] | None = None
    row_decay: float | None = None

    def __post_init__(self) -> None:
        if not self.coefficients:
            raise ValueError(
                "found coefficients=(); give three numbers for each iteration, and one iteration at least"
            )

    def dtypes(self, device: torch.device, compute: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        # the source has the range of bfloat16, because its norm is not known yet; memory is predicted on meta
        narrow = device.type in ("cuda", "meta")
        return (torch.bfloat16, torch.float16) if narrow else (compute, compute)

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, int]:
        rows, columns = self._whole(shape)
        if self.sections and sum(self.sections) != rows:
            raise ValueError(
                f"split_sizes={self.sections} add up to {sum(self.sections)}, but a matrix has {rows} rows; "
                "give the sizes of all its parts, and matrices that are cut differently to another group"
            )
        if rows % self.heads:
            raise ValueError(
                f"num_heads={self.heads} does not divide the {rows} rows of a matrix; use its number of "
                "heads, and give other matrices to another group"
            )
        return min(self._heights(rows)), columns

    def _whole(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return super().matrix((shape[0], math.prod(shape[1:])) if self.flatten and len(shape) > 1 else shape)

    def _heights(self, rows: int) -> tuple[int, ...]:
        """Rows of each of the matrices that this many are cut into."""
        return self.sections or (rows // self.heads,) * self.heads

    def joins_rows(self, shape: tuple[int, ...]) -> bool:
        return self.flatten or len(shape) == 2

    def flops(self, shape: tuple[int, ...]) -> float:
        rows, columns = self._whole(shape)
        each = sum(_flops(n, columns, self.coefficients) for n in self._heights(rows))
        return math.prod(shape) / max(1, rows * columns) * each

    def allocates(self, shape: tuple[int, ...]) -> int:
        rows, columns = self._whole(shape)
        n, m = sorted((max(self._heights(rows)), columns))
        each = _allocated(n, m, _is_wide(n, m) and n >= _GRAM, torch.float16.itemsize)
        # sections take turns
        return math.prod(shape) // max(1, rows * columns) * self.heads * each

    def states(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        if self.row_decay is None:
            return {}
        return {ROW_SQUARES: (shape[0], 1) if self.flatten else (*shape[:-1], 1)}

    def run(self, source: Tensor, target: Tensor, workspace_bytes: int) -> None:
        if source.numel() == 0:
            return
        rows, columns = self._whole(source.shape[1:])
        stacks = (self._cut(t.view(-1, rows, columns)) for t in (source, target))
        for x, out in zip(*stacks, strict=True):
            x, out = x.flatten(0, -3), out.flatten(0, -3)
            # rows are divided by their own size before they are multiplied
            factor = self._factor(x.shape[1], columns) if self.row_decay is None else 1.0
            pieces, at_once = _pieces(x, out, workspace_bytes)
            with beside_each_other(x.device, at_once) as streams:
                for (part, out_part), stream in zip(pieces, streams, strict=False):
                    with stream:
                        orthogonalize(part, out_part, self.coefficients, self.eps, factor)

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
        # the norm of each matrix does not change
        sizes = torch.stack([means, means * factors.square()])
        if add_up is not None and (self.sections or self.heads > 1):
            x.copy_(x.to(before.dtype) * (factors * self._ratios(sizes, x.shape[-1], add_up)))
            return
        for part, factor, size in zip(*map(self._cut, (x, factors, sizes)), strict=True):
            sums = size.sum(-2, keepdim=True)
            if add_up is not None:
                add_up(sums)
            # the factor of a row of zeros is too large for sixteen bits
            ratio = _ratio(sums) * self._factor(part.shape[-2], x.shape[-1])
            part.copy_(part.to(before.dtype) * (factor * ratio))

    def _ratios(self, sizes: Tensor, columns: int, add_up: Callable[[Tensor], None]) -> Tensor:
        """For each row of this rank; others have rows of the same matrices."""
        rows, rank = sizes.shape[-2], torch.distributed.get_rank()
        counts = torch.zeros(torch.distributed.get_world_size(), dtype=sizes.dtype, device=sizes.device)
        counts[rank] = rows
        add_up(counts)
        # ranks have rows in the order of ranks
        places = torch.arange(rows, device=sizes.device) + counts[:rank].sum().long()
        if self.sections:
            index = torch.zeros_like(places)
            for end in accumulate(self.sections[:-1]):
                index += places >= end
        else:
            index = places * self.heads // counts.sum().long().clamp_(min=1)
        matrices = len(self.sections) or self.heads
        sums = sizes.new_zeros(*sizes.shape[:-2], matrices, 1).index_add_(-2, index, sizes)
        add_up(sums)
        ratios = _ratio(sums)
        for i, n in enumerate(self.sections):
            ratios[..., i, :] *= self._factor(n, columns)
        return ratios.index_select(-2, index)

    def _cut(self, x: Tensor) -> tuple[Tensor, ...]:
        """Whole matrices as stacks of the smaller ones of one shape."""
        if self.sections:
            return x.split(self.sections, dim=-2)
        return (x.unflatten(-2, (self.heads, x.shape[-2] // self.heads)),)

    def _factor(self, rows: int, columns: int) -> float:
        """What a section is multiplied by."""
        if self.rate is None or not self.sections:
            return 1.0
        columns = max(1, columns)
        return self.rate(rows, columns) / self.rate(min(self._heights(rows)), columns)


def _ratio(sums: Tensor) -> Tensor:
    """What keeps the norms of matrices, by the sums of squares before and after rows were divided."""
    return (sums[0] / sums[1].clamp_(min=_LEAST**2)).sqrt()


def _is_wide(low: int, high: int) -> bool:
    """Whether the Gram form is faster for matrices of these sizes."""
    return high > _WIDE * low


def _flops(rows: int, columns: int, coefficients: tuple[Coefficients, ...]) -> int:
    low, high = sorted((rows, columns))
    if not (_is_wide(low, high) and low >= _GRAM):
        return len(coefficients) * (3 * high * low**2 + low**3)
    legs = _legs(coefficients, True)
    return 3 * high * low**2 * len(legs) + sum(4 * len(leg) - 3 for leg in legs) * low**3


def _allocated(low: int, high: int, is_gram: bool, itemsize: int) -> int:
    """Bytes for a matrix: another X, and small matrices, more of them in the Gram form."""
    return (high + (4 if is_gram else 2) * low) * low * itemsize


def _pieces(x: Tensor, out: Tensor, workspace_bytes: int) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Pieces of about equal size for which enough memory may be allocated, and how many of them may be under
    way at a time.
    """
    low, high = sorted(x.shape[1:])
    each = _allocated(low, high, _is_wide(low, high), out.itemsize)
    if not out.is_contiguous():
        # the result is computed in other memory, and copied
        each += high * low * out.itemsize
    most = workspace_bytes // max(1, each)
    # if not even two matrices fit, one after the other
    at_once = STREAMS if len(x) > most >= STREAMS else 1
    most = max(1, most // at_once)
    count = -(-len(x) // -(-len(x) // most))
    return [*zip(x.split(count), out.split(count), strict=True)], at_once


def _is_gram(x: Tensor) -> bool:
    """Whether the Gram form is better for matrices of this shape."""
    rows, columns = x.shape[1:]
    low, high = sorted((rows, columns))
    # in 16 bits with kernels alone, for X and for the small matrices: others would not be symmetric
    has_kernels = low >= _GRAM and low % ALIGNED == 0 and has_kernel(x, x, rows > columns)
    return _is_wide(low, high) and (x.itemsize > 2 or has_kernels)


@torch.no_grad()
def orthogonalize(
    x: Tensor, out: Tensor, coefficients: tuple[Coefficients, ...], eps: float, factor: float = 1.0
) -> None:
    """Fill `out` with `factor` times the orthogonal matrices nearest to those of `x`; both may be the same
    memory.
    """
    if not out.is_contiguous():
        # sections of larger matrices: products are faster on contiguous ones
        whole = torch.empty_like(out, memory_format=torch.contiguous_format)
        orthogonalize(x, whole, coefficients, eps, factor)
        out.copy_(whole)
        return
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=_precise(x.dtype))
    factors = _SCALE / norms.clamp_(min=eps)
    is_gram = _is_gram(out)
    passes = len(_legs(coefficients, out.itemsize == 2)) if is_gram else len(coefficients)
    # X alternates between two buffers, and ends in `out`
    scaled = out if passes % 2 == 0 else torch.empty(x.shape, dtype=out.dtype, device=x.device)
    _scale(x, factors, scaled)
    with sums_in_float32(x.device):
        iterate = _gram if is_gram else _standard
        iterate(_Matrices(scaled, x.shape[1] > x.shape[2]), out, coefficients, factor / _SCALE)


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
    """Matrices of norm 1, times the scale; if they are tall, X below is their transpose."""

    x: Tensor
    is_tall: bool

    def gram(self) -> Tensor:
        """X X^T, times the scale."""
        return symmetric_product(self.x, self.x, alpha=1 / _SCALE, transposed=self.is_tall)

    def after(self, q: Tensor, keep: float, scale: float, out: Tensor) -> _Matrices:
        """Put scale * (keep X + Q X) into `out`."""
        a, b = (self.x, q.mT) if self.is_tall else (q, self.x)
        torch.baddbmm(self.x, a, b, beta=scale * keep, alpha=scale, out=out)
        return self._replace(x=out)


def _standard(x: _Matrices, out: Tensor, coefficients: tuple[Coefficients, ...], scale: float) -> None:
    """All iterations, and at last multiply by `scale`."""
    other = torch.empty_like(out) if x.x is out else out
    for i, (a, b, c) in enumerate(coefficients):
        g = x.gram()
        polynomial = _polynomial(g, b, c)
        is_last = i == len(coefficients) - 1
        x, other = x.after(polynomial, a, scale if is_last else 1.0, other), x.x
        # before the next ones are allocated
        del g, polynomial


def _polynomial(g: Tensor, b: float, c: float) -> Tensor:
    """b G + c G^2, whose norm is near 1, so that it needs no scale."""
    return symmetric_product(g, g, alpha=c / _SCALE**2, plus=[(b / _SCALE, g)])


def _legs(coefficients: tuple[Coefficients, ...], is_narrow: bool) -> list[tuple[Coefficients, ...]]:
    """All iterations, cut into legs after which X and G are computed."""
    legs = [coefficients[:1]]
    for each in coefficients[1:]:
        *before, leg = legs
        grown = math.prod(a for a, _, _ in (*leg, each))
        if len(leg) < (_LATER if before else _FIRST) and (grown <= _LARGEST or not is_narrow):
            legs[-1] = (*leg, each)
        else:
            legs.append((each,))
    return legs


def _gram(x: _Matrices, out: Tensor, coefficients: tuple[Coefficients, ...], scale: float) -> None:
    """The same in the Gram form."""
    legs = _legs(coefficients, out.itemsize == 2)
    other = torch.empty_like(out) if x.x is out else out
    for i, leg in enumerate(legs):
        q, keep = _product_of_all(x.gram(), leg)
        x, other = x.after(q, keep, scale if i == len(legs) - 1 else 1.0, other), x.x
        del q


def _product_of_all(g: Tensor, coefficients: tuple[Coefficients, ...]) -> tuple[Tensor, float]:
    """The product of Z of these iterations, the first of which has this G: Q and k of Q + k I."""
    q, keep, last = g, 1.0, len(coefficients) - 1
    for i, (a, b, c) in enumerate(coefficients):
        z = _polynomial(g, b, c)
        # (Z + a I) (Q + k I) = Z Q + a Q + k Z + a k I
        q = z if i == 0 else symmetric_product(z, q, plus=[(a, q), (keep, z)])
        keep *= a
        if i != last:
            # two statements: the second gets the memory that the first has freed
            g = symmetric_product(g, z, plus=[(a, g)])
            g = symmetric_product(g, z, plus=[(a, g)])
    return q, keep
