"""`fusedstep bench`: our step beside those of all peers found, in one run, against the limit of memory."""

from __future__ import annotations

import functools
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from . import cold, compare, host, peers, report, timing
from .asked import Asked, works_of
from .environment import environment
from .measure import Setup, measure
from .shapes import MODELS
from .works import DTYPES, Work

# benchmarks that time something else, chosen by their names
_OTHERS: dict[str, Any] = {"host": host, "cold": cold}
_ONE, _FOUND, _LEFT = "One case of your own", "Peers", "Output"


def bench(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one")] = None,
    only: Annotated[
        str,
        typer.Option(help="only cases of the table whose name contains this; host: loops; cold: new processes"),
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="samples of each time")] = 20,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(MODELS)}, or module:factory, a function that returns your model; may be repeated",
            rich_help_panel=_ONE,
        ),
    ] = None,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(help="any of ours; AdamW by default; may be repeated", rich_help_panel=_ONE),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="of the optimizer, such as betas=0.9,0.99; may be repeated", rich_help_panel=_ONE),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help=f"of parameters, and of states after a slash: {', '.join(DTYPES)}, or by torch's names; "
            "may be repeated",
            rich_help_panel=_ONE,
        ),
    ] = None,
    state_dtype: Annotated[
        str | None, typer.Option(help="of states: float32, bfloat16, int8", rich_help_panel=_ONE)
    ] = None,
    master: Annotated[
        str | None, typer.Option(help="of 16-bit parameters: float32, split, split8", rich_help_panel=_ONE)
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="torch, cpu or triton; by default the fastest", rich_help_panel=_ONE)
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="only peers whose name contains this; may be repeated; all: also those slow to compile",
            rich_help_panel=_FOUND,
        ),
    ] = None,
    list_peers: Annotated[
        bool,
        typer.Option("--peers", help="list the peers found, and why others were not", rich_help_panel=_FOUND),
    ] = False,
    peers_path: Annotated[
        Path | None,
        typer.Option(
            help="folder to import peers from", envvar="FUSEDSTEP_PEERS", rich_help_panel=_FOUND, exists=True
        ),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="file for the raw result", rich_help_panel=_LEFT)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="folder for the raw result, a picture and a report in HTML", rich_help_panel=_LEFT),
    ] = None,
    read: Annotated[
        list[Path] | None,
        typer.Option(
            help="a raw result to show instead of timing anything; several are joined into one",
            rich_help_panel=_LEFT,
        ),
    ] = None,
    compare_with: Annotated[
        Path | None,
        typer.Option(
            "--compare", help="another raw result: what changed; exits with 1 if slower", rich_help_panel=_LEFT
        ),
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="commit to record; by default from git", rich_help_panel=_LEFT)
    ] = None,
) -> None:
    """Time our steps beside every other implementation found here, interleaved, and against the memory limit.

    Without --model or --optimizer a table of cases is run. Every case is checked against float64 first; one
    that disagrees is reported instead of timed, and the command exits with 1.

    fusedstep bench --model bert-large --optimizer Lion --dtype bf16

    fusedstep bench --model mine:make_model --option weight_decay=0.1 --output results
    """
    peers.add_path(peers_path)
    console = Console(width=None if sys.stdout.isatty() else 150)
    device = _device(device)
    if list_peers:
        console.print(report.table_of_peers(device))
        return
    kind, _, part = only.partition(" ")
    before = compare.read(compare_with) if compare_with else None
    name: tuple[str, ...]
    if read:
        result, name = _kept(compare.joined(read), only), (f"{read[0].stem}-{only}",)
    elif kind in _OTHERS:
        result, name = _other(kind, part, device, rounds, commit, console), (f"{kind}-{device}", part)
    else:
        stored = {"state_dtype": state_dtype, "master": master, "engine": engine}
        asked = Asked(model or [], optimizer or [], option or [], dtype or [], stored)
        works = works_of(asked, only, device)
        setup = Setup(device, rounds, timing.Copy(device), tuple(peer or ()))
        result = _timed(works, setup, environment(device, commit), console, json_path)
        name = device, only or "-".join((*asked.models, *asked.optimizers, *asked.dtypes))
    _show(result, name, json_path, output, console)
    _end(result, before, console)


