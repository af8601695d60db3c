"""master=: parameters of 16 bits, and beside them what they were rounded from."""

import copy

import pytest
import torch

import fusedstep
from tests import formats
from tests.cases import FAMILY, KINDS, Case, by_name, name_of
from tests.pairs import copies, same_bits, set_grads
from tests.test_layouts import LAYOUTS

NAN, INF = float("nan"), float("inf")
SHAPES = [(6, 11), (3,), (), (130,)]
kinds = pytest.mark.parametrize("case", KINDS, ids=name_of)
# how a master is kept, and of which parameters
MASTERS = [
    ("split", torch.bfloat16),
    ("split8", torch.bfloat16),
    ("float32", torch.bfloat16),
    ("float32", torch.float16),
]
masters = pytest.mark.parametrize(("kept", "dtype"), MASTERS, ids=str)
EXACT = [each for each in MASTERS if each[0] != "split8"]
exact_masters = pytest.mark.parametrize(("kept", "dtype"), EXACT, ids=str)


def master(optimizer, p):
    """As the optimizer's states and the parameter have it."""
    state = optimizer.state[p]
    return state["master"] if "master" in state else formats.joined(p, state["master_rest"])


def rounded(x, dtype, kept):
    return formats.split(x) if kept.startswith("split") else x.to(dtype)


def gradients(steps, shapes=SHAPES, dtype=torch.bfloat16, seed=1):
    random = torch.Generator().manual_seed(seed)
    scales = 10 ** torch.linspace(-3, 0, steps)
    return [[(torch.randn(shape, generator=random) * scale).to(dtype) for shape in shapes] for scale in scales]


def twins(case, start, engine, kept, **options):
    """Ours with a master, and the same in float32."""
    options = {"state_dtype": torch.float32, "engine": engine, **case.options, **options}
    ours, theirs = copies(start), copies([t.float() for t in start])
    return ours, case.ours(ours, master=kept, **options), theirs, case.ours(theirs, **options)


def step_both(a, ours, b, theirs, grads):
    set_grads(ours, grads)
    set_grads(theirs, [g.float() for g in grads])
    a.step()
    b.step()


def assert_equal(a, ours, b, theirs, kept):
    for p, q in zip(ours, theirs, strict=True):
        assert same_bits(master(a, p), q.detach())
        assert same_bits(p.detach(), rounded(q.detach(), p.dtype, kept))
        for name, value in b.state[q].items():
            assert same_bits(a.state[p][name], value), name


# as float32 trains


def train_beside_float32(case, engine, kept, dtype, steps, shapes=SHAPES, device="cpu", **options):
    start = [torch.randn(shape).to(device, dtype) for shape in shapes]
    ours, a, theirs, b = twins(case, start, engine, kept, **options)
    for step in gradients(steps, shapes, dtype):
        step_both(a, ours, b, theirs, [g.to(device) for g in step])
    assert_equal(a, ours, b, theirs, kept)
    assert any((p.float() != q).any() for p, q in zip(ours, theirs, strict=True))


@kinds
def test_a_thousand_steps_are_those_of_float32_bit_by_bit(case, one_thread):
    train_beside_float32(case, "cpu", "split", torch.bfloat16, 1000)


# schedule-free refuses masters: its parameters are made anew of two states at every step
OTHERS = [row for row in FAMILY if not row[0].__name__.startswith("ScheduleFree")]


@pytest.mark.parametrize(("engine", "steps"), [("cpu", 1000), ("torch", 20)])
@pytest.mark.parametrize(("cls", "options"), OTHERS, ids=lambda value: getattr(value, "__name__", None))
def test_so_are_those_of_the_family(cls, options, engine, steps, one_thread):
    train_beside_float32(Case("", cls, cls, None, options), engine, "split", torch.bfloat16, steps)


@exact_masters
@kinds
def test_steps_are_those_of_float32_bit_by_bit(case, kept, dtype, engine, one_thread):
    if engine == "triton" and (kept, dtype) != EXACT[0] and case.name != "adamw":
        pytest.skip("the interpreter takes long")
    if engine == "triton":
        train_beside_float32(case, engine, kept, dtype, 3, SHAPES[:2])
    else:
        train_beside_float32(case, engine, kept, dtype, 20 if engine == "torch" else 200)


@pytest.mark.gpu
@exact_masters
@kinds
def test_steps_on_a_gpu_are_those_of_float32_bit_by_bit(case, kept, dtype):
    train_beside_float32(case, "triton", kept, dtype, 200, (*SHAPES, (100, 300)), "cuda")


