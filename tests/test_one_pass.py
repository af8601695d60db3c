"""Unscale, clip, skip, update and zero in one step: as good as torch's calls, one after the other."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import fusedstep
from fusedstep import functional
from tests.cases import KINDS, by_name, name_of
from tests.numerics import judge, roundings
from tests.pairs import copies, same_bits, set_grads

INF, NAN = float("inf"), float("nan")
LIMIT = 0.5
# the third has two chunks on a GPU
SHAPES = [(7, 5), (), (1030,), (0,)]
# tensor and element: in the first, in one without dimensions, at the very end, in the middle
PLACES = [(0, 0), (1, 0), (2, 1029), (2, 3)]
FEW = [(3,), (), (5,), (0,)]

torchs_clip = torch.nn.utils.clip_grad_norm_
kinds = pytest.mark.parametrize("case", KINDS, ids=name_of)
bad_numbers = pytest.mark.parametrize("bad", [NAN, INF, -INF])


def random(dtype=torch.float32, size=1.0, shapes=SHAPES):
    """A number alone is positive: a sum of such may not cancel, or nothing is left of its digits."""
    return [(size * (torch.randn(shape) if shape else torch.rand(()))).to(dtype) for shape in shapes]


def spoil(grads, place, bad):
    tensor, element = place
    grads[tensor].view(-1)[element] = bad
    return grads


def clip_(case, params, limit=LIMIT, norm_type=2.0):
    """torch's function; Lamb divides by the norm itself."""
    params = with_elements(params)
    if case.clip_eps:
        torch.nn.utils.clip_grad_norm_(params, limit, norm_type)
    else:
        grads = [p.grad for p in params]
        factor = (limit / torch.nn.utils.get_total_norm(grads, norm_type)).clamp(max=1.0)
        torch._foreach_mul_(grads, factor)


def with_elements(params):
    """torch knows no largest element of a tensor without any."""
    return [p for p in params if p.numel()]


def clipped(grads, limit, eps=1e-6, norm_type=2.0):
    """Gradients of one step, NumPy's float64, scaled down to a norm of `limit`."""
    flat = np.abs(np.concatenate([g.reshape(-1) for g in grads]))
    norm = (flat.max() if norm_type == INF else math.sqrt((flat * flat).sum())) + eps
    factor = limit / norm if limit is not None and limit < norm else 1.0
    return [g * factor for g in grads]


def exact(case, start, steps, limits, rates=None, norm_type=2.0):
    """Value and states of every parameter after steps with these gradients, in float64."""
    own = {name: v for name, v in case.options.items() if name not in ("max_grad_norm", "clip_scope")}
    results = []
    for i, p in enumerate(start):
        grads = [
            clipped([np.asarray(g) for g in step], limits[i], case.clip_eps, norm_type)[i] for step in steps
        ]
        options = {**own, "lr": own["lr"] if rates is None else rates[i]}
        value, states = case.reference(np.asarray(p.double()), grads, **options)
        states = {name: torch.as_tensor(state) for name, state in states.items()}
        results.append((torch.as_tensor(value), states))
    return results


def assert_exact(case, ours, optimizer, theirs, peer, expected, dtype):
    for p, q, (value, states) in zip(ours, theirs, expected, strict=True):
        judge(p.detach(), q.detach(), value, "parameter", roundings(case, dtype))
        for name, state in states.items():
            mine, other = optimizer.state[p][name], peer.state[q][name]
            judge(mine, other, state, name, roundings(case, dtype))


def kept(params, optimizer):
    """A copy of everything a step may change."""
    states = [{name: value.clone() for name, value in optimizer.state[p].items()} for p in params]
    return [p.detach().clone() for p in params], states


def assert_kept(params, optimizer, before):
    """Not a bit has changed."""
    for p, value, states in zip(params, *before, strict=True):
        assert same_bits(p.detach(), value)
        assert all(same_bits(optimizer.state[p][name], state) for name, state in states.items())


def all_same_bits(ours, theirs):
    return all(same_bits(p.detach(), q.detach()) for p, q in zip(ours, theirs, strict=True))


