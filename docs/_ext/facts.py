"""`{facts} Lion`: what an optimizer is for, what it agrees with, where its source is and what it costs, at the
head of its page.

All of it is written elsewhere: in the table of family.md, and in the results of benchmarks.
"""

import inspect
import re
from pathlib import Path

import results
import selection
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import fusedstep

FAMILY = Path(__file__).parent.parent / "family.md"


def row_of(name):
    """The cells of an optimizer in family.md, by the heads of their columns."""
    lines = [line for line in FAMILY.read_text().splitlines() if line.startswith("|")]
    heads = _cells(lines[0])
    for line in lines[2:]:
        cells = _cells(line)
        if re.match(rf"\[{name}\]\(", cells[0]):
            return dict(zip(heads, cells, strict=True))
    raise ValueError(f"family.md has no row for {name}; add one to its table")


def _cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def measured(name):
    """The first row of this optimizer in the results of a GPU, in words; None where there is none."""
    rows = [row for row in results.rows("cuda") if row.model == selection.MODEL and row.dtype == "fp32"]
    row = next((row for row in rows if row.optimizer == name), None)
    if row is None:
        return None
    call = f"`{row.call}`: " if row.options else ""
    text = f"{call}{row.ours:.2f} ms on {row.model} in float32, on one {device()}"
    if row.share is not None:
        text += f", {100 * row.share:.0f} % of what a copy of its bytes allows"
    fastest = list(row.others.items())[:3]
    others = ", ".join(f"{peer} {ms:.3g} ms" for peer, ms in fastest)
    return f"{text}; {others}" if others else text


def device():
    return results.load(results.files("cuda")[0])["device"].removeprefix("NVIDIA ")


class Facts(SphinxDirective):
    required_arguments = 1

    def run(self):
        name = self.arguments[0]
        for path in (FAMILY, *(results.FOLDER / name for name in results.files("cuda"))):
            self.env.note_dependency(str(path))
        cells = list(row_of(name).items())[1:]
        file = Path(inspect.getsourcefile(getattr(fusedstep, name))).name
        cells.append(("rule and class", f"[{file}](../../fusedstep/optimizers/{file})"))
        time = measured(name)
        if time is not None:
            cells.append(("measured", time))
        listed = nodes.definition_list(classes=["facts"])
        for head, cell in cells:
            meaning = nodes.definition("", *self.parse_text_to_nodes(cell))
            listed += nodes.definition_list_item("", nodes.term("", head), meaning)
        return [listed]


def setup(app):
    app.add_directive("facts", Facts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
