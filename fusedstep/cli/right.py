"""Whether a step is right: three steps are compared with float64 before any is timed.

What is right is what torch's optimizers and the references of `fusedstep check` compute, not our own rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

import fusedstep

from .contender import LR, Made
from .exact import default_dtype
from .parameters import drawn, groups
from .problem import real
from .references import BesideMuon, Muon
from .subjects import Subject, reference_of
from .works import Work

# a rate for the gradients of each step: if all were the same, no average of them could be wrong
_STEPS = (1.0, 0.2, 0.5)
# shapes that are taken from the timed model: how many, and up to which size
_OF_MODEL, _LARGEST = 3, 1 << 16
# options that say how a step is run or stored, or what goes along with it, not what is computed
_AROUND = {"state_dtype", "master", "rounding", "seed", "engine", "offload", "foreach", "fused", "capturable"}
_AROUND |= {"differentiable", "statistics", "ema_decay", "skip_nonfinite", "sharded", "grad_scale", "scaler"}
_AROUND |= {"norm_group", "divide_among", "workspace_bytes"}
# what states may cost, by their bytes, and products of matrices in sixteen bits, as fractions of what steps
# change; small squares vanish in fp16
_OF_STATES, _PRODUCTS = {1: 0.05, 2: 0.1, 4: 1e-6, 8: 1e-9}, 0.05


def _shapes(options: dict[str, Any]) -> list[tuple[int, ...]]:
    """Of a vector and two matrices, whose rows can be cut as options of Muon say."""
    rows = 8 * (options.get("num_heads") or 0) + sum(options.get("split_sizes") or ())
    return [(3000,), (rows or 33, 7), (rows or 70, 100)]


class WholeMuon(Muon):
    """The reference of Muon, with that of AdamW for groups that Muon leaves to it."""

    options: ClassVar = {**BesideMuon.options, **Muon.options, "use_muon": True}
    keeps = (*Muon.keeps, *BesideMuon.keeps)  # type: ignore[assignment]

    def update(self, p, g, s, t, o):
        cls: Any = Muon if o["use_muon"] else BesideMuon
        return cls.update(self, p, g, s, t, o)


class Trial:
    """Small tensors with the dtypes and some shapes of a model, and where three steps in float64 lead them."""

    def __init__(self, work: Work, params: list[Any]) -> None:
        # no missing gradients, and no scaler, which drops gradients: both are around a step
        options = {name: value for name, value in work.options.items() if name != "scaler"}
        self.work = work._replace(model="", options=options)
        self._is_on_cpu = params[0].device.type == "cpu"
        own = sorted({p.shape for p in params if 0 < p.numel() <= _LARGEST})[:_OF_MODEL]
        self._dtypes = [*dict.fromkeys(p.dtype for p in params)]
        kinds = [(shape, dtype) for dtype in self._dtypes for shape in (*_shapes(options), *own)]
        generator = torch.Generator(params[0].device).manual_seed(1)
        steps = [[drawn(*kind, generator) for kind in kinds] for _ in _STEPS]
        self._starts = [p.detach() for p in steps[0]]
        # none is small, or its square would vanish in fp16
        self._grads = [
            [rate * (50 * p.grad + p.grad.sgn()) for p in step]
            for rate, step in zip(_STEPS, steps, strict=True)
        ]
        self.exact: list[Any] = [torch.nn.Parameter(self._exact(p), True) for p in self._starts]
        # what ours is compared with instead, if no reference knows its options
        self.note = ""
        with self._scalars():
            optimizer = self._in_float64()
            for grads in self._grads:
                for p, g in zip(self.exact, grads, strict=True):
                    p.grad = self._exact(g)
                optimizer.step()
                if work.optimizer == "functional.adamw_":
                    # every step is its first
                    for state in optimizer.state.values():
                        state["step"].zero_()

    def _scalars(self) -> Any:
        """Numbers that are kept once for a tensor must be as exact as what is computed."""
        return default_dtype(max((real(p).dtype for p in self._starts), key=lambda dtype: dtype.itemsize))

    def _exact(self, t: Tensor) -> Tensor:
        """A copy in float64, real, and of no more dimensions than a reference takes."""
        t = real(t).double().clone()
        return t.flatten(1) if self.work.optimizer == "Muon" and t.dim() > 3 else t

    def _in_float64(self) -> Any:
        """torch's optimizer or a reference; ours in plain tensor operations if these lack an option."""
        name = self.work.optimizer
        if name == "functional.adamw_":
            return torch.optim.AdamW(self.exact, LR, weight_decay=0.0)
        of_rule = {name: value for name, value in self.work.options.items() if name not in _AROUND}
        options, its = {"lr": LR, **of_rule}, groups(self.work, self.exact)
        cls: Any = WholeMuon if name == "Muon" else reference_of(name, options)
        try:
            return cls(its, **options)
        except TypeError:
            self.note = "compared with its own rule: no reference has these options"
            return getattr(fusedstep, name)(its, engine="torch", **options)

    def disagreement(self, make: Callable[[Work, list[Any]], Made | None], times: int = 1) -> str:
        """How far three steps are off, if more than `times` what is allowed for ours; else an empty string."""
        params = [torch.nn.Parameter(p.clone()) for p in self._starts]
        kept = [grad.clone() for grad in self._grads[0]]
        for p, grad in zip(params, kept, strict=True):
            p.grad = grad
        with self._scalars():
            made = make(self.work, params)
            if made is None:
                return ""
            for grads in self._grads:
                # some optimizers write into gradients
                for p_grad, grad in zip(kept, grads, strict=True):
                    p_grad.copy_(grad)
                made.step()
        found = [*zip(params, self._starts, self.exact, strict=True)]
        told = (self._wrong(dtype, [f for f in found if f[0].dtype == dtype], times) for dtype in self._dtypes)
        return next(filter(None, told), "")

    def _wrong(self, dtype: torch.dtype, found: list[Any], times: int) -> str:
        """What is to be said of all parameters of a dtype, given with their starts and where they should be."""
        flat = lambda tensors: torch.cat([self._exact(t.detach()).reshape(-1) for t in tensors])
        p, start, q = map(flat, zip(*found, strict=True))
        off, moved = (p - q).abs(), (q - start).abs()
        # rounding may flip the sign of a whole step: most elements count
        jumps = Subject(self.work.optimizer, 0, self.work.options).jumps
        kinds: list[Any] = [("", off.quantile(0.9) if jumps else off.max(), torch.max, 4 * times)]
        if real(found[0][0]).itemsize == 2:
            # one element may be off by as much as it moves, but not all: roundings average out
            kinds.append((" on average", off.mean(), torch.mean, 2 * times**0.5))
        for on_average, error, size, roundings in kinds:
            allowed = self._slack(dtype, times) * size(moved) + roundings * torch.finfo(dtype).eps * size(
                q.abs()
            )
            # nan is wrong, too
            if not error <= allowed:
                told = f"{on_average} after {len(_STEPS)} steps"
                return f"off by {float(error):.2g}{told}, {float(allowed):.2g} is allowed"
        return ""

    def _slack(self, dtype: torch.dtype, times: int) -> float:
        """What states, and products of matrices, may cost by how they are stored, as a fraction of the way."""
        found: Any = self.work.states or torch.finfo(dtype).dtype
        each = found.values() if isinstance(found, dict) else [found]
        states = [of if isinstance(of, torch.dtype) else getattr(torch, of) for of in each]
        by_products = self.work.optimizer == "Muon" and (times > 1 or not self._is_on_cpu)
        return max(_OF_STATES[of.itemsize] for of in states) + by_products * _PRODUCTS
