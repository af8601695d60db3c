"""Mistakes in rules and classes of one's own: what the error says to write, and which line it points at."""

import re
import traceback

import numpy as np
import pytest
import torch

import fusedstep
from fusedstep import Optimizer
from fusedstep.rules import Stage, keyword, pair, rule, staged, where


def optimizer_of(made, **members):
    """A class as a class statement makes it; `members` with a type and a value are annotated."""
    annotations = {name: of[0] for name, of in members.items() if isinstance(of, list)}
    values = {name: of[1] if isinstance(of, list) else of for name, of in members.items() if of != [float]}
    return type("Mine", (Optimizer,), {"rule": made, "__annotations__": annotations, **values})


@rule
def sgd(p, g, *, lr):
    return (p - lr * g,)


@rule()
def with_step(p, g, *, step, lr):
    return (p - lr / step * g,)


@rule()
def with_betas(p, g, *, lr, beta1, beta2):
    return (p - lr * beta1 * beta2 * g,)


LR = {"lr": [float, 0.5]}


def stepped(update, engine="torch", dtype=torch.float32, kept=None, size=3, **arguments):
    """A parameter and its optimizer after a step with this update."""
    made = update if isinstance(update, fusedstep.rules.Rule) else rule(**(kept or {}))(update)
    p = torch.nn.Parameter(torch.ones(size, dtype=dtype))
    optimizer = optimizer_of(made, **LR)([p], engine=engine, **arguments)
    p.grad = torch.ones(size, dtype=dtype)
    optimizer.step()
    return p, optimizer


# a wrong line of a rule, and what it should have been
LINES = [
    ("x = torch.sqrt(g)", "'sqrt' of torch, which takes tensors; use sqrt of fusedstep.rules"),
    ("x = torch.where(g > 0, g, p)", "'where' of torch.*use where of"),
    ("x = torch.nn.functional.relu(g)", r"'relu' of torch.*write maximum\(x, low\)"),
    ("x = torch.mean(g)", r"'mean' of torch.*write total\(x\) / numel"),
    ("x = torch.stack([g, p])", "'stack' of torch.*accepted are operators"),
    ("x = torch.ones(2) * g", r"used a Tensor, tensor\(\[1., 1.\]\), in 'mul'; use numbers"),
    ("x = torch.tensor(g)", "is a single number"),
    ("x = np.sqrt(g)", "'sqrt' of NumPy, which takes arrays; use sqrt of fusedstep.rules"),
    ("x = np.clip(g, 0, 1)", r"'clip' of NumPy.*write clamp\(x, low, high\)"),
    ("x = np.where(g > 0, g, p)", "'where' of NumPy.*use where of"),
    ("x = np.sum(g)", r"'sum' of NumPy.*write total\(x\)"),
    ("x = np.ones(2) * g", "used a ndarray, .* in 'mul'; use numbers"),
    ("x = g.sqrt()", "no 'sqrt'; use sqrt of fusedstep.rules"),
    ("x = g.square()", r"no 'square'; write x \* x"),
    ("x = g.norm()", r"no 'norm'; write sqrt\(total\(x \* x\)\)"),
    ("x = g.clamp_(0, 1)", "no 'clamp_'; use clamp of fusedstep.rules"),
    ("x = g.mul_(2)", r"no 'mul_'; write x \* y"),
    ("x = g.shape", "no 'shape'; accepted are operators"),
    ("x = max(p, g)", r"`max`.*maximum\(a, b\) and minimum\(a, b\)"),
    ("x = 0 < g < 1", r"`a < b < c`.*products of conditions"),
    ("x = (g > 0) & (p > 0)", r"cannot use `&`.*multiply conditions"),
    ("x = ~(g > 0)", "cannot use .*`~`; .*1 - a for `not`"),
    ("x = g[0]", "is a single number and cannot be unpacked or indexed"),
    ("x = len(g)", "has no length"),
    ("x = round(g)", "takes numbers only"),
    ("x = staged(g, 3)", "an instance of a subclass of Stage that has a `run`, and not 3"),
    ("x = staged(g, Stage)", "an instance of a subclass of Stage that has a `run`, and not <class"),
]


