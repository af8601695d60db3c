"""The triton engine compiled, on a GPU: results, launches, synchronisation, memory, graphs."""

import copy

import pytest
import torch

import fusedstep
from tests.cases import CASES, KINDS, name_of
from tests.numerics import assert_alike, judge, roundings
from tests.test_graphs import no_waiting
from tests.test_layouts import LAYOUTS
from tests.test_numerics import DTYPES, MIXED, exact, gradients, parameters, run

pytestmark = pytest.mark.gpu

SHAPES = [(7, 5), (3,), (), (0,), (1100,), (64, 1024), (5000,)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_fifty_steps_are_as_close_to_float64_as_torch_is(case, dtype):
    start, grads = parameters(dtype, SHAPES), gradients(dtype, SHAPES)
    ours, theirs = ([torch.nn.Parameter(p.detach().cuda()) for p in start] for _ in range(2))
    optimizer = case.ours(ours, engine="triton", **case.options)
    peer = case.theirs(theirs, fused=dtype.itemsize == 2, **case.options)
    run(optimizer, ours, grads)
    run(peer, theirs, grads)
    allowed = roundings(case, dtype)
    for p, q, (value, states) in zip(ours, theirs, exact(case, start, grads), strict=True):
        judge(p.detach().cpu(), q.detach().cpu(), value, "parameter", allowed)
        for name, state in states.items():
            judge(optimizer.state[p][name].cpu(), peer.state[q][name].cpu(), state, name, allowed)


# from float64 a CPU rounds to 16 bits by way of 32, a GPU at once: all other mixes give the same bits
ALIKE = [mix for mix in MIXED if mix[2] != torch.float64]


@pytest.mark.parametrize("dtypes", [*((d, d, None) for d in DTYPES), *ALIKE], ids=str)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_gpu_gives_the_bits_of_the_cpu_but_for_the_order_of_sums(case, dtypes):
    of_param, of_grad, of_state = dtypes
    start, grads = parameters(of_param, SHAPES), gradients(of_grad, SHAPES, steps=5)
    results = []
    for device in ("cpu", "cuda"):
        params = [torch.nn.Parameter(p.detach().clone().to(device)) for p in start]
        optimizer = case.ours(params, state_dtype=of_state, **case.options)
        run(optimizer, params, grads, of_grad)
        results.append((params, optimizer))
    (cpu, a), (gpu, b) = results
    for p, q in zip(cpu, gpu, strict=True):
        assert_alike(case, p.detach(), q.detach().cpu())
        for name, value in a.state[p].items():
            assert_alike(case, value, b.state[q][name].cpu())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_tensors_may_lie_anyhow(case, layout):
    param, grads = LAYOUTS[layout]((3, 4, 50, 20)), [LAYOUTS[layout]((3, 4, 50, 20)) for _ in range(3)]
    results = []
    for device in ("cpu", "cuda"):
        # a copy on the other device would not lie as the original does
        base = torch.empty(param.untyped_storage().nbytes() // 4, device=device).normal_()
        view = base.as_strided(param.shape, param.stride(), param.storage_offset()).copy_(param)
        p = torch.nn.Parameter(view)
        optimizer = case.ours([p], **case.options)
        for g in grads:
            p.grad = torch.empty_like(base).as_strided(g.shape, g.stride(), g.storage_offset()).copy_(g)
            optimizer.step()
        results.append(p.detach().cpu())
    assert_alike(case, *results)


@pytest.mark.parametrize("case", [case for case in KINDS if case.sums], ids=name_of)
def test_sums_give_the_same_bits_every_time(case):
    shapes = [(1000, 3000), (5000,), (7,), ()]
    start, grads = parameters(torch.float32, shapes), gradients(torch.float32, shapes, steps=3)
    results = []
    for _ in range(3):
        params = [torch.nn.Parameter(p.detach().cuda()) for p in start]
        run(case.ours(params, **case.options), params, grads)
        results.append(params)
    for other in results[1:]:
        assert all(torch.equal(p, q) for p, q in zip(results[0], other, strict=True))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_trust_ratio_of_a_large_tensor_is_exact_to_a_millionth(clip):
    p, g = torch.randn(3_000_000, device="cuda"), torch.randn(3_000_000, device="cuda")
    scale = 1.0 if clip is None else clip / float(g.double().norm())
    u = scale * g.double() / ((scale * g.double()).abs() + 1e-6) + 0.1 * p.double()
    moved = torch.nn.Parameter(p.clone())
    moved.grad = g
    fusedstep.Lamb([moved], lr=0.1, weight_decay=0.1, max_grad_norm=clip).step()
    found = float((p.double() - moved.detach().double()) @ u / (u @ u)) / 0.1
    assert abs(found / float(p.double().norm() / u.norm()) - 1) < 1e-6


def stepped(count=30, device="cuda", **options):
    params = [torch.nn.Parameter(torch.randn(100 * i + 1, device=device)) for i in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = fusedstep.AdamW(params, **options)
    for _ in range(2):
        optimizer.step()
    return params, optimizer


def launches(optimizer):
    torch.cuda.synchronize()  # or copies still in the queue would be counted
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return [e.name for e in profile.events() if e.device_type == on_device and "Activity" not in e.name]


def test_a_step_is_two_launches_whatever_the_number_of_tensors_and_groups():
    assert len(launches(stepped()[1])) == 2
    params = [torch.nn.Parameter(torch.randn(10, device="cuda")) for _ in range(50)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = fusedstep.AdamW([{"params": [p], "lr": 1e-3 * (i + 1)} for i, p in enumerate(params)])
    optimizer.step()
    assert len(launches(optimizer)) == 2


@pytest.mark.parametrize("limited", [False, True], ids=["unlimited", "limited"])
def test_a_step_never_waits_for_the_device_and_a_quiet_one_allocates_nothing(limited):
    limit = torch.tensor(0.5, device="cuda") if limited else None
    params, optimizer = stepped(lr=torch.tensor(1e-3, device="cuda"), max_grad_norm=limit)
    optimizer.found_inf, optimizer.grad_scale = (torch.tensor(x, device="cuda") for x in (0.0, 2.0))
    optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_waiting():
        for _ in range(3):
            optimizer.step()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.param_groups[0]["weight_decay"] = 0.3
        optimizer.step()


@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_the_torch_engine_never_waits_either(case, scaled):
    params = [torch.nn.Parameter(torch.randn(8, 5, device="cuda")) for _ in range(3)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = case.ours(params, engine="torch", statistics=True, skip_nonfinite=True, **case.options)
    if scaled:
        optimizer.found_inf, optimizer.grad_scale = (torch.tensor(x, device="cuda") for x in (0.0, 2.0))
    optimizer.step()
    with no_waiting():
        optimizer.step()


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_training_with_a_grad_scaler_is_that_of_the_replaced_optimizer(case, fused):
    model = torch.nn.Linear(40, 30).cuda()
    twin = copy.deepcopy(model)
    ours = case.ours(model.parameters(), fused=fused, **case.options)
    theirs = case.theirs(twin.parameters(), **case.options)
    scalers = [torch.amp.GradScaler("cuda", init_scale=1024.0) for _ in range(2)]
    x = torch.randn(8, 40, device="cuda")
    for i in range(6):
        for net, optimizer, scaler in ((model, ours, scalers[0]), (twin, theirs, scalers[1])):
            optimizer.zero_grad()
            scaler.scale(net(x).square().mean()).backward()
            if i in (0, 3):
                net.weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_a_captured_step_replays_as_steps(case):
    start = [torch.randn(300, device="cuda") for _ in range(4)]
    eager, graphed = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    lr = torch.tensor(0.01, device="cuda")
    options = {**case.options, "lr": lr}
    a, b = case.ours(eager, **options), case.ours(graphed, **options)
    for p, q in zip(eager, graphed, strict=True):
        p.grad, q.grad = torch.randn_like(p), torch.zeros_like(q)
        q.grad.copy_(p.grad)
    a.step()
    b.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        b.step()
    for i in range(4):
        lr.fill_(0.01 * (i + 1))
        a.step()
        graph.replay()
    assert all(torch.equal(p, q) for p, q in zip(eager, graphed, strict=True))


def test_one_optimizer_steps_parameters_on_several_devices():
    params = [torch.nn.Parameter(torch.randn(50)), torch.nn.Parameter(torch.randn(50, device="cuda"))]
    twins = [torch.nn.Parameter(p.detach().cpu().clone()) for p in params]
    a, b = fusedstep.AdamW(params), fusedstep.AdamW(twins)
    for _ in range(3):
        for p, q in zip(params, twins, strict=True):
            q.grad = torch.randn(50)
            p.grad = q.grad.to(p.device)
        a.step()
        b.step()
    assert all(torch.equal(p.cpu(), q) for p, q in zip(params, twins, strict=True))


@pytest.mark.parametrize("cls", [fusedstep.AdamW, fusedstep.Lamb])
def test_parameters_on_several_devices_are_clipped_by_one_norm(cls):
    params = [torch.nn.Parameter(torch.randn(50)), torch.nn.Parameter(torch.randn(3000, device="cuda"))]
    twins = [torch.nn.Parameter(p.detach().cpu().clone()) for p in params]
    a, b = cls(params, lr=0.1, max_grad_norm=0.5), cls(twins, lr=0.1, max_grad_norm=0.5)
    for scale in (1.0, 0.001, 100.0):
        for p, q in zip(params, twins, strict=True):
            q.grad = scale * torch.randn(q.shape)
            p.grad = q.grad.to(p.device)
        a.step()
        b.step()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-5, atol=1e-5)


def test_a_model_that_moves_takes_its_state_along():
    model = torch.nn.Linear(20, 20)
    optimizer = fusedstep.AdamW(model.parameters())
    for device in ("cpu", "cuda", "cpu", "cuda"):
        model.to(device)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        assert all(v.device.type == device for p in model.parameters() for v in optimizer.state[p].values())
    assert all(optimizer.state[p]["step"] == 4 for p in model.parameters())


def test_a_tensor_of_more_than_two_to_the_31_elements_is_stepped_to_its_end():
    n = 2**31 + 5000
    p = torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device="cuda"))
    p.grad = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    p.grad[-3:] = 1
    p.grad[2**31 - 1] = 1
    fusedstep.SGD([p], lr=1.0, momentum=0.9).step()
    assert p[-3:].tolist() == [-1, -1, -1]
    assert float(p.abs().sum(dtype=torch.float32)) == 4


def test_without_a_working_triton_torch_steps_in_with_one_warning(monkeypatch):
    from fusedstep import _engines as engines

    engines.load.cache_clear()
    engines._warn_once.cache_clear()
    monkeypatch.setattr("fusedstep._engines.triton.unavailable", lambda device: "no C compiler found")
    p = torch.nn.Parameter(torch.ones(3, device="cuda"))
    p.grad = torch.ones_like(p)
    with pytest.warns(UserWarning, match="falls back.*no C compiler"):
        fusedstep.AdamW([p]).step()
    monkeypatch.undo()
    engines.load.cache_clear()
    assert (p < 1).all()
