"""A GradScaler that leaves the search for infinities to the step."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from ._optimizer import Optimizer
from ._shards import is_flat


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, with one pass over gradients less for the optimizers of fusedstep.

    torch's reads and writes all gradients to find out whether one overflowed, even for optimizers that unscale
    them themselves. With this one the step finds out, in the pass that also measures the norm for clipping. All
    else is torch's: with `unscale_()` before the step, or with any other optimizer, there is no difference, but
    that it follows what other ranks of a `norm_group` have found.

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = fusedstep.AdamW([p], lr=0.1, weight_decay=0, max_grad_norm=1.0)
    >>> scaler = fusedstep.GradScaler("cpu", init_scale=1024.0)
    >>> scaler.scale(p.square().sum()).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> p.data
    tensor([0.9000, 0.9000])
    """

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        is_ours = isinstance(optimizer, Optimizer)
        finds_out = is_ours and optimizer._step_supports_amp_scaling
        if is_ours and not finds_out and any(is_flat(p) for g in optimizer.param_groups for p in g["params"]):
            raise RuntimeError(
                "the ranks of FSDP1 would not agree whether gradients overflowed; use "
                "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, or FSDP2"
            )
        if not self.is_enabled() or not finds_out or "closure" in kwargs:
            return super().step(optimizer, *args, **kwargs)
        state: dict[str, Any] = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            result = super().step(optimizer, *args, **kwargs)
            if optimizer.norm_group is not None:
                # other ranks may have found what `unscale_` did not find here
                self._take_over(optimizer, state)
            return result
        self._check_scale_growth_tracker("step")
        scale: Any = self._get_scale_async()
        preset = getattr(optimizer, "grad_scale", None)
        optimizer.grad_scale = scale if preset is None else scale * preset
        optimizer.found_inf = None
        try:
            result = optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        self._take_over(optimizer, state)
        state["stage"] = OptState.STEPPED
        return result

    def _take_over(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Let `update()` know what the step found."""
        found, scale = optimizer._found_nonfinite, self._get_scale_async()
        if found is None or scale is None:
            state["found_inf_per_device"] = {}
        else:
            state["found_inf_per_device"] = {scale.device: found.to(scale.device)}
