"""One parameter of a plan: what its program needs, checked and allocated before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from .. import _engines
from .._algorithm.formats import Format
from .._algorithm.program import EMA, Program, Rule, StepSpec
from .._algorithm.step import GRAD, PARAM
from .._engines.foreach.placed import decode
from . import shards, watch
from .layout import laid_like, lies_like, overlaps_itself
from .needs import Needs, key_of, needs_of
from .offload import Home
from .settings import Settings, Update
from .shards import local
from .stage_slots import shapes_of_states, stage_states
from .state_planes import MASTER_PLANES, check_state, made
from .storage import plain_format, plane_shape


class Memory(NamedTuple):
    """What an optimizer remembers: the states it saves, step counts that it does not save, the names of
    parameters, if it was given any, and what parameters need, by `key_of`, for the same settings.
    """

    state: dict[Tensor, dict[str, Any]]
    unsaved_steps: dict[Tensor, Tensor]
    names: Mapping[Tensor, str] = MappingProxyType({})
    needs: dict[tuple, Needs] | None = None


@dataclass(slots=True, eq=False)
class Row:
    """A parameter with its states, and the program and engine that step it."""

    param: Tensor
    group: int
    update: Update
    program: Program
    # one for each slot of the program
    formats: tuple[Format, ...]
    engine: Any
    home: Home
    # the device of the parameter, and its shape when the row was made
    place: torch.device
    shape: torch.Size
    numel: int
    state: dict[str, Any]
    # numbers that are kept once for the tensor, by name: the step count, and the rule's scalars. Once the row
    # is in a table, they are tensors that the table writes
    once: dict[str, Any]
    # the kinds that these tensors must have
    once_kinds: dict[str, watch.Kind] = field(default_factory=dict)
    # of all planes, if the engine works by address, and of stand-ins
    strides: tuple[int, ...] = ()
    # for random bits: the place of the parameter in its optimizer, and the index of its first local element
    position: int = 0
    first_index: int = 0
    # rows of one turn are stepped together, before those of the next turn
    turn: int = 0
    # states that are new or had to move, not yet part of `state`
    fresh: dict[str, Tensor] = field(default_factory=dict)
    # False until the first gradient: until then, the kinds of gradient and states are only expected
    started: bool = True
    # the gradient, where it is not the parameter's own
    explicit_grad: Tensor | None = None
    # stand-ins for a parameter or gradient that has other strides, or is on another device
    param_copy: Tensor | None = None
    grad_copy: Tensor | None = None
    # the kind that the tensor of each plane must have; empty until the row is committed
    kinds: list[watch.Kind] = field(default_factory=list)

    @property
    def grad(self) -> Any:
        return self.param.grad if self.explicit_grad is None else self.explicit_grad

    @property
    def device(self) -> torch.device:
        """The device that it is stepped on."""
        return self.home.device

    @property
    def has_stand_ins(self) -> bool:
        """Whether the update works on a stand-in for the parameter or gradient."""
        return self.param_copy is not None or self.grad_copy is not None

    @property
    def stage_states(self) -> dict[str, tuple[int, ...]]:
        """The shapes of states that stages keep, by name."""
        return shapes_of_states((staged.stage for staged in self.program.stages), self.param)

    @property
    def table_key(self) -> tuple:
        """Rows with equal keys are in one table."""
        return self.engine.NAME, str(self.device), str(self.place), self.turn

    def fits_in_place_of(self, other: Row) -> bool:
        """Whether it can replace the other row in its table. Equal programs are one object."""
        same = self.program is other.program and self.table_key == other.table_key
        return same and self.numel == other.numel and self.shape == other.shape

    def is_right(self) -> bool:
        """Whether its tensors have the kinds it was made for, and no state is missing."""
        return self.keeps() and self.takes(self.grad)

    def keeps(self) -> bool:
        """Whether it `is_right`, apart from its gradient."""
        kept = zip((self.param, *self._states()), (self.kinds[PARAM], *self.kinds[GRAD + 1 :]), strict=True)
        is_complete = all(name in self.state for name in self.program.kept_once) and all(
            getattr(self.state.get(name), "shape", None) == shape for name, shape in self.stage_states.items()
        )
        return is_complete and all(self._is_like(t, kind) for t, kind in kept)

    def takes(self, grad: Any) -> bool:
        """Whether there is no gradient, or one of the kind it was made for."""
        return grad is None or self._is_like(grad, self.kinds[GRAD])

    def adapt(self, settings: Settings) -> bool:
        """Go on with a gradient of another kind; False if that needs another row."""
        _check(self.param, self.grad, settings)
        g = local(self.grad)
        is_other = plain_format(g).dtype != self.program.planes[GRAD].dtype
        if is_other or (self.engine.BY_ADDRESS and not _engines.is_plain(g)):
            return False
        # if it is stepped away from its device, the stand-in takes any layout
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
        """The local parts of these tensors."""
        return [*map(local, self.tensors())]

    def commit(self, memory: Memory) -> None:
        """Give the optimizer the states that were prepared, and note the kinds of the row's tensors."""
        self.keep_once(memory)
        self.state.update(self.fresh)
        self.fresh = {}
        for name in MASTER_PLANES - {plane.name for plane in self.program.state_planes}:
            # left over if the parameter had another dtype once
            self.state.pop(name, None)
        if self.state:
            memory.state.setdefault(self.param, self.state)
        self.kinds = [*map(watch.kind_of, self.local_tensors())]
        # a mistake of ours: an engine would write to address 0
        assert not self.engine.BY_ADDRESS or all(kind.has_memory for kind in self.kinds), "no address"

    def keep_once(self, memory: Memory) -> None:
        """Give the optimizer the numbers that are kept once."""
        for name in self.program.kept_once:
            self.state[name] = self.once[name]
        if not self.program.saves_step:
            memory.unsaved_steps[self.param] = self.once["step"]

    def make_stand_ins(self) -> None:
        self.param_copy, self.grad_copy = self._stand_in(local(self.param)), self._stand_in(local(self.grad))

    def _stand_in(self, t: Tensor) -> Tensor | None:
        """Memory for a stand-in, if a tensor has other strides or is not where it is stepped."""
        is_right = not self.engine.BY_ADDRESS or lies_like(t, self.strides)
        return None if is_right and not self.home.is_away else self.home.empty(t, self.strides)

    def copy_in(self, plane: int, waits: bool = True) -> None:
        """Copy the parameter or the gradient to its stand-in, if it has one; unless this `waits`, the copy ends
        when the stream gets there.
        """
        copy, whole = (self.param_copy, self.param) if plane == PARAM else (self.grad_copy, self.grad)
        if copy is not None:
            part = local(whole)
            # between devices, a copy to other strides would go through memory that is not pinned
            source = part if part.device == copy.device else laid_like(part, self.strides)
            copy.copy_(source, non_blocking=not waits)

    def copy_out(self, spec: StepSpec, waits: bool = True) -> None:
        if self.param_copy is not None:
            local(self.param).copy_(self.param_copy, non_blocking=not waits)
        if spec.zero_grads and self.grad_copy is not None:
            local(self.grad).zero_()
        if spec.unscale_grads and self.grad_copy is not None:
            # `data`, so that autograd does not notice, as with torch's fused optimizers
            local(self.grad).data.copy_(self.grad_copy, non_blocking=not waits)


