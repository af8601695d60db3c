"""The pages: every block of Python in them runs, and they speak of everything that is public."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import fusedstep
from fusedstep import functional, npu

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page):
    """The fenced blocks of a page: language, contents and the line they start on."""
    text = page.read_text()
    return [(m[1], m[2], text.count("\n", 0, m.start(2))) for m in BLOCK.finditer(text)]


@pages
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for language, text, line in blocks(page):
        if language == "python":
            # as many empty lines before it as in the page: a traceback then points there
            exec(compile("\n" * line + text, str(page), "exec"), names)


@pages
def test_a_page_calls_no_python_by_another_name(page):
    other = {"", "text", "shell", "{eval-rst}", "{toctree}"}
    assert {language for language, _, _ in blocks(page)} <= {"python", *other}


def test_everything_public_is_described_on_a_page():
    text = "\n".join(page.read_text() for page in PAGES)
    described = set(re.findall(r"^\.\. auto(?:class|function|exception|module):: (\S+)$", text, re.MULTILINE))
    public = {f"fusedstep.{name}" for name in fusedstep.__all__}
    public |= {f"fusedstep.npu.{name}" for name in npu.__all__}
    own = [f for name, f in vars(functional).items() if not name.startswith("_") and callable(f)]
    public |= {f"{f.__module__}.{f.__name__}" for f in own if f.__module__ == functional.__name__}
    assert public <= described, public - described


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform")
@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float32, torch.bfloat16]], ids=len)
@pytest.mark.parametrize(
    ("make", "limit", "row"),
    [
        (fusedstep.SGD, None, "`SGD`, `Adam`, `AdamW`, `BertAdam`"),
        (fusedstep.AdamW, None, "`SGD`, `Adam`, `AdamW`, `BertAdam`"),
        (fusedstep.AdamW, 1.0, "the same, with clipping"),
        (fusedstep.BertAdam, 1.0, "the same, with clipping"),
        (fusedstep.Lamb, None, "`Lamb` with `max_grad_norm=None`"),
        (fusedstep.Lamb, 1.0, "`Lamb`, with clipping"),
    ],
)
def test_a_step_takes_as_many_launches_as_the_page_says(make, limit, row, dtypes, monkeypatch):
    from fusedstep._engines.triton import engine as triton

    page = (ROOT / "docs" / "how_it_works.md").read_text()
    numbers = re.search(rf"^\| {re.escape(row)} \| (\d) \| (\d) \|", page, re.MULTILINE)
    launches, sweeps = map(int, numbers.groups())
    params = [torch.nn.Parameter(torch.ones(5, dtype=dtype, device=DEVICE)) for dtype in dtypes * 3]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = make(params, max_grad_norm=limit, engine="triton")
    optimizer.step()
    count, call = [0], triton._Launch.__call__

    def counted(self, *args):
        count[0] += 1
        call(self, *args)

    monkeypatch.setattr(triton._Launch, "__call__", counted)
    optimizer.step()
    # each sweep once more for a second mix of dtypes, and so the second scalars of Lamb
    more = sweeps + (make is fusedstep.Lamb)
    assert count[0] == launches + more * (len(dtypes) - 1)
