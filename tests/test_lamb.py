"""Lamb where others fail: 16 bits over many steps, norms that float16 cannot hold, norms of zero."""

import numpy as np
import pytest
import torch

import fusedstep
from tests import reference

DTYPES = [torch.bfloat16, torch.float16]


def stepped(p, g, engine, **options):
    """A parameter after one step."""
    p = torch.nn.Parameter(p.clone())
    p.grad = g.clone()
    fusedstep.Lamb([p], engine=engine, max_grad_norm=None, **options).step()
    return p.detach()


def expected(p, g, **options):
    value, _ = reference.lamb(np.asarray(p.double()), [np.asarray(g.double())], **options)
    return torch.as_tensor(value)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("chosen", ["torch", "cpu"])
@pytest.mark.parametrize("state_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_thousand_steps_in_sixteen_bits_freeze_no_tensor_and_learn(dtype, state_dtype, chosen):
    inputs = torch.randn(64, 8)
    outputs = torch.tanh(inputs @ torch.randn(8, 1))
    weights = [torch.randn(8, 32) / 8**0.5, 0.1 * torch.randn(32), torch.randn(32, 1) / 32**0.5, torch.zeros(1)]
    params = [torch.nn.Parameter(w.to(dtype)) for w in weights]
    optimizer = fusedstep.Lamb(params, lr=0.02, engine=chosen, state_dtype=state_dtype)
    losses = []
    for _ in range(10):
        moved = [False] * len(params)
        for _ in range(100):
            before = [p.detach().clone() for p in params]
            optimizer.zero_grad()
            # computed in float32, which CPUs are quicker at
            w1, b1, w2, b2 = (p.float() for p in params)
            loss = (torch.tanh(inputs @ w1 + b1) @ w2 + b2 - outputs).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            # not from end to end: a single number of few bits may come back to where it was
            moved = [m or not torch.equal(p, b) for m, p, b in zip(moved, params, before, strict=True)]
        assert all(moved), "a parameter is frozen"
        assert all(torch.isfinite(p).all() for p in params)
    assert sum(losses[-100:]) / 100 < 0.1 * losses[0]


def test_norms_that_float16_cannot_hold_give_the_right_ratio(engine):
    n = 3000 if engine == "triton" else 20_000
    p, g = (5000 * torch.randn(n)).half(), (1000 * torch.randn(n)).half()
    assert float(p.double().norm()) > 65504
    assert torch.isinf(p.norm())
    options = {"lr": 0.1, "weight_decay": 0.01}
    exact = expected(p, g, **options)
    # a wrong ratio would move nothing or everything far
    assert float((exact - p.double()).abs().median()) > 100
    torch.testing.assert_close(stepped(p, g, engine, **options).double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES], ids=str)
def test_a_norm_of_zero_leaves_the_update_as_it_is(dtype, engine):
    ones = torch.ones(37, dtype=dtype)
    # parameters of zero: the plain step of Adam
    moved = stepped(0 * ones, ones, engine, lr=0.5)
    torch.testing.assert_close(moved, -0.5 * ones, rtol=1e-5, atol=0)
    # gradients of zero, and no decay: nothing to do
    assert torch.equal(stepped(ones, 0 * ones, engine, lr=0.5, weight_decay=0.0, always_adapt=True), ones)
    # gradients of zero: the update is the decay, scaled to the size of the parameter
    moved = stepped(ones, 0 * ones, engine, lr=0.5)
    torch.testing.assert_close(moved, 0.5 * ones, rtol=torch.finfo(dtype).eps, atol=0)
    # bounds do not hold where there is no ratio
    moved = stepped(0 * ones, ones, engine, lr=0.5, trust_bounds=(2.0, 3.0))
    torch.testing.assert_close(moved, -0.5 * ones, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float64),
    ],
    ids=str,
)
def test_without_eps_what_lies_beyond_the_end_of_a_tensor_does_not_count(dtype, state_dtype, engine):
    """There a kernel divides zero by zero."""
    for n in (1, 5, 17, 257, 1025):
        p, g = torch.randn(n).to(dtype), (torch.randn(n).sign() + 0.1).to(dtype)
        options = {"lr": 0.1, "eps": 0.0, "weight_decay": 0.1}
        moved, eps = stepped(p, g, engine, state_dtype=state_dtype, **options), torch.finfo(dtype).eps
        torch.testing.assert_close(moved.double(), expected(p, g, **options), rtol=2 * eps, atol=2 * eps)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_ratio_of_a_large_tensor_is_exact_to_a_millionth(clip, engine):
    # in its interpreter Triton is slow
    n = 50_000 if engine == "triton" else 300_000
    p, g = torch.randn(n), torch.randn(n)
    # the update of a first step, whose m and v are the gradient and its square, to all digits
    scale = 1.0 if clip is None else clip / float(g.double().norm())
    u = scale * g.double() / ((scale * g.double()).abs() + 1e-6) + 0.1 * p.double()
    ratio = float(p.double().norm() / u.norm())
    moved = torch.nn.Parameter(p.clone())
    moved.grad = g.clone()
    fusedstep.Lamb([moved], lr=0.1, weight_decay=0.1, max_grad_norm=clip, engine=engine).step()
    # the nearest multiple of the update: the rounding of single elements averages out
    found = float((p.double() - moved.detach().double()) @ u / (u @ u)) / 0.1
    assert abs(found / ratio - 1) < 1e-6


def test_the_ratio_of_each_tensor_is_its_own(engine):
    shapes, sizes = [(40,), (7, 5), (1100,)], (0.01, 1.0, 100.0)
    start = [size * torch.randn(shape) for shape, size in zip(shapes, sizes, strict=True)]
    params = [torch.nn.Parameter(p.clone()) for p in start]
    for p in params:
        p.grad = torch.randn_like(p)
    fusedstep.Lamb(params, lr=0.1, max_grad_norm=None, engine=engine).step()
    for p, old in zip(params, start, strict=True):
        # each moves by a tenth of its size
        torch.testing.assert_close((p.detach() - old).norm(), 0.1 * old.norm(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trust_bounds": (2.0, 1.0)}, "Invalid trust_bounds"),
        ({"trust_bounds": (-1.0, 1.0)}, "Invalid trust_bounds"),
        ({"trust_bounds": (1.0,)}, "Invalid trust_bounds"),
        ({"max_weight_norm": 0.0}, "Invalid max_weight_norm"),
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0"),
        ({"eps": -1.0}, "Invalid epsilon value"),
        ({"weight_decay": -1.0}, "Invalid weight_decay value"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fusedstep.Lamb([torch.nn.Parameter(torch.ones(1))], **options)
