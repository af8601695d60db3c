"""One parameter of a plan: what its program needs, checked and allocated before anything is written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _engines
from .._algorithm.formats import Format, Plane
from .._algorithm.program import EMA, ONLY_UPDATE, Program, Rule, StepSpec, compile_step
from .._algorithm.step import GRAD, PARAM
from .._engines.foreach.placed import decode
from . import shards, watch
from .layout import dense_strides, empty_like, laid_like, lies_like, real_numel, row_strides
from .shards import local
from .stage_slots import shapes_of_states, stage_formats, stage_states
from .storage import (
    AS_PARAMETER,
    Storage,
    found_format,
    found_master,
    param_format,
    plain_format,
    plane_shape,
    state_format,
)


class Settings(NamedTuple):
    """What holds for everything an optimizer steps.

    Scalars are computed in `exact`: float64, so that bias corrections hold at any step. `counts` says whether
    a step is counted before it is taken. `norm_ranks` are the ranks that step other parameters, which are
    clipped together with those here.
    """

    owner: str
    engine: str | None = None
    clip_scope: str = "global"
    exact: torch.dtype = torch.float64
    counts: bool = True
    spec: StepSpec = ONLY_UPDATE
    norm_ranks: shards.Ranks | None = None
    # of random bits
    seed: int = 0
    # for what stages work on, and allocate
    workspace_bytes: int = 0
    # that have the same parameters, and divide what stages do
    replicas: shards.Ranks | None = None


class Memory(NamedTuple):
    """What an optimizer remembers: the states it saves, step counts that are no part of them, and names of
    parameters, if it was given any.
    """

    state: dict[Tensor, dict[str, Any]]
    unsaved_steps: dict[Tensor, Tensor]
    names: Mapping[Tensor, str] = MappingProxyType({})


class Update(NamedTuple):
    """What is done to the parameters of a group: a rule, whether they are averaged, and how all is stored."""

    rule: Rule
    averages: bool = False
    storage: Storage = AS_PARAMETER


@dataclass(slots=True, eq=False)
class Row:
    """A parameter with its states, and the program and engine that step it."""

    param: Tensor
    group: int
    update: Update
    program: Program
    # of the slots of the program
    formats: tuple[Format, ...]
    engine: Any
    device: torch.device
    numel: int
    state: dict[str, Any]
    # what is kept once for it, by name: the count so far, and the rule's scalars. Once the row is in a table,
    # the tensors that are written there
    once: dict[str, Any]
    # of all planes, where an engine works by address
    strides: tuple[int, ...] = ()
    # among the optimizer's parameters, and of the first element here in the whole tensor: for random bits
    position: int = 0
    # which turn it takes in a workspace
    turn: int = 0
    first_index: int = 0
    # states that are new or had to move, not yet part of `state`
    fresh: dict[str, Tensor] = field(default_factory=dict)
    # False until the first gradient: what its gradient and states will be is only expected
    started: bool = True
    # the gradient, where it is not the parameter's own
    explicit_grad: Tensor | None = None
    # dense stand-ins for a parameter or gradient that does not lie so
    param_copy: Tensor | None = None
    grad_copy: Tensor | None = None
    # of every plane, whether a tensor is of the kind the row was made for; none until the row is committed
    checks: list[Any] = field(default_factory=list)

    @property
    def grad(self) -> Any:
        return self.param.grad if self.explicit_grad is None else self.explicit_grad

    @property
    def staged(self) -> bool:
        """Whether the update works on copies."""
        return self.param_copy is not None or self.grad_copy is not None

    @property
    def stage_states(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what stages keep in its state, by name."""
        return shapes_of_states((staged.stage for staged in self.program.stages), self.param)

    @property
    def table_key(self) -> tuple:
        """Rows with equal ones are in one table."""
        return self.engine.NAME, str(self.device), self.turn

    def fits_in_place_of(self, other: Row) -> bool:
        """Whether it can be stepped where the other is. Equal programs are one object."""
        same = self.program is other.program and self.table_key == other.table_key
        return same and self.numel == other.numel

    def is_right(self) -> bool:
        """Whether its tensors are of the kinds it was made for, and nothing that its rule keeps is lost."""
        kept = zip((self.param, *self._states()), (self.checks[PARAM], *self.checks[GRAD + 1 :]), strict=True)
        is_complete = all(name in self.state for name in self.program.scalars) and all(
            getattr(self.state.get(name), "shape", None) == shape for name, shape in self.stage_states.items()
        )
        return is_complete and all(self._is_like(t, check) for t, check in kept) and self.takes(self.grad)

    def takes(self, grad: Any) -> bool:
        """Whether there is no gradient, or one of the kind it was made for."""
        return grad is None or self._is_like(grad, self.checks[GRAD])

    def adapt(self, settings: Settings) -> bool:
        """Go on with a gradient of another kind; False if it is stored otherwise, which needs another row."""
        _check(self.param, self.grad, settings)
        g = local(self.grad)
        is_other = plain_format(g).dtype != self.program.planes[GRAD].dtype
        if is_other or (self.engine.BY_ADDRESS and not _engines.is_plain(g)):
            return False
        if self.engine.BY_ADDRESS:
            self.grad_copy = _stand_in(g, self.strides)
        self.checks[GRAD] = watch.check_of(g)
        return True

    def _is_like(self, whole: Any, check: Callable[[Tensor], bool]) -> bool:
        if not isinstance(whole, Tensor):
            return False
        if shards.is_distributed(self.param) or shards.is_distributed(whole):
            return shards.lies_alike(whole, self.param) and check(local(whole))
        return check(whole)

    def _states(self) -> list[Any]:
        return [self.state.get(plane.name) for plane in self.program.state_planes]

    def tensors(self) -> list[Any]:
        """Parameter, gradient and states, in the order of the planes."""
        return [self.param, self.grad, *self._states()]

    def local_tensors(self) -> list[Any]:
        """The parts of them that are here."""
        return [*map(local, self.tensors())]

    def commit(self, memory: Memory) -> None:
        """Make what was prepared part of what the optimizer remembers, and note the kinds of its tensors."""
        self.keep_once()
        if not self.program.saves_step:
            memory.unsaved_steps[self.param] = self.once["step"]
        self.state.update(self.fresh)
        self.fresh = {}
        for name in _MASTERS - {plane.name for plane in self.program.state_planes}:
            # of a parameter that was of another dtype
            self.state.pop(name, None)
        if self.state:
            memory.state.setdefault(self.param, self.state)
        if not self.checks:
            self.checks = [watch.check_of(part) for part in self.local_tensors()]

    def keep_once(self) -> None:
        """Have the state hold what is kept once."""
        self.state.update({name: self.once[name] for name in self.program.kept_once})

    @torch.no_grad()
    def copy_in(self) -> None:
        if self.param_copy is not None:
            self.param_copy.copy_(local(self.param))
        if self.grad_copy is not None:
            self.grad_copy.copy_(local(self.grad))

    @torch.no_grad()
    def copy_out(self, spec: StepSpec) -> None:
        if self.param_copy is not None:
            local(self.param).copy_(self.param_copy)
        if spec.zero_grads and self.grad_copy is not None:
            local(self.grad).zero_()
        if spec.unscale_grads and self.grad_copy is not None:
            # autograd is not told, as by torch's fused optimizers
            local(self.grad).data.copy_(self.grad_copy)