@pytest.mark.parametrize(
    "options",
    [{"max_grad_norm": 0.1}, {"skip_nonfinite": True}, {"statistics": True}, {"ema_decay": 0.9}],
)
@pytest.mark.parametrize("kept", ["split", "float32"])
@kinds
def test_other_options_change_nothing_of_that(case, kept, options, one_thread):
    """Averages are of masters, too."""
    train_beside_float32(case, "cpu", kept, torch.bfloat16, 20, **options)


@pytest.mark.parametrize("kept", ["split", "float32"])
@kinds
def test_gradients_of_thirty_two_bits_are_taken_as_they_are(case, kept, engine):
    if engine == "triton" and case.name != "adamw":
        pytest.skip("the interpreter takes long")
    start = [torch.randn(70).bfloat16()]
    ours, a, theirs, b = twins(case, start, engine, kept)
    ours[0].grad_dtype = None
    for _ in range(2):
        step_both(a, ours, b, theirs, [torch.randn(70)])
    torch.testing.assert_close(master(a, ours[0]), theirs[0].detach(), rtol=1e-6, atol=1e-6)
    if engine == "cpu":
        assert_equal(a, ours, b, theirs, kept)


@pytest.mark.parametrize("layout", LAYOUTS)
@masters
def test_parameters_may_lie_anyhow(kept, dtype, layout, engine):
    if engine == "triton" and kept != "split":
        pytest.skip("the interpreter takes long")
    case, shape = by_name("adamw"), (3, 4, 5, 2)
    param = LAYOUTS[layout](shape)
    view = torch.empty(param.untyped_storage().nbytes() // 4, dtype=dtype)
    view = view.as_strided(param.shape, param.stride(), param.storage_offset()).copy_(param)
    p, q = torch.nn.Parameter(view), torch.nn.Parameter(view.clone(memory_format=torch.contiguous_format))
    a, b = (case.ours([t], master=kept, engine=engine, **case.options) for t in (p, q))
    for _ in range(2):
        q.grad = torch.randn(shape).to(dtype)
        p.grad = torch.empty_like(p).copy_(q.grad)
        a.step()
        b.step()
    assert torch.equal(p, q)
    assert same_bits(master(a, p).contiguous(), master(b, q))


# 24 bits


@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_a_master_of_twenty_four_bits_is_off_by_half_of_its_last(engine):
    """It is rounded at every step, half away from zero: an error is at most 2**-16 of the number."""
    x = torch.randn(10_000).abs() * 10 ** torch.linspace(-30, 30, 10_000)
    p = torch.nn.Parameter(torch.zeros(10_000, dtype=torch.bfloat16))
    p.grad_dtype = None
    optimizer = fusedstep.SGD([p], lr=1.0, master="split8", engine=engine)
    p.grad = -x
    optimizer.step()
    found = master(optimizer, p)
    assert optimizer.state[p]["master_rest"].dtype == torch.int8
    bits, of_x = found.view(torch.int32), x.view(torch.int32)
    assert (bits & 0xFF == 0).all()
    assert torch.equal(bits, (of_x + 0x80) & ~0xFF)
    assert ((found.double() - x.double()).abs() <= x.double() * 2.0**-16).all()
    assert same_bits(p.detach(), formats.split(found))


@kinds
def test_a_master_of_twenty_four_bits_trains_almost_as_float32_does(case, one_thread):
    start = [torch.randn(50, 50).bfloat16()]
    ours, a, theirs, b = twins(case, start, "cpu", "split8")
    for step in gradients(100, [(50, 50)]):
        step_both(a, ours, b, theirs, step)
    moved = (theirs[0] - start[0].float()).abs().mean()
    assert (master(a, ours[0]) - theirs[0]).abs().mean() < 0.01 * moved


# what it is for


@masters
def test_updates_that_a_parameter_alone_would_lose_add_up(kept, dtype, engine):
    p, alone = copies([torch.ones(5, dtype=dtype)] * 2)
    optimizers = [fusedstep.SGD([p], lr=2.0**-13, master=kept, engine=engine)]
    optimizers += [fusedstep.SGD([alone], lr=2.0**-13, engine=engine)]
    for _ in range(steps := 4 if engine == "triton" else 16):
        p.grad = alone.grad = torch.ones(5, dtype=dtype)
        for optimizer in optimizers:
            optimizer.step()
    assert (alone == 1).all()
    assert (master(optimizers[0], p) == 1 - steps * 2.0**-13).all()


def test_trust_ratios_are_of_masters(engine):
    """A norm of parameters that are all rounded up would be another."""
    p = torch.nn.Parameter(torch.full((100,), 1.0, dtype=torch.bfloat16))
    optimizer = fusedstep.Lamb([p], lr=1e-3, master="split", max_grad_norm=None, statistics=True, engine=engine)
    p.grad = torch.ones_like(p)
    optimizer.step()
    # the first update: as long as the parameter, times the rate
    before = master(optimizer, p).clone()
    assert (p == 1).all()
    assert not (before == 1).any()
    optimizer.step()
    seen = optimizer.statistics()
    change = (master(optimizer, p) - before).norm()
    torch.testing.assert_close(change, 1e-3 * before.norm(), rtol=1e-3, atol=0)
    torch.testing.assert_close(seen.param_norm.float(), master(optimizer, p).norm(), rtol=1e-6, atol=0)


# averages


@pytest.mark.parametrize("kept", ["split", "float32"])
def test_an_average_that_is_asked_for_later_starts_at_the_masters_as_they_are(kept, engine):
    ours, a, theirs, b = twins(by_name("sgd"), [torch.randn(70).bfloat16()], engine, kept)
    for i, step in enumerate(gradients(6, [(70,)])):
        if i == 3:
            a.param_groups[0]["ema_decay"] = b.param_groups[0]["ema_decay"] = 0.9
        step_both(a, ours, b, theirs, step)
    torch.testing.assert_close(a.state[ours[0]]["ema"], b.state[theirs[0]]["ema"], rtol=1e-6, atol=1e-6)


@masters
def test_showing_averages_changes_no_master(kept, dtype, engine):
    p = torch.nn.Parameter(torch.randn(70).to(dtype))
    optimizer = fusedstep.AdamW([p], lr=1e-2, master=kept, ema_decay=0.5, engine=engine)
    for _ in range(3):
        p.grad = torch.randn(70).to(dtype)
        optimizer.step()
    before, kept_state = master(optimizer, p).clone(), copy.deepcopy(optimizer.state[p])
    with optimizer.ema_parameters():
        assert torch.equal(p, optimizer.state[p]["ema"].to(dtype))
        assert not torch.equal(p, before.to(dtype))
    assert same_bits(master(optimizer, p), before)
    assert all(torch.equal(optimizer.state[p][name], value) for name, value in kept_state.items())


# written from outside


def trained(kept, dtype, engine, count=70):
    p = torch.nn.Parameter(torch.randn(count).to(dtype))
    optimizer = fusedstep.SGD([p], lr=1e-3, master=kept, engine=engine)
    for _ in range(3):
        p.grad = torch.randn(count).to(dtype)
        optimizer.step()
    return p, optimizer


@masters
def test_a_parameter_that_was_written_counts(kept, dtype, engine):
    p, optimizer = trained(kept, dtype, engine)
    new = torch.randn(70).to(dtype)
    untouched = torch.arange(70) % 2 == 0
    before = master(optimizer, p).clone()
    with torch.no_grad():
        p.copy_(torch.where(untouched, p, new))
    p.grad = torch.zeros_like(p)
    optimizer.step()
    found = master(optimizer, p)
    assert same_bits(found[untouched], before[untouched])
    if kept == "float32":
        assert torch.equal(found[~untouched], new[~untouched].float())
    else:
        # within a half of its last bit
        torch.testing.assert_close(found[~untouched], new[~untouched].float(), rtol=2.0**-8, atol=0)
    assert torch.equal(p[~untouched], new[~untouched])


@masters
def test_zeros_that_were_written_are_zeros(kept, dtype, engine):
    p, optimizer = trained(kept, dtype, engine)
    with torch.no_grad():
        p.zero_()
        p[::2].neg_()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert (p.float().abs() < 1e-37).all()
    assert (master(optimizer, p).abs() < 1e-37).all()
    p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(p.float(), torch.full((70,), -1e-3), rtol=2.0**-8, atol=0)


@masters
def test_a_parameter_may_change_its_sign_from_outside(kept, dtype, engine):
    p, optimizer = trained(kept, dtype, engine)
    before = master(optimizer, p).clone()
    with torch.no_grad():
        p.neg_()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    expected = -before if kept != "float32" else -before.to(dtype).float()
    assert torch.equal(master(optimizer, p), expected)


# what is no number

# bits of NaNs as they are made by hosts, by GPUs, by filling memory with ones, and of such float16
NANS = {"host": -0x400000, "gpu": 0x7FFFFFFF, "low": 0x7F800001, "ones": -1, "half": -0x2000}


@pytest.mark.parametrize("nan", NANS)
@masters
def test_nan_stays_nan(kept, dtype, nan, engine):
    p = torch.nn.Parameter(torch.ones(70, dtype=dtype))
    p.grad_dtype = None
    optimizer = fusedstep.SGD([p], lr=1.0, master=kept, engine=engine)
    p.grad = torch.zeros(70)
    p.grad.view(torch.int32)[::3] = NANS[nan]
    for _ in range(2):
        optimizer.step()
        is_nan = torch.arange(70) % 3 == 0
        assert torch.equal(p.isnan(), is_nan)
        assert torch.equal(master(optimizer, p).isnan(), is_nan)
        assert (p[~is_nan] == 1).all()
        p.grad = torch.zeros(70)


@masters
def test_infinities_stay_infinite(kept, dtype, engine):
    p = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = fusedstep.SGD([p], lr=1.0, master=kept, engine=engine)
    p.grad = torch.tensor([INF, -INF, 0.0]).to(dtype)
    optimizer.step()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert p.tolist() == [-INF, INF, 1]
    assert master(optimizer, p).tolist() == [-INF, INF, 1]


def test_the_largest_numbers_have_masters(engine):
    """Rounded to bfloat16 they are infinite."""
    largest = torch.finfo(torch.float32).max
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    p.grad_dtype = None
    optimizer = fusedstep.SGD([p], lr=1.0, master="split", engine=engine)
    p.grad = torch.tensor([-largest, largest])
    optimizer.step()
    assert p.tolist() == [INF, -INF]
    p.grad = torch.tensor([largest / 2, -largest / 2])
    optimizer.step()
    assert master(optimizer, p).tolist() == [largest / 2, -largest / 2]


@pytest.mark.parametrize("kept", ["split", "split8"])
def test_masters_below_the_smallest_normal_number_are_kept(kept, engine):
    x = torch.arange(256, 8_000_000, 99_871).int().view(torch.float32)
    p = torch.nn.Parameter(torch.zeros(x.numel(), dtype=torch.bfloat16))
    p.grad_dtype, p.grad = None, -x
    optimizer = fusedstep.SGD([p], lr=1.0, master=kept, engine=engine)
    optimizer.step()
    expected = x if kept == "split" else ((x.view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)
    assert same_bits(master(optimizer, p), expected)
    assert same_bits(p.detach(), formats.split(expected))


# who has one


def test_parameters_of_thirty_two_bits_are_their_own_masters(engine):
    params = copies([torch.ones(3), torch.ones(3, dtype=torch.float64), torch.ones(3).bfloat16()])
    optimizer = fusedstep.SGD(params, lr=0.5, master="split", engine=engine)
    set_grads(params, [torch.ones_like(p) for p in params])
    optimizer.step()
    assert [{*optimizer.state.get(p, {})} for p in params] == [set(), set(), {"master_rest"}]


def test_a_group_may_have_its_own_or_none(engine):
    params = copies([torch.ones(3).bfloat16()] * 3)
    groups = [{"params": params[:1]}, {"params": params[1:2], "master": "float32"}]
    groups += [{"params": params[2:], "master": None}]
    optimizer = fusedstep.SGD(groups, lr=0.5, master="split8", engine=engine)
    set_grads(params, [torch.ones_like(p) for p in params])
    optimizer.step()
    found = [{name: t.dtype for name, t in optimizer.state.get(p, {}).items()} for p in params]
    assert found == [{"master_rest": torch.int8}, {"master": torch.float32}, {}]


@pytest.mark.parametrize("given", ["bfloat16", "split16", True, torch.float32], ids=str)
def test_what_is_no_master_is_refused(given):
    params = copies([torch.ones(1)] * 2)
    with pytest.raises(ValueError, match="Invalid master"):
        fusedstep.SGD(params[:1], master=given)
    with pytest.raises(ValueError, match="Invalid master"):
        fusedstep.SGD(params[:1]).add_param_group({"params": params[1:], "master": given})


@pytest.mark.parametrize("kept", ["split", "split8"])
def test_float16_cannot_be_split(kept, engine):
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    p.grad = torch.ones_like(p)
    optimizer = fusedstep.SGD([p], master=kept, engine=engine)
    with pytest.raises(RuntimeError, match='use master="float32"'):
        optimizer.step()
    assert (p == 1).all()
    assert not optimizer.state
