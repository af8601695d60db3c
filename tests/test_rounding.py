"""rounding="stochastic": up or down at random, so that what is lost at a step is not lost on average."""

import itertools

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fusedstep
from fusedstep._engines.foreach import lists
from tests import formats, ranks
from tests.cases import KINDS, by_name, name_of
from tests.pairs import copies, same_bits, set_grads, whole
from tests.test_layouts import LAYOUTS

BITS16 = [torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", BITS16, ids=str)
kinds = pytest.mark.parametrize("case", KINDS, ids=name_of)
SHAPES = [(5, 30), (3,), (), (70,)]


def rounded(x, dtype, engine=None, seed=0, steps=1):
    """float32 numbers as parameters of 16 bits that become just these, at the last of so many steps."""
    x = torch.as_tensor(x)
    p = torch.nn.Parameter(torch.zeros(x.shape, dtype=dtype))
    p.grad_dtype = None
    optimizer = fusedstep.SGD([p], lr=1.0, rounding="stochastic", seed=seed, engine=engine)
    for i in range(steps):
        p.grad = -x if i == steps - 1 else torch.zeros_like(x)
        optimizer.step()
    return p.detach()


def trained(case, start, grads, engine="cpu", **options):
    options = {"rounding": "stochastic", "engine": engine, **case.options, **options}
    params = copies(start)
    optimizer = case.ours(params, **options)
    run(optimizer, params, grads)
    return params, optimizer


def run(optimizer, params, grads):
    for step in grads:
        set_grads(params, [g.to(p.device) for p, g in zip(params, step, strict=True)])
        optimizer.step()


def gradients(steps, shapes=SHAPES, dtype=torch.bfloat16, seed=1):
    random = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=random).to(dtype) for shape in shapes] for _ in range(steps)]


def starts(shapes=SHAPES, dtype=torch.bfloat16):
    return [torch.randn(shape).to(dtype) for shape in shapes]


def assert_same(first, second):
    (ours, a), (theirs, b) = first, second
    for p, q in zip(ours, theirs, strict=True):
        assert same_bits(p.detach(), q.detach().cpu())
        assert a.state[p].keys() == b.state[q].keys()
        assert all(torch.equal(value, b.state[q][name].cpu()) for name, value in a.state[p].items())


# the stream


def test_philox_is_the_one_of_its_paper():
    """Known answers for 7 and 10 rounds, from Random123's kat_vectors."""
    hexes = lambda words: [f"{int(word):08x}" for word in words]
    ones, pi = 0xFFFFFFFF, [(0x243F6A88, 0x85A308D3), 0x13198A2E]
    assert hexes(formats.philox((0, 0), 0, 10)) == ["ff1dae59", "6cd10df2"]
    assert hexes(formats.philox((ones, ones), ones, 10)) == ["2c3f628b", "ab4fd7ad"]
    assert hexes(formats.philox(*pi, 10)) == ["dd7ce038", "f62a4c12"]
    assert hexes(formats.philox((0, 0), 0)) == ["257a3673", "cd26be2a"]
    assert hexes(formats.philox(*pi)) == ["bedbbe6b", "e4c770b3"]


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3])
def test_bits_are_of_seed_position_step_and_element(seed, engine):
    x = torch.randn(5, 41)
    found = rounded(x, torch.bfloat16, engine, seed, steps=3)
    expected = formats.bfloat16_by(x.numpy(), formats.drawn(seed, 0, 0, 3, x.shape))
    assert same_bits(found, expected)


def test_every_parameter_has_bits_of_its_own(engine):
    x, params = torch.randn(70), copies([torch.zeros(70).bfloat16()] * 3)
    for p in params:
        p.grad_dtype = None
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = fusedstep.SGD(groups, lr=1.0, rounding="stochastic", engine=engine)
    # of one without a gradient, too
    set_grads(params, [-x, None, -x])
    optimizer.step()
    for i in (0, 2):
        expected = formats.bfloat16_by(x.numpy(), formats.drawn(0, i, 0, 1, x.shape))
        assert same_bits(params[i].detach(), expected)


