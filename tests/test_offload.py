"""offload="cpu": parameters of a device are stepped on the host, to the bits of parameters that are there.

Without a GPU a CPU stands for the device: its parameters are stepped in stand-ins, copied in and out.
"""

import contextlib
import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedstep
from fusedstep._memory import offload, options, table
from tests import ranks
from tests.cases import FAMILY, KINDS, by_name
from tests.test_layouts import LAYOUTS

SHAPES = [(7, 5), (3,), (), (0,), (1100,), (64, 100), (70,)]
ADAMW = by_name("adamw").ours, {"lr": 1e-2}
SMALL = {"state_dtype": "int8", "master": "split8"}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Of parameters that are stepped elsewhere, in several buckets."""
    if request.param == "cpu":
        monkeypatch.setattr(offload, "applies", lambda part: True)
    monkeypatch.setattr(offload, "BUCKET_BYTES", 4096)
    return request.param


class Twin:
    """An optimizer whose parameters are stepped elsewhere, and one on the host with copies of them."""

    def __init__(self, device, cls, options, start=None, dtype=torch.float32):
        start = [torch.randn(shape) for shape in SHAPES] if start is None else start
        self.here = [nn.Parameter(t.to(dtype)) for t in start]
        self.there = [nn.Parameter(p.detach().clone().to(device)) for p in self.here]
        self.plain, self.away = cls(self.here, **options), cls(self.there, offload="cpu", **options)

    def both(self):
        return zip(self.here, self.there, strict=True)

    def give_gradients(self, skip=(), scale=1.0):
        for i, (p, q) in enumerate(self.both()):
            p.grad = None if i in skip else scale * torch.randn_like(p)
            q.grad = None if i in skip else p.grad.clone().to(q.device)

    def step(self, skip=(), **arguments):
        self.give_gradients(skip)
        self.plain.step(**arguments)
        self.away.step(**arguments)

    def assert_same(self):
        for p, q in self.both():
            torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=0, atol=0, equal_nan=True)
            assert self.away.state[q].keys() == self.plain.state[p].keys()
            for name, state in self.plain.state[p].items():
                found = self.away.state[q][name]
                assert found.device.type == "cpu"
                torch.testing.assert_close(found, state, rtol=0, atol=0, equal_nan=True)


RULES = [*((case.ours, case.options) for case in KINDS), *FAMILY[9::3]]


@pytest.mark.parametrize(("cls", "options"), RULES, ids=str)
def test_every_rule_gives_the_bits_of_the_host(device, cls, options):
    twin = Twin(device, cls, options)
    for _ in range(5):
        twin.step()
    twin.assert_same()
    assert len(twin.away._plan.tables) > 2


def test_buckets_are_bounded_and_small_ones_are_at_the_ends(device):
    sizes = [5000, 300, 300, 300, 900, 10, 2000, 700, 700]
    params = [nn.Parameter(torch.ones(size, device=device)) for size in sizes]
    optimizer = fusedstep.SGD(params, offload="cpu")
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    tables = sorted(optimizer._plan.tables, key=lambda table: table.turn)
    found = [sorted(row.numel for row in table.rows) for table in tables]
    assert found == [[700], [300, 300, 300], [2000], [5000], [10, 900], [700]]


FEATURES = [
    {"max_grad_norm": 0.1},
    {"max_grad_norm": 0.1, "norm_type": float("inf"), "skip_nonfinite": True},
    {"ema_decay": 0.9, "statistics": True},
    {"engine": "torch"},
    {"engine": "torch", "max_grad_norm": 0.1, "ema_decay": 0.9},
    {"state_dtype": "int8"},
]
OF_SIXTEEN_BITS = [
    {},
    SMALL,
    {"master": "float32", "max_grad_norm": 0.1, "ema_decay": 0.9},
    {"rounding": "stochastic", "seed": 3},
    {"engine": "torch", **SMALL},
]


@pytest.mark.parametrize("options", FEATURES, ids=str)
def test_every_feature_gives_the_bits_of_the_host(device, options):
    twin = Twin(device, fusedstep.AdamW, options)
    for _ in range(5):
        twin.step()
    twin.assert_same()


@pytest.mark.parametrize("options", OF_SIXTEEN_BITS, ids=str)
def test_sixteen_bits_give_the_bits_of_the_host(device, options):
    twin = Twin(device, fusedstep.AdamW, options, dtype=torch.bfloat16)
    for _ in range(5):
        twin.step()
    twin.assert_same()


def test_dtypes_and_groups_may_be_mixed(device):
    start = [torch.randn(80, 9), torch.randn(33).half(), torch.randn(40, 2).cfloat(), torch.randn(9).double()]
    here = [nn.Parameter(t) for t in start]
    there = [nn.Parameter(t.clone().to(device)) for t in start]
    groups = [[{"params": ps[:2]}, {"params": ps[2:], "lr": 0.1, "max_grad_norm": 0.5}] for ps in (here, there)]
    plain, away = fusedstep.AdamW(groups[0]), fusedstep.AdamW(groups[1], offload="cpu")
    for _ in range(3):
        for p, q in zip(here, there, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.to(device, copy=True)
        plain.step()
        away.step()
    for p, q in zip(here, there, strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach())


@pytest.mark.parametrize("options", [{}, {"state_dtype": "int8"}, {"engine": "torch"}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_may_lie_anyhow(device, layout, options):
    shape = (8, 16, 5, 8)

    def laid():
        t = LAYOUTS[layout](shape)
        base = torch.empty(t.untyped_storage().nbytes() // 4, device=device)
        return t, base.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(t)

    # gradients of one that lies as they do, and of one that lies otherwise
    pairs = zip(*(laid() for _ in range(2)), strict=True)
    here, there = (
        [nn.Parameter(a), nn.Parameter(b.clone(memory_format=torch.contiguous_format))] for a, b in pairs
    )
    plain, away = fusedstep.AdamW(here, **options), fusedstep.AdamW(there, offload="cpu", **options)
    for _ in range(3):
        for p, q in zip(here, there, strict=True):
            p.grad, q.grad = laid()
        plain.step()
        away.step()
    for p, q in zip(here, there, strict=True):
        assert torch.equal(p, q.cpu())
        assert p.stride() == q.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_may_be_of_another_dtype(device, dtype):
    # torch has no way to say so but to set it aside
    twin = Twin(device, *ADAMW, dtype=torch.bfloat16)
    for _ in range(3):
        for p, q in twin.both():
            p.grad_dtype = q.grad_dtype = dtype
            p.grad = torch.randn(p.shape, dtype=dtype)
            q.grad = p.grad.clone().to(device)
        twin.plain.step()
        twin.away.step()
    twin.assert_same()


@pytest.mark.parametrize("options", [{}, {"engine": "torch"}, {"max_grad_norm": 0.1}], ids=str)
def test_gradients_come_and_go(device, options):
    twin = Twin(device, fusedstep.AdamW, options)
    for skip in [(0, 4), (1, 4), (), (0, 1, 2, 3, 4, 5, 6), (5,), ()]:
        twin.step(skip)
    twin.assert_same()


def test_parameters_may_be_frozen_moved_and_written(device):
    twin = Twin(device, *ADAMW)
    twin.step()
    for params in (twin.here, twin.there):
        params[4].requires_grad_(False)
    twin.step(skip=[4])
    for params in (twin.here, twin.there):
        params[4].requires_grad_(True)
        params[0].data = params[0].data.clone()
        # which no counter of torch's tells
        params[5].data.mul_(0.5)
    twin.step()
    twin.step()
    twin.assert_same()


@pytest.mark.filterwarnings("ignore:.*on the CPU already")
def test_a_parameter_may_leave_its_device_and_come_back(device):
    twin = Twin(device, *ADAMW)
    twin.step()
    for to in ("cpu", device):
        twin.there[5].data = twin.there[5].data.to(to)
        twin.there[5].grad = None
        twin.step()
    twin.assert_same()


def test_a_step_that_is_skipped_changes_nothing(device):
    twin = Twin(device, fusedstep.AdamW, {"skip_nonfinite": True, "statistics": True})
    twin.step()
    before = [p.detach().clone() for p in twin.there]
    twin.give_gradients()
    twin.there[4].grad[3] = twin.here[4].grad[3] = float("inf")
    twin.plain.step()
    twin.away.step()
    assert twin.away.step_was_skipped
    assert twin.away.skipped_steps == 1
    assert all(map(torch.equal, before, twin.there))
    twin.step()
    twin.assert_same()
    # all is told where it was measured
    for ours, theirs in zip(twin.away.statistics(), twin.plain.statistics(), strict=True):
        assert (ours is None and theirs is None) or torch.allclose(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_may_be_done_with(device, to_none):
    twin = Twin(device, *ADAMW)
    for _ in range(3):
        twin.step(zero_grad=True, set_to_none=to_none)
        assert all(p.grad is None if to_none else p.grad.count_nonzero() == 0 for p in twin.there)
    twin.assert_same()


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, fusedstep.GradScaler])
@pytest.mark.parametrize("fused", [None, True])
def test_scalers_work_as_always(device, scaler_class, fused):
    twin = Twin(device, fusedstep.AdamW, {"max_grad_norm": 0.1, "fused": fused})
    scalers = [scaler_class(where, init_scale=1024.0) for where in ("cpu", device)]
    for i in range(4):
        twin.give_gradients(scale=1024.0)
        if i == 2:
            twin.here[1].grad[0] = twin.there[1].grad[0] = float("nan")
        for scaler, optimizer, p in zip(
            scalers, (twin.plain, twin.away), (twin.here[0], twin.there[0]), strict=True
        ):
            # a scaler is told its device by what it scales
            scaler.scale(p.detach().sum())
            scaler.step(optimizer)
            scaler.update()
        for p, q in twin.both():
            torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=0, atol=0, equal_nan=True)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
    twin.assert_same()


def test_two_parameters_that_share_a_gradient_are_refused_in_any_bucket(device):
    p, q = (nn.Parameter(torch.ones(5000, device=device)) for _ in range(2))
    optimizer = fusedstep.SGD([p, q], offload="cpu")
    p.grad = q.grad = torch.ones(5000, device=device)
    with pytest.raises(RuntimeError, match="share a gradient"):
        optimizer.step(zero_grad=True, set_to_none=False)
    assert p.eq(1).all()


def test_averages_are_shown(device):
    twin = Twin(device, fusedstep.SGD, {"lr": 0.1, "ema_decay": 0.5})
    twin.step()
    twin.step()
    with twin.plain.ema_parameters(), twin.away.ema_parameters():
        assert all(torch.equal(p, q.cpu()) for p, q in twin.both())
        assert all(q.device.type == device for q in twin.there)
    twin.assert_same()


def test_rates_may_be_tensors_of_the_device(device):
    lr = torch.tensor(0.1, device=device)
    twin = Twin(device, fusedstep.SGD, {"lr": 0.1})
    twin.away.param_groups[0]["lr"] = lr
    twin.step()
    lr.mul_(0.5)
    twin.plain.param_groups[0]["lr"] = float(lr)
    twin.step()
    twin.assert_same()


class Told:
    """A stream or an event that tells what it is asked for."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def record(self, stream):
        self.log.append(f"{stream.name} tells")

    def synchronize(self):
        self.log.append("the host waits")


