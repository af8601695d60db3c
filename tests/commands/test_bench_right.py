"""What `fusedstep bench` compares a step with before it is timed."""

import pytest
import torch
from torch import nn

import fusedstep
from fusedstep import functional
from fusedstep.cli import contender, measure, right
from fusedstep.cli.right import Trial
from fusedstep.cli.works import CPU, DTYPES, GPU, Work
from fusedstep.rules import fma, mix, rule, sign

from .bench_runs import (  # noqa: F401
    ON_CPU,
    a_tiny_model,
    leaves_no_process_group,
    quick,
    run,
    words_of,
)

WORKS = {str(work._replace(model="")): work._replace(model="", peers=()) for work in CPU + GPU}


def params_of(*dtypes):
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for dtype in dtypes for shape in ((7,), (3, 5))]


@pytest.mark.parametrize("work", WORKS.values(), ids=str)
def test_every_case_of_the_table_is_right_and_has_a_reference(work):
    trial = Trial(work, params_of(DTYPES[work.dtype][0]))
    assert trial.note == ""
    assert trial.disagreement(contender.ours) == ""


@pytest.mark.parametrize("name", fusedstep.optimizers.__all__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_dtypes_of_a_users_model_are_compared(name, dtype):
    if name == "Muon" and dtype.is_complex:
        return
    work = Work("", name, {}, "own")
    assert Trial(work, params_of(dtype, torch.float32)).disagreement(contender.ours) == ""


@pytest.mark.parametrize("states", ["float32", "bfloat16", "int8"])
def test_states_that_are_stored_coarsely_are_not_wrong(states):
    work = Work("", "AdamW", {"state_dtype": states}, "fp32")
    assert Trial(work, params_of(torch.float32)).disagreement(contender.ours) == ""


@rule(states={"m": "exp_avg"})
def with_averages_swapped(p, g, m, *, lr, beta1, beta2, weight_decay):
    return fma(-lr, sign(mix(m, g, beta2)), (1 - lr * weight_decay) * p), mix(m, g, beta1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_rule_of_ours_is_found_where_torch_has_no_such_optimizer(dtype, tiny, monkeypatch):
    work = Work(tiny, "Lion", {}, dtype)
    assert "ours" in measure.measure(work, ON_CPU)
    monkeypatch.setattr(fusedstep.Lion, "rule_of", lambda self, group: with_averages_swapped)
    assert measure.measure(work, ON_CPU)["wrong"].startswith("off by")


def test_a_wrong_function_is_found(tiny, monkeypatch):
    work, real = Work(tiny, "functional.adamw_", {}, "fp32"), functional.adamw_
    assert "ours" in measure.measure(work, ON_CPU)
    monkeypatch.setattr(
        functional, "adamw_", lambda *lists, **options: real(*lists, **options, weight_decay=0.1)
    )
    assert measure.measure(work, ON_CPU)["wrong"].startswith("off by")


def test_sixteen_bits_do_not_hide_a_step_that_does_nothing_to_most_elements():
    """As torch's fused SGD in bfloat16 on a CPU, which updates the last few elements of a tensor."""
    work = Work("", "SGD", {"momentum": 0.9}, "bf16")

    def nothing(work, params):
        return contender.Made(None, lambda: None)

    for times in (4, 16):
        assert " on average after 3 steps" in Trial(work, params_of(torch.bfloat16)).disagreement(
            nothing, times
        )


@pytest.mark.parametrize("options", [{"num_heads": 4}, {"split_sizes": (4, 2, 2)}], ids=str)
def test_options_that_no_reference_has_are_compared_with_the_rule_itself_which_is_said(options):
    trial = Trial(Work("", "Muon", options, "fp32"), [nn.Parameter(torch.ones(8, 8))])
    assert trial.note == "compared with its own rule: no reference has these options"
    assert trial.disagreement(contender.ours) == ""
    assert "off by" in trial.disagreement(
        lambda work, params: contender.ours(work._replace(options={}), params)
    )


def test_muon_is_compared_on_vectors_matrices_batches_and_convolutions():
    params = [nn.Parameter(torch.ones(shape)) for shape in ((5,), (4, 6), (2, 3, 4), (4, 3, 2, 2))]
    trial = Trial(Work("", "Muon", {"max_grad_norm": 1.0}, "fp32"), params)
    assert {q.shape for q in trial.exact} >= {(4, 12), (2, 3, 4), (3000,)}
    assert right.WholeMuon is type(trial._in_float64())
    assert trial.disagreement(contender.ours) == ""


def test_a_complex_model_is_timed(tiny, tmp_path, monkeypatch):
    (tmp_path / "complex_of_test.py").write_text(
        "import torch\ndef make(): return torch.nn.Linear(8, 4, dtype=torch.complex64)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = run("--model", "complex_of_test:make", "--optimizer", "Lion", "--json", "a.json")
    assert done.exit_code == 0, done.output
    assert "Lion(), complex64" in words_of(done)


def test_only_what_is_wrong_is_to_be_reported_in_any_case(tiny, monkeypatch):
    done = run("--model", tiny, "--optimizer", "Muon", "--option", "split_sizes=2,2")
    assert done.exit_code == 1
    assert "1 of 1 rows failed; if not for your model, options or memory, report it" in words_of(done)
    monkeypatch.setattr(fusedstep.Lion, "step", lambda self: None)
    done = run("--model", tiny, "--optimizer", "Lion")
    assert done.exit_code == 1
    assert "1 of 1 rows are wrong; please report it" in words_of(done)
