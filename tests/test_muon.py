"""Muon: against torch's own, the definition in float64, singular values, and one process."""

import contextlib
import copy
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fusedstep
from fusedstep.cli import references
from fusedstep.rules import NewtonSchulz, Stage, mix, named_coefficients, rule, staged
from fusedstep.stages import newton_schulz, products
from tests import ranks
from tests.conftest import HAS_GPU, HAS_TRITON
from tests.numerics import judge
from tests.pairs import whole

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = ((16, 16), (16, 16), (8, 40), (30, 7), (1, 9), (9, 1))
KELLER = ((3.4445, -4.7750, 2.0315),) * 5
POLAR = named_coefficients("polar_express", 5)
OPTIONS = [
    {},
    {"nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.5},
    {"adjust_lr_fn": "spectral_unclamped"},
    {"momentum": 0.0, "ns_coefficients": "polar_express"},
    {"ns_coefficients": POLAR, "cautious_decay": True},
    {"normalize_rows": 0.9},
]
options = pytest.mark.parametrize("options", OPTIONS, ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)


def data(shapes, steps, dtype=torch.float32, device="cpu"):
    """Parameters and gradients of every step, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    numbers = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    params = [(0.1 * numbers(shape)).to(device, dtype) for shape in shapes]
    return params, [[numbers(shape).to(device, dtype) for shape in shapes] for _ in range(steps)]


def train(cls, params, grads, **options):
    params = [nn.Parameter(p.clone()) for p in params]
    optimizer = cls(params, **options)
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in params], optimizer


def exact(params, grads, lr, **options):
    """The same by the definition, in float64."""
    if options.get("ns_coefficients") == "polar_express":
        options = {**options, "ns_coefficients": POLAR}
    double = [[g.double().cpu() for g in step] for step in grads]
    return train(references.Muon, [p.double().cpu() for p in params], double, lr=lr, **options)[0]


def torchs(params, grads, lr, **options):
    """Torch's, where it has such options; else what would be exact."""
    known = {"nesterov", "adjust_lr_fn", "weight_decay", "momentum"}
    theirs = {k: v for k, v in options.items() if k in known}
    if theirs != options or options.get("adjust_lr_fn") == "spectral_unclamped":
        return None
    return train(torch.optim.Muon, params, grads, lr=lr, **theirs)[0]


def check_steps(device, dtype, options, engine=None, steps=50):
    params, grads = data(SHAPES, steps, dtype, device)
    ours, _ = train(fusedstep.Muon, params, grads, lr=0.02, engine=engine, **options)
    theirs = torchs(params, grads, 0.02, **options)
    # where torch has no such options, what it is off by without
    plain, plain_exact = torchs(params, grads, 0.02), exact(params, grads, 0.02)
    for i, right in enumerate(exact(params, grads, 0.02, **options)):
        right = right.to(device)
        other = right + plain[i] - plain_exact[i].to(device) if theirs is None else theirs[i]
        judge(ours[i], other, right, f"{SHAPES[i]}", 50 if dtype == torch.bfloat16 else 100)


@options
@dtypes
def test_fifty_steps_are_as_close_to_float64_as_torchs(engine, dtype, options):
    if options and (dtype != torch.float32 or engine == "triton"):
        pytest.skip("shown for one engine or dtype, the same for all")
    # the interpreter takes long; on a GPU it is fifty, too
    check_steps("cpu", dtype, options, engine, steps=5 if engine == "triton" else 50)


@pytest.mark.gpu
@options
@dtypes
def test_fifty_steps_on_a_gpu_are_as_close_to_float64_as_torchs(dtype, options):
    check_steps("cuda", dtype, options)


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [5, 8])
@pytest.mark.parametrize(
    "shape",
    [(512, 512), (640, 2048), (1000, 1048), (768, 768), (1024, 2048), (2048, 1024), (1030, 2060)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["random", "1e3", "1e6", "rank one", "rank eight", "one large"])
def test_large_matrices_are_closer_to_float64_than_torchs(shape, kind, steps):
    x = spread(shape, kind).cuda().bfloat16()
    p = nn.Parameter(torch.zeros(shape, device="cuda"))
    q = nn.Parameter(torch.zeros(shape, device="cuda"))
    right = references.orthogonalized(x.double(), KELLER[:1] * steps)
    for param, cls in ((p, fusedstep.Muon), (q, torch.optim.Muon)):
        param.grad = x.float()
        options = {"momentum": 0.0, "adjust_lr_fn": "original", "weight_decay": 0.0, "ns_steps": steps}
        cls([param], lr=1.0, **options).step()
    scale = max(1, shape[0] / shape[1]) ** 0.5
    ours, theirs = ((-t.detach().double() / scale - right).norm() / right.norm() for t in (p, q))
    assert ours < theirs, (ours, theirs)


def matrix(shape, condition):
    """One whose singular values go down to 1 / condition."""
    generator = torch.Generator().manual_seed(0)
    k = min(shape)
    u, v = (torch.linalg.qr(torch.randn(n, k, generator=generator, dtype=torch.float64))[0] for n in shape)
    return (u * torch.logspace(0, -np.log10(condition), k, dtype=torch.float64)) @ v.T


def band(coefficients, low):
    """Where singular values between `low` and 1 end up."""
    s = torch.logspace(np.log10(low), 0, 20001, dtype=torch.float64)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return float(s.min()), float(s.max())


@pytest.mark.parametrize("name", ["keller", "polar_express"])
@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("shape", [(20, 20), (12, 50), (50, 12), (1, 8), (8, 1)], ids=str)
def test_singular_values_come_into_the_band_of_the_coefficients(name, condition, shape):
    x = matrix(shape, condition)
    p = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    p.grad = x
    fusedstep.Muon(
        [p], lr=1.0, momentum=0.0, weight_decay=0.0, ns_coefficients=name, adjust_lr_fn="match_rms_adamw"
    ).step()
    update = -p.detach() / (0.2 * max(shape) ** 0.5)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    # the directions stay, and are not turned round
    found = (u.T @ update @ v.T).diagonal()
    norm = float(s.norm())
    low, high = band(named_coefficients(name, 5), float(s.min()) / norm)
    assert found.min() > low - 1e-9
    assert found.max() < high + 1e-9
    torch.testing.assert_close(update, (u * found) @ v, rtol=1e-9, atol=1e-9)


def test_a_matrix_of_zeros_and_one_of_rank_one(engine):
    p, q = (nn.Parameter(torch.ones(4, 6)) for _ in range(2))
    p.grad = torch.zeros(4, 6)
    row, column = torch.randn(6), torch.randn(4)
    q.grad = column[:, None] * row
    fusedstep.Muon([p, q], lr=1.0, weight_decay=0.0, engine=engine).step()
    assert torch.equal(p, torch.ones(4, 6))
    update = torch.linalg.svdvals((1 - q).detach())
    assert 0.6 < update[0] < 1.3
    assert update[1] < 1e-4


def test_batches_heads_and_sections_are_what_single_matrices_are(engine):
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(6, 8, 5, generator=generator)

    def stepped(grad, **options):
        p = nn.Parameter(torch.zeros_like(grad))
        p.grad = grad
        fusedstep.Muon([p], lr=1.0, weight_decay=0.0, engine=engine, **options).step()
        return p.detach()

    singles = torch.stack([stepped(each) for each in g])
    torch.testing.assert_close(stepped(g), singles)
    torch.testing.assert_close(stepped(g.view(2, 3, 8, 5), flatten=False), singles.view(2, 3, 8, 5))
    rows = g.reshape(48, 5)
    torch.testing.assert_close(stepped(rows, num_heads=6), singles.view(48, 5))
    torch.testing.assert_close(stepped(rows, split_sizes=(8,) * 6), singles.view(48, 5))
    apart = torch.cat([stepped(part) for part in rows.split((16, 32))])
    torch.testing.assert_close(stepped(rows, split_sizes=(16, 32)), apart)
    convolution = g.view(6, 4, 2, 5)
    flat = stepped(convolution.flatten(1)).view(6, 4, 2, 5)
    torch.testing.assert_close(stepped(convolution, flatten=True), flat)
    channels_last = convolution.clone(memory_format=torch.channels_last)
    torch.testing.assert_close(stepped(channels_last, flatten=True), flat)


def test_turns_in_a_small_workspace_change_nothing(engine):
    params, grads = data([(8, 8)] * 5 + [(4, 12)] * 4, 4)
    ours, optimizer = train(fusedstep.Muon, params, grads, lr=0.1, engine=engine, max_grad_norm=1.0)
    small, turns = train(
        fusedstep.Muon, params, grads, lr=0.1, engine=engine, max_grad_norm=1.0, workspace_bytes=2048
    )
    assert len(turns._plan.tables) > 2
    assert len(optimizer._plan.tables) == 1
    for a, b in zip(ours, small, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_missing_gradients_leave_their_matrices_alone(engine):
    params, grads = data([(8, 8)] * 6, 6)
    params = [nn.Parameter(p) for p in params]
    optimizer = fusedstep.Muon(params, lr=0.1, engine=engine)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    single = [fusedstep.Muon([p], lr=0.1, engine=engine) for p in others]
    for i, step in enumerate(grads):
        for k, (p, q, g) in enumerate(zip(params, others, step, strict=True)):
            p.grad = q.grad = None
            if (i + k) % 3 and not (i == 0 and k == 4):
                p.grad, q.grad = g.clone(), g.clone()
        optimizer.step()
        for each in single:
            each.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)


def test_checkpoints_go_both_ways():
    params, grads = data(SHAPES, 6)
    _, ours = train(fusedstep.Muon, params, grads[:3], lr=0.02)
    _, theirs = train(torch.optim.Muon, params, grads[:3], lr=0.02)
    assert {*ours.state_dict()["state"][0]} == {"momentum_buffer"}
    for a, b in ((ours, theirs), (theirs, ours)):
        other = type(a)([nn.Parameter(p.clone()) for p in params], lr=0.5)
        other.load_state_dict(copy.deepcopy(b.state_dict()))
        assert other.param_groups[0]["lr"] == 0.02
        for p, q in zip(other.param_groups[0]["params"], b.param_groups[0]["params"], strict=True):
            assert torch.equal(other.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"])


@pytest.mark.parametrize(
    "more", [{}, {"normalize_rows": 0.9}, {"max_grad_norm": 0.5, "ema_decay": 0.9}], ids=str
)
def test_a_run_goes_on_from_its_checkpoint_as_if_never_stopped(more):
    params, grads = data(SHAPES, 6)
    all_along, _ = train(fusedstep.Muon, params, grads, lr=0.02, **more)
    half, optimizer = train(fusedstep.Muon, params, grads[:3], lr=0.02, **more)
    resumed = [nn.Parameter(p.clone()) for p in half]
    other = fusedstep.Muon(resumed, lr=0.02, **more)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in grads[3:]:
        for p, g in zip(resumed, step, strict=True):
            p.grad = g.clone()
        other.step()
    for p, q in zip(resumed, all_along, strict=True):
        assert torch.equal(p, q)


def test_what_every_optimizer_has_is_there():
    params, grads = data(SHAPES, 4, torch.bfloat16)
    common = {"max_grad_norm": 0.1, "ema_decay": 0.9, "statistics": True, "skip_nonfinite": True}
    ours, optimizer = train(
        fusedstep.Muon, params, grads, lr=0.02, master="split", state_dtype="float32", **common
    )
    norm = torch.stack([g.float().norm() for g in grads[-1]]).norm()
    assert float(optimizer.statistics().grad_norm) == pytest.approx(float(norm), rel=1e-3)
    p = optimizer.param_groups[0]["params"][0]
    assert {*optimizer.state[p]} == {"momentum_buffer", "master_rest", "ema"}
    for a, b in zip(ours, exact(params, grads, 0.02, max_grad_norm=0.1), strict=True):
        # a master in float32 is rounded once
        torch.testing.assert_close(a.double(), b, rtol=2**-8, atol=1e-4)
    before = p.detach().clone()
    p.grad = torch.full_like(p, torch.inf)
    optimizer.step()
    assert torch.equal(p, before)
    assert optimizer.step_was_skipped


@pytest.mark.parametrize("wrong", [torch.zeros(3, 1), torch.zeros(4), "zeros"], ids=str)
def test_rows_states_that_do_not_fit_are_refused_before_anything_is_written(wrong):
    p = nn.Parameter(torch.randn(4, 4))
    optimizer = fusedstep.Muon([p], normalize_rows=0.9)
    p.grad = torch.randn(4, 4)
    optimizer.step()
    before = p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()
    optimizer.state[p]["variance_neuron"] = wrong
    with pytest.raises(RuntimeError, match="keeps one of shape"):
        optimizer.step()
    assert torch.equal(p, before[0])
    assert torch.equal(optimizer.state[p]["momentum_buffer"], before[1])
    # one that is lost begins anew
    del optimizer.state[p]["variance_neuron"]
    optimizer.step()
    assert optimizer.state[p]["variance_neuron"].shape == (4, 1)


def test_errors_are_torchs_and_say_what_to_do():
    p = nn.Parameter(torch.zeros(3, 3))
    for wrong, message in (
        ({"lr": -1.0}, "Learning rate should be >= 0 but is: -1.0"),
        ({"momentum": -1.0}, "momentum should be >= 0 but is: -1.0"),
        ({"weight_decay": -1.0}, "weight decay should be >= 0 but is: -1.0"),
        ({"adjust_lr_fn": "no"}, "Adjust learning rate function no is not supported"),
    ):
        for cls in (fusedstep.Muon, torch.optim.Muon):
            with pytest.raises(ValueError, match=message):
                cls([p], **wrong)
    for cls in (fusedstep.Muon, torch.optim.Muon):
        with pytest.raises(ValueError, match="Muon only supports 2D parameters whereas we found a parameter"):
            cls([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="convolutions to one with flatten=True"):
        fusedstep.Muon([nn.Parameter(torch.zeros(3, 3, 3, 3))])
    for wrong, message in (
        ({"num_heads": 0}, "Invalid num_heads: 0"),
        ({"split_sizes": (4, -1)}, "Invalid split_sizes"),
        ({"num_heads": 1, "split_sizes": (3,)}, "use one of them"),
        ({"normalize_rows": 1.0}, "Invalid normalize_rows: 1.0"),
        ({"workspace_bytes": "2GB"}, "Invalid workspace_bytes: '2GB'"),
        ({"ns_steps": 2.5}, "found ns_steps=2.5, use a whole number"),
        ({"eps": -1.0}, "Invalid epsilon value: -1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            fusedstep.Muon([p], **wrong)
    for wrong in ({"ns_steps": 100}, {"ns_coefficients": (1, 2)}, {"ns_coefficients": "no"}):
        with pytest.raises(ValueError, match=r"less than 100|Invalid ns_coefficients|there are no"):
            fusedstep.Muon([p], **wrong)
    with pytest.raises(TypeError, match="Invalid divide_among: 'all'; use a process group"):
        fusedstep.Muon([p], divide_among="all")
    optimizer = fusedstep.Muon([p], num_heads=2)
    p.grad = torch.ones(3, 3)
    with pytest.raises(ValueError, match="num_heads=2 does not divide the 3 rows"):
        optimizer.step()
    assert torch.equal(p, torch.zeros(3, 3))


@pytest.mark.parametrize("name", ["foo", "", ["x"], ("original",), 3], ids=repr)
def test_a_rate_of_no_known_name_is_refused_by_a_constructor_and_by_a_group(name):
    p = nn.Parameter(torch.zeros(3, 3))
    message = r"Adjust learning rate function .* is not supported; use one of \('original'"
    for wrong in (
        {"params": [p], "adjust_lr_fn": name},
        {"params": [p], "use_muon": False, "adjust_lr_fn": name},
    ):
        with pytest.raises(ValueError, match=message):
            fusedstep.Muon([wrong])
    with pytest.raises(ValueError, match=r"Adjust learning rate function .* is not supported"):
        torch.optim.Muon([p], adjust_lr_fn=name)
    with pytest.raises(ValueError, match=message):
        fusedstep.Muon([p], adjust_lr_fn=name)
    optimizer = fusedstep.Muon([p])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 3))], "adjust_lr_fn": name})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split_sizes": 4}, r"Invalid split_sizes: 4; use whole numbers from 1 on, such as \(4, 2, 2\)"),
        ({"split_sizes": ()}, r"Invalid split_sizes: \(\)"),
        ({"split_sizes": "44"}, "Invalid split_sizes: '44'"),
        ({"split_sizes": (True, 2)}, r"Invalid split_sizes: \(True, 2\)"),
        ({"split_sizes": torch.tensor(3)}, r"Invalid split_sizes: tensor\(3\)"),
        ({"num_heads": True}, "Invalid num_heads: True; use a whole number from 1 on"),
        ({"num_heads": 2.0}, "Invalid num_heads: 2.0"),
        ({"normalize_rows": False}, "Invalid normalize_rows: False; use a number from 0 to below 1, or None"),
        ({"normalize_rows": "0.9"}, "Invalid normalize_rows: '0.9'|was given normalize_rows='0.9'"),
    ],
    ids=str,
)
def test_blocks_that_are_no_numbers_are_refused_by_a_constructor_and_by_a_group(wrong, message):
    p = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ValueError, match=message):
        fusedstep.Muon([p], **wrong)
    optimizer = fusedstep.Muon([p])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 3))], **wrong})
    assert len(optimizer.param_groups) == 1


