"""What callers of an optimizer rely on: GradScaler, torch.compile, ZeRO, profiler, checkpoints both ways."""

import copy

import psutil
import pytest
import torch

import fusedstep
from tests.cases import CASES, KINDS, name_of

cases = pytest.mark.parametrize("case", KINDS, ids=name_of)


def model_and_batch():
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.randn(16, 6)


@pytest.mark.parametrize("fused", [None, True])
@cases
def test_training_with_a_grad_scaler_is_that_of_the_replaced_optimizer(case, fused, engine):
    model, x = model_and_batch()
    twin = copy.deepcopy(model)
    ours = case.ours(model.parameters(), engine=engine, fused=fused, **case.options)
    theirs = case.theirs(twin.parameters(), **case.options)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    for i in range(6):
        for net, optimizer, scaler in ((model, ours, scalers[0]), (twin, theirs, scalers[1])):
            optimizer.zero_grad()
            scaler.scale(net(x).square().mean()).backward()
            if i in (0, 3):
                next(net.parameters()).grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        if "step" in ours.state[p]:
            assert ours.state[p]["step"] == 4


@cases
def test_a_skipped_step_changes_no_bit(case, engine):
    p = torch.nn.Parameter(torch.randn(40))
    optimizer = case.ours([p], engine=engine, **case.options)
    for _ in range(2):
        p.grad = torch.randn(40)
        optimizer.step()
    before = copy.deepcopy([p.detach(), optimizer.state_dict()["state"]])
    p.grad = torch.full((40,), float("nan"))
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(2.0)
    optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale
    assert torch.equal(p, before[0])
    for name, value in before[1].get(0, {}).items():
        assert torch.equal(optimizer.state[p][name], value)


def test_a_caller_that_unscales_itself_can_switch_ours_off():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = fusedstep.AdamW([p], fused=True)
    assert optimizer._step_supports_amp_scaling
    optimizer._step_supports_amp_scaling = False
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([p], 0.1)
    scaler.step(optimizer)
    assert optimizer.state[p]["step"] == 1


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_checkpoints_go_both_ways(case, engine, tmp_path):
    """Save in the middle, load into the other's class, go on: the same as never having changed."""
    model, x = model_and_batch()
    models = {"ours": model, "theirs": copy.deepcopy(model)}
    classes = {
        "ours": lambda params: case.ours(params, engine=engine, **case.options),
        "theirs": lambda params: case.theirs(params, **case.options),
    }
    for name, net in models.items():
        first, second = (classes[n] for n in (name, "theirs" if name == "ours" else "ours"))
        optimizer = first(net.parameters())
        for i in range(6):
            if i == 3:
                torch.save(optimizer.state_dict(), tmp_path / name)
                optimizer = second(net.parameters())
                optimizer.load_state_dict(torch.load(tmp_path / name, weights_only=True))
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    for p, q in zip(models["ours"].parameters(), models["theirs"].parameters(), strict=True):
        torch.testing.assert_close(p, q)


@cases
def test_a_compiled_training_step_may_call_step(case):
    model, x = model_and_batch()
    twin = copy.deepcopy(model)
    ours, theirs = case.ours(model.parameters(), **case.options), case.theirs(twin.parameters(), **case.options)

    @torch.compile(backend="eager")
    def train(net, optimizer):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(3):
        train(model, ours)
        loss = twin(x).square().mean()
        loss.backward()
        theirs.step()
        theirs.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def whole_step_against_compiled(case, device, backend):
    model, x = (part.to(device) for part in model_and_batch())
    twin, trained = copy.deepcopy(model), []
    for net, compiles in ((model, True), (twin, False)):
        optimizer = case.ours(net.parameters(), **{**case.options, "max_grad_norm": 0.1}, ema_decay=0.9)
        scaler = fusedstep.GradScaler(device, init_scale=1024.0, growth_interval=2)

        def train(net=net, optimizer=optimizer, scaler=scaler):
            scaler.scale(net(x).square().mean()).backward()
            scaler.step(optimizer, zero_grad=True)
            scaler.update()

        train = torch.compile(train, backend=backend) if compiles else train
        for _ in range(4):
            train()
        trained.append([*net.parameters(), *(optimizer.state[p]["ema"] for p in net.parameters())])
    for p, q in zip(*trained, strict=True):
        torch.testing.assert_close(p, q)


