"""One parameter of the plan: what its rule needs, checked and allocated before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _shards, engines
from ._layout import dense_strides, empty_like, laid_like, lies_like
from ._passes import EMA, Besides, Rule
from ._shards import local


class Settings(NamedTuple):
    """What holds for everything an optimizer steps.

    Scalars are computed in `exact`: float64, so that bias corrections hold at any step. `counts` says whether
    a step is counted before it is taken. `others` are the ranks that step other parameters, which are clipped
    together with those here.
    """

    owner: str
    engine: str | None = None
    state_dtype: torch.dtype | None = None
    clip_scope: str = "global"
    exact: torch.dtype = torch.float64
    counts: bool = True
    besides: Besides = Besides()
    others: _shards.Ranks | None = None


class Known(NamedTuple):
    """What an optimizer remembers: the states it saves, step counts that are no part of them, and names of
    parameters, if it was given any.
    """

    state: dict[Tensor, dict[str, Any]]
    unsaved_steps: dict[Tensor, Tensor]
    names: dict[Tensor, str]


@dataclass(slots=True, eq=False)
class Entry:
    """A parameter with its states, the engine that steps it and how its roles are stored."""

    param: Tensor
    state: dict[str, Any]
    rule: Rule
    group: int
    engine: ModuleType
    # of parameter, gradient and states; a complex number is stored as two of these
    dtypes: tuple[torch.dtype, ...]
    # states that are new or had to move, not yet part of `state`
    fresh: dict[str, Tensor]
    # the count so far, and then this entry's view of the table's counts
    step: Any
    device: torch.device
    # of every role, where an engine works by address
    strides: tuple[int, ...] = ()
    # the gradient, where it is not the parameter's own
    given: Tensor | None = None
    # dense stand-ins for a parameter or gradient that does not lie so
    param_copy: Tensor | None = None
    grad_copy: Tensor | None = None
    # which of the table's counts `step` is a view of
    place: tuple | None = field(init=False)
    # entries with equal ones are clipped together
    segment: int = 0

    @property
    def grad(self) -> Tensor | None:
        return self.param.grad if self.given is None else self.given

    @property
    def here(self) -> dict[str, Any]:
        """Of parameter, gradient and states, by their letters, the parts that are here."""
        states = {letter: self.state.get(name) for letter, name in self.rule.states.items()}
        return {letter: local(t) for letter, t in {"p": self.param, "g": self.grad, **states}.items()}

    @property
    def bucket(self) -> tuple:
        """Entries with equal keys can share a launch."""
        return (self.rule.passes[-1].update.__name__, self.rule.roles, *map(str, self.dtypes), self.staged)

    @property
    def staged(self) -> bool:
        """Whether the update works on copies."""
        return self.param_copy is not None or self.grad_copy is not None

    def fits(self, grad: Tensor) -> bool:
        """Whether parameter, gradient and states are still stored as this entry was built for."""
        if self.rule.saves_step and self.state.get("step") is not self.step:
            return False
        if self._place_of_step() != self.place:
            return False
        if not _shards.lies_alike(self.param, grad):
            return False
        p, grad, *states = self.here.values()
        roles: tuple[Any, ...] = (p, grad, *states)
        if any(
            t is None or t.layout != torch.strided or t.device != self.device or t.shape != p.shape
            for t in roles
        ):
            return False
        if tuple(map(real_dtype, roles)) != self.dtypes or len({t.is_complex() for t in roles}) != 1:
            return False
        if not self.engine.BY_ADDRESS:
            return True
        return (
            all(map(engines.is_plain, roles))
            and dense_strides(p) == self.strides
            and lies_like(p, self.strides) == (self.param_copy is None)
            and lies_like(grad, self.strides) == (self.grad_copy is None)
            and all(lies_like(t, self.strides) for t in roles[2:])
        )

    def adopt(self, step: Tensor) -> None:
        """Count in this view of the table's counts from now on."""
        self.step = step
        self.place = self._place_of_step()

    def _place_of_step(self) -> tuple | None:
        """Where it counts, as the engine knows it; None if it is no longer a tensor with memory."""
        if self.step.layout != torch.strided:
            return None
        memory = self.step.untyped_storage()
        begin = memory.data_ptr() if self.engine.BY_ADDRESS else memory._cdata
        return begin, self.step.storage_offset(), self.step.dtype

    def addresses(self) -> list[int]:
        """Where the engine finds parameter, gradient and states."""
        p, g, *states = self.here.values()
        p = p if self.param_copy is None else self.param_copy
        g = g if self.grad_copy is None else self.grad_copy
        return [t.data_ptr() for t in (p, g, *states)]

    def commit(self, known: Known) -> None:
        """Make what was prepared part of what the optimizer remembers."""
        if self.rule.saves_step:
            self.state["step"] = self.step
        else:
            known.unsaved_steps[self.param] = self.step
        self.state.update(self.fresh)
        self.fresh = {}
        if self.state:
            known.state.setdefault(self.param, self.state)

    @torch.no_grad()
    def copy_in(self) -> None:
        if self.param_copy is not None:
            self.param_copy.copy_(local(self.param))
        if self.grad_copy is not None:
            self.grad_copy.copy_(local(self.grad))

    @torch.no_grad()
    def copy_out(self, besides: Besides) -> None:
        if self.param_copy is not None:
            local(self.param).copy_(self.param_copy)
        if besides.clears and self.grad_copy is not None:
            local(self.grad).zero_()
        if besides.unscales and self.grad_copy is not None:
            # autograd is not told, as by torch's fused optimizers
            local(self.grad).data.copy_(self.grad_copy)


