"""What `fusedstep bench` runs, counts, refuses and leaves behind; not how fast anything is."""

import json

import pytest
import torch
from typer.testing import CliRunner

import fusedstep
from fusedstep.cli import bench
from fusedstep.cli.__main__ import app


def run(*args):
    return CliRunner().invoke(app, ["bench", "--device", "cpu", "--rounds", "1", *args])


def test_it_leaves_a_raw_result_and_a_chart(tmp_path):
    done = run("--only", "1000 x 64 SGD", "--output", str(tmp_path), "--commit", "abc")
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("cpu-*.json")
    found = json.loads(path.read_text())
    assert found["commit"] == "abc"
    assert found["torch"] == torch.__version__
    (row,) = found["results"]
    assert (row["model"], row["optimizer"], row["dtype"]) == ("1000 x 64", "SGD", "fp32")
    assert row["ours"]["host"] > 0
    assert row["peers"]["torch.optim.SGD"]["host"] > 0
    assert path.with_suffix(".png").stat().st_size > 1000


def test_a_part_does_not_replace_the_whole(tmp_path):
    for only in ("1000 x 64 SGD", "1000 x 64 SGD(momentum=0.9)"):
        assert run("--only", only, "--output", str(tmp_path)).exit_code == 0
    assert len([*tmp_path.glob("cpu-*1000-x-64-SGD*.json")]) == 2


def test_work_that_there_is_not_is_refused(tmp_path):
    done = run("--only", "nothing", "--output", str(tmp_path))
    assert done.exit_code == 2
    assert "found no work named 'nothing'" in done.output
    assert not [*tmp_path.iterdir()]


def test_the_chart_has_a_bar_for_every_row_beside_torch(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    bars, real = [], Axes.barh
    monkeypatch.setattr(Axes, "barh", lambda *args, **kw: bars.append(args[1:3]) or real(*args, **kw))
    ours, theirs, own = {"device": 1.0, "host": 2.0}, {"device": 6.0, "host": 4.0}, {"device": 9.0, "host": 9.0}
    row = {"model": "m", "optimizer": "AdamW", "dtype": "fp32", "ours": ours}
    results = [
        {**row, "options": {}, "peers": {"torch.optim.AdamW": theirs}},
        {**row, "options": {"statistics": True}, "peers": {"fusedstep.AdamW": own}},
        {**row, "options": {"sharded": True}, "peers": {"fusedstep.AdamW": own, "torch.optim.AdamW": theirs}},
    ]
    bench.chart(results, {"device": "d", "torch": "t"}, tmp_path / "chart.png")
    assert bars == [(["m  AdamW()  fp32", "m  AdamW(sharded=True)  fp32"], [3.0, 3.0])]


@pytest.mark.parametrize(
    ("optimizer", "options", "dtype", "count"),
    [
        ("SGD", {}, "fp32", 12),
        ("SGD", {"momentum": 0.9}, "fp32", 20),
        ("AdamW", {}, "fp32", 28),
        ("AdamW", {"sharded": True}, "fp32", 28),
        ("AdamW", {}, "bf16", 14),
        ("AdamW", {}, "bf16/fp32", 22),
        ("AdamW", {"statistics": True}, "fp32", 28),
        ("AdamW", {"max_grad_norm": 1.0, "skip_nonfinite": True}, "fp32", 32),
        ("AdamW", {"ema_decay": 0.9}, "bf16", 22),
        ("AdamW", {"grad_scale": 1.0}, "fp32", 32),
        ("AdamW", {"grad_scale": 1.0}, "bf16/fp32", 24),
        ("Lamb", {"grad_scale": 1.0, "max_grad_norm": None}, "fp32", 44),
        ("Lamb", {"grad_scale": 1.0}, "bf16", 26),
        ("Lamb", {"max_grad_norm": None}, "fp32", 40),
        ("Lamb", {}, "fp32", 44),
        ("Lamb", {}, "bf16", 24),
        ("BertAdam", {}, "fp32", 32),
        ("functional.adamw_", {}, "fp32", 28),
    ],
)
def test_bytes_that_must_move(optimizer, options, dtype, count):
    assert bench.bytes_per_parameter(bench.Work("", optimizer, options, dtype, ())) == count


def test_a_step_that_unscales_is_timed_beside_torchs():
    work = bench.Work("1000 x 64", "AdamW", {"grad_scale": 1.0}, "fp32", ("torch.optim.AdamW",))
    assert bench.measure(work, "cpu", 1, None)["peers"]["torch.optim.AdamW"]["host"] > 0
    assert work._replace(model="bert-large") in bench.GPU


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=str)
def test_a_wrong_result_is_not_timed(options, monkeypatch):
    work = bench.Work("1000 x 64", "AdamW", options, "fp32", ())
    bench.check(work, "cpu")
    real = fusedstep.AdamW.step

    def wrong(self, *args, **kwargs):
        real(self, *args, **kwargs)
        if self.engine is None:
            for p in self.param_groups[0]["params"]:
                p.data += 1e-3

    monkeypatch.setattr(fusedstep.AdamW, "step", wrong)
    with pytest.raises(RuntimeError, match=r"is off by .* and is not timed"):
        bench.check(work, "cpu")


@pytest.mark.parametrize(("device", "message"), [("tpu", "use cpu or cuda"), ("cuda", "use --device cpu")])
def test_devices_that_are_not_there_are_refused(device, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["bench", "--device", device])
    assert done.exit_code != 0
    assert message in done.output
