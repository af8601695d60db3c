"""Checkpoints as optimizers load them: their own, torch.optim's of the same kind, older and foreign ones.

torch's loader casts every state to its parameter's dtype. Ours keeps its own, so states pass that loader in
boxes, and are unpacked afterwards, stored as this optimizer stores them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _get_scalar_dtype

from .._memory.convert import convert, expand, state_names
from .._memory.storage import IN_GROUPS
from .arguments import check_flags

_WAYS = ("foreach", "capturable", "differentiable", "fused")
_TORCH_FLAGS = ("amsgrad", "maximize", "nesterov", "decoupled_weight_decay", *_WAYS)


class _Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def loadable(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as torch's loader can take it: all options there, and states by our names."""
    if not {"state", "param_groups"} <= state_dict.keys():
        found = [*state_dict][:3]
        raise KeyError(
            f"'state' and 'param_groups' are not both in this state dict, which begins with {found}; load one "
            "that an optimizer's state_dict() gave"
        )
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
    arguments = optimizer.arguments
    for name in IN_GROUPS:
        # how states are stored is what was chosen here
        saved.pop(name, None)
    # what takes a keyword is ours alone, and torch's flags came later than its classes
    optional = {name for name, a in arguments.items() if a.kw_only}.union(_TORCH_FLAGS)
    missing = [name for name in optimizer.options if name not in saved and name not in optional]
    scalars = {name for rule in optimizer.rules for name in rule.group_scalars}
    if scalars & saved.keys():
        # all of them, or none: those that are left out would begin anew beside the others
        missing += sorted(scalars - saved.keys())
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


# once for all: it takes as long as what is done for a parameter
@torch.inference_mode(False)
@torch.no_grad()
def unpack(optimizer: Any) -> None:
    """Take loaded states out of their boxes, in place."""
    with_updates = ((group["params"], optimizer.update_of(group)) for group in optimizer.param_groups)
    updates = {p: update for params, update in with_updates for p in params}
    states = {p: values for p, values in optimizer.state.items() if isinstance(values, dict)}
    # all of them before any is converted, which may raise
    numbers = {"step", *(name for rule in optimizer.rules for name in rule.scalars)}
    away = optimizer.settings.offload
    loaded = {p: _taken_out(p, values, numbers, away) for p, values in states.items()}
    for p, values in states.items():
        # a state that belongs to no parameter is kept as it is
        if loaded[p] and p in updates:
            convert(p, values, updates[p], type(optimizer).__name__)


def _taken_out(p: Any, values: dict[str, Any], numbers: set[str], away: bool) -> bool:
    """Take what is in boxes out of them; whether there was any. `numbers` are kept once for a tensor. What
    will live elsewhere than its parameter stays where it is until a step brings it there.
    """
    # what was in no box came with a whole optimizer, perhaps in memory that processes share
    loaded = [name for name, value in values.items() if isinstance(value, _Box)]
    for name in loaded:
        tensor = values[name].tensor
        stays = away or name in numbers or not isinstance(p, Tensor)
        values[name] = tensor if stays or tensor.device == p.device else tensor.to(p.device)
    for name in numbers & values.keys() if isinstance(p, Tensor) else ():
        if name in loaded or not isinstance(values[name], Tensor):
            values[name] = _count(values[name])
    return bool(loaded)


def _count(value: Any) -> Tensor:
    # on the host, whatever the default device is; the plan moves it
    count = value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
    # a copy: the dict may be another optimizer's, still counting
    return count.to(_get_scalar_dtype(), copy=True)


def expanded(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of an optimizer in which all states, and masters, are plain tensors."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    states = {
        key: {**values} if isinstance(values, dict) else values for key, values in state_dict["state"].items()
    }
    names = state_names(optimizer.rules)
    for key, p in zip(keys, params, strict=True):
        if isinstance(states.get(key), dict):
            expand(p, states[key], names)
    groups = [{k: v for k, v in g.items() if k not in IN_GROUPS} for g in state_dict["param_groups"]]
    return {**state_dict, "state": states, "param_groups": groups}