def _device(asked: str | None) -> str:
    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"found {device!r}; use cpu or cuda", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no GPU here; use --device cpu", param_hint="--device")
    return device


def _kept(result: dict[str, Any], only: str) -> dict[str, Any]:
    """A result with only the rows whose name contains this."""
    rows = [row for row in result["results"] if only in compare.name_of(row)]
    if not rows:
        some = next(map(compare.name_of, result["results"]), "")
        message = f"found no row whose name contains {only!r} in that result; use a part of one, as of {some!r}"
        raise typer.BadParameter(message, param_hint="--only")
    return {**result, "results": rows}


def _other(
    kind: str, part: str, device: str, rounds: int, commit: str | None, console: Console
) -> dict[str, Any]:
    other = _OTHERS[kind]
    if not other.named(part, device):
        names = ", ".join(each.name for each in other.named("", device))
        message = f"found no part of {kind} named {part!r}; use a part of one of these: {names}"
        raise typer.BadParameter(message, param_hint="--only")
    facts = environment(device, commit)
    _print_facts(facts, console)
    results = other.run(part, device, rounds, functools.partial(track, description=kind, console=console))
    return {**facts, "results": results}


def _timed(
    works: list[Work], setup: Setup, facts: dict[str, Any], console: Console, path: Path | None
) -> dict[str, Any]:
    beside = [p for p in peers.PEERS if any(work.optimizer in p.classes for work in works)]
    found = {p.name: p.version() for p in beside if not p.why_not(setup.device)}
    result: dict[str, Any] = {**facts, "peers": found, "results": []}
    _print_facts(result, console)
    for work in track(works, "timing", console=console):
        result["results"].append(measure(work, setup))
        if report.copy_speeds(result):
            result["copy_bandwidth"] = statistics.median(report.copy_speeds(result))
        # a run that is interrupted keeps the rows it has
        _write(result, path)
    return result


def _write(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def _print_facts(facts: dict[str, Any], console: Console) -> None:
    shown = {name: value for name, value in facts.items() if isinstance(value, str) and name != "commit"}
    console.print(" | ".join(f"{name} {value}" for name, value in shown.items()))


def _table(result: dict[str, Any]) -> Table:
    first = result["results"][0]
    device = "cpu" if "threads" in result else "cuda"
    for key, other in (("loop", host), ("start", cold)):
        if key in first:
            return other.table(result["results"], device)
    return report.table(result)


def _show(
    result: dict[str, Any], name: tuple[str, ...], json_path: Path | None, output: Path | None, console: Console
) -> None:
    """The table, and the files that are asked for."""
    console.print(_table(result))
    if json_path is not None:
        _write(result, json_path)
        console.print(f"raw result: {json_path}")
    if output is None:
        return
    first, *rest = name
    # a part gets a name of its own, or it would replace the whole
    words = (first, *([result["device"].lower()] if rest else []), *rest)
    path = output / f"{re.sub('[^A-Za-z0-9._=]+', '-', '-'.join(filter(None, words))).strip('-')}.json"
    _write(result, path)
    console.print(f"raw result: {path}")
    if "model" in result["results"][0]:
        report.picture(result, path.with_suffix(".png"))
        path.with_suffix(".html").write_text(report.page(result))
        console.print(f"picture: {path.with_suffix('.png')}, report: {path.with_suffix('.html')}")


def _end(result: dict[str, Any], before: dict[str, Any] | None, console: Console) -> None:
    """What changed, if asked; and the exit code: 1 for a row that is wrong, has failed, or is slower."""
    bad = [row for row in result["results"] if "wrong" in row or "failed" in row]
    slower = []
    if before is not None:
        found = [*compare.changes(before, result)]
        slower = compare.worse(found)
        console.print(compare.table(found, before, result))
        console.print(f"{len(slower)} slower or larger beyond noise, {len(found)} compared")
    if bad:
        console.print(f"[red]{len(bad)} of {len(result['results'])} rows are wrong or failed; please report it")
    if bad or slower:
        raise typer.Exit(1)