def make_row(
    p: Tensor, update: Update, group: int, memory: Memory, settings: Settings, grad: Tensor | None = None
) -> Row:
    """Check a parameter and its gradient, choose its engine, allocate what it lacks. Writes nothing.

    Without a gradient nothing is allocated, and the row is what it will be if that is stored as the parameter.
    """
    found: Any = p.grad if grad is None else grad
    started = found is not None
    if started:
        _check(p, found, settings)
        check_sums(p, update.rule, settings)
    whole, p, g = p, local(p), local(found) if started else local(p)
    state, rule, storage = memory.state.get(whole, {}), update.rule, update.storage
    names = [name for _, name in rule.states] + [EMA] * update.averages
    there = {name: found_format(name, state, storage.draws) for name in names}
    known = (*names, *rule.scalars)
    if rule.saves_step and state and known and not any(there.values()) and not {*rule.scalars} & state.keys():
        raise RuntimeError(
            f"{settings.owner} found state {sorted(state)} for a parameter, but keeps {known}: "
            "it seems to come from another optimizer; load a checkpoint of this one, or clear the state"
        )
    lost = [name for name in rule.scalars if name not in state]
    if lost and any(there.values()):
        raise RuntimeError(
            f"{settings.owner} found state {sorted(state)} for a parameter without {lost}, which goes on from "
            "step to step; load a checkpoint of this optimizer, or clear the state"
        )
    param = found_master(p, state) or param_format(whole, storage, settings.owner)
    states = [there[name] or state_format(whole, rule, name, storage) for name in names]
    formats = (param, plain_format(g), *states)
    formats += stage_formats(whole, rule, formats, settings.owner)
    program = program_of(update, settings.spec, formats)
    kept = [state[plane.name] for plane in program.state_planes if plane.name in state]
    old = [local(t) for t in kept if isinstance(t, Tensor) and t.dtype.is_floating_point]
    engine = _engines.choose((p, g, *old), settings.engine)
    by_rows = program.is_row_major or bool(program.stages)
    strides = () if not engine.BY_ADDRESS else row_strides(p) if by_rows else dense_strides(p)
    # an average that comes in the middle of training does not start it over
    is_new = any(there[name] is None for name in names if name != EMA) or not {*rule.scalars} <= state.keys()
    # of one that keeps nothing, nobody knows
    first = 0.0 if is_new or not known else 1.0
    if program.saves_step:
        # states without one come from where it need not be saved
        step = state.get("step", 0.0 if rule.saves_step else first)
    else:
        step = 0.0 if is_new else memory.unsaved_steps.get(whole, first)
    fresh = {}
    for plane in program.state_planes if started else ():
        saved = state.get(plane.name)
        if saved is not None:
            _check_state(saved, whole, plane, memory.names.get(whole))
        # an average begins with the master, where there is one
        start = p
        if plane.name == EMA and saved is None and len(param.planes("")) > 1:
            parts = [local(state.get(each.name)) for each in param.planes("param")[1:]]
            start = p if any(part is None for part in parts) else decode(param, [p, *parts])
        tensor = _made(plane, p, whole, strides, engine, local(saved), start)
        if tensor is not local(saved):
            shape = None if plane.block == 1 else plane_shape(plane, whole, whole)
            fresh[plane.name] = shards.like(tensor, whole, shape)
    fresh |= stage_states(whole, rule, state, settings.owner) if started else {}
    row = Row(
        param=whole,
        group=group,
        update=update,
        program=program,
        formats=formats,
        engine=engine,
        device=p.device,
        numel=real_numel(p) if engine.BY_ADDRESS else 0,
        state=state,
        once={"step": step, **{name: state.get(name, 0.0) for name in rule.scalars}},
        strides=strides,
        first_index=shards.first_index(whole, settings.owner) if program.draws else 0,
        fresh=fresh,
        started=started,
        explicit_grad=grad,
    )
    if engine.BY_ADDRESS and started:
        row.param_copy, row.grad_copy = _stand_in(p, strides), _stand_in(g, strides)
    return row


