"""States of 8 bits: codes by blocks of 64 elements, that share the exponent of a scale."""

import numpy as np
import pytest
import torch

import fusedstep
from tests import formats
from tests.cases import CASES, KINDS, by_name, name_of
from tests.conftest import HAS_TRITON
from tests.pairs import copies, set_grads
from tests.test_layouts import LAYOUTS

NAN, INF = float("nan"), float("inf")
STATEFUL = [case for case in KINDS if case.rule.states]
cases = pytest.mark.parametrize("case", [case for case in CASES if case.rule.states], ids=name_of)
kinds = pytest.mark.parametrize("case", STATEFUL, ids=name_of)
# of states: whether numbers below zero are among them
SIGNS = {"exp_avg": True, "exp_avg_sq": False}
signs = pytest.mark.parametrize("name", SIGNS)
# a whole number of blocks by row, by tensor, and neither; less than a block
SHAPES = [(2, 64), (4, 48), (5, 30), (7,), ()]
ENGINES = ["torch", "triton"] if HAS_TRITON else ["torch"]
both_engines = pytest.mark.parametrize(
    ("engine", "device"),
    [("torch", "cpu"), ("triton", "cpu"), pytest.param("triton", "cuda", marks=pytest.mark.gpu)],
)


def available(engine, device="cpu"):
    if engine == "triton" and not HAS_TRITON:
        pytest.skip("there is no Triton for this platform")
    if engine == "triton" and device == "cpu" and torch.cuda.is_available():
        pytest.skip("compiled, the triton engine takes no CPU tensors")


def made(case, start, engine=None, state_dtype="int8", **options):
    """In a group of their own, so that small ones have 8 bits, too."""
    params = copies(start)
    group = {"params": params, "state_dtype": state_dtype}
    return params, case.ours([group], engine=engine, **{**case.options, **options})