def real_dtype(t: Tensor) -> torch.dtype:
    """The dtype of the real numbers in `t`."""
    return t.dtype.to_real() if t.is_complex() else t.dtype


def make_entry(
    p: Tensor, rule: Rule, group: int, known: Known, settings: Settings, given: Tensor | None = None
) -> Entry:
    """Check a parameter and its gradient, choose its engine, allocate what it lacks. Writes nothing."""
    g: Any = p.grad if given is None else given
    state = known.state.get(p, {})
    _check(p, g, settings.owner, settings.besides.norm_type)
    besides = settings.besides
    if rule.inputs or besides.measures or besides.reports:
        _shards.check_sums(p, settings.owner, joined=besides.measures)
    whole, p, g = p, local(p), local(g)
    names = tuple(rule.states.values())
    if rule.saves_step and state and not any(name in state for name in names):
        raise RuntimeError(
            f"{settings.owner} found state {sorted(state)} for a parameter, but keeps {names}: "
            "it seems to come from another optimizer; load a checkpoint of this one, or clear the state"
        )
    old = [local(state[name]) for name in names if isinstance(state.get(name), Tensor)]
    engine = engines.choose((p, g, *old), settings.engine)
    strides = dense_strides(p) if engine.BY_ADDRESS else ()
    stepped = state.get("step", 0.0) if rule.saves_step else known.unsaved_steps.get(whole, 1.0)
    states, fresh = [], {}
    for name in names:
        found = state.get(name)
        if found is None:
            # an average that comes in the middle of training does not start it over
            stepped = stepped if rule.saves_step or name == EMA else 0.0
            tensor = _new_state(p, strides, state_dtype_for(p, name, settings.state_dtype), engine)
            if name == EMA:
                tensor.copy_(p)
        else:
            _check_state(found, whole, name, known.names.get(whole))
            tensor = _adopted(local(found), p, strides, engine)
        states.append(tensor)
        if tensor is not local(found):
            fresh[name] = _shards.like(tensor, whole)
    dtypes = tuple(map(real_dtype, (p, g, *states)))
    entry = Entry(
        param=whole,
        state=state,
        rule=rule.for_dtypes(dtypes),
        group=group,
        engine=engine,
        dtypes=dtypes,
        fresh=fresh,
        step=stepped,
        device=p.device,
        strides=strides,
        given=given,
    )
    if engine.BY_ADDRESS:
        if not lies_like(p, strides):
            entry.param_copy = empty_like(p, strides)
        if not lies_like(g, strides):
            entry.grad_copy = empty_like(g, strides)
    return entry


def _check(p: Tensor, g: Tensor, owner: str, norm_type: float) -> None:
    if g.layout != torch.strided:
        raise RuntimeError(
            f"{owner} does not support sparse gradients, please consider SparseAdam instead, "
            "or build the embedding with sparse=False"
        )
    for t, what in ((p, "parameter"), (g, "gradient")):
        if not (t.is_floating_point() or t.is_complex()):
            raise TypeError(f"{owner} needs floating-point tensors, but a {what} is {t.dtype}; convert it")
    if p.shape != g.shape or p.is_complex() != g.is_complex():
        raise RuntimeError(
            f"{owner} found a gradient of shape {tuple(g.shape)} and {g.dtype} for a parameter of shape "
            f"{tuple(p.shape)} and {p.dtype}; call zero_grad() after changing a parameter"
        )
    if p.is_complex() and norm_type != 2:
        raise RuntimeError(f"{owner} measures complex gradients by norm_type=2 only, but it is {norm_type}")
    if any(stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True)):
        raise RuntimeError(f"{owner} cannot update an expanded parameter in place; use p.contiguous()")
    _shards.check(p, g, owner)


def state_dtype_for(p: Tensor, name: str, chosen: torch.dtype | None) -> torch.dtype:
    """The dtype of a parameter's state: the chosen one, or its own."""
    if name == EMA:
        # sixteen bits would lose what a step adds to it
        return torch.promote_types(p.dtype, torch.float32)
    if chosen is None or not p.is_complex():
        return p.dtype if chosen is None else chosen
    if chosen == torch.bfloat16:
        raise ValueError("there is no complex bfloat16; use state_dtype=torch.float32 for complex parameters")
    return chosen.to_complex()


def _new_state(p: Tensor, strides: tuple, dtype: torch.dtype, engine: ModuleType) -> Tensor:
    if not engine.BY_ADDRESS:
        return torch.zeros_like(p, dtype=dtype, requires_grad=False)
    return empty_like(p, strides, dtype).zero_()


def _check_state(found: Tensor, p: Tensor, name: str, of: str | None) -> None:
    owner = "its parameter" if of is None else f"its parameter {of!r}"
    if found.shape != p.shape or found.is_complex() != p.is_complex():
        raise RuntimeError(
            f"state {name!r} has shape {tuple(found.shape)} and {found.dtype}, {owner} "
            f"{tuple(p.shape)} and {p.dtype}; load a matching checkpoint or delete optimizer.state[p]"
        )
    if not (found.is_floating_point() or found.is_complex()):
        raise TypeError(
            f"state {name!r} of {owner.removeprefix('its ')} is {found.dtype}, not floating-point; load a "
            "matching checkpoint"
        )
    if not _shards.lies_alike(found, p):
        raise RuntimeError(
            f"state {name!r} is not distributed as {owner} is; load the checkpoint with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )


def _adopted(found: Tensor, p: Tensor, strides: tuple, engine: ModuleType) -> Tensor:
    """A state that exists, on the parameter's device and laid out like it."""
    found = found if found.device == p.device else found.to(p.device)
    return laid_like(found, strides) if engine.BY_ADDRESS else found
