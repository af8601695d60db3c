"""What the tables and pages of `fusedstep bench` say of times that mean little, and of peers that are wrong."""

import os

import pytest
from rich.console import Console

from fusedstep.cli import host, noise, report
from fusedstep.cli.page import page
from fusedstep.cli.progress import progress

from .bench_runs import ROOT, result_of, row_of, run, words_of


def spread(row, part, samples=20):
    for side in (row["ours"], *row["peers"].values()):
        low, high = (1 - part) * side["device"], (1 + part) * side["device"]
        side.update(quartiles={"device": [low, high]}, samples=samples)
    return row


def cells(result, name):
    (column,) = (column for column in report.table(result).columns if column.header == name)
    return [*column.cells]


def test_how_far_samples_are_apart_is_in_the_table_and_on_the_page():
    result = result_of(spread(row_of(), 0.034), threads="2")
    assert cells(result, "±") == ["3 %"] * 3
    assert "± 3 %, 50 % of the limit" in page(result)
    assert noise.note_of(result) == ""
    assert cells(result_of(spread(row_of(), 0.004)), "±") == ["0.4 %"] * 3
    # quartiles of three samples say nothing, and earlier results have none
    assert cells(result_of(spread(row_of(), 0.3, samples=3)), "±") == [""] * 3
    assert cells(result_of(row_of()), "±") == [""] * 3


def test_samples_that_are_far_apart_are_noted():
    result = result_of(spread(row_of(), 0.01), spread(row_of(), 0.3), threads="2")
    told = "samples of 3 of 6 times differ by up to ± 30 %: the machine is busy; compare within a row"
    assert noise.note_of(result).startswith(told)
    assert told in page(result)
    # one of many may be
    one = [spread(row_of(peers=()), 0.3 if i == 0 else 0.01) for i in range(30)]
    assert noise.note_of(result_of(*one)) == ""


def test_a_load_that_is_not_ours_alone_is_noted(monkeypatch):
    result = result_of(spread(row_of(), 0.01))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load, told in ((2.2, False), (7.0, True), (1.0, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        noise.keep_load(result)
        # the highest counts
        assert ("the machine is busy (load average 7.0 on 2 cores)" in noise.note_of(result)) == told


def test_loops_have_it_too():
    side = lambda low: {"median": 10.0, "low": low, "high": 11.0, "samples": 20}
    row = {"loop": "a", "timed": "step()", "ours": side(9.0), "peer": side(10.6), "ratio": 1.0, "target": 1}
    view = host.table([{**row, "note": ""}], "cpu")
    assert [[*column.cells] for column in view.columns if column.header == "±"] == [["10 %"], ["2 %"]]
    assert noise.note_of({"results": [{**row, "ours": side(1.0)}]}).startswith("samples of 1 of 2")


def old_row(**more):
    """As before: a peer that was off was timed, with a note."""
    row = row_of(**more)
    row["peers"]["timm"]["note"] = "with clip_grad_norm_, off by 0.003 after 3 steps, 6e-07 is allowed"
    return row


def test_a_peer_that_disagreed_in_an_earlier_result_has_no_time(monkeypatch, tmp_path):
    from matplotlib.axes import Axes

    names, barh = [], Axes.barh
    monkeypatch.setattr(Axes, "barh", lambda *args, **kw: names.append(args[1]) or barh(*args, **kw))
    result = result_of(old_row(), peers={"timm": "1", "torch fused": "2"})
    told = "disagrees with float64: with clip_grad_norm_, off by 0.003 after 3 steps"
    assert cells(result, "device") == ["2.000", "3.000", ""]
    assert cells(result, "x") == ["1.00", "1.50", ""]
    assert told in cells(result, "note")[2]
    text = page(result)
    assert told in text
    assert "90 ms" not in text
    assert "peer timm" not in text
    report.picture(result, tmp_path / "chart.png")
    assert names == [["fusedstep", "torch fused"]] * 2
    # nobody is left to compare with
    alone = old_row(peers=(("timm", 90.0),))
    assert report.shown_in_picture([alone]) == []


def test_those_of_committed_results_have_none():
    done = run("--read", str(ROOT / "benchmarks" / "cpu-amd-epyc.json"), "--only", "LARS")
    assert done.exit_code == 0
    assert "left out: disagrees with float64: off by 0.0058" in words_of(done)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0371, "0.037"), (0.5, "0.50"), (1.04, "1.0"), (9.96, "10"), (4252.4, "4252")]
)
def test_small_numbers_have_two_digits(value, text):
    assert report.in_digits(value) == text


def test_a_log_has_a_line_for_each_or_for_each_tenth(capsys):
    console = Console(width=20)
    assert [*progress(["one [bold]", "two"], "timing", console, 2, str)] == ["one [bold]", "two"]
    assert capsys.readouterr().out == "timing 1 of 2: one [bold]\ntiming 2 of 2: two\n"
    assert [*progress(range(35), "checking", console, 35)] == [*range(35)]
    lines = capsys.readouterr().out.splitlines()
    assert (len(lines), lines[0], lines[-1]) == (10, "checking 4 of 35", "checking 35 of 35")
