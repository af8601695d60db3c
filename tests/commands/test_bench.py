"""What `fusedstep bench` runs, refuses and leaves behind; not how fast anything is."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from fusedstep.cli import asked, bench, report, works
from fusedstep.cli.__main__ import app
from fusedstep.cli.contender import stored
from fusedstep.cli.moved import bytes_per_parameter
from fusedstep.cli.page import page
from fusedstep.cli.works import CPU, GPU

from .bench_runs import ROOT, a_tiny_model, quick, result_of, row_of, rows_of, run, words_of  # noqa: F401


def test_it_leaves_a_raw_result_a_picture_and_a_report(tmp_path):
    done = run("--only", "1000 x 64 SGD", "--output", str(tmp_path), "--commit", "abc")
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("cpu-*.json")
    found = json.loads(path.read_text())
    assert found["commit"] == "abc"
    assert found["torch"] == torch.__version__
    assert found["peers"]["torch fused"] == torch.__version__
    (row,) = found["results"]
    assert (row["model"], row["optimizer"], row["dtype"]) == ("1000 x 64", "SGD", "fp32")
    assert row["bytes"] == 20 * 64000
    assert row["copy"]["bytes"] == 2 * 4 * 1000
    assert row["limit"] == row["bytes"] * row["copy"]["device"] / row["copy"]["bytes"]
    assert found["copy_bandwidth"] == row["copy"]["bytes"] / row["copy"]["device"]
    for side in (row["ours"], row["peers"]["torch fused"]):
        assert min(side["device"], side["host"], side["wall"]) > 0
        low, high = side["quartiles"]["device"]
        assert low <= side["device"] <= high
        # a momentum buffer
        assert 4 * 64000 <= side["memory"] <= 4.1 * 64000
    assert path.with_suffix(".png").stat().st_size > 1000
    assert "1000 x 64" in path.with_suffix(".html").read_text()


def test_a_part_does_not_replace_the_whole(tmp_path):
    for only in ("1000 x 64 SGD", "1000 x 64 SGD(momentum=0.9)"):
        assert run("--only", only, "--output", str(tmp_path)).exit_code == 0
    assert len([*tmp_path.glob("cpu-*1000-x-64-SGD*.json")]) == 2


def test_rows_are_left_in_the_folder_as_they_come_and_told_in_a_log(tmp_path, monkeypatch, tiny):
    real, seen = bench.measure, []

    def until_the_second(work, setup):
        if seen:
            raise KeyboardInterrupt
        seen.append(work)
        return real(work, setup)

    monkeypatch.setattr(bench, "measure", until_the_second)
    done = run("--model", tiny, "--optimizer", "Lion", "--optimizer", "SGD", "--output", str(tmp_path))
    assert done.exit_code != 0
    (path,) = tmp_path.glob("*.json")
    assert [row["optimizer"] for row in rows_of(path)] == ["Lion"]
    assert "timing 1 of 2: tiny Lion() fp32" in done.output
    assert "timing 2 of 2: tiny SGD() fp32" in done.output


def test_a_place_that_nothing_can_be_left_at_is_refused_before_anything_is_timed(tmp_path, monkeypatch, tiny):
    monkeypatch.setattr(bench, "measure", lambda work, setup: pytest.fail("it was timed"))
    file = tmp_path / "a"
    file.write_text("")
    for args, message in (
        (("--output", file), "it is a file; use a folder of your own"),
        (("--output", file / "b"), "nothing can be written into"),
        (("--json", tmp_path), "is a folder; name a file in it"),
        (("--json", file / "b"), "it is a file"),
    ):
        done = run("--model", tiny, *map(str, args))
        assert done.exit_code == 2
        assert message in words_of(done)


def test_a_raw_result_is_shown_again(tmp_path):
    reference = ROOT / "benchmarks" / "cuda-nvidia-h200.json"
    done = run("--read", str(reference), "--only", "resnet-50 AdamW", "--output", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert [row["model"] for row in rows_of(next(tmp_path.glob("*.json")))] == ["resnet-50"] * 3
    done = run("--read", str(reference), "--only", "nothing")
    assert done.exit_code == 2
    assert "contains 'nothing' in that result; use a part of one, as of 'bert-large AdamW() fp32'" in words_of(
        done
    )


def test_the_report_asks_for_nothing_and_says_all():
    wrong = {**row_of("<other>"), "wrong": "off by 1"}
    text = page(result_of(row_of(left_out={"apex": "OutOfMemoryError: <b>"}), wrong))
    assert not re.search(r"https?:|src=|@import|url\(|<script", text)
    for told in (
        "AdamW(), fp32",
        "50 % of the limit",
        "1.50 times ours",
        "90 ms",
        "WRONG: off by 1",
        "&lt;b&gt;",
    ):
        assert told in text
    assert "&lt;other&gt;" in text
    assert "prefers-color-scheme: dark" in text
    # timm's bar is cut: five times ours is the whole width
    assert text.count('class="bar cut"') == 1
    assert "left:10.00%" in text


def test_the_speed_of_memory_is_said_and_whether_it_changed():
    copied = lambda ms: row_of(copy={"device": ms, "bytes": 2e7})
    assert "limit: a plain pass over memory moved 1.0 GB/s" in report.table(result_of(row_of())).caption
    steady = report.table(result_of(copied(1.0), copied(1.1)))
    assert "moved 18.2 to 20.0 GB/s" in steady.caption
    assert "changed" not in steady.caption
    moved = result_of(copied(1.0), copied(1.5))
    assert "13.3 to 20.0 GB/s; it changed while rows were timed" in report.table(moved).caption
    assert "(13.3 to 20.0 GB/s)" in page(moved)


def test_what_is_beyond_the_limit_is_explained_where_there_is_some():
    caption = lambda ms: report.table(result_of(row_of(device=ms), threads="1")).caption
    assert "above 100 %" in caption(0.5)
    assert "above 100 %" not in caption(2.0)


def test_the_picture_shows_rows_with_most_beside_them_against_the_limit(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    bars, lines = [], []
    barh, axvline = Axes.barh, Axes.axvline
    monkeypatch.setattr(Axes, "barh", lambda *args, **kw: bars.append(args[1:3]) or barh(*args, **kw))
    monkeypatch.setattr(Axes, "axvline", lambda *args, **kw: lines.append(args[1]) or axvline(*args, **kw))
    alone, wrong = row_of(peers=()), {**row_of(optimizer="Lion"), "wrong": "off by 1"}
    report.picture(result_of(alone, row_of(), wrong), tmp_path / "chart.png")
    names = ["fusedstep", "torch fused", "timm"]
    # in a row behind, on the device before it
    assert bars == [(names, [2.0, 3.0, 10.0])] * 2
    assert lines == [1.0]


# a case of one's own


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine_of_test.py").write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2).bfloat16())\n"
        "    model[0].bias.requires_grad_(False)\n"
        "    return model\n"
        "def wide(width, *, depth=2): ...\n"
        "def nothing(): ...\n"
        "def fails(): raise RuntimeError('no weights here')\n"
        "def frozen(): return make().requires_grad_(False)\n"
        "number = 3\n"
        "model = torch.nn.Linear(8, 4)\n"
    )
    (tmp_path / "broken_of_test.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_a_model_of_ones_own(mine):
    done = run(
        "--model", "mine_of_test:make", "--optimizer", "lion", "--option", "betas=0.8,0.95", "--json", "a.json"
    )
    assert done.exit_code == 0, done.output
    (row,) = rows_of(mine / "a.json")
    assert (row["optimizer"], row["options"], row["dtype"]) == ("Lion", {"betas": [0.8, 0.95]}, "mixed")
    assert (row["tensors"], row["parameters"]) == (3, 32 + 10)
    assert row["bytes"] == 20 * 32 + 10 * 10


@pytest.mark.parametrize("command", ["bench", "memory"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine_of_test:wide", "needs arguments (width)"),
        ("mine_of_test:nothing", "returned NoneType"),
        ("mine_of_test:absent", "cannot be found"),
        ("mine_of_test:number", "is of type int; name a function"),
        ("mine_of_test:model", "is of type Linear; name a function"),
        ("mine_of_test:frozen", "has no parameters to train"),
        (
            "mine_of_test:fails",
            "raised RuntimeError: no weights here; `python -c 'import mine_of_test; mine_of_test.fails()'`",
        ),
        ("broken_of_test:make", "broken_of_test raised ZeroDivisionError: division by zero; `python -c"),
        ("bert", "found 'bert'; use one of bert-base"),
    ],
)
def test_a_model_that_cannot_be_made_is_said(command, name, message, mine):
    done = CliRunner().invoke(app, [command, "--model", name])
    assert done.exit_code == 2
    assert message in words_of(done)


def test_dtypes_have_torchs_names_too(tiny, tmp_path):
    for name, short in (("float32", "fp32"), ("bfloat16/float32", "bf16/fp32"), ("bf16", "bf16")):
        done = run("--model", tiny, "--dtype", name, "--json", str(tmp_path / "a.json"))
        assert done.exit_code == 0, done.output
        assert rows_of(tmp_path / "a.json")[0]["dtype"] == short


def test_storage_and_engine_are_options(tiny, tmp_path):
    stores = ("--state-dtype", "int8", "--master", "split", "--engine", "torch", "--dtype", "bf16")
    done = run("--model", tiny, *stores, "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 0, done.output
    (row,) = rows_of(tmp_path / "a.json")
    assert row["options"] == {"state_dtype": "int8", "master": "split", "engine": "torch"}


WHY = "Triton runs on CPU tensors only in its interpreter"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--only", "nothing"), "found no case whose name contains 'nothing'; use host (loops), cold (new"),
        (
            ("--only", "nothing"),
            "a part of a name such as 'bert-base AdamW() fp32', with a model (bert-base, 1000",
        ),
        (("--only", "nothing"), "a dtype (fp32, bf16, fp16)"),
        (("--only", "hosts"), "use host (loops), cold (new processes)"),
        (("--only", "x", "--optimizer", "Lion"), "'x'; use a part of 'bert-base Lion() fp32'"),
        (("--option", "momentum=0.9"), "found --option alone"),
        (("--only", "host", "--model", "moe"), "found --model beside --only host, which would ignore it"),
        (
            ("--only", "cold AdamW", "--dtype", "bf16", "--peer", "timm"),
            "found --dtype and --peer beside --only",
        ),
        (("--read", "a.json", "--optimizer", "Lion"), "found --optimizer beside --read"),
        (("--optimizer", "Lion", "--engine", "triton"), "triton does not run on cpu: Triton runs on CPU"),
        (("--optimizer", "Lion", "--option", "engine=triton"), "triton does not run on cpu"),
        (("--optimizer", "SGD", "--option", "momentu=0.9"), "SGD got an unexpected keyword argument 'momentu'"),
        (("--optimizer", "SGD", "--option", "momentum"), "use name=value"),
        (("--optimizer", "SGD", "--option", "lr=-1"), "-1"),
        (("--optimizer", "Adamm"), "there is no optimizer 'Adamm'"),
        (
            ("--optimizer", "SGD", "--dtype", "fp8"),
            "found 'fp8'; use one of fp32, fp16, bf16, bf16/fp32, or torch's",
        ),
    ],
)
def test_what_cannot_be_is_refused(args, message, tmp_path, monkeypatch):
    # it may be set, for tests of that engine
    monkeypatch.setattr(asked._engines, "load", lambda name, device: (None, WHY if name == "triton" else None))
    done = run(*args, "--output", str(tmp_path))
    assert done.exit_code == 2
    assert message in words_of(done)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("device", "message"), [("tpu", "use cpu or cuda"), ("cuda", "use --device cpu")])
def test_devices_that_are_not_there_are_refused(device, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["bench", "--device", device])
    assert done.exit_code != 0
    assert message in done.output


def test_every_case_of_the_table_can_be_made():
    for work in {work._replace(model="", peers=()) for work in map(hashable, CPU + GPU)}:
        work = work._replace(options=dict(work.options))
        assert bytes_per_parameter(work) > 0
        assert stored(work, [torch.ones(1, dtype=works.DTYPES[work.dtype][0])]).states


def hashable(work):
    return work._replace(options=tuple(work.options.items()))


# scripts beside


def script(name, *args):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), *args],
        env=environment,
        capture_output=True,
        text=True,
    )


def test_the_end_to_end_script_runs(tmp_path):
    pytest.importorskip("transformers")
    short = ("--device", "cpu", "--small", "--blocks", "1", "--iterations", "2", "--commit", "abc")
    done = script("end_to_end.py", *short, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("end-to-end-small-cpu-*.json")
    found = json.loads(path.read_text())
    assert min(found["ours"]["median"], found["torch fused"]["median"]) > 0


def test_the_release_script_runs_and_writes_its_page(tmp_path):
    pytest.importorskip("transformers")
    short = ("--device", "cpu", "--small", "--blocks", "1", "--iterations", "2", "--commit", "abc")
    done = script("release.py", "run", str(tmp_path), *short)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("release-small-cpu-*.json")
    found = json.loads(path.read_text())
    assert found["commit"] == "abc"
    kept, released = found["memory"]
    assert kept["predicted"] - released["predicted"] > 1
    assert min(each["median"] for each in found["time"]["ms"].values()) > 0
    spec = importlib.util.spec_from_file_location("release", ROOT / "benchmarks" / "release.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    page = benchmark.written(benchmark.PAGE.read_text(), found)
    assert f"| {released['predicted']:.2f} |" in page
    assert benchmark.written(page, found) == page
    for result in sorted((ROOT / "benchmarks").glob("release-cuda-*.json")):
        # what the page says is what was measured
        assert benchmark.written(page, json.loads(result.read_text())) == benchmark.PAGE.read_text()


def test_building_apex_says_what_it_needs(tmp_path):
    done = script("build_apex.py", str(tmp_path))
    assert done.returncode == 1
    assert "put a checkout of NVIDIA/apex into" in done.stderr
