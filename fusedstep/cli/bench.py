"""`fusedstep bench`: our step beside those of all peers found, in one run, against the limit of memory."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from . import cold, compare, host, noise, peers, report, timing
from .asked import Asked, refuse_beside, works_of
from .environment import environment
from .files import Files
from .measure import Setup, measure
from .page import page
from .progress import progress
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
    stored = {"state_dtype": state_dtype, "master": master, "engine": engine}
    asked = Asked(model or [], optimizer or [], option or [], dtype or [], stored)
    if read or kind in _OTHERS:
        refuse_beside("--read" if read else f"--only {kind}", asked, peer or [])
    if read:
        result = _kept(compare.joined(read), only)
        files = Files.of(json_path, output, (f"{read[0].stem}-{only}",), result)
    elif kind in _OTHERS:
        _check_part(kind, part, device)
        if before:
            compare.check_common(before, [each.name for each in _OTHERS[kind].named(part, device)])
        facts = environment(device, commit)
        files = Files.of(json_path, output, (f"{kind}-{device}", part), facts)
        result = _other(kind, part, device, rounds, facts, files, console)
    else:
        works = works_of(asked, only, device)
        peers.check_asked(peer or [], works, device)
        # the dtypes of a user's model are not known yet
        if before and all(work.dtype in DTYPES for work in works):
            compare.check_common(before, [compare.name_of(work._asdict()) for work in works])
        name = only or "-".join((*asked.models, *asked.optimizers, *asked.dtypes))
        facts = environment(device, commit)
        files = Files.of(json_path, output, (device, name), facts)
        setup = Setup(device, rounds, timing.Copy(device), tuple(peer or ()))
        result = _timed(works, setup, facts, files, console)
    _show(result, files, console)
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


def _check_part(kind: str, part: str, device: str) -> None:
    if not _OTHERS[kind].named(part, device):
        names = ", ".join(each.name for each in _OTHERS[kind].named("", device))
        message = f"found no part of {kind} named {part!r}; use a part of one of these: {names}"
        raise typer.BadParameter(message, param_hint="--only")


def _other(
    kind: str, part: str, device: str, rounds: int, facts: dict[str, Any], files: Files, console: Console
) -> dict[str, Any]:
    _print_facts(facts, console)
    each = _OTHERS[kind].named(part, device)
    shown = progress(each, kind, console, len(each), lambda one: one.name)
    return _collected(_OTHERS[kind].run(shown, device, rounds), facts, files)


def _timed(
    works: list[Work], setup: Setup, facts: dict[str, Any], files: Files, console: Console
) -> dict[str, Any]:
    _print_facts(facts, console)
    shown = progress(works, "timing", console, len(works), str)
    return _collected((measure(work, setup) for work in shown), {**facts, "peers": {}}, files)


def _collected(rows: Iterable[dict[str, Any]], facts: dict[str, Any], files: Files) -> dict[str, Any]:
    """A result that is written with every row: a run that is interrupted keeps those it has."""
    versions = {peer.name: peer for peer in peers.PEERS}
    result: dict[str, Any] = {**facts, "results": []}
    noise.keep_load(result)
    for row in rows:
        result["results"].append(row)
        for name in [name for name in row.get("peers") or {} if name in versions]:
            result["peers"][name] = versions[name].version()
        if report.copy_speeds(result):
            result["copy_bandwidth"] = statistics.median(report.copy_speeds(result))
        noise.keep_load(result)
        files.write(result)
    return result


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


def _show(result: dict[str, Any], files: Files, console: Console) -> None:
    """The table, and the files that are asked for."""
    console.print(_table(result))
    if noise.note_of(result):
        console.print(f"[yellow]{noise.note_of(result)}", soft_wrap=True)
    files.write(result)
    for path in filter(None, files):
        console.print(f"raw result: {path}")
    if files.in_folder is not None and "model" in result["results"][0]:
        picture, html = (files.in_folder.with_suffix(suffix) for suffix in (".png", ".html"))
        report.picture(result, picture)
        html.write_text(page(result))
        console.print(f"picture: {picture}, report: {html}")


def _end(result: dict[str, Any], before: dict[str, Any] | None, console: Console) -> None:
    """What changed, if asked; and the exit code: 1 for a row that is wrong, has failed, or is slower."""
    wrong, failed = (sum(kind in row for row in result["results"]) for kind in ("wrong", "failed"))
    slower = [] if before is None else _compared(before, result, console)
    count = len(result["results"])
    if wrong:
        console.print(f"[red]{wrong} of {count} rows are wrong; please report it")
    if failed:
        console.print(
            f"[red]{failed} of {count} rows failed; if not for your model, options or memory, report it"
        )
    if wrong or failed or slower:
        raise typer.Exit(1)
    if before is not None:
        compare.check_common(before, compare.names_of(result))


def _compared(before: dict[str, Any], result: dict[str, Any], console: Console) -> list[compare.Change]:
    """The rows that are worse, which those of another device cannot be."""
    found = [*compare.changes(before, result)]
    slower = compare.worse(found) if compare.is_same_device(before, result) else []
    if found:
        console.print(compare.table(found, before, result))
        console.print(f"{len(slower)} slower or larger beyond noise, {len(found)} compared")
    return slower
