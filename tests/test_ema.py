"""ema_decay: the average of the parameters that torch's AveragedModel keeps, in the pass of the update."""

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fusedstep
from tests.cases import KINDS, name_of
from tests.numerics import judge

SHAPES = [(3, 2), (), (20,), (0,)]
NAN = float("nan")
kinds = pytest.mark.parametrize("case", KINDS, ids=name_of)


class Parameters(torch.nn.Module):
    """A model that is nothing but these."""

    def __init__(self, dtype=torch.float32, shapes=SHAPES):
        super().__init__()
        self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes)


def step(optimizer, params, grads=None):
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape).to(p.dtype) if grads is None else grads[i].clone()
    optimizer.step()


def averages(optimizer, params):
    return [optimizer.state[p]["ema"].clone() for p in params]


def values(params):
    return [p.detach().clone() for p in params]


def same(a, b):
    return all(map(torch.equal, a, b))


def exact(trajectory, decay):
    """The average of what parameters were before the first step and after each, in float64."""
    average = [np.asarray(p.double()) for p in trajectory[0]]
    for params in trajectory[1:]:
        average = [
            decay * e + (1 - decay) * np.asarray(p.double()) for e, p in zip(average, params, strict=True)
        ]
    return [torch.as_tensor(e) for e in average]


@pytest.mark.parametrize("decay", [0.9, 0.3])
@kinds
def test_averages_are_as_close_to_float64_as_those_of_torchs_averaged_model(case, decay, engine):
    model = Parameters()
    params, trajectory = [*model.parameters()], [values(model.parameters())]
    optimizer = case.ours(params, engine=engine, ema_decay=decay, **case.options)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    theirs.update_parameters(model)
    for _ in range(4):
        step(optimizer, params)
        theirs.update_parameters(model)
        trajectory.append(values(params))
    expected = exact(trajectory, decay)
    for ours, other, e in zip(averages(optimizer, params), theirs.parameters(), expected, strict=True):
        judge(ours, other.detach(), e, "average", 2)


