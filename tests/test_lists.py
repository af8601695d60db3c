"""The torch engine: lists of bounded size, memory that is reused only where nobody sees it, and every word."""

import numpy as np
import pytest
import torch

import fusedstep
from fusedstep._algorithm import instead, language
from fusedstep._algorithm.language import (
    clamp,
    cos,
    exp,
    fma,
    log,
    maximum,
    minimum,
    mix,
    power,
    sign,
    sqrt,
    tanh,
    where,
)
from fusedstep._algorithm.program import make_rule
from fusedstep._engines.foreach import lists, words
from fusedstep._engines.foreach.engine import Executable
from fusedstep._torch.optimizer import Optimizer
from tests.cases import KINDS, name_of


def parameters(shapes, dtype=torch.float32):
    params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def copies(params):
    found = [torch.nn.Parameter(p.detach().clone()) for p in params]
    for p, q in zip(found, params, strict=True):
        p.grad = q.grad.clone()
    return found


@pytest.fixture
def seen(monkeypatch):
    """Bytes of every list that a word was called with."""
    sizes = []
    on_lists = words.on_lists

    def look(*how):
        call = on_lists(*how)

        def record(*args):
            found = call(*args)
            sizes.append(sum(t.nbytes for t in found))
            return found

        return record

    monkeypatch.setattr("fusedstep._engines.foreach.resolve.on_lists", look)
    return sizes


SHAPES = [(3000,), (), (0,), (40, 7), *[(64,)] * 60]


@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_no_list_is_larger_than_the_bound_and_cutting_changes_nothing(case, seen, monkeypatch):
    start = parameters(SHAPES)
    results = []
    for limit in (1 << 30, 2048):
        monkeypatch.setattr(lists, "HOST_LIST_BYTES", limit)
        params = copies(start)
        optimizer = case.ours(params, engine="torch", **case.options)
        seen.clear()
        optimizer.step()
        optimizer.step()
        # one operation in place needs no room, and takes all at once
        assert (max(seen) <= limit) == (case.name != "sgd" or limit > 2048)
        results.append(params)
    assert len(seen) > 20 or case.name == "sgd"
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_the_result_is_that_of_the_cpu_engine_within_rounding(case):
    start = parameters(SHAPES)
    results = []
    for engine in ("torch", "cpu"):
        params = copies(start)
        optimizer = case.ours(params, engine=engine, **case.options)
        for _ in range(3):
            optimizer.step()
        results.append([*params, *(s for p in params for s in optimizer.state[p].values() if s.dim())])
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"statistics": True}, {"ema_decay": 0.9}, {"max_grad_norm": 0.1}], ids=str
)
@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_gradients_and_neighbours_in_memory_are_left_alone(case, options):
    memory = torch.randn(4, 300)
    before = memory.clone()
    params = [torch.nn.Parameter(memory[i, 100:200]) for i in (0, 2)]
    for i, p in zip((1, 3), params, strict=True):
        p.grad = memory[i, 100:200]
    optimizer = case.ours(params, engine="torch", **{**case.options, **options})
    for _ in range(2):
        optimizer.step()
    assert torch.equal(memory[1::2], before[1::2])
    assert torch.equal(memory[:, :100], before[:, :100])
    assert torch.equal(memory[:, 200:], before[:, 200:])
    assert not torch.equal(memory[0, 100:200], before[0, 100:200])


def test_states_are_updated_where_they_are():
    params = parameters([(64,)] * 3)
    optimizer = fusedstep.AdamW(params, engine="torch")
    optimizer.step()
    addresses = [s.data_ptr() for p in params for s in (p, optimizer.state[p]["exp_avg"])]
    version = params[0]._version
    optimizer.step()
    assert addresses == [s.data_ptr() for p in params for s in (p, optimizer.state[p]["exp_avg"])]
    assert params[0]._version > version


