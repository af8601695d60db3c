"""What `fusedstep bench --compare` takes for a change."""

import json
import re

import pytest

from fusedstep.cli import bench, compare
from fusedstep.cli.works import Work

from .bench_runs import ROOT, a_tiny_model, quick, result_of, row_of, run, words_of  # noqa: F401


def changed(before, now):
    return {(c.row, c.kind): c.verdict for c in compare.changes(result_of(before), result_of(now)) if c.verdict}


def with_spread(row, part):
    for side in (row["ours"], *row["peers"].values()):
        side["quartiles"] = {
            kind: [(1 - part) * side[kind], (1 + part) * side[kind]] for kind in ("device", "wall")
        }
    return row


def test_what_is_slower_beyond_noise_is_told():
    assert changed(row_of(device=2.0), row_of(device=2.02)) == {}
    assert changed(row_of(device=2.0), row_of(device=3.0)) == {
        ("m AdamW() fp32", "device"): "slower",
        ("m AdamW() fp32", "wall"): "slower",
    }
    assert changed(row_of(device=3.0), row_of(device=2.0))["m AdamW() fp32", "device"] == "faster"


def test_noise_is_what_samples_are_apart():
    noisy = lambda device: with_spread(row_of(device=device), 0.3)
    assert changed(noisy(2.0), noisy(3.0)) == {}
    assert changed(noisy(2.0), noisy(4.0)) != {}


def test_a_machine_that_is_slower_is_no_regression():
    slower = row_of(device=4.0, peers=(("torch fused", 6.0), ("timm", 180.0)))
    assert changed(row_of(), slower) == {}
    # what another version called torch's is the same
    old = row_of(peers=(("torch.optim.AdamW", 3.0),))
    assert changed(old, row_of(device=4.0, peers=(("torch fused", 6.0),))) == {}


def test_more_memory_is_told():
    now, before = row_of(), row_of()
    before["ours"]["memory"], now["ours"]["memory"] = 1000, 1100
    assert changed(before, now) == {("m AdamW() fp32", "memory"): "more"}


def test_a_regression_ends_with_an_error(tmp_path):
    paths = []
    for name, device in (("before", 2.0), ("now", 3.0)):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(result_of(row_of(device=device))))
    before, now = map(str, paths)
    assert run("--read", before, "--compare", before).exit_code == 0
    done = run("--read", now, "--compare", before)
    assert done.exit_code == 1
    assert "slower" in done.output


@pytest.fixture
def results(tmp_path):
    """Files of two results, of which one is half as fast."""

    def write(before=(), now=(), model="m"):
        for name, device, facts in (("before", 2.0, before), ("now", 4.0, now)):
            row = row_of(model if name == "now" else "m", device=device, options={"betas": [0.8, 0.9]})
            (tmp_path / f"{name}.json").write_text(json.dumps(result_of(row, **dict(facts))))
        return run("--read", str(tmp_path / "now.json"), "--compare", str(tmp_path / "before.json"))

    return write


def test_results_without_a_common_row_are_refused(results, tmp_path, tiny, monkeypatch):
    done = results(model="other")
    assert done.exit_code == 2
    assert "times of other rows only, such as 'm AdamW(betas=[0.8, 0.9]) fp32'; here is 'other" in words_of(
        done
    )
    # a run is not begun
    monkeypatch.setattr(bench, "measure", lambda work, setup: pytest.fail("it was timed"))
    for asked in (("--model", tiny), ("--only", "host steady")):
        done = run(*asked, "--compare", str(tmp_path / "before.json"))
        assert done.exit_code == 2
        assert "times of other rows only" in words_of(done)


def test_another_torch_or_number_of_threads_is_said(results):
    done = results({"torch": "2.11", "threads": "4"}, {"threads": "2"})
    assert done.exit_code == 1
    assert "torch 2, before 2.11; threads 2, before 4" in words_of(done)
    assert "before" not in words_of(results()).replace("only before", "").split("memory:")[0]


def test_another_device_is_no_regression(results):
    done = results({"device": "another"})
    assert done.exit_code == 0
    assert "another device, another; ratios say nothing about the code" in words_of(done)
    assert "slower" not in done.output.replace("0 slower or larger", "")


def test_options_are_the_same_in_a_run_and_in_a_file():
    work = Work("m", "AdamW", {"betas": (0.8, 0.9)}, "fp32")
    assert compare.name_of(work._asdict()) == compare.name_of(json.loads(json.dumps(work._asdict())))


RESULTS = [p for p in sorted((ROOT / "benchmarks").glob("*.json")) if re.match("cuda|cpu|host|cold", p.name)]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_can_be_compared_with(path):
    found = compare.read(path)
    changes = [*compare.changes(found, found)]
    assert len(changes) >= len(found["results"])
    assert not compare.worse(changes)
    assert compare.table(changes, found, found).row_count == len(changes)


def test_what_is_no_result_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("[1]")
    (tmp_path / "b.json").write_text('{"results": []}')
    others = [ROOT / "benchmarks" / name for name in ("at_scale.json", "muon-cuda-nvidia-h200.json")]
    for path in (tmp_path / "a.json", tmp_path / "b.json", *others):
        for option in ("--read", "--compare"):
            done = run(option, str(path))
            assert done.exit_code == 2
            assert "is no raw result of `fusedstep bench`; use one that --json wrote" in words_of(done)
    assert run("--read", str(tmp_path / "absent.json")).exit_code == 2
