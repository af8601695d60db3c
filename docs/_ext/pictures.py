"""Pictures of results: one palette, text that stays text, colours that follow the page's light and dark."""

import io
import itertools
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
    "other": ("#b3bac2", "#6c7681"),
    "torch": ("#d4a72b", "#b98a10"),
}
COLOURS = {name: light for name, (light, _) in PALETTE.items()}
INK, MUTED, GRID, OURS, LIMIT, OTHER, TORCH = COLOURS.values()
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


def bars(name, groups):
    """Bars in groups, ours first: (label, limit or None, [(who, time), ...]); long ones are cut."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _canvas(sum(len(times) for _, _, times in groups) + len(groups), left=0.3)
        # one very slow peer must not make all others invisible
        longest = 3.2 * max(times[0][1] for _, _, times in groups)
        # room for a number and a name behind the bar
        end = 1.4 * max(time for _, _, times in groups for _, time in times if time < longest)
        y, ticks = 0.0, []
        for _, limit, times in groups:
            ticks.append(y + (len(times) - 1) / 2)
            _group(axes, y, limit, times, end)
            y += len(times) + 1
        axes.set_yticks(ticks, [""] * len(ticks))
        _labels(axes, ticks, [label for label, _, _ in groups])
        axes.set(xlim=(0, end), ylim=(y - 0.8, -0.9), xlabel="milliseconds")
        axes.spines["left"].set_visible(False)
        _legend(axes, any(limit is not None for _, limit, _ in groups))
        return svg(name, figure)


def _labels(axes, heights, labels):
    """Beside the axis, line by line: a browser with another font would not align lines that are one text."""
    for y, label in zip(heights, labels, strict=True):
        lines = label.split("\n")
        for i, line in enumerate(lines):
            place = {"xy": (0, y), "xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            offset = (-5, 10.5 * ((len(lines) - 1) / 2 - i))
            axes.annotate(line, xytext=offset, ha="right", va="center", **place)


def _group(axes, y, limit, times, end):
    for i, (who, time) in enumerate(times):
        is_cut, text = time > end, f"{time:.3g}" + (f" {who}" if i else "")
        axes.barh(y + i, min(time, end), height=0.86, color=OTHER if i else OURS)
        # beside the bar, and beside the line of the limit where that is just behind it
        behind = max(time, limit) if limit is not None and 0 <= limit - time < 0.08 * end else time
        x, side = (end * 0.985, "right") if is_cut else (behind + end * 0.012, "left")
        axes.text(x, y + i + 0.03, text + " (cut)" * is_cut, ha=side, va="center", fontsize=8)
    if limit is not None:
        axes.plot([limit, limit], [y - 0.5, y + len(times) - 0.5], color=LIMIT, linewidth=1.6)


def _legend(axes, has_limit):
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=OURS), pyplot.Line2D([], [], color=LIMIT, linewidth=1.6)]
    names = ["fusedstep", "limit: a copy of as many bytes"]
    shown = len(names) if has_limit else 1
    axes.legend(
        handles[:shown], names[:shown], loc="lower left", bbox_to_anchor=(-0.4, 1.0), ncols=2, fontsize=8
    )


def points(name, found):
    """Bytes a parameter against milliseconds: (label, bytes, time, whether it is ours)."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _canvas(12, left=0.1)
        axes.grid(axis="both", linewidth=0.6)
        highest = 1.6 * max(time for _, _, time, is_ours in found if is_ours)
        found = [_within(highest, *point) for point in found]
        top, right = (max(point[i] for point in found) for i in (2, 1))
        for is_left in (False, True):
            side = [point for point in found if _left_of(point[1], right) == is_left]
            for (label, size, time, is_ours), y in zip(
                side, _spread([p[2] for p in side], 0.05 * top), strict=True
            ):
                axes.plot(size, time, "o", color=OURS if is_ours else OTHER, markersize=6)
                x, to = size + (-0.03 if is_left else 0.03) * right, "right" if is_left else "left"
                axes.text(x, y, label, ha=to, va="center", fontsize=8)
        axes.set(xlim=(0, 1.08 * right), ylim=(0, 1.1 * top))
        axes.set(xlabel="bytes a parameter, with its gradient", ylabel="milliseconds a step")
        return svg(name, figure)


def _within(highest, label, size, time, is_ours):
    """A point that would make all others small is drawn at the edge, and says its time."""
    if time <= highest:
        return label, size, time, is_ours
    return f"{label}: {time:.0f} ms", size, highest, is_ours


def _left_of(size, right):
    """Whether a label goes to the left of its point: at both ends, where the axis leaves room for it."""
    return not 0.48 * right < size < 0.72 * right


def _spread(heights, gap):
    """Where labels stand, near where they should, but not on each other."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = list(heights)
    for _ in range(100):
        for low, high in itertools.pairwise(order):
            short = gap - (placed[high] - placed[low])
            if short > 0:
                placed[low] -= short / 2
                placed[high] += short / 2
    return placed


def dumbbells(name, found, ours="fusedstep", peer="torch fused"):
    """Two times each on a logarithmic axis: (label, ours, theirs), joined by a line in the winner's colour."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _canvas(len(found), left=0.42, per_row=0.2)
        labels, own, other = zip(*found, strict=True)
        for y, (a, b) in enumerate(zip(own, other, strict=True)):
            axes.plot([a, b], [y, y], color=OURS if a <= b else TORCH, linewidth=1.4, zorder=1)
        for times, colour, who in ((own, OURS, ours), (other, TORCH, peer)):
            axes.plot(times, range(len(found)), "o", color=colour, markersize=5, label=who)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_yticks(range(len(found)), labels, fontsize=8)
        axes.set(ylim=(len(found) - 0.4, -0.6), xlabel="milliseconds until step() returns")
        axes.spines["left"].set_visible(False)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.4, 1.0), ncols=2, fontsize=8)
        return svg(name, figure)
