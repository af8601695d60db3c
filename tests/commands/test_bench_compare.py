"""What `fusedstep bench --compare` takes for a change."""

import json
import re

import pytest

from fusedstep.cli import compare

from .bench_runs import ROOT, result_of, row_of, run


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
    for path in (tmp_path / "a.json", tmp_path / "absent.json", ROOT / "benchmarks" / "at_scale.json"):
        assert run("--read", str(path)).exit_code == 2