@pytest.mark.parametrize(("line", "message"), LINES, ids=[line for line, _ in LINES])
def test_a_line_that_cannot_be_is_named_with_the_word_to_use(line, message):
    names = {"torch": torch, "np": np, "staged": staged, "Stage": Stage}
    text = f"def update(p, g, *, lr):\n    {line}\n    return (p,)\n"
    exec(compile(text, "<rule>", "exec"), names)
    with pytest.raises((TypeError, AttributeError)) as caught:
        stepped(names["update"])
    assert re.search(message, str(caught.value))
    frames = traceback.extract_tb(caught.value.__traceback__)
    # whoever reads the traceback from below finds the rule before whatever calls it
    theirs = [
        frame for frame in frames if "/fusedstep/" not in frame.filename and "/torch/" not in frame.filename
    ]
    assert [theirs[-1].filename, theirs[-1].lineno] == ["<rule>", 2]


@pytest.mark.parametrize("number", [2.0, np.float64(2), np.float32(2), np.int64(2), np.array(2.0)], ids=repr)
def test_a_number_of_numpy_is_a_number(engine, number):
    p, _ = stepped(lambda p, g, *, lr: (where(number > g, number * p - number / 4 * g, 0.0),), engine)
    assert p.tolist() == [1.5] * 3


@pytest.mark.parametrize("number", [np.float32(2), np.int64(2)], ids=repr)
def test_a_number_of_numpy_may_be_on_either_side(number):
    assert stepped(lambda p, g, *, lr: (p * number - lr * g,))[0].tolist() == [1.5] * 3


@pytest.mark.parametrize(
    "returned", [lambda p: p, lambda p: [p], lambda p: (p, p), lambda p: (None,), lambda p: ("a",)]
)
def test_what_a_rule_returns_is_told_with_what_it_should(returned):
    with pytest.raises(TypeError) as caught:
        stepped(lambda p, g, *, lr: returned(p))
    assert "return the new parameter and what is kept, as it is now: a tuple of 1, (new_p,)" in str(
        caught.value
    )
    assert "object at" not in str(caught.value)
    kept = {"states": {"m": "exp_avg"}, "scalars": {"n": "size"}}
    with pytest.raises(TypeError, match=r"returned <value .*a tuple of 3, \(new_p, new_m, new_n\)"):
        stepped(lambda p, g, m, n, *, lr: p, kept=kept)


STORAGES = [
    {},
    {"state_dtype": "int8"},
    {"state_dtype": "bfloat16", "rounding": "stochastic", "dtype": torch.bfloat16},
    {"master": "split", "dtype": torch.bfloat16},
    {"ema_decay": 0.5, "statistics": True, "max_grad_norm": 1.0, "skip_nonfinite": True},
]


@pytest.mark.parametrize("storage", STORAGES, ids=repr)
@pytest.mark.parametrize("is_option", [False, True])
def test_a_number_for_all_elements_is_stored_for_each(engine, storage, is_option):
    number = lambda lr: lr if is_option else 0.5
    # small tensors are not stored in 8 bits
    made = {"kept": {"states": {"m": "exp_avg"}}, "size": 5000, **storage}
    p, _ = stepped(lambda p, g, m, *, lr: (number(lr), m + g), engine, **made)
    assert {*p.tolist()} == {0.5}
    _, optimizer = stepped(lambda p, g, m, *, lr: (p - m, number(lr)), engine, **made)
    assert {*optimizer.expanded_state_dict()["state"][0]["exp_avg"].tolist()} == {0.5}


def test_a_rule_that_keeps_nothing_needs_no_parentheses(engine):
    assert isinstance(sgd, fusedstep.rules.Rule)
    assert stepped(sgd, engine)[0].tolist() == [0.5] * 3


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (lambda: rule({"m": "exp_avg"}), r"marks a function, and was given \{'m': 'exp_avg'\}; .*states="),
        (lambda: rule()(sgd), "marks a function, and was given Rule"),
        (lambda: rule(states=["m"])(lambda p, g, m: (p, m)), r"has states=\['m'\]; use a mapping"),
        (lambda: rule(scalars={"m": 1})(lambda p, g, m: (p, m)), r"has scalars=\{'m': 1\}; use a mapping"),
        (
            lambda: rule(states={"sq": "sq"}, nonnegative="sq")(lambda p, g, sq: (p, sq)),
            r"use a tuple, \('sq',\)",
        ),
        (lambda: rule()(lambda p, g, **kw: (p,)), r"takes \*\*kw, .*each option by its name, after a `\*`"),
        (lambda: rule()(lambda p, g, *more: (p,)), r"takes \*more, .*take \['p', 'g'\]"),
    ],
)
def test_how_a_function_is_marked_is_checked(mark, message):
    with pytest.raises(TypeError, match=message):
        mark()