def gradients(steps, shapes=SHAPES, seed=1):
    """Of very different sizes, also within a block."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda shape: torch.randn(shape, generator=random)
    return [[draw(shape) * 10 ** draw(shape) for shape in shapes] for _ in range(steps)]


def run(optimizer, params, grads):
    for step in grads:
        set_grads(params, [g.to(p.device) for p, g in zip(params, step, strict=True)])
        optimizer.step()


def of(optimizer, p, name):
    """Codes and scales of a state."""
    return optimizer.state[p][f"{name}_codes"], optimizer.state[p][f"{name}_scales"]


def stored(x, name):
    """A parameter with this as a state, coded as a checkpoint of float32 is loaded."""
    p = torch.nn.Parameter(torch.zeros_like(x))
    optimizer = fusedstep.AdamW([{"params": [p], "state_dtype": "int8"}])
    state = {"step": torch.tensor(1.0), **dict.fromkeys(SIGNS, torch.zeros_like(x)), name: x}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: state}})
    return p, optimizer


def numbers(optimizer, name, key=0):
    return optimizer.expanded_state_dict()["state"][key][name]


def spread(size, name, decades=8, seed=0):
    """Numbers from far below their block's largest to that, and blocks of all sizes."""
    random = np.random.default_rng(seed)
    x = 10.0 ** random.uniform(-decades, 0, size) * 10.0 ** random.uniform(-20, 20, -(-size // 64)).repeat(64)[:size]
    x[random.random(size) < 0.05] = 0
    return torch.from_numpy((x * random.choice([-1, 1], size) if SIGNS[name] else x).astype(np.float32))


# codes


@signs
def test_codes_are_those_of_the_description(name):
    x = spread(64 * 500 + 17, name)
    p, optimizer = stored(x, name)
    codes, scales = of(optimizer, p, name)
    expected = formats.encoded(x.numpy(), SIGNS[name])
    assert codes.dtype == (torch.int8 if SIGNS[name] else torch.uint8)
    assert scales.dtype == torch.uint8
    assert (codes.numpy() == expected[0]).all()
    assert (scales.numpy() == expected[1]).all()


@signs
def test_numbers_are_those_that_codes_stand_for(name):
    codes = torch.arange(-127, 128).to(torch.int8) if SIGNS[name] else torch.arange(1, 256).to(torch.uint8)
    p, optimizer = stored(torch.ones(255), name)
    for exponent in (40, 127, 200, 253):
        optimizer.state[p][f"{name}_codes"] = codes
        optimizer.state[p][f"{name}_scales"] = torch.full((4,), exponent, dtype=torch.uint8)
        found = numbers(optimizer, name).numpy()
        assert (found == formats.decoded(codes.numpy(), np.full(4, exponent), SIGNS[name])).all()
        assert (np.diff(found) > 0).all()
        assert np.isfinite(found).all()


def test_an_error_is_at_most_the_distance_of_codes():
    """1/64 of the root of scale and number if signed, 1/32 of the number where that is near the scale if not."""
    for name, signed in SIGNS.items():
        x = spread(64 * 2000, name)
        p, optimizer = stored(x, name)
        scale = 2.0 ** (of(optimizer, p, name)[1].double() - 127).repeat_interleave(64)
        error, size = (numbers(optimizer, name).double() - x.double()).abs(), x.double().abs()
        part = size / scale
        # scales of blocks that are too small for codes are not beside their largest
        lowest = 2.0 ** ((20 if signed else 40) - 127)
        assert ((part.view(-1, 64).amax(1) >= 0.49) | (scale[::64] == lowest)).all()
        assert (part <= 63 / 64).all()
        if signed:
            bound = scale * ((2 * part).sqrt() / 64 + 2.0**-14)
        else:
            bound = size * part.clamp(min=1e-30) ** -0.25 / 32 + 2.0**-28 * scale
        assert (error <= bound).all()


@signs
def test_what_is_read_is_stored_again_as_it_was(name):
    """Unless rounding takes the largest of a block below half of its scale, which is then another."""
    p, optimizer = stored(spread(64 * 500, name), name)
    again, other = stored(numbers(optimizer, name), name)
    (codes, scales), (new, others) = of(optimizer, p, name), of(other, again, name)
    stays = scales == others
    assert stays.float().mean() > 0.9
    assert torch.equal(codes.view(-1, 64)[stays], new.view(-1, 64)[stays])


def test_roundings_cancel_out():
    """Between two codes a hash decides, so that the mean of many numbers is kept."""
    for name, signed in SIGNS.items():
        x = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0)) * 0.9 + 0.05
        x = torch.where(torch.arange(x.numel()) % 2 == 0, -x, x) if signed else x
        p, optimizer = stored(x, name)
        error = (numbers(optimizer, name) - x).double()
        width = 1 / 64 if signed else 1 / 64
        # codes that are rounded down at 3 parts of 4096 too often
        assert abs(error.mean()) < width * (3 / 4096 + 3 * 0.5 / 1000)


def test_a_second_moment_is_never_far_below_its_scale():
    x = torch.zeros(128)
    x[0] = 1.0
    p, optimizer = stored(x, "exp_avg_sq")
    found = numbers(optimizer, "exp_avg_sq")
    assert found[0] == pytest.approx(1.0, rel=1 / 32)
    assert (found[1:64] == 2.0**-31).all()
    # without any that is larger: nothing beside an eps
    assert (found[64:] > 0).all()
    assert (found[64:].sqrt() < 1e-15).all()


@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF, 1e38])
@signs
def test_a_block_with_what_has_no_code_reads_as_nan(name, bad):
    x = torch.full((3, 64), 0.5)
    x[1, 7] = abs(bad) if not SIGNS[name] else bad
    p, optimizer = stored(x, name)
    found = numbers(optimizer, name)
    assert found[1].isnan().all()
    assert (found[[0, 2]] - 0.5).abs().max() < 1 / 64


# steps


@pytest.mark.parametrize("engine", ["cpu", "torch"])
@cases
def test_a_step_is_that_of_float32_on_the_numbers_that_were_read(case, engine):
    """What it leaves is coded: parameters have the same bits."""
    start = [torch.randn(shape) for shape in SHAPES]
    ours, optimizer = made(case, start, engine)
    for i, step in enumerate(gradients(4)):
        theirs, plain = made(case, [p.detach() for p in ours], engine, state_dtype=torch.float32)
        plain.unsaved_steps = {q: torch.tensor(float(i)) for q in theirs}
        plain.load_state_dict(optimizer.expanded_state_dict())
        run(optimizer, ours, [step])
        run(plain, theirs, [step])
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(p, q)
            for letter, name in case.rule.states:
                codes, scales = of(optimizer, p, name)
                expected = formats.encoded(plain.state[q][name].numpy(), letter not in case.rule.nonnegative)
                assert (codes.numpy() == expected[0]).all()
                assert (scales.numpy().reshape(-1) == expected[1]).all()