def test_a_condition_of_options_leaves_only_what_it_chose(monkeypatch):
    called = []
    on_lists = words.on_lists
    monkeypatch.setattr(
        "fusedstep._engines.foreach.resolve.on_lists",
        lambda op, *how: (called.append(op), on_lists(op, *how))[1],
    )
    params = parameters([(8,)])
    fusedstep.AdamW(params, engine="torch").step()
    assert sorted(called) == sorted(["mul", "lerp", "mul", "addcmul", "sqrt", "add", "addcdiv"])
    called.clear()
    fusedstep.SGD(params, lr=0.1, momentum=0.9, engine="torch").step()
    assert called == ["mul", "fma", "fma"]


def swap(p, g, m, *, lr):
    # never negative: what is chosen are the slots themselves
    return where(lr < 0, g, m), p


def swap_in_passing(p, g, m, *, lr):
    return m + 0 * lr * g, 1.0 * p


@pytest.mark.parametrize("rule", [swap, swap_in_passing])
def test_a_rule_that_swaps_its_slots_swaps_them(rule, engine):
    optimizer_of_rule = type("Swap", (Optimizer,), body_of(make_rule(rule, {"m": "other"})))
    params = parameters([(5,), (6,)])
    before = [p.detach().clone() for p in params]
    optimizer = optimizer_of_rule(params, engine=engine)
    optimizer.step()
    for p, old in zip(params, before, strict=True):
        assert torch.equal(p, torch.zeros_like(p))
        assert torch.equal(optimizer.state[p]["other"], old)


# a device whose scalars the host knows without reading them