BETAS = {"betas": [tuple, pair("beta1", "beta2", (0.5, 0.5))], **LR}
CLASSES = [
    (
        sgd,
        {"lr": 0.1},
        r"takes \['lr'\], .*lr has no annotation, and so it is no option; write `lr: float = 0.1`",
    ),
    (sgd, {"lr": [float]}, r"takes \['lr'\], .*lr has no default, .*`lr: float = 1e-3`"),
    (
        with_betas,
        {**BETAS, "betas": pair("beta1", "beta2", (0.5, 0.5))},
        "betas has no annotation.*`betas: tuple",
    ),
    (
        with_betas,
        {**BETAS, "betas": [tuple, pair("beta1", "beta2", (0.5,))]},
        r"default \(0.5,\), .*tuple of 2",
    ),
    (with_betas, {**BETAS, "betas": [tuple, pair("beta1", "beta2", 0.5)]}, "default 0.5, .*tuple of 2 numbers"),
    (sgd, {**LR, "maximize": True}, "maximize has no annotation.*`maximize: bool = True`"),
    (
        sgd,
        {**LR, "engine": "cpu"},
        r"engine has no annotation.*`engine: str = for_all\(default='cpu', kw_only=True",
    ),
    (sgd, {**LR, "engine": [str, "cpu"]}, r"engine holds for all groups; write `engine: str = for_all\("),
    (sgd, {**LR, "params": [float, 1.0]}, r"declares \['params'\], .*use other names"),
    (sgd, {**LR, "self": [float, 1.0]}, r"declares \['self'\], .*use other names"),
    (with_step, {**LR, "step": [float, 1.0]}, r"declares \['step'\], .*use other names"),
    (with_step, {**LR, "s": [float, keyword(default=1, kw_only=True, scalar="step")]}, r"declares \['step'\]"),
    (
        rule(lambda p, g, *, lr, ema_decay: (p,)),
        LR,
        r"rule '<lambda>' .* takes or keeps \['ema_decay'\], .*other",
    ),
    (lambda p, g, *, lr: (p,), LR, "Mine.rule is <function.*mark that function"),
]


@pytest.mark.parametrize(("made", "members", "message"), CLASSES)
def test_a_class_that_declares_no_option_is_told_the_line_to_write(made, members, message):
    with pytest.raises(TypeError, match=message):
        optimizer_of(made, **members)


def test_rules_of_a_class_are_a_tuple_of_rules():
    for rules in (sgd, (lambda p, g, *, lr: (p,),)):
        with pytest.raises(TypeError, match=r"Mine.rules has <function.*`rules = \(f, g\)` for several"):
            type("Mine", (Optimizer,), {"rules": rules, "__annotations__": {"lr": float}, "lr": 0.5})


def test_a_default_that_is_given_again_without_an_annotation_is_refused():
    with pytest.raises(TypeError, match=r"Bolder\.lr has no annotation.*write `lr: float = 0\.5`"):

        class Bolder(fusedstep.Lion):
            lr = 0.5


def test_a_class_without_a_rule_cannot_be_constructed():
    class Odd(Optimizer):
        lr: float = 0.5

    params = [torch.nn.Parameter(torch.ones(2))]
    for make in (lambda: Odd(params), lambda: Optimizer(params, {}), lambda: Optimizer(params, lr=0.5)):
        with pytest.raises(TypeError, match=r"(Odd|Optimizer) has no rule, .*write `rule = \.\.\.` in a class"):
            make()


def test_a_class_may_have_a_constructor_of_its_own(engine):
    class Mine(Optimizer):
        rule = sgd
        lr: float = 0.5

        def __init__(self, params, rate):
            super().__init__(params, lr=rate, engine=engine)

    p = torch.nn.Parameter(torch.ones(3))
    optimizer = Mine([p], 0.25)
    p.grad = torch.ones(3)
    optimizer.step()
    assert p.tolist() == [0.75] * 3


@pytest.mark.parametrize("given", [sgd, Optimizer, torch.optim.SGD, 3])
def test_check_rule_takes_a_class(given):
    with pytest.raises(TypeError, match=r"check_rule was given .*give it the class that has the rule"):
        fusedstep.check_rule(given)


def test_check_rule_names_options_that_no_rule_takes():
    members = {**LR, "weight_decay": [float, 0.1]}
    report = fusedstep.check_rule(optimizer_of(sgd, **members), steps=1, engine="torch")
    assert report
    assert "no rule takes weight_decay" in repr(report)
    assert "no rule takes" not in repr(fusedstep.check_rule(optimizer_of(sgd, **LR), steps=1, engine="torch"))