@both_engines
@kinds
def test_engines_agree_by_bits(case, engine, device):
    available(engine, device)
    # norms are added up in another order
    case = case.unlimited()
    shapes, steps = (SHAPES, 3) if device == "cuda" or engine == "torch" else (SHAPES[2:4], 2)
    start, grads = [torch.randn(shape) for shape in shapes], gradients(steps, shapes)
    ours, a = made(case, start, "cpu")
    theirs, b = made(case, [t.to(device) for t in start], engine)
    run(a, ours, grads)
    run(b, theirs, grads)
    for p, q in zip(ours, theirs, strict=True):
        if case.sums:
            torch.testing.assert_close(p, q.cpu(), rtol=1e-6, atol=1e-6)
            continue
        assert torch.equal(p, q.cpu())
        assert all(torch.equal(value, b.state[q][name].cpu()) for name, value in a.state[p].items())


@pytest.mark.parametrize("layout", LAYOUTS)
@kinds
def test_tensors_may_lie_anyhow(case, layout, engine):
    if engine == "triton" and case.name not in ("adamw", "lamb"):
        pytest.skip("the interpreter takes long")
    shape = (3, 4, 5, 2)
    param, grads = LAYOUTS[layout](shape), [LAYOUTS[layout](shape) for _ in range(2)]
    p, q = torch.nn.Parameter(param), torch.nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format))
    assert p.stride() == param.stride()
    optimizers = [case.ours([{"params": [t], "state_dtype": "int8"}], engine=engine, **case.options) for t in (p, q)]
    for g in grads:
        p.grad, q.grad = g, g.clone(memory_format=torch.contiguous_format)
        for optimizer in optimizers:
            optimizer.step()
    a, b = (optimizer.state[t] for optimizer, t in zip(optimizers, (p, q), strict=True))
    assert torch.equal(p, q)
    for name, value in b.items():
        # blocks are of elements row by row, whatever the strides are
        assert torch.equal(a[name], value), name


