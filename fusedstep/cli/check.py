"""`fusedstep check`: every optimizer, dtype, engine and feature on this machine, against float64."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import _engines
from ..registry import key_of
from .combinations import DTYPES, FEATURES, Case, Place, every, pairs, places
from .environment import environment
from .judging import complaints
from .progress import progress
from .subjects import OPTIONS, SUBJECTS


class Result(NamedTuple):
    """A combination, and what is wrong with it."""

    case: Case
    problems: tuple[str, ...]

    @property
    def command(self) -> str:
        return f'fusedstep check --case "{self.case}"'


def check(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default all on this machine")] = None,
    engine: Annotated[str | None, typer.Option(help="torch, cpu or triton; by default all")] = None,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="only this one, by its name; may be repeated")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="every combination, not only all pairs")] = False,
    case: Annotated[list[str] | None, typer.Option(help="only this combination, as a report names it")] = None,
    path: Annotated[Path | None, typer.Option("--json", help="file for the results")] = None,
    jobs: Annotated[int | None, typer.Option(help="processes; by default one for each core, 8 at most")] = None,
) -> None:
    """Compare steps of every optimizer, dtype, engine and feature with float64 references."""
    console = Console(width=None if sys.stdout.isatty() else 132)
    cases = _asked(case) if case else _chosen(device, engine, optimizer, full)
    where = [*dict.fromkeys(each.place for each in cases)]
    facts = environment("cuda" if any(place.device == "cuda" for place in where) else "cpu", None)
    console.print(" | ".join(f"{name} {value}" for name, value in facts.items() if name != "commit"))
    results = []
    for result in progress(run(cases, jobs), "checking", console, len(cases)):
        results.append(result)
        if result.problems:
            _tell(console, result)
    console.print(by_optimizer(results, where))
    console.print(by_feature(results, where))
    wrong = [result for result in results if result.problems]
    if path is not None:
        path.write_text(json.dumps({**facts, "results": [*map(_plain, results)]}, indent=1) + "\n")
    if wrong:
        console.print(f"[red]{len(wrong)} of {len(results)} combinations are wrong[/]; please report them")
        raise typer.Exit(1)
    console.print(f"[green]all {len(results)} combinations are right[/]")


def _asked(texts: list[str]) -> list[Case]:
    cases = [*map(_case, texts)]
    for each in cases:
        if each.place not in places():
            raise typer.BadParameter(
                f"there is no {each.place} here: {_why_not(each.place)}", param_hint="--case"
            )
        if not each.makes_sense:
            raise typer.BadParameter(f"{each} does not go together", param_hint="--case")
    return cases


def _case(text: str) -> Case:
    try:
        return Case.of(text)
    except (ValueError, TypeError) as error:
        message = (
            f"no such combination: {text!r}; name an optimizer with its number, a dtype, an engine and "
            "what is special, as a report does: 'AdamW.1 float32 cpu@cpu clip=norm'"
        )
        raise typer.BadParameter(message, param_hint="--case") from error


def _why_not(place: Place) -> str:
    if place.engine not in _engines.NAMES:
        return f"use one of {_engines.NAMES}"
    return _engines.load(place.engine, place.device)[1] or f"torch sees no {place.device} device"


def _chosen(device: str | None, engine: str | None, names: list[str] | None, full: bool) -> list[Case]:
    if device not in (None, "cpu", "cuda"):
        raise typer.BadParameter(f"found {device!r}; use cpu or cuda", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no GPU here; use --device cpu", param_hint="--device")
    if engine not in (None, *_engines.NAMES):
        raise typer.BadParameter(f"found {engine!r}; use one of {_engines.NAMES}", param_hint="--engine")
    where = places(device, engine)
    if not where:
        reason = _why_not(Place(str(engine), device or "cpu"))
        raise typer.BadParameter(f"{engine} does not run here: {reason}", param_hint="--engine")
    known = {key_of(name): name for name in OPTIONS}
    for name in names or ():
        if key_of(name) not in known:
            message = f"there is no optimizer {name!r}; there are {', '.join(OPTIONS)}"
            raise typer.BadParameter(message, param_hint="--optimizer")
    wanted = {known[key_of(name)] for name in names or known}
    subjects = [subject for subject in SUBJECTS if subject.name in wanted]
    cases = [*(every if full else pairs)(where, subjects)]
    if not cases:
        chosen = f"{', '.join(sorted(wanted))} on {', '.join(map(str, where))}"
        raise typer.BadParameter(f"nothing to check of {chosen}; leave out --engine", param_hint="--optimizer")
    return cases


def run(cases: Sequence[Case], jobs: int | None = None) -> Iterator[Result]:
    """The results, in the order of the cases, from several processes if there is enough work."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = min(jobs or min(cores, 8), 1 + len(cases) // 20)
    if jobs == 1:
        yield from map(judged, cases)
        return
    # spawned: what this process has started, such as CUDA, cannot be used in a fork
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, _begin) as pool:
        yield from pool.map(judged, cases, chunksize=4)


def _begin() -> None:
    """One thread each: the work is small, and there is one process for each core."""
    torch.set_num_threads(1)


def judged(case: Case) -> Result:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Result(case, tuple(complaints(case)))
    except Exception as error:  # whatever goes wrong is a finding
        return Result(case, (f"{type(error).__name__}: {error}",))


def _tell(console: Console, result: Result) -> None:
    console.print(Text(str(result.case), style="bold red"), soft_wrap=True)
    for problem in result.problems:
        console.print(Text(f"  {problem}"), soft_wrap=True)
    console.print(Text(f"  {result.command}", style="dim"), soft_wrap=True)


def _plain(result: Result) -> dict[str, Any]:
    case = result.case
    features = dict(zip(FEATURES, case.levels, strict=True))
    named = {"optimizer": case.subject.name, "options": str(case.subject.options), "dtype": case.dtype}
    return {"case": str(case), **named, "place": str(case.place), **features, "problems": result.problems}


def _cell(results: Sequence[Result]) -> Text:
    """How many results are wrong, or else right."""
    if not results:
        return Text("")
    wrong = sum(bool(result.problems) for result in results)
    return Text(f"{wrong} wrong", style="bold red") if wrong else Text(f"{len(results)} ok", style="green")


def by_optimizer(results: Sequence[Result], where: Sequence[Place]) -> Table:
    view = Table(title="optimizers, by engine and by dtype")
    view.add_column("optimizer")
    for column in (*where, *DTYPES):
        view.add_column(str(column).replace("/", "\n/"), justify="right")
    for name in OPTIONS:
        own = [result for result in results if result.case.subject.name == name]
        cells = [_cell([r for r in own if r.case.place == place]) for place in where]
        cells += [_cell([r for r in own if r.case.dtype == dtype]) for dtype in DTYPES]
        if own:
            view.add_row(name, *cells)
    return view


def by_feature(results: Sequence[Result], where: Sequence[Place]) -> Table:
    view = Table(title="what a step does besides, and what happens around it, by engine")
    for column in ("feature", *where):
        view.add_column(str(column), justify="left" if column == "feature" else "right")
    for name, levels in FEATURES.items():
        for level in levels[1:]:
            own = [result for result in results if result.case.feature(name) == level]
            view.add_row(f"{name}={level}", *(_cell([r for r in own if r.case.place == p]) for p in where))
    return view
