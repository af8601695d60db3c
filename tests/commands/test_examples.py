"""The examples run, and leave what they say they leave."""

import math
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

import fusedstep

EXAMPLES = Path(__file__).parents[2] / "examples"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def run(request, tmp_path, monkeypatch, capsys, one_thread):
    """Runs an example in an empty folder, and returns what it printed; in this process, which has torch."""
    monkeypatch.chdir(tmp_path)
    if request.param == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    run.device = request.param
    return run


def losses(printed):
    """Those that were reported, by step; of a step that was taken twice the last."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+):? loss ([\d.]+)", printed, re.M)}


def numbers(line):
    return [*map(float, re.findall(r"\d+\.\d+", line))]


def test_every_example_is_in_the_index_and_says_how_it_is_run():
    index = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert {*re.findall(r"\]\((\w+\.py)\)", index)} == files
    for name in files:
        assert f" examples/{name}" in (EXAMPLES / name).read_text().split('"""')[1], name


def interrupted_at(step):
    """An AdamW whose step of this number is interrupted."""

    class Interrupted(fusedstep.AdamW):
        taken = 0

        def step(self, *args, **kwargs):
            self.taken += 1
            if self.taken == step:
                raise KeyboardInterrupt
            return super().step(*args, **kwargs)

    return Interrupted


def test_a_gpt_that_was_interrupted_ends_as_one_that_was_not(run, monkeypatch):
    options = "--steps", 6, "--save-every", 2, "--checkpoint"
    whole = losses(run("gpt.py", *options, "whole.pt"))
    assert [*whole] == [1, 2, 4, 6]
    assert whole[6] < whole[1] - 1

    with monkeypatch.context() as patch:
        patch.setattr(fusedstep, "AdamW", interrupted_at(6))
        with pytest.raises(KeyboardInterrupt):
            run("gpt.py", *options, "resumed.pt")
    printed = run("gpt.py", *options, "resumed.pt")
    assert "goes on after step 4 of resumed.pt" in printed
    assert "it writes: 'Shall I " in printed
    # on a GPU attention adds up in an order of its own
    tolerance = 0.0 if run.device == "cpu" else 0.1
    assert losses(printed)[6] == pytest.approx(whole[6], rel=max(tolerance, 1e-9))
    a, b = (torch.load(name) for name in ("whole.pt", "resumed.pt"))
    assert a["scheduler"] == b["scheduler"]
    assert a["optimizer"]["param_groups"] == b["optimizer"]["param_groups"]
    for each, other in ((a["model"], b["model"]), (a["optimizer"]["state"], b["optimizer"]["state"])):
        torch.testing.assert_close(each, other, rtol=tolerance, atol=tolerance)


def test_bert_learns_alike_whatever_fits_into_memory(run):
    options = "--batch", 32, "--steps", 20, "--at-once"
    whole, in_pieces = (losses(run("bert.py", *options, size)) for size in (32, 12))
    assert whole == pytest.approx(in_pieces, rel=1e-3)
    assert whole[20] < whole[1] - 1.5


def test_images_are_told_by_a_network_whose_blocks_are_left_out(run):
    printed = run("images.py", "--steps", 40)
    found = losses(printed)
    assert found[40] < 0.5 * found[1]
    (right,) = re.findall(r"([\d.]+)% of new images", printed)
    # one in four by chance
    assert float(right) > 60
    fewest, most, count = map(int, re.search(r"steps had (\d+) to (\d+) of (\d+)", printed).groups())
    assert fewest < most <= count


def test_the_hugging_face_trainer_resumes(run):
    pytest.importorskip("transformers")
    options = "--steps", 10, "--save-every", 5
    line = run("with_hf_trainer.py", *options).splitlines()[-1]
    first, last, _ = numbers(line)
    assert last < first - 0.3
    shutil.rmtree("trainer/checkpoint-10")
    resumed = run("with_hf_trainer.py", *options).splitlines()[-1]
    assert resumed.startswith("10 steps: ")
    assert numbers(resumed) == pytest.approx(numbers(line), rel=1e-9 if run.device == "cpu" else 0.02)


