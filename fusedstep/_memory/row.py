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
from .._algorithm.program import EMA, ONLY_UPDATE, Program, Rule, StepSpec, compile_step
from . import shards, watch
from .formats import Format, plain_format
from .layout import dense_strides, empty_like, laid_like, lies_like
from .shards import local

_PARAM, _GRAD = range(2)


class Settings(NamedTuple):
    """What holds for everything an optimizer steps.

    Scalars are computed in `exact`: float64, so that bias corrections hold at any step. `counts` says whether
    a step is counted before it is taken. `norm_ranks` are the ranks that step other parameters, which are
    clipped together with those here.
    """

    owner: str
    engine: str | None = None
    state_dtype: torch.dtype | None = None
    clip_scope: str = "global"
    exact: torch.dtype = torch.float64
    counts: bool = True
    spec: StepSpec = ONLY_UPDATE
    norm_ranks: shards.Ranks | None = None


class Memory(NamedTuple):
    """What an optimizer remembers: the states it saves, step counts that are no part of them, and names of
    parameters, if it was given any.
    """

    state: dict[Tensor, dict[str, Any]]
    unsaved_steps: dict[Tensor, Tensor]
    names: Mapping[Tensor, str] = MappingProxyType({})


class Update(NamedTuple):
    """What is done to the parameters of a group: a rule, and whether they are averaged."""

    rule: Rule
    averages: bool = False


@dataclass(slots=True, eq=False)
class Row:
    """A parameter with its states, the program and engine that step it, and how its slots are stored."""

    param: Tensor
    group: int
    update: Update
    program: Program
    engine: Any
    formats: tuple[Format, ...]
    device: torch.device
    numel: int
    state: dict[str, Any]
    # the count so far; once the row is in a table, the tensor in which that counts
    step: Any
    # of every slot, where an engine works by address
    strides: tuple[int, ...] = ()
    # states that are new or had to move, not yet part of `state`
    fresh: dict[str, Tensor] = field(default_factory=dict)
    # False until the first gradient: what its gradient and states will be is only expected
    started: bool = True
    # the gradient, where it is not the parameter's own
    explicit_grad: Tensor | None = None
    # dense stand-ins for a parameter or gradient that does not lie so
    param_copy: Tensor | None = None
    grad_copy: Tensor | None = None
    # of every slot, whether a tensor is of the kind the row was made for; none until the row is committed
    checks: list[Any] = field(default_factory=list)

    @property
    def grad(self) -> Any:
        return self.param.grad if self.explicit_grad is None else self.explicit_grad

    @property
    def staged(self) -> bool:
        """Whether the update works on copies."""
        return self.param_copy is not None or self.grad_copy is not None

    @property
    def table_key(self) -> tuple:
        """Rows with equal ones are in one table."""
        return self.engine.NAME, str(self.device)

    def fits_in_place_of(self, other: Row) -> bool:
        """Whether it can be stepped where the other is. Equal programs are one object."""
        same = self.program is other.program and self.formats == other.formats
        return same and self.table_key == other.table_key and self.numel == other.numel

    def is_right(self) -> bool:
        """Whether its tensors are of the kinds it was made for."""
        kept = zip((self.param, *self._states()), (self.checks[_PARAM], *self.checks[_GRAD + 1 :]), strict=True)
        return all(self._is_like(t, check) for t, check in kept) and self.takes(self.grad)

    def takes(self, grad: Any) -> bool:
        """Whether there is no gradient, or one of the kind it was made for."""
        return grad is None or self._is_like(grad, self.checks[_GRAD])

    def adapt(self, settings: Settings) -> bool:
        """Go on with a gradient of another kind; False if it is stored otherwise, which needs another row."""
        _check(self.param, self.grad, settings)
        g = local(self.grad)
        if plain_format(g) != self.formats[_GRAD] or (self.engine.BY_ADDRESS and not _engines.is_plain(g)):
            return False
        if self.engine.BY_ADDRESS:
            self.grad_copy = _stand_in(g, self.strides)
        self.checks[_GRAD] = watch.check_of(g)
        return True

    def _is_like(self, whole: Any, check: Callable[[Tensor], bool]) -> bool:
        if not isinstance(whole, Tensor):
            return False
        if shards.is_distributed(self.param) or shards.is_distributed(whole):
            return shards.lies_alike(whole, self.param) and check(local(whole))
        return check(whole)

    def _states(self) -> list[Any]:
        return [self.state.get(slot.name) for slot in self.program.states]

    def tensors(self) -> list[Any]:
        """Parameter, gradient and states, in the order of the slots."""
        return [self.param, self.grad, *self._states()]

    def local_tensors(self) -> list[Any]:
        """The parts of them that are here."""
        return [*map(local, self.tensors())]

    def commit(self, memory: Memory) -> None:
        """Make what was prepared part of what the optimizer remembers, and note the kinds of its tensors."""
        if self.program.saves_step:
            self.state["step"] = self.step
        else:
            memory.unsaved_steps[self.param] = self.step
        self.state.update(self.fresh)
        self.fresh = {}
        if self.state:
            memory.state.setdefault(self.param, self.state)
        if not self.checks:
            self.checks = [watch.check_of(part) for part in self.local_tensors()]

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
        if settings.spec.needs_sums or update.rule.needs_sums:
            shards.check_sums(p, settings.owner, joined=settings.spec.measures_first)
    whole, p, g = p, local(p), local(found) if started else local(p)
    state = memory.state.get(whole, {})
    saves_step = update.rule.saves_step
    names = [name for _, name in update.rule.states] + [EMA] * update.averages
    if saves_step and state and not any(name in state for name in names):
        raise RuntimeError(
            f"{settings.owner} found state {sorted(state)} for a parameter, but keeps {tuple(names)}: "
            "it seems to come from another optimizer; load a checkpoint of this one, or clear the state"
        )
    old = [local(state[name]) for name in names if isinstance(state.get(name), Tensor)]
    engine = _engines.choose((p, g, *old), settings.engine)
    strides = dense_strides(p) if engine.BY_ADDRESS else ()
    step = state.get("step", 0.0) if saves_step else memory.unsaved_steps.get(whole, 1.0)
    formats, fresh = [plain_format(p), plain_format(g)], {}
    for name in names:
        saved = state.get(name)
        if saved is None:
            # an average that comes in the middle of training does not start it over
            step = step if saves_step or name == EMA else 0.0
            dtype = state_dtype_for(p, name, settings.state_dtype)
            tensor = _new_state(p, strides, dtype, engine, name) if started else p.new_empty(0, dtype=dtype)
        else:
            _check_state(saved, whole, name, memory.names.get(whole))
            tensor = _adopted(local(saved), p, strides, engine)
        formats.append(plain_format(tensor))
        if started and tensor is not local(saved):
            fresh[name] = shards.like(tensor, whole)
    program = program_of(update, settings.spec, tuple(formats))
    row = Row(
        param=whole,
        group=group,
        update=update,
        program=program,
        engine=engine,
        formats=tuple(formats),
        device=p.device,
        numel=p.numel() * (2 if p.is_complex() else 1) if engine.BY_ADDRESS else 0,
        state=state,
        step=step,
        strides=strides,
        fresh=fresh,
        started=started,
        explicit_grad=grad,
    )
    if engine.BY_ADDRESS and started:
        row.param_copy, row.grad_copy = _stand_in(p, strides), _stand_in(g, strides)
    return row


