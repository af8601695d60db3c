"""A GradScaler that leaves the search for infinities to the step."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.amp.grad_scaler import OptState

from ._engines import to_device
from ._torch.optimizer import Optimizer


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, with one pass less over gradients for the optimizers of fusedstep.

    torch's reads and writes all gradients to find out whether one overflowed, even for optimizers that unscale
    them themselves. With this one the step finds out, in the pass that also measures the norm for clipping, and
    nothing waits for the device, whatever the optimizer's `fused` is. The price: `p.grad` stays scaled, unless
    `unscale_()` was called before the step. An overflow on another rank of a `norm_group` counts, too.
    Everything else is torch's, and so is everything with other optimizers.

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
        if not self.is_enabled() or not isinstance(optimizer, Optimizer) or "closure" in kwargs:
            return super().step(optimizer, *args, **kwargs)
        if optimizer._release is not None:
            optimizer._release.refuse_scaler()
        if optimizer._is_flat:
            raise RuntimeError(
                "the ranks of FSDP1 would not agree whether gradients overflowed; use "
                "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, or FSDP2"
            )
        state: dict[str, Any] = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            return super().step(optimizer, *args, **kwargs)
        self._check_scale_growth_tracker("step")
        scale, ours = cast(Any, self._get_scale_async()), cast(Any, optimizer)
        preset, finds_out = getattr(optimizer, "grad_scale", None), state["stage"] is OptState.READY
        if finds_out:
            ours.grad_scale = scale if preset is None else scale * preset
            ours.found_inf = None
        else:
            found = state["found_inf_per_device"].values()
            ours.grad_scale = preset
            ours.found_inf = sum(t.to(scale.device, non_blocking=True) for t in found)
        try:
            result = optimizer.step(*args, **kwargs)
        finally:
            del ours.grad_scale, ours.found_inf
        if finds_out or optimizer.norm_group is not None:
            # even after `unscale_`: other ranks may have found an overflow that it could not see here
            self._take_over(optimizer, state)
        state["stage"] = OptState.STEPPED
        return result

    def _take_over(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Let `update()` know what the step found."""
        found, scale = optimizer._found_nonfinite, self._get_scale_async()
        if found is None or scale is None:
            state["found_inf_per_device"] = {}
        else:
            state["found_inf_per_device"] = {scale.device: to_device(found, scale.device)}