@pytest.mark.parametrize("shape", [(64, 64), (4, 16, 64), (128, 96), (4097,), (65, 63)], ids=str)
def test_scales_have_a_row_for_each_of_the_parameter_if_blocks_fit(shape, engine):
    p = torch.nn.Parameter(torch.randn(shape))
    p.grad = torch.randn(shape)
    optimizer = fusedstep.AdamW([p], state_dtype="int8", engine=engine)
    optimizer.step()
    row = p.numel() // shape[0]
    expected = (shape[0], row // 64) if row % 64 == 0 else (-(-p.numel() // 64),)
    for name in SIGNS:
        codes, scales = of(optimizer, p, name)
        assert codes.shape == p.shape
        assert scales.shape == expected


def test_a_small_second_moment_beside_a_large_one_does_not_explode_an_update(engine):
    """Every gradient is the same at all steps, so an update is a learning rate."""
    sizes = 10 ** torch.linspace(-9, 3, 63)
    for place in range(0, 63, 21 if engine == "triton" else 3):
        grad = torch.cat((torch.tensor([1e4]), sizes.roll(place)))
        (p,), optimizer = made(by_name("adamw"), [torch.zeros(64)], engine, weight_decay=0, lr=1.0, eps=1e-12)
        before = p.detach().clone()
        for _ in range(3 if engine == "triton" else 40):
            run(optimizer, [p], [[grad]])
            assert (p - before).abs().max() < 4
            before = p.detach().clone()


def test_means_of_second_moments_are_kept_over_many_steps():
    """Its changes are far below the distance of codes: rounded to nearest they would all be lost."""
    random, shape = torch.Generator().manual_seed(0), (64, 64)
    ours, a = made(by_name("adamw"), [torch.zeros(shape)], "cpu")
    theirs, b = made(by_name("adamw"), [torch.zeros(shape)], "cpu", state_dtype=torch.float32)
    for i in range(1500):
        grads = [[torch.randn(shape, generator=random) * (1 if i < 700 else 0.5)]]
        run(a, ours, grads)
        run(b, theirs, grads)
    expected, found = b.state[theirs[0]]["exp_avg_sq"], numbers(a, "exp_avg_sq")
    assert found.mean() == pytest.approx(expected.mean().item(), rel=0.05)
    assert (ours[0] - theirs[0]).abs().mean() < 0.1 * theirs[0].abs().mean()


# which tensors, which states


def test_small_tensors_stay_in_float32(engine):
    small, large = (torch.nn.Parameter(torch.ones(n)) for n in (4095, 4096))
    asked = torch.nn.Parameter(torch.ones(3))
    optimizer = fusedstep.AdamW([{"params": [small, large]}, {"params": [asked], "state_dtype": "int8"}], state_dtype="int8")
    set_grads([small, large, asked], [torch.ones(4095), torch.ones(4096), torch.ones(3)])
    optimizer.step()
    assert {*optimizer.state[small]} == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[small]["exp_avg"].dtype == torch.float32
    codes = {"step", "exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales"}
    assert {*optimizer.state[large]} == {*optimizer.state[asked]} == codes


@pytest.mark.parametrize("given", ["int8", "torch.int8", torch.int8])
def test_a_dtype_may_be_given_by_its_name(given):
    assert fusedstep.AdamW([torch.nn.Parameter(torch.ones(1))], state_dtype=given).state_dtype is torch.int8


def test_states_may_have_dtypes_of_their_own(engine):
    given = {"exp_avg": torch.bfloat16, "exp_avg_sq": "int8"}
    params, optimizer = made(by_name("adam-amsgrad"), [torch.ones(70)], engine, given)
    run(optimizer, params, gradients(2, [(70,)]))
    found = {name: value.dtype for name, value in optimizer.state[params[0]].items()}
    assert found == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq_codes": torch.uint8,
        "exp_avg_sq_scales": torch.uint8,
        # as the parameter
        "max_exp_avg_sq": torch.float32,
    }


def test_what_was_understood_is_shown():
    p = torch.nn.Parameter(torch.ones(1))
    assert fusedstep.AdamW([p]).state_dtype is None
    assert fusedstep.AdamW([p], state_dtype={"exp_avg": "int8"}).state_dtype == {"exp_avg": torch.int8}
    optimizer = fusedstep.AdamW([{"params": [p], "state_dtype": "bfloat16"}])
    assert optimizer.param_groups[0]["state_dtype"] is torch.bfloat16


@pytest.mark.parametrize("given", [{"momentum": "int8"}, {"exp_avg": "int4"}, "int16", torch.uint8, 8, {"ema": "int8"}], ids=str)
def test_what_is_no_state_dtype_is_refused(given):
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    with pytest.raises(ValueError, match="Invalid state_dtype"):
        fusedstep.AdamW(params[:1], state_dtype=given)
    optimizer = fusedstep.AdamW(params[:1])
    with pytest.raises(ValueError, match="Invalid state_dtype"):
        optimizer.add_param_group({"params": params[1:], "state_dtype": given})
    assert len(optimizer.param_groups) == 1


def test_a_group_may_have_its_own_or_none(engine):
    params = [torch.nn.Parameter(torch.ones(4096)) for _ in range(3)]
    groups = [{"params": params[:1]}, {"params": params[1:2], "state_dtype": torch.float16}]
    groups += [{"params": params[2:], "state_dtype": None}]
    optimizer = fusedstep.SGD(groups, momentum=0.9, state_dtype="int8", engine=engine)
    set_grads(params, [torch.ones(4096)] * 3)
    optimizer.step()
    names = [{name: t.dtype for name, t in optimizer.state[p].items()} for p in params]
    assert names[0] == {"momentum_buffer_codes": torch.int8, "momentum_buffer_scales": torch.uint8}
    assert names[1] == {"momentum_buffer": torch.float16}
    assert names[2] == {"momentum_buffer": torch.float32}
