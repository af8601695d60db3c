"""`fusedstep memory`: what a model takes with an optimizer, by how its states and masters are stored."""

from __future__ import annotations

import ast
import functools
import gc
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
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

from .environment import environment
from .factory import factory
from .shapes import MODELS

# parameters without memory, and their names
Named = list[tuple[str, nn.Parameter]]

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float32, torch.float16)}
STATE_DTYPES = (None, "float32", "bfloat16", "int8")
OPTIMIZERS: dict[str, Any] = {name: getattr(fusedstep, name) for name in fusedstep.optimizers.__all__}
# names of tensors that a table shows
_MOST_NAMES = 4


class Setting(NamedTuple):
    """How states and masters are to be stored: the arguments that rows of the table differ in."""

    state_dtype: str | None = None
    master: str | None = None

    def __str__(self) -> str:
        chosen = {name: value for name, value in self._asdict().items() if value is not None}
        return ", ".join(f'{name}="{value}"' for name, value in chosen.items()) or "neither"


class Bytes(NamedTuple):
    """What is there between two steps; `stand_ins` for tensors that do not lie as a step needs them, and the
    workspace of stages.
    """

    parameter: int
    gradient: int = 0
    master: int = 0
    states: int = 0
    stand_ins: int = 0
    workspace: int = 0

    @property
    def at_rest(self) -> int:
        return sum(self[:4])

    @property
    def during_a_step(self) -> int:
        """What is there besides."""
        return self.stand_ins + self.workspace


class Measured(NamedTuple):
    """After two steps, and the most there was while they were taken, where the device tells."""

    at_rest: int
    peak: int | None


class Row(NamedTuple):
    setting: Setting
    predicted: Bytes
    measured: Measured | None = None


class Kept(NamedTuple):
    """Tensors whose states stay in float32 though 8 bits are asked for."""

    why: str
    names: list[str]
    elements: int


def memory(
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}, or module:factory")] = "llama-1b",
    optimizer: Annotated[str, typer.Option(help=", ".join(OPTIMIZERS))] = "AdamW",
    dtype: Annotated[str, typer.Option(help=f"of parameters: {', '.join(DTYPES)}")] = "bfloat16",
    option: Annotated[
        list[str] | None, typer.Option(help="of the optimizer, as momentum=0.9; may be repeated")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="take steps, on the GPU if there is one")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="file for all numbers, in bytes")] = None,
) -> None:
    """Bytes that a model takes with an optimizer, for every way to store its states and masters."""
    of_param = DTYPES[_known("dtype", dtype, DTYPES)]
    options = _options(option or [])
    make = functools.partial(OPTIMIZERS[_known("optimizer", optimizer, OPTIMIZERS)], **options)
    try:
        settings = settings_for(make, of_param)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(f"{optimizer}: {error}", param_hint="--option") from error
    named = parameters_of(model, of_param)
    console = Console(width=None if sys.stdout.isatty() else 132)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for setting in settings:
        try:
            expected = predicted(make(groups_of(make, named), **setting._asdict()))
        except (RuntimeError, ValueError) as error:
            console.print(f"{setting}: {error}")
            continue
        rows.append(Row(setting, expected, measured(named, make, setting, device) if measure else None))
    kept, elements = kept_in_float32(named, make), sum(p.numel() for _, p in named)
    words = ", ".join(f"{name}={value!r}" for name, value in options.items())
    console.print(
        table(f"{model}: {elements:,} parameters of {dtype}, {optimizer}({words})", rows, elements, device)
    )
    if kept:
        console.print(table_of_kept(kept, elements))
    if output is not None:
        asked = {"model": model, "optimizer": optimizer, "options": options, "dtype": dtype}
        facts = {**environment(device, None), **asked, "tensors": len(named), "elements": elements}
        output.write_text(json.dumps({**facts, **results(rows, kept, elements)}, indent=1) + "\n")
        console.print(f"all numbers: {output}")


def _known(what: str, found: str, accepted: Iterable[str]) -> str:
    if found not in accepted:
        message = f"found {found!r}; use one of {', '.join(accepted)}"
        raise typer.BadParameter(message, param_hint=f"--{what}")
    return found


def _options(found: list[str]) -> dict[str, Any]:
    """What was written as name=value; a value that is no literal is a word."""
    options: dict[str, Any] = {}
    for each in found:
        name, equals, value = each.partition("=")
        if not equals or name in Setting._fields:
            other = " and ".join(Setting._fields)
            message = f"found {each!r}; use name=value; rows differ in {other}, which cannot be given"
            raise typer.BadParameter(message, param_hint="--option")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


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


