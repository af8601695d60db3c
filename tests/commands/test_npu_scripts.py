"""python -m fusedstep.npu: scripts for torch_npu, as they are, in a process of their own."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.test_npu import Exact, reference_adamw, ulp

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None, reason="with a real torch_npu nothing stands in for it"
)
EXAMPLES = Path(__file__).parent / "npu_examples"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def launch(*command, cwd=None):
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=600
    )


def run(path, *arguments):
    return launch("-m", "fusedstep.npu", path, *arguments)


@pytest.fixture
def script(tmp_path):
    """Writes a script and runs it; it must succeed, and returns what it printed."""

    def run_text(text, *arguments):
        path = tmp_path / "script.py"
        path.write_text(text)
        result = run(path, *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run_text


# the documents' own examples


def results_of(name, script, tmp_path, what):
    script(f"{(EXAMPLES / f'{name}.py').read_text()}\ntorch.save({what}, {str(tmp_path / 'saved')!r})\n")
    return torch.load(tmp_path / "saved", map_location="cpu")


def examples_params():
    """What each example starts from, by another way."""
    sizes = [(2, torch.float32), (4, torch.float32), (2, torch.float16), (4, torch.float16)]
    sizes += [(5, torch.float32), (6, torch.float16), (2, torch.float32)]
    return [torch.tensor([[float(3 * i + j) for j in range(3)] for i in range(n)], dtype=t) for n, t in sizes]


OPTIONS = {
    "NpuFusedAdam": {"eps": 1e-8, "betas": (0.9, 0.999), "lr": 2e-3, "weight_decay": 0.05},
    "NpuFusedBertAdam": {"lr": 0.01, "warmup": 0.1, "t_total": 20, "max_grad_norm": -1},
    "NpuFusedLamb": {"lr": 0.01, "eps": 1e-5},
    "NpuFusedSGD": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.001},
}


def test_every_example_is_run_by_a_test():
    assert {path.stem for path in EXAMPLES.glob("*pu*.py")} == {*OPTIONS, "npu_apply_fused_adamw_v2"}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_document_s_example_runs_as_it_is_and_computes_what_it_should(name, script, tmp_path):
    params, states = results_of(name, script, tmp_path, "(params, fused_opt.state_dict()['state'])")
    before = examples_params()
    exact = Exact(name, before, OPTIONS[name])
    # the last one gets no gradient
    exact.step([(p / 100.0) for p in before[:-1]] + [None])
    assert len(params) == 7
    assert sorted(states) == [0, 1, 2, 3, 4, 5]
    for p, q, start in zip(params, exact.params, before, strict=True):
        assert p.dtype == start.dtype
        allowed = ulp(q) if p.dtype == torch.float16 else 1e-6 * q.abs() + 1e-7
        assert ((p.double() - q).abs() <= allowed).all()
    for i, state in states.items():
        for key in exact.states[i].keys() - {"t"}:
            q = exact.states[i][key]
            allowed = ulp(q) if params[i].dtype == torch.float16 else 1e-6 * q.abs() + 1e-9
            assert ((state[key].double() - q).abs() <= allowed).all()
    # the first step of BertAdam's warm-up goes nowhere; in float16 a step may be too small to be stored
    moved = [not torch.equal(p, q) for p, q in zip(params, before, strict=True) if p.dtype == torch.float32]
    assert moved == [name != "NpuFusedBertAdam"] * 3 + [False]


def test_the_operator_s_example_runs_as_it_is_and_computes_what_it_should(script, tmp_path):
    names = "(var, grad, m, v, max_grad_norm)"
    found = results_of("npu_apply_fused_adamw_v2", script, tmp_path, names)
    before = [torch.full((10, 10), x) for x in (0.5, 0.5, 0.9, 0.9, 0.9)]
    var, m, v, _ = reference_adamw(*before, 1, 1e-3, 0.9999, 0.9999, 0.0, 1e-8, False, False)
    assert torch.equal(found[1], before[1])
    assert torch.equal(found[4], before[4])
    # the step size is divided by 1 - 0.9999, which float32 knows to 3e-4
    torch.testing.assert_close(found[0].double(), var, rtol=1e-4, atol=0)
    torch.testing.assert_close(found[0], torch.full((10, 10), 0.40514034), rtol=2e-7, atol=0)
    torch.testing.assert_close(found[2].double(), m, rtol=1e-6, atol=0)
    torch.testing.assert_close(found[3].double(), v, rtol=1e-6, atol=0)


# training

TRAINING = """
import argparse

