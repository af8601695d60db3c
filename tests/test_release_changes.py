"""Gradients released in backward, while parameters, states, groups and options change in between."""

import gc
import weakref

import pytest
import torch
from torch import nn

import fusedstep
from tests.test_release import Twins, adamw, backward, counted

pytestmark = pytest.mark.usefixtures("one_thread")


def exchange(state, a, b):
    state[a], state[b] = state[b], state[a]


def share(state, a, b):
    state[a] = {
        **state[b],
        "exp_avg": state[b]["exp_avg"].clone(),
        "exp_avg_sq": state[b]["exp_avg_sq"].clone(),
    }


@pytest.mark.parametrize("change", [exchange, share])
@pytest.mark.parametrize("places", [(0, 2), (2, 0)])
def test_counts_go_with_the_states_that_other_parameters_get(change, places):
    twins = Twins(adamw, bucket_bytes=0)
    twins.step(3)
    for model, optimizer in zip(twins.models, (twins.a, twins.b), strict=True):
        change(optimizer.state, *(model[i].weight for i in places))
    twins.step(2)
    twins.check()


def test_a_bucket_is_one_part_again_after_layers_were_thawed_one_by_one(monkeypatch):
    twins = Twins(adamw, bucket_bytes=1 << 30)
    count = len(twins.models[0])
    for i in range(count):
        for model in twins.models:
            for j, layer in enumerate(model):
                layer.requires_grad_(j >= count - 1 - i)
        twins.step()
    twins.step()
    sizes = counted(monkeypatch)
    twins.step()
    assert sizes == [len([*twins.models[0].parameters()])]
    twins.check()


def test_a_gradient_that_is_dropped_while_it_waits_is_not_stepped():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = fusedstep.SGD([*a.parameters(), *b.parameters()], lr=1.0)
    fusedstep.release_gradients(nn.ModuleList([a, b]), optimizer, 1 << 30)
    before = [p.detach().clone() for p in a.parameters()]
    a(torch.ones(1, 4)).sum().backward()
    a.zero_grad()
    b(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, before, a.parameters()))
    assert all(p.grad is None for p in b.parameters())


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_given_twice_raises_as_in_the_plain_loop():
    model = nn.Linear(8, 8)
    optimizer = fusedstep.SGD([*model.parameters()] * 2, lr=1.0)
    handle = fusedstep.release_gradients(model, optimizer)
    model(torch.ones(1, 8)).sum().backward()
    with pytest.raises(ValueError, match="SGD was given a parameter twice"):
        optimizer.step()
    handle.remove()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_one_that_has_left_is_let_go_though_another_is_frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    optimizer = fusedstep.SGD(model.parameters(), lr=0.1)
    fusedstep.release_gradients(model, optimizer, 0)
    gone = optimizer.param_groups[0]["params"].pop(0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not gone._post_accumulate_grad_hooks


def test_one_that_left_and_came_back_within_a_step_is_released_again():
    model = nn.Linear(4, 4)
    optimizer = fusedstep.SGD(model.parameters(), lr=0.1)
    fusedstep.release_gradients(model, optimizer, 0)
    params = optimizer.param_groups[0]["params"]
    gone = params.pop(0)
    model(torch.ones(1, 4)).sum().backward()
    params.insert(0, gone)
    assert gone.grad is not None
    optimizer.step()
    before = gone.detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    assert gone.grad is None
    assert not torch.equal(gone, before)


@pytest.mark.parametrize(
    ("option", "error"),
    [({"lr": "x"}, "group 2 has lr='x'"), ({"betas": (0.9,)}, "group 2 has betas")],
    ids=["lr", "betas"],
)
def test_an_error_names_the_group_as_the_optimizer_has_it(option, error):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = fusedstep.AdamW([{"params": layer.parameters()} for layer in model])
    fusedstep.release_gradients(model, optimizer, 0)
    backward_of = lambda: model(torch.ones(2, 8)).sum().backward()
    backward_of()
    optimizer.step()
    optimizer.param_groups[2].update(option)
    with pytest.raises((TypeError, ValueError), match=error):
        backward_of()


def test_a_limit_that_is_set_between_two_backwards_of_a_step_is_refused():
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = fusedstep.SGD([*a.parameters(), *b.parameters()], lr=1.0)
    fusedstep.release_gradients(nn.ModuleList([a, b]), optimizer, 0)
    a(torch.ones(2, 8)).sum().backward()
    optimizer.param_groups[0]["max_grad_norm"] = 1e-3
    before = b.weight.detach().clone()
    with pytest.raises(RuntimeError, match="max_grad_norm"):
        b(torch.ones(2, 8)).sum().backward()
    assert torch.equal(b.weight, before)


def test_a_handle_that_was_used_holds_no_parameter():
    twins = Twins(adamw, bucket_bytes=1 << 30)
    backward(twins.models[0], 0)
    handle, params = twins.handle, [weakref.ref(p) for p in twins.models[0].parameters()]
    handle.remove()
    del twins
    gc.collect()
    assert not any(p() is not None for p in params)


def test_counts_that_processes_share_stay_shared():
    twins = Twins(adamw, bucket_bytes=0)
    twins.step(2)
    p = twins.models[0][0].weight
    count = twins.a.state[p]["step"].clone().share_memory_()
    twins.a.state[p] = {**twins.a.state[p], "step": count}
    twins.step(2)
    assert count == 4
    assert twins.a.state[p]["step"] is count
    twins.check()