SCHEDULES = {
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8),
    "CyclicLR": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
}
schedules = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


@schedules
@pytest.mark.parametrize("more", [{}, {"betas": (0.5, 0.6)}], ids=str)
def test_schedules_that_cycle_momentum_cycle_that_of_muon_as_torchs(schedule, more):
    params, grads = data(SHAPES, 6)
    ours, theirs = [nn.Parameter(p.clone()) for p in params], [nn.Parameter(p.clone()) for p in params]
    one, other = fusedstep.Muon(ours, **more), torch.optim.Muon(theirs)
    assert "betas" not in one.defaults
    assert {*one.defaults} - {"maximize"} == {*other.defaults}
    cycles = schedule(one), schedule(other)
    found = []
    for step in grads:
        for p, q, g in zip(ours, theirs, step, strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        for each in (one, other, *cycles):
            each.step()
        (group,), (its) = one.param_groups, other.param_groups[0]
        assert {k: group[k] for k in its if k != "params"} == {k: its[k] for k in its if k != "params"}
        found.append(group["momentum"])
    assert len({*found}) > 2
    # torch's in bfloat16
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0.02, atol=0.02)


@schedules
def test_schedules_that_cycle_momentum_leave_the_betas_of_adamw_beside_it(schedule):
    net = Net()
    optimizer = fusedstep.Muon(fusedstep.muon_groups(net, adamw={"betas": (0.7, 0.8)}))
    cycle = schedule(optimizer)
    for _ in range(3):
        optimizer.step()
        cycle.step()
    assert {g["betas"] for g in optimizer.param_groups if not g["use_muon"]} == {(0.7, 0.8)}
    assert all("betas" not in g and g["momentum"] != 0.95 for g in optimizer.param_groups if g["use_muon"])