class Separate:
    """A peer of one of our optimizers: unscaled, clipped, stepped and zeroed by one call each."""

    def __init__(self, case, start, groups, dtype):
        self.case, self.dtype = case, dtype
        self.params = copies(start)
        # in 16 bits torch's unfused Adam computes NaN
        options = {**case.unlimited().options, "fused": dtype.itemsize == 2}
        self.optimizer = case.theirs(groups(self.params), **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.scaler.scale(torch.ones(()))
        # float16 gradients cannot be unscaled by torch's scaler: this one's tell it about infinities
        self.witness = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])

    def step(self, grads):
        set_grads(self.params, grads)
        if self.dtype == torch.float16:
            finite = all(torch.isfinite(g).all() for g in grads)
            self.witness.param_groups[0]["params"][0].grad = torch.tensor([1.0 if finite else INF])
            self.scaler.step(self.witness)
            if finite:
                torch._foreach_div_([p.grad for p in self.params], self.scaler.get_scale())
                clip_(self.case, self.params)
                self.optimizer.step()
        else:
            self.scaler.unscale_(self.optimizer)
            clip_(self.case, self.params)
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


# sizes of gradients, and where one of them is no number
SIZES = (1.0, 0.01, 10.0, 3.0, 10.0, 1.0, 0.01, 3.0, 1.0)
BAD = {0: (PLACES[1], INF), 3: (PLACES[2], -INF), 4: (PLACES[0], NAN), 8: (PLACES[3], INF)}
SETUPS = [
    # torch's does all that only with fused=True, as all of them are here
    *itertools.product([torch.float32], [False, True], [torch.amp.GradScaler, fusedstep.GradScaler]),
    (torch.float16, False, fusedstep.GradScaler),
    (torch.bfloat16, True, torch.amp.GradScaler),
]


@pytest.mark.parametrize(("dtype", "split", "scaler_class"), SETUPS)
@kinds
def test_one_step_does_what_unscale_clip_step_and_zero_grad_do(case, dtype, split, scaler_class, engine):
    case, start = case.with_limit(LIMIT), random(dtype)
    rates = [case.options["lr"] * (i + 1 if split else 1) for i in range(len(start))]

    def groups(params):
        many = [{"params": [p], "lr": rate} for p, rate in zip(params, rates, strict=True)]
        return many if split else params

    ours, theirs = copies(start), Separate(case, start, groups, dtype)
    optimizer = case.ours(groups(ours), engine=engine, fused=True, **case.options)
    scaler = scaler_class("cpu", init_scale=8.0, growth_interval=2)
    scaler.scale(torch.ones(()))
    taken = []
    # the interpreter takes long
    for i, size in enumerate(SIZES[: 4 if engine == "triton" else None]):
        scale, before = scaler.get_scale(), kept(ours, optimizer)
        grads = [scale * g for g in random(dtype, size)]
        if i in BAD:
            spoil(grads, *BAD[i])
        else:
            taken.append([g.double() / scale for g in grads])
        set_grads(ours, grads)
        scaler.step(optimizer, zero_grad=True)
        scaler.update()
        theirs.step(grads)
        assert all(p.grad is None for p in ours)
        assert bool(optimizer.step_was_skipped) == (i in BAD)
        assert optimizer.skipped_steps == i + 1 - len(taken)
        assert scaler.get_scale() == theirs.scaler.get_scale()
        if i in BAD:
            assert_kept(ours, optimizer, before)
        assert all(optimizer.state[p].get("step", len(taken)) == len(taken) for p in ours)
    expected = exact(case, start, taken, [LIMIT] * len(start), rates)
    assert_exact(case, ours, optimizer, theirs.params, theirs.optimizer, expected, dtype)


# norms


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_gradients_are_clipped_by_their_largest_element_as_torch_does(dtype, engine):
    case, start = by_name("adamw").with_limit(LIMIT), random(dtype)
    ours, theirs = copies(start), copies(start)
    optimizer = case.ours(ours, engine=engine, norm_type=INF, **case.options)
    peer = case.theirs(theirs, fused=dtype.itemsize == 2, **case.unlimited().options)
    grads = random(dtype, 10.0)
    set_grads(ours, grads)
    set_grads(theirs, grads)
    optimizer.step()
    clip_(case, theirs, norm_type=INF)
    peer.step()
    assert all(map(same_bits, [p.grad for p in ours], grads))
    wide = [[g.double() for g in grads]]
    expected = exact(case, start, wide, [LIMIT] * len(start), norm_type=INF)
    assert_exact(case, ours, optimizer, theirs, peer, expected, dtype)


