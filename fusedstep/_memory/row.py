"""One parameter of a plan: what its program needs, checked and allocated before anything is written."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _engines
from .._algorithm.formats import Format
from .._algorithm.program import EMA, ONLY_UPDATE, Program, Rule, StepSpec, compile_step
from .._algorithm.step import GRAD, PARAM
from .._engines.foreach.placed import decode
from . import shards, watch
from .layout import dense_strides, laid_like, lies_like, overlaps_itself, real_numel, row_strides
from .offload import Home, home_of
from .ranks import Ranks
from .shards import local
from .stage_slots import shapes_of_states, stage_formats, stage_states
from .state_planes import MASTER_PLANES, check_state, made
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
    norm_ranks: Ranks | None = None
    # of random bits
    seed: int = 0
    # for what stages work on, and allocate
    workspace_bytes: int = 0
    # that have the same parameters, and divide what stages do
    replicas: Ranks | None = None
    # whether parameters are stepped on the host, wherever they are
    offload: bool = False


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
    home: Home
    # where the parameter is, as long as the row is right
    place: torch.device
    numel: int
    state: dict[str, Any]
    # what is kept once for it, by name: the count so far, and the rule's scalars. Once the row is in a table,
    # the tensors that are written there
    once: dict[str, Any]
    # what these tensors must be
    once_kinds: dict[str, watch.Kind] = field(default_factory=dict)
    # of all planes, where an engine works by address, and of stand-ins
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
    # dense stand-ins for a parameter or gradient that does not lie so, or is elsewhere
    param_copy: Tensor | None = None
    grad_copy: Tensor | None = None
    # of every plane, what a tensor must be; none until the row is committed
    kinds: list[watch.Kind] = field(default_factory=list)

    @property
    def grad(self) -> Any:
        return self.param.grad if self.explicit_grad is None else self.explicit_grad

    @property
    def device(self) -> torch.device:
        """Where it is stepped."""
        return self.home.device

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
        return self.engine.NAME, str(self.device), str(self.place), self.turn

    def fits_in_place_of(self, other: Row) -> bool:
        """Whether it can be stepped where the other is. Equal programs are one object."""
        same = self.program is other.program and self.table_key == other.table_key
        return same and self.numel == other.numel

    def is_right(self) -> bool:
        """Whether its tensors are of the kinds it was made for, and nothing that its rule keeps is lost."""
        return self.keeps() and self.takes(self.grad)

    def keeps(self) -> bool:
        """The same of all but its gradient."""
        kept = zip((self.param, *self._states()), (self.kinds[PARAM], *self.kinds[GRAD + 1 :]), strict=True)
        is_complete = all(name in self.state for name in self.program.kept_once) and all(
            getattr(self.state.get(name), "shape", None) == shape for name, shape in self.stage_states.items()
        )
        return is_complete and all(self._is_like(t, kind) for t, kind in kept)

    def takes(self, grad: Any) -> bool:
        """Whether there is no gradient, or one of the kind it was made for."""
        return grad is None or self._is_like(grad, self.kinds[GRAD])

    def adapt(self, settings: Settings) -> bool:
        """Go on with a gradient of another kind; False if it is stored otherwise, which needs another row."""
        _check(self.param, self.grad, settings)
        g = local(self.grad)
        is_other = plain_format(g).dtype != self.program.planes[GRAD].dtype
        if is_other or (self.engine.BY_ADDRESS and not _engines.is_plain(g)):
            return False
        # on the host, one stands in for any layout
        if not self.home.is_away:
            self.grad_copy = self._stand_in(g)
        self.kinds[GRAD] = watch.kind_of(g)
        return True

    def _is_like(self, whole: Any, kind: watch.Kind) -> bool:
        if not isinstance(whole, Tensor):
            return False
        if shards.is_distributed(self.param) or shards.is_distributed(whole):
            return shards.lies_alike(whole, self.param) and kind(local(whole))
        return kind(whole)

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
        self.keep_once(memory)
        self.state.update(self.fresh)
        self.fresh = {}
        for name in MASTER_PLANES - {plane.name for plane in self.program.state_planes}:
            # of a parameter that was of another dtype
            self.state.pop(name, None)
        if self.state:
            memory.state.setdefault(self.param, self.state)
        self.kinds = [*map(watch.kind_of, self.local_tensors())]
        # a mistake of ours: an engine would write to address 0
        assert not self.engine.BY_ADDRESS or all(kind.has_memory for kind in self.kinds), "no address"

    def keep_once(self, memory: Memory) -> None:
        """Have the optimizer remember what is kept once."""
        for name in self.program.kept_once:
            self.state[name] = self.once[name]
        if not self.program.saves_step:
            memory.unsaved_steps[self.param] = self.once["step"]

    def make_stand_ins(self) -> None:
        self.param_copy, self.grad_copy = self._stand_in(local(self.param)), self._stand_in(local(self.grad))

    def _stand_in(self, t: Tensor) -> Tensor | None:
        """Dense memory for a tensor that does not lie so, or where it is stepped."""
        is_right = not self.engine.BY_ADDRESS or lies_like(t, self.strides)
        return None if is_right and not self.home.is_away else self.home.empty(t, self.strides)

    def copy_in(self, plane: int, waits: bool = True) -> None:
        """The parameter or the gradient to its stand-in, if it has one; unless it `waits`, that is to be read
        only after the stream has come so far.
        """
        copy, whole = (self.param_copy, self.param) if plane == PARAM else (self.grad_copy, self.grad)
        if copy is not None:
            part = local(whole)
            # from device to device what lies otherwise would go by way of memory that is not pinned
            source = part if part.device == copy.device else laid_like(part, self.strides)
            copy.copy_(source, non_blocking=not waits)

    def copy_out(self, spec: StepSpec, waits: bool = True) -> None:
        if self.param_copy is not None:
            local(self.param).copy_(self.param_copy, non_blocking=not waits)
        if spec.zero_grads and self.grad_copy is not None:
            local(self.grad).zero_()
        if spec.unscale_grads and self.grad_copy is not None:
            # autograd is not told, as by torch's fused optimizers
            local(self.grad).data.copy_(self.grad_copy, non_blocking=not waits)


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
    home = home_of(whole, settings.offload, settings.owner)
    engine = _engines.choose((p, g, *old), settings.engine, home.device)
    by_rows = program.is_row_major or bool(program.stages)
    in_order = engine.BY_ADDRESS or home.is_away
    strides = () if not in_order else row_strides(p) if by_rows else dense_strides(p)
    # an average that comes in the middle of training does not start it over
    is_new = any(there[name] is None for name in names if name != EMA) or not {*rule.scalars} <= state.keys()
    # of one that keeps nothing, nobody knows
    first = 1.0 if not is_new and (rule.scalars or any(there.values())) else 0.0
    if program.saves_step:
        # states without one come from where it need not be saved
        step = state.get("step", 0.0 if rule.saves_step else first)
    else:
        step = 0.0 if is_new else memory.unsaved_steps.get(whole, first)
    fresh = {}
    for plane in program.state_planes if started else ():
        saved = state.get(plane.name)
        if saved is not None:
            check_state(saved, whole, plane, memory.names.get(whole))
        # an average begins with the master, where there is one
        start = p
        if plane.name == EMA and saved is None and len(param.planes("")) > 1:
            parts = [local(state.get(each.name)) for each in param.planes("param")[1:]]
            whole_master = [p, *parts]
            is_there = all(part is not None for part in parts)
            start = decode(param, [t.to(home.device) for t in whole_master]) if is_there else p
        layout = strides if engine.BY_ADDRESS else None
        tensor = made(plane, p, whole, home, layout, local(saved), start)
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
        home=home,
        place=p.device,
        numel=real_numel(p) if engine.BY_ADDRESS else 0,
        state=state,
        once={"step": step, **{name: state.get(name, 0.0) for name in rule.scalars}},
        strides=strides,
        first_index=shards.first_index(whole, settings.owner) if program.draws else 0,
        fresh=fresh,
        started=started,
        explicit_grad=grad,
    )
    if started:
        row.make_stand_ins()
    return row


def check_sums(p: Tensor, rule: Rule, settings: Settings) -> None:
    """Raise where a step needs sums over a tensor that this rank cannot have."""
    if settings.spec.needs_sums or rule.needs_sums:
        joined = settings.spec.measures_first or rule.sums_over_all
        shards.check_sums(p, settings.owner, joined)


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
    if not p.is_contiguous() and overlaps_itself(p):
        raise RuntimeError(
            f"{owner} cannot update a parameter in place whose elements share memory, such as an expanded one; "
            "use p.contiguous()"
        )
    for t, what in ((p, "parameter"), (g, "gradient")):
        if not watch.has_numbers(t):
            raise RuntimeError(
                f"{owner} found a {what} of shape {tuple(t.shape)} without memory: its storage was freed, or "
                "it is lazy zeros, or was wrapped by torch.func; use a clone of what it stands for"
            )
    shards.check(p, g, owner)