def stream_on_cpu(monkeypatch, log):
    """Have copies made as for a GPU, on a CPU; what streams are told is noted in `log`."""
    current, down, up = (Told(log, name) for name in ("current", "down", "up"))
    monkeypatch.setattr(offload, "applies", lambda part: True)
    monkeypatch.setattr(offload, "_streams", lambda device: (down, up))
    streamed = lambda row: offload.Streamed(row.param.device) if row.home.is_away else offload.Copies()
    monkeypatch.setattr("fusedstep._memory.table.copies_of", streamed)
    monkeypatch.setattr(torch.cuda, "Event", lambda: Told(log, "arrived"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(
        torch.cuda, "stream", lambda stream: contextlib.nullcontext(log.append(f"on {stream.name}"))
    )


@pytest.mark.parametrize("limit", [None, 0.1])
def test_all_are_sent_down_first_and_go_up_one_after_the_other(monkeypatch, limit):
    log = []
    stream_on_cpu(monkeypatch, log)
    monkeypatch.setattr(offload, "BUCKET_BYTES", 4)
    twin = Twin("cpu", fusedstep.SGD, {"lr": 0.1, "max_grad_norm": limit}, [torch.ones(3), torch.ones(3)])
    twin.step()
    bring, told = ["down waits for current", "down waits for up", "on down"], ["down tells"]
    step, back = ["the host waits"], ["on up", "current waits for up"]
    if limit is None:
        assert log == 2 * (bring + 2 * told) + 2 * (step + back)
    else:
        # gradients are measured while parameters come
        assert log == 2 * (bring + told) + 2 * (bring + told) + 2 * step + 2 * (step + back)
    twin.step()
    twin.assert_same()


# checkpoints and copies

STORED = [({}, {}), ({}, SMALL), (SMALL, {"master": "float32", "state_dtype": "float32"}), (SMALL, SMALL)]


@pytest.mark.parametrize(("saved", "loaded"), STORED, ids=str)
@pytest.mark.parametrize("offloads", [True, False])
def test_checkpoints_load_with_and_without_it(device, offloads, saved, loaded):
    """What is saved with it is loaded without, and the other way."""
    start = [torch.randn(64, 100), torch.randn(7)]
    twin = Twin(device, fusedstep.AdamW, saved, start, torch.bfloat16)
    twin.step()
    source, where = (twin.away, device) if offloads else (twin.plain, "cpu")
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    other = Twin(device, fusedstep.AdamW, loaded, start, torch.bfloat16)
    for params, values in ((other.here, twin.here), (other.there, twin.here)):
        for p, value in zip(params, values, strict=True):
            p.data.copy_(value)
    checkpoint = torch.load(file, map_location=where)
    other.plain.load_state_dict(copy.deepcopy(checkpoint))
    other.away.load_state_dict(copy.deepcopy(checkpoint))
    expanded = [o.expanded_state_dict()["state"] for o in (other.plain, other.away)]
    for i, values in expanded[0].items():
        for name, value in values.items():
            assert torch.equal(value.cpu(), expanded[1][i][name].cpu()), name
    for _ in range(2):
        other.step()
    other.assert_same()


def test_states_are_saved_alone(device):
    twin = Twin(device, *ADAMW)
    twin.step()
    sizes = []
    for optimizer in (twin.plain, twin.away):
        file = io.BytesIO()
        torch.save(optimizer.state_dict()["state"][3], file)
        sizes.append(file.tell())
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_of_an_optimizer_go_on(device, copied):
    twin = Twin(device, *ADAMW)
    twin.step()
    twin.away = copied(twin.away)
    assert twin.away.offload == "cpu"
    twin.there = twin.away.param_groups[0]["params"]
    twin.step()
    twin.assert_same()


def test_an_optimizer_from_before_it_could_be_asked_for_goes_on():
    p = nn.Parameter(torch.ones(2))
    state = fusedstep.SGD([p]).__getstate__()
    del state["offload"]
    again = fusedstep.SGD([p])
    again.__dict__.pop("offload")
    again.__setstate__(state)
    assert again.offload is None


# what is refused


def test_parameters_of_the_host_are_warned_of_once_and_stepped():
    p = nn.Parameter(torch.ones(3))
    optimizer = fusedstep.SGD([p], lr=0.5, offload="cpu")
    p.grad = torch.ones(3)
    with pytest.warns(UserWarning, match="some parameters are on the CPU already"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.param_groups[0]["max_grad_norm"] = 10.0
        optimizer.step()
    assert p.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (fusedstep.AdamW, {"offload": "disk"}, r"Invalid offload: 'disk'; use one of \('cpu',\), or None"),
        (fusedstep.AdamW, {"offload": True}, "Invalid offload: True"),
        (fusedstep.AdamW, {"offload": "cpu", "engine": "triton"}, 'engine is "triton"'),
        (fusedstep.Muon, {"offload": "cpu"}, "Muon multiplies matrices"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls([nn.Parameter(torch.ones(3, 3))], **options)


def test_it_holds_for_the_whole_optimizer():
    with pytest.raises(ValueError, match="offload holds for the whole optimizer"):
        fusedstep.SGD([{"params": [nn.Parameter(torch.ones(1))], "offload": "cpu"}])


def test_a_trace_is_refused():
    from torch.fx.experimental.proxy_tensor import make_fx

    p = nn.Parameter(torch.ones(3))
    optimizer = fusedstep.SGD([p], offload="cpu")

    def step(g):
        p.grad = g
        optimizer.step()
        return p.detach().clone()

    with pytest.raises(RuntimeError, match="no graph can replay"):
        make_fx(step)(torch.ones(3))


def test_tensors_that_are_not_plain_are_refused(device):
    class Odd(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    p = torch.ones(3, device=device).as_subclass(Odd).requires_grad_()
    optimizer = fusedstep.SGD([p], offload="cpu")
    p.grad = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="copies plain float tensors"):
        optimizer.step()


# distributed tensors


@pytest.fixture
def mesh(device):
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh(device, (1,))
    dist.destroy_process_group()


def sharded(model, mesh, **policy):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[0], mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)


@pytest.mark.parametrize(
    "options", [{"max_grad_norm": 0.1}, {"ema_decay": 0.9, "state_dtype": "int8"}], ids=str
)
def test_models_of_fsdp_are_stepped_on_the_host(device, mesh, options):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.tensor import DTensor

    model = sharded(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1)).to(device), mesh)
    params = [*model.parameters()]
    plain = [nn.Parameter(p.to_local().detach().cpu().clone()) for p in params]
    away, one = fusedstep.AdamW(params, offload="cpu", **options), fusedstep.AdamW(plain, **options)
    for _ in range(3):
        model(torch.randn(16, 64, device=device)).square().mean().backward()
        for p, q in zip(params, plain, strict=True):
            q.grad = p.grad.to_local().cpu().clone()
        away.step(zero_grad=True)
        one.step()
    for p, q in zip(params, plain, strict=True):
        assert torch.equal(p.to_local().cpu(), q)
        for name, state in one.state[q].items():
            found = away.state[p][name]
            assert isinstance(found, DTensor) or name == "step"
            found = found.to_local() if isinstance(found, DTensor) else found
            assert found.device.type == "cpu"
            assert torch.equal(found, state), name
    saved = get_optimizer_state_dict(model, away)
    assert len(saved["state"]) == len(params)


def parts_are_stepped_away(cls, options):
    """Of tensors that two ranks have uneven parts of: buckets must be the same on both."""
    from torch.distributed.tensor import Shard, distribute_tensor

    start = [torch.randn(shape) for shape in [(3, 50), (1, 300), (5, 4), (7,), (9, 90)]]
    grads = [[torch.randn_like(t) for t in start] for _ in range(3)]
    cut = lambda tensors: [distribute_tensor(t, ranks.mesh(2), [Shard(0)]) for t in tensors]
    here, there = ([nn.Parameter(t) for t in cut(start)] for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "applies", lambda part: True)
        patch.setattr(offload, "BUCKET_BYTES", 1000)
        plain, away = cls(here, **options), cls(there, offload="cpu", **options)
        for each in grads:
            for p, q, g in zip(here, there, cut(each), strict=True):
                p.grad, q.grad = g, g.clone()
            plain.step()
            away.step()
    assert len(away._plan.tables) > 2
    for p, q in zip(here, there, strict=True):
        torch.testing.assert_close(q.to_local(), p.to_local(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("cls", "options"),
    [(fusedstep.AdamW, {"max_grad_norm": 0.1}), (fusedstep.Lamb, {}), (fusedstep.Prodigy, {})],
    ids=str,
)
def test_ranks_take_the_same_turns(two, cls, options):
    two.run(parts_are_stepped_away, cls, options)


def a_tensor_of_one_rank_is_stepped_beside_parts():
    from torch.distributed.tensor import Shard, distribute_tensor

    cut = lambda shape: distribute_tensor(torch.randn(shape), ranks.mesh(2), [Shard(0)])
    params = [nn.Parameter(cut(shape)) for shape in [(4, 30), (6, 20), (8, 15)]]
    # which fills a bucket on one rank and not on the other
    params.insert(1, nn.Parameter(torch.randn(240 if dist.get_rank() else 5)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "applies", lambda part: True)
        patch.setattr(offload, "BUCKET_BYTES", 500)
        optimizer = fusedstep.Lamb(params, offload="cpu", max_grad_norm=None)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
    turns = {id(row.param): row.turn for table in optimizer._plan.tables for row in table.rows}
    return [turns[id(p)] for p in params]


def test_a_tensor_that_one_rank_has_changes_no_turns_of_others(two):
    (first, own, *others), again = two.run(a_tensor_of_one_rank_is_stepped_beside_parts)
    assert again == [first, own, *others]
    assert own > max(first, *others) > 1


@pytest.mark.gpu
def test_one_of_fsdps_policy_and_ours_is_to_be_chosen(mesh):
    from torch.distributed.fsdp import CPUOffloadPolicy

    if mesh.device_type != "cuda":
        pytest.skip("a model that is on the host anyway")
    model = sharded(
        nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 1)).cuda(), mesh, offload_policy=CPUOffloadPolicy()
    )
    optimizer = fusedstep.AdamW(model.parameters(), offload="cpu")
    model(torch.randn(2, 64, device="cuda")).sum().backward()
    with pytest.raises(RuntimeError, match=r"CPUOffloadPolicy.*choose one"):
        optimizer.step()


# what only a GPU shows


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, SMALL, {"ema_decay": 0.9}], ids=str)
def test_states_are_pinned_also_after_a_checkpoint_was_loaded(options):
    p = nn.Parameter(torch.randn(100, 64, device="cuda", dtype=torch.bfloat16))
    p.grad = torch.randn_like(p)
    optimizer = fusedstep.AdamW([p], offload="cpu", **options)
    for _ in range(2):
        optimizer.step()
        assert all(t.is_pinned() for name, t in optimizer.state[p].items() if name != "step")
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = fusedstep.AdamW([p], offload="cpu", **options)
        before = torch.cuda.memory_allocated()
        optimizer.load_state_dict(saved)
        assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_states_that_a_trainer_moves_to_the_device_come_back():
    p = nn.Parameter(torch.randn(100, 64, device="cuda"))
    q = nn.Parameter(p.detach().cpu())
    away, plain = fusedstep.AdamW([p], offload="cpu"), fusedstep.AdamW([q])
    for _ in range(3):
        q.grad = torch.randn_like(q)
        p.grad = q.grad.cuda()
        away.step()
        plain.step()
        assert away.state[p]["exp_avg"].is_pinned()
        away.state[p] = {name: t.cuda() for name, t in away.state[p].items()}
    away.step()
    plain.step()
    assert torch.equal(p.cpu(), q)


