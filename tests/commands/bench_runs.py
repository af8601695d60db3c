"""What tests of `fusedstep bench` share: the command, few samples, a small model, results as it leaves them."""

import atexit
import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fusedstep.cli import sharded, timing
from fusedstep.cli.__main__ import app
from fusedstep.cli.measure import Setup
from fusedstep.cli.shapes import MODELS

ROOT = Path(__file__).parents[2]
ON_CPU = Setup("cpu", 1)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A copy need not be large here, and torch's fused step waits for threads that get no core."""
    monkeypatch.setattr(timing, "_elements", lambda device: 1000)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def leaves_no_process_group():
    """A step of DTensors starts one for the rest of its process, where other tests want their own."""
    yield
    if torch.distributed.is_initialized():
        atexit.unregister(torch.distributed.destroy_process_group)
        torch.distributed.destroy_process_group()
        sharded._mesh.cache_clear()


@pytest.fixture(name="tiny")
def a_tiny_model(monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", [(7,), (3, 5)])
    return "tiny"


def words_of(done):
    """What a command printed, without the lines and breaks of a box."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", done.output).split())


def run(*args):
    return CliRunner().invoke(app, ["bench", "--device", "cpu", "--rounds", "1", *args])


def rows_of(path):
    return json.loads(path.read_text())["results"]


def row_of(model="m", device=2.0, peers=(("torch fused", 3.0), ("timm", 90.0)), **more):
    times = lambda ms: {"device": ms, "host": 1.0, "wall": ms}
    row = {"model": model, "optimizer": "AdamW", "options": {}, "dtype": "fp32", "ours": times(device)}
    return {**row, "peers": {name: times(ms) for name, ms in peers}, "limit": 1.0, **more}


def result_of(*rows, **facts):
    return {"device": "a machine", "torch": "2", "copy_bandwidth": 1e6, "results": [*rows], **facts}