@pytest.mark.parametrize("knows", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_numbers_the_host_knows_are_those_the_device_computes(case, knows, monkeypatch):
    start = parameters([(64,), (9,), (33, 2)])
    expected, params = copies(start), copies(start)
    other = case.ours(expected, engine="torch", **case.options)
    optimizer = case.ours(params, engine="torch", **case.options)
    other.step()
    optimizer.step()
    monkeypatch.setattr(Executable, "_is_host", property(lambda self: False))
    other_is_host = property(lambda self: True)
    for i in range(4):
        if i == 2:
            # one that is written from outside is read again
            for each in (other, optimizer):
                for p in each.param_groups[0]["params"]:
                    if "step" in each.state[p]:
                        each.state[p]["step"].fill_(40)
        params[1].grad = None if i == 1 else expected[0].new_ones(9)
        expected[1].grad = params[1].grad
        with monkeypatch.context() as here:
            here.setattr(Executable, "_is_host", other_is_host)
            other.step()
        for table in optimizer._plan.tables:
            table.host_options[:] = table.options.numpy() if knows else np.nan
        optimizer.step()
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
        for name, state in other.state[q].items():
            torch.testing.assert_close(optimizer.state[p][name], state, rtol=1e-5, atol=1e-7)


# every word, on every engine, with numbers and tensors mixed: a is an option, b changes with the step

WORDS = {
    "abs": lambda p, g, a, b: abs(p) + abs(-a) * abs(g),
    "clamp": lambda p, g, a, b: clamp(p, -a, b) + clamp(a, g, 2.0) + clamp(0.25, p, g),
    "cos": lambda p, g, a, b: cos(p) + cos(a) * g,
    "exp": lambda p, g, a, b: exp(p) + exp(a) * g,
    "fma": lambda p, g, a, b: fma(a, p, g) + fma(p, g, a) + fma(a, b, p) + fma(p, a, 2.0) + fma(a, p, p),
    "log": lambda p, g, a, b: log(p * p + a) + log(b) * g,
    "maximum": lambda p, g, a, b: maximum(p, g) + maximum(p, a) + maximum(0.5, g) + maximum(a, b) * p,
    "minimum": lambda p, g, a, b: minimum(p, g) + minimum(p, a) + minimum(0.5, g) + minimum(a, b) * p,
    "mix": lambda p, g, a, b: mix(p, g, 0.9) + mix(g, p, 0.25) + mix(p, a, 0.5) + mix(a, g, b / 8),
    "power": lambda p, g, a, b: power(p * p + 1, a) + power(a, b) * g + (p * p + 1) ** 2 + 2.0**g,
    "sign": lambda p, g, a, b: sign(p) + sign(a) * g + sign(p - p) + sign(-g),
    "sqrt": lambda p, g, a, b: sqrt(p * p) + sqrt(a) * g,
    "tanh": lambda p, g, a, b: tanh(p) + tanh(a) * g,
    "where": lambda p, g, a, b: (
        where(p > g, p, a) + where(a > b, p, g) + where(g < 0, 1.0, b) + where(p > a, a, b)
    ),
    "comparisons": lambda p, g, a, b: (
        where(p < a, 1.0, 0.0)
        + where(g <= p, 2.0, p)
        + where(a > g, g, 4.0)
        + where(p >= 0.5, p, 8.0)
        + where(p == p, p, 16.0)
        + where(a != g, 32.0, g)
        + where((p > 0) * (g > 0) != 0, p, a)
    ),
    "arithmetic": lambda p, g, a, b: (
        (p + a) * (2 - g) / (3 + p * p)
        - (a - p)
        + (a + b) / (b + g * g)
        + -g
        + (-a) * p
        + (1 - p)
        + p / a
        + 1 / b
    ),
}


def body_of(rule):
    return {"__annotations__": {"lr": float}, "lr": 0.75, "rules": (rule,)}


def optimizer_of(word):
    def rule(p, g, *, step, lr):
        return (word(p, g, lr, step + 1.5),)

    return type("Word", (Optimizer,), body_of(make_rule(rule, {})))


@pytest.mark.parametrize("name", WORDS)
def test_a_word_is_what_plain_python_says(name, engine):
    word = WORDS[name]
    start = [torch.linspace(-2, 2, 37, dtype=torch.float64), torch.tensor([0.5, -0.25], dtype=torch.float64)]
    grads = [
        torch.linspace(1.5, -1.25, 37, dtype=torch.float64),
        torch.tensor([0.75, 0.75], dtype=torch.float64),
    ]
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        params = [torch.nn.Parameter(p.to(dtype)) for p in start]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.to(dtype)
        values = [(p.tolist(), p.grad.tolist()) for p in params]
        optimizer_of(word)(params, engine=engine).step()
        for p, (old, gradient) in zip(params, values, strict=True):
            expected = [word(x, g, 0.75, 2.5) for x, g in zip(old, gradient, strict=True)]
            torch.testing.assert_close(p.tolist(), expected, rtol=tolerance, atol=tolerance)


def test_every_word_of_the_language_is_tested():
    public = {name for name in instead.SUPPORTED.replace(",", "").split() if hasattr(language, name)}
    assert public - {"of"} <= {*WORDS}


# found by name in torch, which calls them private
BY_NAME = ["add", "addcdiv", "addcmul", "cos", "div", "exp", "lerp", "log", "maximum", "minimum", "mul", "neg"]
BY_NAME += ["pow", "sqrt", "sub", "tanh"]


@pytest.mark.parametrize("name", BY_NAME)
def test_torch_has_the_operations_on_lists(name):
    """Fails with the first torch that does not; steps then take one tensor after the other."""
    assert hasattr(torch, f"_foreach_{name}")
    assert hasattr(torch, f"_foreach_{name}_")


@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_without_operations_on_lists_tensors_are_stepped_one_by_one(case, monkeypatch):
    params = parameters([(3, 4), (5,)])
    others = copies(params)
    for step in range(2):
        if step:
            for name in BY_NAME:
                monkeypatch.delattr(torch, f"_foreach_{name}")
                monkeypatch.delattr(torch, f"_foreach_{name}_")
        optimizer = case.ours([params, others][step], engine="torch", **case.options)
        for _ in range(3):
            optimizer.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)