@pytest.mark.gpu
def test_the_device_holds_parameters_and_gradients_and_nothing_else():
    params = [nn.Parameter(torch.randn(1024, 1024, device="cuda")) for _ in range(32)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = fusedstep.AdamW(params, offload="cpu", max_grad_norm=1.0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 1 << 16


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}], ids=str)
def test_a_step_comes_between_what_came_before_and_what_comes_after(options, monkeypatch):
    """On any stream, however long that takes, and though gradients are freed and their memory is used anew."""
    monkeypatch.setattr(offload, "BUCKET_BYTES", 1 << 22)
    torch.manual_seed(0)
    start = [torch.randn(1024, 512) for _ in range(12)]
    here, there = ([nn.Parameter(t.clone().to(where)) for t in start] for where in ("cpu", "cuda"))
    plain, away = fusedstep.AdamW(here, **options), fusedstep.AdamW(there, offload="cpu", **options)
    work, stream = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    seen = []
    with torch.cuda.stream(stream):
        for _ in range(5):
            for _ in range(20):
                work = torch.tanh(work @ work)
            for q in there:
                # from the parameter: what was not yet there would show
                q.grad = q.detach().sin() + work[0, 0] * 0
            away.step(zero_grad=True)
            junk = [torch.full_like(q, torch.nan) for q in there]
            seen.append([q.detach().clone() for q in there])
            del junk
    torch.cuda.synchronize()
    expected = []
    for copies in [[t.cuda() for t in start], *seen[:-1]]:
        for p, q in zip(here, copies, strict=True):
            p.grad = q.sin().cpu()
        plain.step()
        expected.append([p.detach().clone() for p in here])
    for found, right in zip(seen, expected, strict=True):
        for a, b in zip(found, right, strict=True):
            assert torch.equal(a.cpu(), b)