@pytest.mark.parametrize("copied", [lambda o: o, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_the_betas_of_a_constructor_are_those_of_groups_that_adamw_steps(copied):
    p, q, r = (nn.Parameter(torch.ones(2, 2)) for _ in range(3))
    optimizer = fusedstep.Muon([{"params": [p]}, {"params": [q], "use_muon": False}], betas=[0.5, 0.25])
    assert [group.get("betas") for group in optimizer.param_groups] == [None, (0.5, 0.25)]
    optimizer = copied(optimizer)
    optimizer.add_param_group({"params": [r], "use_muon": False})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "use_muon": False, "betas": (0.0, 0.1)})
    assert [group.get("betas") for group in optimizer.param_groups] == [
        None,
        (0.5, 0.25),
        (0.5, 0.25),
        (0.0, 0.1),
    ]
    plain = fusedstep.Muon([nn.Parameter(torch.ones(2))], use_muon=False)
    assert plain.param_groups[0]["betas"] == (0.9, 0.95)
    for wrong in ({"betas": (0.5, 1.0)}, {"betas": (0.5,)}):
        with pytest.raises(ValueError, match="Invalid beta"):
            fusedstep.Muon([p], **wrong)
        with pytest.raises(ValueError, match="Invalid beta"):
            fusedstep.Muon([{"params": [p], "use_muon": False, **wrong}])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.body = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.convolution = nn.Conv2d(2, 3, 3)
        self.experts = nn.Parameter(torch.randn(3, 4, 5))
        self.lora_A = nn.Parameter(torch.randn(2, 8))
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_groups_of_a_model_say_which_went_where():
    groups = fusedstep.muon_groups(Net(), lr=0.02, adamw={"lr": 1e-3})
    which = {name: (g["use_muon"], g.get("flatten")) for g in groups for name, _ in g["params"]}
    assert which == {
        "body.weight": (True, None),
        "experts": (True, None),
        "convolution.weight": (True, True),
        "embedding.weight": (False, None),
        "lora_A": (False, None),
        "body.bias": (False, None),
        "convolution.bias": (False, None),
    }
    assert "embedding.weight    AdamW  (11, 8)  an embedding" in str(groups)
    assert "experts             Muon   (3, 4, 5)  experts" in str(groups)
    chosen = fusedstep.muon_groups(Net(), takes=lambda name, p: "body" in name, adamw={"lr": 1e-3})
    assert [name for name, _ in chosen[0]["params"]] == ["body.weight"]
    left = fusedstep.muon_groups(Net(), leaves=["exp*"])
    assert "experts" not in [name for name, _ in left[0]["params"]]


