"""Training that is saved and resumed gives the bits of training that never stopped."""

import pytest
import torch

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
