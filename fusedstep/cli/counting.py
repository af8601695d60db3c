"""The memory that a model takes with an optimizer: predicted from how all is stored, and measured."""

from __future__ import annotations

import gc
import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _get_scalar_dtype

import fusedstep
from fusedstep._algorithm.formats import BLOCK, Plane
from fusedstep._algorithm.program import ONLY_UPDATE, Program, slot_names
from fusedstep._memory.layout import dense_strides, lies_like, row_strides
from fusedstep._memory.needs import program_of
from fusedstep._memory.settings import Update
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

from .factory import made
from .shapes import MODELS

# parameters without memory, and their names
Named = list[tuple[str, nn.Parameter]]

STATE_DTYPES = (None, "float32", "bfloat16", "int8")


class Setting(NamedTuple):
    """How states and masters are stored: the arguments that rows of the table differ in."""

    state_dtype: str | None = None
    master: str | None = None

    def __str__(self) -> str:
        chosen = {name: value for name, value in self._asdict().items() if value is not None}
        return ", ".join(f'{name}="{value}"' for name, value in chosen.items()) or "neither"


class Bytes(NamedTuple):
    """What is kept between two steps; and what a step adds: `stand_ins` for tensors in a layout that it cannot
    use, and the workspace of stages. With offload, master and states are on the host, with copies of everything
    that is stepped. Released gradients are not kept, but some are `waiting` during backward.
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
        """On the host, for parameters of another device."""
        return self.host_copies + self.master + self.states if self.host_copies else 0

    @property
    def during_a_step(self) -> int:
        """What a step adds."""
        return self.stand_ins + self.workspace + self.waiting


class Measured(NamedTuple):
    """Bytes after two steps, and at their peak, if the device reports it; with offload, also those pinned on
    the host.
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


def parameters_of(model: str, dtype: torch.dtype | None = None) -> Named:
    """The parameters of a model that is known by its shapes, or that a function makes.

    In this dtype; None leaves a function's model as it is, and makes the others bfloat16.
    """
    if model in MODELS:
        each = ((str(shape), torch.empty(shape, device="meta")) for shape in MODELS[model])
        return [(name, _without_memory(p, dtype or torch.bfloat16)) for name, p in each]
    return [(name, _without_memory(p, dtype)) for name, p in made(model, True).named_parameters()]


def _without_memory(p: Tensor, dtype: torch.dtype | None) -> nn.Parameter:
    trains = p.requires_grad or not isinstance(p, nn.Parameter)
    kept = p.detach().to("meta", dtype if dtype and p.is_floating_point() else p.dtype)
    return nn.Parameter(kept, requires_grad=trains)


# predictions: nothing is allocated


def settings_for(make: Callable[..., Any], *dtypes: torch.dtype) -> list[Setting]:
    """All settings that store large parameters of these dtypes differently; of equal ones, the first."""
    params = [nn.Parameter(torch.empty(BLOCK, BLOCK, dtype=dtype, device="meta")) for dtype in dtypes]
    found: dict[tuple[tuple[Plane, ...], ...], Setting] = {}
    for setting in itertools.starmap(Setting, itertools.product(STATE_DTYPES, (None, *MASTERS))):
        # the setting of a group holds whatever the size
        optimizer = make([{"params": params, **setting._asdict()}])
        update = optimizer.update_of(optimizer.param_groups[0])
        try:
            planes = tuple(stored(p, update, "")[0].planes for p in params)
        except RuntimeError:
            # a master that parameters of this dtype cannot have
            continue
        found.setdefault(planes, setting)
    return [*found.values()]


def groups_of(make: Callable[..., Any], named: Named) -> list[Any]:
    """Parameters as an optimizer takes them; for Muon in groups: AdamW steps those that are no matrices."""
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
    """Bytes that the parameters of an optimizer will take, with their gradients and all that it keeps for them.

    Gradients that are released in buckets take at most almost a bucket, and then one large gradient.
    """
    owner = type(optimizer).__name__
    pairs = [(p, optimizer.update_of(group)) for group in optimizer.param_groups for p in group["params"]]
    each = [of_tensor(p, update, owner) for p, update in pairs]
    found = Bytes(*map(sum, zip(*each, strict=True)))
    if optimizer.offload is not None:
        # tensors in another layout are rearranged on their way to the host, one after the other
        turned = max((max(one.parameter, one.gradient) for one in each if one.stand_ins), default=0)
        copies = found.gradient + sum(one.parameter for one in each if one.gradient)
        found = found._replace(stand_ins=turned, host_copies=copies)
    if bucket_bytes is not None:
        most = bucket_bytes + max(one.gradient for one in each)
        found = found._replace(gradient=0, waiting=min(found.gradient, most))
    # tensors that do not fit into it take turns
    most = found.workspace + _allocated_by_stages(pairs, owner)
    return found._replace(workspace=min(most, optimizer.workspace_bytes))


def _allocated_by_stages(pairs: list[tuple[Tensor, Update]], owner: str) -> int:
    """What stages allocate while they run, for the tensors of one shape after the other."""
    found: Counter[Any] = Counter()
    for p, update in pairs:
        stages = stored(p, update, owner)[0].stages if p.requires_grad else ()
        for staged in stages:
            found[staged.stage, p.shape] += staged.stage.allocates((*p.shape,))
    return max(found.values(), default=0)


def of_tensor(p: Tensor, update: Update, owner: str) -> Bytes:
    """Bytes of one parameter; a frozen one has neither gradient nor states."""
    if not p.requires_grad:
        return Bytes(local(p).numel() * p.itemsize)
    program, masters = stored(p, update, owner)
    param, grad, *others = (_size(plane, p) for plane in (*program.planes[:2], *program.state_planes))
    workspace = sum(_size(program.planes[staged.source], p) for staged in program.stages)
    count = _get_scalar_dtype().itemsize if program.saves_step else 0
    # the layout that rows of a plan need
    strides = row_strides(p) if program.is_row_major or program.stages else dense_strides(p)
    stand_ins = 0 if lies_like(p, strides) else param + grad
    return Bytes(param, grad, sum(others[:masters]), sum(others[masters:]) + count, stand_ins, workspace)


def _size(plane: Plane, p: Tensor) -> int:
    numbers = math.prod(plane_shape(plane, p, local(p))) * (2 if p.is_complex() else 1)
    return numbers * plane.dtype.itemsize


def kept_in_float32(named: Named, make: Callable[..., Any]) -> list[Kept]:
    """Tensors whose states stay in float32, by reason."""
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
    """Bytes of two steps, with zeros as gradients, because computing these takes no memory."""
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
    """The relative error of a prediction, of the peak if that was measured."""
    if found.peak is None:
        return found.at_rest / expected.at_rest - 1
    return found.peak / (expected.at_rest + expected.during_a_step) - 1
