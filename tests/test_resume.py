"""Training that is saved and resumed gives the bits of training that never stopped."""

import pytest
import torch

import fusedstep
import fusedstep.npu
from tests.cases import CASES, KINDS, name_of

# each half: warm-ups end in the first, schedules in the second
STEPS = 20


def make(case, start, engine, **options):
    params = [torch.nn.Parameter(p.clone()) for p in start]
    return params, case.ours(params, engine=engine, **case.options, **options)


def train(params, optimizer, grads):
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()


def resume_is_exact(case, engine, path, dtype=torch.float32, **options):
    steps, shapes = STEPS, [(3,)] if engine == "triton" else [(3, 5), (), (70,)]
    start = [torch.randn(shape).to(dtype) for shape in shapes]
    # of changing size, so that some are clipped and some are not
    sizes = 10 ** torch.linspace(-2, 1, 2 * steps)[torch.randperm(2 * steps)]
    grads = [[(size * torch.randn(shape)).to(dtype) for shape in shapes] for size in sizes]
    params, optimizer = make(case, start, engine, **options)
    train(params, optimizer, grads[:steps])
    torch.save([[p.detach() for p in params], optimizer.state_dict()], path)
    train(params, optimizer, grads[steps:])

    saved, state = torch.load(path, weights_only=True)
    resumed, other = make(case, saved, engine, **options)
    other.load_state_dict(state)
    train(resumed, other, grads[steps:])
    for p, q in zip(params, resumed, strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() == other.state[q].keys()
        assert all(torch.equal(value, other.state[q][name]) for name, value in optimizer.state[p].items())
        assert optimizer.state[p].get("step", 2 * steps) == 2 * steps


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_training_resumed_halfway_ends_where_training_without_a_stop_does(case, engine, tmp_path):
    resume_is_exact(case, engine, tmp_path / "checkpoint")


@pytest.mark.parametrize("state_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_parameters_of_sixteen_bits_resume_exactly_too(case, state_dtype, tmp_path):
    resume_is_exact(case, "cpu", tmp_path / "checkpoint", torch.bfloat16, state_dtype=state_dtype)


def with_state(cls, groups, **options):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in groups]
    for p in params:
        p.grad = torch.ones(3)
    optimizer = cls([{"params": [p], **group} for p, group in zip(params, groups, strict=True)], **options)
    optimizer.step()
    return optimizer


def test_options_of_ours_stay_as_chosen_where_a_checkpoint_lacks_them():
    groups = [{"max_grad_norm": 0.5}, {"max_grad_norm": None}, {}]
    ours = with_state(fusedstep.AdamW, groups, max_grad_norm=2.0)
    ours.load_state_dict(with_state(torch.optim.AdamW, [{}, {}, {}], lr=0.5).state_dict())
    assert [group["max_grad_norm"] for group in ours.param_groups] == [0.5, None, 2.0]
    assert [group["lr"] for group in ours.param_groups] == [0.5, 0.5, 0.5]


def test_no_limit_is_an_option_that_is_saved():
    unlimited, other = (with_state(fusedstep.Lamb, [{}], **o) for o in ({"max_grad_norm": None}, {}))
    assert other.param_groups[0]["max_grad_norm"] == 1.0
    other.load_state_dict(unlimited.state_dict())
    assert other.param_groups[0]["max_grad_norm"] is None


def test_checkpoints_of_apex_and_nvidia_load():
    """Apex counts per group; NVIDIA's class has other names for the moments."""
    m, v = torch.full((3,), 0.5), torch.full((3,), 0.25)
    group = {"lr": 0.1, "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01}
    group |= {"grad_averaging": True, "max_grad_norm": 1.0, "step": 7, "params": [0]}
    lamb = with_state(fusedstep.Lamb, [{"always_adapt": True}])
    lamb.load_state_dict({"state": {0: {"exp_avg": m, "exp_avg_sq": v}}, "param_groups": [group]})
    (state,) = lamb.state.values()
    assert state["step"] == 7
    assert torch.equal(state["exp_avg"], m)
    assert lamb.param_groups[0]["always_adapt"]

    group = {"lr": 0.1, "schedule": "warmup_poly", "warmup": 0.1, "t_total": 50, "b1": 0.9, "b2": 0.99}
    group |= {"e": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0, "params": [0]}
    bert = with_state(fusedstep.BertAdam, [{}])
    saved = {"state": {0: {"step": 4, "next_m": m, "next_v": v}}, "param_groups": [group]}
    bert.load_state_dict(saved)
    (state,) = bert.state.values()
    assert (state["step"], bert.param_groups[0]["schedule"]) == (4, "warmup_poly")
    assert torch.equal(state["exp_avg_sq"], v)


def test_a_hook_may_complete_a_checkpoint_before_it_is_judged():
    bert = with_state(fusedstep.BertAdam, [{}])
    saved = with_state(torch.optim.AdamW, [{}]).state_dict()
    with pytest.raises(ValueError, match="has no warmup"):
        bert.load_state_dict(saved)

    def complete(optimizer, state_dict):
        defaults = {**optimizer.defaults, "schedule": "warmup_cosine"}
        groups = [{**defaults, **group} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    bert.register_load_state_dict_pre_hook(complete)
    bert.load_state_dict(saved)
    assert bert.param_groups[0]["schedule"] == "warmup_cosine"


@pytest.mark.parametrize("theirs", [torch.optim.Adam, torch.optim.AdamW, fusedstep.Adam])
@pytest.mark.parametrize("ours", [fusedstep.Lamb, fusedstep.npu.NpuFusedLamb])
def test_lamb_does_not_take_a_checkpoint_of_adam_for_its_own(ours, theirs):
    lamb = with_state(ours, [{}])
    before = {name: value.clone() for name, value in next(iter(lamb.state.values())).items()}
    with pytest.raises(ValueError, match="seems to come from another optimizer"):
        lamb.load_state_dict(with_state(theirs, [{}]).state_dict())
    assert all(torch.equal(value, before[name]) for name, value in next(iter(lamb.state.values())).items())
