"""Numbers in rules that are easily forgotten: conditions, powers, and what is the same for all elements."""

import pytest
import torch

import fusedstep
from fusedstep.rules import (
    abs,
    largest,
    mix,
    power,
    report,
    rule,
    staged,
    tanh,
    total,
    total_over_all,
    where,
)
from tests.plain import compare

M, N = {"states": {"m": "exp_avg"}}, {"scalars": {"n": "size"}}


def class_of(update, **kept):
    made = rule(**kept)(update)

    class Own(fusedstep.Optimizer):
        rule = made
        lr: float = 0.1

    return Own


# an update, and what it keeps
RULES = {
    # conditions are 1 and 0 wherever they are numbers
    "a sum of conditions": (lambda p, g, m, *, lr, numel: (p - lr * total(m * g > 0) / numel * g, g), M),
    "a condition kept": (lambda p, g, m, *, lr: (p - lr * m, g > 0), M),
    "a condition over all": (lambda p, g, *, lr: (p - lr * total_over_all(g > 0) * g,), {}),
    "a condition of sums": (lambda p, g, *, lr: (p - lr * report("trust_ratio", total(g) > 0) * g,), {}),
    "a choice of conditions": (lambda p, g, m, *, lr: (p - lr * where(g > 0, g > m, m > 0), g), M),
    "conditions compared": (lambda p, g, m, *, lr: (p - lr * ((g > 0) == (m >= 0)), g), M),
    "conditions multiplied": (lambda p, g, m, *, lr: (p - lr * (g > 0) * (m >= 0), g), M),
    "words of conditions": (lambda p, g, *, lr: (p - lr * (tanh(g > 0) + abs((g < 0) - 1)),), {}),
    "a condition kept once": (lambda p, g, n, *, lr: (p - lr * n * g, total(g) > 0), N),
    # powers, of negative numbers, too
    "a square": (lambda p, g, m, *, lr: (p - lr * m, mix(m, g**2, 0.9)), M),
    "a cube": (lambda p, g, *, lr: (p - lr * power(g, 3),), {}),
    "other whole powers": (lambda p, g, *, lr: (p - lr * (g**4 - 0.1 * g**5 + (2 + g * g) ** -2),), {}),
    "a reciprocal and a root": (lambda p, g, *, lr: (p - lr * (abs(g) + 1) ** -1 * (g * g) ** 0.5,), {}),
    "a sign that alternates": (lambda p, g, *, lr, step: (p - lr * (-1) ** step * g,), {}),
    "nothing to the power of nothing": (lambda p, g, *, lr: (p - lr * g * (0 * p) ** (0 * lr),), {}),
    "a root of a negative number": (lambda p, g, *, lr: (where(g**1.5 == g**1.5, p - lr, p),), {}),
    # what is the same for all elements counts once for each
    "a sum of an option": (lambda p, g, *, lr: (p - 0.01 * total(lr) * g,), {}),
    "a sum of a constant": (lambda p, g, *, lr, numel: (p - lr * total(1.0) / numel * g,), {}),
    "a sum of the count": (lambda p, g, *, lr, numel: (p - lr * total(1 / numel) * g,), {}),
    "a sum of what is kept once": (lambda p, g, n, *, lr: (p - 0.01 * lr * tanh(total(n)) * g, n + 0.1), N),
    "a sum of a choice": (lambda p, g, *, lr: (p - 0.01 * total(where(lr > 0, lr, g)) * g,), {}),
    "a choice of each tensor": (lambda p, g, n, *, lr: (p - lr * -where(n > 1.5, n, g), n + total(p > 0)), N),
    "the largest of an option": (lambda p, g, *, lr: (p - largest(-lr) * g,), {}),
    # states that begin as a number of their tensor
    "begun as a sum": (lambda p, g, m, *, lr, step: (p - lr * m, where(step == 1, total(g * g), m)), M),
    "begun as a share": (lambda p, g, m, *, lr, step, numel: (p - lr * m, where(step == 1, 1 / numel, m)), M),
}


@pytest.mark.parametrize("name", RULES)
def test_engines_agree_with_plain_python(name, engine):
    update, kept = RULES[name]
    compare(class_of(update, **kept), engine)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULES)
def test_so_does_a_gpu(name):
    update, kept = RULES[name]
    compare(class_of(update, **kept), "triton", "cuda")


@pytest.mark.parametrize("engine", ["torch", "cpu"])
def test_a_state_of_eight_bits_may_begin_as_a_number(engine):
    update, kept = RULES["begun as a share"]
    p = torch.nn.Parameter(torch.randn(64, 64))
    optimizer = class_of(update, **kept)([p], engine=engine, state_dtype="int8")
    p.grad = torch.randn_like(p)
    optimizer.step()
    found = optimizer.expanded_state_dict()["state"][0]["exp_avg"]
    torch.testing.assert_close(found, torch.full_like(p, 1 / 4096), rtol=0.02, atol=0)


def stepped(update, **kept):
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    class_of(update, **kept)([p]).step()


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (lambda p, g, *, lr: (p - total_over_all(total(g)),), "is the same for all elements of a tensor"),
        (lambda p, g, *, lr: (p - total_over_all(1.0),), "1.0 is the same for all elements"),
        (lambda p, g, *, lr: (p - report("ratio", total(g)),), "the name 'ratio'; use one of"),
        (lambda p, g, *, lr: (p - report("trust_ratio", g),), "a number of each tensor"),
    ],
)
def test_what_no_engine_could_mean_is_refused(update, message):
    with pytest.raises(TypeError, match=message):
        stepped(update)


def with_stage(stage):
    return lambda p, g, *, lr: (p - lr * staged(g, stage),)


def test_a_stage_says_what_it_lacks():
    class Unhashable(fusedstep.rules.Stage):
        __hash__ = None

        def run(self, source, target, workspace_bytes):
            target.copy_(source)

    class Returning(fusedstep.rules.Stage):
        def run(self, source, target, workspace_bytes):
            return source + 1

    class Empty(fusedstep.rules.Stage):
        pass

    for stage, message in (
        (Unhashable(), "frozen=True"),
        (Empty(), "has a `run`"),
        (Returning(), "fill `target` instead"),
    ):
        p = torch.nn.Parameter(torch.ones(2, 3))
        p.grad = torch.ones(2, 3)
        with pytest.raises(TypeError, match=message):
            class_of(with_stage(stage))([p]).step()