@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [(torch.float16, None), (torch.bfloat16, torch.bfloat16)], ids=str
)
def test_sixteen_bits_are_averaged_in_thirty_two(dtype, state_dtype, engine):
    params = [*Parameters(dtype).parameters()]
    trajectory = [values(params)]
    optimizer = fusedstep.AdamW(params, lr=0.1, ema_decay=0.9, state_dtype=state_dtype, engine=engine)
    for _ in range(4):
        step(optimizer, params)
        trajectory.append(values(params))
    for ours, expected in zip(averages(optimizer, params), exact(trajectory, 0.9), strict=True):
        assert ours.dtype == torch.float32
        # of parameters as they are before they are rounded
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=2 * torch.finfo(dtype).eps)
    with optimizer.ema_parameters():
        assert same(params, [e.to(dtype) for e in averages(optimizer, params)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
def test_other_dtypes_are_averaged_in_themselves(dtype, engine):
    model = Parameters(dtype)
    params = [*model.parameters()]
    optimizer = fusedstep.AdamW(params, lr=0.1, ema_decay=0.8, engine=engine)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    theirs.update_parameters(model)
    for _ in range(3):
        step(optimizer, params)
        theirs.update_parameters(model)
    before = values(params)
    for ours, other in zip(averages(optimizer, params), theirs.parameters(), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, other.detach(), rtol=1e-6, atol=1e-6)
    with optimizer.ema_parameters():
        assert same(params, averages(optimizer, params))
    assert same(params, before)


@kinds
def test_an_average_changes_no_bit_of_the_update(case, engine):
    ours, others = ([*Parameters().parameters()] for _ in range(2))
    for p, q in zip(ours, others, strict=True):
        q.data.copy_(p.data)
    optimizer = case.ours(ours, engine=engine, ema_decay=0.9, **case.options)
    twin = case.ours(others, engine=engine, **case.options)
    for _ in range(2):
        grads = [torch.randn(p.shape) for p in ours]
        step(optimizer, ours, grads)
        step(twin, others, grads)
    assert same(ours, others)
    for p, q in zip(ours, others, strict=True):
        assert twin.state[q].keys() == optimizer.state[p].keys() - {"ema"}
        assert all(torch.equal(optimizer.state[p][name], value) for name, value in twin.state[q].items())


@kinds
def test_averages_resume_bit_by_bit(case, engine, tmp_path):
    params = [*Parameters(shapes=[(5,), ()]).parameters()]
    grads = [[torch.randn(p.shape) for p in params] for _ in range(4)]
    optimizer = case.ours(params, engine=engine, ema_decay=0.9, **case.options)
    for each in grads[:2]:
        step(optimizer, params, each)
    torch.save([values(params), optimizer.state_dict()], tmp_path / "saved")
    for each in grads[2:]:
        step(optimizer, params, each)

    saved, state = torch.load(tmp_path / "saved", weights_only=True)
    resumed = [torch.nn.Parameter(p) for p in saved]
    other = case.ours(resumed, engine=engine, ema_decay=0.9, **case.options)
    other.load_state_dict(state)
    for each in grads[2:]:
        step(other, resumed, each)
    assert same(params, resumed)
    assert same(averages(optimizer, params), averages(other, resumed))


@kinds
def test_a_checkpoint_without_averages_starts_them_at_the_parameters_as_they_are(case, engine):
    start = [*Parameters(shapes=[(5,), ()]).parameters()]
    theirs = case.theirs(start, **case.options)
    for _ in range(2):
        step(theirs, start)
    params = [torch.nn.Parameter(p.detach().clone()) for p in start]
    optimizer = case.ours(params, engine=engine, ema_decay=0.9, **case.options)
    optimizer.load_state_dict(theirs.state_dict())
    before = values(params)
    step(optimizer, params)
    for e, p, old in zip(averages(optimizer, params), params, before, strict=True):
        torch.testing.assert_close(e, 0.9 * old + 0.1 * p.detach())


@kinds
def test_an_average_that_is_asked_for_later_starts_at_the_parameters_as_they_are(case, engine):
    params = [*Parameters(shapes=[(5,), ()]).parameters()]
    optimizer = case.ours(params, engine=engine, **case.options)
    for _ in range(2):
        step(optimizer, params)
    before = values(params)
    optimizer.param_groups[0]["ema_decay"] = 0.9
    step(optimizer, params)
    for e, p, old in zip(averages(optimizer, params), params, before, strict=True):
        torch.testing.assert_close(e, 0.9 * old + 0.1 * p.detach())


def test_averages_of_a_checkpoint_become_what_this_optimizer_keeps():
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = fusedstep.SGD([p], lr=1.0, ema_decay=0.5)
    step(optimizer, [p], [torch.zeros_like(p)])
    state = optimizer.state_dict()
    state["state"][0]["ema"] = torch.full((2,), 3.0, dtype=torch.float64)
    optimizer.load_state_dict(state)
    assert optimizer.state[p]["ema"].dtype == torch.float32
    step(optimizer, [p], [torch.zeros_like(p)])
    assert optimizer.state[p]["ema"].tolist() == [2, 2]


def test_a_group_has_a_decay_of_its_own_or_none(engine):
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    groups = [{"params": [params[0]]}, {"params": [params[1]], "ema_decay": 0.75}]
    groups += [{"params": [params[2]], "ema_decay": None}]
    optimizer = fusedstep.SGD(groups, lr=1.0, ema_decay=0.5, engine=engine)
    for _ in range(2):
        step(optimizer, params, [torch.ones(2)] * 3)
    assert optimizer.state[params[0]]["ema"].tolist() == [-1.25, -1.25]
    assert optimizer.state[params[1]]["ema"].tolist() == [-0.6875, -0.6875]
    assert "ema" not in optimizer.state.get(params[2], {})
    with optimizer.ema_parameters():
        assert [p[0].item() for p in params] == [-1.25, -0.6875, -2]
    assert [p[0].item() for p in params] == [-2, -2, -2]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_decay_may_change_between_steps(as_tensor, engine):
    p, expected = torch.nn.Parameter(torch.ones(3)), torch.ones(3).double()
    tensor = torch.tensor(0.0)
    optimizer = fusedstep.AdamW([p], lr=0.1, ema_decay=tensor if as_tensor else 0.0, engine=engine)
    for decay in (0.9, 0.5, 0.99, 0.0, 1.0, 0.1):
        if as_tensor:
            tensor.fill_(decay)
        else:
            optimizer.param_groups[0]["ema_decay"] = decay
        step(optimizer, [p])
        expected = decay * expected + (1 - decay) * p.detach().double()
        torch.testing.assert_close(optimizer.state[p]["ema"].double(), expected, rtol=1e-6, atol=1e-8)


def test_an_average_rests_while_there_is_no_decay(engine):
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = fusedstep.SGD([p], lr=1.0, ema_decay=0.5, engine=engine)
    for decay, expected in ((0.5, -0.5), (0.5, -1.25), (None, -1.25), (0.5, -2.625)):
        optimizer.param_groups[0]["ema_decay"] = decay
        step(optimizer, [p], [torch.ones(2)])
        assert optimizer.state[p]["ema"].tolist() == [expected, expected]


def test_turning_momentum_on_does_not_start_the_average_over(engine):
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = fusedstep.SGD([p], lr=1.0, ema_decay=0.5, engine=engine)
    for momentum, expected in ((0.0, -0.5), (0.0, -1.25), (0.9, -2.125)):
        optimizer.param_groups[0]["momentum"] = momentum
        step(optimizer, [p], [torch.ones(2)])
        assert optimizer.state[p]["ema"].tolist() == [expected, expected]


@kinds
def test_a_skipped_step_leaves_averages_alone(case, engine):
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = case.ours([p], engine=engine, ema_decay=0.9, skip_nonfinite=True, **case.options)
    bad = [torch.tensor([1.0, NAN, 1.0, 1.0])]
    step(optimizer, [p], bad)
    assert optimizer.state[p]["ema"].tolist() == [1, 1, 1, 1]
    step(optimizer, [p])
    torch.testing.assert_close(optimizer.state[p]["ema"], 0.9 + 0.1 * p.detach())
    before = averages(optimizer, [p])
    step(optimizer, [p], bad)
    assert optimizer.skipped_steps == 2
    assert same(averages(optimizer, [p]), before)


def test_a_parameter_without_a_gradient_keeps_its_average(engine):
    p, late = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = fusedstep.AdamW([p, late], lr=0.1, ema_decay=0.5, engine=engine)
    step(optimizer, [p])
    assert "ema" not in optimizer.state.get(late, {})
    late.grad = torch.ones(2)
    step(optimizer, [p])
    torch.testing.assert_close(optimizer.state[late]["ema"], late.detach() / 2)
    late.grad, before = None, averages(optimizer, [late])
    late.data.add_(1)
    step(optimizer, [p])
    assert same(averages(optimizer, [late]), before)


# the context


def trained(engine=None, **options):
    params = [*Parameters().parameters()]
    optimizer = fusedstep.AdamW(params, lr=0.1, ema_decay=0.5, engine=engine, **options)
    for _ in range(2):
        step(optimizer, params)
    return optimizer, params


def test_within_the_context_parameters_are_averages_and_afterwards_themselves(engine):
    optimizer, params = trained(engine)
    before, places = values(params), [p.data_ptr() for p in params]
    with optimizer.ema_parameters():
        assert same(params, averages(optimizer, params))
        assert not same(params, before)
        assert [p.data_ptr() for p in params] == places
    assert same(params, before)
    step(optimizer, params)
    assert not same(params, before)


def test_parameters_are_themselves_after_an_exception():
    optimizer, params = trained()
    before = values(params)

    def evaluate():
        params[0].data.fill_(NAN)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), optimizer.ema_parameters():
        evaluate()
    assert same(params, before)
    step(optimizer, params)
    with optimizer.ema_parameters():
        assert same(params, averages(optimizer, params))


def test_a_step_within_the_context_is_refused_and_changes_nothing():
    optimizer, params = trained()
    before, kept = values(params), averages(optimizer, params)
    with optimizer.ema_parameters():
        for p in params:
            p.grad = torch.ones_like(p)
        with pytest.raises(RuntimeError, match="within ema_parameters"):
            optimizer.step()
        assert same(params, kept)
    assert same(params, before)
    assert same(averages(optimizer, params), kept)
    assert optimizer.state[params[0]]["step"] == 2


def test_a_context_within_the_context_is_refused_and_changes_nothing():
    optimizer, params = trained()
    before = values(params)
    with optimizer.ema_parameters():
        with pytest.raises(RuntimeError, match="within ema_parameters"), optimizer.ema_parameters():
            pass
        assert same(params, averages(optimizer, params))
        with pytest.raises(RuntimeError, match="within ema_parameters"):
            optimizer.step()
    assert same(params, before)


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9}], ids=str)
def test_without_averages_there_is_no_context(options):
    optimizer = fusedstep.SGD([torch.nn.Parameter(torch.ones(1))], **options)
    with pytest.raises(RuntimeError, match="no averages"), optimizer.ema_parameters():
        pass


def test_what_is_no_model_is_refused():
    optimizer, params = trained()
    before = [p.detach().clone() for p in params]
    for given in (iter(params), [torch.nn.Linear(1, 1)]):
        with pytest.raises(TypeError, match=r"use ema_parameters\(model\)"), optimizer.ema_parameters(given):
            pass
    assert all(map(torch.equal, params, before))
    optimizer.step()


def test_autograd_notices_the_change():
    optimizer, params = trained()
    loss = params[0].square().sum()
    with optimizer.ema_parameters(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("decay", [-0.1, 1.1, NAN, "0.9", torch.tensor(2.0)], ids=str)
def test_a_decay_outside_of_zero_to_one_is_refused(decay):
    p, q = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    with pytest.raises(ValueError, match="Invalid ema_decay"):
        fusedstep.SGD([p], ema_decay=decay)
    optimizer = fusedstep.SGD([p])
    with pytest.raises(ValueError, match="Invalid ema_decay"):
        optimizer.add_param_group({"params": [q], "ema_decay": decay})