def test_one_optimizer_steps_both_as_two_would(engine):
    torch.manual_seed(0)
    net, other = Net(), Net()
    other.load_state_dict(net.state_dict())
    adamw = {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    one = fusedstep.Muon(fusedstep.muon_groups(net, lr=0.02, adamw=adamw), engine=engine)
    groups = fusedstep.muon_groups(other, lr=0.02)
    bare = [{k: v for k, v in g.items() if k in ("params", "lr", "flatten")} for g in groups if g["use_muon"]]
    beside = [
        {"params": g["params"], **adamw, **({"weight_decay": 0.0} if g["weight_decay"] == 0 else {})}
        for g in groups
        if not g["use_muon"]
    ]
    two = [fusedstep.Muon(bare, engine=engine), torch.optim.AdamW(beside)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (one, *two)]
    for _ in range(3):
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            if p.requires_grad:
                p.grad = torch.randn_like(p)
                q.grad = p.grad.clone()
        for each in (one, *two, *schedulers):
            each.step()
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=name, rtol=1e-5, atol=1e-6)
    saved = one.state_dict()
    again = fusedstep.Muon(fusedstep.muon_groups(net, lr=0.5))
    again.load_state_dict(saved)
    assert [g["lr"] for g in again.param_groups] == [g["lr"] for g in one.param_groups]
    assert {*again.state[net.body.bias]} == {"step", "exp_avg", "exp_avg_sq"}