def test_every_state_has_bits_of_its_own(engine):
    """Of its slot: the parameter's is the first."""
    case = by_name("adamw").with_options(betas=(0.5, 0.75), state_dtype=torch.bfloat16)
    g = torch.randn(70).bfloat16().float()
    (p,), optimizer = trained(case, [torch.zeros(70)], [[g]], engine)
    m, v = (np.float32(0.5) * g.numpy(), np.float32(0.25) * g.numpy() * g.numpy())
    for slot, (name, x) in enumerate((("exp_avg", m), ("exp_avg_sq", v)), 1):
        expected = formats.bfloat16_by(x, formats.drawn(0, 0, slot, 1, x.shape))
        assert same_bits(optimizer.state[p][name], expected), name


def test_codes_are_drawn_too(engine):
    case = by_name("adamw").with_options(betas=(0.5, 0.75))
    g = torch.randn(5, 40).bfloat16().float()
    p = torch.nn.Parameter(torch.zeros(5, 40))
    optimizer = case.ours(
        [{"params": [p], "state_dtype": "int8"}], rounding="stochastic", engine=engine, **case.options
    )
    run(optimizer, [p], [[g]])
    m, v = (np.float32(0.5) * g.numpy(), np.float32(0.25) * g.numpy() * g.numpy())
    for slot, (name, x) in enumerate((("exp_avg", m), ("exp_avg_sq", v)), 1):
        codes, _ = formats.encoded(x, name == "exp_avg", formats.drawn(0, 0, slot, 1, x.shape))
        assert (optimizer.state[p][f"{name}_codes"].numpy() == codes).all(), name


# on average


@pytest.mark.parametrize("engine", ["cpu", "torch", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("dtype", "x"),
    [
        (torch.bfloat16, 1.001),
        (torch.bfloat16, -3.1415),
        (torch.bfloat16, 1.7e-39),
        (torch.float16, 1.0001),
        (torch.float16, -1000.2),
        (torch.float16, 6.2e-5),
        # subnormal numbers, and less than the smallest
        (torch.float16, 6.05e-5),
        (torch.float16, -1.3e-6),
        (torch.float16, 9e-8),
        (torch.float16, 1.3e-8),
        (torch.float16, -1e-10),
    ],
)
def test_a_million_numbers_have_the_mean_that_they_were_rounded_from(dtype, x, engine):
    count, x = 1_000_000, torch.tensor(x)
    p = torch.nn.Parameter(torch.zeros(count, dtype=dtype, device="cuda" if engine == "triton" else "cpu"))
    p.grad_dtype = None
    p.grad = (-x).expand(count).contiguous().to(p.device)
    fusedstep.SGD([p], lr=1.0, rounding="stochastic", engine=engine).step()
    found = p.detach().double().cpu()
    low, high = found.min(), found.max()
    assert low < x.double() < high
    assert found.unique().numel() == 2
    # neighbours
    assert torch.nextafter(low.to(dtype), high.to(dtype)) == high.to(dtype)
    part = (x.double() - low) / (high - low)
    standard_error = (high - low) * (part * (1 - part) / count).sqrt()
    assert (found.mean() - x.double()).abs() < 3 * standard_error + 1e-6 * (high - low)


@dtypes
def test_what_needs_no_rounding_is_kept(dtype, engine):
    x = torch.tensor(
        [
            0.0,
            1.0,
            -2.5,
            2.0**-14,
            float("inf"),
            float("-inf"),
            float("nan"),
            65504 if dtype == torch.float16 else 3e38,
        ]
    )
    x = x.to(dtype).float()
    torch.testing.assert_close(rounded(x, dtype, engine).float(), x, rtol=0, atol=0, equal_nan=True)


@dtypes
def test_training_goes_on_where_the_nearest_number_is_always_the_same(dtype, engine):
    steps, rate = (8, 2.0**-11) if engine == "triton" else (200, 2.0**-13)
    moved = {}
    for rounding in ("nearest", "stochastic"):
        p = torch.nn.Parameter(torch.full((1000,), 1.25, dtype=dtype))
        optimizer = fusedstep.SGD(
            [p], lr=rate if dtype == torch.bfloat16 else rate / 8, rounding=rounding, engine=engine
        )
        for _ in range(steps):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved[rounding] = (1.25 - p.detach().float()).mean() / (steps * optimizer.param_groups[0]["lr"])
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(1, rel=0.2)


# the same everywhere


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, "int8"], ids=str)
def test_engines_agree_by_bits(state_dtype, engine):
    """Where they have the same numbers to round: without roundings on the way there."""
    random = torch.Generator().manual_seed(0)
    draw = lambda shape: (torch.randint(-8, 9, shape, generator=random) / 8).bfloat16()
    grads = [[draw(shape) for shape in SHAPES] for _ in range(2)]
    results = []
    for each in ("cpu", engine):
        params = copies([torch.zeros(shape).bfloat16() for shape in SHAPES])
        group = {"params": params, "state_dtype": state_dtype}
        optimizer = fusedstep.SGD([group], lr=2.0**-9, momentum=0.5, rounding="stochastic", engine=each)
        run(optimizer, params, grads)
        results.append((params, optimizer))
    assert_same(*results)


