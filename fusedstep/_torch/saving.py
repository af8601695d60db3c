"""Checkpoints, pickles and copies of optimizers."""

from __future__ import annotations

from typing import Any

import torch

from .._memory.ranks import UnpicklableGroup
from .._memory.storage import AS_PARAMETER, Storage
from .checkpoint import expanded, loadable, unpack

# arguments that are process groups
_GROUPS = ("norm_group", "divide_among")


def _names_of(dtypes: Any) -> Any:
    """Plain values, which every checkpoint can hold."""
    if isinstance(dtypes, dict):
        return {name: _names_of(dtype) for name, dtype in dtypes.items()}
    return None if dtypes is None else str(dtypes).removeprefix("torch.")


class Saving(torch.optim.Optimizer):
    """What an optimizer of ours does when it is saved and loaded; the rest of it is in `optimizer.py`."""

    _plan: Any
    _capture: Any
    # set by `release_gradients`, until it is undone
    _release: Any = None
    _status: Any
    _forget: Any
    _refuse_averages: Any
    norm_group: Any
    arguments: Any
    storage: Storage
    seed: int
    offload: str | None
    unsaved_steps: Any

    def state_dict(self) -> dict[str, Any]:
        """As torch has it, with the dtypes of a group's states by their names."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            if "state_dtype" in group:
                group["state_dtype"] = _names_of(group["state_dtype"])
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._refuse_averages("load_state_dict")
        if self._capture is not None:
            self._capture.refuse("load_state_dict")
        # after the user's hooks
        handle, plan = self.register_load_state_dict_pre_hook(loadable), self._plan
        if plan is not None:
            plan.forget_states()
        if self._release is not None:
            self._release.forget_states()
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        # it notices that states, counts and options are others
        self._plan = plan
        if self._release is not None:
            self._release.follow()

    def __getstate__(self) -> dict[str, Any]:
        ours = ["state_dtype", "engine", "clip_scope", "norm_type", "skip_nonfinite", "collect_statistics"]
        ours += ["unsaved_steps", "_unscales", "_is_flat", "master", "rounding", "seed"]
        # of a subclass
        ours += [
            name for name, a in self.arguments.items() if a.for_all and name in vars(self) and name not in ours
        ]
        kept = {name: getattr(self, name) for name in ours}
        groups = {name: getattr(self, name) for name in _GROUPS if getattr(self, name) is not None}
        kept |= {name: UnpicklableGroup(name, group) for name, group in groups.items()}
        return {**super().__getstate__(), "norm_group": None, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # a checkpoint that is loaded says nothing of them, and a pickle from before there were masters not all
        self.storage, self.seed = vars(self).get("storage", AS_PARAMETER), vars(self).get("seed", 0)
        self.offload = vars(self).get("offload")
        for name in vars(self).keys() & {"state_dtype", "master", "rounding"}:
            setattr(self, name, vars(self).pop(name))
        for name in _GROUPS:
            if isinstance(getattr(self, name), UnpicklableGroup):
                setattr(self, name, getattr(self, name).group)
        if "_unscales" not in vars(self):
            # a pickle from before it was asked for: False stood for FSDP1's parameters
            self._is_flat = self.__dict__.pop("_step_supports_amp_scaling", True) is False
            fused = False if self._is_flat else self.defaults.get("fused")
            self._unscales = None if fused is None else bool(fused)
        self._status = getattr(self, "_status", None)
        self._forget()
        self.unsaved_steps = state.get("unsaved_steps", {})
        if "differentiable" not in self.arguments:
            # torch gives it to every optimizer; a group of ours would then not be what was loaded
            self.defaults.pop("differentiable", None)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            group.update({name: a.default for name, a in self.arguments.items() if a.fixed})
        unpack(self)

    def expanded_state_dict(self) -> dict[str, Any]:
        """A `state_dict()` in which all states are tensors of float32 at least, which torch.optim loads, and
        masters are there by the name `master`.

        >>> import torch, fusedstep
        >>> p = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        >>> optimizer = fusedstep.AdamW([p], state_dtype="int8", master="split")
        >>> p.grad = torch.ones_like(p)
        >>> optimizer.step()
        >>> [name for name in optimizer.state_dict()["state"][0] if name != "step"]
        ['master_rest', 'exp_avg_codes', 'exp_avg_scales', 'exp_avg_sq_codes', 'exp_avg_sq_scales']
        >>> [name for name in optimizer.expanded_state_dict()["state"][0] if name != "step"]
        ['exp_avg', 'exp_avg_sq', 'master']
        """
        # a split master is what a parameter and its rest are together
        self._refuse_averages("expanded_state_dict")
        return expanded(self, self.state_dict())
