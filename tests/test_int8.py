"""States of 8 bits: codes by blocks of 64 elements, that share the exponent of a scale."""

import numpy as np
import pytest
import torch

import fusedstep
from tests import formats
from tests.cases import CASES, KINDS, by_name, name_of
from tests.numerics import assert_alike
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
    x = (
        10.0 ** random.uniform(-decades, 0, size)
        * 10.0 ** random.uniform(-20, 20, -(-size // 64)).repeat(64)[:size]
    )
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
    """Signed, 1/64 of the root of number and scale; if not, 1/32 of the number where that is near its scale."""
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
        _, optimizer = stored(x, name)
        error = (numbers(optimizer, name) - x).double()
        # of 1/64, the largest distance of codes, at most half is the standard deviation
        assert abs(error.mean()) < 3 * 0.5 / 1000 / 64


def test_a_second_moment_is_never_far_below_its_scale():
    x = torch.zeros(128)
    x[0] = 1.0
    _, optimizer = stored(x, "exp_avg_sq")
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
    _, optimizer = stored(x, name)
    found = numbers(optimizer, name)
    assert found[1].isnan().all()
    assert (found[[0, 2]] - 0.5).abs().max() < 1 / 64


# steps


def follow(case, engine, shapes, grads, **options):
    """Steps, each beside one of float32 from the numbers that are stored: what it leaves is coded."""
    ours, optimizer = made(case, [torch.randn(shape) for shape in shapes], engine, **options)
    for i, step in enumerate(grads):
        theirs, plain = made(case, [p.detach() for p in ours], engine, state_dtype=torch.float32, **options)
        plain.unsaved_steps = {q: torch.tensor(float(i)) for q in theirs}
        plain.load_state_dict(optimizer.expanded_state_dict())
        run(optimizer, ours, [step])
        run(plain, theirs, [step])
        for p, q in zip(ours, theirs, strict=True):
            assert_alike(case, p.detach(), q.detach())
            for letter, name in case.rule.states:
                codes, scales = of(optimizer, p, name)
                signed = letter not in case.rule.nonnegative
                expected = formats.encoded(plain.state[q][name].numpy(), signed, step=i + 1)
                assert (codes.numpy() == expected[0]).all()
                assert (scales.numpy().reshape(-1) == expected[1]).all()
        yield optimizer, plain, ours, theirs


@cases
def test_a_step_is_that_of_float32_on_the_numbers_that_were_read(case, engine):
    if engine == "triton" and case not in KINDS:
        pytest.skip("the interpreter takes long")
    shapes, steps = (SHAPES[2:4], 2) if engine == "triton" else (SHAPES, 4)
    assert len([*follow(case, engine, shapes, gradients(steps, shapes))]) == steps


def test_what_has_no_gradients_any_more_fades_as_in_float32():
    random = torch.Generator().manual_seed(0)
    optimizers = []
    for state_dtype in ("int8", torch.float32):
        p = torch.nn.Parameter(torch.zeros(128, 64))
        optimizers.append(fusedstep.AdamW([p], lr=1e-3, weight_decay=0, state_dtype=state_dtype))
    for step in range(1500):
        g = torch.randn(128, 64, generator=random)
        g[:, :32] *= step < 50
        for optimizer in optimizers:
            optimizer.param_groups[0]["params"][0].grad = g
            optimizer.step()
    (m, v), (_, w) = ([numbers(o, name)[:, :32] for name in SIGNS] for o in optimizers)
    # a number that is the same at every step must not be rounded to the same side for ever
    assert m.abs().max() == 0
    assert abs(v.mean() / w.mean() - 1) < 0.1


# with which moments of short numbers have no roundings: not all engines multiply and add in one
EXACT = {"betas": (0.5, 0.75), "b1": 0.5, "b2": 0.75, "momentum": 0.5, "weight_decay": 0.0}


@kinds
def test_engines_agree_by_bits_of_codes(case, engine):
    case = case.unlimited()
    case = case.with_options(**{name: value for name, value in EXACT.items() if name in case.ours.arguments})
    shapes = SHAPES[2:4]
    start = [torch.randn(shape) for shape in shapes]
    random = torch.Generator().manual_seed(0)
    draw = lambda shape: torch.randint(-8, 9, shape, generator=random) * 2.0 ** torch.randint(0, 6, shape)
    grads = [[draw(shape) for shape in shapes] for _ in range(2)]
    (ours, a), (theirs, b) = (made(case, start, each) for each in ("cpu", engine))
    run(a, ours, grads)
    run(b, theirs, grads)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(value, b.state[q][name]) for name, value in a.state[p].items())


@pytest.mark.gpu
@cases
def test_the_gpu_gives_the_codes_of_the_cpu(case):
    start, grads = [torch.randn(shape) for shape in (*SHAPES, (300, 100))], gradients(4, (*SHAPES, (300, 100)))
    ours, a = made(case, start, "cpu")
    theirs, b = made(case, [t.cuda() for t in start], "triton")
    run(a, ours, grads)
    run(b, theirs, grads)
    for p, q, before in zip(ours, theirs, start, strict=True):
        # its division and root are not the most precise ones; and a number that is another in its last bit has
        # another hash, by which it may be rounded the other way
        assert (p - q.cpu()).abs().mean() < 0.15 * (p - before).abs().mean()
        if not case.sums and case.rule.update.__name__ in ("adamw", "adamw_amsgrad", "momentum_sgd"):
            # states that no division goes into
            assert all(torch.equal(value, b.state[q][name].cpu()) for name, value in a.state[p].items())


@pytest.mark.parametrize("layout", LAYOUTS)
@kinds
def test_tensors_may_lie_anyhow(case, layout, engine):
    if engine == "triton" and (case.name != "adamw" or layout not in ("transposed", "sliced")):
        pytest.skip("the interpreter takes long")
    shape = (3, 4, 5, 2)
    param, grads = LAYOUTS[layout](shape), [LAYOUTS[layout](shape) for _ in range(2)]
    p, q = (
        torch.nn.Parameter(param),
        torch.nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format)),
    )
    assert p.stride() == param.stride()
    optimizers = [
        case.ours([{"params": [t], "state_dtype": "int8"}], engine=engine, **case.options) for t in (p, q)
    ]
    for g in grads:
        p.grad, q.grad = g, g.clone(memory_format=torch.contiguous_format)
        for optimizer in optimizers:
            optimizer.step()
    a, b = (optimizer.state[t] for optimizer, t in zip(optimizers, (p, q), strict=True))
    assert torch.equal(p, q)
    for name, value in b.items():
        # blocks are of elements row by row, whatever the strides are
        assert torch.equal(a[name], value), name


