"""`fusedstep doctor`: what it tells, what it keeps to itself, and when it fails."""

import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fusedstep
from fusedstep import _engines
from fusedstep.cli import doctor
from fusedstep.cli.__main__ import app


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    # how fast this machine copies is not what is tested
    monkeypatch.setattr(doctor.timing, "copy_bandwidth", lambda device, numel: 5e7)


def run(**environment):
    return CliRunner().invoke(app, ["doctor"], env=environment)


def test_it_tells_versions_devices_engines_and_settings():
    done = run(OMP_NUM_THREADS="2")
    assert done.exit_code == 0, done.output
    for text in (f"torch {torch.__version__}", f"fusedstep {fusedstep.__version__}", "llvmlite", "numpy"):
        assert text in done.output
    assert "copies 50 GB/s" in done.output
    assert "cpu: cpu serves it" in done.output
    assert "\n    cpu: available\n" in done.output
    assert "\none AdamW step\n  cpu: ok\n" in done.output
    assert "OMP_NUM_THREADS=2" in done.output
    assert f"torch uses {torch.get_num_threads()}" in done.output
    assert "nothing essential is broken" in done.output
    assert "\x1b" not in done.output


def test_it_names_nobody(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/somebody"))
    done = run(TRITON_CACHE_DIR="/home/somebody/kernels", TORCH_HOME="/home/somebody/torch")
    assert "somebody" not in done.output
    assert "TORCH_HOME=~/torch" in done.output
    assert "triton: ~/kernels, not there yet" in done.output


def test_a_cache_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    assert f"{doctor.shortened(tmp_path)}, 1 kernels\n" in run(TRITON_CACHE_DIR=str(tmp_path)).output
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "every process compiles anew" in run(TRITON_CACHE_DIR=str(tmp_path)).output


def test_why_an_engine_does_not_serve_is_told(monkeypatch):
    real = _engines.load
    refused = lambda name, device: (None, "it is Tuesday") if name == "triton" else real(name, device)
    monkeypatch.setattr(_engines, "load", refused)
    done = run()
    assert done.exit_code == 0
    assert "triton: not available: it is Tuesday" in done.output


def test_an_engine_that_should_serve_and_does_not_is_broken(monkeypatch):
    real = _engines.load
    refused = lambda name, device: (None, "it is Tuesday") if name == "cpu" else real(name, device)
    monkeypatch.setattr(_engines, "load", refused)
    done = run()
    assert done.exit_code == 1
    assert "broken: cpu does not run on cpu: it is Tuesday; reinstall llvmlite" in done.output


def test_a_device_without_any_engine_is_broken(monkeypatch):
    monkeypatch.setattr(_engines, "load", lambda name, device: (None, "it is Tuesday"))
    done = run()
    assert done.exit_code == 1
    assert "broken: no engine takes tensors on cpu" in done.output
    assert "please report this" in done.output


def test_a_missing_package_is_broken_only_if_it_is_needed(monkeypatch):
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "matplotlib" else real(name))
    assert run().exit_code == 0
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "numpy" else real(name))
    done = run()
    assert done.exit_code == 1
    assert "broken: numpy is not installed; pip install numpy" in done.output


def test_a_container_that_gives_less_time_than_there_are_threads_is_told(monkeypatch):
    monkeypatch.setattr(doctor, "_quota", lambda: 1.5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    done = run()
    assert "its container limits it to the time of 1.5" in done.output
    assert "try OMP_NUM_THREADS=1" in done.output


def test_a_step_that_is_wrong_is_broken(monkeypatch):
    monkeypatch.setattr(fusedstep.AdamW, "step", lambda self: None)
    done = run()
    assert done.exit_code == 1
    assert "broken: an AdamW step on cpu failed: its result is wrong" in done.output
