"""Our side of `fusedstep check`: an optimizer with all that its case asks for, on the case's engine."""

from __future__ import annotations

import io
import math
from typing import Any

import torch
from torch import Tensor

import fusedstep

from .exact import EMA_DECAY, default_dtype
from .problem import SCALE, Problem, laid_out

_STORAGE: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"state_dtype": "int8"},
    "split": {"master": "split"},
    "split8": {"master": "split8"},
    "master": {"master": "float32"},
    "stochastic": {"rounding": "stochastic", "seed": 5},
}


class Ours:
    """Parameters and states after all steps of a problem; `complaints` has what went wrong on the way."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.case = problem, problem.case
        self.strided = self.case.feature("layout") == "strided"
        self.complaints: list[str] = []
        # scalars kept once for a tensor are float64 where their parameter is
        with default_dtype(problem.dtype if problem.dtype == torch.float64 else torch.float32):
            self.params = self._parameters(problem.starts)
            self.optimizer = self._optimizer()
            self.bases = [float(group["lr"]) for group in self.optimizer.param_groups]
            self.scaler = self._scaler()
            for t in range(problem.count):
                if self.case.feature("resume") == "yes" and t == problem.count // 2:
                    self._resume()
                self._step(t)

    def _parameters(self, values: list[Tensor]) -> list[Any]:
        return [
            torch.nn.Parameter(laid_out(p.detach().to(self.case.place.device), self.strided)) for p in values
        ]

    def _optimizer(self) -> Any:
        case, subject = self.case, self.case.subject
        options = {**subject.options, **self.problem.clipping, **_STORAGE[case.feature("storage")]}
        if subject.takes("engine"):
            options["engine"] = case.place.engine
        if self.problem.state_dtype is not None and "state_dtype" not in options:
            options["state_dtype"] = self.problem.state_dtype
        if case.feature("ema") == "yes":
            options["ema_decay"] = EMA_DECAY
        if case.feature("statistics") == "yes":
            options["statistics"] = True
        if case.feature("skip") == "guard":
            options["skip_nonfinite"] = True
        if case.feature("skip") == "torch" and case.feature("clip") != "no" and subject.takes("fused"):
            # torch's scaler then leaves unscaling to the step, which looks for infinities itself, too
            options |= {"fused": True, "skip_nonfinite": True}
        if case.feature("rate") == "tensor" and "lr" in options:
            options["lr"] = torch.tensor(options["lr"], dtype=torch.float64)
        return subject.ours(self.problem.groups(self.params, subject.options), **options)

    def _scaler(self) -> Any:
        kind, device = self.case.feature("skip"), self.case.place.device
        if kind not in ("scaler", "torch"):
            return None
        cls = fusedstep.GradScaler if kind == "scaler" else torch.amp.GradScaler
        scaler = cls(device, init_scale=SCALE, growth_interval=1000)
        scaler.scale(torch.zeros(1, device=device))
        return scaler

    def _resume(self) -> None:
        """Continue from a checkpoint, with new tensors."""
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        self.params = self._parameters(self.params)
        self.optimizer = self._optimizer()
        self.optimizer.load_state_dict(torch.load(file, weights_only=True))

    def _step(self, t: int) -> None:
        for group, base in zip(self.optimizer.param_groups, self.bases, strict=True):
            rate = self.problem.rate(base, t)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        for p, g in zip(self.params, self.problem.grads(t), strict=True):
            if g is not None and g.dtype != p.dtype:
                p.grad_dtype = None
            p.grad = None if g is None else laid_out(scale * g.to(p.device), self.strided and t % 2 == 0)
        if self.problem.is_skipped(t):
            self._spoil()
        before = [None if p.grad is None else p.grad.clone() for p in self.params]
        asked = {"drop": {"zero_grad": True}, "fill": {"zero_grad": True, "set_to_none": False}}
        chosen = asked.get(self.case.feature("zero"), {})
        if self.scaler is None:
            self.optimizer.step(**chosen)
        else:
            self.scaler.step(self.optimizer, **chosen)
            self.scaler.update()
        # torch's scaler does not call step() if it is to be skipped, and leaves gradients unscaled
        is_torchs = self.case.feature("skip") == "torch"
        if not is_torchs:
            self._look_at_skip(t)
        if not (is_torchs and self.problem.is_skipped(t)):
            self._look_at_grads([g if g is None or not is_torchs else g / scale for g in before])

    def _spoil(self) -> None:
        """Put in what makes a step skipped: one number for torch's scaler, else two."""
        g = self.params[-1].grad
        g[-1, -1] = math.inf
        if self.case.feature("skip") != "torch":
            g[0, 0] = math.nan

    def _look_at_grads(self, before: list[Any]) -> None:
        kind = self.case.feature("zero")
        for p, g in zip(self.params, before, strict=True):
            if kind == "drop" or g is None:
                is_right = p.grad is None
            elif kind == "fill":
                is_right = not p.grad.any()
            else:
                is_right = torch.equal(p.grad.nan_to_num(), g.nan_to_num())
            if not is_right:
                self._complain(f"gradients after a step with zero={kind}")

    def _look_at_skip(self, t: int) -> None:
        told = getattr(self.optimizer, "step_was_skipped", self.problem.is_skipped(t))
        if bool(told) != self.problem.is_skipped(t):
            self._complain(f"step_was_skipped is {bool(told)} after step {t + 1}")
        if self.problem.is_skipped(t) and self.case.feature("statistics") == "yes":
            found = float(self.optimizer.statistics().nonfinite)
            if found != 2:
                self._complain(f"statistics: nonfinite is {found:g}, expected 2, after step {t + 1}")

    def _complain(self, text: str) -> None:
        if text not in self.complaints:
            self.complaints.append(text)