@kinds
def test_a_group_has_a_limit_of_its_own_for_the_largest_element_of_all(case, engine):
    limits = [0.05, None, 0.3, LIMIT]
    case, start, grads = case.with_limit(LIMIT), random(shapes=FEW), random(size=10.0, shapes=FEW)
    ours, theirs = copies(start), copies(start)
    groups = [{"params": [p], "max_grad_norm": limit} for p, limit in zip(ours, limits, strict=True)]
    del groups[-1]["max_grad_norm"]
    optimizer = case.ours(groups, engine=engine, norm_type=INF, **case.options)
    peer = case.theirs(theirs, **case.unlimited().options)
    set_grads(ours, grads)
    set_grads(theirs, grads)
    optimizer.step()
    norm = torch.nn.utils.get_total_norm(with_elements(grads), INF)
    for q, limit in zip(theirs, limits, strict=True):
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_([q], limit, norm)
    peer.step()
    wide = [[g.double() for g in grads]]
    expected = exact(case, start, wide, limits, norm_type=INF)
    assert_exact(case, ours, optimizer, theirs, peer, expected, torch.float32)


@pytest.mark.parametrize("scope", ["tensor", "group", "global"])
def test_a_largest_element_is_that_of_the_scope(scope, engine):
    sizes, together = (3.0, 4.0, 12.0), {"tensor": (3, 4, 12), "group": (4, 4, 12), "global": (12, 12, 12)}
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in sizes]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = fusedstep.BertAdam(groups, b1=0.0, clip_scope=scope, norm_type=INF, engine=engine)
    for p, size in zip(params, sizes, strict=True):
        p.grad = torch.tensor([size, -size / 2])
    optimizer.step()
    for p, size, largest in zip(params, sizes, together[scope], strict=True):
        # with b1=0, the first moment is the gradient as it was used
        expected = torch.tensor([size, -size / 2]) / largest
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], expected, rtol=1e-6, atol=0)


def test_optimizers_refuse_the_largest_of_complex_gradients(engine):
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    p.grad = torch.tensor([3 + 4j, -1j])
    optimizer = fusedstep.SGD([p], max_grad_norm=1.0, norm_type=INF, engine=engine)
    with pytest.raises(RuntimeError, match="complex gradients by norm_type=2 only"):
        optimizer.step()
    assert p.tolist() == [1, 1]


