"""What `fusedstep bench --only host` and `--only cold` run and leave behind; not how fast anything is."""

import json

import pytest
import torch
from typer.testing import CliRunner

import fusedstep
from fusedstep.cli import bodies, cold, host, loops
from fusedstep.cli.__main__ import app
from fusedstep.cli.side import Side

from .bench_runs import leaves_no_process_group, words_of  # noqa: F401


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(host, "_TURNS", 1)
    monkeypatch.setattr(bodies, "_ADDED", 2)


@pytest.mark.parametrize("loop", loops.LOOPS, ids=lambda loop: loop.name)
def test_every_loop_steps_as_its_peer_does(loop, short):
    found = host.measure(loop._replace(size=min(loop.size, 4)), "cpu", 1)
    assert found["ours"]["median"] > 0
    assert found["note"] == "no peer" or found["peer"]["median"] > 0


def test_a_loop_that_is_off_is_not_timed(short, monkeypatch):
    real = fusedstep.AdamW.step

    def wrong(self, *args, **kwargs):
        real(self, *args, **kwargs)
        self.param_groups[0]["params"][0].data += 1e-3

    monkeypatch.setattr(fusedstep.AdamW, "step", wrong)
    with pytest.raises(RuntimeError, match=r"'steady' is off by .* and is not timed"):
        host.measure(loops.LOOPS[0]._replace(size=2), "cpu", 1)


def test_what_a_loop_does_between_steps_is_not_timed(short, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(host.time, "perf_counter", lambda: clock[0])

    def pass_time(seconds):
        clock[0] += seconds

    def body(side):
        for i in range(4):
            pass_time(1000.0)
            yield lambda i=i: pass_time(i)

    ours = Side(fusedstep.AdamW, {}, "cpu", 1)
    loop = loops.Loop("a run", body, ends=True)
    assert [*iter(host.Runner(loop, ours).step, None)] == [0, 1, 2, 3]
    assert next(host.Runner(loop, ours).samples()) == 1.5


def test_verdicts():
    row = {"target": 4, "ratio": 4.0, "note": ""}
    assert host.verdict(row) == "met"
    assert host.verdict({**row, "ratio": 3.99}) == "below"
    assert host.verdict({**row, "target": None}) == ""
    assert host.verdict({**row, "ratio": None, "note": "no peer"}) == ""
    assert cold.verdict({"target": 1.0, "total": 1.0}) == "met"
    assert cold.verdict({"target": 1.0, "total": 1.01}) == "above"
    assert cold.verdict({"target": None, "total": 1.01}) == ""


def run(*args):
    return CliRunner().invoke(app, ["bench", "--device", "cpu", "--rounds", "1", "--commit", "abc", *args])


def test_loops_leave_a_raw_result(short, tmp_path):
    done = run("--only", "host 1 parameter", "--output", str(tmp_path))
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("host-cpu-*-1-parameter.json")
    found = json.loads(path.read_text())
    assert (found["commit"], found["torch"]) == ("abc", torch.__version__)
    (row,) = found["results"]
    assert (row["loop"], row["target"]) == ("1 parameter", 1)
    assert row["ratio"] == row["peer"]["median"] / row["ours"]["median"]


def test_a_cold_start_is_timed_in_its_parts(tmp_path):
    done = run("--only", "cold clipped", "--output", str(tmp_path))
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("cold-cpu-*.json")
    (row,) = json.loads(path.read_text())["results"]
    assert {*row["seconds"]} == {*cold.PARTS, *cold.BESIDE}
    assert row["total"] == pytest.approx(sum(row["seconds"][name] for name in cold.PARTS))


def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="unexpected keyword argument 'nothing'"):
        cold.measure(cold.Start("a start", {"nothing": 1}, False, {}), "cpu", 1)


@pytest.mark.parametrize("kind", ["host", "cold"])
def test_parts_that_there_are_not_are_refused(kind):
    done = run("--only", f"{kind} nothing")
    assert done.exit_code == 2
    words = words_of(done)
    assert "named 'nothing'; use a part of one of these:" in words
    assert {"host": "steady, fresh gradients", "cold": "AdamW, clipped"}[kind] in words
