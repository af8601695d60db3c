"""Distributed checkpoints: what some ranks saved, others load and go on."""

import copy
import os
import signal
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import fusedstep
from tests import cases, ranks
from tests.cases import TORCH_CLASSES, by_name, name_of
from tests.pairs import whole

_AVERAGED = by_name("adamw").with_options("adamw-averaged", max_grad_norm=0.5, ema_decay=0.9)
KINDS = {case.name: case for case in (*cases.KINDS, _AVERAGED)}
kinds = pytest.mark.parametrize("kind", KINDS)


class Alone:
    """One process without a group: this one."""

    def run(self, function, *args):
        return [function(*args)]


def made(kind, seed=0):
    """A model, distributed over the ranks there are, and its optimizer: of a name, or a class with options."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))
    if torch.distributed.is_initialized():
        fully_shard(model[0])
        fully_shard(model)
    cls, options = (KINDS[kind].ours, KINDS[kind].options) if isinstance(kind, str) else kind
    return model, cls(model.parameters(), **options)


def train(model, optimizer, steps):
    for i in steps:
        # the same for any number of ranks
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()


def state_of(model, optimizer):
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def save(folder, model, optimizer):
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)


def load(folder, model, optimizer):
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def numbers(model, optimizer):
    """Of parameters and states, in lists: a pipe would share tensors."""
    tensors = [("weight", p) for p in model.parameters()]
    tensors += [pair for p in model.parameters() for pair in sorted(optimizer.state.get(p, {}).items())]
    return [(name, whole(t).tolist()) for name, t in tensors]


def trained(kind, steps, loads=None, saves=None):
    """Train so many steps, from a checkpoint and to one, if there are."""
    model, optimizer = made(kind, seed=0 if loads is None else 1)
    if loads is not None:
        load(loads, model, optimizer)
    train(model, optimizer, steps)
    if saves is not None:
        save(saves, model, optimizer)
    return numbers(model, optimizer)


def assert_close(found, expected):
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, a), (_, b) in zip(found, expected, strict=True):
        a, b = torch.tensor(a), torch.tensor(b)
        largest = float(b.abs().max())
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * largest, msg=lambda m, n=name: f"{n}: {m}")


@kinds
def test_the_same_number_of_ranks_goes_on_with_the_same_bits(four, kind, tmp_path):
    uninterrupted = four.run(trained, kind, range(6))
    four.run(trained, kind, range(3), None, tmp_path)
    assert four.run(trained, kind, range(3, 6), tmp_path) == uninterrupted


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@kinds
def test_any_number_of_ranks_goes_on(four, two, kind, tmp_path):
    uninterrupted = four.run(trained, kind, range(8))[0]
    last = None
    for i, (world, steps) in enumerate(
        [(four, range(3)), (two, range(3, 4)), (Alone(), range(4, 6)), (two, range(6, 7)), (four, range(7, 8))]
    ):
        found = world.run(trained, kind, steps, last, tmp_path / str(i))[0]
        last = tmp_path / str(i)
    assert_close(found, uninterrupted)


def saved_meanwhile(kind, folder):
    model, optimizer = made(kind)
    train(model, optimizer, range(3))
    before = numbers(model, optimizer)
    # of its own, or what it says would come between what training says
    group = torch.distributed.new_group()
    saving = dcp.async_save(state_of(model, optimizer), checkpoint_id=folder, process_group=group)
    train(model, optimizer, range(3, 6))
    saving.result()
    model, other = made(kind, seed=1)
    load(folder, model, other)
    assert numbers(model, other) == before
    train(model, other, range(3, 6))
    return numbers(model, other)


@pytest.mark.parametrize("kind", ["adamw-averaged", "lamb"])
def test_a_checkpoint_may_be_saved_while_training_goes_on(two, kind, tmp_path):
    assert two.run(saved_meanwhile, kind, tmp_path) == two.run(trained, kind, range(6))


def by_its_own_state_dict(kind, folder):
    model, optimizer = made(kind)
    train(model, optimizer, range(3))
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    model, other = made(kind, seed=1)
    train(model, other, range(1))
    state = {"model": model.state_dict(), "optimizer": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    train(model, other, range(3, 6))
    return numbers(model, other)


@kinds
def test_an_optimizers_own_state_dict_may_be_saved(two, kind, tmp_path):
    assert two.run(by_its_own_state_dict, kind, tmp_path) == two.run(trained, kind, range(6))


def by_options(kind, options, names):
    options, given = StateDictOptions(**options), StateDictOptions(**names)
    model, optimizer = made(kind)
    train(model, optimizer, range(3))
    weights, states = (
        get(*of, options=options)
        for get, of in ((get_model_state_dict, (model,)), (get_optimizer_state_dict, (model, optimizer)))
    )
    model, other = made(kind, seed=1)
    set_model_state_dict(model, copy.deepcopy(weights), options=given)
    set_optimizer_state_dict(model, other, copy.deepcopy(states), options=given)
    train(model, other, range(3, 6))
    return numbers(model, other)


_FULL = {"full_state_dict": True}
OPTIONS = {
    "parts": ({}, {}),
    "flat": ({"flatten_optimizer_state_dict": True},) * 2,
    "on-host": ({"cpu_offload": True}, {}),
    "whole": (_FULL, _FULL),
    "whole-from-one": ({**_FULL, "cpu_offload": True}, {**_FULL, "broadcast_from_rank0": True}),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["sgd-momentum", "adamw-averaged", "bert-adam", "lamb"])
def test_state_dicts_of_all_shapes_go_round(two, kind, options):
    assert two.run(by_options, kind, *OPTIONS[options]) == two.run(trained, kind, range(6))


def between(first, second, folder):
    """Half of the steps with each."""
    model, optimizer = made(first)
    train(model, optimizer, range(3))
    save(folder, model, optimizer)
    model, other = made(second, seed=1)
    load(folder, model, other)
    assert type(other) is second[0]
    train(model, other, range(3, 6))
    return numbers(model, other)


# those that torch has too, and that have a state to save
PEERS = [case for case in cases.KINDS if case.ours in TORCH_CLASSES and case.rule.states]


@pytest.mark.parametrize("case", PEERS, ids=name_of)
def test_checkpoints_of_torchs_go_both_ways(two, case, tmp_path):
    _, ours, theirs, _, options = case
    expected = two.run(trained, (theirs, options), range(6))[0]
    for i, (first, second) in enumerate(((ours, theirs), (theirs, ours), (ours, ours))):
        found = two.run(between, (first, options), (second, options), tmp_path / str(i))[0]
        assert_close(found, expected)


def torchs_into_more(folder):
    """A checkpoint of torch's says nothing about what only ours has."""
    more = {"max_grad_norm": 0.5, "ema_decay": 0.9}
    model, theirs = made((torch.optim.AdamW, {"lr": 1e-2}))
    train(model, theirs, range(3))
    save(folder, model, theirs)
    states = copy.deepcopy(get_optimizer_state_dict(model, theirs))
    ours = fusedstep.AdamW(model.parameters(), lr=1e-2, **more)
    set_optimizer_state_dict(model, ours, states)
    (group,) = ours.param_groups
    assert {name: group[name] for name in more} == more
    train(model, ours, range(3, 6))

    # from a file, where torch insists on every option that there is
    again, later = made("adamw", seed=1)
    load(folder, again, later)
    for group in later.param_groups:
        group.update(more)
    train(again, later, range(3, 6))
    found = numbers(again, later)
    assert found == numbers(model, ours)
    return {name for name, _ in found}, [float(later.state[p]["step"]) for p in again.parameters()]


