"""What does not work yet, each as the test that will show when it does."""

import subprocess
import sys
import textwrap

import pytest
import torch

import fusedstep

_RULE = """
    import sys

    sys.path.insert(0, sys.argv[1])
    import torch, fusedstep, theirs
    from fusedstep import _scalars
    from fusedstep._passes import Pass, Rule

    RULE = Rule(_scalars.sgd, (Pass(theirs.rule, "pg", "p"),), {}, saves_step=False)

    class Theirs(fusedstep.SGD):
        def rule(self, group):
            return RULE

    p = torch.nn.Parameter(torch.ones(20))
    p.grad = torch.ones(20)
    Theirs([p], lr=1.0, engine="cpu").step()
    print(p[0].item(), p[-1].item())
"""


def step_with(folder, rule):
    """What a step in a new process makes of ones, with a rule that is written outside of the package."""
    (folder / "theirs.py").write_text(rule)
    script = folder / "script.py"
    script.write_text(textwrap.dedent(_RULE))
    # sources that change within a second keep their bytecode otherwise
    command = [sys.executable, "-B", script, folder]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.xfail(strict=True, reason="kernels are kept on disk by the name of a rule that is not ours")
def test_a_rule_outside_the_package_runs_as_it_is_now(tmp_path):
    rule = "def times(p, g, lr, weight_decay):\n    return (p - {} * lr * g,)\n\nrule = times\n"
    assert step_with(tmp_path, rule.format(2)) == ["-1.0", "-1.0"]
    assert step_with(tmp_path, rule.format(3)) == ["-2.0", "-2.0"]


@pytest.mark.xfail(strict=True, reason="on the cpu engine `where` takes a vector and a number, not two numbers")
def test_a_rule_may_choose_between_two_numbers(tmp_path):
    rule = (
        "from fusedstep._rules import where\n\n"
        "def chooses(p, g, lr, weight_decay):\n    return (p - where(g > 0, 1.0, 0.0),)\n\nrule = chooses\n"
    )
    assert step_with(tmp_path, rule) == ["0.0", "0.0"]


_BY_ADDRESS = pytest.mark.xfail(strict=True, reason="memory is written by address, which copies nothing")


@pytest.mark.parametrize(
    "engine", ["torch", *(pytest.param(name, marks=_BY_ADDRESS) for name in ("cpu", "triton"))]
)
def test_a_lazy_clone_survives_a_step(engine):
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = fusedstep.SGD([p], lr=1.0, engine=engine)
    p.grad = torch.ones(4)
    optimizer.step()
    snap = torch._lazy_clone(p.detach())
    optimizer.step()
    assert torch.equal(snap, torch.zeros(4))
    assert torch.equal(p.detach(), -torch.ones(4))