def test_the_functional_norm_of_complex_gradients_takes_magnitudes_too():
    grad = torch.tensor([3 + 4j, -1j, 0.5 + 0j])
    p, q = (torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64)) for _ in range(2))
    p.grad, q.grad = grad.clone(), grad.clone()
    norms = [clip([x], 1.0, INF) for clip, x in ((functional.clip_grad_norm_, p), (torchs_clip, q))]
    assert norms[0] == norms[1] == 5
    torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("bad", [None, NAN, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_functional_largest_element_is_torchs(dtype, bad):
    ours, theirs = copies(random(dtype)), copies(random(dtype))
    for size in (1.0, 0.001, 100.0):
        grads = random(dtype, size)
        if bad is not None:
            spoil(grads, PLACES[2], bad)
        set_grads(ours, grads)
        set_grads(theirs, grads)
        norm, other = (
            functional.clip_grad_norm_(ours, LIMIT, INF),
            torchs_clip(with_elements(theirs), LIMIT, INF),
        )
        torch.testing.assert_close(norm.double(), other.double(), equal_nan=True)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


def test_the_functional_norm_type_may_be_the_word_as_in_torchs_documentation():
    p = torch.nn.Parameter(torch.zeros(2))
    for clip in (torchs_clip, functional.clip_grad_norm_):
        p.grad = torch.tensor([3.0, -4.0])
        assert clip([p], 1.0, "inf") == 4
        torch.testing.assert_close(p.grad, torch.tensor([0.75, -1.0]))


@bad_numbers
@pytest.mark.parametrize("theirs", [torch.optim.SGD, torch.optim.AdamW])
def test_without_a_guard_what_is_no_number_goes_where_torchs_clipping_sends_it(theirs, bad, engine):
    shapes = [(2, 3), (), (4,)]
    start, grads = random(shapes=shapes), spoil(random(shapes=shapes), (0, 1), bad)
    ours, others = copies(start), copies(start)
    set_grads(ours, grads)
    set_grads(others, grads)
    options = {"max_grad_norm": LIMIT, "norm_type": INF, "engine": engine}
    optimizer = getattr(fusedstep, theirs.__name__)(ours, lr=0.1, **options)
    optimizer.step()
    torchs_clip(others, LIMIT, INF)
    theirs(others, lr=0.1).step()
    assert not optimizer.step_was_skipped
    assert torch.isnan(ours[0]).any()
    assert torch.isnan(ours[2]).all() == math.isnan(bad)
    for p, q in zip(ours, others, strict=True):
        torch.testing.assert_close(p, q, equal_nan=True)


@pytest.mark.parametrize("norm_type", [1.0, 0.0, -INF, NAN, "inf", None])
def test_other_norms_are_refused(norm_type):
    with pytest.raises(ValueError, match="Invalid norm_type"):
        fusedstep.SGD([torch.nn.Parameter(torch.ones(1))], norm_type=norm_type)


# skipping


def test_a_step_found_bad_twice_is_counted_once(engine):
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = fusedstep.SGD([p], lr=1.0, skip_nonfinite=True, engine=engine)
    # what a scaler adds up over devices may be more than one
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(3.0)
    p.grad = torch.full((2,), INF)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert optimizer.skipped_steps == 1


@kinds
def test_a_step_with_what_is_no_number_anywhere_changes_no_bit(case, engine):
    start = random(shapes=FEW)
    ours, others = copies(start), copies(start)
    optimizer = case.ours(ours, engine=engine, skip_nonfinite=True, **case.options)
    twin = case.ours(others, engine=engine, **case.options)
    assert not optimizer.step_was_skipped
    assert optimizer.skipped_steps == 0
    before = kept(ours, optimizer)
    for i, (place, bad) in enumerate(itertools.product([(0, 0), (1, 0), (2, 4)], (NAN, INF, -INF))):
        set_grads(ours, spoil(random(shapes=FEW), place, bad))
        optimizer.step()
        assert optimizer.step_was_skipped
        assert optimizer.skipped_steps == i + 1
        assert_kept(ours, optimizer, before)
        if i % 6 == 0:
            grads = random(shapes=FEW)
            set_grads(ours, grads)
            set_grads(others, grads)
            optimizer.step()
            twin.step()
            assert not optimizer.step_was_skipped
            assert all_same_bits(ours, others)
            before = kept(ours, optimizer)


@pytest.mark.parametrize(("dtype", "large"), [(torch.float32, 1e30), (torch.float16, 6e4)], ids=str)
@kinds
def test_large_numbers_whose_squares_overflow_are_numbers(case, dtype, large, engine):
    case, shapes = case.unlimited(), [(40,), ()]
    start = random(dtype, shapes=shapes)
    ours, others = copies(start), copies(start)
    optimizer = case.ours(ours, engine=engine, skip_nonfinite=True, **case.options)
    twin = case.ours(others, engine=engine, **case.options)
    grads = [large * g.sign() for g in random(dtype, shapes=shapes)]
    set_grads(ours, grads)
    set_grads(others, grads)
    optimizer.step()
    twin.step()
    assert not optimizer.step_was_skipped
    assert optimizer.skipped_steps == 0
    assert all_same_bits(ours, others)


def test_the_guard_may_be_switched_on_and_off(engine):
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = fusedstep.SGD([p], lr=1.0, engine=engine)
    for guarded, count in ((True, 1), (True, 2), (False, 2), (True, 3), (False, 3)):
        p.data.zero_()
        optimizer.skip_nonfinite = guarded
        p.grad = torch.tensor([1.0, NAN])
        optimizer.step()
        assert bool(optimizer.step_was_skipped) == guarded
        assert optimizer.skipped_steps == count
        assert torch.isnan(p[1]) == (not guarded)
        assert p[0] == (0 if guarded else -1)


@pytest.mark.parametrize(
    "change",
    [
        "memory",
        "dtype",
        "group",
        "missing gradient",
        "late gradient",
        "zero_grad",
        "limit",
        "statistics",
        "load",
    ],
)
def test_the_count_of_skipped_steps_outlives_a_plan(change, engine):
    p, q = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = fusedstep.AdamW([p, q], skip_nonfinite=True, engine=engine)
    kwargs = {}

    def step(bad):
        p.grad = torch.full_like(p, NAN if bad else 1.0)
        optimizer.step(**kwargs)

    q.grad = None if change == "late gradient" else torch.ones(3)
    step(bad=True)
    step(bad=False)
    if change == "memory":
        p.data = p.data.clone()
        optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].clone()
    elif change == "dtype":
        p.data, p.grad = p.data.double(), None
    elif change == "group":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    elif change == "missing gradient":
        q.grad = None
    elif change == "late gradient":
        q.grad = torch.ones(3)
    elif change == "zero_grad":
        kwargs = {"zero_grad": True, "set_to_none": False}
    elif change == "limit":
        optimizer.param_groups[0]["max_grad_norm"] = 1.0
    elif change == "statistics":
        optimizer.collect_statistics = True
    elif change == "load":
        optimizer.load_state_dict(optimizer.state_dict())
    step(bad=False)
    assert optimizer.skipped_steps == 1
    assert not optimizer.step_was_skipped
    step(bad=True)
    assert optimizer.skipped_steps == 2
    assert optimizer.step_was_skipped


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_step_without_gradients_is_not_a_skipped_one(rebuilt, engine):
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = fusedstep.SGD([p], skip_nonfinite=True, engine=engine)
    p.grad = torch.tensor([NAN])
    optimizer.step(zero_grad=True)
    assert optimizer.step_was_skipped
    if rebuilt:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert optimizer.skipped_steps == 1


def test_a_gradient_that_is_gone_is_no_reason_to_skip(engine):
    p, q = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = fusedstep.SGD([p, q], lr=1.0, skip_nonfinite=True, engine=engine)
    p.grad, q.grad = torch.ones(3), torch.tensor([1.0, NAN, 1.0])
    optimizer.step()
    q.grad = None
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert p.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("bad", [0, 1])
def test_parameters_of_two_engines_are_skipped_together(bad):
    """A wrapped tensor is stepped by the torch engine, plain ones by the cpu engine."""
    wrapped = lambda t: TwoTensor(t.clone(), t.clone())
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(wrapped(torch.ones(3)))]
    optimizer = fusedstep.AdamW(params, skip_nonfinite=True)
    grads = [torch.ones(3), torch.ones(3)]
    grads[bad][1] = NAN
    params[0].grad, params[1].grad = grads[0], wrapped(grads[1])
    optimizer.step()
    assert len({table.engine for table in optimizer._plan.tables}) == 2
    assert params[0].tolist() == params[1].a.tolist() == params[1].b.tolist() == [1, 1, 1]
    assert optimizer.skipped_steps == 1
    params[0].grad, params[1].grad = torch.ones(3), wrapped(torch.ones(3))
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert (params[0] < 1).all()
    assert (params[1].a < 1).all()


