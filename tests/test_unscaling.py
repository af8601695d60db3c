"""Who unscales gradients, and what a step leaves in them: `fused` means what it means in torch.

With None and False torch's scaler unscales gradients and skips steps itself; with True the step does. Either
way `p.grad` is unscaled after a step that was taken, as whoever logs, accumulates or clips it expects, and as
the tests of PyTorch, Apex and torch_npu do.
"""

import copy
import pickle

import pytest
import torch

import fusedstep
import fusedstep.npu
from tests.cases import CLASSES, KINDS, TORCH_CLASSES, name_of
from tests.numerics import judge

INF, NAN = float("inf"), float("nan")
NPU_CLASSES = [getattr(fusedstep.npu, name) for name in fusedstep.npu.__all__ if name.startswith("NpuFused")]

cases = pytest.mark.parametrize("case", KINDS, ids=name_of)
each_fused = pytest.mark.parametrize("fused", [None, False, True])
each_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def scaled(scale=128.0, scaler_class=torch.amp.GradScaler, **options):
    """A scaler that has scaled a loss."""
    scaler = scaler_class("cpu", init_scale=scale, growth_interval=100, **options)
    scaler.scale(torch.ones(()))
    return scaler


def parameter(*shape, dtype=torch.float32):
    p = torch.nn.Parameter(torch.randn(*shape).to(dtype))
    p.grad = torch.randn(*shape).to(dtype)
    return p


def bits(t):
    return t.detach().clone().contiguous().view(torch.uint8)


# what torch's scaler is told


@each_class
def test_the_constructors_fused_decides_who_unscales(cls):
    params = [parameter(3)]
    assert [cls(params, lr=0.1, fused=fused)._step_supports_amp_scaling for fused in (None, False, True)] == [
        False,
        False,
        True,
    ]
    # as torch's do, groups have it too, but it is not theirs to decide
    for group, whole in ((True, None), (True, False), (None, True), (False, True)):
        optimizer = cls([{"params": params, "fused": group}], lr=0.1, fused=whole)
        assert optimizer._step_supports_amp_scaling == (whole is True)
        assert (optimizer.defaults["fused"], optimizer.param_groups[0]["fused"]) == (whole, group)


@pytest.mark.parametrize("cls", NPU_CLASSES, ids=lambda cls: cls.__name__)
def test_what_stands_for_torch_npu_lets_the_scaler_unscale(cls):
    assert not cls([parameter(3)], lr=0.1)._step_supports_amp_scaling


@each_fused
@pytest.mark.parametrize("saved", [None, False, True])
@each_class
def test_a_checkpoint_does_not_decide(cls, saved, fused):
    first, second = (cls([parameter(3)], lr=0.1, fused=each) for each in (saved, fused))
    first.step()
    second.load_state_dict(first.state_dict())
    assert second._step_supports_amp_scaling == (fused is True)
    second.step()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
)
@each_fused
def test_copies_keep_what_was_chosen_or_set(fused, copied):
    optimizer = fusedstep.AdamW([parameter(3)], fused=fused)
    assert copied(optimizer)._step_supports_amp_scaling == (fused is True)
    optimizer._step_supports_amp_scaling = not fused
    assert copied(optimizer)._step_supports_amp_scaling == (not fused)


@pytest.mark.parametrize("unscales", [False, True])
def test_who_sets_the_attribute_decides(unscales):
    p, called = parameter(3), []
    optimizer = fusedstep.SGD([p], lr=1.0, fused=not unscales)
    optimizer._step_supports_amp_scaling = unscales
    optimizer.register_step_pre_hook(lambda *_: called.append(True))
    p.grad[1] = INF
    scaled().step(optimizer)
    assert bool(called) == unscales


# what is left in gradients


def three_steps(cls, scaler=None, **options):
    """Gradients are not cleared, and so add up with what a step has left."""
    p = torch.nn.Parameter(torch.ones(()))
    optimizer, scaler = cls([p], lr=0.1, **options), scaler or scaled(100.0)
    for _ in range(3):
        scaler.scale(1.0 * p).backward()
        scaler.step(optimizer)
        scaler.update()
    return p.item()


