"""What `fusedstep bench` shows of a result: tables, and a picture."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from . import noise
from .peers import PEERS
from .works import text_of

# bars longer than this many times ours, or the limit, are cut
_LONGEST = 5.0
# a copy that is faster than another by this factor says that the machine has changed
_MOVED = 1.2
# panels of a picture, and how many of them show the same optimizer
_MOST_PANELS = 6
_OF_ONE_OPTIMIZER = 3


class Bar(NamedTuple):
    """One side of a row: milliseconds on the device, on the host and in a loop of steps, and other facts."""

    name: str
    device: float
    host: float
    wall: float
    memory: int | None
    note: str
    # how far quartiles are from the median, as text
    spread: str = ""

    @staticmethod
    def of(name: str, found: dict[str, Any]) -> Bar:
        wall = found.get("wall", found["device"])
        return Bar(
            name,
            found["device"],
            found["host"],
            wall,
            found.get("memory"),
            found.get("note", ""),
            noise.text_of(found),
        )


def milliseconds(found: float) -> str:
    return f"{found:.3g} ms" if found < 1000 else f"{found:,.0f} ms"


def title_of(row: dict[str, Any]) -> str:
    return f"{row['optimizer']}({text_of(row['options'])}), {row['dtype']}"


def trouble_of(row: dict[str, Any]) -> str:
    """Why a row has no times; empty if it has them."""
    if "wrong" in row:
        return f"WRONG: {row['wrong']}; not timed"
    return f"FAILED: {row['failed']}" if "failed" in row else ""


def bars_of(row: dict[str, Any]) -> list[Bar]:
    """Ours first, then the others from fast to slow."""
    others = [Bar.of(name, found) for name, found in row["peers"].items() if not _disagrees(found)]
    return [Bar.of("fusedstep", row["ours"]), *sorted(others, key=lambda bar: bar.device)]


def left_out_of(row: dict[str, Any]) -> dict[str, str]:
    """Peers that are not shown, and why."""
    wrong = {name: found["note"] for name, found in row["peers"].items() if _disagrees(found)}
    return {
        **{name: f"disagrees with float64: {note}" for name, note in wrong.items()},
        **row.get("left_out", {}),
    }


def _disagrees(found: dict[str, Any]) -> bool:
    """Earlier results have times of peers that were wrong, with a note."""
    return "off by" in found.get("note", "")


def bytes_of(row: dict[str, Any], result: dict[str, Any]) -> float | None:
    """Bytes that must move; results without them have the limit that was computed from them."""
    if "bytes" in row:
        return row["bytes"]
    return row["limit"] * result["copy_bandwidth"] if "limit" in row else None


def in_digits(value: float) -> str:
    """With two digits at least."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:#.2g}"


def size_of(count: float | None) -> str:
    if count is None:
        return ""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def table(result: dict[str, Any]) -> Table:
    """A line for each side of each row."""
    on_cpu = "threads" in result
    names = ["model", "optimizer, dtype", "", "ms", "±", "x", "of the limit", "GB/s", "memory", "note"]
    if not on_cpu:
        names[3:4], names[8:8] = ["device"], ["host", "in a row"]
    of_memory = "what states take" if on_cpu else "the most that making it and two steps allocated"
    captions = [f"memory: {of_memory}", _caption_of_limit(result)]
    if on_cpu and any(_is_beyond(row) for row in result["results"]):
        captions.append("above 100 %: tensors that fit into caches, more reads than writes, or noise")
    if any(row["optimizer"] == "Muon" for row in result["results"]):
        captions.append("Muon: the limit leaves out products of matrices, which take most of its time")
    view = Table(
        title="milliseconds a step: medians; ±: quartiles; x: times ours; limit: moving the same bytes alone",
        caption="\n".join(filter(None, captions)),
        caption_justify="left",
    )
    for name in names:
        text = name in ("model", "optimizer, dtype", "", "note")
        view.add_column(name, justify="left" if text else "right", no_wrap=not text)
    for row in result["results"]:
        head = [row["model"], title_of(row)]
        if trouble_of(row):
            view.add_row(*head, escape(trouble_of(row)), style="red")
            continue
        for bar in bars_of(row):
            view.add_row(*head, *_cells(bar, row, result, on_cpu))
            head = ["", ""]
        for name, why in left_out_of(row).items():
            view.add_row("", "", name, *[""] * (len(names) - 4), escape(f"left out: {why}"), style="dim")
    return view


def copy_speeds(result: dict[str, Any]) -> list[float]:
    """Bytes a millisecond that a copy moved beside each row; in earlier results before all of them."""
    found = [row["copy"]["bytes"] / row["copy"]["device"] for row in result["results"] if "copy" in row]
    return found or ([result["copy_bandwidth"]] if "copy_bandwidth" in result else [])


def speed_of(result: dict[str, Any]) -> str:
    """As gigabytes a second."""
    found = [f"{bandwidth / 1e6:,.1f}" for bandwidth in sorted(copy_speeds(result))]
    return f"{' to '.join(dict.fromkeys([found[0], found[-1]]))} GB/s" if found else ""


