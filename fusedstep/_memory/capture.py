"""Checks after a CUDA graph has captured a step: a replay uses the addresses of the capture."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from torch import Tensor

from .._engines import is_capturing
from .._engines.objects import same
from .shards import local

if TYPE_CHECKING:
    from .._algorithm.step import StepSpec
    from .._engines import Amp
    from .options import Options
    from .plan import Plan
    from .settings import Settings


_WHAT_TO_DO = (
    "a replay would use the old one. Keep gradients where they are (zero_grad(set_to_none=False), "
    "or step(zero_grad=True, set_to_none=False)), or call optimizer.release_graph() and capture anew"
)


def check_capturable(options: Options, settings: Settings) -> None:
    """Raise if a replay would not do what a step does."""
    if options.has_host_tensors:
        raise RuntimeError(
            "an option of a group is a tensor on the CPU, which a CUDA graph would not read again; use a "
            "number, or a tensor on the device"
        )
    ranks = settings.norm_ranks
    if ranks is not None and ranks.device.type == "cpu":
        raise RuntimeError(
            "the ranks of norm_group talk on the host, which a CUDA graph does not replay; use a group that "
            "talks on the device, such as torch.distributed.new_group(backend='nccl')"
        )


class Capture:
    """A plan that a graph relies on: it keeps alive what the graph reads, and notices gradients that move."""

    def __init__(self, plan: Plan, amp: Amp) -> None:
        self.plan = plan
        self._cells = [table.host_cells.copy() for table in plan.tables]
        rows = [row for table in plan.tables for row in table.rows if row.started]
        # detached tensors hold the memory, which must not be given to others
        self._kept = amp, [[t.detach() for t in row.local_tensors() if t is not None] for row in rows]
        self._of_stages = _states_of_stages(plan)
        self._hooks = [
            p.register_post_accumulate_grad_hook(_watching(weakref.ref(self), local(p.grad).data_ptr()))
            for p in (row.param for row in rows)
            if p.grad is not None and p.requires_grad
        ]

    def check(self, optimizer: Any, spec: StepSpec) -> None:
        """Raise if a step would not do what the captured step does."""
        if spec != self.plan.spec:
            raise RuntimeError(
                "a CUDA graph has captured step() with another zero_grad, skip_nonfinite, statistics or "
                "GradScaler; call optimizer.release_graph() first, and do not replay the graph any more"
            )
        cells = [table.host_cells for table in self.plan.tables]
        is_there = self.plan.refresh(optimizer, spec) and same(_states_of_stages(self.plan), self._of_stages)
        if not is_there or not all(map(np.array_equal, cells, self._cells)):
            raise RuntimeError(
                "a CUDA graph has captured step(), and a parameter, gradient or state has moved since then; "
                + _WHAT_TO_DO
            )

    def refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"a CUDA graph has captured step(), and {what}() would change what it reads and writes; "
            "call optimizer.release_graph() first, and capture anew afterwards"
        )

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _states_of_stages(plan: Plan) -> list[Tensor]:
    """What stages keep, which no table has addresses of."""
    rows = (row for table in plan.tables if table.stages is not None for row in table.rows if row.started)
    return [row.state[name] for row in rows for name in row.stage_states]


def _watching(capture: weakref.ref, address: int) -> Callable[[Tensor], None]:
    """A hook that raises if the gradient is not at this address, as long as the capture exists."""

    def watch(p: Tensor) -> None:
        moved = p.grad is not None and local(p.grad).data_ptr() != address
        if moved and capture() is not None and not is_capturing():
            raise RuntimeError(
                f"a CUDA graph has captured step(), and the gradient of a parameter of shape {tuple(p.shape)} "
                f"has another address now; {_WHAT_TO_DO}"
            )

    return watch


def _notifying(name: str) -> Callable:
    """A method of dict that calls `changed` after a change, and undoes the change if that raises."""
    method = getattr(dict, name)

    def change(self: Group, *args: Any, **kwargs: Any) -> Any:
        before = dict(self)
        result = method(self, *args, **kwargs)
        changed = self.changed()
        try:
            if changed is not None:
                changed(self.place)
        except Exception:
            dict.clear(self)
            dict.update(self, before)
            raise
        return result

    # not functools.wraps: doctest of Python 3.12 expects the wrapped object to be a function
    change.__name__, change.__doc__ = name, method.__doc__
    return change


class Group(dict):
    """A group of an optimizer that calls `changed` when an option is set."""

    def __init__(self, group: dict[str, Any], place: int, changed: weakref.WeakMethod) -> None:
        super().__init__(group)
        # weak, so that an optimizer is freed when it is dropped: the garbage collector may free its pinned
        # memory in the middle of another capture, which CUDA does not allow
        self.place, self.changed = place, changed

    __setitem__, __delitem__, __ior__ = map(_notifying, ("__setitem__", "__delitem__", "__ior__"))
    update, setdefault, pop = map(_notifying, ("update", "setdefault", "pop"))
    popitem, clear = map(_notifying, ("popitem", "clear"))

    def __reduce__(self) -> tuple:
        # a copy belongs to no graph
        return dict, (dict(self),)
