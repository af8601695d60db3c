"""`fusedstep bench --compare`: what changed since another result, and whether it is more than noise.

A row is slower if its time grew by more than noise, by itself and relative to its peers: a machine that has
become slower slows down both. Noise is how far samples of both runs are apart, and never below a floor.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich.table import Table

from .noise import apart
from .works import text_of

# for results without quartiles, and samples that happen to agree: medians of two runs differ by this much
_FLOOR = {"device": 0.03, "host": 0.25, "wall": 0.15, "total": 0.15}
# memory does not vary: only rounding
_OF_MEMORY = 0.01


class Time(NamedTuple):
    """A median, and how far quartiles are from it, as a fraction of it."""

    median: float
    noise: float


class Change(NamedTuple):
    """A time of a row, before and now."""

    row: str
    kind: str
    before: float
    now: float
    # the median of now / before over the peers that both results have
    peers: float | None
    noise: float

    @property
    def ratio(self) -> float:
        return self.now / self.before

    @property
    def verdict(self) -> str:
        ratios = [self.ratio] if self.peers is None else [self.ratio, self.ratio / self.peers]
        if min(ratios) > 1 + self.noise:
            return "slower" if self.kind != "memory" else "more"
        return "" if max(ratios) > 1 / (1 + self.noise) else ("faster" if self.kind != "memory" else "less")


def read(path: Path) -> dict[str, Any]:
    """A raw result of any `fusedstep bench`, of this version or an earlier one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from error
    rows = found.get("results") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) and _is_row(r) for r in rows):
        raise typer.BadParameter(f"{path} is no raw result of `fusedstep bench`; use one that --json wrote")
    return found


def _is_row(row: dict[str, Any]) -> bool:
    if "model" in row:
        return row.keys() >= {"optimizer", "options", "dtype"} and (
            {"ours", "peers"} <= row.keys() or not _is_timed(row)
        )
    return "loop" in row or "start" in row


def joined(paths: Sequence[Path]) -> dict[str, Any]:
    """Partial results as one; all must be from one machine and one commit."""
    first, *others = map(read, paths)
    for path, other in zip(paths[1:], others, strict=True):
        differ = [name for name in ("device", "torch", "commit") if other.get(name) != first.get(name)]
        if differ:
            raise typer.BadParameter(f"{path} has another {differ[0]} than {paths[0]}; show them one by one")
    rows = {name_of(row): row for result in (first, *others) for row in result["results"]}
    return {**first, "results": [*rows.values()]}


def name_of(row: dict[str, Any]) -> str:
    """The name of a row: of its work, its loop, or its start."""
    if "model" in row:
        # as a file has them: tuples are lists there
        options = json.loads(json.dumps(row["options"]))
        return f"{row['model']} {row['optimizer']}({text_of(options)}) {row['dtype']}"
    return str(row.get("loop") or row.get("start") or "")


def _times(found: dict[str, Any]) -> dict[str, Time]:
    """All times of one side, by kind."""
    if "median" in found:  # of a loop
        return {"host": _time("host", found["median"], found["low"], found["high"])}
    if "total" in found:  # of a start
        low, *_, high = (*sorted(found["totals"]), found["total"])
        return {"total": _time("total", found["total"], low, high)}
    quartiles = found.get("quartiles", {})
    return {
        kind: _time(kind, found[kind], *quartiles.get(kind, (found[kind],) * 2))
        for kind in ("device", "host", "wall")
        if kind in found
    }


def _time(kind: str, median: float, low: float, high: float) -> Time:
    # the clock of a GPU ticks about once a microsecond
    tick = 5e-4 if kind == "device" else 0.0
    return Time(median, max(_FLOOR[kind] / 2, apart(median, low, high), tick / median))


def _sides(row: dict[str, Any]) -> tuple[dict[str, Time], dict[str, dict[str, Time]]]:
    """Times of ours, and of the peers by their names."""
    peers = row.get("peers") or ({row["peer_name"]: row["peer"]} if row.get("peer") else {})
    return _times(row.get("ours", row)), {_today(name, row): _times(its) for name, its in peers.items()}


