"""What is loaded is what was saved: no option more, and nothing on a default device."""

import copy
import pickle

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fusedstep
from tests.cases import KINDS, name_of

cases = pytest.mark.parametrize("case", KINDS, ids=name_of)


def stepped(case, p, **options):
    optimizer = case.ours([p], **case.options, **options)
    p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


@cases
def test_loading_and_copying_add_nothing(case):
    p = torch.nn.Parameter(torch.randn(4))
    optimizer = stepped(case, p)
    saved, defaults = copy.deepcopy(optimizer.state_dict()), {**optimizer.defaults}
    loaded = case.ours([p], **case.options)
    loaded.load_state_dict(saved)
    for other in (loaded, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.state_dict()["param_groups"] == saved["param_groups"]
        assert other.defaults == defaults


@cases
def test_a_run_that_has_loaded_a_checkpoint_loads_its_first_one_by_dcp(case, tmp_path):
    model = torch.nn.Linear(3, 2)

    def new():
        optimizer = case.ours(model.parameters(), **case.options)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        return optimizer

    first = new()
    checkpoint.save({"optimizer": get_optimizer_state_dict(model, first)}, checkpoint_id=tmp_path, no_dist=True)
    resumed = new()
    resumed.load_state_dict(first.state_dict())
    wanted = {"optimizer": get_optimizer_state_dict(model, resumed)}
    checkpoint.load(wanted, checkpoint_id=tmp_path, no_dist=True)
    assert wanted["optimizer"].keys() == get_optimizer_state_dict(model, first).keys()


@cases
@pytest.mark.parametrize("as_number", [False, True])
def test_a_default_device_is_not_where_anything_of_ours_goes(case, as_number, engine):
    p = torch.nn.Parameter(torch.randn(4))
    saved = copy.deepcopy(stepped(case, p, engine=engine).state_dict())
    for values in saved["state"].values():
        if as_number and "step" in values:
            values["step"] = float(values["step"])
    before, expected = p.detach().clone(), copy.deepcopy(p)
    expected.grad = torch.ones_like(p)
    eager = case.ours([expected], engine=engine, **case.options)
    eager.load_state_dict(copy.deepcopy(saved))
    eager.step()
    with torch.device("meta"):
        loaded = case.ours([p], engine=engine, **case.options, skip_nonfinite=True, statistics=True)
        assert not loaded.step_was_skipped
        loaded.load_state_dict(saved)
        loaded.step()
        assert loaded.statistics().grad_norm == 2
        assert not loaded.step_was_skipped
    assert p.device.type == "cpu"
    assert all(t.device.type == "cpu" for t in loaded.state[p].values())
    assert not torch.equal(p, before)
    torch.testing.assert_close(p, expected)
    loaded.step()


@pytest.mark.parametrize("cls", [torch.optim.AdamW, fusedstep.AdamW])
def test_loaded_states_take_no_more_memory(cls):
    p = torch.nn.Parameter(torch.randn(4))
    p.grad = torch.ones(4)
    saving, loading = cls([p]), cls([p])
    saving.step()
    loading.load_state_dict(saving.state_dict())
    assert loading.state[p]["exp_avg"] is saving.state[p]["exp_avg"]
