"""The loops that `fusedstep bench --only host` times, each with the ratio that it should reach."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from . import bodies
from .side import Side

# a class by its full name, and its arguments
Call = tuple[str, dict[str, Any]]


class Loop(NamedTuple):
    """A loop, what of it is timed, and the ratio of the peer's time to ours that it should reach."""

    name: str
    body: Callable[[Side], bodies.Body]
    target: float | None = None
    timed: str = "step()"
    size: int = 400
    ours: Call = ("fusedstep.AdamW", {})
    peer: Call = ("torch.optim.AdamW", {"fused": True})
    # whether it is a run, whose mean is one sample
    ends: bool = False
    # whether a GPU finishes within the timed part
    waits: bool = False


# torch's fused step on a CPU misreads a gradient that has another layout than its parameter
_NOT_FUSED: Call = ("torch.optim.AdamW", {})
_AND_SCHEDULER = "step(), scheduler.step()"
_AND_BACKWARD = "backward(), step(), zero_grad()"
# a twentieth of the gradients of 400 tensors of 64 elements
_BUCKET = 400 * 64 * 4 // 20


def _plain(name: str, peer: str, body: Callable[[Side], bodies.Body] = bodies.steady) -> Loop:
    """The engine that works with tensor operations, beside a peer that does so, too."""
    called = f"engine torch, {name}" + (", bert-base" if body is bodies.bert else "")
    ours: Call = (f"fusedstep.{name}", {"engine": "torch"})
    return Loop(called, body, 1, ours=ours, peer=(peer, {}), waits=True)


LOOPS = [
    Loop("steady", bodies.steady, 4),
    Loop("fresh gradients every step", bodies.fresh_gradients, 4),
    Loop("random half missing", bodies.random_half_missing, 2),
    Loop("one other missing every step", bodies.one_other_missing, 2),
    Loop("halves in turn", bodies.halves_in_turn),
    Loop("first gradients one by one", bodies.first_gradients_one_by_one, 1, ends=True),
    Loop("unfrozen one by one", bodies.unfrozen_one_by_one, ends=True),
    Loop("half frozen", bodies.half_frozen),
    Loop("scheduler, one group", bodies.scheduler_of_one_group, 3, _AND_SCHEDULER),
    Loop("scheduler, 400 groups", bodies.scheduler_of_groups, 3, _AND_SCHEDULER),
    Loop("scheduler of a tensor lr", bodies.scheduler_of_tensor_lr, None, _AND_SCHEDULER),
    Loop("400 groups, steady", bodies.of_groups),
    Loop("400 groups, lr set in all", bodies.lr_set_in_groups),
    Loop("lr, betas and weight decay set", bodies.several_options_set),
    Loop("tensor lr, changed in place", bodies.tensor_lr, 3),
    Loop("a step hook", bodies.step_hook, 4),
    Loop("a closure", bodies.closure),
    Loop("a Parameter subclass", bodies.parameter_subclass, 3),
    Loop("a Tensor subclass, __torch_function__", bodies.tensor_subclass),
    Loop("six dimensions", bodies.six_dimensions, 3),
    Loop("half of them bfloat16", bodies.several_dtypes),
    Loop("a group added every step", bodies.group_added, 0.5, "add_param_group(), step()", ends=True),
    Loop("a state loaded every step", bodies.state_loaded, 0.5, "load_state_dict(), step()"),
    Loop("a state saved every step", bodies.state_saved, None, "step(), state_dict()"),
    Loop("parameters moved every step", bodies.parameters_moved),
    Loop("a state replaced in every parameter", bodies.states_replaced),
    Loop("transposed gradients", bodies.transposed_gradients, peer=_NOT_FUSED),
    Loop("layout changes every step", bodies.layout_changes, peer=_NOT_FUSED),
    Loop("statistics every tenth step", bodies.statistics_each_tenth, ends=True),
    Loop("zero_grad every step", bodies.zero_grad_each_step, None, "step(), zero_grad()"),
    Loop("backward and step", partial(bodies.in_backward, bucket_bytes=None), None, _AND_BACKWARD),
    Loop(
        "released in 20 buckets",
        partial(bodies.in_backward, bucket_bytes=_BUCKET),
        None,
        _AND_BACKWARD,
    ),
    Loop("released one by one", partial(bodies.in_backward, bucket_bytes=0), None, _AND_BACKWARD),
    Loop("clipped", bodies.clipped, None, "clip_grad_norm_ or max_grad_norm, step()"),
    Loop("with a GradScaler", bodies.scaled, None, "scaler.step(), scaler.update()"),
    Loop("constructed every step", bodies.first_step, None, "constructor, first step()"),
    Loop("1 parameter", bodies.steady, 1, size=1),
    Loop("10 parameters", bodies.steady, 1, size=10),
    Loop("5,000 parameters", bodies.steady, 4, size=5000),
    Loop("400 DTensors", bodies.dtensors, 15),
    _plain("AdamW", "torch.optim.AdamW"),
    _plain("SGD", "torch.optim.SGD"),
    _plain("Lamb", "timm.optim.Lamb"),
    _plain("AdamW", "torch.optim.AdamW", bodies.bert),
    _plain("SGD", "torch.optim.SGD", bodies.bert),
]