# zeroing


def sliced(t):
    """The same numbers, every other one of a larger tensor of ones."""
    base = torch.ones(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)
    base[..., ::2] = t
    return base[..., ::2]


LAYOUTS = [lambda t: t.clone(), lambda t: t.t().contiguous().t(), sliced, lambda t: t[:0]]


def laid_out():
    """Tensors that lie in every way."""
    return [layout(torch.randn(5, 6)) for layout in LAYOUTS] + [torch.randn(()), torch.randn(2, 3, 4, 5)]


def turned(tensors):
    """The same numbers, each lying as another one of the tensors may."""
    grads = [sliced(t) if t.dim() and i % 2 else t.clone() for i, t in enumerate(tensors)]
    grads[-1] = grads[-1].clone(memory_format=torch.channels_last)
    return grads


@kinds
def test_gradients_are_zero_where_they_are_after_the_update(case, engine):
    start = laid_out()
    # as they lie, unlike those of a clone
    ours = [torch.nn.Parameter(p.detach()) for p in copy.deepcopy(start)]
    others = [torch.nn.Parameter(p.detach()) for p in copy.deepcopy(start)]
    options = {**case.options, "engine": engine, "skip_nonfinite": True}
    optimizer, twin = case.ours(ours, **options), case.ours(others, **options)
    for bad in (False, True):
        grads = turned([torch.randn(p.shape) for p in start])
        if bad:
            grads[0][0, 0] = NAN
        for p, q, g in zip(ours, others, grads, strict=True):
            p.grad, q.grad = g, g.clone()
        counts = [g._version for g in grads]
        optimizer.step(zero_grad=True, set_to_none=False)
        twin.step()
        assert optimizer.step_was_skipped == bad
        for p, q, g, count in zip(ours, others, grads, counts, strict=True):
            assert same_bits(p.detach(), q.detach())
            assert p.grad is g
            assert g.count_nonzero() == 0
            assert g._version > count
            if g._is_view():
                assert (g._base[..., 1::2] == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("bad", [None, INF])
def test_gradients_of_other_dtypes_are_zeroed_too(bad, dtype, engine):
    p = torch.nn.Parameter(torch.ones(1100, dtype=dtype))
    optimizer = fusedstep.Lamb([p], lr=0.1, engine=engine, skip_nonfinite=True)
    p.grad = torch.ones_like(p)
    p.grad[1050] = bad or 1
    before = p.grad.data_ptr()
    optimizer.step(zero_grad=True, set_to_none=False)
    assert p.grad.data_ptr() == before
    assert p.grad.count_nonzero() == 0
    assert torch.equal(p, torch.ones_like(p)) == (bad is not None)


@kinds
def test_gradients_are_dropped_after_the_update(case, engine):
    start, grads = random(), random()
    ours, others = copies([*start, torch.ones(2)]), copies([*start, torch.ones(2)])
    optimizer, twin = (case.ours(params, engine=engine, **case.options) for params in (ours, others))
    set_grads(ours[:-1], grads)
    set_grads(others[:-1], grads)
    optimizer.step(zero_grad=True)
    twin.step()
    assert all(p.grad is None for p in ours)
    assert all_same_bits(ours, others)
    assert ours[-1].tolist() == [1, 1]


@kinds
def test_gradients_stay_as_they_are_if_nobody_says_otherwise(case, engine):
    case, grads = case.with_limit(LIMIT), random(size=10.0, shapes=FEW)
    params = copies(random(shapes=FEW))
    optimizer = case.ours(params, engine=engine, skip_nonfinite=True, **case.options)
    set_grads(params, grads)
    before = [(p.grad, p.grad._version) for p in params]
    optimizer.step()
    optimizer.step(zero_grad=False, set_to_none=False)
    for p, g, (same, count) in zip(params, grads, before, strict=True):
        assert p.grad is same
        assert same._version == count
        assert same_bits(same, g)


@pytest.mark.parametrize("case", [by_name("sgd-momentum"), by_name("lamb")], ids=name_of)
def test_steps_that_zero_and_steps_that_do_not_may_alternate(case, engine):
    ours = copies(random(shapes=FEW))
    others = copies(ours)
    optimizer, twin = (case.ours(params, engine=engine, **case.options) for params in (ours, others))
    set_grads(ours, random(shapes=FEW))
    set_grads(others, [p.grad for p in ours])
    for zero_grad, set_to_none in ((False, False), (True, False), (True, False), (False, True), (True, True)):
        # added to what the last step left
        for params in zip(ours, others, strict=True):
            more = torch.randn(params[0].shape)
            for p in params:
                p.grad = more.clone() if p.grad is None else p.grad.add_(more)
        optimizer.step(zero_grad=zero_grad, set_to_none=set_to_none)
        twin.step()
        if zero_grad:
            twin.zero_grad(set_to_none)
        for p, q in zip(ours, others, strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)
        assert all_same_bits(ours, others)


@pytest.mark.parametrize("bad", [None, NAN])
def test_an_expanded_gradient_is_zeroed_as_torch_does(bad, engine):
    p, q = (torch.nn.Parameter(torch.ones(2, 4)) for _ in range(2))
    for x in (p, q):
        x.grad = torch.tensor([[bad or 2.0], [3.0]]).expand(2, 4)
    optimizer = fusedstep.SGD([p], lr=1.0, skip_nonfinite=True, engine=engine)
    theirs = torch.optim.SGD([q], lr=1.0)
    if bad is None:
        theirs.step()
    theirs.zero_grad(set_to_none=False)
    optimizer.step(zero_grad=True, set_to_none=False)
    assert torch.equal(p, q)
    assert p.grad.stride() == q.grad.stride() == (1, 0)
    assert torch.equal(p.grad, q.grad)


def test_a_gradient_that_two_parameters_share_is_not_zeroed_between_them(engine):
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    params[0].grad = params[1].grad = torch.full((4,), 2.0)
    optimizer = fusedstep.SGD(params, lr=1.0, engine=engine)
    with pytest.raises(RuntimeError, match="share a gradient"):
        optimizer.step(zero_grad=True, set_to_none=False)
    assert [p.tolist() for p in (*params, params[0].grad)] == [[1] * 4, [1] * 4, [2] * 4]
    optimizer.step(zero_grad=True)
    assert [p.tolist() for p in params] == [[-1] * 4] * 2
    assert [p.grad for p in params] == [None, None]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_gradient_that_is_part_of_a_graph_leaves_it_as_torchs_does(engine):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for p in params:
        p.pow(3).sum().backward(create_graph=True)
    theirs = torch.optim.SGD(params[1:], lr=1.0)
    theirs.step()
    theirs.zero_grad(set_to_none=False)
    fusedstep.SGD(params[:1], lr=1.0, engine=engine).step(zero_grad=True, set_to_none=False)
    for p in params:
        assert p.tolist() == [-2, -2, -2]
        assert p.grad.tolist() == [0, 0, 0]
        assert not p.grad.requires_grad
        p.grad = None


def test_a_closure_may_come_with_it(engine):
    p = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = fusedstep.SGD([p], lr=0.25, engine=engine)

    def closure():
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure, zero_grad=True) == 4
    assert p.grad is None
    assert optimizer.step(closure=closure, zero_grad=True, set_to_none=False) == 1
    assert p.grad.tolist() == [0]
    assert p.item() == 0.5