def test_lightning_averages_saves_and_resumes(run):
    pytest.importorskip("lightning")
    loss, averaged = numbers(run("with_lightning.py", "--epochs", 2, "--folder", "a").splitlines()[0])
    assert max(loss, averaged) < 0.5
    assert loss != averaged
    printed = run("with_lightning.py", "--epochs", 3, "--folder", "b", "--resume", "a/epoch=1.ckpt")
    assert printed.startswith("96 steps: loss 0.")
    (state,) = torch.load("b/epoch=2.ckpt", weights_only=False)["optimizer_states"]
    assert all(each["step"] == 96 and "ema" in each for each in state["state"].values())


def test_a_cuda_graph_trains_as_steps_one_by_one_do(run):
    graph, eager = run("cuda_graph.py", "--steps", 60), run("cuda_graph.py", "--steps", 60, "--no-graph")
    for printed in (graph, eager):
        first, last, _ = numbers(printed)
        assert last < 0.5 * first
    assert "steps one by one" in eager
    assert ("replays of one CUDA graph" if run.device == "cuda" else "without a CUDA graph") in graph


def test_a_model_that_would_not_fit_fits_and_a_small_one_learns_as_well(run):
    large, small, exact, compressed = run("less_memory.py", "--steps", 60).splitlines()
    assert large.startswith("llama-1b does not fit into 16 GB with ")
    assert small.startswith("llama-1b fits into 16 GB with ")
    assert numbers(small)[0] < 0.45 * numbers(large)[0]
    (loss, size), (other, less) = numbers(exact), numbers(compressed)
    assert other == pytest.approx(loss, rel=0.02)
    assert loss < 3
    assert size == pytest.approx(16, abs=0.01)
    assert less == pytest.approx(7.03, abs=0.05)


def test_a_rule_of_ones_own_trains(run):
    found = [numbers(line) for line in run("own_rule.py").splitlines()]
    assert len(found) == 2
    assert all(last < 0.1 * first for first, last in found)


OF_ALL = ("grad_norm", "param_norm", "update_norm", "clip_factor", "nonfinite", "skipped")
TENSORS = [f"{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")]


def test_statistics_are_logged_to_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run("log_to_tensorboard.py", "runs").startswith("11 curves of 200 steps")
    events = EventAccumulator("runs")
    events.Reload()
    logged = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert {*logged} == {"loss"} | {f"step/{n}" for n in OF_ALL} | {f"grad_norm/{n}" for n in TENSORS}
    assert [event.step for event in events.Scalars("loss")] == [*range(0, 200, 20)]
    assert all(math.isfinite(value) for values in logged.values() for value in values)
    assert logged["loss"][-1] < 0.1 * logged["loss"][0]
    # the norm of all is made of those of each
    for norm, *each in zip(logged["step/grad_norm"], *(logged[f"grad_norm/{n}"] for n in TENSORS), strict=True):
        assert norm == pytest.approx(math.hypot(*each), rel=1e-4)
    assert logged["step/clip_factor"][0] < 1
    assert not any(logged["step/skipped"])


def test_statistics_are_logged_to_wandb(run, monkeypatch):
    pytest.importorskip("wandb", reason="an example logs to wandb if it is there; the tests do not need it")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run("log_to_tensorboard.py", "--wandb", "runs")
    (file,) = Path("runs/wandb").glob("offline-run-*/run-*.wandb")
    assert b"step/grad_norm" in file.read_bytes()


def test_muon_trains_beside_adamw_and_it_is_printed_which_parameters_each_has(run):
    printed = run("muon.py", "--steps", 60, "--every", 20)
    stepped_by = dict(re.findall(r"^(\S+) +(Muon|AdamW) ", printed, re.M))
    hidden = {f"blocks.{i}.{layer}.weight" for i in range(3) for layer in ("qkv", "out", "mlp.0", "mlp.2")}
    assert {name for name, optimizer in stepped_by.items() if optimizer == "Muon"} == hidden
    assert {"characters.weight", "places.weight", "head.weight", "norm.bias"} < {*stepped_by} - hidden
    found = losses(printed)
    assert [*found] == [20, 40, 60]
    # 2.38; 2.50 with a Muon that does nothing, 2.94 with such an AdamW
    assert found[60] < 2.44
