"""On a type of device that we have no tests for, an engine is tried out before it is used.

There is no such device here. A CPU stands in for it, with the triton engine in Triton's interpreter.
"""

import threading
import warnings

import pytest
import torch

import fusedstep
from fusedstep import _engines as engines
from tests.conftest import HAS_GPU, HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON or HAS_GPU, reason="needs Triton's interpreter")


@pytest.fixture
def trials(monkeypatch):
    """CPUs are untested, and stepped by Triton if nobody objects; the engines that were tried."""
    tried, real = [], engines.trial

    def trial(name, device_type):
        tried.append((name, device_type))
        return real(name, device_type)

    monkeypatch.setattr(engines, "trial", trial)
    monkeypatch.setattr(engines, "_TESTED", {"cuda"})
    monkeypatch.setattr(engines, "_verdicts", {})
    monkeypatch.setitem(engines._DEFAULT, "cpu", "triton")
    engines._warn_once.cache_clear()
    return tried


@pytest.fixture
def off(monkeypatch):
    """A compiler that takes one operation for another."""
    from fusedstep._engines.triton import source

    functions = source.sweep_function, source.scalars_function
    monkeypatch.setitem(source._CALLS, "fma", "tl.fma({}, {}, -({}))")
    monkeypatch.setitem(source._FLOAT32, "fma", "tl.fma({}, {}, -({}))")
    for function in functions:
        function.cache_clear()
    yield
    for function in functions:
        function.cache_clear()


def engine_after_a_step(**options):
    p = torch.nn.Parameter(torch.ones(5))
    p.grad = torch.ones(5)
    optimizer = fusedstep.SGD([p], lr=0.5, **options)
    optimizer.step()
    assert p.tolist() == [0.5] * 5
    return optimizer._plan.tables[0].engine.NAME


def test_an_engine_that_agrees_is_used_and_tried_once(trials):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert [engine_after_a_step() for _ in range(3)] == ["triton"] * 3
        assert engine_after_a_step(engine="triton") == "triton"
    assert trials == [("triton", "cpu")]


def test_one_that_disagrees_is_not_used_and_one_warning_says_why(trials, off):
    with pytest.warns(UserWarning, match="falls back to plain tensor operations on cpu.* off by") as caught:
        assert [engine_after_a_step() for _ in range(3)] == ["torch"] * 3
    assert len([w for w in caught if "falls back" in str(w.message)]) == 1
    assert trials == [("triton", "cpu")]


def test_one_that_was_asked_for_raises_instead(trials, off):
    with pytest.raises(RuntimeError, match=r"engine='triton' cannot step a parameter on cpu.* off by"):
        engine_after_a_step(engine="triton")
    assert trials == [("triton", "cpu")]


def test_an_error_in_the_trial_is_the_reason(trials, monkeypatch):
    def fail(table):
        raise NotImplementedError("no float64 here")

    monkeypatch.setattr(engines.load("triton", "cpu")[0], "bind", fail)
    with pytest.warns(UserWarning, match=r"NotImplementedError: no float64 here"):
        assert engine_after_a_step() == "torch"


def test_a_trial_that_was_interrupted_is_taken_again(trials, monkeypatch):
    def interrupt(table):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engines.load("triton", "cpu")[0], "bind", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine_after_a_step()
    assert engine_after_a_step() == "triton"
    assert len(trials) == 2


def test_threads_wait_for_one_trial(trials, off):
    # not with steps: Triton's interpreter knows one thread only
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(engines._verdict("triton", "cpu"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all("off by" in verdict for verdict in found)
    assert trials == [("triton", "cpu")]


def test_a_trial_in_inference_mode_and_on_a_default_device_leaves_no_trace(trials):
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.device("meta"):
        assert engines.trial("triton", "cpu") is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_our_other_engines_agree(name):
    assert engines.trial(name, "cpu") is None


def test_tested_devices_are_not_tried():
    assert {"cpu", "cuda"} >= engines._TESTED
    assert not {"npu", "xpu"} & engines._TESTED
    assert engines._DEFAULT["npu"] == engines._DEFAULT["xpu"] == "triton"