def _stand_in(t: Tensor, strides: tuple[int, ...]) -> Tensor | None:
    """Dense memory for a tensor that does not lie so."""
    return None if lies_like(t, strides) else empty_like(t, strides)


@functools.cache
def program_of(update: Update, spec: StepSpec, formats: tuple[Format, ...]) -> Program:
    letters = ["p", "g", *(letter for letter, _ in update.rule.states), *(["e"] if update.averages else [])]
    # a parameter is stored last, and once, whatever it loses
    lossy = frozenset(x for x, f in zip(letters[2:], formats[2:], strict=True) if f.loses_bits)
    return compile_step(update.rule, spec, update.averages, lossy)


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


def _new_state(p: Tensor, strides: tuple, dtype: torch.dtype, engine: Any, name: str) -> Tensor:
    if engine.BY_ADDRESS:
        tensor = empty_like(p, strides, dtype)
    else:
        tensor = torch.empty_like(p, dtype=dtype, requires_grad=False)
    return tensor.copy_(p) if name == EMA else tensor.zero_()


def _check_state(found: Any, p: Tensor, name: str, param_name: str | None) -> None:
    if not isinstance(found, Tensor):
        raise TypeError(f"state {name!r} is a {type(found).__name__}, not a tensor; load a matching checkpoint")
    owner = "its parameter" if param_name is None else f"its parameter {param_name!r}"
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
    if not shards.lies_alike(found, p):
        raise RuntimeError(
            f"state {name!r} is not distributed as {owner} is; load the checkpoint with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )


def _adopted(found: Tensor, p: Tensor, strides: tuple, engine: Any) -> Tensor:
    """A state that exists, on the parameter's device and laid out like it."""
    found = found if found.device == p.device else found.to(p.device)
    return laid_like(found, strides) if engine.BY_ADDRESS else found