def predicted(optimizer: Any) -> Bytes:
    """What the parameters of an optimizer will take, with their gradients and all that it keeps for them."""
    owner = type(optimizer).__name__
    pairs = [(p, optimizer.update_of(group)) for group in optimizer.param_groups for p in group["params"]]
    found = Bytes(*map(sum, zip(*(of_tensor(p, update, owner) for p, update in pairs), strict=True)))
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


def measured(named: Named, make: Callable[..., Any], setting: Setting, device: str) -> Measured:
    """Two steps, with gradients that are zero: of these nothing is computed that takes memory."""
    on_gpu = device == "cuda"
    gc.collect()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    params = [_allocated(p, device) for _, p in named]
    optimizer = make(groups_of(make, [("", p) for p in params]), **setting._asdict())
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        optimizer.step()
    if on_gpu:
        return Measured(torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before)
    grads = [p.grad for p in params if p.grad is not None]
    states = [t for p in params for t in optimizer.state[p].values() if isinstance(t, Tensor)]
    return Measured(sum(t.numel() * t.itemsize for t in (*params, *grads, *states)), None)


def _allocated(p: nn.Parameter, device: str) -> nn.Parameter:
    q = nn.Parameter(torch.zeros_like(p, device=device), requires_grad=p.requires_grad)
    q.grad = torch.zeros_like(q) if q.requires_grad else None
    return q


# what is shown


def table(title: str, rows: list[Row], elements: int, device: str) -> Table:
    view = Table(title=title, caption=f"bytes a parameter, on {device}", caption_justify="left")
    names = [f"{name}=" for name in Setting._fields]
    columns = [*names, "parameter", "gradient", "master", "states", "total", "GB in all", "a step adds"]
    shows = any(row.measured is not None for row in rows)
    for column in columns + ["measured", "peak", "off by"] * shows:
        view.add_column(column, justify="left" if column in names else "right", no_wrap=column in names)
    for setting, expected, found in rows:
        parts = [*expected[:4], expected.at_rest]
        cells = [f"{part / elements:.3f}" for part in parts]
        cells += [f"{expected.at_rest / 1e9:.3f}", _added(expected)]
        if found is not None:
            peak = "" if found.peak is None else f"{found.peak / elements:.3f}"
            cells += [f"{found.at_rest / elements:.3f}", peak, f"{100 * _deviation(expected, found):+.2f} %"]
        view.add_row(*map(str, setting), *cells)
    return view


def _added(expected: Bytes) -> str:
    """What engines allocate beside: tables, and nothing else for an element that lies as it should."""
    return "tables" if not expected.during_a_step else f"tables, {expected.during_a_step / 1e9:.3f} GB"


def _deviation(expected: Bytes, found: Measured) -> float:
    """Of the most that was measured."""
    if found.peak is None:
        return found.at_rest / expected.at_rest - 1
    return found.peak / (expected.at_rest + expected.during_a_step) - 1


def table_of_kept(kept: list[Kept], elements: int) -> Table:
    view = Table(title='states that stay float32 with state_dtype="int8"')
    for column in ("why", "tensors", "elements", "of all", "which"):
        view.add_column(column, justify="left" if column in ("why", "which") else "right")
    for why, names, count in kept:
        different = Counter(names)
        shown = [name if n == 1 else f"{n} x {name}" for name, n in different.most_common(_MOST_NAMES)]
        more = [f"{len(different) - _MOST_NAMES} more"] * (len(different) > _MOST_NAMES)
        share = f"{100 * count / elements:.3f} %"
        view.add_row(why, str(len(names)), f"{count:,}", share, ", ".join(shown + more))
    return view


def results(rows: list[Row], kept: list[Kept], elements: int) -> dict[str, Any]:
    """All of it, in bytes."""
    found = []
    for setting, expected, seen in rows:
        total = {"at_rest": expected.at_rest, "per_parameter": expected.at_rest / elements}
        told = None if seen is None else {**seen._asdict(), "deviation": _deviation(expected, seen)}
        found.append({**setting._asdict(), "predicted": {**expected._asdict(), **total}, "measured": told})
    return {"settings": found, "float32": [{**k._asdict(), "share": k.elements / elements} for k in kept]}
