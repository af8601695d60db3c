"""Makes performance.md and its pictures from the results in benchmarks/.

    python docs/performance.py

`make docs` runs it too. What it makes is committed, so that the page and its pictures can be read in the
repository without building anything; a test says when the page is no longer what the results say.
"""

import sys
from pathlib import Path

import jinja2

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "_ext"))

import results  # noqa: E402  (beside the extensions of Sphinx, which use it too)
import selection  # noqa: E402


def page():
    """The text of performance.md."""
    loader = jinja2.FileSystemLoader(DOCS)
    strict = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "keep_trailing_newline": True}
    environment = jinja2.Environment(loader=loader, **strict)
    gpu, cpu = results.rows("cuda"), results.rows("cpu")
    at_scale = ("at_scale.json", results.load("at_scale.json")["gpu"])
    context = {
        "device": results.load(results.files("cuda")[0])["device"].removeprefix("NVIDIA "),
        "model": selection.MODEL,
        "large_model": selection.LARGE_MODEL,
        "adamw": selection.by_dtype(gpu),
        "peers": selection.beside_peers(gpu, selection.MODEL),
        "along": selection.along(gpu),
        "family": selection.family(gpu, selection.MODEL),
        "stored": selection.stored(gpu, selection.LARGE_MODEL),
        "quality": results.quality(),
        "whole": results.load("end-to-end-cuda-nvidia-h200.json"),
        "gpu_loops": {row["loop"]: row for row in selection.loops("host-cuda")},
        "cpu_loops": {row["loop"]: row for row in selection.loops("host-cpu")},
        "cold": {name: results.load(name) for name in results.files("cold")},
        "cpu_memory": results.memory_speeds("cpu"),
        "cpu": [selection.marked(row) for row in cpu if row.others],
        "sources": [source for kind in results.KINDS for source in results.sources(kind)] + [at_scale],
    }
    words = {
        "ms": ms,
        "percent": percent,
        "fastest": fastest,
        "others": others,
        "ratio": ratio,
        "commit": commit,
    }
    return environment.get_template("performance.md.jinja").render(context, **words)


def fastest(row, package=""):
    """Of all others, or of those from a package."""
    times = [time for name, time in row.others.items() if name.startswith(package)]
    return min(times, default=None)


def others(row):
    """Their names and times, with what they say of themselves."""
    notes = {name: f" ({note})" for name, note in row.notes.items()}
    told = [f"{name} {ms(time)}{notes.get(name, '')}" for name, time in row.others.items()]
    told += [f"{name} left out: {note}" for name, note in row.wrong.items()]
    return ", ".join(told)


def commit(facts):
    """Short, as git shows it."""
    found = facts.get("commit", "not recorded")
    return found[:7] if len(found) == 40 else found


def ms(value):
    """Milliseconds with three digits, as many as a repetition confirms."""
    if value is None:
        return ""
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}"


def ratio(theirs, ours):
    """How many times as fast, in as many digits as mean something."""
    if theirs is None:
        return ""
    return f"{theirs / ours:.{2 if theirs < 2 * ours else 1 if theirs < 10 * ours else 0}f}"


def percent(share):
    return "" if share is None else f"{100 * share:.0f}\u00a0%"


def main():
    import drawings

    text = page()
    drawn = drawings.all_pictures()
    (DOCS / "performance").mkdir(exist_ok=True)
    for path in (DOCS / "performance").glob("*.svg"):
        if path.stem not in drawn:
            path.unlink()
    for name, picture in drawn.items():
        _write(DOCS / "performance" / f"{name}.svg", picture)
    _write(DOCS / "performance.md", text)


def _write(path, text):
    """Only what changed: Sphinx builds by date."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
        print(f"written: {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