@pytest.mark.gpu
def test_a_capture_is_refused():
    p = nn.Parameter(torch.ones(3, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer = fusedstep.SGD([p], offload="cpu")
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="no graph can replay"), torch.cuda.graph(graph):
        optimizer.step()
    optimizer.step()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_parameters_may_be_on_several_gpus():
    start = [torch.randn(100, 30) for _ in range(6)]
    here = [nn.Parameter(t) for t in start]
    there = [nn.Parameter(t.to(f"cuda:{i % 2}")) for i, t in enumerate(start)]
    plain, away = fusedstep.AdamW(here), fusedstep.AdamW(there, offload="cpu")
    for _ in range(3):
        for p, q in zip(here, there, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.to(q.device)
        plain.step()
        away.step()
    assert all(torch.equal(p, q.cpu()) for p, q in zip(here, there, strict=True))


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9}, {"state_dtype": "int8"}], ids=str)
def test_gradients_may_be_released_as_well(device, options):
    """One that is offloaded and whose gradients leave in backward, beside one that is neither."""
    model, data = nn.Sequential(*(nn.Linear(70, 70) for _ in range(4))), torch.randn(5, 3, 70)
    plain = fusedstep.AdamW(model.parameters(), lr=1e-2, **options)
    other = copy.deepcopy(model).to(device)
    away = fusedstep.AdamW(other.parameters(), lr=1e-2, offload="cpu", **options)
    fusedstep.release_gradients(other, away, bucket_bytes=30_000)
    for x in data:
        model(x).square().sum().backward()
        # products on a GPU are not those of the host to the bit
        torch.autograd.backward(
            [(q * p.grad.to(device)).sum() for p, q in zip(model.parameters(), other.parameters(), strict=True)]
        )
        plain.step(zero_grad=True)
        away.step()
        assert all(q.grad is None for q in other.parameters())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=0, atol=0)
        assert away.state[q]["step"].item() == len(data)


