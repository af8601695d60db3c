"""Gradients that are stepped as backward makes them: how that is done.

Parameters whose gradients are ready wait until these are as many bytes as a bucket, and are stepped together.
Those that waited together the first time are a part from then on, which has a plan of its own: as long as
gradients come in the same order, a bucket is a part, one launch, and none of the host's time goes to the rest
of the model. In another order parts are stepped piece by piece: slower, and the same.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._algorithm.program import StepSpec
from .._engines import Amp, is_capturing, is_traced
from .._memory.counts import is_shared
from .._memory.part import Part
from .._memory.shards import local, size_here
from .compiling import outside_of_graphs
from .refusals import check_released


@dataclass(slots=True, eq=False)
class _Member:
    """A parameter, with what is known of it."""

    param: Tensor
    # numbers that its gradient has here
    size: int
    part: Part | None = None
    # whether its gradient has come since the last step
    came: bool = False


@dataclass(slots=True)
class _Waiting:
    """Parameters whose gradients are ready, and the bytes of these."""

    members: list[_Member] = field(default_factory=list)
    bytes: int = 0


class Release:
    """What an optimizer has while gradients are released. Hooks of parameters know it, weakly."""

    def __init__(self, optimizer: Any, bucket_bytes: int) -> None:
        self._optimizer, self._bucket_bytes = weakref.ref(optimizer), bucket_bytes
        # autograd has a thread for each device, and a part is of one device
        self._lock = threading.Lock()
        self._members: dict[Tensor, _Member] = {}
        # how many of them every group has: a part knows its groups by their places
        self._sizes: list[int] = []
        self._hooks: dict[Tensor, Any] = {}
        # frozen parameters cannot have one
        self._without_hook: list[Tensor] = []
        # what the optimizer remembered at the end of the last step
        self._states: dict[Tensor, Any] = {}
        # whether a gradient has come since the last step, and which are not yet stepped, by device
        self._is_under_way = False
        self._waiting: dict[torch.device, _Waiting] = {}
        # where the last work on a device was launched
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.follow()

    # asked by the optimizer

    def follow(self) -> None:
        """Have a hook for every parameter that the optimizer has now, and notice who asks for groups."""
        optimizer: Any = self._optimizer()
        params, sizes = optimizer.all_params, [len(group["params"]) for group in optimizer.param_groups]
        if sizes != self._sizes or not all(map(is_, params, self._members)):
            self._sizes = sizes
            self._dissolve(self.parts)
            before = self._members
            self._members = {p: before.get(p) or _Member(p, size_here(p)) for p in params}
            self._without_hook = [p for p in self._members if p not in self._hooks]
        if self._without_hook:
            hook = _hook_of(weakref.ref(self))
            for p in [p for p in self._without_hook if p.requires_grad]:
                self._hooks[p] = p.register_post_accumulate_grad_hook(hook)
            self._without_hook = [p for p in self._without_hook if p not in self._hooks]
        if type(optimizer.param_groups) is not _Groups:
            optimizer.param_groups = _Groups(optimizer.param_groups)

    def finish(self, spec: StepSpec, amp: Amp) -> None:
        """Step what is left, as the end of a step."""
        if amp.scale is not None or amp.found_inf is not None:
            self.refuse_scaler()
        if spec.zero_grads:
            self.refuse_zeros("step(zero_grad=True, set_to_none=False)", "step()")
        with self._lock:
            optimizer = self._checked()
            by_device: dict[torch.device, list[_Member]] = {}
            for p, member in self._members.items():
                if p.grad is not None:
                    by_device.setdefault(p.device, []).append(member)
            for device, members in by_device.items():
                if device.type == "cuda":
                    self._join_streams(device)
                self._step(optimizer, members)
            self._begin_anew()
            self._states = {**optimizer.state}
            if len(self._hooks) + len(self._without_hook) > len(self._members):
                self._drop_hooks(self._hooks.keys() - self._members.keys())

    def begin_anew(self) -> None:
        """Expect a gradient of every parameter; what has been stepped stays so."""
        with self._lock:
            self._begin_anew()

    def forget_states(self) -> None:
        """Keep none alive that is about to be replaced."""
        self._states = {}
        for part in self.parts:
            part.forget_states()

    def remove(self) -> None:
        """Let gradients stay, as if nothing had been. Those that wait are there for the next step."""
        with self._lock:
            self._drop_hooks([*self._hooks])
            self._dissolve(self.parts)
            for kept in (self._members, self._waiting, self._streams, self._states):
                kept.clear()  # type: ignore[attr-defined]
            optimizer = self._optimizer()
            if optimizer is not None and optimizer._release is self:
                optimizer._release, optimizer.param_groups = None, [*optimizer.param_groups]

    @staticmethod
    def refuse_zeros(call: str, instead: str) -> NoReturn:
        raise RuntimeError(
            f"{call} would leave gradients of zero, which are stepped, and released gradients are dropped; use "
            f"{instead}, or remove() what release_gradients() returned"
        )

    @staticmethod
    def refuse_scaler() -> NoReturn:
        raise RuntimeError(
            "a GradScaler, or a trainer that clips, came after release_gradients(): gradients were stepped in "
            "backward, while they were still scaled, and not clipped. Use bfloat16, which needs no scaler, and "
            "leave out clipping, or remove() what release_gradients() returned"
        )

    # asked by autograd

    def take(self, p: Tensor) -> None:
        """A gradient is there."""
        with self._lock:
            optimizer, grad = self._optimizer(), p.grad
            if optimizer is None or grad is None:
                return
            if not self._is_under_way:
                self._checked()
                self._is_under_way = True
            member = self._members.get(p)
            if member is None:
                # it has left its group; its hook stays until the end of the step
                return
            if member.came:
                self._refuse_second(p)
            member.came = True
            if member.part is not None and not member.part.waited:
                self._dissolve([member.part])
            device = grad.device
            if device.type == "cuda":
                self._join_streams(device)
            waiting = self._waiting.get(device)
            if waiting is None:
                waiting = self._waiting[device] = _Waiting()
            waiting.members.append(member)
            waiting.bytes += member.size * grad.itemsize
            if waiting.bytes >= self._bucket_bytes:
                del self._waiting[device]
                self._step(optimizer, waiting.members)

    @staticmethod
    def _refuse_second(p: Tensor) -> NoReturn:
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} has a second gradient since the last step(), and the first "
            "may be gone: with release_gradients() nothing can be accumulated. Call optimizer.step() after "
            "every backward(), or optimizer.zero_grad() after one that failed; if there was only one, it "
            "shares the parameter among parts that checkpoint() runs with use_reentrant=True: use False"
        )

    # within the lock

    def _checked(self) -> Any:
        """The optimizer, if gradients can still be released."""
        optimizer = self._optimizer()
        assert optimizer is not None, "an optimizer that is gone is stepped"
        optimizer._refuse_averages("backward")
        check_released(optimizer)
        if is_capturing() or is_traced():
            raise RuntimeError(
                "a backward() with release_gradients() is captured in a CUDA graph or traced, which would not "
                "see that its gradients are dropped; remove() what release_gradients() returned"
            )
        self.follow()
        self._part_counts(optimizer)
        return optimizer

    def _part_counts(self, optimizer: Any) -> None:
        """Give states that a parameter has got since the last step counts of their own: those of another part
        would go on before this one is stepped.
        """
        states = optimizer.state
        if len(states) == len(self._states) and all(map(is_, states.values(), self._states.values())):
            return
        names = {"step", *(name for rule in optimizer.rules for name in rule.scalars)}
        for state in [state for p, state in states.items() if state is not self._states.get(p)]:
            for name in names & state.keys():
                if isinstance(state[name], Tensor) and not is_shared(state[name]):
                    state[name] = state[name].clone()

    def _step(self, optimizer: Any, members: list[_Member]) -> None:
        """Step these, which are on one device, and drop their gradients."""
        in_backward = all(member.came for member in members)
        if in_backward:
            self._join_parts(members)
        new = [member for member in members if member.part is None]
        if new:
            # gradients that were set by hand, and not in backward, say nothing of who will wait with whom
            part = Part(optimizer, [member.param for member in new], in_backward)
            for member in new:
                member.part = part
        by_part: dict[Any, list[Tensor]] = {}
        for member in members:
            by_part.setdefault(member.part, []).append(member.param)
        for part in by_part:
            check_released(optimizer, part.groups_of(optimizer))
        spec = StepSpec(norm_type=optimizer.norm_type)
        stream = self._streams.get(members[0].param.device)
        for part, ready in by_part.items():
            with _without_grads(part.params, ready):
                optimizer._status = part.step(optimizer, spec, optimizer._status)
            for p in ready:
                if stream is not None and p.grad is not None:
                    # it may be another stream's memory, such as FSDP2's
                    local(p.grad).record_stream(stream)
                p.grad = None

    def _join_parts(self, members: list[_Member]) -> None:
        """Have parts that wait together in whole be one, as those of layers that were thawed one by one."""
        ready = Counter(member.part for member in members)
        whole = [part for part, count in ready.items() if part is not None and count == len(part.params)]
        if len(whole) > 1 or (whole and None in ready):
            self._dissolve(whole)

    def _join_streams(self, device: torch.device) -> None:
        """Have what is launched now come after all that was launched for this GPU before."""
        last, now = self._streams.get(device), torch.cuda.current_stream(device)
        if last is not None and last != now:
            now.wait_stream(last)
        self._streams[device] = now

    def _begin_anew(self) -> None:
        self._is_under_way = False
        self._waiting.clear()
        for member in self._members.values():
            member.came = False

    @property
    def parts(self) -> list[Part]:
        found = (member.part for member in self._members.values())
        return [*dict.fromkeys(part for part in found if part is not None)]

    def _dissolve(self, parts: Iterable[Part]) -> None:
        """Have their members wait with whomever they come with."""
        for part in parts:
            part.close()
            for p in part.params:
                self._members[p].part = None

    def _drop_hooks(self, params: Iterable[Tensor]) -> None:
        for p in params:
            self._hooks.pop(p).remove()


def _hook_of(release: weakref.ref[Release]) -> Callable[[Tensor], None]:
    """What autograd calls with a parameter when its gradient is there."""

    @outside_of_graphs
    def take(p: Tensor) -> None:
        found = release()
        if found is not None:
            found.take(p)

    return take


class _without_grads:
    """Within this context only those that are ready have gradients: those of others are not complete yet."""

    def __init__(self, params: list[Tensor], ready: list[Tensor]) -> None:
        others = set(params).difference(ready) if len(params) > len(ready) else ()
        self._hidden = [(p, p.grad) for p in others if p.grad is not None]

    def __enter__(self) -> None:
        for p, _ in self._hidden:
            p.grad = None

    def __exit__(self, *_: object) -> None:
        for p, grad in self._hidden:
            p.grad = grad


class _Groups(list):
    """The groups of an optimizer, which notice torch's `GradScaler.unscale_`: it asks for nothing else."""

    def __iter__(self) -> Iterator[Any]:
        # a test with torch's scaler tells if that is called otherwise one day. The frame that is here is not
        # kept: it would hold itself, and all that its callers hold
        caller = getattr(inspect.currentframe(), "f_back", None)
        if caller is not None and caller.f_code.co_name == "_unscale_grads_":
            Release.refuse_scaler()
        return super().__iter__()

    def __reduce__(self) -> tuple:
        # a copy is not released
        return list, ([*self],)
