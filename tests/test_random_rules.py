"""Rules that nobody wrote: expressions of all words, on all engines, against plain Python in float64.

200 of them; more by a command: `FUSEDSTEP_RULES=2000 pytest tests/test_random_rules.py -k "cpu or torch"`.
"""

import os
from itertools import count

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

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
from tests.plain import compare

RULES = int(os.environ.get("FUSEDSTEP_RULES", 200))
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
    "square": lambda a: clamp(a, -1.5, 2.0) ** 2,
    "cube": lambda a: tanh(a) ** 3,
    "whole power": lambda a: power(clamp(a, -1.5, 1.5), 4),
    "root": lambda a: abs(a) ** 0.5,
}
TWO = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: tanh(a) * b,
    "div": lambda a, b: a / (abs(b) + 0.7),
    "maximum": maximum,
    "minimum": minimum,
    "mix": lambda a, b: mix(a, b, 0.3),
    "condition": lambda a, b: a >= b,
    "conditions": lambda a, b: (a > 0.2) * (b < 0.4) - 0.5,
    "alternating": lambda a, b: (-1) ** (a > b) * b,
}
THREE = {
    "fma": lambda a, b, c: fma(tanh(a), b, c),
    "where": lambda a, b, c: where(a > b, b, c),
    "where equal": lambda a, b, c: where(sign(a) == sign(b), a, c),
    "where either": lambda a, b, c: where(a > b, b > c, c <= 0.3),
}
SUMS = {
    "mean": lambda a, n: total(a) / n,
    "largest": lambda a, n: largest(a),
    "norm": lambda a, n: sqrt(total(a * a) + 0.1),
    "over all": lambda a, n: tanh(total_over_all(a)),
}
WORDS = {1: ONE, 2: TWO, 3: THREE}
# `n` is kept once for a tensor, `k` once for a group
LEAVES = ("p", "g", "lr", "beta", "step", "n", "k")


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
        # over all tensors, only of numbers that each element has
        of = found[0] + 0 * names["p"] if word == "over all" else found[0]
        return SUMS[word](of, names["numel"])
    return WORDS[len(found)][word](*found)


numbers = count()


def class_of(trees):
    """An optimizer with this rule; the parameter moves a little, towards the expression."""
    states = [name for name in trees if name != "p"]

    def update(*args, step, numel, lr, beta):
        names = dict(zip(("p", "g", *states, "n", "k"), args, strict=True))
        names |= {"step": step, "numel": numel, "lr": lr, "beta": beta}
        new = [names[name] + lr * tanh(computed(tree, names)) for name, tree in trees.items()]
        found = names["p"] * names["g"]
        return *new, mix(names["n"], tanh(total(found)), beta), tanh(names["k"] + total_over_all(found))

    # with the arguments that a rule has
    arguments = ", ".join(("p", "g", *states, "n", "k"))
    source = f"def random_{next(numbers)}({arguments}, *, step, numel, lr, beta):\n"
    source += f"    return update({arguments}, step=step, numel=numel, lr=lr, beta=beta)\n"
    made = {"update": update}
    exec(source, made)
    found = next(value for name, value in made.items() if name.startswith("random_"))

    class Random(Optimizer):
        rule = rule(
            states={name: name for name in states}, scalars={"n": "size"}, group_scalars={"k": "progress"}
        )(found)
        lr: float = 0.5
        beta: float = 0.9

    return Random


def tried(examples):
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    kwargs = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": quiet}
    return settings(max_examples=examples, phases=(Phase.generate, Phase.shrink), **kwargs)


@tried(RULES // 2)
@given(rules())
def test_rules_on_the_cpu(trees):
    compare(class_of(trees), "cpu")


@tried(RULES - RULES // 2)
@given(rules())
def test_rules_in_torch(trees):
    compare(class_of(trees), "torch")


@tried(max(10, RULES // 20))
@given(rules())
def test_rules_in_triton(trees):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("compiled, the triton engine takes no CPU tensors")
    compare(class_of(trees), "triton")


@pytest.mark.gpu
@tried(60)
@given(rules())
def test_rules_on_a_gpu(trees):
    compare(class_of(trees), "triton", "cuda")


def test_a_number_is_not_taken_for_another_that_python_has_equal(engine):
    """The first value of these rules is `p`, number 0."""

    def after(update):
        class Own(Optimizer):
            rule = rule()(update)
            lr: float = 0.5

        p = torch.nn.Parameter(torch.tensor([2.0]))
        p.grad = torch.ones(1)
        Own([p], engine=engine).step()
        return float(p.detach())

    assert after(lambda p, g, *, lr: (p + p,)) == 4
    assert after(lambda p, g, *, lr: (p + 0.0,)) == 2
