"""Checkpoints and pickles that an older version wrote load, and go on bit by bit: see recorded/make.py."""

import copy
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import HAS_TRITON
from tests.recorded.make import AFTER, BEFORE, ROWS, new_optimizer, new_params, results, train

FOLDER = Path(__file__).parent / "recorded"

rows = pytest.mark.parametrize("name", ROWS)


@pytest.fixture(autouse=True)
def an_fma_rounds_twice(monkeypatch, request):
    """As in Triton's interpreter before version 3.9, with which this was recorded; GPUs round once."""
    if HAS_TRITON:
        from triton.runtime.interpreter import InterpreterBuilder

        if os.environ.get("TRITON_INTERPRET") == "0" and "triton" in request.node.name:
            pytest.skip("recorded with the interpreter")

        fma = lambda self, x, y, z: self.binary_op(self.binary_op(x, y, np.multiply), z, np.add)
        monkeypatch.setattr(InterpreterBuilder, "create_fma", fma)


def saved(name):
    return torch.load(FOLDER / f"{name}.pt", weights_only=True)


def pickled(name):
    # what we wrote ourselves
    return pickle.loads((FOLDER / f"{name}.pickle").read_bytes())


def check_goes_on(name, optimizer, params, engine):
    """A few steps more lead where they led then: by bits, but for the torch engine, which now rounds as torch's
    own operations on lists do.
    """
    train(optimizer, params, range(BEFORE, BEFORE + AFTER))
    recorded = saved(name)["after"]
    expected = recorded[engine]
    expected = recorded[expected] if isinstance(expected, str) else expected
    found = results(optimizer, params)
    assert found.keys() == expected.keys()
    for key, old in expected.items():
        assert found[key].dtype == old.dtype, key
        if engine == "torch" and old.is_floating_point():
            torch.testing.assert_close(found[key], old)
        else:
            assert torch.equal(found[key], old), key


@rows
def test_a_checkpoint_goes_on_bit_by_bit(name, engine):
    params = new_params(ROWS[name])
    optimizer = new_optimizer(ROWS[name], params, engine)
    with torch.no_grad():
        for p, value in zip(params, saved(name)["params"], strict=True):
            p.copy_(value)
    optimizer.load_state_dict(saved(name)["state_dict"])
    check_goes_on(name, optimizer, params, engine)


@rows
def test_a_checkpoint_loads_in_the_middle_of_training(name, engine):
    """On the tables that are there already."""
    params = new_params(ROWS[name])
    optimizer = new_optimizer(ROWS[name], params, engine)
    train(optimizer, params, range(2))
    with torch.no_grad():
        for p, value in zip(params, saved(name)["params"], strict=True):
            p.copy_(value)
    optimizer.load_state_dict(saved(name)["state_dict"])
    check_goes_on(name, optimizer, params, engine)


@rows
def test_a_pickle_goes_on_bit_by_bit(name, engine):
    params, optimizer = pickled(name)
    optimizer.engine = engine
    check_goes_on(name, optimizer, params, engine)


@rows
def test_what_a_pickle_gave_is_an_optimizer_as_any_other(name):
    """It can be shown, copied, pickled and saved again, grow, and work under a GradScaler."""
    params, optimizer = pickled(name)
    assert type(optimizer).__name__ in repr(optimizer)
    again = pickle.loads(pickle.dumps((params, optimizer)))
    check_goes_on(name, again[1], again[0], "cpu")
    copied = copy.deepcopy((params, optimizer))
    check_goes_on(name, copied[1], copied[0], "cpu")
    new = torch.nn.Parameter(torch.ones(3, dtype=params[0].dtype))
    optimizer.add_param_group({"params": [new]})
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for p in (*params, new):
        p.grad = scaler.scale(torch.ones_like(p))
    before = params[0].detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(params[0], before)
    assert optimizer.step_was_skipped.item() is False
    optimizer.load_state_dict(optimizer.state_dict())


@rows
def test_a_pickle_has_the_attributes_of_a_new_one(name):
    _, optimizer = pickled(name)
    params = new_params(ROWS[name])
    new = new_optimizer(ROWS[name], params, "cpu")
    # torch leaves its own out of pickles
    theirs = {"_warned_capturable_if_run_uncaptured"}
    assert optimizer.__dict__.keys() == new.__dict__.keys() - theirs
    assert optimizer._step_supports_amp_scaling == new._step_supports_amp_scaling
    # BertAdam and Lamb did not have it
    later = {"fused"}
    assert optimizer.defaults.keys() | later == new.defaults.keys() | later
    for group, fresh in zip(optimizer.param_groups, new.param_groups, strict=True):
        assert group.keys() | later == fresh.keys() | later


def test_recorded_files_are_few_and_small():
    found = [path for path in FOLDER.iterdir() if path.suffix in (".pt", ".pickle")]
    assert {path.stem for path in found} == {*ROWS}
    assert sum(path.stat().st_size for path in found) < 300_000