@pytest.mark.gpu
@dtypes
@kinds
def test_the_gpu_gives_the_bits_of_the_cpu(case, dtype):
    case, shapes = case.unlimited(), (*SHAPES, (300, 100))
    if case.sums:
        pytest.skip("sums have another order")
    start, grads = starts(shapes, dtype), gradients(5, shapes, dtype)
    ours = trained(case, start, grads)
    assert_same(ours, trained(case, [t.cuda() for t in start], grads, "triton"))


@kinds
def test_the_number_of_threads_changes_no_bit(case):
    shapes = [(1100, 130), (7,)]
    start, grads, results, before = starts(shapes), gradients(3, shapes), [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(trained(case, start, grads))
    finally:
        torch.set_num_threads(before)
    assert_same(*results)


def test_pieces_of_a_tensor_have_the_bits_of_the_whole(monkeypatch):
    shapes = [(40, 100)]
    start, grads, case = starts(shapes), gradients(2, shapes), by_name("sgd-momentum")
    expected = trained(case, start, grads, "torch")
    monkeypatch.setattr(lists, "HOST_LIST_BYTES", 4 * 640)
    assert_same(expected, trained(case, start, grads, "torch"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_elements_are_counted_row_by_row_however_they_lie(layout, engine):
    shape = (3, 4, 5, 2)
    param = LAYOUTS[layout](shape)
    view = torch.zeros(param.untyped_storage().nbytes() // 4, dtype=torch.bfloat16)
    p = torch.nn.Parameter(view.as_strided(param.shape, param.stride(), param.storage_offset()))
    p.grad_dtype, p.grad = None, -param
    fusedstep.SGD([p], lr=1.0, rounding="stochastic", engine=engine).step()
    expected = formats.bfloat16_by(param.contiguous().numpy(), formats.drawn(0, 0, 0, 1, shape))
    assert same_bits(p.detach(), expected)


@kinds
def test_training_resumed_halfway_draws_what_training_without_a_stop_does(case, engine, tmp_path):
    if engine == "triton" and case.name not in ("sgd", "adamw"):
        pytest.skip("the interpreter takes long")
    shapes = SHAPES[1:2] if engine == "triton" else SHAPES
    start, grads = starts(shapes), gradients(6, shapes)
    params, optimizer = trained(case, start, grads[:3], engine)
    assert all(optimizer.state[p]["step"] == 3 for p in params)
    torch.save([[p.detach() for p in params], optimizer.state_dict()], tmp_path / "saved")
    run(optimizer, params, grads[3:])
    saved, state = torch.load(tmp_path / "saved", weights_only=True)
    resumed, other = trained(case, saved, [], engine)
    other.load_state_dict(state)
    run(other, resumed, grads[3:])
    assert_same((params, optimizer), (resumed, other))


@pytest.mark.parametrize("given", ["up", None, True], ids=str)
def test_what_is_no_rounding_is_refused(given):
    with pytest.raises(ValueError, match="Invalid rounding"):
        fusedstep.SGD(copies([torch.ones(1)]), rounding=given)


@pytest.mark.parametrize("given", [-1, 2**63, 0.5, True, None], ids=str)
def test_what_is_no_seed_is_refused(given):
    with pytest.raises(ValueError, match="Invalid seed"):
        fusedstep.SGD(copies([torch.ones(1)]), seed=given)


# over ranks

# even, uneven, less rows than ranks; and rows that 8 bits have blocks of
PARTS = [(4, 6), (5, 64), (1, 7), (3,), (65, 64)]


def sharded(case, placement):
    mesh = ranks.mesh(2)
    place = lambda t: distribute_tensor(t.clone(), mesh, [placement], src_data_rank=None)
    start, grads = starts(PARTS), gradients(3, PARTS)
    params = [torch.nn.Parameter(place(t)) for t in start]
    optimizer = case.ours(params, rounding="stochastic", seed=5, **case.options)
    run(optimizer, params, [[*map(place, step)] for step in grads])
    tensors = [t for p in params for t in (p, *optimizer.state[p].values())]
    found = [whole(t).reshape(-1).double().tolist() for t in tensors]
    ours, one = trained(case, start, grads, None, seed=5)
    tensors = [t for p in ours for t in (p, *one.state[p].values())]
    return found == [whole(t).reshape(-1).double().tolist() for t in tensors]


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize("state_dtype", [None, "int8"])
@pytest.mark.parametrize("name", ["sgd", "sgd-momentum", "adamw", "adam-amsgrad"])
def test_rows_on_several_ranks_are_drawn_as_the_whole_tensor_is(two, name, state_dtype, placement):
    case = by_name(name).with_options(state_dtype=state_dtype)
    assert two.run(sharded, case, placement) == [True] * 2


def refused(placements, sizes):
    mesh = ranks.mesh(*sizes)
    place = lambda t: distribute_tensor(t, mesh, placements)
    p = torch.nn.Parameter(place(torch.ones(8, 8).bfloat16()))
    p.grad = place(torch.ones(8, 8).bfloat16())
    optimizer = fusedstep.SGD([p], rounding="stochastic")
    with pytest.raises(RuntimeError, match=r'FSDP2, which shards along dimension 0, or rounding="nearest"'):
        optimizer.step()
    assert (whole(p) == 1).all()
    assert not optimizer.state
    # nothing of it is rounded at random
    q = torch.nn.Parameter(place(torch.ones(8, 8)))
    q.grad = place(torch.ones(8, 8))
    fusedstep.SGD([q], rounding="stochastic").step()


def test_columns_on_several_ranks_are_refused(two):
    two.run(refused, [Shard(1)], (2,))


def test_a_count_that_is_all_a_rule_keeps_comes_back_where_states_are_gone():
    p = torch.nn.Parameter(torch.randn(50).bfloat16())
    optimizer = fusedstep.SGD([p], lr=0.01, rounding="stochastic")
    for i in range(4):
        p.grad = torch.randn_like(p)
        if i == 2:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        optimizer.step()
        assert optimizer.state[p]["step"].item() == i % 2 + 1


def test_a_first_step_is_counted_once_where_only_an_average_is_kept():
    p = torch.nn.Parameter(torch.randn(50).bfloat16())
    optimizer = fusedstep.SGD([p], lr=0.01, rounding="stochastic", ema_decay=0.9)
    for i in range(3):
        p.grad = torch.randn_like(p)
        optimizer.step()
        assert optimizer.state[p]["step"].item() == i + 1


def test_seeds_of_equal_halves_differ():
    x = torch.randn(1000)
    seeds = [0, 1, 2**32, 2**32 + 1, 5 << 32, (7 << 32) | 7, 2**63 - 1]
    found = [rounded(x, torch.bfloat16, "cpu", seed) for seed in seeds]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(found, 2))