def _today(name: str, row: dict[str, Any]) -> str:
    """The name that a peer has today: earlier results name the fastest of torch's by its class."""
    return "torch" if name.startswith(("torch.optim", "torch fused")) else name


def changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[Change]:
    """The changes of every row for which both results have times."""
    old = {name_of(row): row for row in before["results"] if _is_timed(row)}
    for row in filter(_is_timed, now["results"]):
        if name_of(row) not in old:
            continue
        (ours, peers), (its, its_peers) = _sides(row), _sides(old[name_of(row)])
        on_cpu = "threads" in now
        for kind in [kind for kind in ours if kind in its]:
            if on_cpu and kind in ("host", "wall") and "device" in ours:
                continue  # a CPU has one time for all kinds
            common = peers.keys() & its_peers.keys()
            pairs = [(peers[p][kind], its_peers[p][kind]) for p in common if kind in its_peers[p]]
            drift = statistics.median(a.median / b.median for a, b in pairs) if pairs else None
            noise = ours[kind].noise + its[kind].noise
            yield Change(name_of(row), kind, its[kind].median, ours[kind].median, drift, noise)
        yield from _memory(row, old[name_of(row)])


def _memory(row: dict[str, Any], old: dict[str, Any]) -> Iterator[Change]:
    before, now = (r.get("ours", {}).get("memory") for r in (old, row))
    if before and now:
        yield Change(name_of(row), "memory", before, now, None, _OF_MEMORY)


def _is_timed(row: dict[str, Any]) -> bool:
    return "wrong" not in row and "failed" not in row


def is_same_device(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return before.get("device") == now.get("device")


def check_common(before: dict[str, Any], names: Iterable[str]) -> None:
    """Refuse a result that has times of none of these rows."""
    old, new = names_of(before), {*names}
    if not old & new:
        some = f"such as {min(old)!r}; here is {min(new)!r}" if old and new else "or none at all"
        raise typer.BadParameter(
            f"that result has times of other rows only, {some}; use one of the same rows",
            param_hint="--compare",
        )


def names_of(result: dict[str, Any]) -> set[str]:
    """Of all rows with times."""
    return {name_of(row) for row in result["results"] if _is_timed(row)}


def table(found: list[Change], before: dict[str, Any], now: dict[str, Any]) -> Table:
    """Every change, marked if beyond noise; above it how machines differ, below it how many rows match."""
    title = f"now / before ({before.get('commit', 'unknown')[:12]})"
    for name in ("torch", "threads"):
        if before.get(name) != now.get(name):
            title += f"; {name} {now.get(name, 'unknown')}, before {before.get(name, 'unknown')}"
    is_same = is_same_device(before, now)
    if not is_same:
        title += f": another device, {before.get('device')}; ratios say nothing about the code"
    view = Table(title=title, caption=_unmatched(before, now), caption_justify="left")
    for column in ("row", "of", "before", "now", "ratio", "peers' ratio", "noise", ""):
        view.add_column(column, justify="left" if column in ("row", "of", "") else "right")
    for c in found:
        peers = "" if c.peers is None else f"{c.peers:.3f}"
        shown = [f"{c.before / 1e6:.1f} MB", f"{c.now / 1e6:.1f} MB"] if c.kind == "memory" else None
        numbers = shown or [f"{c.before:.4g}", f"{c.now:.4g}"]
        verdict = c.verdict if is_same else ""
        style = {"slower": "red", "more": "red", "faster": "green", "less": "green"}.get(verdict)
        ratios = f"{c.ratio:.3f}", peers, f"{100 * c.noise:.0f} %"
        view.add_row(c.row, c.kind, *numbers, *ratios, verdict, style=style)
    return view


def _unmatched(before: dict[str, Any], now: dict[str, Any]) -> str:
    old, new = ({name_of(row) for row in result["results"]} for result in (before, now))
    return f"{len(old & new)} rows in both, {len(new - old)} only now, {len(old - new)} only before"


def worse(found: list[Change]) -> list[Change]:
    return [c for c in found if c.verdict in ("slower", "more")]
