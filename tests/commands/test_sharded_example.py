"""The example that trains on many ranks: it resumes, with fewer of them or after one has died; on two nodes."""

import contextlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests import ranks

from .test_examples import EXAMPLES, losses

SHARDED = EXAMPLES / "train_sharded.py"
ONE_NODE = ["--standalone", "--nproc-per-node"]
# a checkpoint after steps 4 and 8
OPTIONS = ["--steps", "8", "--every", "1", "--save-every", "4", "--folder", "checkpoints"]
# two ranks cannot share one GPU, as they would on many machines that have any
ALONE = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def train_sharded(folder, options):
    """What the example prints on a rank that torchrun need not start."""
    spec = importlib.util.spec_from_file_location("train_sharded", SHARDED)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    os.chdir(folder)
    sys.argv = [str(SHARDED), *options]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        example.train(example.arguments(), torch.device("cpu"))
    return printed.getvalue()


def torchrun(folder, *commands, seconds=600):
    """Give these commands at the same time; what each printed, once all have ended well."""
    logs = [folder / f"torchrun-{i}.log" for i in range(len(commands))]
    started = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("w") as output:
                whole = [sys.executable, "-m", "torch.distributed.run", *command]
                place = {"cwd": folder, "env": {**os.environ, **ALONE}}
                started.append(subprocess.Popen(whole, stdout=output, stderr=subprocess.STDOUT, **place))
        end = time.monotonic() + seconds
        codes = [process.wait(max(0, end - time.monotonic())) for process in started]
    except subprocess.TimeoutExpired:
        codes = f"none after {seconds} s"
    finally:
        for process in started:
            # it ends its ranks when asked to, and leaves them when killed
            process.terminate()
        for process in started:
            process.wait(60)
    printed = [log.read_text() for log in logs]
    assert codes == [0] * len(commands), f"exit codes: {codes}\n" + "\n".join(printed)
    return printed


def saved(folder, step=8):
    """The tensors of a checkpoint: parameters, then states."""
    dcp_to_torch_save(folder / "checkpoints" / f"{step:08}", folder / "whole.pt")
    whole = torch.load(folder / "whole.pt")
    states = whole["optimizer"]["state"].items()
    return {**whole["model"], **{(name, key): t for name, state in states for key, t in state.items()}}


@pytest.fixture(scope="module")
def uninterrupted(two, tmp_path_factory):
    """Eight steps on two ranks: the folder, and the losses."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    printed, _ = two.run(train_sharded, folder, OPTIONS)
    found = losses(printed)
    assert [*found] == [*range(1, 9)]
    assert found[8] < found[1] - 0.5
    assert "ranks 2 device cpu steps done 0" in printed
    return folder, found


def assert_same(folder, uninterrupted, tolerance=0.0):
    """In the last checkpoint, by the largest element of each tensor."""
    expected = saved(uninterrupted[0])
    found = saved(folder)
    assert {*found} == {*expected}
    for name, tensor in expected.items():
        limit = tolerance * float(tensor.abs().max())
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=limit, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("size", "tolerance"), [(2, 0.0), (1, 1e-5)])
def test_sharded_training_resumes_from_the_last_complete_checkpoint(size, tolerance, uninterrupted, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(uninterrupted[0] / "checkpoints", checkpoints)
    # as if interrupted while saving
    (checkpoints / "00000008" / ".metadata").unlink()

    with ranks.world(size) as world:
        printed = world.run(train_sharded, tmp_path, OPTIONS)[0]
    assert f"ranks {size} device cpu steps done 4" in printed
    expected = {step: loss for step, loss in uninterrupted[1].items() if step > 4}
    assert losses(printed) == pytest.approx(expected, rel=max(tolerance, 1e-9))
    assert_same(tmp_path, uninterrupted, tolerance)


def test_sharded_training_goes_on_after_a_rank_has_died(uninterrupted, tmp_path, monkeypatch):
    # else ranks that were started again may wait for those before them
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    dying = f"""
        import os, signal, sys
        sys.path.append({str(EXAMPLES)!r})
        import train_sharded

        def save_and_die(folder, step, *rest, save=train_sharded.save):
            save(folder, step, *rest)
            if (step, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (4, "1", "0"):
                os.kill(os.getpid(), signal.SIGKILL)

        train_sharded.save = save_and_die
        train_sharded.main()
    """
    script = tmp_path / "dying.py"
    script.write_text(textwrap.dedent(dying))
    (printed,) = torchrun(tmp_path, ["--max-restarts", "3", *ONE_NODE, "2", script, *OPTIONS])
    assert re.findall(r"steps done (\d)", printed)[:2] == ["0", "4"], printed
    assert_same(tmp_path, uninterrupted)


def test_two_nodes_train_as_one_does(uninterrupted, tmp_path):
    # held here: a port that was free a moment ago may be taken
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{store.port}", "--rdzv-id", "fusedstep"]
    meet += ["--rdzv-conf", "is_host=0"]
    # the name of this machine may lead nowhere
    node = ["--nnodes", "2", "--nproc-per-node", "1", *meet, "--local-addr", "localhost", SHARDED, *OPTIONS]
    printed = torchrun(tmp_path, node, node)
    assert sorted(map(losses, printed), key=len) == [{}, uninterrupted[1]], printed
    assert_same(tmp_path, uninterrupted)


def test_copies_that_are_cut_train_as_one_does(two, uninterrupted, tmp_path):
    printed, _ = two.run(train_sharded, tmp_path, [*OPTIONS, "--replicas", "2", "--bf16"])
    assert losses(printed) == pytest.approx(uninterrupted[1], rel=0.02)