def _caption_of_limit(result: dict[str, Any]) -> str:
    if not copy_speeds(result):
        return ""
    told = f"limit: a plain pass over memory moved {speed_of(result)}"
    slow, fast = min(copy_speeds(result)), max(copy_speeds(result))
    changed = fast > _MOVED * slow
    return told + "; it changed while rows were timed: compare times within a row" * changed


def _is_beyond(row: dict[str, Any]) -> bool:
    return "limit" in row and any(bar.device < row["limit"] for bar in bars_of(row))


def _cells(bar: Bar, row: dict[str, Any], result: dict[str, Any], on_cpu: bool) -> list[str]:
    count = bytes_of(row, result)
    limit = f"{100 * row['limit'] / bar.device:.1f} %" if "limit" in row else ""
    speed = "" if count is None else in_digits(count / bar.device / 1e6)
    times = [] if on_cpu else [f"{bar.host:.3f}", f"{bar.wall:.3f}"]
    ratio = f"{bar.device / row['ours']['device']:.2f}"
    return [
        bar.name,
        f"{bar.device:.3f}",
        bar.spread,
        ratio,
        limit,
        speed,
        *times,
        size_of(bar.memory),
        escape(bar.note),
    ]


def table_of_peers(device: str) -> Table:
    """The peers that were found, and why others were not; a peer with several adapters is one line."""
    view = Table(title=f"peers on {device}")
    for name in ("peer", "version", "stands beside", "states", ""):
        view.add_column(name)
    for name in dict.fromkeys(peer.name for peer in PEERS):
        all_of = [peer for peer in PEERS if peer.name == name]
        here = [peer for peer in all_of if device in peer.devices] or all_of
        why = here[0].why_not(device)
        asked = sorted({cls for peer in here if peer.only_asked for cls in peer.classes})
        classes = sorted({cls for peer in here for cls in peer.classes})
        version = "" if why else here[0].version()
        alone = f"{'' if asked == classes else ', '.join(asked) + ': '}only when asked for" if asked else ""
        states = " or ".join(here[0].states)
        view.add_row(
            name, version, ", ".join(classes), states, escape(why or alone), style="dim" if why else None
        )
    view.caption = "asked for: with --peer and a part of the name, or --peer all"
    return view


def scale_of(row: dict[str, Any]) -> float:
    """Milliseconds that the whole width of a chart stands for."""
    bars = bars_of(row)
    longest = max(max(bar.device, bar.wall) for bar in bars)
    return min(longest, _LONGEST * max(bars[0].device, row.get("limit", 0.0), bars[0].wall))


def picture(result: dict[str, Any], path: Path) -> None:
    """The rows with the most peers, a panel for each: milliseconds against the limit."""
    rows = shown_in_picture(result["results"])
    if not rows:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(2, len(rows))
    lines = -(-len(rows) // columns)
    tallest = max(len(bars_of(row)) for row in rows)
    size = (5.5 * columns, 0.9 + lines * (0.8 + 0.27 * tallest))
    figure, axes = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    for panel, row in zip(axes.flat, rows, strict=False):
        _panel(panel, row)
    for panel in [*axes.flat][len(rows) :]:
        panel.set_visible(False)
    where = f"{result['device']}, torch {result['torch']}"
    of_light = "" if "threads" in result else "; light: steps in a row, where the host is slower"
    figure.suptitle(f"Milliseconds a step, {where}", fontsize=11)
    figure.supxlabel(f"dashed: the limit, moving the same bytes alone{of_light}", fontsize=8)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def shown_in_picture(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the most peers, a few of each optimizer, in the order of the table."""
    timed = [row for row in rows if not trouble_of(row) and len(bars_of(row)) > 1]
    chosen: dict[str, dict[str, Any]] = {}
    taken: Counter[str] = Counter()
    for row in sorted(timed, key=lambda row: -len(bars_of(row))):
        if title_of(row) not in chosen and taken[row["optimizer"]] < _OF_ONE_OPTIMIZER:
            chosen[title_of(row)] = row
            taken[row["optimizer"]] += 1
    best = [*chosen.values()][:_MOST_PANELS]
    return [row for row in timed if any(row is other for other in best)]


def _panel(axes: Any, row: dict[str, Any]) -> None:
    bars, scale = bars_of(row), scale_of(row)
    names = [bar.name for bar in bars]
    colors = ["#1f6f8b", *["#9aa5ad"] * (len(bars) - 1)]
    light = ["#a9d0dc", *["#d9dee1"] * (len(bars) - 1)]
    axes.barh(names, [min(bar.wall, scale) for bar in bars], color=light, height=0.7)
    axes.barh(names, [min(bar.device, scale) for bar in bars], color=colors, height=0.7)
    for i, bar in enumerate(bars):
        place = min(max(bar.device, bar.wall), scale) + 0.015 * scale
        text = axes.text(place, i, milliseconds(bar.device), va="center", fontsize=8)
        # readable where the limit crosses it
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
        if bar.device > scale:
            # longer than there is room for
            axes.text(
                0.95 * scale, i, "//", va="center", ha="center", fontsize=12, color="white", weight="bold"
            )
    if "limit" in row:
        axes.axvline(row["limit"], color="#c2410c", linestyle="--", linewidth=1.2)
    axes.set_xlim(0, 1.3 * scale)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{row['model']}: {title_of(row)}", fontsize=9, loc="left")