def check_sums(p: Tensor, rule: Rule, settings: Settings) -> None:
    """Raise where a step needs sums over a tensor that this rank cannot have."""
    if settings.spec.needs_sums or rule.needs_sums:
        joined = settings.spec.measures_first or rule.sums_over_all
        shards.check_sums(p, settings.owner, joined)


def _stand_in(t: Tensor, strides: tuple[int, ...]) -> Tensor | None:
    """Dense memory for a tensor that does not lie so."""
    return None if lies_like(t, strides) else empty_like(t, strides)


@functools.cache
def program_of(update: Update, spec: StepSpec, formats: tuple[Format, ...]) -> Program:
    # what is rounded by the step depends on it
    saves_step = update.rule.saves_step or any(format.rounds_by_step for format in formats)
    return compile_step(update.rule._replace(saves_step=saves_step), spec, update.averages, formats)


def _check(p: Tensor, g: Tensor, settings: Settings) -> None:
    owner, spec = settings.owner, settings.spec
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
    if p.is_complex() and spec.norm_type != 2:
        raise RuntimeError(
            f"{owner} measures complex gradients by norm_type=2 only, but it is {spec.norm_type}"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True)):
        raise RuntimeError(f"{owner} cannot update an expanded parameter in place; use p.contiguous()")
    shards.check(p, g, owner)


# states that begin as a copy of their parameter; others begin with zeros
_COPIES = (EMA, "master")
_MASTERS = {"master", "master_rest"}


def _made(
    plane: Plane, p: Tensor, whole: Tensor, strides: tuple, engine: Any, found: Any, start: Tensor
) -> Tensor:
    """A plane of the part `p` that is here: the one that was found, on the right device and laid out as it
    should be, or a new one, which may begin as `start`.
    """
    shape = plane_shape(plane, whole, p)
    if found is not None:
        found = found if found.device == p.device else found.to(p.device)
        if plane.block > 1:
            return found.contiguous()
        return laid_like(found, strides) if engine.BY_ADDRESS else found
    dtype = plane.dtype.to_complex() if p.is_complex() else plane.dtype
    if plane.block > 1:
        return torch.zeros(shape, dtype=dtype, device=p.device)
    if engine.BY_ADDRESS:
        tensor = empty_like(p, strides, dtype)
    else:
        tensor = torch.empty_like(p, dtype=dtype, requires_grad=False)
    return tensor.copy_(start) if plane.name in _COPIES else tensor.zero_()


def _check_state(found: Any, p: Tensor, plane: Plane, param_name: str | None) -> None:
    name = plane.name
    if not isinstance(found, Tensor):
        raise TypeError(f"state {name!r} is a {type(found).__name__}, not a tensor; load a matching checkpoint")
    owner = "its parameter" if param_name is None else f"its parameter {param_name!r}"
    if found.shape != plane_shape(plane, p, p) or found.is_complex() != p.is_complex():
        raise RuntimeError(
            f"state {name!r} has shape {tuple(found.shape)} and {found.dtype}, {owner} "
            f"{tuple(p.shape)} and {p.dtype}; load a matching checkpoint or delete optimizer.state[p]"
        )
    if found.dtype != plane.dtype and not (found.is_floating_point() or found.is_complex()):
        raise TypeError(
            f"state {name!r} of {owner.removeprefix('its ')} is {found.dtype}, not floating-point; load a "
            "matching checkpoint"
        )
    if not shards.lies_alike(found, p):
        raise RuntimeError(
            f"state {name!r} is not distributed as {owner} is; load the checkpoint with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