def test_what_only_ours_has_stays_as_chosen(two, tmp_path):
    names = {"weight", "step", "exp_avg", "exp_avg_sq", "ema"}
    assert two.run(torchs_into_more, tmp_path) == [(names, [6.0] * 6)] * 2


def fresh_state(kind):
    model, optimizer = made(kind)
    before = [whole(p).clone() for p in model.parameters()]
    states = get_optimizer_state_dict(model, optimizer)["state"]
    assert all(map(torch.equal, map(whole, model.parameters()), before))
    assert all(p.grad is None for p in model.parameters())
    train(model, optimizer, range(1))
    names = {name: {*optimizer.state.get(p, {})} for name, p in model.named_parameters()}
    assert {name: {*states.get(name, {})} for name in names} == names
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for name, p in model.named_parameters():
        for state in names[name] - {"step"}:
            assert states[name][state].placements == p.placements


@kinds
def test_asking_a_fresh_optimizer_for_its_state_moves_no_weight(two, kind):
    two.run(fresh_state, kind)


def dies_in_the_next_step(kind, folder):
    """Rank 1 is killed where it should talk to the others; these tell what they saw."""
    model, optimizer = made(kind)
    train(model, optimizer, range(3))
    save(folder, model, optimizer)
    train(model, optimizer, range(3, 4))
    parts = [p.to_local().detach().clone() for p in model.parameters()]
    real = torch.distributed.all_reduce

    def dying(*args, **kwargs):
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    torch.distributed.all_reduce = dying
    start = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        train(model, optimizer, range(4, 5))
    seconds = time.monotonic() - start
    same = all(torch.equal(p.to_local(), part) for p, part in zip(model.parameters(), parts, strict=True))
    steps = {float(optimizer.state[p]["step"]) for p in model.parameters()}
    files = {os.path.basename(entry.path) for entry in error.traceback}
    return str(error.value), files, seconds, same, steps


@pytest.mark.parametrize("kind", ["lamb", "adamw-averaged"])
def test_training_goes_on_from_the_last_checkpoint_after_a_rank_was_killed_in_a_step(two, kind, tmp_path):
    with ranks.world(2) as world:
        survivor, dead = world.call(dies_in_the_next_step, kind, tmp_path)
    assert isinstance(dead, ChildProcessError)
    message, files, seconds, same, steps = survivor
    assert "gloo" in message
    assert "ranks.py" in files
    assert seconds < 15
    # it failed before anything was written
    assert same
    assert steps == {4.0}
    assert two.run(trained, kind, range(3, 6), tmp_path) == two.run(trained, kind, range(6))
