"""A rule that is written outside of the package: stepped on every engine, and always as it is written now."""

import subprocess
import sys
import textwrap

import pytest
import torch

from fusedstep._algorithm import language
from fusedstep._algorithm.program import compile_step, make_rule

_LION = """
import fusedstep
from fusedstep.rules import pair, rule, where

@rule(states={{"m": "exp_avg"}})
def lion(p, g, m, *, lr, beta1, beta2, weight_decay):
    u = beta1 * m + (1 - beta1) * g
    u = where(u > 0, 1.0, where(u < 0, -1.0, 0.0)) + weight_decay * p
    return p {sign} lr * u, beta2 * m + (1 - beta2) * g

class Lion(fusedstep.Optimizer):
    rule = lion
    lr: float = 1e-4
    betas: tuple = pair("beta1", "beta2", (0.9, 0.99))
    weight_decay: float = 0.0
"""

_SCRIPT = """
    import sys

    sys.path.insert(0, sys.argv[1])
    import tests.conftest, torch, theirs

    p = torch.nn.Parameter(torch.linspace(-1, 1, 40))
    for engine in ("torch", "cpu", "triton"):
        q = torch.nn.Parameter(p.detach().clone())
        optimizer = theirs.Lion([q], lr=0.25, engine=engine)
        for _ in range(2):
            q.grad = torch.linspace(1, -2, 40)
            optimizer.step()
        print(float(q[0]), float(q[-1]))
"""


def lion_with(folder, text):
    """The first and last element after two steps of each engine, in a new process."""
    (folder / "theirs.py").write_text(text)
    # sources that change within a second keep their bytecode otherwise
    command = [sys.executable, "-B", "-c", textwrap.dedent(_SCRIPT), folder]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_lion_steps_on_all_engines_and_as_it_is_edited(tmp_path):
    assert lion_with(tmp_path, _LION.format(sign="-")) == ["-1.5 1.5"] * 3
    assert lion_with(tmp_path, _LION.format(sign="+")) == ["-0.5 0.5"] * 3


def error_of(body):
    """What compiling a rule raises, and the line of the rule it is raised at."""
    names = {**{name: getattr(language, name) for name in ("where", "sqrt")}, "math": __import__("math")}
    exec(compile(f"def rule(p, g, *, lr):\n    {body}\n    return (p,)\n", "<rule>", "exec"), names)
    with pytest.raises((TypeError, AttributeError)) as caught:
        compile_step(make_rule(names["rule"], {}))
    return str(caught.value), [entry.lineno + 1 for entry in caught.traceback if str(entry.path) == "<rule>"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("p = p if g > 0 else -p", "cannot branch on a value.*use where"),
        ("p = math.exp(p)", "takes numbers only; accepted are .*exp"),
        ("p = p.exp()", "has no 'exp'; use exp of fusedstep.rules"),
        ("p = p + 'a'", "used a str, 'a'.*use numbers and values"),
        ("a, b = p", "cannot be unpacked"),
    ],
)
def test_what_a_rule_cannot_do_is_told_at_its_own_line(body, message):
    found, lines = error_of(body)
    assert __import__("re").search(message, found)
    assert lines[-1] == 2


def test_arguments_and_results_of_a_rule_are_checked():
    with pytest.raises(TypeError, match=r"takes \['p', 'g', 'm'\] by position.*\['p', 'g', 'b'\]"):
        make_rule(lambda p, g, m, *, lr: (p, m), {"b": "momentum_buffer"})
    with pytest.raises(
        TypeError, match="return the new parameter and what is kept, as it is now: a tuple of 1"
    ):
        compile_step(make_rule(lambda p, g, *, lr: p, {}))


def test_a_rule_may_be_a_lambda_and_ignore_its_gradient(engine):
    from fusedstep import Optimizer

    class Decay(Optimizer):
        lr: float = 0.5
        rules = (make_rule(lambda p, g, *, lr: (p - lr * p,), {}),)

    p = torch.nn.Parameter(torch.tensor([4.0, -2.0, 0.0]))
    p.grad = torch.ones(3)
    optimizer = Decay([p], engine=engine)
    optimizer.step()
    optimizer.step(zero_grad=True, set_to_none=False)
    assert torch.equal(p.detach(), torch.tensor([1.0, -0.5, 0.0]))
    assert torch.equal(p.grad, torch.zeros(3))


def test_an_option_that_no_argument_declares_is_refused_when_the_class_is_made():
    from fusedstep import Optimizer

    with pytest.raises(TypeError, match=r"takes \['rate'\].*declare an option of that name"):

        class Odd(Optimizer):
            lr: float = 1e-3
            rules = (make_rule(lambda p, g, *, rate: (p - rate * g,), {}),)


def test_a_lazy_clone_survives_a_step(engine):
    import fusedstep

    p = torch.nn.Parameter(torch.ones(4))
    optimizer = fusedstep.SGD([p], lr=1.0, momentum=0.5, engine=engine)
    p.grad = torch.ones(4)
    optimizer.step()
    snap, buffer = torch._lazy_clone(p.detach()), torch._lazy_clone(optimizer.state[p]["momentum_buffer"])
    for _ in range(2):
        optimizer.step()
    assert torch.equal(snap, torch.zeros(4))
    assert torch.equal(buffer, torch.ones(4))
    assert torch.equal(p.detach(), torch.full((4,), -1.5 - 1.75))


@pytest.mark.parametrize("features", [{}, {"max_grad_norm": 10.0}, {"skip_nonfinite": True}], ids=repr)
@pytest.mark.parametrize("statistics", [False, True])
def test_sums_of_parameters_and_options_wait_for_the_options(engine, features, statistics):
    from fusedstep import Optimizer
    from fusedstep.rules import rule, total

    @rule(states={"m": "exp_avg"})
    def shrinking(p, g, m, *, lr):
        return p - total(lr * p) * g, lr * p

    class Shrinking(Optimizer):
        rule = shrinking
        lr: float = 0.5

    p = torch.nn.Parameter(torch.tensor([1.0, 3.0]))
    optimizer = Shrinking([p], engine=engine, statistics=statistics, **features)
    for lr, expected in ((0.5, [-1.0, 1.0]), (0.25, [-1.0, 1.0])):
        optimizer.param_groups[0]["lr"] = lr
        p.grad = torch.ones(2)
        optimizer.step()
        assert p.tolist() == expected
    assert optimizer.state[p]["exp_avg"].tolist() == [-0.25, 0.25]
    if statistics:
        assert optimizer.statistics().update_norm == 0
        assert optimizer.statistics().param_norm.item() == pytest.approx(2**0.5)