def test_parts_whose_gradients_are_released_warn_once():
    model = nn.Sequential(*(nn.Linear(70, 70) for _ in range(4)))
    optimizer = fusedstep.AdamW(model.parameters(), offload="cpu")
    fusedstep.release_gradients(model, optimizer, bucket_bytes=30_000)
    loss = model(torch.randn(3, 70)).square().sum()
    with pytest.warns(UserWarning, match="are on the CPU already") as found:
        loss.backward()
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_a_row_knows_where_its_parameter_was():
    """One whose parameter is on another device by now cannot go on in its table, whose streams are others."""
    p = nn.Parameter(torch.randn(4))
    p.grad = torch.randn(4)
    optimizer = fusedstep.SGD([p])
    optimizer.step()
    (row,) = optimizer._plan.tables[0].rows
    before = row.table_key
    row.param = nn.Parameter(torch.empty(4, device="meta"))
    assert row.table_key == before


@pytest.mark.parametrize("cls", [fusedstep.AdamW, fusedstep.Lamb])
def test_an_interrupt_leaves_no_bucket_between_its_state_and_its_parameter(device, cls, monkeypatch):
    params = [nn.Parameter(torch.randn(64, 50, device=device)) for _ in range(3)]
    optimizer = cls(params, offload="cpu", master=None)

    def give():
        for p in params:
            p.grad = torch.randn_like(p)

    give()
    optimizer.step()
    before = [p.detach().clone() for p in params]
    counts = [optimizer.state[p]["step"].item() for p in params]
    update, calls = table.Table.update, []

    def interrupted(self, k, amp):
        update(self, k, amp)
        calls.append(k)
        # in the middle, after a sweep that writes
        if k == self.sweep_count - 1 and len(calls) > 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(table.Table, "update", interrupted)
    give()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    for p, old, count in zip(params, before, counts, strict=True):
        assert (optimizer.state[p]["step"] > count) == (not torch.equal(p, old))
    assert any(not torch.equal(p, old) for p, old in zip(params, before, strict=True))


