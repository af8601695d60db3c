"""The pages: their Python runs, their links lead somewhere, and they speak of everything that is public."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

import fusedstep
from fusedstep import functional, npu, optimizers

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)]
# of these only the links are tested
OTHERS = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")]
BENCHMARKS = ROOT / "benchmarks"
BLOCK = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@pytest.fixture(scope="module")
def performance():
    """The script that makes the performance page."""
    sys.path.insert(0, str(DOCS))
    try:
        yield importlib.import_module("performance")
    finally:
        sys.path.remove(str(DOCS))


def blocks(page):
    """The fenced blocks of a page: language, contents and the line they start on."""
    text = page.read_text()
    return [(m[1], m[2], text.count("\n", 0, m.start(2))) for m in BLOCK.finditer(text)]


@pages
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    if page.parent.name == "recipes":
        pytest.skip("tests/integrations has what it needs, and runs it")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for language, text, line in blocks(page):
        if language == "python":
            # as many empty lines before it as in the page: a traceback then points there
            exec(compile("\n" * line + text, str(page), "exec"), names)


@pages
def test_a_page_calls_no_python_by_another_name(page):
    directives = {"{eval-rst}", "{toctree}", "{facts}", "{include}"}
    data = {"", "text", "shell", "yaml", "toml", "json"}
    assert {language for language, _, _ in blocks(page)} <= {"python"} | data | directives


@pytest.mark.parametrize("page", PAGES + OTHERS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_images_of_a_page_lead_somewhere(page):
    text = BLOCK.sub("", page.read_text())
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, place = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}, which is not there"
        if place and target.suffix == ".md":
            assert place in places(target), f"{page.name} links to {link}: {target.name} has no such heading"


def places(page):
    """What headings of a page can be linked by, as sphinx and GitHub make it: both drop what is no word."""
    included = re.findall(r"^```{include} (\S+)$", page.read_text(), re.MULTILINE)
    sources = [page, *(page.parent / path for path in included)]
    text = "\n".join(BLOCK.sub("", source.read_text()) for source in sources)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads]
    return {*words, *(re.sub(r"[\W_]+", "-", head.lower()).strip("-") for head in heads)}


def test_everything_public_is_described_on_a_page():
    text = "\n".join(page.read_text() for page in PAGES)
    described = set(re.findall(r"^\.\. auto(?:class|function|exception|module):: (\S+)$", text, re.MULTILINE))
    public = {f"fusedstep.{name}" for name in fusedstep.__all__}
    public |= {f"fusedstep.npu.{name}" for name in npu.__all__}
    own = [f for name, f in vars(functional).items() if not name.startswith("_") and callable(f)]
    public |= {f"{f.__module__}.{f.__name__}" for f in own if f.__module__ == functional.__name__}
    assert public <= described, public - described


@pytest.mark.parametrize("name", optimizers.__all__)
def test_every_optimizer_has_a_page_and_a_row_in_the_family(name):
    family = (DOCS / "family.md").read_text()
    row = re.search(rf"^\| \[{name}\]\((optimizers/\w+\.md)\) \|", family, re.MULTILINE)
    text = (DOCS / row[1]).read_text()
    assert text.startswith(f"# {name}\n\n```{{facts}} {name}\n")
    assert f".. autoclass:: fusedstep.{name}\n" in text


def test_the_performance_page_is_what_the_results_say(performance):
    made = (DOCS / "performance.md").read_text()
    assert made == performance.page(), "run `python docs/performance.py` and commit what it makes"


def test_results_are_read_though_rows_have_failed_or_are_of_a_later_version(performance, tmp_path, monkeypatch):
    results = performance.results
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    shared = {"model": "bert-large", "optimizer": "AdamW", "dtype": "fp32", "options": {}}
    apex = {"device": 3.0, "host": 1.0, "memory": 800, "note": "fp32 states"}
    sides = {"ours": {"device": 2.0, "wall": 5.0}, "peers": {"apex": apex, "torch fused": {"device": None}}}
    found = [{**shared, **sides, "parameters": 100, "left_out": {"timm": "ImportError"}}]
    found += [{**shared, "dtype": "bf16", "wrong": "by 3"}, {**shared, "model": "mine", "failed": "memory"}]
    (tmp_path / "cuda-x.json").write_text(json.dumps({"device": "X", "results": found}))
    (tmp_path / "cuda-x-part.json").write_text(json.dumps({"results": [{**shared, "ours": 9.0}]}))

    (row,) = results.rows("cuda")
    assert (row.ours, row.limit, row.share) == (2.0, None, None)
    assert row.others == {"apex": 3.0}
    assert row.allocated == {"apex": 8.0}
    assert performance.others(row) == "apex 3.00 (fp32 states)"


def test_the_decision_page_has_the_numbers_of_other_pages():
    text = re.sub(r"`[^`]*`", "", BLOCK.sub("", (DOCS / "choose.md").read_text()))
    elsewhere = (DOCS / "performance.md").read_text() + (DOCS / "memory.md").read_text()
    numbers = set(re.findall(r"\d+\.\d\d\b", text))
    assert len(numbers) > 8
    assert numbers <= set(re.findall(r"\d+\.\d\d\b", elsewhere))


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def test_commits_of_results_are_in_the_history_or_the_page_says_that_they_are_not():
    try:
        top, shallow = git("rev-parse", "--show-toplevel"), git("rev-parse", "--is-shallow-repository")
    except FileNotFoundError:
        pytest.skip("there is no git")
    # an sdist may lie in the checkout of something else
    if top.returncode or Path(top.stdout.strip()) != ROOT.resolve() or shallow.stdout.strip() != "false":
        pytest.skip("there is no whole history")
    (said,) = re.findall(r"[^.]*\sare not\sin the history\.", (DOCS / "performance.md").read_text())
    absent = set(re.findall(r"\b[0-9a-f]{7}\b", said))
    texts = [path.read_text() for path in BENCHMARKS.glob("*.json")]
    fields = [field for text in texts for field in re.findall(r'"commit": "([^"]*)"', text)]
    named = {commit for field in fields for commit in re.findall(r"\b[0-9a-f]{7,40}\b", field)}
    assert len(named) > 10
    lost = {commit[:7] for commit in named if git("cat-file", "-e", f"{commit}^{{commit}}").returncode}
    assert lost == absent


def test_host_times_of_released_gradients_are_the_results():
    results = json.loads((BENCHMARKS / "host-cpu-amd-epyc.json").read_text())["results"]
    loops = {row["loop"]: row for row in results}
    names = "backward and step", "released in 20 buckets", "released one by one"
    plain, *released = (loops[name] for name in names)
    sides = [plain["ours"], plain["peer"], *(row["ours"] for row in released)]
    text = " ".join((DOCS / "release.md").read_text().split())
    sentence = re.search(r"backward and step take (\S+) ms .* \((\S+) ms .* (\S+) ms if .* (\S+) ms if", text)
    assert sentence.groups() == tuple(f"{side['median'] / 1e3:.2g}" for side in sides)


def test_the_cases_in_which_we_are_slower_on_a_cpu_are_all_named(performance):
    rows = [row for row in performance.results.rows("cpu") if row.others]
    slower = {performance.ratio(performance.fastest(row), row.ours) for row in rows}
    (text,) = re.findall(r"^- On a CPU,.*?\n\n", (DOCS / "faq.md").read_text(), re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"\d\.\d+", text)) == {ratio for ratio in slower if float(ratio) < 1}


def test_the_page_names_the_packages_that_the_extra_adds():
    settings = (ROOT / "pyproject.toml").read_text()
    (extra,) = re.findall(r"^peers = \[\n(.*?)^\]", settings, re.MULTILINE | re.DOTALL)
    names = [name.removeprefix("torch-") for name in re.findall(r'"([\w-]+)>=', extra)]
    (sentence,) = re.findall(r"`peers` adds ([^.]*)\.", (DOCS / "performance.md").read_text())
    assert re.split(r",\s|\sand\s", sentence) == names


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