@each_fused
@pytest.mark.parametrize("cls", TORCH_CLASSES, ids=lambda cls: cls.__name__)
def test_gradients_that_are_not_cleared_add_up_as_with_torch(cls, fused, engine):
    ours = three_steps(cls, fused=fused, engine=engine)
    assert ours == pytest.approx(three_steps(getattr(torch.optim, cls.__name__), fused=fused), rel=1e-6)
    if cls is fusedstep.SGD:
        # with gradients that stay scaled it is 0.4
        assert ours == pytest.approx(0.69799, rel=1e-6)


@each_fused
@cases
def test_gradients_after_every_step_are_those_of_training_without_a_scale(case, fused, engine):
    # what Apex compares its classes by
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    ours = case.ours(model.parameters(), engine=engine, fused=fused, **case.options)
    theirs, scaler = case.theirs(twin.parameters(), **case.options), scaled()
    for _ in range(3):
        x = torch.randn(16, 6)
        ours.zero_grad()
        theirs.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        twin(x).square().mean().backward()
        # some peers clip where gradients are
        wanted = [q.grad.clone() for q in twin.parameters()]
        scaler.step(ours)
        scaler.update(128.0)
        theirs.step()
        for p, q, g in zip(model.parameters(), twin.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad, g)
            torch.testing.assert_close(p, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1024.0, 3.0, 1e-3, 2.0**-40], ids=str)
def test_they_are_divided_as_exactly_as_by_torch(scale, dtype, engine):
    ours, theirs = parameter(777, dtype=dtype), parameter(777, dtype=dtype)
    theirs.grad = ours.grad.clone()
    exact = ours.grad.double() / torch.tensor(scale).double()
    pair = (
        fusedstep.SGD([ours], lr=0.1, fused=True, engine=engine),
        torch.optim.SGD([theirs], lr=0.1, fused=True),
    )
    for optimizer in pair:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
        optimizer.step()
    finite = exact.abs() < torch.finfo(dtype).max
    judge(ours.grad[finite], theirs.grad[finite], exact[finite], "gradient", roundings=1)