def has_row(p: Tensor, update: Update, memory: Memory) -> bool:
    """Whether a parameter without a gradient has a row. One of a lazy module has no shape yet. A frozen one
    needs none, unless it was trained before and its group keeps numbers, which go on.
    """
    if isinstance(p, UninitializedParameter):
        return False
    return p.requires_grad or (bool(update.rule.group_scalars) and bool(memory.state.get(p)))


def make_row(
    p: Tensor, update: Update, group: int, memory: Memory, settings: Settings, grad: Tensor | None = None
) -> Row:
    """Check a parameter and its gradient, choose its engine, allocate what it lacks. Writes nothing.

    Without a gradient nothing is allocated, and the row expects one that is stored like the parameter.
    """
    found: Any = p.grad if grad is None else grad
    started, rule = found is not None, update.rule
    if started:
        _check(p, found, settings)
        check_sums(p, rule, settings)
    state = memory.state.get(p, {})
    needs = _needs_of(p, found, update, state, memory, settings)
    row = Row(
        param=p,
        group=group,
        update=update,
        program=needs.program,
        formats=needs.formats,
        engine=needs.engine,
        home=needs.home,
        place=local(p).device,
        shape=p.shape,
        numel=needs.numel,
        state=state,
        once={"step": _count_of(p, state, needs, rule, memory)}
        | {name: state.get(name, 0.0) for name in rule.scalars},
        strides=needs.strides,
        first_index=shards.first_index(p, settings.owner) if needs.draws else 0,
        fresh=_states_of(p, state, needs, memory) if started else {},
        started=started,
        explicit_grad=grad,
    )
    if started:
        row.fresh |= stage_states(p, rule, state, settings.owner)
        row.make_stand_ins()
    return row


