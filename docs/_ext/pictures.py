"""Pictures of results: one palette, text that stays text, colours that follow the page's light and dark."""

import io
import re

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

# light and dark; the names are those of css variables
PALETTE = {
    "ink": ("#24292f", "#e3e6ea"),
    "muted": ("#6a737d", "#98a1ab"),
    "grid": ("#dfe3e8", "#3a4048"),
    "ours": ("#0b6e99", "#4fb3dd"),
    "limit": ("#b42318", "#ff8a75"),
    "peer1": ("#b3bac2", "#6c7681"),
    "peer2": ("#d4a72b", "#b98a10"),
    "peer3": ("#9479b5", "#a98fcb"),
    "peer4": ("#77a95f", "#6f9d58"),
    "peer5": ("#c97b85", "#c0717b"),
    "peer6": ("#8a6f5a", "#a58a74"),
}
COLOURS = {name: light for name, (light, _) in PALETTE.items()}
INK, MUTED, GRID, OURS, LIMIT = (COLOURS[name] for name in ("ink", "muted", "grid", "ours", "limit"))
_PEERS = [colour for name, colour in COLOURS.items() if name.startswith("peer")]
# inches; narrow, so that text is readable where a phone makes the picture small
WIDTH = 4.6
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


def variables(which):
    """The palette for light (0) or dark (1), as css variables."""
    return {f"picture-{name}": colours[which] for name, colours in PALETTE.items()}


def peer_colours(names):
    """A colour for every peer, the same in all pictures of a list of peers."""
    return {name: _PEERS[i % len(_PEERS)] for i, name in enumerate(names)}


def svg(name, figure):
    """A figure as text, the same for the same numbers; outside of a page it follows the system's colours."""
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    pyplot.close(figure)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    for colour, light in COLOURS.items():
        text = text.replace(light, f"var(--picture-{colour}, {light})")
    dark = "; ".join(f"--{variable}: {colour}" for variable, colour in variables(1).items())
    alone = f'<style class="alone">@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>'
    return re.sub(r"(<svg[^>]*>)", lambda match: match[1] + alone, text, count=1)


def _canvas(rows, left, per_row=0.23, extra=0.75):
    with matplotlib.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(WIDTH, extra + per_row * rows))
        figure.subplots_adjust(left=left, right=0.98)
    axes.tick_params(length=0)
    axes.grid(axis="x", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def bars(name, groups, colours, unit="milliseconds"):
    """Horizontal bars in groups: (label, limit or None, [(who, time), ...]); a bar that is too long is cut."""
    with matplotlib.rc_context(_STYLE):
        count = sum(len(times) for _, _, times in groups) + len(groups)
        figure, axes = _canvas(count, left=0.3)
        # one very slow peer must not make all others invisible
        ours = [times[0][1] for _, _, times in groups]
        end = max(max(ours), *(t for _, _, times in groups for _, t in times if t < 3.2 * max(ours))) * 1.18
        y, ticks, labels = 0.0, [], []
        for label, limit, times in groups:
            ticks.append(y + (len(times) - 1) / 2)
            labels.append(label)
            _group(axes, y, limit, times, colours, end)
            y += len(times) + 1
        axes.set_yticks(ticks, [""] * len(ticks))
        _labels(axes, ticks, labels)
        axes.set(xlim=(0, end), ylim=(y - 0.8, -0.9), xlabel=unit)
        axes.spines["left"].set_visible(False)
        _legend(axes, groups, colours)
        return svg(name, figure)


def _labels(axes, heights, labels):
    """Beside the axis, line by line: a browser with another font would not align lines that are one text."""
    for y, label in zip(heights, labels, strict=True):
        lines = label.split("\n")
        for i, line in enumerate(lines):
            place = {"xy": (0, y), "xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            offset = (-5, 10.5 * ((len(lines) - 1) / 2 - i))
            axes.annotate(line, xytext=offset, ha="right", va="center", **place)


def _group(axes, y, limit, times, colours, end):
    for i, (who, time) in enumerate(times):
        cut = time > end
        axes.barh(y + i, end if cut else time, height=0.86, color=colours[who])
        # beside the bar, and beside the line of the limit where that is just behind it
        behind = max(time, limit) if limit is not None and 0 <= limit - time < 0.08 * end else time
        x, side = (end * 0.985, "right") if cut else (behind + end * 0.012, "left")
        text = f"{time:.3g}" + (" (cut)" if cut else "")
        axes.text(x, y + i + 0.03, text, ha=side, va="center", fontsize=8)
    if limit is not None:
        axes.plot([limit, limit], [y - 0.5, y + len(times) - 0.5], color=LIMIT, linewidth=1.6)


def _legend(axes, groups, colours):
    present = dict.fromkeys(who for _, _, times in groups for who, _ in times)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours[who]) for who in present]
    names = list(present)
    if any(limit is not None for _, limit, _ in groups):
        handles.append(pyplot.Line2D([], [], color=LIMIT, linewidth=1.6))
        names.append("limit: a copy of as many bytes")
    axes.legend(handles, names, loc="lower left", bbox_to_anchor=(-0.4, 1.0), ncols=2, fontsize=8)


def points(name, found, colours):
    """Bytes a parameter against milliseconds: (label, bytes, time, who)."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _canvas(12, left=0.1)
        axes.grid(axis="both", linewidth=0.6)
        top, right = (max(point[i] for point in found) for i in (2, 1))
        # labels stand on the side where there is room, and not on each other
        heights = [
            _spread([p[2] for p in found if left_of(p[1], right) == side], 0.05 * top) for side in (0, 1)
        ]
        for label, size, time, who in found:
            side = left_of(size, right)
            axes.plot(size, time, "o", color=colours[who], markersize=6)
            x = size + (-0.03 if side else 0.03) * right
            axes.text(x, heights[side][time], label, ha="right" if side else "left", va="center", fontsize=8)
        axes.set(xlim=(0, 1.08 * right), ylim=(0, 1.1 * top))
        axes.set(xlabel="bytes a parameter, with its gradient", ylabel="milliseconds a step")
        return svg(name, figure)


def left_of(size, right):
    """Whether a label goes to the left of its point: at both ends, where the axis leaves room for it."""
    return int(not 0.48 * right < size < 0.72 * right)


def _spread(heights, gap):
    """Where labels stand, by where they should, at least a gap apart."""
    placed = sorted(set(heights))
    wanted = list(placed)
    for _ in range(100):
        for i in range(1, len(placed)):
            short = gap - (placed[i] - placed[i - 1])
            if short > 0:
                placed[i - 1] -= short / 2
                placed[i] += short / 2
    return dict(zip(wanted, placed, strict=True))


def dumbbells(name, found, ours="fusedstep", peer="torch fused"):
    """Two times each on a logarithmic axis: (label, ours, theirs), joined by a line in the winner's colour."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _canvas(len(found), left=0.42, per_row=0.2)
        labels, own, other = zip(*found, strict=True)
        theirs = COLOURS["peer2"]
        for y, (a, b) in enumerate(zip(own, other, strict=True)):
            axes.plot([a, b], [y, y], color=OURS if a <= b else theirs, linewidth=1.4, zorder=1)
        for times, colour, who in ((own, OURS, ours), (other, theirs, peer)):
            axes.plot(times, range(len(found)), "o", color=colour, markersize=5, label=who)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_yticks(range(len(found)), labels, fontsize=8)
        axes.set(ylim=(len(found) - 0.4, -0.6), xlabel="milliseconds until step() returns")
        axes.spines["left"].set_visible(False)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.4, 1.0), ncols=2, fontsize=8)
        return svg(name, figure)
