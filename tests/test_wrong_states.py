"""States of another kind than the one they are stored in: refused before anything is written, or converted."""

import copy

import pytest
import torch

import fusedstep

# how an optimizer stores, and a state that becomes of another dtype
WRONG = [
    ({"master": "float32"}, "master", torch.bfloat16),
    ({"master": "float32"}, "master", torch.float64),
    ({"master": "split"}, "master_rest", torch.float32),
    ({"master": "split"}, "master_rest", torch.int32),
    ({"master": "split8"}, "master_rest", torch.float32),
    ({"state_dtype": "int8"}, "exp_avg_scales", torch.float32),
    ({"state_dtype": "int8"}, "exp_avg_codes", torch.float32),
    ({}, "exp_avg", torch.int64),
    ({}, "exp_avg_sq", torch.bool),
]


def stepped(engine, **options):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(64, 64).bfloat16())
    optimizer = fusedstep.AdamW([p], engine=engine, **options)
    step(p, optimizer)
    return p, optimizer


def step(p, optimizer):
    p.grad = torch.randn_like(p)
    optimizer.step()


def contents(p, optimizer):
    return [p.detach().clone(), *(t.clone() for t in optimizer.state[p].values())]


@pytest.mark.parametrize(("options", "name", "dtype"), WRONG)
def test_a_state_of_another_dtype_is_refused(options, name, dtype, engine):
    p, optimizer = stepped(engine, **options)
    right = optimizer.state[p][name]
    optimizer.state[p][name] = right.to(dtype)
    before = contents(p, optimizer)
    with pytest.raises((TypeError, RuntimeError), match=name.removesuffix("_codes")):
        step(p, optimizer)
    assert all(map(torch.equal, contents(p, optimizer), before))
    optimizer.state[p][name] = right
    step(p, optimizer)
    assert optimizer.state[p]["step"] == 2


@pytest.mark.parametrize(("options", "name", "dtype"), [row for row in WRONG if row[1] != "master"])
def test_so_is_one_that_was_loaded(options, name, dtype):
    p, optimizer = stepped("cpu", **options)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0][name] = saved["state"][0][name].to(dtype)
    before = p.detach().clone()

    def go_on():
        optimizer.load_state_dict(saved)
        step(p, optimizer)

    with pytest.raises((TypeError, RuntimeError), match=name.removesuffix("_codes")):
        go_on()
    assert torch.equal(p, before)


def test_a_master_may_have_gone_through_an_optimizer_of_torch(engine):
    """Its loader casts all states to the parameter's dtype."""
    p, optimizer = stepped(engine, master="float32")
    q = torch.nn.Parameter(p.detach().clone())
    between = torch.optim.AdamW([q])
    between.load_state_dict(copy.deepcopy(optimizer.expanded_state_dict()))
    assert between.state[q]["master"].dtype == torch.bfloat16
    again = fusedstep.AdamW([q], engine=engine, master="float32")
    again.load_state_dict(between.state_dict())
    master = again.state[q]["master"]
    assert master.dtype == torch.float32
    assert torch.equal(master, p.float())
    step(q, again)
    assert torch.equal(again.state[q]["master"].bfloat16(), q)
