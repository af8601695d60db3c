"""Checkpoints as optimizers load them: their own, torch.optim's of the same kind, older and foreign ones.

torch's loader casts every state to its parameter's dtype. Ours keeps its own, so states pass that loader in
boxes, and are unpacked afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _get_scalar_dtype

from ._arguments import arguments_of, check_flags
from ._entry import state_dtype_for

_WAYS = ("foreach", "capturable", "differentiable", "fused")
_TORCH_FLAGS = ("amsgrad", "maximize", "nesterov", "decoupled_weight_decay", *_WAYS)


class _Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def loadable(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as torch's loader can take it: all options there, and states by our names."""
    groups = [{**group} for group in state_dict["param_groups"]]
    for saved, group in zip(groups, optimizer.param_groups, strict=False):
        _complete(optimizer, saved, group)
    # Apex counts per group
    counts = {key: group["step"] for group in groups for key in group["params"] if "step" in group}
    states = {key: _boxed(optimizer, values, counts.get(key)) for key, values in state_dict["state"].items()}
    return {**state_dict, "state": states, "param_groups": groups}


def _complete(optimizer: Any, saved: dict[str, Any], group: dict[str, Any]) -> None:
    """Give a saved group what it lacks, or raise if that is what no other optimizer can tell."""
    check_flags(saved)
    arguments = arguments_of(type(optimizer))
    # what takes a keyword is ours alone, and torch's flags came later than its classes
    optional = {name for name, a in arguments.items() if a.kind == a.KEYWORD_ONLY}.union(_TORCH_FLAGS)
    missing = [name for name in optimizer.options if name not in saved and name not in optional]
    if missing:
        raise ValueError(
            f"the checkpoint has no {', '.join(missing)} for a group of {type(optimizer).__name__}: "
            "it seems to come from another optimizer; load a checkpoint of this one"
        )
    for name, value in group.items():
        if name != "params" and name != "param_names":
            # one without one of torch's flags was saved before there was one, when all did as its default does;
            # one without an option of ours comes from elsewhere, and what was chosen here stays
            is_flag = name in _TORCH_FLAGS and name in arguments
            saved.setdefault(name, arguments[name].default if is_flag else value)


def _boxed(optimizer: Any, values: Any, count: Any) -> Any:
    """States in boxes, or torch's loader would cast them to their parameter's dtype."""
    if not isinstance(values, dict):
        return values
    values = {optimizer.aliases.get(name, name): value for name, value in values.items()}
    if isinstance(count, (int, float, Tensor)):
        values.setdefault("step", count)
    return {name: _Box(v) if isinstance(v, Tensor) else v for name, v in values.items()}


def unpack(states: dict[Any, Any], state_dtype: torch.dtype | None) -> None:
    """Take loaded states out of their boxes, in place."""
    for p, values in states.items():
        if isinstance(values, dict):
            for name, value in values.items():
                # what was in none came with a whole optimizer, perhaps in memory that processes share
                if isinstance(value, _Box) or (name == "step" and not isinstance(value, Tensor)):
                    values[name] = _loaded(p, name, value, state_dtype)


def _loaded(p: Any, name: str, value: Any, state_dtype: torch.dtype | None) -> Any:
    """A state from a checkpoint, on the parameter's device and in the dtype that is kept."""
    value = value.tensor if isinstance(value, _Box) else value
    if not isinstance(p, Tensor):  # a state that belongs to no parameter is kept as it is
        return value
    if name == "step":
        # on the host, whatever the default device is; the plan moves it
        count = value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
        # a copy: the dict may be another optimizer's, still counting
        return count.detach().to(_get_scalar_dtype(), copy=True)
    dtype = state_dtype_for(p, name, state_dtype)
    return value.to(p.device, dtype if value.is_floating_point() or value.is_complex() else None)
