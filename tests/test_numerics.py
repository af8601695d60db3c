"""Results against float64, on every engine, and the same bits whatever the number of threads."""

import numpy as np
import pytest
import torch

import fusedstep
from tests import reference
from tests.cases import CASES, KINDS, name_of
from tests.numerics import judge, roundings

STEPS = 50
SHAPES = [(7, 5), (3,), (), (0,), (1100,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# (parameter, gradient, state)
MIXED = [
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, None),
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.float16, torch.float32, torch.float64),
]


def parameters(dtype, shapes=SHAPES, device="cpu"):
    return [torch.nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in shapes]


def set_grads(params, grads, dtype=None):
    for p, g in zip(params, grads, strict=True):
        if dtype is not None and dtype != p.dtype:
            p.grad_dtype = None
        p.grad = g.to(p.device, dtype or p.dtype)


def gradients(dtype, shapes=SHAPES, steps=STEPS):
    """Rounded to `dtype`, so that everybody starts from the same numbers; of very different sizes."""
    scales = 10 ** torch.linspace(-3, 1, steps)
    return [[(torch.randn(shape) * scale).to(dtype) for shape in shapes] for scale in scales]


def run(optimizer, params, grads, dtype=None):
    for step in grads:
        set_grads(params, step, dtype)
        optimizer.step()
    return params


def exact(case, start, grads):
    """Parameters and states after all steps, in float64."""
    params = [np.asarray(p.detach().double()) for p in start]
    steps = [[np.asarray(g.double()) for g in step] for step in grads]
    results = reference.train(case.reference, params, steps, **case.options)
    tensors = lambda states: {name: torch.as_tensor(state) for name, state in states.items()}
    return [(torch.as_tensor(p), tensors(states)) for p, states in results]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_fifty_steps_are_as_close_to_float64_as_torch_is(case, dtype, engine):
    # the interpreter takes long; all rows take all steps on a GPU
    few = 10 if dtype == torch.float32 else 3
    steps = few if engine == "triton" else STEPS
    start, grads = parameters(dtype), gradients(dtype, steps=steps)
    ours, theirs = ([torch.nn.Parameter(p.detach().clone()) for p in start] for _ in range(2))
    optimizer = case.ours(ours, engine=engine, **case.options)
    # in 16 bits torch's unfused Adam computes NaN; its fused one computes in fp32, as we do
    peer = case.theirs(theirs, fused=dtype.itemsize == 2, **case.options)
    run(optimizer, ours, grads)
    run(peer, theirs, grads)
    for p, q, (value, states) in zip(ours, theirs, exact(case, start, grads), strict=True):
        judge(p.detach(), q.detach(), value, "parameter", roundings(case, dtype))
        for name, state in states.items():
            mine, other = optimizer.state[p][name], peer.state[q][name]
            judge(mine, other, state, name, roundings(case, dtype))


@pytest.mark.parametrize("dtypes", MIXED, ids=str)
@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_gradient_and_state_may_have_other_dtypes_than_the_parameter(case, dtypes, engine):
    of_param, of_grad, of_state = dtypes
    start, grads = parameters(of_param), gradients(of_grad, steps=10)
    ours = [torch.nn.Parameter(p.detach().clone()) for p in start]
    optimizer = case.ours(ours, engine=engine, state_dtype=of_state, **case.options)
    run(optimizer, ours, grads, of_grad)
    for p, (value, states) in zip(ours, exact(case, start, grads), strict=True):
        # ten steps, each rounding once to what is stored
        coarse = max(torch.finfo(t).eps for t in (of_param, of_state or of_param))
        assert p.dtype == of_param
        torch.testing.assert_close(p.double(), value, rtol=10 * coarse, atol=10 * coarse)
        for name in states:
            assert optimizer.state[p][name].dtype == (of_state or of_param)


@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_the_result_does_not_depend_on_the_number_of_threads(case):
    shapes = [(700, 1000), (3,), (1 << 17,)]
    start, grads = parameters(torch.float32, shapes), gradients(torch.float32, shapes, steps=2)
    results = []
    for threads in (1, 2, 3, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        params = [torch.nn.Parameter(p.detach().clone()) for p in start]
        run(case.ours(params, engine="cpu", **case.options), params, grads)
        results.append(params)
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(p, q) for p, q in zip(results[0], other, strict=True))


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_sgd_on_the_torch_engine_gives_torch_bits(momentum):
    options = {"lr": 0.1, "momentum": momentum, "nesterov": momentum > 0, "weight_decay": 0.01}
    start, grads = parameters(torch.float32), gradients(torch.float32)
    ours, theirs = ([torch.nn.Parameter(p.detach().clone()) for p in start] for _ in range(2))
    run(fusedstep.SGD(ours, engine="torch", **options), ours, grads)
    run(torch.optim.SGD(theirs, foreach=False, **options), theirs, grads)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_infinite_weight_without_decay_stays_and_poisons_nothing(dtype, engine):
    p = torch.nn.Parameter(torch.tensor([float("-inf"), 1.0], dtype=dtype))
    optimizer = fusedstep.Adam([p], engine=engine)
    p.grad = torch.tensor([0.0, 1.0], dtype=dtype)
    optimizer.step()
    assert p[0] == float("-inf")
    assert torch.isfinite(optimizer.state[p]["exp_avg"]).all()


def test_step_a_million_still_counts_and_corrects(engine):
    """Bias corrections come from float64, the count is exact in float32 up to 2^24."""
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = fusedstep.Adam([p], lr=0.1, betas=(0.9, 0.9999999), engine=engine)
    p.grad = torch.full((4,), 0.5)
    optimizer.step()
    optimizer.state[p]["step"].fill_(999_999)
    m, v = optimizer.state[p]["exp_avg"].double(), optimizer.state[p]["exp_avg_sq"].double()
    before = p.detach().double()
    optimizer.step()
    m, v = 0.9 * m + 0.05, 0.9999999 * v + 1e-7 * 0.25
    expected = before - 0.1 * m / (v.sqrt() / (1 - 0.9999999**1_000_000) ** 0.5 + 1e-8)
    assert optimizer.state[p]["step"] == 1_000_000
    torch.testing.assert_close(p.double(), expected, rtol=1e-6, atol=0)
