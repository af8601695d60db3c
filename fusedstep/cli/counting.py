"""What a model takes with an optimizer: predicted from how all is stored, and measured."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor, nn
from torch.optim.optimizer import _get_scalar_dtype

import fusedstep
from fusedstep._algorithm.formats import BLOCK, Plane
from fusedstep._algorithm.program import ONLY_UPDATE, Program, slot_names
from fusedstep._memory.layout import dense_strides, lies_like, row_strides
from fusedstep._memory.row import Update, program_of
from fusedstep._memory.shards import local
from fusedstep._memory.stage_slots import stage_formats
from fusedstep._memory.storage import (
    MASTERS,
    param_format,
    plain_format,
    plane_shape,
    state_format,
    why_not_int8,
)

from .factory import factory
from .shapes import MODELS

# parameters without memory, and their names
Named = list[tuple[str, nn.Parameter]]

STATE_DTYPES = (None, "float32", "bfloat16", "int8")


class Setting(NamedTuple):
    """How states and masters are to be stored: the arguments that rows of the table differ in."""

    state_dtype: str | None = None
    master: str | None = None

    def __str__(self) -> str:
        chosen = {name: value for name, value in self._asdict().items() if value is not None}
        return ", ".join(f'{name}="{value}"' for name, value in chosen.items()) or "neither"


class Bytes(NamedTuple):
    """What is there between two steps; `stand_ins` for tensors that do not lie as a step needs them, and the
    workspace of stages. With offload master and states are on the host, and copies of all that is stepped.
    Released gradients are not there, but some of them wait while backward goes on.
    """

    parameter: int
    gradient: int = 0
    master: int = 0
    states: int = 0
    stand_ins: int = 0
    workspace: int = 0
    host_copies: int = 0
    waiting: int = 0

    @property
    def at_rest(self) -> int:
        """On the device of the parameters."""
        return sum(self[:2] if self.host_copies else self[:4])

    @property
    def on_host(self) -> int:
        """Of another device's parameters."""
        return self.host_copies + self.master + self.states if self.host_copies else 0

    @property
    def during_a_step(self) -> int:
        """What is there besides."""
        return self.stand_ins + self.workspace + self.waiting


class Measured(NamedTuple):
    """After two steps, and the most there was while they were taken, where the device tells; with offload also
    what is pinned on the host.
    """

    at_rest: int
    peak: int | None
    on_host: int | None = None


class Kept(NamedTuple):
    """Tensors whose states stay in float32 though 8 bits are asked for."""

    why: str
    names: list[str]
    elements: int


# models


def parameters_of(model: str, dtype: torch.dtype) -> Named:
    """The parameters of a model that is known by its shapes, or that a function makes, in this dtype."""
    if model in MODELS:
        return [
            (str(shape), _without_memory(torch.empty(shape, device="meta"), dtype)) for shape in MODELS[model]
        ]
    made = _made_by(factory(model))
    if not isinstance(made, nn.Module):
        message = f"{model} returned {type(made).__name__}; name a function that returns a torch.nn.Module"
        raise typer.BadParameter(message, param_hint="--model")
    found = [(name, _without_memory(p, dtype)) for name, p in made.named_parameters()]
    if not found:
        raise typer.BadParameter(f"{model} has no parameters", param_hint="--model")
    return found


def _without_memory(p: Tensor, dtype: torch.dtype) -> nn.Parameter:
    trains = p.requires_grad or not isinstance(p, nn.Parameter)
    kept = p.detach().to("meta", dtype if p.is_floating_point() else p.dtype)
    return nn.Parameter(kept, requires_grad=trains)


def _made_by(factory: Callable[[], Any]) -> Any:
    """A model without memory, if its function can make one."""
    try:
        with torch.device("meta"):
            return factory()
    except Exception:  # it looks at numbers, or asks for a device: every way has its own error
        return factory()


# predictions: nothing is allocated


def settings_for(make: Callable[..., Any], dtype: torch.dtype) -> list[Setting]:
    """All that store a large parameter of this dtype differently; of those that do not, the first."""
    p = nn.Parameter(torch.empty(BLOCK, BLOCK, dtype=dtype, device="meta"))
    found: dict[tuple[Plane, ...], Setting] = {}
    for setting in itertools.starmap(Setting, itertools.product(STATE_DTYPES, (None, *MASTERS))):
        # in a group it holds whatever the size
        optimizer = make([{"params": [p], **setting._asdict()}])
        try:
            program, _ = stored(p, optimizer.update_of(optimizer.param_groups[0]), "")
        except RuntimeError:
            # a master that parameters of this dtype cannot have
            continue
        found.setdefault(program.planes, setting)
    return [*found.values()]


def groups_of(make: Callable[..., Any], named: Named) -> list[Any]:
    """Parameters as an optimizer takes them: of Muon's, AdamW steps what is no matrix."""
    params = [p for _, p in named]
    if getattr(make, "func", make) is not fusedstep.Muon:
        return params
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if 2 <= p.dim() <= 3]},
        {"params": [p for p in params if p.dim() > 3], "flatten": True},
        {"params": [p for p in params if p.dim() < 2], "use_muon": False},
    ]
    return [group for group in groups if group["params"]]


