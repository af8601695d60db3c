"""`fusedstep memory`: the bytes of a model with an optimizer, by how its states and masters are stored."""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import fusedstep
from fusedstep import registry
from fusedstep._torch.refusals import check_released
from fusedstep._torch.release import BUCKET_BYTES

from .counting import (
    Bytes,
    Kept,
    Measured,
    Named,
    Setting,
    deviation,
    groups_of,
    kept_in_float32,
    measured,
    parameters_of,
    predicted,
    settings_for,
)
from .environment import environment
from .shapes import MODELS
from .works import SHORT

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
OPTIMIZERS: dict[str, Any] = {name: getattr(fusedstep, name) for name in fusedstep.optimizers.__all__}
# names of tensors that a table shows
_MOST_NAMES = 4
_UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


class Row(NamedTuple):
    setting: Setting
    predicted: Bytes
    measured: Measured | None = None


def memory(
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}, or module:factory")] = "llama-1b",
    optimizer: Annotated[str, typer.Option(help=", ".join(OPTIMIZERS))] = "AdamW",
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"of parameters: {', '.join(DTYPES)}; by default as your function makes them, else bfloat16"
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="of the optimizer, such as momentum=0.9; may be repeated")
    ] = None,
    offload: Annotated[bool, typer.Option("--offload", help='with offload="cpu"')] = False,
    release: Annotated[bool, typer.Option("--release-gradients", help="step gradients in backward")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="take steps, on the GPU if there is one")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="file for all numbers, in bytes")] = None,
) -> None:
    """Bytes that a model takes with an optimizer, for every way to store its states and masters."""
    of_param = None if dtype is None else _dtype(dtype)
    options = _options(option or []) | ({"offload": "cpu"} if offload else {})
    optimizer = _name(optimizer)
    make = functools.partial(OPTIMIZERS[optimizer], **options)
    named = parameters_of(model, of_param)
    try:
        settings = settings_for(make, *_dtypes_of_settings(named))
    except (TypeError, ValueError) as error:
        hint = "--option" if option else "--offload" if offload else "--optimizer"
        # some errors name the class themselves
        who = "" if str(error).startswith(optimizer) else f"{optimizer}: "
        raise typer.BadParameter(f"{who}{error}", param_hint=hint) from error
    bucket_bytes = _bucket_bytes(make) if release else None
    console = Console(width=None if sys.stdout.isatty() else 132)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if offload and measure and device == "cpu":
        message = "parameters are offloaded from a GPU, and there is none; leave out --measure"
        raise typer.BadParameter(message, param_hint="--offload")
    rows = []
    for setting in settings:
        try:
            expected = predicted(make(groups_of(make, named), **setting._asdict()), bucket_bytes)
        except (RuntimeError, ValueError) as error:
            console.print(f"{setting}: {error}")
            continue
        found = measured(named, make, setting, device, bucket_bytes) if measure else None
        rows.append(Row(setting, expected, found))
    kept, elements = kept_in_float32(named, make), sum(p.numel() for _, p in named)
    words = ", ".join(f"{name}={value!r}" for name, value in options.items())
    dtypes = " and ".join(dict.fromkeys(_text(p.dtype) for _, p in named))
    title = f"{model}: {elements:,} parameters of {dtypes}, {optimizer}({words})"
    console.print(table(title + ", gradients released" * release, rows, elements, device))
    if kept:
        console.print(table_of_kept(kept, elements))
    if output is not None:
        asked: dict[str, Any] = {"model": model, "optimizer": optimizer, "options": options, "dtype": dtypes}
        asked |= {"bucket_bytes": bucket_bytes}
        facts = {**environment(device, None), **asked, "tensors": len(named), "elements": elements}
        output.write_text(json.dumps({**facts, **results(rows, kept, elements)}, indent=1) + "\n")
        console.print(f"all numbers: {output}")


def _name(found: str) -> str:
    """The name of a class, however it is written."""
    known = {registry.key_of(name): name for name in OPTIMIZERS}
    if registry.key_of(found) not in known:
        raise _unknown("optimizer", found, OPTIMIZERS)
    return known[registry.key_of(found)]