import torch
import torch_npu
from torch_npu.contrib import transfer_to_npu
from torch_npu.npu.amp import GradScaler, autocast
from torch_npu.optim import NpuFusedAdamW

import model_of_mine

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--out")
options = parser.parse_args()

torch.npu.set_device("npu:0")
assert torch.npu.is_available() and torch_npu.npu.device_count() >= 1 and torch.npu.current_device() == 0
device = torch.device("npu:0")
torch.manual_seed(0)
model = model_of_mine.make().npu()
x = torch.randn(64, 8).npu(non_blocking=True)
y = torch.randn(64, 1).to("npu")
ones = torch.ones(64, 1, device="npu")
assert x.is_npu and x.device == ones.to(device).device == next(model.parameters()).device
optimizer = NpuFusedAdamW(model.parameters(), lr=1e-2)
scaler, losses = GradScaler(init_scale=2.0**10, dynamic=True), []
for _ in range(options.steps):
    optimizer.zero_grad()
    with autocast():
        out = model(x)
        assert out.dtype == torch.float16
        loss = ((out.float() - y).square() * ones).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    optimizer.clip_grad_norm_fused_(1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
torch.npu.synchronize()
torch.npu.empty_cache()
torch.save({"model": model.state_dict(), "losses": losses}, options.out)
"""
MODEL = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
"""


def test_a_training_script_with_mixed_precision_trains_as_with_torch_optim(script, tmp_path):
    (tmp_path / "model_of_mine.py").write_text(MODEL)
    script(TRAINING, "--steps", 20, "--out", tmp_path / "saved")
    found = torch.load(tmp_path / "saved", map_location="cpu")

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(DEVICE)
    x, y = torch.randn(64, 8).to(DEVICE), torch.randn(64, 1).to(DEVICE)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss = (model(x).float() - y).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    # gradients are of float16: what Adam makes of small ones may differ
    torch.testing.assert_close(found["losses"], losses, rtol=1e-3, atol=1e-4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found["model"][name], value.cpu(), rtol=1e-2, atol=2e-3)


WITHOUT_ZERO_GRAD = """
import torch
from torch_npu.npu.amp import GradScaler
from torch_npu import optim

pairs = [
    (torch.optim.SGD, optim.NpuFusedSGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, optim.NpuFusedAdam, {"lr": 0.1}),
    (torch.optim.AdamW, optim.NpuFusedAdamW, {"lr": 0.1}),
]
for theirs, fused, options in pairs:
    ended = []
    for cls in (theirs, fused):
        p = torch.nn.Parameter(torch.tensor([1.0, 2.0]).npu())
        optimizer, scaler = cls([p], **options), GradScaler(dynamic=False, init_scale=128)
        for _ in range(10):
            scaler.scale(p.square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        ended += [p.detach(), p.grad]
    torch.testing.assert_close(ended[:2], ended[2:])
print("alike")
"""


def test_with_a_scale_that_stays_and_gradients_that_add_up_it_trains_as_torch_optim_does(script):
    assert script(WITHOUT_ZERO_GRAD) == "alike\n"


EVERY_WAY = """
import io, torch, torch_npu, torch.npu
import torch_npu.npu.amp as amp, torch_npu.optim, mindspeed.ops

here = torch.zeros(1).npu().device
made = [
    torch.zeros(2, device="npu"), torch.tensor([1.0], device="npu:0"),
    torch.arange(3, device=torch.device("npu", 0)), torch.arange(3, device=torch.device(type="npu", index=0)),
    torch.empty_like(torch.ones(2), device="npu:0"), torch.ones(2).new_zeros(2, device="npu"),
    torch.ones(2).to("npu"), torch.ones(2).to(device="npu:0", dtype=torch.float16), torch.ones(2).npu(0),
    torch.nn.Linear(2, 2).to("npu").weight, torch.nn.Linear(2, 2).npu(0).weight,
    torch.nn.Linear(2, 2, device="npu").weight,
]
assert all(t.device == here and t.is_npu for t in made), [t.device for t in made]
file = io.BytesIO()
torch.save(made[0], file)
file.seek(0)
assert torch.load(file, map_location="npu:0").device == here
# as a file from an NPU would be
move = torch.serialization.default_restore_location
assert move(torch.ones(2).untyped_storage(), "npu:0").device.type == here.type
with torch.autocast("npu", dtype=torch.bfloat16):
    assert (torch.ones(2, 2, device="npu") @ torch.ones(2, 2, device="npu")).dtype == torch.bfloat16
with torch.device("npu"):
    assert torch.ones(2).device == here
torch.npu.manual_seed(7)
a = torch.rand(3, device="npu")
torch.npu.manual_seed(7)
assert torch.equal(a, torch.rand(3, device="npu"))
assert torch.npu.memory_allocated() >= 0
try:
    torch.npu.no_such_thing
except AttributeError as error:
    assert "no_such_thing" in str(error) and "stand-in" in str(error)
else:
    raise AssertionError
assert not hasattr(torch.npu, "__file__")
fixed = amp.GradScaler(init_scale=8.0, dynamic=False)
p = torch.nn.Parameter(torch.ones(2, device="npu"))
optimizer = torch_npu.optim.NpuFusedSGD([p], lr=0.5)
fixed.scale((p * float("inf")).sum()).backward()
fixed.step(optimizer)
fixed.update()
assert fixed.get_scale() == 8.0 and torch.equal(p, torch.ones_like(p))
assert torch.amp.GradScaler("npu").scale(p.sum()).device == here
compiled = torch.compile(lambda x: x + torch.ones(2, device="npu"), backend="eager")
assert torch.equal(compiled(p), p + 1)
print("all well on", here.type)
"""


def test_every_way_to_name_the_device_gives_the_one_that_is_here(script):
    assert script(EVERY_WAY) == f"all well on {DEVICE}\n"


# as with `python script.py`

INSIDE = """
import os, pickle, sys, threading
import beside

class Mine:
    pass

assert __name__ == "__main__" and sys.modules["__main__"].Mine is Mine and __package__ is None
assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
print([os.path.basename(sys.argv[0]), *sys.argv[1:]], os.path.isabs(__file__), beside.value)
print(sys.path[0] == os.path.dirname(__file__))
sys.exit(7)
"""


def test_arguments_paths_imports_and_exit_code_are_those_of_plain_python(tmp_path):
    (tmp_path / "beside.py").write_text("value = 5")
    (tmp_path / "script.py").write_text(INSIDE)
    plain = launch("script.py", "a", "--b=c", cwd=tmp_path)
    ours = launch("-m", "fusedstep.npu", "script.py", "a", "--b=c", cwd=tmp_path)
    assert plain.returncode == ours.returncode == 7
    assert plain.stdout == ours.stdout == "['script.py', 'a', '--b=c'] True 5\nTrue\n"
    assert plain.stderr == ours.stderr == ""


@pytest.mark.parametrize(
    "text", ["def f():\n    raise KeyError('lost')\n\nf()\n", "x = 1\nif x\n", "raise SystemExit('bye')"]
)
def test_a_traceback_is_that_of_plain_python(text, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(text)
    plain, ours = launch(path), run(path)
    assert plain.returncode == ours.returncode == 1
    assert plain.stderr == ours.stderr
    assert plain.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script was given"),
        (["--help"], "'--help' is no script"),
        (["no_such_script.py"], "no_such_script.py': No such file or directory"),
        ([EXAMPLES], "npu_examples': Is a directory"),
    ],
)
def test_without_a_script_to_run_an_error_says_how_to_call(arguments, message):
    result = launch("-m", "fusedstep.npu", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "usage: python -m fusedstep.npu script.py [arguments]" in result.stderr
    assert "Traceback" not in result.stderr


def test_it_steps_aside_where_there_is_a_real_torch_npu(tmp_path):
    (tmp_path / "torch_npu.py").write_text("name = 'the real one'")
    text = "import sys, torch, torch_npu\nprint(torch_npu.name, sys.argv[1:], hasattr(torch.Tensor, 'npu'))"
    (tmp_path / "script.py").write_text(text)
    result = run(tmp_path / "script.py", "x")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "the real one ['x'] False\n"