@cases
def test_a_whole_training_step_may_be_compiled(case):
    whole_step_against_compiled(case, "cpu", "eager")


@pytest.mark.gpu
@cases
def test_a_whole_training_step_may_be_compiled_by_inductor(case):
    whole_step_against_compiled(case, "cuda", "inductor")


def test_the_profiler_shows_the_step_under_torchs_name():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = fusedstep.AdamW([p])
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}


def test_changing_weights_between_forward_and_backward_is_noticed_by_autograd():
    layer = torch.nn.Linear(3, 3)
    optimizer = fusedstep.SGD(layer.parameters(), lr=0.1)
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    x = torch.randn(2, 3, requires_grad=True)
    loss = layer(x).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_zero_redundancy_optimizer_wraps_ours():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, x = model_and_batch()
    twin = copy.deepcopy(model)
    ours = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=fusedstep.AdamW, lr=0.1)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for _ in range(3):
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    ours.consolidate_state_dict()
    assert len(ours.state_dict()["state"]) == 4
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.usefixtures("process_group")
@cases
def test_sharded_parameters_step_as_plain_ones(case):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    plain = torch.nn.Parameter(torch.randn(4, 3))
    p = torch.nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]))
    a, b = case.ours([p], **case.options), case.ours([plain], engine="torch", **case.options)
    for _ in range(3):
        plain.grad = torch.randn(4, 3)
        p.grad = distribute_tensor(plain.grad, mesh, [Shard(0)])
        a.step()
        b.step()
    torch.testing.assert_close(p.full_tensor(), plain)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("cls", [fusedstep.AdamW, fusedstep.Lamb])
def test_sharded_and_plain_parameters_are_clipped_by_one_norm(cls):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    shard = lambda t: distribute_tensor(t.detach().clone(), mesh, [Shard(0)])
    plain = [torch.nn.Parameter(torch.randn(4, 3)) for _ in range(2)]
    mixed = [torch.nn.Parameter(shard(plain[0])), torch.nn.Parameter(plain[1].detach().clone())]
    a, b = (cls(params, lr=0.1, max_grad_norm=0.5) for params in (mixed, plain))
    for scale in (1.0, 0.001, 100.0):
        for p, q in zip(mixed, plain, strict=True):
            q.grad = scale * torch.randn(4, 3)
            p.grad = shard(q.grad) if p is mixed[0] else q.grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(mixed[0].full_tensor(), plain[0])
    torch.testing.assert_close(mixed[1], plain[1])


@cases
def test_fake_tensors_step_without_computing(case):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = torch.nn.Linear(4, 4)
        optimizer = case.ours(model.parameters(), **case.options)
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.step()


def test_a_trainer_that_subclasses_dynamically_and_passes_a_closure_gets_its_value():
    # as Lightning does
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = fusedstep.AdamW([p])
    wrapped = type("LightningAdamW", (fusedstep.AdamW,), {})([p])

    def closure():
        assert torch.is_grad_enabled()
        p.grad = None
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure=closure) == 3
    assert float(wrapped.step(closure)) < 3
    assert not hasattr(optimizer, "train")
    assert not hasattr(optimizer, "eval")


@pytest.mark.skipif(psutil.virtual_memory().available < 20e9, reason="needs 15 GiB of memory")
def test_a_tensor_of_more_than_two_to_the_31_elements_is_stepped_to_its_end():
    n = 2**31 + 100
    p = torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16))
    p.grad = torch.zeros(n, dtype=torch.bfloat16)
    p.grad[-3:] = 1
    p.grad[2**31 - 1] = 1
    fusedstep.SGD([p], lr=1.0).step()
    assert p[-3:].tolist() == [-1, -1, -1]
    assert p[2**31 - 1] == -1
    assert p[:100].abs().sum() == 0
