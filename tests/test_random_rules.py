"""Rules that nobody wrote: expressions of all words, on all engines, against plain Python in float64.

200 of them; more by a command: `FUSEDSTEP_RULES=2000 pytest tests/test_random_rules.py -k "cpu or torch"`.
"""

import os
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fusedstep.checking import Plain
from fusedstep.rules import (
    Optimizer,
    abs,
    clamp,
    cos,
    exp,
    fma,
    largest,
    log,
    maximum,
    minimum,
    mix,
    power,
    rule,
    sign,
    sqrt,
    tanh,
    total,
    total_over_all,
    where,
)

RULES = int(os.environ.get("FUSEDSTEP_RULES", 200))
SHAPES, STEPS = ((), (5,), (3, 7)), 3
# each keeps numbers of moderate size, and away from where a rounding decides
ONE = {
    "neg": lambda a: -a,
    "abs": abs,
    "sqrt": lambda a: sqrt(abs(a) + 0.1),
    "exp": lambda a: exp(tanh(a)),
    "log": lambda a: log(abs(a) + 0.5),
    "tanh": tanh,
    "cos": cos,
    "power": lambda a: power(abs(a) + 0.5, 1.5),
    "squashed": lambda a: a / (1 + abs(a)),
    "clamp": lambda a: clamp(a, -1.5, 2.0),
}
TWO = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: tanh(a) * b,
    "div": lambda a, b: a / (abs(b) + 0.7),
    "maximum": maximum,
    "minimum": minimum,
    "mix": lambda a, b: mix(a, b, 0.3),
}
THREE = {
    "fma": lambda a, b, c: fma(tanh(a), b, c),
    "where": lambda a, b, c: where(a > b, b, c),
    "where equal": lambda a, b, c: where(sign(a) == sign(b), a, c),
}
SUMS = {
    "mean": lambda a, n: total(a) / n,
    "largest": lambda a, n: largest(a),
    "norm": lambda a, n: sqrt(total(a * a) + 0.1),
    "over all": lambda a, n: tanh(total_over_all(a)),
}
WORDS = {1: ONE, 2: TWO, 3: THREE}
LEAVES = ("p", "g", "lr", "beta", "step")


def expression(draw, states, depth=6, sums=2):
    """Of words down to `depth`, with up to so many `sums` within each other."""
    kind = draw(st.sampled_from(("leaf", "number", "word", "word", "word", "sum"))) if depth else "leaf"
    if kind == "number":
        return round(draw(st.floats(-2, 2)), 3)
    if kind == "word":
        count = draw(st.integers(1, 3))
        word = draw(st.sampled_from([*WORDS[count]]))
        return ("word", word, *(expression(draw, states, depth - 1, sums) for _ in range(count)))
    if kind == "sum" and sums:
        return ("sum", draw(st.sampled_from([*SUMS])), expression(draw, states, depth - 1, sums - 1))
    return draw(st.sampled_from([*LEAVES, *states]))


@st.composite
def rules(draw):
    """What a rule returns: an expression for the parameter, and for each of its states."""
    states = [f"s{i}" for i in range(draw(st.integers(1, 3)))]
    return {name: expression(draw, states) for name in ("p", *states)}


def computed(tree, names):
    if isinstance(tree, str):
        return names[tree]
    if not isinstance(tree, tuple):
        return tree
    kind, word, *args = tree
    found = [computed(arg, names) for arg in args]
    if kind == "sum":
        # of a number that is the same for all, it is the sum of as many
        return SUMS[word](found[0] + 0 * names["p"], names["numel"])
    return WORDS[len(found)][word](*found)


numbers = count()


def class_of(trees):
    """An optimizer with this rule; the parameter moves a little, towards the expression."""
    states = [name for name in trees if name != "p"]

    def update(*args, step, numel, lr, beta):
        names = dict(zip(("p", "g", *states), args, strict=True))
        names |= {"step": step, "numel": numel, "lr": lr, "beta": beta}
        new = [names[name] + lr * tanh(computed(tree, names)) for name, tree in trees.items()]
        return tuple(new)

    # with the arguments that a rule has
    source = f"def random_{next(numbers)}({', '.join(('p', 'g', *states))}, *, step, numel, lr, beta):\n"
    source += f"    return update({', '.join(('p', 'g', *states))}, step=step, numel=numel, lr=lr, beta=beta)\n"
    made = {"update": update}
    exec(source, made)
    found = next(value for name, value in made.items() if name.startswith("random_"))

    class Random(Optimizer):
        rule = rule_of(found, states)
        lr: float = 0.5
        beta: float = 0.9

    return Random


def rule_of(update, states):
    return rule(states={name: name for name in states})(update)


def compare(trees, engine, device="cpu"):
    random = torch.Generator().manual_seed(0)
    draw = lambda: [torch.randn(shape, generator=random, dtype=torch.float64) for shape in SHAPES]
    params = [torch.nn.Parameter(t.to(device)) for t in draw()]
    optimizer = class_of(trees)(params, engine=engine)
    plain = Plain(optimizer.rules[0], params)
    for _ in range(STEPS):
        grads = draw()
        for p, g in zip(params, grads, strict=True):
            p.grad = g.to(device)
        plain.step(grads, {"lr": 0.5, "beta": 0.9})
        optimizer.step()
    found = np.concatenate([p.detach().cpu().reshape(-1).numpy() for p in params])
    np.testing.assert_allclose(found, plain.p, rtol=1e-7, atol=1e-7)
    for k, name in enumerate(name for name in trees if name != "p"):
        kept = np.concatenate([optimizer.state[p][name].cpu().reshape(-1).numpy() for p in params])
        np.testing.assert_allclose(kept, plain.kept[k], rtol=1e-7, atol=1e-7)


def tried(examples):
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    kwargs = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": quiet}
    return settings(max_examples=examples, phases=(Phase.generate, Phase.shrink), **kwargs)


@tried(RULES // 2)
@given(rules())
def test_rules_on_the_cpu(trees):
    compare(trees, "cpu")


@tried(RULES - RULES // 2)
@given(rules())
def test_rules_in_torch(trees):
    compare(trees, "torch")


@tried(max(10, RULES // 20))
@given(rules())
def test_rules_in_triton(trees):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("compiled, the triton engine takes no CPU tensors")
    compare(trees, "triton")


@pytest.mark.gpu
@tried(60)
@given(rules())
def test_rules_on_a_gpu(trees):
    compare(trees, "triton", "cuda")


def test_a_number_is_not_taken_for_another_that_python_has_equal(engine):
    """The first value of these rules is `p`, number 0."""

    def after(update):
        class Own(Optimizer):
            rule = rule_of(update, [])
            lr: float = 0.5

        p = torch.nn.Parameter(torch.tensor([2.0]))
        p.grad = torch.ones(1)
        Own([p], engine=engine).step()
        return float(p.detach())

    assert after(lambda p, g, *, lr: (p + p,)) == 4
    assert after(lambda p, g, *, lr: (p + 0.0,)) == 2