# counts

MILLION = 1_000_000
_BIASED = {"lr": 0.1, "betas": (0.9, 0.9999999)}
_SCHEDULED = {"lr": 0.1, "b2": 0.9999999, "t_total": 1_500_000, "max_grad_norm": None}
COUNTED = [
    by_name("adam")._replace(options=_BIASED),
    by_name("adamw")._replace(options=_BIASED),
    by_name("lamb")._replace(options={**_BIASED, "max_grad_norm": None}),
    *(
        by_name("bert-adam")._replace(
            name=name, options={**_SCHEDULED, "schedule": f"warmup_{name}", "warmup": w}
        )
        for name, w in (("linear", 0.1), ("poly", 0), ("cosine", 0.9))
    ),
]


def updated(case, t, p, g, m, v):
    """The parameter after its update number `t`, in float64."""
    p, g, m, v = (np.asarray(x.detach().double()) for x in (p, g, m, v))
    own = {name: value for name, value in case.options.items() if name != "max_grad_norm"}
    value, _ = case.reference(p, [g], **own, done=t - 1, states={"exp_avg": m, "exp_avg_sq": v})
    return torch.as_tensor(value)


@pytest.mark.parametrize("way", ["loaded", "in place"])
@pytest.mark.parametrize("case", COUNTED, ids=name_of)
def test_the_first_step_and_the_millionth_are_as_close_to_float64_as_torchs(case, way, engine):
    start, none = torch.randn(20), torch.zeros(20)
    (p,), (q,) = copies([start]), copies([start])
    ours, theirs = case.ours([p], engine=engine, **case.options), case.theirs([q], **case.options)
    p.grad = q.grad = torch.randn(20)
    ours.step()
    theirs.step()
    judge(p.detach(), q.detach(), updated(case, 1, start, p.grad, none, none), "first", 2)

    p.data.copy_(q.data)
    saved = copy.deepcopy(theirs.state_dict())
    saved["state"][0]["step"] = torch.tensor(MILLION - 1.0)
    theirs.load_state_dict(saved)
    if way == "in place":
        saved["state"][0]["step"] = torch.tensor(7.0)
    ours.load_state_dict(saved)
    if way == "in place":
        ours.step()
        p.data.copy_(q.data)
        for name in ("exp_avg", "exp_avg_sq"):
            ours.state[p][name].copy_(theirs.state[q][name])
        ours.state[p]["step"].fill_(MILLION - 1)
    p.grad = q.grad = torch.randn(20)
    before = [
        q.detach().clone(),
        q.grad,
        *(theirs.state[q][name].clone() for name in ("exp_avg", "exp_avg_sq")),
    ]
    ours.step()
    theirs.step()
    judge(p.detach(), q.detach(), updated(case, MILLION, *before), "millionth", 2)
    assert ours.state[p]["step"] == MILLION
