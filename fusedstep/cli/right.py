"""Whether a step is right: three steps are compared with float64 before any is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fusedstep

from .contender import LR, Made, known
from .parameters import drawn
from .works import Work

_STEPS = 3
_SHAPES = [(3000,), (33, 7), (70, 100)]
# shapes that are taken from the timed model: how many, and up to which size
_OF_MODEL, _LARGEST = 3, 1 << 16
# options that change precision, not what is computed
_HOW_STORED = ("state_dtype", "master", "rounding", "engine")
# with 8 bits, a thirtieth of what three steps change
_SLACK_OF_8_BITS = 1e-4


class Trial:
    """Small tensors with the dtypes and some shapes of a model, and where three steps in float64 lead them."""

    def __init__(self, work: Work, params: list[Any]) -> None:
        # no missing gradients, and no scaler, which drops gradients: both are around a step
        options = {name: value for name, value in work.options.items() if name != "scaler"}
        self.work, self._device = work._replace(model="", options=options), params[0].device.type
        own = sorted({p.shape for p in params if 0 < p.numel() <= _LARGEST})[:_OF_MODEL]
        self._shapes = [(dtype, shape) for dtype in {p.dtype for p in params} for shape in (*_SHAPES, *own)]
        self.exact = self._params(torch.float64)
        optimizer = self._in_float64()
        for _ in range(_STEPS):
            optimizer.step()

    def _params(self, dtype: torch.dtype | None = None) -> list[Any]:
        generator, found = torch.Generator(self._device).manual_seed(1), []
        for its, shape in self._shapes:
            p = drawn(shape, its, generator)
            p.grad += p.grad.sign()  # or the squares of gradients would vanish in fp16
            q = torch.nn.Parameter(p.detach().to(dtype or its))
            q.grad = p.grad.to(dtype or its)
            found.append(q)
        return found

    def _in_float64(self) -> Any:
        """torch's optimizer; if torch has none with these options, ours in plain tensor operations."""
        name = self.work.optimizer
        options = {"lr": LR, **known(getattr(fusedstep, name), self.work.options)}
        options = {name: value for name, value in options.items() if name not in _HOW_STORED}
        torchs = getattr(torch.optim, name, None)
        if torchs is not None and known(torchs, options) == options:
            return torchs(self.exact, **options)
        return getattr(fusedstep, name)(self.exact, engine="torch", **options)

    def disagreement(self, make: Callable[[Work, list[Any]], Made | None], times: int = 1) -> str:
        """How far three steps are off, if more than `times` what is allowed for ours; else an empty string."""
        params = self._params()
        made = make(self.work, params)
        if made is None:
            return ""
        grads = [p.grad.clone() for p in params]
        for _ in range(_STEPS):
            # some optimizers write into gradients
            for p, grad in zip(params, grads, strict=True):
                p.grad.copy_(grad)
            made.step()
        slack = _SLACK_OF_8_BITS if self.work.states == "int8" else 0.0
        for p, q in zip(params, self.exact, strict=True):
            error = float((p.detach() - q.detach()).abs().max())
            allowed = times * (slack + 4 * torch.finfo(p.dtype).eps * float(q.detach().abs().max()))
            # nan is wrong, too
            if not error <= allowed:
                return f"off by {error:.2g} after {_STEPS} steps, {allowed:.2g} is allowed"
        return ""
