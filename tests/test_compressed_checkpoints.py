"""Checkpoints of states of 8 bits and of masters: their own, those of float32 and torch's, other settings."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import fusedstep
from tests import formats
from tests.cases import KINDS, TORCH_CLASSES, by_name, name_of
from tests.pairs import copies, same_bits, set_grads, whole
from tests.test_masters import master

# of what they keep all that there is: nothing, a momentum, two moments, three
KEPT = ("sgd", "sgd-momentum", "adamw", "adam-amsgrad")
kinds = pytest.mark.parametrize("case", [*map(by_name, KEPT)], ids=name_of)
ADAMW = by_name("adamw")
SHAPES = [(65, 64), (4, 1025), (70,), ()]
# how an optimizer stores what it keeps
SETTINGS = {
    "plain": {},
    "float32": {"state_dtype": torch.float32},
    "bfloat16": {"state_dtype": "bfloat16"},
    "int8": {"state_dtype": "int8"},
    "int8-drawn": {"state_dtype": "int8", "rounding": "stochastic", "seed": 3},
    "drawn": {"rounding": "stochastic", "seed": 3},
    "split": {"master": "split"},
    "split8-int8": {"master": "split8", "state_dtype": "int8"},
    "split-int8": {"master": "split", "state_dtype": "int8"},
    "split-int8-drawn": {"master": "split", "state_dtype": "int8", "rounding": "stochastic", "seed": 3},
    "copied-int8": {"master": "float32", "state_dtype": "int8"},
    "split-first-int8": {"master": "split", "state_dtype": {"exp_avg": "int8", "exp_avg_sq": "float32"}},
}
settings = pytest.mark.parametrize("setting", SETTINGS)


def gradients(steps, seed=1):
    random = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=random).bfloat16() for shape in SHAPES] for _ in range(steps)]


def made(case, start=None, dtype=torch.bfloat16, **options):
    start = [torch.randn(shape).to(dtype) for shape in SHAPES] if start is None else start
    params = copies(start)
    return params, case.ours(params, **case.options, **options)


def run(optimizer, params, grads):
    for step in grads:
        set_grads(params, [g.to(p.dtype) for p, g in zip(params, step, strict=True)])
        optimizer.step()


def assert_same(a, ours, b, theirs):
    for p, q in zip(ours, theirs, strict=True):
        assert same_bits(p.detach(), q.detach())
        assert a.state[p].keys() == b.state[q].keys()
        assert all(torch.equal(value, b.state[q][name]) for name, value in a.state[p].items())


def assert_same_master(found, expected):
    """But for those half way between two parameters: a unit in the last place has them rounded to theirs."""
    difference = found.view(torch.int32) - expected.view(torch.int32)
    is_half = expected.view(torch.int32) & 0xFFFF == 0x8000
    assert (difference.abs() <= is_half.int()).all()


def allows(case, setting):
    return not isinstance(SETTINGS[setting].get("state_dtype"), dict) or "m" in dict(case.rule.states)


# its own


@settings
@kinds
def test_training_resumed_halfway_ends_where_training_without_a_stop_does(case, setting, tmp_path):
    if not allows(case, setting):
        pytest.skip("it has no such states")
    grads, options = gradients(6), SETTINGS[setting]
    params, optimizer = made(case, **options)
    run(optimizer, params, grads[:3])
    torch.save([[p.detach() for p in params], optimizer.state_dict()], tmp_path / "saved")
    run(optimizer, params, grads[3:])
    saved, state = torch.load(tmp_path / "saved", weights_only=True)
    resumed, other = made(case, saved, **options)
    other.load_state_dict(state)
    run(other, resumed, grads[3:])
    assert_same(optimizer, params, other, resumed)


@settings
def test_loading_changes_no_setting(setting):
    params, optimizer = made(ADAMW, **SETTINGS[setting])
    kept = ("state_dtype", "master", "rounding", "seed")
    before = [getattr(optimizer, name) for name in kept]
    run(optimizer, params, gradients(1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert [getattr(optimizer, name) for name in kept] == before


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "torch.save"])
@settings
def test_copies_of_an_optimizer_go_on_as_it_does(setting, way):
    params, optimizer = made(ADAMW, **SETTINGS[setting])
    run(optimizer, params, gradients(2))
    if way == "deepcopy":
        other = copy.deepcopy(optimizer)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(optimizer))
    else:
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    copied = other.param_groups[0]["params"]
    for name in ("state_dtype", "master", "rounding", "seed"):
        assert getattr(other, name) == getattr(optimizer, name)
    run(optimizer, params, gradients(2, seed=2))
    run(other, copied, gradients(2, seed=2))
    assert_same(optimizer, params, other, copied)


def test_settings_of_groups_are_those_of_the_constructor_and_not_of_the_checkpoint(tmp_path):
    def of(*group_settings):
        params = copies([torch.ones(64, 64).bfloat16()] * 2)
        groups = [{"params": [p], **each} for p, each in zip(params, group_settings, strict=True)]
        return params, fusedstep.AdamW(groups, lr=1e-2)

    first, second = {"state_dtype": "int8", "master": "split"}, {}
    params, optimizer = of(first, second)
    run_two = lambda opt, ps: (set_grads(ps, [torch.ones_like(p) for p in ps]), opt.step())
    run_two(optimizer, params)
    torch.save(optimizer.state_dict(), tmp_path / "saved")
    others, other = of({"master": None}, {"state_dtype": {"exp_avg": "int8"}, "master": "float32"})
    other.load_state_dict(torch.load(tmp_path / "saved", weights_only=True))
    run_two(other, others)
    a, b = (other.state[p] for p in others)
    assert {*a} == {"step", "exp_avg", "exp_avg_sq"}
    assert {*b} == {"step", "exp_avg_codes", "exp_avg_scales", "exp_avg_sq", "master"}
    assert "state_dtype" not in other.param_groups[0]
    assert other.param_groups[1]["master"] == "float32"
    # and of one without settings of its own nothing becomes its own
    others, other = of({}, {})
    other.load_state_dict(optimizer.state_dict())
    assert not {"state_dtype", "master"} & {*other.param_groups[0], *other.param_groups[1]}
    run_two(other, others)
    assert {*other.state[others[0]]} == {"step", "exp_avg", "exp_avg_sq"}


# expanded


@settings
@kinds
def test_an_expanded_checkpoint_holds_plain_tensors_of_float32(case, setting):
    if not allows(case, setting):
        pytest.skip("it has no such states")
    params, optimizer = made(case, **SETTINGS[setting], ema_decay=0.9)
    run(optimizer, params, gradients(2))
    before = copy.deepcopy(optimizer.state_dict())
    expanded = optimizer.expanded_state_dict()
    names = {name for _, name in case.rule.states} | {"ema"}
    kept = "master" in SETTINGS[setting]
    for p, values in zip(params, expanded["state"].values(), strict=True):
        assert {*values} - {"step"} == names | ({"master"} if kept else set())
        for name in {*values} - {"step"}:
            assert values[name].dtype == torch.float32
            assert values[name].shape == p.shape
        if kept:
            assert_same_master(values["master"], master(optimizer, p))
            assert same_bits(values["master"].bfloat16(), p.detach())
        for letter, name in case.rule.states:
            codes = optimizer.state[p].get(f"{name}_codes")
            if codes is not None:
                scales = optimizer.state[p][f"{name}_scales"]
                signed = letter not in case.rule.nonnegative
                assert (values[name].numpy() == formats.decoded(codes.numpy(), scales.numpy(), signed)).all()
    assert not {"state_dtype", "master"} & {*expanded["param_groups"][0]}
    # it is a copy: what the optimizer has stays as it is
    after = optimizer.state_dict()
    for i, values in before["state"].items():
        assert after["state"][i].keys() == values.keys()
        assert all(torch.equal(after["state"][i][name], value) for name, value in values.items())


@pytest.mark.parametrize("setting", ["int8", "split-int8", "copied-int8", "split"])
@pytest.mark.parametrize("case", [case for case in KINDS if case.ours in TORCH_CLASSES], ids=name_of)
def test_torchs_optimizers_load_an_expanded_checkpoint_and_go_on(case, setting, tmp_path):
    params, optimizer = made(case, **SETTINGS[setting])
    run(optimizer, params, gradients(3))
    torch.save(optimizer.expanded_state_dict(), tmp_path / "saved")
    state = torch.load(tmp_path / "saved", weights_only=True)
    masters = [state["state"].get(i, {}).get("master", p.detach().float()) for i, p in enumerate(params)]
    theirs, ours = copies(masters), copies(masters)
    torchs = case.theirs(theirs, **case.options)
    torchs.load_state_dict(copy.deepcopy(state))
    plain = case.ours(ours, **case.options)
    plain.load_state_dict(state)
    run(torchs, theirs, gradients(3, seed=2))
    run(plain, ours, gradients(3, seed=2))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@settings
@kinds
def test_a_checkpoint_of_float32_is_loaded_and_comes_back(case, setting):
    """Within what the formats lose, which is nothing of a master."""
    if not allows(case, setting):
        pytest.skip("it has no such states")
    params, optimizer = made(case, dtype=torch.float32)
    run(optimizer, params, gradients(3))
    state = copy.deepcopy(optimizer.state_dict())
    for i, p in enumerate(params):
        state["state"].setdefault(i, {})["master"] = p.detach().clone()
    ours, other = made(case, [formats.split(p.detach()) for p in params], **SETTINGS[setting])
    other.load_state_dict(state)
    back = other.expanded_state_dict()["state"]
    for i, p in enumerate(params):
        for _, name in case.rule.states:
            a, b = back[i][name], state["state"][i][name].float()
            assert (a - b).abs().max() <= b.abs().max() / 32 if b.numel() else True
        kept = SETTINGS[setting].get("master")
        assert ("master" in back.get(i, {})) == (kept is not None)
        if kept in ("split", "float32"):
            assert_same_master(back[i]["master"], p.detach())
        elif kept is not None:
            # of a parameter that was rounded at once the rest may be the next best
            torch.testing.assert_close(back[i]["master"], p.detach(), rtol=2.0**-15, atol=0)
    run(other, ours, gradients(1))


def test_a_checkpoint_of_torchs_is_loaded(tmp_path):
    params = copies([torch.randn(shape) for shape in SHAPES])
    torchs = torch.optim.AdamW(params, lr=1e-2)
    run(torchs, params, gradients(3))
    ours, optimizer = made(ADAMW, [p.detach().bfloat16() for p in params], **SETTINGS["split-int8"])
    optimizer.load_state_dict(torchs.state_dict())
    run(optimizer, ours, gradients(2, seed=2))
    run(torchs, params, gradients(2, seed=2))
    assert {*optimizer.state[ours[0]]} > {"exp_avg_codes", "exp_avg_sq_scales", "master_rest"}
    assert optimizer.state[ours[0]]["step"] == 5
    for p, q in zip(ours, params, strict=True):
        torch.testing.assert_close(p.float(), q.detach(), rtol=2.0**-6, atol=1e-2)


# every one to every third of the others: each kind of change is among them several times
CHANGES = [(a, b) for i, a in enumerate(SETTINGS) for k, b in enumerate(SETTINGS) if (i + k) % 3 == 0]


@pytest.mark.parametrize(("first", "second"), CHANGES)
def test_settings_may_change_between_saving_and_loading(first, second):
    params, optimizer = made(ADAMW, **SETTINGS[first])
    run(optimizer, params, gradients(3))
    ours, other = made(ADAMW, [p.detach() for p in params], **SETTINGS[second])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    a, b = (each.expanded_state_dict()["state"] for each in (optimizer, other))
    kept = [SETTINGS[each].get("master") for each in (first, second)]
    for i, p in enumerate(params):
        assert ("master" in b[i]) == (None not in kept)
        if "master" in b[i]:
            exact = (
                torch.equal if kept[1] != "split8" else lambda x, y: torch.allclose(x, y, rtol=2.0**-15, atol=0)
            )
            assert exact(b[i]["master"], a[i]["master"])
        for name in ("exp_avg", "exp_avg_sq"):
            x, y = b[i][name], a[i][name]
            assert (x - y).abs().max() <= y.abs().max() / 32
        assert same_bits(p.detach(), ours[i].detach())
    run(other, ours, gradients(2, seed=2))
    fresh, plain = made(ADAMW, [p.detach() for p in params], **SETTINGS[second])
    run(plain, fresh, gradients(1))
    for p, q in zip(ours, fresh, strict=True):
        assert other.state[p].keys() == plain.state[q].keys()
        assert {name: t.dtype for name, t in other.state[p].items()} == {
            name: t.dtype for name, t in plain.state[q].items()
        }


# over ranks


def model_of(seed=0, width=128):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 65)).bfloat16()
    if torch.distributed.is_initialized():
        fully_shard(model[0])
        fully_shard(model)
    return model


def step(model, optimizer, steps):
    for i in steps:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(i)).bfloat16()
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


def state_of(model, optimizer):
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def numbers(model, optimizer):
    """Of parameters and states, in lists; not all process groups know numbers of 16 bits."""
    wide = lambda t: whole(t.int() if t.dtype == torch.int16 else t)
    tensors = [*model.named_parameters()]
    for key, p in model.named_parameters():
        tensors += [(f"{key}.{name}", t) for name, t in sorted(optimizer.state[p].items())]
    return [(name, str(t.dtype), tuple(t.shape), wide(t).double().tolist()) for name, t in tensors]


def on_ranks(setting, steps, loads=None, saves=None, width=128):
    model = model_of(0 if loads is None else 1, width)
    optimizer = fusedstep.AdamW(model.parameters(), lr=1e-2, **SETTINGS[setting])
    if loads is not None:
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=loads)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    step(model, optimizer, steps)
    if saves is not None:
        dcp.save(state_of(model, optimizer), checkpoint_id=saves)
    return numbers(model, optimizer)


RANKED = ["int8", "split-int8", "split-int8-drawn", "copied-int8", "split8-int8", "drawn"]
ranked = pytest.mark.parametrize("setting", RANKED)


@ranked
def test_ranks_go_on_with_the_same_bits(two, setting, tmp_path):
    uninterrupted = two.run(on_ranks, setting, range(4))
    two.run(on_ranks, setting, range(2), None, tmp_path)
    assert two.run(on_ranks, setting, range(2, 4), tmp_path) == uninterrupted


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@ranked
def test_one_process_and_two_ranks_load_what_the_others_saved(two, setting, tmp_path):
    saved = two.run(on_ranks, setting, range(2), None, tmp_path / "two")[0]
    assert on_ranks(setting, range(0), tmp_path / "two") == saved
    saved = on_ranks(setting, range(2, 3), tmp_path / "two", tmp_path / "one")
    assert two.run(on_ranks, setting, range(0), tmp_path / "one") == [saved] * 2


def by_whole_tensors(setting):
    """As those do who save one file: gathered on all ranks, and given to all by the first."""
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    given = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = model_of()
    optimizer = fusedstep.AdamW(model.parameters(), lr=1e-2, **SETTINGS[setting])
    step(model, optimizer, range(2))
    state = get_optimizer_state_dict(model, optimizer, options=full)
    # torch makes states only where there are no gradients
    optimizer.zero_grad()
    other = fusedstep.AdamW(model.parameters(), lr=1e-2, **SETTINGS[setting])
    set_optimizer_state_dict(model, other, state, options=given)
    return numbers(model, optimizer) == numbers(model, other)


# no backend gathers whole numbers of 16 bits
@pytest.mark.parametrize("setting", [s for s in RANKED if SETTINGS[s].get("master") != "split"])
def test_whole_tensors_go_round(two, setting):
    assert two.run(by_whole_tensors, setting) == [True] * 2
