"""What `fusedstep memory` predicts is what is there, on every device that can be asked; what it refuses."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fusedstep
from fusedstep.cli.__main__ import app
from fusedstep.cli.counting import (
    Setting,
    allocated,
    deviation,
    measured,
    parameters_of,
    predicted,
    settings_for,
)
from fusedstep.cli.memory import OPTIMIZERS

DTYPES = [torch.bfloat16, torch.float32, torch.float16]
SMALL = Setting("int8", "split8")


def make_model():
    """Matrices whose rows are blocks and are not, one with a last block that is not full, and small tensors."""
    return nn.Sequential(nn.Linear(128, 96), nn.LayerNorm(96), nn.Linear(96, 67), nn.Linear(67, 71))


def make_by_looking():
    """What cannot be made without memory."""
    model = make_model()
    assert model[0].weight.abs().max().item() > 0
    return model


def make_frozen():
    model = make_model()
    model[0].requires_grad_(False)
    return model


def make_channels_last():
    return nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)


def make_a_number():
    return 1


def make_mixed():
    model = make_model()
    model[2].bfloat16()
    return model


def make_half():
    return make_model().half()


def make_large():
    return nn.Linear(3000, 3000, bias=False)


def fail():
    print("called")
    raise RuntimeError("no weights here")


def make_complex():
    model = make_model()
    model.phase = nn.Parameter(torch.ones(64, 64, dtype=torch.complex64))
    return model


def run(*args):
    return CliRunner().invoke(app, ["memory", *args])


def both(name, setting, dtype, factory=make_model, **options):
    """Predicted, and measured on a CPU."""
    named = parameters_of(f"{__name__}:{factory.__name__}", dtype)

    def make(*args, **more):
        return OPTIMIZERS[name](*args, **options, **more)

    return predicted(make([p for _, p in named], **setting._asdict())), measured(named, make, setting, "cpu")


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        *(("AdamW", {}, dtype) for dtype in DTYPES),
        ("AdamW", {"amsgrad": True, "ema_decay": 0.9}, torch.bfloat16),
        ("SGD", {}, torch.bfloat16),
        ("SGD", {"momentum": 0.9, "rounding": "stochastic"}, torch.bfloat16),
        ("BertAdam", {}, torch.float32),
        ("Lamb", {}, torch.float16),
    ],
    ids=str,
)
def test_what_is_predicted_is_there_after_a_step(name, options, dtype):
    settings = settings_for(lambda *a, **k: OPTIMIZERS[name](*a, **options, **k), dtype)
    for setting in settings:
        # which need not be compiled
        expected, found = both(name, setting, dtype, engine="torch", **options)
        assert expected.at_rest == found.at_rest, setting
        assert expected.stand_ins == 0


def test_settings_are_those_that_make_a_difference():
    of = {dtype: settings_for(fusedstep.AdamW, dtype) for dtype in DTYPES}
    masters = {dtype: [*dict.fromkeys(s.master for s in of[dtype])] for dtype in DTYPES}
    assert masters == {
        torch.bfloat16: [None, "split", "split8", "float32"],
        torch.float32: [None],
        torch.float16: [None, "float32"],
    }
    states = {dtype: [*dict.fromkeys(s.state_dtype for s in of[dtype])] for dtype in DTYPES}
    assert states == {
        torch.bfloat16: [None, "float32", "int8"],
        torch.float32: [None, "bfloat16", "int8"],
        torch.float16: [None, "float32", "bfloat16", "int8"],
    }
    assert settings_for(fusedstep.SGD, torch.float32) == [Setting()]


@pytest.mark.parametrize("setting", [Setting(), SMALL], ids=str)
def test_a_frozen_parameter_takes_itself_alone(setting):
    expected, found = both("AdamW", setting, torch.bfloat16, make_frozen)
    assert expected.at_rest == found.at_rest
    frozen = sum(p.numel() for p in make_frozen()[0].parameters())
    assert expected.parameter - expected.gradient == 2 * frozen


@pytest.mark.parametrize(("setting", "sizes"), [(Setting(), 0), (SMALL, 4)], ids=str)
def test_blocks_of_tensors_that_do_not_lie_row_by_row_take_stand_ins(setting, sizes):
    expected, found = both("AdamW", setting, torch.bfloat16, make_channels_last)
    assert expected.at_rest == found.at_rest
    assert expected.stand_ins == sizes * make_channels_last().weight.numel()


@pytest.mark.parametrize("factory", [make_model, make_by_looking])
def test_a_model_is_known_without_memory_where_that_can_be(factory):
    named = parameters_of(f"{__name__}:{factory.__name__}", torch.float16)
    assert [name for name, _ in named] == [name for name, _ in make_model().named_parameters()]
    assert {(p.device.type, p.dtype) for _, p in named} == {("meta", torch.float16)}


def test_eight_bits_and_a_split_master_take_seven_bytes():
    named = parameters_of("llama-1b", torch.bfloat16)
    expected = predicted(fusedstep.AdamW([p for _, p in named], **SMALL._asdict()))
    assert 7 < expected.at_rest / sum(p.numel() for _, p in named) <= 7.2


@pytest.mark.parametrize("factory", [make_model, make_frozen, make_channels_last])
@pytest.mark.parametrize("setting", [Setting(), SMALL, Setting("float32", "float32")], ids=str)
def test_what_is_kept_for_parameters_that_are_offloaded_is_on_the_host(setting, factory, monkeypatch):
    named = parameters_of(f"{__name__}:{factory.__name__}", torch.bfloat16)
    expected = predicted(fusedstep.AdamW([p for _, p in named], offload="cpu", **setting._asdict()))
    assert expected.at_rest == sum(2 * p.numel() * (1 + p.requires_grad) for _, p in named)
    monkeypatch.setattr("fusedstep._memory.offload.applies", lambda part: True)
    params = [allocated(p, "cpu") for _, p in named]
    optimizer = fusedstep.AdamW(params, offload="cpu", **setting._asdict())
    optimizer.step()
    rows = [row for table in optimizer._plan.tables for row in table.rows]
    there = [t for row in rows for t in (row.param_copy, row.grad_copy, *row.state.values())]
    assert expected.on_host == sum(t.numel() * t.itemsize for t in there)


def test_it_shows_what_is_on_the_host():
    done = run("--model", "bert-base", "--offload")
    assert done.exit_code == 0, done.output
    assert "on the host" in " ".join(done.output.split())
    if not torch.cuda.is_available():
        done = run("--model", "bert-base", "--offload", "--measure")
        assert done.exit_code == 2
        assert "leave out --measure" in done.output


def test_it_shows_all_settings_and_names_what_stays_float32(tmp_path):
    path = tmp_path / "memory.json"
    done = run("--model", f"{__name__}:make_model", "--dtype", "bf16", "--measure", "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "fewer than 4096 elements" in done.output
    found = json.loads(path.read_text())
    assert found["elements"] == sum(p.numel() for p in make_model().parameters())
    settings = {Setting(each["state_dtype"], each["master"]): each for each in found["settings"]}
    assert len(settings) == 12
    if not torch.cuda.is_available():
        each = settings[SMALL]
        at_rest = each["predicted"]["at_rest"]
        assert each["measured"] == {"at_rest": at_rest, "peak": None, "deviation": 0, "on_host": None}
    (kept,) = found["float32"]
    small = {name: p.numel() for name, p in make_model().named_parameters() if p.numel() < 4096}
    assert kept["names"] == [*small]
    assert (kept["elements"], kept["share"]) == (sum(small.values()), sum(small.values()) / found["elements"])


@pytest.mark.parametrize(
    ("factory", "args", "dtypes", "count"),
    [
        ("make_model", (), "float32", 3),
        ("make_half", (), "float16", 8),
        ("make_mixed", (), "float32 and bfloat16", 16),
        ("make_model", ("--dtype", "float16"), "float16", 8),
        ("make_model", ("--dtype", "fp16"), "float16", 8),
        ("make_mixed", ("--dtype", "fp32"), "float32", 3),
    ],
    ids=str,
)
def test_a_model_keeps_its_dtypes_unless_another_is_asked_for(factory, args, dtypes, count, tmp_path):
    path = tmp_path / "memory.json"
    done = run("--model", f"{__name__}:{factory}", *args, "--json", str(path))
    assert done.exit_code == 0, done.output
    assert f"parameters of {dtypes}, AdamW()" in " ".join(done.output.split())
    found = json.loads(path.read_text())
    assert found["dtype"] == dtypes
    assert len(found["settings"]) == count


def test_a_model_by_its_shapes_is_bfloat16():
    assert {p.dtype for _, p in parameters_of("bert-base")} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("model", "column", "number"),
    [
        (f"{__name__}:make_model", "kB in all", "382.480"),
        (f"{__name__}:make_large", "MB in all", "144.000"),
        ("llama-1b", "GB in all", "9.887"),
    ],
)
def test_all_bytes_are_shown_in_a_unit_that_fits(model, column, number):
    done = run("--model", model)
    assert done.exit_code == 0, done.output
    assert column in done.output
    assert number in done.output


def test_a_function_that_fails_is_told_once():
    done = run("--model", f"{__name__}:fail")
    assert done.exit_code == 2
    assert done.output.count("RuntimeError: no weights here") == 1
    assert "Traceback" not in done.output


def test_a_model_by_its_shapes_names_shapes():
    done = run("--model", "bert-base", "--optimizer", "SGD", "--option", "momentum=0.9")
    assert done.exit_code == 0, done.output
    assert "x (768,)" in done.output
    assert "SGD(momentum=0.9)" in done.output


def test_a_rule_without_states_keeps_none_in_float32():
    done = run("--model", "bert-base", "--optimizer", "SGD")
    assert done.exit_code == 0, done.output
    assert "stay float32" not in done.output


def test_a_setting_that_a_parameter_refuses_says_why_and_others_are_shown(tmp_path):
    path = tmp_path / "memory.json"
    done = run("--model", f"{__name__}:make_complex", "--json", str(path))
    assert done.exit_code == 0, done.output
    shown = json.loads(path.read_text())
    states = [each["state_dtype"] for each in shown["settings"] if each["master"] is None]
    assert states == [None, "int8"]
    assert "there is no complex bfloat16" in " ".join(done.output.split())
    assert "not a plain tensor of real numbers" in str(shown["float32"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "nothing"), "found 'nothing'; use one of bert-base"),
        (("--model", "nothing:make"), "nothing:make cannot be found"),
        (("--model", f"{__name__}:make_nothing"), "has no attribute 'make_nothing'"),
        (("--model", f"{__name__}:make_a_number"), "returned int; name a function"),
        (("--optimizer", "Soap"), "found 'Soap'; use one of"),
        (("--dtype", "float64"), "found 'float64'; use one of bfloat16, float32, float16, bf16,"),
        (("--option", "momentum=0.9"), "momentum"),
        (("--option", "lrr=3"), "lrr"),
        (("--option", "lr"), "found 'lr'; use name=value"),
        (("--option", "master=split"), "which cannot be given"),
        (("--option", "lr=-1"), "Invalid learning rate: -1"),
    ],
    ids=str,
)
def test_what_is_not_there_is_refused_with_what_is(args, message):
    done = run(*args)
    assert done.exit_code == 2
    # in a box, which breaks lines
    words = " ".join(done.output.replace("│", " ").split())
    assert message in words


def test_released_gradients_are_a_bucket_and_a_large_one():
    named = parameters_of(f"{__name__}:make_frozen", torch.bfloat16)
    sizes = sorted(2 * p.numel() for _, p in named if p.requires_grad)
    for setting in (Setting(), SMALL):
        optimizer = fusedstep.AdamW([p for _, p in named], **setting._asdict())
        plain, released = predicted(optimizer), predicted(optimizer, bucket_bytes=100)
        assert released == plain._replace(gradient=0, waiting=100 + sizes[-1])
        assert released.during_a_step == released.waiting
        assert predicted(optimizer, bucket_bytes=1 << 30).waiting == sum(sizes) == plain.gradient
        assert measured(named, fusedstep.AdamW, setting, "cpu", 100).at_rest == released.at_rest


def test_it_knows_released_gradients(tmp_path):
    path = tmp_path / "memory.json"
    model = ("--model", f"{__name__}:make_complex")
    done = run(*model, "--release-gradients", "--measure", "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "gradients released" in done.output
    found = json.loads(path.read_text())
    assert found["bucket_bytes"] == 64 << 20
    assert {each["predicted"]["gradient"] for each in found["settings"]} == {0}
    if not torch.cuda.is_available():
        assert {each["measured"]["deviation"] for each in found["settings"]} == {0}
    done = run(*model, "--release-gradients", "--optimizer", "Lamb")
    assert done.exit_code == 2
    assert "max_grad_norm" in done.output


@pytest.mark.gpu
def test_a_gpu_has_what_is_predicted_at_its_peak():
    shapes = [(1024, 768), (768,), (768, 1024), (1024,)] * 64
    named = [(str(s), nn.Parameter(torch.empty(s, dtype=torch.bfloat16, device="meta"))) for s in shapes]
    elements = sum(p.numel() for _, p in named)
    assert elements > 1e8
    # what is compiled and kept for good is there before
    measured(named[:4], fusedstep.AdamW, SMALL, "cuda")
    found = measured(named, fusedstep.AdamW, SMALL, "cuda")
    expected = predicted(fusedstep.AdamW([p for _, p in named], **SMALL._asdict()))
    assert abs(found.peak / expected.at_rest - 1) < 0.03
    assert found.peak / elements <= 7.2
    assert deviation(expected, found) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("setting", [Setting("float32", "float32"), SMALL], ids=str)
def test_a_gpu_has_parameters_and_gradients_alone_where_they_are_offloaded(setting):
    shapes = [(1024, 768), (768,), (768, 1024), (1024,)] * 16
    named = [(str(s), nn.Parameter(torch.empty(s, dtype=torch.bfloat16, device="meta"))) for s in shapes]

    def make(params, **arguments):
        return fusedstep.AdamW(params, offload="cpu", **arguments)

    found, expected = (
        measured(named, make, setting, "cuda"),
        predicted(make([p for _, p in named], **setting._asdict())),
    )
    assert abs(found.peak / expected.at_rest - 1) < 0.03
    # torch rounds what it pins up to powers of two
    assert expected.on_host <= found.on_host < 2 * expected.on_host


@pytest.mark.gpu
def test_a_gpu_has_what_is_predicted_at_its_peak_when_gradients_are_released():
    shapes = [(1024, 768), (768,), (768, 1024), (1024,)] * 64
    named = [(str(s), nn.Parameter(torch.empty(s, dtype=torch.bfloat16, device="meta"))) for s in shapes]
    bucket_bytes = 8 << 20
    measured(named[:4], fusedstep.AdamW, SMALL, "cuda", bucket_bytes)
    found = measured(named, fusedstep.AdamW, SMALL, "cuda", bucket_bytes)
    expected = predicted(fusedstep.AdamW([p for _, p in named], **SMALL._asdict()), bucket_bytes)
    assert abs(deviation(expected, found)) < 0.03
    assert found.peak / sum(p.numel() for _, p in named) <= 5.2