class Twice(Stage):
    """The simplest stage: twice as much."""

    def run(self, source, target, workspace_bytes):
        torch.mul(source, 2, out=target)

    def __eq__(self, other):
        return type(other) is Twice

    def __hash__(self):
        return 2


def test_a_stage_of_ones_own_comes_between_the_sweeps_of_a_rule(engine):
    @rule(states={"m": "m"})
    def own(p, g, m, *, lr, rows, columns):
        m = mix(m, g, 0.5)
        return p - lr * staged(m, Twice()) * rows / columns, m

    class Own(fusedstep.Optimizer):
        rule = own
        lr: float = 0.1

    p = nn.Parameter(torch.ones(6, 2))
    optimizer = Own([p], lr=1.0, engine=engine, max_grad_norm=1e9)
    p.grad = torch.randn(6, 2)
    optimizer.step()
    torch.testing.assert_close(p.detach(), 1 - p.grad * 3)
    with pytest.raises(TypeError, match="Twice works on tensors; give it a number of each element"):
        staged(1.0, Twice())


@pytest.mark.parametrize("more", [{}, {"max_grad_norm": 1e9}, {"skip_nonfinite": True, "statistics": True}])
def test_stages_may_follow_each_other_and_need_no_gradient(engine, more):
    @rule(states={"m": "m"})
    def own(p, g, m, *, lr):
        a = staged(p, Twice())
        b = staged(a + m, Twice())
        return p - lr * b, m + g

    class Own(fusedstep.Optimizer):
        rule = own
        lr: float = 0.25

    p = nn.Parameter(torch.ones(2, 2))
    p.grad = torch.ones(2, 2)
    optimizer = Own([p], engine=engine, **more)
    optimizer.step()
    # 1 - (2 + 0) * 2 / 4, then 0 - (0 + 1) * 2 / 4
    assert torch.equal(p, torch.zeros(2, 2))
    optimizer.step()
    assert torch.equal(p, torch.full((2, 2), -0.5))


class Refuses(Twice):
    def run(self, source, target, workspace_bytes):
        raise RuntimeError("no")

    def __eq__(self, other):
        return type(other) is Refuses

    def __hash__(self):
        return 3


def test_a_stage_that_cannot_work_raises_before_anything_is_written(engine):
    @rule(states={"m": "m"})
    def own(p, g, m, *, lr):
        return p - lr * staged(g, Refuses()), m + g

    class Own(fusedstep.Optimizer):
        rule = own
        lr: float = 1.0

    p = nn.Parameter(torch.ones(2, 2))
    p.grad = torch.ones(2, 2)
    optimizer = Own([p], engine=engine)
    with pytest.raises(RuntimeError, match="no"):
        optimizer.step()
    assert torch.equal(p, torch.ones(2, 2))
    assert not optimizer.state


# many ranks

DISTRIBUTED = ((8, 8), (8, 8), (3, 12), (12, 5), (1, 6), (2, 2), (8, 8))


def alone(steps=3, **options):
    params, grads = data(DISTRIBUTED, steps)
    return train(fusedstep.Muon, params, grads, lr=0.1, **options)[0]


def step_shards(placements, dims, options, steps=3):
    mesh = ranks.mesh(*dims)
    params, grads = data(DISTRIBUTED, steps)
    spread = lambda t: distribute_tensor(t, mesh, placements)
    mine = [nn.Parameter(spread(p)) for p in params]
    optimizer = fusedstep.Muon(mine, lr=0.1, **options)
    for step in grads:
        for p, g in zip(mine, step, strict=True):
            p.grad = spread(g)
        optimizer.step()
    return [whole(p.detach()) for p in mine]


def check_shards(world, placements, dims, options):
    right = alone(**options)
    for found in world.call(step_shards, placements, dims, options):
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("more", [{}, {"normalize_rows": 0.9}, {"max_grad_norm": 0.5, "workspace_bytes": 1024}])
def test_shards_of_two_ranks_are_stepped_as_by_one(two, more):
    check_shards(two, [Shard(0)], (2,), more)


def test_shards_of_four_ranks_some_of_them_empty_are_stepped_as_by_one(four):
    check_shards(four, [Shard(0)], (4,), {})
    check_shards(four, [Replicate(), Shard(0)], (2, 2), {})


def test_shards_along_columns_are_put_together_on_every_rank(two):
    check_shards(two, [Shard(1)], (2,), {})
    for error in two.call(step_shards, [Shard(1)], (2,), {"normalize_rows": 0.9}):
        assert "normalises whole rows" in str(error)


def step_replicas(options):
    world = torch.distributed.group.WORLD
    optimizer = fusedstep.Muon([nn.Parameter(torch.ones(2, 2))], divide_among=world)
    assert copy.deepcopy(optimizer).divide_among is world
    with pytest.raises(TypeError, match="an optimizer with a divide_among cannot be pickled"):
        pickle.dumps(optimizer)
    params, grads = data(DISTRIBUTED, 3)
    return train(fusedstep.Muon, params, grads, lr=0.1, divide_among=torch.distributed.group.WORLD, **options)[
        0
    ]


@pytest.mark.parametrize("more", [{}, {"normalize_rows": 0.9}], ids=str)
def test_replicas_divide_the_work(two, more):
    right = alone(**more)
    for found in two.call(step_replicas, more):
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))


