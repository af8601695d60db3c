"""Names of optimizers and values of options, as people write them in files and on command lines."""

import pytest
import torch
from typer.testing import CliRunner

import fusedstep
from fusedstep.cli.__main__ import app
from fusedstep.cli.asked import Asked, works_of
from fusedstep.cli.check import _chosen
from fusedstep.registry import key_of, understood

OmegaConf = pytest.importorskip("omegaconf").OmegaConf
yaml = pytest.importorskip("yaml")


def made(name, **options):
    return fusedstep.by_name(name, **options)([torch.nn.Parameter(torch.ones(2, 2))])


@pytest.mark.parametrize(
    "betas",
    ["(0.9, 0.95)", "0.9, 0.95", ["0.9", "0.95"], ("0.9", "0.95"), "['0.9', '0.95']", ["9e-1", 0.95]],
    ids=repr,
)
def test_strings_in_a_list_are_numbers(betas):
    for given in (betas, OmegaConf.create({"betas": betas}).betas):
        assert made("lion", betas=given).param_groups[0]["betas"] == (0.9, 0.95)


def test_numbers_that_yaml_takes_for_strings_are_numbers():
    options = yaml.safe_load("lr: 1e-3\nstep_sizes: [1e-6, 50]\nmaximize: true\n")
    assert options["step_sizes"] == ["1e-6", 50]
    (group,) = made("rprop", **options).param_groups
    assert (group["lr"], group["step_sizes"], group["maximize"]) == (1e-3, (1e-6, 50), True)


@pytest.mark.parametrize("value", ["yes", "no", "on", "off", "y", "'true'"])
def test_words_that_are_no_flags_are_refused(value):
    assert isinstance(understood(value), str)
    with pytest.raises(TypeError, match=r"was given maximize=.*; use True or False"):
        made("lion", maximize=value)


@pytest.mark.parametrize("value", ["a sentence", "(1, 2", "'quoted'", [["deep", ("1e-2",)]], 3, None, 0.5])
def test_what_stands_for_nothing_else_stays(value):
    expected = {"'quoted'": "quoted"}.get(value, value) if isinstance(value, str) else value
    assert understood(value) == ([["deep", (0.01,)]] if isinstance(value, list) else expected)


DTYPES = {
    "bf16": torch.bfloat16,
    "BF16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "torch.bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "half": torch.float16,
    "torch.half": torch.float16,
    "fp32": torch.float32,
    "float": torch.float32,
    "'fp32'": torch.float32,
    "double": torch.float64,
    "int8": torch.int8,
}


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items())
def test_dtypes_have_their_usual_names(name, dtype):
    assert made("adamw", state_dtype=name).state_dtype is dtype
    of_states = made("adamw", state_dtype={"exp_avg": name, "exp_avg_sq": "float32"}).state_dtype
    assert of_states == {"exp_avg": dtype, "exp_avg_sq": torch.float32}


@pytest.mark.parametrize("name", ["fp8", "floaty", "single", "16"])
def test_a_dtype_that_states_cannot_have_is_refused(name):
    with pytest.raises(ValueError, match=rf"Invalid state_dtype: {name}; use one of"):
        made("adamw", state_dtype=name)


def spellings(name):
    return name.lower(), name.upper(), "-".join(name), f"_{name}_"


@pytest.mark.parametrize("name", fusedstep.optimizers.__all__)
def test_every_command_takes_a_name_however_it_is_written(name):
    for found in spellings(name):
        assert fusedstep.by_name(found) is getattr(fusedstep, name)
        # bench makes one of a vector, before anything is timed
        if name != "Muon":
            (work,) = works_of(Asked([], [found], [], [], {}), "", "cpu")
            assert work.optimizer == name
        assert {case.subject.name for case in _chosen("cpu", "torch", [found], full=False)} == {name}


def test_names_of_operators_differ_however_they_are_written():
    from fusedstep.cli.subjects import OPTIONS

    assert len({*map(key_of, OPTIONS)}) == len(OPTIONS)
    assert {case.subject.name for case in _chosen("cpu", "torch", ["NPU.npufused_sgd"], full=False)} == {
        "npu.NpuFusedSGD"
    }


def memory(*args):
    done = CliRunner().invoke(app, ["memory", "--model", "tests.test_registry:make_model", *args])
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


def make_model():
    return torch.nn.Linear(64, 64, bias=False)


@pytest.mark.parametrize("found", ["muon", "MUON", "mu_on"])
def test_memory_takes_a_name_however_it_is_written(found):
    code, output = memory("--optimizer", found)
    assert code == 0
    assert "Muon(" in output


def test_memory_names_the_optimizers_that_there_are():
    code, output = memory("--optimizer", "soap")
    assert code == 2
    assert "found 'soap'; use one of ADOPT, ASGD" in output


@pytest.mark.parametrize(
    ("found", "dtype"), [("half", "float16"), ("bf16", "bfloat16"), ("torch.float32", "float32")]
)
def test_commands_take_usual_names_of_dtypes(found, dtype):
    code, output = memory("--dtype", found)
    assert code == 0
    assert f"parameters of {dtype}" in output
    (work,) = works_of(Asked(["bert-base"], [], [], [found], {}), "", "cpu")
    assert work.dtype == {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[dtype]


def test_options_of_commands_are_those_of_configuration_files():
    code, output = memory("--optimizer", "sgd", "--option", "momentum=9e-1", "--option", "nesterov=true")
    assert code == 0
    assert "SGD(momentum=0.9, nesterov=True)" in output
    (work,) = works_of(Asked([], ["sgd"], ["momentum=9e-1"], ["bf16"], {"state_dtype": "fp32"}), "", "cpu")
    assert work.options == {"state_dtype": "float32", "momentum": 0.9}