def _needs_of(
    p: Tensor, grad: Any, update: Update, state: dict[str, Any], memory: Memory, settings: Settings
) -> Needs:
    key = None if state or memory.needs is None else key_of(p, grad, update)
    if key is None or memory.needs is None:
        return needs_of(p, grad, update, state, settings)
    if key not in memory.needs:
        memory.needs[key] = needs_of(p, grad, update, state, settings)
    return memory.needs[key]


def _count_of(p: Tensor, state: dict[str, Any], needs: Needs, rule: Rule, memory: Memory) -> Any:
    """How often a parameter was stepped."""
    first = 1.0 if needs.was_stepped else 0.0
    if needs.program.saves_step:
        # states without a count come from a rule that does not save it
        return state.get("step", 0.0 if rule.saves_step else first)
    return 0.0 if needs.is_new else memory.unsaved_steps.get(p, first)


def _states_of(whole: Tensor, state: dict[str, Any], needs: Needs, memory: Memory) -> dict[str, Tensor]:
    """The states that a parameter lacks, or that have to move."""
    p, param, fresh = local(whole), needs.formats[PARAM], {}
    layout = needs.strides if needs.engine.BY_ADDRESS else None
    for plane in needs.program.state_planes:
        saved = state.get(plane.name)
        if saved is not None:
            check_state(saved, whole, plane, memory.names.get(whole))
        # an average begins as the master, if there is one
        start = p
        if plane.name == EMA and saved is None and len(param.planes("")) > 1:
            parts = [local(state.get(each.name)) for each in param.planes("param")[1:]]
            whole_master = [p, *parts]
            is_there = all(part is not None for part in parts)
            start = decode(param, [t.to(needs.home.device) for t in whole_master]) if is_there else p
        tensor = made(plane, p, whole, needs.home, layout, local(saved), start)
        if tensor is not local(saved):
            shape = None if plane.block == 1 else plane_shape(plane, whole, whole)
            fresh[plane.name] = shards.like(tensor, whole, shape)
    return fresh


def check_sums(p: Tensor, rule: Rule, settings: Settings) -> None:
    """Raise if a step needs sums over a tensor that this rank cannot get."""
    if settings.spec.needs_sums or rule.needs_sums:
        joined = settings.spec.measures_first or rule.sums_over_all
        shards.check_sums(p, settings.owner, joined)


def _check(p: Tensor, g: Tensor, settings: Settings) -> None:
    owner, spec = settings.owner, settings.spec
    if g.layout != torch.strided and not str(g.layout).startswith("torch.sparse"):
        raise RuntimeError(f"{owner} found a gradient of layout {g.layout}, which is not dense; convert it")
    if g.layout != torch.strided:
        raise RuntimeError(
            f"{owner} does not support sparse gradients, please consider SparseAdam instead (torch.optim's SGD "
            "and Adagrad take them, too), or build the embedding with sparse=False"
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
                f"{owner} found a {what} of shape {tuple(t.shape)} without memory: its storage was freed, it "
                "is a lazy tensor of zeros, or torch.func has wrapped it; use a clone of what it stands for"
            )
    shards.check(p, g, owner)