def train_model(net, optimizer, steps):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(16, 6, generator=generator)
        optimizer.zero_grad()
        (net(x) - x[:, :3]).square().mean().backward()
        optimizer.step()
    return [whole(p.detach()).clone() for p in net.parameters()]


def train_fsdp():
    net = model()
    fully_shard(net[0], mesh=ranks.mesh(2))
    fully_shard(net, mesh=ranks.mesh(2))
    assert isinstance(net[0].weight, DTensor)
    return train_model(net, fusedstep.Muon(fusedstep.muon_groups(net, lr=0.05)), 4)


def test_fsdp2_trains_as_one_process_does(two):
    net = model()
    right = train_model(net, fusedstep.Muon(fusedstep.muon_groups(net, lr=0.05)), 4)
    for found in two.call(train_fsdp):
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def half_of_a_run():
    """Two steps on two ranks: the whole model and optimizer, as everybody may load them."""
    net = model()
    fully_shard(net, mesh=ranks.mesh(2))
    optimizer = fusedstep.Muon(fusedstep.muon_groups(net, lr=0.05, normalize_rows=0.9))
    train_model(net, optimizer, 2)
    whole_one = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_state_dict(net, optimizer, options=whole_one)


def test_a_checkpoint_of_two_ranks_goes_on_in_one(two):
    net = model()
    optimizer = fusedstep.Muon(fusedstep.muon_groups(net, lr=0.05, normalize_rows=0.9))
    train_model(net, optimizer, 2)
    right = train_model(net, optimizer, 2)
    of_model, of_optimizer = two.call(half_of_a_run)[0]
    resumed = model()
    other = fusedstep.Muon(fusedstep.muon_groups(resumed, lr=0.5, normalize_rows=0.9))
    set_state_dict(
        resumed,
        other,
        model_state_dict=of_model,
        optim_state_dict=of_optimizer,
        options=StateDictOptions(full_state_dict=True),
    )
    for a, b in zip(train_model(resumed, other, 2), right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"max_grad_norm": 0.5, "normalize_rows": 0.9}], ids=str)
def test_a_replay_is_what_an_eager_step_is_bit_by_bit(more):
    shapes = [(640, 640), (512, 2048), (2048, 512), (16, 24), (16, 24)]

    def run(captures):
        params, grads = data(shapes, 1, torch.float32, "cuda")
        params = [nn.Parameter(p) for p in params]
        for p, g in zip(params, grads[0], strict=True):
            p.grad = g
        optimizer = fusedstep.Muon(params, lr=0.02, **more)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(4):
            optimizer.step()
        take = optimizer.step
        if captures:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            take = graph.replay
        for _ in range(3):
            take()
            scheduler.step()
        return [p.detach().clone() for p in params]

    for a, b in zip(run(False), run(True), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_a_step_waits_for_nothing_and_its_work_is_replayed():
    params, grads = data([(512, 512)] * 3 + [(64, 32)] * 2, 1, torch.float32, "cuda")
    params = [nn.Parameter(p) for p in params]
    for p, g in zip(params, grads[0], strict=True):
        p.grad = g
    optimizer = fusedstep.Muon(params, lr=0.02)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    replays = optimizer._plan.tables[0].stages._replays
    assert len(replays._graphs) == 2


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def of_kernels(request, monkeypatch):
    """Where our kernels run: in Triton's interpreter where there is no GPU."""
    if not HAS_TRITON or (request.param == "cpu" and HAS_GPU):
        pytest.skip("the interpreter takes the place of a GPU, and both need Triton")
    if request.param == "cpu":
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return request.param


SHAPES_OF_PRODUCTS = [(1, 200, 64), (2, 128, 64)] + [
    pytest.param(shape, marks=pytest.mark.gpu) for shape in [(2, 512, 1024), (3, 640, 576), (2, 1000, 1048)]
]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES_OF_PRODUCTS, ids=str)
@pytest.mark.parametrize("factors", [(), (0.5,), (0.5, -3.0)], ids=str)
def test_a_product_is_what_two_factors_and_addends_give(shape, transposed, factors, of_kernels):
    from fusedstep.stages import kernels

    count, n, depth = shape
    depth = -(-depth // 64) * 64 if transposed else depth
    x = torch.randn((count, depth, n) if transposed else (count, n, depth), device=of_kernels).half()
    addends = [torch.randn(count, n, n, device=of_kernels).half() for _ in factors]
    plus = [(factor, addend + addend.mT) for factor, addend in zip(factors, addends, strict=True)]
    assert kernels.takes(x, x, transposed)
    left = (x.mT if transposed else x).double()
    right = 0.01 * left @ left.mT + sum(factor * addend.double() for factor, addend in plus)
    out = torch.full((count, n, n), torch.nan, device=of_kernels, dtype=torch.float16)
    kernels.multiply(x, x, plus, out, 0.01, transposed)
    assert torch.equal(out, out.mT)
    torch.testing.assert_close(out.double(), right, rtol=2**-10, atol=1e-3)


@pytest.mark.parametrize("count", [1, 3])
def test_matrices_are_scaled_each_by_its_factor(count, of_kernels):
    from fusedstep.stages import kernels

    x, factors = torch.randn(count, 50, 70, device=of_kernels).bfloat16(), torch.randn(count, device=of_kernels)
    out = torch.full(x.shape, torch.nan, device=of_kernels, dtype=torch.float16)
    kernels.scale(x, factors, out)
    right = x.double() * factors.double()[:, None, None]
    torch.testing.assert_close(out.double(), right, rtol=2**-10, atol=1e-5)


@pytest.mark.gpu
def test_more_matrices_than_a_grid_has_rows_are_scaled():
    from fusedstep.stages import kernels

    x, factors = torch.randn(70_000, 3, 3, device="cuda").bfloat16(), torch.randn(70_000, device="cuda")
    out = torch.full(x.shape, torch.nan, device="cuda", dtype=torch.float16)
    kernels.scale(x, factors, out)
    right = x.double() * factors.double()[:, None, None]
    torch.testing.assert_close(out.double(), right, rtol=2**-10, atol=1e-5)


@pytest.mark.parametrize("n", [200, 128, 64])
def test_products_of_factors_that_do_not_commute_are_symmetric_to_the_last_bit(n, of_kernels):
    """Rounded polynomials of one matrix: which of two entries is computed must not matter to anybody."""
    from fusedstep.stages import kernels

    g = torch.randn(2, n, n, device=of_kernels, dtype=torch.float64)
    g = g @ g.mT / n
    a, b = (3 * g - g @ g).half(), (g @ g @ g - 2 * g).half()
    exact = a.double() @ b.double().mT
    assert not torch.equal(exact.half(), exact.half().mT)
    out = torch.full_like(a, torch.nan)
    kernels.multiply(a, b, (), out, 1.0, False)
    assert torch.equal(out, out.mT)
    torch.testing.assert_close(out.double().tril(), exact.tril(), rtol=2**-10, atol=1e-3)


def rounded_once(c, a, b, *, beta=1.0, alpha=1.0, out=None):
    """torch.baddbmm as tensor cores do it: added up in float32."""
    exact = alpha * (a.float() @ b.float())
    exact = exact + beta * c.float() if beta else exact
    return exact.to(a.dtype) if out is None else out.copy_(exact)


class Kernels:
    """What our kernels compute, on any device."""

    def takes(self, a, b, transposed):
        return True

    def multiply(self, a, b, plus, out, alpha, transposed):
        a, b = (a.mT.float(), b.mT.float()) if transposed else (a.float(), b.float())
        exact = alpha * (a @ b.mT) + sum(factor * addend.float() for factor, addend in plus)
        out.copy_(exact.tril() + exact.tril(-1).mT)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch, "baddbmm", rounded_once)
    monkeypatch.setattr(products, "kernels_for", lambda x: Kernels())
    monkeypatch.setattr(products, "_LEAST", 1)
    monkeypatch.setattr(newton_schulz, "_GRAM", 1)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("steps", [1, 3, 5, 8])