def _dtype(found: str) -> torch.dtype:
    """By torch's name, or a short one."""
    name = registry.torch_name(found)
    if name not in DTYPES:
        raise _unknown("dtype", found, [*DTYPES, *(SHORT[dtype] for dtype in DTYPES)])
    return DTYPES[name]


def _unknown(what: str, found: str, accepted: Iterable[str]) -> typer.BadParameter:
    return typer.BadParameter(f"found {found!r}; use one of {', '.join(accepted)}", param_hint=f"--{what}")


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtypes_of_settings(named: Named) -> list[torch.dtype]:
    """The dtypes that settings are made for: of what is trained, and of real numbers if there are any."""
    found = list(dict.fromkeys(p.dtype for _, p in named if p.requires_grad))
    # complex parameters refuse some settings, and say why
    return [dtype for dtype in found if not dtype.is_complex] or found


def _bucket_bytes(make: Callable[..., Any]) -> int:
    """Bytes of gradients that are stepped together in backward."""
    try:
        check_released(make([nn.Parameter(torch.empty(1, 1, device="meta"))]))
    except RuntimeError as error:
        raise typer.BadParameter(str(error), param_hint="--release-gradients") from error
    return BUCKET_BYTES


def _options(found: list[str]) -> dict[str, Any]:
    """Options that were written as name=value, with values as in configuration files."""
    options: dict[str, Any] = {}
    for each in found:
        name, equals, value = each.partition("=")
        if not equals or name in Setting._fields:
            other = " and ".join(Setting._fields)
            message = f"found {each!r}; use name=value; rows differ in {other}, which cannot be given"
            raise typer.BadParameter(message, param_hint="--option")
        options[name] = registry.understood(value)
    return options


# what is shown


def table(title: str, rows: list[Row], elements: int, device: str) -> Table:
    view = Table(title=title, caption=f"bytes a parameter, on {device}", caption_justify="left")
    names = [f"{name}=" for name in Setting._fields]
    most = max((row.predicted.at_rest for row in rows), default=0)
    unit = next((unit for unit, size in _UNITS.items() if most >= size), "kB")
    in_all = lambda count: f"{count / _UNITS[unit]:.3f}"
    columns = [*names, "parameter", "gradient", "master", "states", "total", f"{unit} in all", "a step adds"]
    away = any(row.predicted.on_host for row in rows)
    columns += ["on the host"] * away
    shows = any(row.measured is not None for row in rows)
    for column in columns + (["measured", "peak", "off by"] + ["host"] * away) * shows:
        view.add_column(column, justify="left" if column in names else "right", no_wrap=column in names)
    for setting, expected, found in rows:
        parts = [*expected[:4], expected.at_rest]
        cells = [f"{part / elements:.3f}" for part in parts]
        # and no more for tensors in the layout that a step needs
        added = f"tables, {in_all(expected.during_a_step)} {unit}" if expected.during_a_step else "tables"
        cells += [in_all(expected.at_rest), added]
        cells += [f"{expected.on_host / elements:.3f}"] * away
        if found is not None:
            peak = "" if found.peak is None else f"{found.peak / elements:.3f}"
            cells += [f"{found.at_rest / elements:.3f}", peak, f"{100 * deviation(expected, found):+.2f} %"]
            cells += [f"{(found.on_host or 0) / elements:.3f}"] * away
        view.add_row(*map(str, setting), *cells)
    return view


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
    """All results, in bytes."""
    found = []
    for setting, expected, seen in rows:
        total = {"at_rest": expected.at_rest, "per_parameter": expected.at_rest / elements}
        total["on_host"] = expected.on_host
        told = None if seen is None else {**seen._asdict(), "deviation": deviation(expected, seen)}
        found.append({**setting._asdict(), "predicted": {**expected._asdict(), **total}, "measured": told})
    return {"settings": found, "float32": [{**k._asdict(), "share": k.elements / elements} for k in kept]}
