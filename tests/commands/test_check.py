"""`fusedstep check`: what it runs, what it notices, what it says; and that mutants of rules do not pass it."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fusedstep
from fusedstep.cli import combinations, judging, subjects
from fusedstep.cli.__main__ import app
from fusedstep.cli.combinations import DTYPES, FEATURES, Case, Place, every, pairs
from tests import mutants

CPU = [Place("torch", "cpu"), Place("cpu", "cpu")]
pytestmark = pytest.mark.usefixtures("one_thread")


def run(*args):
    return CliRunner().invoke(app, ["check", "--jobs", "1", *args])


def named(text):
    """A combination by its text."""
    return Case.of(text)


def test_there_are_options_of_every_optimizer():
    of_npu = {f"npu.{name}" for name in fusedstep.npu.__all__ if name != "NesterovError"}
    others = {"functional.adamw_", "rules", "plain numbers"}
    assert {*subjects.OPTIONS} == {*fusedstep.optimizers.__all__} | of_npu | others


def test_every_rule_of_every_class_has_a_subject():
    found = set()
    for subject in subjects.SUBJECTS:
        if subject.takes("engine") and isinstance(subject.ours, type) and hasattr(subject.ours, "rules"):
            optimizer = subject.ours([torch.nn.Parameter(torch.ones(1, 1))], **subject.options)
            found.add(optimizer.rule_of(optimizer.param_groups[0]).update)
    # of Muon's there is one for every choice of its options
    names = {update.__name__ for update in found}
    for name in fusedstep.optimizers.__all__:
        updates = [rule.update for rule in getattr(fusedstep, name).rules]
        assert {update.__name__ for update in updates} <= names if name == "Muon" else {*updates} <= found


def test_references_share_nothing_with_the_library():
    files = [*Path(subjects.references.__file__).parent.glob("*.py")]
    assert len(files) > 3
    for source in (file.read_text() for file in files):
        assert "fusedstep" not in source.replace("fusedstep check", "")
        # only each other
        assert not re.search(r"from \.\.|from \. ", source)


def test_every_two_values_that_go_together_are_in_one_combination():
    few = [subject for subject in subjects.SUBJECTS if subject.name in ("AdamW", "Lion", "npu.NpuFusedLamb")]
    cases = pairs(CPU, few)
    assert all(case.makes_sense for case in cases)
    factors = {"subject": few, "dtype": [*DTYPES], "place": CPU, **FEATURES}
    parts = [
        {"subject": c.subject, "dtype": c.dtype, "place": c.place, **dict(zip(FEATURES, c.levels, strict=True))}
        for c in cases
    ]
    found = {
        (a, str(part[a]), b, str(part[b])) for part in parts for a, b in itertools.combinations(factors, 2)
    }
    for a, b in itertools.combinations(factors, 2):
        for x, y in itertools.product(factors[a], factors[b]):
            together = combinations._goes_together({a: x, b: y})
            assert ((a, str(x), b, str(y)) in found) == together
    assert len(cases) < len([*every(CPU, few)])


def test_a_combination_is_named_by_its_text():
    for case in pairs(CPU, subjects.SUBJECTS)[::50]:
        assert Case.of(str(case)) == case


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_allowed_is_a_small_part_of_what_steps_move(dtype):
    """Or a comparison could not fail."""
    plain = tuple(levels[0] for levels in FEATURES.values())
    for subject in subjects.SUBJECTS:
        case = Case(subject, dtype, CPU[0], plain)
        if not case.makes_sense:
            continue
        problem = judging.Problem(case)
        exact, theirs = judging.both_of(problem)
        params, right = judging._flat(theirs.params), judging._flat(exact.params)
        apart, moved = judging._error(params, right, subject.jumps), judging._flat(exact.path).max()
        assert 2 * apart < (0.7 if DTYPES[dtype][0] == torch.bfloat16 else 0.2) * moved, case


def test_right_combinations_are_green_and_left_behind_as_data(tmp_path):
    path = tmp_path / "found.json"
    done = run("--optimizer", "lion", "--device", "cpu", "--engine", "torch", "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "combinations are right" in done.output
    # what a log shows while it runs
    told = re.findall(r"^checking (\d+) of (\d+)$", done.output, re.MULTILINE)
    assert len(told) == 10
    assert told[-1][0] == told[-1][1]
    found = json.loads(path.read_text())
    assert found["torch"] == torch.__version__
    assert {row["optimizer"] for row in found["results"]} == {"Lion"}
    assert {row["dtype"] for row in found["results"]} == {*DTYPES}
    assert not any(row["problems"] for row in found["results"])


CPU, GPU = [Place("torch", "cpu"), Place("cpu", "cpu")], [Place("torch", "cuda"), Place("triton", "cuda")]


@pytest.mark.parametrize("where", [[CPU[0]], [CPU[1]], CPU, [GPU[0]], [GPU[1]], GPU, CPU + GPU], ids=str)
def test_any_engines_may_be_checked(where):
    cases = pairs(where, subjects.SUBJECTS)
    assert {case.place for case in cases} == {*where}
    assert all(case.makes_sense for case in cases)


# each as wrong as a kernel may be: little, once, or in one place
WRONG = {
    "a little": lambda p, t: p.data.mul_(1 + 1e-5),
    "one element": lambda p, t: p.data.reshape(-1)[-1:].add_(0.01),
    "not a number": lambda p, t: p.data.reshape(-1)[:1].fill_(float("nan")),
    "nothing done": lambda p, t: p.data.copy_(t),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("text", ["AdamW.1 float32 torch@cpu", "Lamb.2 float32 cpu@cpu clip=norm ema=yes"])
def test_a_wrong_step_is_told_with_numbers_and_how_to_repeat_it(text, wrong, monkeypatch):
    cls = getattr(fusedstep, text.partition(".")[0])
    real = cls.step

    def step(self, *args, **kwargs):
        params = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in params]
        real(self, *args, **kwargs)
        with torch.no_grad():
            WRONG[wrong](params[-1], before[-1])

    assert run("--case", text).exit_code == 0
    monkeypatch.setattr(cls, "step", step)
    done = run("--case", text)
    assert done.exit_code == 1
    assert f'fusedstep check --case "{text}"' in done.output
    assert "is allowed" in done.output or "NaN or infinite" in done.output
    assert "1 of 1 combinations are wrong" in done.output


@pytest.mark.parametrize(
    ("text", "attribute", "value", "complaint"),
    [
        ("SGD.1 float32 cpu@cpu zero=fill", "zero_grad", False, "gradients after a step"),
        ("SGD.1 float32 cpu@cpu zero=drop", "zero_grad", False, "gradients after a step"),
    ],
)
def test_gradients_that_are_not_cleared_are_told(text, attribute, value, complaint, monkeypatch):
    real = fusedstep.SGD.step
    monkeypatch.setattr(fusedstep.SGD, "step", lambda self, **kw: real(self, **{**kw, attribute: value}))
    done = run("--case", text)
    assert done.exit_code == 1
    assert complaint in done.output


def test_rounding_towards_zero_is_no_stochastic_rounding(monkeypatch):
    from fusedstep._algorithm import bits, formats

    text = "AdamW.1 bfloat16 torch@cpu storage=stochastic"
    assert not judging.complaints(named(text))
    mutants.forget()
    monkeypatch.setitem(formats._DRAWN, torch.bfloat16, lambda x, draw: _cut_off(bits, x))
    try:
        assert "on average" in str(judging.complaints(named(text)))
    finally:
        monkeypatch.undo()
        mutants.forget()


def _cut_off(bits, x):
    return bits.from_bits(bits.shifted_left(bits.shifted_right(bits.bits(x), 16), 16))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device", "tpu"], "use cpu or cuda"),
        (["--engine", "cuda"], "use one of"),
        (["--engine", "cpu", "--optimizer", "plain numbers"], "nothing to check of plain numbers"),
        (["--optimizer", "soap"], "there is no optimizer 'soap'"),
        (["--case", "bogus"], "no such combination: 'bogus'; name an optimizer with its number, a dtype"),
        (["--case", "AdamW.1 float32 cpu"], "no such combination"),
        (["--case", "AdamW.1 float32 cpu@cpu clip"], "no such combination"),
        (["--case", "AdamW.9 float32 cpu@cpu"], "no such combination"),
        (["--case", "AdamW.1 float32 cpu@cpu clip=maybe"], "no such combination"),
        (["--case", "AdamW.1 float32 cpu@cpu storage=split"], "does not go together"),
    ],
)
def test_what_is_not_there_is_refused(args, message):
    done = run(*args)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_whatever_a_step_raises_is_a_finding(monkeypatch):
    monkeypatch.setattr(fusedstep.SGD, "step", lambda self, *args, **kw: 1 / 0)
    done = run("--case", "SGD.1 float32 cpu@cpu")
    assert done.exit_code == 1
    assert "ZeroDivisionError" in done.output


def test_a_sample_of_mutants_is_caught():
    """All of them: python tests/mutants.py."""
    few = ("SGD", "Lion", "Adan", "RAdam", "ASGD")
    survived = [name for name, case in mutants.run(mutants.sample(60, few), only=few) if case is None]
    assert not survived


def test_what_is_named_as_equivalent_is_a_mutant_and_has_a_reason():
    for name, reason in json.loads(mutants.EQUIVALENT.read_text()).items():
        assert name in mutants.all_mutants()
        assert len(reason.split()) > 3


def test_a_mutant_is_undone():
    name = next(name for name in mutants.all_mutants() if name.startswith("optimizers.sgd.plain_sgd"))
    assert mutants.caught(name, ["SGD.1 float64 torch@cpu"])
    assert not judging.complaints(named("SGD.1 float64 torch@cpu"))