@pytest.mark.parametrize("shape", [(64, 64), (4, 16, 64), (128, 96), (4097,), (65, 65)], ids=str)
def test_scales_have_a_row_for_each_of_the_parameter_if_blocks_fit(shape):
    p = torch.nn.Parameter(torch.randn(shape))
    p.grad = torch.randn(shape)
    optimizer = fusedstep.AdamW([p], state_dtype="int8")
    optimizer.step()
    row = p.numel() // shape[0]
    expected = (shape[0], row // 64) if row % 64 == 0 else (-(-p.numel() // 64),)
    for name in SIGNS:
        codes, scales = of(optimizer, p, name)
        assert codes.shape == p.shape
        assert scales.shape == expected


def test_a_small_second_moment_beside_a_large_one_does_not_explode_an_update(engine):
    """Every gradient is the same at all steps, so an update is a learning rate.

    The two smallest codes of a first moment are a factor of 4 apart, those of a second 16: its root again 4.
    """
    sizes = 10 ** torch.linspace(-9, 3, 63)
    for largest in (1e3, 1e4, 1e9) if engine != "triton" else (1e4,):
        grad = torch.cat((torch.tensor([largest]), sizes))
        params, optimizer = made(by_name("adam"), [torch.zeros(64)], engine, lr=1.0, eps=1e-15)
        before = torch.zeros(64)
        for _ in range({"cpu": 300, "torch": 60, "triton": 3}[engine]):
            run(optimizer, params, [[grad]])
            after = params[0].detach().clone()
            assert (after - before).abs().max() < 16
            before = after


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
