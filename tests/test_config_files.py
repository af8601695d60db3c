"""Optimizers as configuration files make them: lists for pairs, names for dtypes; and what is no pair."""

import json

import numpy as np
import pytest
import torch

import fusedstep
from tests.cases import CLASSES

OmegaConf = pytest.importorskip("omegaconf").OmegaConf

# numbers that suit every pair there is
PAIR = (0.5, 0.75)
# of every class its options that are two numbers
PAIRS = {cls: [name for name, parts in cls.options.items() if len(parts) == 2] for cls in CLASSES}
name_of = lambda cls: cls.__name__
with_pairs = pytest.mark.parametrize("cls", [cls for cls in CLASSES if PAIRS[cls]], ids=name_of)
KINDS = {
    "list": list,
    "numpy": np.array,
    "omegaconf": lambda pair: OmegaConf.create([*pair]),
    "json": lambda pair: json.loads(json.dumps(pair)),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def stepped(optimizer, p):
    for _ in range(2):
        p.grad = torch.arange(4.0)
        optimizer.step()
    return p.detach()


def parameter():
    return torch.nn.Parameter(torch.arange(4.0) + 1)


@with_pairs
@kinds
@pytest.mark.parametrize("given", ["constructor", "group", "add_param_group", "later"])
def test_any_sequence_is_a_pair(cls, kind, given, engine):
    pairs, p, q = dict.fromkeys(PAIRS[cls], PAIR), parameter(), parameter()
    expected = stepped(cls([q], engine=engine, **pairs), q)
    found = {name: kind(pair) for name, pair in pairs.items()}
    if given == "constructor":
        optimizer = cls([p], engine=engine, **found)
    elif given == "group":
        optimizer = cls([{"params": [p], **found}], engine=engine)
    else:
        optimizer = cls([parameter()], engine=engine)
        optimizer.add_param_group({"params": [p], **(found if given == "add_param_group" else {})})
        if given == "later":
            optimizer.param_groups[1].update(found)
    assert torch.equal(stepped(optimizer, p), expected)
    if given != "later":
        # which are saved without a trace of the file; as in torch's groups, a list stays one
        stays = given != "constructor" and kind in (KINDS["list"], KINDS["json"])
        assert {type(optimizer.param_groups[-1][name]) for name in pairs} == {list if stays else tuple}


@with_pairs
def test_hydra_instantiates_an_optimizer(cls):
    instantiate = pytest.importorskip("hydra.utils").instantiate
    config = OmegaConf.create(
        {
            "_target_": f"fusedstep.{cls.__name__}",
            "_partial_": True,
            "lr": 0.1,
            "state_dtype": "torch.float32",
            **{name: [*PAIR] for name in PAIRS[cls]},
        }
    )
    p, q = (torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = instantiate(config)(params=[p])
    eager = cls([q], lr=0.1, state_dtype=torch.float32, **dict.fromkeys(PAIRS[cls], PAIR))
    for o, t in ((optimizer, p), (eager, q)):
        t.grad = torch.ones_like(t)
        o.step()
    assert torch.equal(p, q)
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    assert optimizer.state_dict().keys() == eager.state_dict().keys()
    assert optimizer.state_dict()["param_groups"] == eager.state_dict()["param_groups"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prefix", ["", "torch."])
def test_state_dtype_is_understood_by_name(dtype, prefix):
    p = parameter()
    optimizer = fusedstep.AdamW([p], state_dtype=prefix + str(dtype).removeprefix("torch."))
    stepped(optimizer, p)
    assert optimizer.state_dtype is dtype
    assert optimizer.state[p]["exp_avg"].dtype == dtype


@pytest.mark.parametrize("name", ["int32", "torch.complex64", "fp32", ""])
def test_a_name_of_no_state_dtype_is_refused_with_those_there_are(name):
    with pytest.raises(ValueError, match=rf"Invalid state_dtype: {name}; use .*torch.float32, .*bfloat16"):
        fusedstep.AdamW([parameter()], state_dtype=name)


@pytest.mark.parametrize("betas", [0.9, (0.9,), [], (0.9, 0.99, 0.999), None, "0.9", torch.ones(())], ids=str)
@pytest.mark.parametrize("cls", [cls for cls in CLASSES if "betas" in PAIRS[cls]], ids=name_of)
def test_betas_that_are_not_two_are_told_so(cls, betas):
    with pytest.raises(ValueError, match=r"Invalid betas: .*two numbers are needed, such as \(0.9, 0.999\)"):
        cls([parameter()], betas=betas)
    p = parameter()
    optimizer = cls([p])
    optimizer.param_groups[0]["betas"] = betas
    p.grad = torch.ones(4)
    with pytest.raises(ValueError, match=r"group 0 has betas=.*two numbers are needed"):
        optimizer.step()
    assert torch.equal(p, parameter())


@pytest.mark.parametrize("bounds", [1.0, (1.0,), (2.0, 1.0)], ids=str)
def test_trust_bounds_that_are_not_two_are_told_so(bounds):
    with pytest.raises(ValueError, match=r"Invalid trust_bounds: .*two numbers are needed"):
        fusedstep.Lamb([parameter()], trust_bounds=bounds)


def test_a_state_of_a_wrong_shape_names_its_parameter(engine):
    small, large = torch.nn.Linear(2, 3), torch.nn.Linear(4, 3)
    for model in (small, large):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    saved = fusedstep.AdamW(small.named_parameters(), engine=engine)
    saved.step()
    optimizer = fusedstep.AdamW(large.named_parameters(), engine=engine)
    optimizer.load_state_dict(saved.state_dict())
    with pytest.raises(RuntimeError, match=r"'exp_avg' has shape \(3, 2\).*parameter 'weight' has \(3, 4\)"):
        optimizer.step()
