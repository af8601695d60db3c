"""max_grad_norm: as good as clipping all gradients before the step, which `p.grad` does not show."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import fusedstep
from tests import reference


class Kind(NamedTuple):
    """A class, its options, and what it adds to a norm."""

    ours: type
    options: dict[str, Any]
    eps: float = 1e-6

    def __str__(self):
        return self.ours.__name__


KINDS = [
    Kind(fusedstep.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    Kind(fusedstep.Adam, {"lr": 0.1, "amsgrad": True}),
    Kind(fusedstep.AdamW, {"lr": 0.1}),
    Kind(fusedstep.BertAdam, {"lr": 0.1, "warmup": 0.5, "t_total": 4, "clip_scope": "global"}),
    Kind(fusedstep.Lamb, {"lr": 0.1}, eps=0.0),
]
SGD = Kind(fusedstep.SGD, {"lr": 0.1, "momentum": 0.9})
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)

SHAPES = [(7, 5), (), (0,), (1100,)]
# Adam forgets a factor that is always the same: some of these steps are clipped, each otherwise, some are not
SCALES = (1.0, 0.001, 100.0, 10.0)
LIMIT = 0.5


def random(shapes, dtype=torch.float32, scale=1.0):
    return [(scale * torch.randn(shape)).to(dtype) for shape in shapes]


def clipped(grads, limit, eps=1e-6, together=None):
    """Gradients clipped in float64, unrounded where they have 16 bits; None stays None."""
    exact = [None if g is None else np.asarray(g.double()) for g in grads]
    scaled = reference.clip(exact, limit, eps, together)
    wide = [None if g is None else torch.promote_types(g.dtype, torch.float32) for g in grads]
    return [None if s is None else torch.as_tensor(s).to(t) for s, t in zip(scaled, wide, strict=True)]


class Twins:
    """An optimizer with a limit, and one without whose gradients are clipped beforehand."""

    def __init__(self, kind, start, engine, limit=LIMIT):
        self.kind = kind
        self.ours, self.theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
        self.a = kind.ours(self.ours, engine=engine, max_grad_norm=limit, **kind.options)
        self.b = kind.ours(self.theirs, engine="torch", max_grad_norm=None, **kind.options)

    def step(self, grads, limit=LIMIT, together=None):
        self.feed(grads, clipped(grads, limit, self.kind.eps, together))

    def feed(self, grads, scaled):
        """Step ours with `grads`, the other with `scaled`: the same, and `grads` keep their bits."""
        for p, q, g, s in zip(self.ours, self.theirs, grads, scaled, strict=True):
            p.grad_dtype = q.grad_dtype = None
            p.grad, q.grad = None if g is None else g.clone(), s
        self.a.step()
        self.b.step()
        for p, g in zip(self.ours, grads, strict=True):
            assert (p.grad is None) if g is None else same_bits(p.grad, g)
        self.compare()

    def compare(self):
        for p, q in zip(self.ours, self.theirs, strict=True):
            close(p.detach(), q.detach())
            for name, value in self.b.state[q].items():
                close(self.a.state[p][name], value)


def close(ours, theirs):
    """Equal but for a few roundings of the largest element."""
    eps = torch.finfo(ours.dtype).eps * (16 if ours.dtype.itemsize > 2 else 4)
    largest = float(theirs.abs().max()) if theirs.numel() else 0.0
    torch.testing.assert_close(ours, theirs, rtol=0, atol=eps * largest)


def same_bits(a, b):
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(words), b.contiguous().view(words))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@kinds
def test_a_limit_does_what_clipping_before_the_step_does(kind, dtype, engine):
    start = random(SHAPES, dtype)
    twins = Twins(kind, start, engine)
    free = [torch.nn.Parameter(p.clone()) for p in start]
    unlimited = kind.ours(free, engine="torch", max_grad_norm=None, **kind.options)
    for scale in SCALES:
        grads = random(SHAPES, dtype, scale)
        twins.step(grads)
        for p, g in zip(free, grads, strict=True):
            p.grad = g
        unlimited.step()
    # and the limit mattered
    assert (twins.ours[-1] - free[-1]).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS[:-1], ids=str)
def test_a_limit_does_what_clip_grad_norm_does(kind, engine):
    twins = Twins(kind, random(SHAPES), engine)
    for scale in SCALES:
        grads = random(SHAPES, scale=scale)
        for q, g in zip(twins.theirs, grads, strict=True):
            q.grad = g.clone()
        torch.nn.utils.clip_grad_norm_(twins.theirs, LIMIT)
        twins.feed(grads, [q.grad for q in twins.theirs])


@kinds
def test_gradients_below_the_limit_are_taken_bit_for_bit(kind, engine):
    start, results = random(SHAPES), []
    grads = [random(SHAPES, scale=scale) for scale in SCALES]
    for limit in (1e6, None, 0, -1.0):
        params = [torch.nn.Parameter(p.clone()) for p in start]
        optimizer = kind.ours(params, engine=engine, max_grad_norm=limit, **kind.options)
        for step in grads:
            for p, g in zip(params, step, strict=True):
                p.grad = g
            optimizer.step()
        results.append(params)
    for other in results[1:]:
        assert all(torch.equal(p, q) for p, q in zip(results[0], other, strict=True))


@kinds
def test_one_norm_is_taken_over_all_dtypes_and_groups_and_each_group_has_its_own_limit(kind, engine):
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float16]
    of_grads = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]
    start = [torch.randn(20 + i).to(dtype) for i, dtype in enumerate(dtypes)]
    twins = Twins(kind, start, engine, limit=2.0)
    limits, members = (0.3, None, 2.0), (slice(0, 2), slice(2, 4), slice(4, 5))
    groups = [{"params": twins.ours[m], "max_grad_norm": x} for m, x in zip(members, limits, strict=True)]
    # the last group takes the default
    del groups[2]["max_grad_norm"]
    twins.a = kind.ours(groups, engine=engine, max_grad_norm=2.0, **kind.options)
    for scale in SCALES:
        grads = [(scale * torch.randn(p.shape)).to(dtype) for p, dtype in zip(start, of_grads, strict=True)]
        scaled = [clipped(grads, limit, kind.eps)[m] for m, limit in zip(members, limits, strict=True)]
        twins.feed(grads, [g for part in scaled for g in part])


@pytest.mark.parametrize("scope", ["tensor", "group", "global"])
def test_the_scope_says_which_gradients_share_a_norm(scope, engine):
    # two groups, each of two tensors of float32 and one of bfloat16
    dtypes = [torch.float32, torch.float32, torch.bfloat16] * 2
    labels = {"tensor": range(6), "group": [0, 0, 1, 2, 2, 3], "global": [0] * 6}[scope]
    start = [torch.randn(10 + i).to(dtype) for i, dtype in enumerate(dtypes)]
    twins = Twins(Kind(fusedstep.BertAdam, {"lr": 0.1}), start, engine)
    groups = [{"params": twins.ours[:3]}, {"params": twins.ours[3:]}]
    twins.a = fusedstep.BertAdam(groups, lr=0.1, max_grad_norm=LIMIT, clip_scope=scope, engine=engine)
    for scale in SCALES:
        sizes = [scale * 3**i for i in range(6)]
        grads = [(size * torch.randn(p.shape)).to(p.dtype) for p, size in zip(start, sizes, strict=True)]
        twins.step(grads, together=labels)


def test_a_scope_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"Invalid clip_scope: 'row'.*'tensor', 'group', 'global'"):
        fusedstep.BertAdam([torch.nn.Parameter(torch.ones(1))], clip_scope="row")


@pytest.mark.parametrize("limit", ["1.0", [0.1, 0.2, 0.3], torch.ones(2)], ids=str)
def test_a_limit_that_is_no_number_stops_the_step_before_it_starts(limit, engine):
    p = torch.nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    optimizer = fusedstep.SGD([p], engine=engine)
    optimizer.param_groups[0]["max_grad_norm"] = limit
    with pytest.raises((TypeError, ValueError), match="group 0 has"):
        optimizer.step()
    assert torch.equal(p, torch.ones(4))


@kinds
def test_a_gradient_that_is_gone_no_longer_counts(kind, engine):
    # of several chunks each, for every engine
    shapes = [(70_000 if engine == "cpu" else 2100,), (40,), (30,)]
    twins = Twins(kind, random(shapes), engine)
    for missing in ((), (0,), (1, 2), (), (2,)):
        grads = random(shapes)
        twins.step([None if i in missing else g for i, g in enumerate(grads)])


@kinds
def test_a_norm_is_taken_of_unscaled_gradients(kind, engine):
    start, results = random(SHAPES), []
    grads = [random(SHAPES, scale=scale) for scale in SCALES]
    for scale in (None, 1024.0):
        params = [torch.nn.Parameter(p.clone()) for p in start]
        optimizer = kind.ours(params, engine=engine, max_grad_norm=LIMIT, **kind.options)
        if scale is not None:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
        for step in grads:
            for p, g in zip(params, step, strict=True):
                p.grad = g * (scale or 1)
            optimizer.step()
        results.append(params)
    # a power of two rounds nothing
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


@kinds
def test_a_step_that_found_inf_leaves_no_trace_in_the_next_norm(kind, engine):
    twins = Twins(kind, random(SHAPES), engine)
    twins.step(random(SHAPES))
    before = [p.detach().clone() for p in twins.ours]
    for p in twins.ours:
        p.grad = torch.full_like(p, float("inf"))
    twins.a.grad_scale, twins.a.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    twins.a.step()
    assert all(torch.equal(p, q) for p, q in zip(twins.ours, before, strict=True))
    del twins.a.grad_scale, twins.a.found_inf
    twins.step(random(SHAPES, scale=10.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("theirs", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_gradient_that_is_no_number_poisons_as_torchs_clipping_does(theirs, bad, engine):
    start, grads = random([(5,), (6,)]), random([(5,), (6,)])
    grads[0][2] = bad
    ours, others = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    for params in (ours, others):
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
    getattr(fusedstep, theirs.__name__)(ours, lr=0.1, max_grad_norm=LIMIT, engine=engine).step()
    torch.nn.utils.clip_grad_norm_(others, LIMIT)
    theirs(others, lr=0.1).step()
    assert torch.isnan(ours[0]).any()
    assert torch.isnan(ours[1]).all() == (bad != float("inf"))
    for p, q in zip(ours, others, strict=True):
        torch.testing.assert_close(p, q, equal_nan=True)


@pytest.mark.parametrize("kind", [SGD, KINDS[-1]], ids=str)
def test_a_limit_may_come_go_and_be_a_tensor_between_steps(kind, engine):
    twins = Twins(kind, random(SHAPES), engine, limit=None)
    group, tensor = twins.a.param_groups[0], torch.tensor(0.25)
    for limit in (None, 0.5, 0.5, 0.1, 0, 2.0, tensor, tensor, -1, 1.0, None, 0.5):
        if limit is tensor:
            tensor.mul_(2)
        if limit is not None or "max_grad_norm" in group:
            group["max_grad_norm"] = limit
        twins.step(random(SHAPES), limit if limit is None else float(limit))
    group.pop("max_grad_norm")
    twins.step(random(SHAPES), None)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_clipping_gives_the_same_bits_with_any_number_of_threads(kind):
    shapes = [(700, 1000), (3,), (1 << 17,), (100_001,)]
    start, grads = random(shapes), [random(shapes, scale=scale) for scale in (1.0, 3.0)]
    results = []
    for threads in (1, 2, 3, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        params = [torch.nn.Parameter(p.clone()) for p in start]
        optimizer = kind.ours(params, engine="cpu", max_grad_norm=LIMIT, **kind.options)
        for step in grads:
            for p, g in zip(params, step, strict=True):
                p.grad = g
            optimizer.step()
        results.append(params)
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(p, q) for p, q in zip(results[0], other, strict=True))


def test_clipping_gives_the_same_bits_every_time(engine):
    shapes = [(3000,), (7, 5), (1,)]
    start, grads = random(shapes), random(shapes)
    results = []
    for _ in range(3):
        params = [torch.nn.Parameter(p.clone()) for p in start]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        fusedstep.AdamW(params, max_grad_norm=LIMIT, engine=engine).step()
        results.append(params)
    for other in results[1:]:
        assert all(torch.equal(p, q) for p, q in zip(results[0], other, strict=True))


def test_a_clipped_gradient_has_the_norm_it_was_given(engine):
    shapes = [(30_000 if engine == "triton" else 1_000_000,), (17,), ()]
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    fusedstep.SGD(params, lr=1.0, max_grad_norm=0.25, engine=engine).step()
    norm = float(torch.cat([p.detach().double().reshape(-1) for p in params]).norm())
    assert abs(norm / 0.25 - 1) < 1e-6


@kinds
def test_gradients_whose_norm_float16_cannot_hold_are_clipped_all_the_same(kind, engine):
    shapes = [(2000,), (50,)]
    twins = Twins(kind, random(shapes, torch.float16), engine)
    grads = [g.sign() * 60_000 for g in random(shapes, torch.float16)]
    assert torch.isinf(torch.cat(grads).norm())
    twins.step(grads)
    twins.step(random(shapes, torch.float16))


@kinds
def test_gradients_that_are_empty_or_zero_have_no_norm_to_divide_by(kind, engine):
    empty, zero = torch.nn.Parameter(torch.ones(0, 3)), torch.nn.Parameter(torch.ones(()))
    empty.grad, zero.grad = torch.ones(0, 3), torch.zeros(())
    kind.ours([empty], engine=engine, max_grad_norm=LIMIT, **kind.options).step()
    kind.ours([zero], engine=engine, max_grad_norm=LIMIT, **kind.options).step()
    assert torch.isfinite(zero)
    alone = Twins(kind, [torch.tensor(2.0)], engine)
    alone.step([torch.tensor(-30.0)])
    alone.step([torch.tensor(0.0)])


@kinds
def test_parameters_of_two_engines_share_one_norm(kind):
    """A wrapped tensor is stepped by the torch engine, plain ones by the cpu engine."""
    wrapped = lambda t: TwoTensor(t.clone(), t.clone())
    twins = Twins(kind, random([(30,), (4, 5), (6,)]), None)
    twins.ours[1] = torch.nn.Parameter(wrapped(twins.ours[1].detach()))
    twins.a = kind.ours(twins.ours, max_grad_norm=LIMIT, **kind.options)
    for scale in SCALES:
        grads = random([(30,), (4, 5), (6,)], scale=scale)
        for p, q, g, s in zip(twins.ours, twins.theirs, grads, clipped(grads, LIMIT, kind.eps), strict=True):
            p.grad, q.grad = wrapped(g) if isinstance(p, TwoTensor) else g, s
        twins.a.step()
        twins.b.step()
        used = {table.engine.NAME for table in twins.a._plan.tables}
        assert used == {"torch", "cpu"}
        for p, q in zip(twins.ours, twins.theirs, strict=True):
            close(p.a if isinstance(p, TwoTensor) else p.detach(), q.detach())