def stored(p: Tensor, update: Update, owner: str) -> tuple[Program, int]:
    """The program that will step a parameter, which knows all planes, and how many of them are its master's."""
    of_param = param_format(p, update.storage, owner)
    _, _, *names = slot_names(update.rule, update.averages)
    states = [state_format(p, update.rule, name, update.storage) for name in names]
    masters = len(of_param.planes("param")) - 1
    formats = (of_param, plain_format(p), *states)
    return program_of(update, ONLY_UPDATE, formats + stage_formats(p, update.rule, formats, owner)), masters


def predicted(optimizer: Any, bucket_bytes: int | None = None) -> Bytes:
    """What the parameters of an optimizer will take, with their gradients and all that it keeps for them.

    Of gradients that are released in buckets, the most at once is almost a bucket, and then a large one.
    """
    owner = type(optimizer).__name__
    pairs = [(p, optimizer.update_of(group)) for group in optimizer.param_groups for p in group["params"]]
    each = [of_tensor(p, update, owner) for p, update in pairs]
    found = Bytes(*map(sum, zip(*each, strict=True)))
    if optimizer.offload is not None:
        # what lies otherwise is laid out on its way to the host: one after the other
        turned = max((max(one.parameter, one.gradient) for one in each if one.stand_ins), default=0)
        copies = found.gradient + sum(one.parameter for one in each if one.gradient)
        found = found._replace(stand_ins=turned, host_copies=copies)
    if bucket_bytes is not None:
        most = bucket_bytes + max(one.gradient for one in each)
        found = found._replace(gradient=0, waiting=min(found.gradient, most))
    # what it does not hold takes turns
    return found._replace(workspace=min(found.workspace, optimizer.workspace_bytes))


def of_tensor(p: Tensor, update: Update, owner: str) -> Bytes:
    """Of one parameter; a frozen one has neither gradient nor states."""
    if not p.requires_grad:
        return Bytes(local(p).numel() * p.itemsize)
    program, masters = stored(p, update, owner)
    param, grad, *others = (_size(plane, p) for plane in (*program.planes[:2], *program.state_planes))
    # as much again for what a stage computes, or more: as much as it may
    workspace = 2 * sum(_size(program.planes[staged.source], p) for staged in program.stages)
    count = _get_scalar_dtype().itemsize if program.saves_step else 0
    # as the rows of a plan want it
    strides = row_strides(p) if program.is_row_major or program.stages else dense_strides(p)
    stand_ins = 0 if lies_like(p, strides) else param + grad
    return Bytes(param, grad, sum(others[:masters]), sum(others[masters:]) + count, stand_ins, workspace)


def _size(plane: Plane, p: Tensor) -> int:
    numbers = math.prod(plane_shape(plane, p, local(p))) * (2 if p.is_complex() else 1)
    return numbers * plane.dtype.itemsize


def kept_in_float32(named: Named, make: Callable[..., Any]) -> list[Kept]:
    """By reason, with the names of all."""
    optimizer = make(groups_of(make, named), state_dtype="int8")
    update = optimizer.update_of(optimizer.param_groups[0])
    found: dict[str, list[tuple[str, int]]] = {}
    for name, p in named if update.rule.states else ():
        why = why_not_int8(p, update.storage) if p.requires_grad else None
        if why is not None:
            found.setdefault(why, []).append((name, p.numel()))
    return [Kept(why, [n for n, _ in each], sum(size for _, size in each)) for why, each in found.items()]


# measurements


def measured(
    named: Named, make: Callable[..., Any], setting: Setting, device: str, bucket_bytes: int | None = None
) -> Measured:
    """Two steps, with gradients that are zero: of these nothing is computed that takes memory."""
    on_gpu = device == "cuda"
    gc.collect()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    pinned = torch.cuda.host_memory_stats()["active_bytes.current"] if on_gpu else 0
    params = [allocated(p, device, has_grad=bucket_bytes is None) for _, p in named]
    optimizer = make(groups_of(make, [("", p) for p in params]), **setting._asdict())
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    if bucket_bytes is not None:
        fusedstep.release_gradients(nn.ParameterList(params), optimizer, bucket_bytes)
    for _ in range(2):
        if bucket_bytes is not None:
            _backward(params)
        optimizer.step()
    if on_gpu:
        host = torch.cuda.host_memory_stats()["active_bytes.current"] - pinned if optimizer.offload else None
        peak = torch.cuda.max_memory_allocated() - before
        return Measured(torch.cuda.memory_allocated() - before, peak, host)
    grads = [p.grad for p in params if p.grad is not None]
    states = [t for p in params for t in optimizer.state[p].values() if isinstance(t, Tensor)]
    return Measured(sum(t.numel() * t.itemsize for t in (*params, *grads, *states)), None)


def allocated(p: nn.Parameter, device: str, has_grad: bool = True) -> nn.Parameter:
    q = nn.Parameter(torch.zeros_like(p, device=device), requires_grad=p.requires_grad)
    q.grad = torch.zeros_like(q) if q.requires_grad and has_grad else None
    return q


def _backward(params: list[nn.Parameter]) -> None:
    """Gradients that are zero, made one by one."""
    sums = [p.sum().abs() for p in params if p.requires_grad]
    torch.autograd.backward(sums, [torch.zeros_like(each) for each in sums])


def deviation(expected: Bytes, found: Measured) -> float:
    """Of the most that was measured."""
    if found.peak is None:
        return found.at_rest / expected.at_rest - 1
    return found.peak / (expected.at_rest + expected.during_a_step) - 1