@pytest.mark.parametrize("besides", [{}, {"statistics": True, "ema_decay": 0.9}], ids=["alone", "with-others"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@cases
def test_they_are_neither_clipped_nor_negated(case, dtype, besides, engine):
    # more than a chunk, with a tail; and one that does not lie as its parameter does
    params = [parameter(70, 33, dtype=dtype), parameter(40, 2, dtype=dtype), parameter(5, dtype=dtype)]
    params[1].grad = torch.randn(2, 40).to(dtype).t()
    before = [p.grad.clone() for p in params]
    versions = [p.grad._version for p in params]
    options = {**case.options, "max_grad_norm": 0.1, "maximize": True}
    optimizer = case.ours(params, engine=engine, fused=True, **options, **besides)
    scaler = scaled()
    for i in range(2):
        scaler.step(optimizer)
        scaler.update()
        for p, g in zip(params, before, strict=True):
            assert torch.equal(p.grad, g / 128 ** (i + 1))
    assert [p.grad._version for p in params] == versions


@pytest.mark.parametrize("bad", [INF, NAN])
@each_fused
@cases
def test_a_skipped_step_leaves_in_them_what_torchs_leaves(case, fused, bad, engine):
    def grads_after(cls, **options):
        params = [torch.nn.Parameter(torch.ones(40)), torch.nn.Parameter(torch.ones(8, 5))]
        params[0].grad, params[1].grad = torch.full((40,), 6.0), torch.full((5, 8), 2.0).t()
        params[0].grad[7] = bad
        versions = [p.grad._version for p in params]
        scaled(4.0).step(cls(params, fused=fused, **options))
        assert [p.grad._version for p in params] == versions
        return [p.grad for p in params]

    ours = grads_after(case.ours, engine=engine, **case.options)
    theirs = grads_after(torch.optim.SGD, lr=0.1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert ours[1][0, 0] == (2.0 if fused else 0.5)


@pytest.mark.parametrize("set_to_none", [False, True])
@cases
def test_gradients_that_are_done_with_are_not_unscaled(case, set_to_none, engine):
    p = parameter(40)
    g, before = p.grad, bits(p.grad)
    optimizer = case.ours([p], engine=engine, fused=True, **case.options)
    scaled().step(optimizer, zero_grad=True, set_to_none=set_to_none)
    if set_to_none:
        assert p.grad is None
        assert torch.equal(bits(g), before)
    else:
        assert p.grad is g
        assert not g.any()


@each_fused
def test_gradients_that_were_unscaled_are_left_alone(fused, engine):
    p, scaler = parameter(40), scaled()
    optimizer = fusedstep.AdamW([p], engine=engine, fused=fused, max_grad_norm=0.1, maximize=True)
    expected = p.grad / 128
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert torch.equal(p.grad, expected)


LAYOUTS = {
    "transposed": lambda: torch.randn(7, 6).t(),
    "sliced": lambda: torch.randn(6, 14)[:, ::2],
    "channels-last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "empty": lambda: torch.randn(0, 3),
    "0-dim": lambda: torch.randn(()),
    "unaligned": lambda: torch.randn(1001)[1:],
    "complex": lambda: torch.randn(6, 7, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(6, 7, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_however_they_lie_they_are_unscaled_where_they_are(layout, found, engine):
    g = LAYOUTS[layout]()
    p = torch.nn.Parameter(torch.zeros(g.shape, dtype=g.dtype))
    p.grad = g
    optimizer = fusedstep.SGD([p], lr=1.0, engine=engine, fused=True)
    # torch's scaler takes no complex gradients
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(found)
    for i in range(2):
        expected, version = (g.clone() if found else g / 4), g._version
        optimizer.step()
        assert p.grad is g
        assert torch.equal(g, expected), i
        assert g._version == version


def test_around_a_gradient_nothing_is_written(engine):
    memory = torch.full((10, 10), 8.0)
    p = torch.nn.Parameter(torch.zeros(4, 4))
    p.grad = memory[3:7, 3:7]
    scaled(8.0).step(fusedstep.SGD([p], lr=1.0, engine=engine, fused=True))
    assert (p.grad == 1).all()
    assert memory.sum() == 8 * 84 + 16


def test_a_gradient_whose_elements_share_memory_is_refused(engine):
    p = torch.nn.Parameter(torch.zeros(5))
    p.grad = torch.full((1,), 8.0).expand(5)
    optimizer = fusedstep.SGD([p], lr=1.0, engine=engine, fused=True)
    # torch's scaler refuses it before the step does
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    with pytest.raises(RuntimeError, match=r"share memory.*clone\(\), or fusedstep.GradScaler"):
        optimizer.step()
    assert not p.any()
    assert (p.grad == 8).all()
    del optimizer.grad_scale, optimizer.found_inf
    scaled(4.0, fusedstep.GradScaler).step(optimizer)
    assert (p == -2).all()


def test_a_gradient_of_two_parameters_is_refused(engine):
    p, q = (torch.nn.Parameter(torch.zeros(5)) for _ in range(2))
    p.grad = q.grad = torch.full((5,), 8.0)
    optimizer = fusedstep.SGD([p, q], lr=1.0, engine=engine, fused=True)
    with pytest.raises(RuntimeError, match=r"unscaled twice; give one of them a clone, or use fusedstep.Grad"):
        scaled(4.0).step(optimizer)
    assert not p.any()
    assert not q.any()
    assert (p.grad == 8).all()
    del optimizer.grad_scale, optimizer.found_inf
    scaled(4.0, fusedstep.GradScaler).step(optimizer)
    assert (p == -2).all()
    assert (q == -2).all()


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_parts_of_distributed_gradients_are_unscaled(engine):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    shard = lambda t: distribute_tensor(t, mesh, [Shard(0)])
    p, expected = torch.nn.Parameter(shard(torch.zeros(6, 5))), torch.randn(6, 5)
    p.grad = g = shard(128 * expected)
    version = g._version
    scaled().step(fusedstep.SGD([p], lr=1.0, engine=engine, fused=True))
    assert p.grad is g
    assert torch.equal(g.to_local(), expected)
    assert torch.equal(p.to_local(), -expected)
    assert g._version == version


# with None and False, torch's scaler does what it does for torch's default; each text says what to use instead


def hosts_that_waited(monkeypatch):
    """How often torch's scaler reads on the host whether to take a step."""
    asked, real = [], torch.amp.GradScaler._maybe_opt_step

    def counted(self, *args, **kwargs):
        asked.append(self)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.amp.GradScaler, "_maybe_opt_step", counted)
    return asked


@pytest.mark.parametrize("unscaled", [False, True], ids=["", "unscaled-before"])
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, fusedstep.GradScaler], ids=["torchs", "ours"])
@each_fused
def test_only_torchs_scaler_waits_and_only_without_fused(fused, scaler_class, unscaled, monkeypatch):
    asked, (p, scaler) = hosts_that_waited(monkeypatch), (parameter(3), scaled(8.0, scaler_class))
    optimizer = fusedstep.AdamW([p], fused=fused)
    for bad in (1.0, INF, 1.0):
        p.grad = torch.tensor([1.0, bad, 1.0])
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    waits = scaler_class is torch.amp.GradScaler and not fused
    assert len(asked) == (3 if waits else 0)
    assert optimizer.state[p]["step"] == 2
    assert optimizer.skipped_steps == (0 if waits else 1)
    assert scaler.get_scale() == 4


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_after_an_overflow_gradients_are_kept_where_torchs_scaler_skips(set_to_none, fused):
    p, scaler = torch.nn.Parameter(torch.zeros(2)), scaled(8.0)
    optimizer = fusedstep.SGD([p], lr=1.0, fused=fused)
    p.grad = torch.tensor([8.0, INF])
    scaler.step(optimizer, zero_grad=True, set_to_none=set_to_none)
    scaler.update()
    assert p.grad.tolist() == [1, INF]
    p.grad = torch.tensor([4.0, 8.0])
    scaler.step(optimizer, zero_grad=True, set_to_none=set_to_none)
    assert p.grad is None if set_to_none else p.grad.tolist() == [0, 0]
    assert p.tolist() == [-1, -2]


@pytest.mark.parametrize("fused", [None, False])
def test_statistics_and_counts_see_no_skip_of_torchs_scaler(fused):
    p, scaler = torch.nn.Parameter(torch.zeros(2)), scaled(8.0)
    optimizer = fusedstep.SGD([p], lr=1.0, fused=fused, statistics=True, skip_nonfinite=True)
    for bad in (8.0, INF):
        p.grad = torch.tensor([0.0, bad])
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.statistics().grad_norm == 1  # of the step before
    assert not optimizer.statistics().skipped
    assert not optimizer.step_was_skipped
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("fused", [None, False])
@each_class
def test_float16_gradients_are_refused_as_by_torch(cls, fused):
    p = parameter(3, dtype=torch.float16)
    before = bits(p), bits(p.grad)
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
        scaled().step(cls([p], lr=0.1, fused=fused))
    assert torch.equal(bits(p), before[0])
    assert torch.equal(bits(p.grad), before[1])
    # the two ways out
    scaled().step(cls([p], lr=0.1, fused=True))
    scaled(128.0, fusedstep.GradScaler).step(cls([p], lr=0.1, fused=fused))


# accelerate


@pytest.mark.parametrize("fused", [None, False])
@cases
def test_accelerate_sees_an_overflow_and_its_schedule_waits(case, fused):
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    Accelerator(cpu=True)
    p, scaler = parameter(3), scaled(8.0)
    optimizer = case.ours([p], fused=fused, **case.options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5**i)
    # as Accelerator.prepare makes them where there is a GPU
    wrapped = AcceleratedOptimizer(optimizer, scaler=scaler)
    schedule = AcceleratedScheduler(schedule, wrapped)
    seen = []
    for bad in (1.0, INF, NAN, 1.0):
        p.grad = torch.tensor([1.0, bad, 1.0])
        wrapped.step()
        schedule.step()
        seen.append((wrapped.step_was_skipped, optimizer.param_groups[0]["lr"] / case.options["lr"]))
    assert seen == [(False, 0.5), (True, 0.5), (True, 0.5), (False, 0.25)]