@pytest.mark.parametrize("kind", ["random", "1e3", "1e6", "rank one", "rank eight", "one large"])
def test_the_gram_form_is_more_precise_in_16_bits_than_torchs(kind, steps):
    shape = (384, 768) if steps % 2 else (768, 384)
    x = spread(shape, kind).bfloat16()
    right = references.orthogonalized(x.double(), KELLER[:1] * steps)
    theirs = torchs_orthogonal(x, KELLER[:1] * steps)
    out = torch.full((2, *shape), torch.nan, dtype=torch.float16)
    assert newton_schulz._is_gram(out)
    newton_schulz.orthogonalize(torch.stack([x, x]), out, KELLER[:1] * steps, 1e-7)
    assert torch.equal(out[0], out[1])
    ours, theirs = ((t.double() - right).norm() / right.norm() for t in (out[0], theirs))
    assert ours < theirs


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("steps", [1, 4, 5])
@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)], ids=str)
def test_a_factor_of_a_section_costs_no_bits_in_16_bits(shape, steps):
    x, coefficients = torch.randn(2, *shape).bfloat16(), KELLER[:1] * steps
    # sections of larger matrices, too, which are not contiguous
    for size in (shape[0], 3 * shape[0]):
        one, other = torch.empty(2, size, shape[1]).half(), torch.empty(2, size, shape[1]).half()
        newton_schulz.orthogonalize(x, one[:, : shape[0]], coefficients, 1e-7)
        newton_schulz.orthogonalize(x, other[:, : shape[0]], coefficients, 1e-7, 100.0)
        found, right = other[:, : shape[0]].double(), 100 * one[:, : shape[0]].double()
        torch.testing.assert_close(found, right, rtol=2**-10, atol=1e-3)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("others", [0.1, 0.03, 0.0207, 0.0169, 0.01, 0.003])
@pytest.mark.parametrize(("name", "steps"), [("keller", 5), ("polar_express", 5), ("polar_express", 8)])
def test_one_direction_that_all_rows_share_is_no_trouble_in_16_bits(name, steps, others):
    """Of such a matrix all entries of a diagonal are rounded alike, and no size averages that away."""
    n, m = 256, 400
    ones = torch.ones(n) / n**0.5
    ones[0] -= 1
    u = torch.eye(n) - 2 * torch.outer(ones, ones) / ones.dot(ones)
    v = torch.linalg.qr(torch.randn(m, n, generator=torch.Generator().manual_seed(1)))[0]
    sizes = torch.full((n,), others)
    sizes[0] = 1
    x = ((u * sizes) @ v.T).bfloat16()
    coefficients = named_coefficients(name, steps)
    right = references.orthogonalized(x.double(), coefficients)
    out = torch.full((1, n, m), torch.nan, dtype=torch.float16)
    assert newton_schulz._is_gram(out)
    newton_schulz.orthogonalize(x[None], out, coefficients, 1e-7)
    ours, theirs = ((t.double() - right).norm() for t in (out[0], torchs_orthogonal(x, coefficients)))
    assert ours < max(theirs, 0.02 * right.norm())
    assert torch.linalg.matrix_norm(out[0].double() - right, 2) < 0.3


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("others", [0.0, 0.01])
@pytest.mark.parametrize("large", [1, 2, 10])
@pytest.mark.parametrize("name", ["keller", "polar_express"])
def test_a_few_large_rows_are_no_trouble_in_16_bits(name, large, others):
    """Their directions are those of coordinates: one entry of Q has all that is taken off its multiple of I."""
    n, m = 256, 400
    x = torch.randn(n, m, generator=torch.Generator().manual_seed(0))
    x[large:] *= others
    x, coefficients = x.bfloat16(), named_coefficients(name, 5)
    right = references.orthogonalized(x.double(), coefficients)
    out = torch.full((1, n, m), torch.nan, dtype=torch.float16)
    newton_schulz.orthogonalize(x[None], out, coefficients, 1e-7)
    for order in ("fro", 2):
        ours, theirs, size = (
            torch.linalg.matrix_norm(t.double(), order)
            for t in (out[0] - right, torchs_orthogonal(x, coefficients) - right, right)
        )
        assert ours <= 2 * theirs + 2e-3 * size