def test_what_is_loaded_is_brought_to_the_host_also_after_a_step(device, monkeypatch):
    p = nn.Parameter(torch.randn(64, 10, device=device))
    p.grad = torch.randn_like(p)
    optimizer = fusedstep.AdamW([p], offload="cpu")
    optimizer.step()
    saved, taken, take = copy.deepcopy(optimizer.state_dict()), [], offload.Home.take
    monkeypatch.setattr(offload.Home, "take", lambda home, t: taken.append(t.shape) or take(home, t))
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert taken == [p.shape, p.shape]


def test_a_rate_that_is_a_tensor_is_read_once_whatever_the_number_of_buckets(device, monkeypatch):
    params = [nn.Parameter(torch.randn(64, 20, device=device)) for _ in range(6)]
    lr = torch.tensor(0.5, device=device)
    optimizer = fusedstep.SGD(params, lr=lr, offload="cpu")
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    tables, found, to_device = optimizer._plan.tables, optimizer._plan.options, options.to_device
    column, reads = tables[0].option_columns["lr"], []
    monkeypatch.setattr(options, "to_device", lambda t, where: reads.append(where) or to_device(t, where))
    # as it is read of a GPU; of a CPU it is a number
    found._groups[0].tensors = [options.TensorOption(column, lr)]
    found.upload(tables)
    assert len(tables) == 6
    assert len(reads) == 1
    assert all(table.options[0, column] == 0.5 for table in tables)


@pytest.mark.parametrize("cls", [fusedstep.ScheduleFreeAdamW, fusedstep.ScheduleFreeSGD])
def test_averages_of_schedule_free_are_shown_where_parameters_are(cls):
    # tensors of two devices without numbers: operations between them raise
    with torch._subclasses.fake_tensor.FakeTensorMode():
        p = nn.Parameter(torch.empty(4, 3, device="cuda"))
        optimizer = cls([p], offload="cpu")
        optimizer.state[p] = {"z": torch.zeros(4, 3)}
        optimizer.eval()
        optimizer.train()


@pytest.mark.gpu
def test_schedule_free_averages_of_a_gpu_are_those_of_the_host():
    twin = Twin("cuda", fusedstep.ScheduleFreeAdamW, {"lr": 1e-2})
    for _ in range(3):
        twin.step()
    twin.plain.eval()
    twin.away.eval()
    for p, q in twin.both():
        torch.testing.assert_close(q.detach().cpu(), p.detach())