def test_the_gram_form_in_16_bits_is_for_what_kernels_take(monkeypatch):
    from fusedstep.stages import kernels

    monkeypatch.setattr(products, "kernels_for", lambda x: kernels)
    chosen = {
        (rows, columns): newton_schulz._is_gram(torch.empty(1, rows, columns, dtype=torch.float16))
        for rows, columns in [(1024, 2048), (1028, 2064), (1025, 2048), (1024, 2052), (2048, 1024), (512, 2048)]
    }
    # rows of G are as many as those of X: both must be multiples of eight
    assert [shape for shape, is_gram in chosen.items() if is_gram] == [(1024, 2048), (2048, 1024)]


class LiveBytes(TorchDispatchMode):
    """The most memory of tensors of float16 that was made within it."""

    def __init__(self):
        super().__init__()
        self.made, self.most = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.made += [weakref.ref(t) for t in pytree.tree_leaves(found) if isinstance(t, Tensor)]
        alive = [
            t.untyped_storage() for t in (made() for made in self.made) if t is not None and t.itemsize == 2
        ]
        self.most = max(self.most, sum({each.data_ptr(): each.nbytes() for each in alive}.values()))
        return found


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", ["keller", "polar_express"])
@pytest.mark.parametrize("steps", [1, 5, 9])
@pytest.mark.parametrize("shape", [(8, 8), (8, 24), (24, 8), (8, 1000)], ids=str)
def test_no_more_matrices_are_there_than_are_counted(shape, steps, name):
    x = torch.randn(3, *shape).bfloat16()
    out = torch.empty(x.shape, dtype=torch.float16)
    low, high = sorted(shape)
    with LiveBytes() as live:
        newton_schulz.orthogonalize(x, out, named_coefficients(name, steps), 1e-7)
    # the result, which is not counted, is among them
    counted = (high + (4 if high > low else 2) * low) * low * 2
    assert low * high * 2 <= live.most // 3 <= counted + low * high * 2
    assert newton_schulz.NewtonSchulz().allocates(shape) == counted
    pieces, _ = newton_schulz._pieces(x, out, counted)
    assert [len(part) for part, _ in pieces] == [1, 1, 1]


@pytest.mark.parametrize("chosen", [True, False, (False, False)])
def test_how_sums_are_allowed_is_as_the_user_chose_afterwards(chosen):
    allowed = torch.backends.cuda.matmul
    names = [
        "allow_fp16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction_split_k",
        "allow_fp16_accumulation",
    ]
    names = [name for name in names if hasattr(allowed, name)]
    if isinstance(chosen, tuple) and len(names) < 3:
        pytest.skip("this torch knows nothing of parts")
    before = [getattr(allowed, name) for name in names]
    try:
        allowed.allow_fp16_reduced_precision_reduction = chosen
        allowed.allow_fp16_accumulation = bool(chosen)
        found = [getattr(allowed, name) for name in names]
        with products.sums_in_float32(torch.device("cuda")):
            assert not allowed.allow_fp16_reduced_precision_reduction
            assert not allowed.allow_fp16_accumulation
        assert [getattr(allowed, name) for name in names] == found
    finally:
        allowed.allow_fp16_reduced_precision_reduction = before[0] if len(names) < 3 else tuple(before[:2])
        allowed.allow_fp16_accumulation = before[-1]


def spread(shape, kind):
    """A matrix with singular values that are hard in some way."""
    if kind == "random":
        return torch.randn(shape, generator=torch.Generator().manual_seed(2))
    if kind.startswith("1e"):
        return matrix(shape, float(kind)).float()
    u, v = (torch.linalg.qr(torch.randn(n, 8, generator=torch.Generator().manual_seed(n)))[0] for n in shape)
    if kind == "one large":
        return u[:, :1] @ v[:, :1].T + 1e-3 * matrix(shape, 1.0).float()
    k = {"rank one": 1, "rank eight": 8}[kind]
    return u[:, :k] @ v[:, :k].T


def torchs_orthogonal(x, coefficients):
    """As torch.optim.Muon does it, in bfloat16."""
    y = (x.T if x.shape[0] > x.shape[1] else x) / x.norm()
    for a, b, c in coefficients:
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if x.shape[0] > x.shape[1] else y


def test_the_program_of_a_rule_tells_its_stages():
    first, second = fusedstep.Muon.rules
    (stage,) = first.stages
    assert stage == NewtonSchulz(rate=stage.rate)
    assert second.stages == ()
    # what a group has that says nothing else
    optimizer = fusedstep.Muon([nn.Parameter(torch.ones(2, 2))])
    assert optimizer.rule_of(optimizer.param_groups[0]) is first


@pytest.mark.parametrize("fits", [0, 1, 2, 5, 12, 13])
def test_pieces_that_are_worked_on_at_once_fit_into_the_workspace(fits):
    x = torch.empty(12, 64, 64, dtype=torch.float16, device="meta")
    each = 3 * 64 * 64 * 2
    pieces, at_once = newton_schulz._pieces(x, x, fits * each)
    sizes = [len(part) for part, _ in pieces]
    assert sum(sizes) == 12
    assert at_once * max(sizes) <= max(1, fits)
    assert max(sizes) - min(sizes) <= max(1, max(sizes) // 2)
