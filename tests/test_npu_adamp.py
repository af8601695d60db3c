"""AdamP: the published algorithm in all of its branches, and what sums over rows could break."""

import copy
import io
import math
from itertools import chain

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import cosine_similarity

import fusedstep
from fusedstep.npu import NpuFusedAdamP
from fusedstep.npu._adamp import RowSums
from tests import ranks

SHAPES = ((), (5,), (4, 6), (1, 7), (6, 1), (3, 2, 2), (2, 3, 2, 2))
DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
DEFAULTS |= {"delta": 0.1, "wd_ratio": 0.1, "nesterov": False}
# with random gradients, every branch is taken
MIXED = {"lr": 0.01, "weight_decay": 0.1, "delta": 1.5}


class Published:
    """Heo et al. 2021 as the authors' adamp.py has it, in float64; shares nothing with the library."""

    def __init__(self, params, **options):
        self.o = DEFAULTS | options
        self.params = [p.detach().double().clone() for p in params]
        self.states = [{"t": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)} for p in self.params]
        # what was decided at each step, for each parameter
        self.taken = [[] for _ in params]

    def step(self, grads):
        for i, g in enumerate(grads):
            if g is not None:
                self.params[i] = self.update(self.params[i], g.double(), self.states[i], self.taken[i])

    def update(self, p, g, s, taken):
        o, (beta1, beta2) = self.o, self.o["betas"]
        s["t"] += 1
        s["m"] = beta1 * s["m"] + (1 - beta1) * g
        s["v"] = beta2 * s["v"] + (1 - beta2) * g * g
        u = beta1 * s["m"] + (1 - beta1) * g if o["nesterov"] else s["m"]
        u = u / (s["v"].sqrt() / math.sqrt(1 - beta2 ** s["t"]) + o["eps"])
        ratio, decision = 1.0, "none" if p.dim() > 1 else "vector"
        for view in ("rows", "all") if p.dim() > 1 else ():
            x, y, z = (t.reshape(len(p) if view == "rows" else 1, -1) for t in (p, g, u))
            if cosine_similarity(y, x, dim=1, eps=o["eps"]).abs().max() < o["delta"] / math.sqrt(x.shape[1]):
                n = x / (x.norm(dim=1, keepdim=True) + o["eps"])
                u, ratio = (z - n * (n * z).sum(1, keepdim=True)).view_as(p), o["wd_ratio"]
                decision = view
                break
        taken.append(decision)
        return p * (1 - o["lr"] * o["weight_decay"] * ratio) - o["lr"] / (1 - beta1 ** s["t"]) * u


def some(shapes=SHAPES, dtype=torch.float64):
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def give(params):
    """Random gradients."""
    for p in params:
        p.grad = torch.randn_like(p)
    return [p.grad for p in params]


def assert_as_published(optimizer, params, published, tolerance=1e-12):
    for p, q, s in zip(params, published.params, published.states, strict=True):
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(p.detach().double(), q, **close)
        if s["t"]:
            torch.testing.assert_close(optimizer.state[p]["exp_avg"].double(), s["m"], **close)
            torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"].double(), s["v"], **close)
            assert optimizer.state[p]["step"] == s["t"]


@pytest.mark.parametrize(
    "options",
    [
        MIXED,
        {**MIXED, "weight_decay": 0.0, "nesterov": True},
        {**MIXED, "wd_ratio": 0.5, "betas": (0.7, 0.9), "nesterov": True},
    ],
    ids=str,
)
def test_thirty_steps_are_the_published_ones_in_every_branch(options, engine):
    if engine == "triton" and options is not MIXED:
        pytest.skip("the interpreter takes long")
    params = some()
    optimizer, published = NpuFusedAdamP(params, engine=engine, **options), Published(params, **options)
    for _ in range(4 if engine == "triton" else 30):
        published.step(give(params))
        optimizer.step()
        assert_as_published(optimizer, params, published)
    vectors, others = ({*chain(*taken)} for taken in (published.taken[:2], published.taken[2:]))
    assert vectors == {"vector"}
    assert others == {"rows", "all", "none"}


@pytest.mark.parametrize(("delta", "decision"), [(2.0, "all"), (6.0, "rows")])
def test_large_tensors_in_float32_are_as_published(delta, decision, engine):
    params = some([(70, 90), (64, 16, 3, 3)], torch.float32)
    options = {**MIXED, "delta": delta}
    optimizer, published = NpuFusedAdamP(params, engine=engine, **options), Published(params, **options)
    for _ in range(2 if engine == "triton" else 20):
        published.step(give(params))
        optimizer.step()
        assert_as_published(optimizer, params, published, 2e-6)
    assert [taken[0] for taken in published.taken] == [decision] * 2


def test_without_a_threshold_it_is_adamw(engine):
    params = some()
    theirs = [nn.Parameter(p.detach().clone()) for p in params]
    ours = NpuFusedAdamP(params, lr=0.01, weight_decay=0.1, delta=0, engine=engine)
    adamw = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1)
    for _ in range(5):
        for p, q in zip(params, theirs, strict=True):
            p.grad = q.grad = torch.randn_like(p)
        ours.step()
        adamw.step()
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (2, 2, 3)], ids=str)
def test_a_projected_step_goes_at_right_angles_to_every_row(shape, engine):
    (p,) = some([shape])
    before = p.detach().clone()
    optimizer = NpuFusedAdamP([p], lr=0.1, delta=100.0, engine=engine)
    give([p])
    optimizer.step()
    along = ((p.detach() - before) * before).flatten(1).sum(1)
    # eps makes norms a little larger
    torch.testing.assert_close(along, torch.zeros_like(along), rtol=0, atol=1e-7)
    assert (p != before).any()


def test_vectors_are_not_projected_whatever_the_threshold(engine):
    p, q = (nn.Parameter(torch.tensor([3.0, 4.0])) for _ in range(2))
    q = nn.Parameter(q.detach().reshape(1, 2))
    optimizer = NpuFusedAdamP([p, q], lr=0.1, delta=100.0, engine=engine)
    p.grad, q.grad = torch.tensor([4.0, -2.0]), torch.tensor([[4.0, -2.0]])
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.tensor([2.9, 4.1]))
    torch.testing.assert_close(q.detach(), torch.tensor([[2.888, 4.084]]))


def test_a_gradient_of_zero_only_decays_and_less_where_it_would_be_projected(engine):
    """Its cosine is 0, which is below any threshold."""
    params = some([(3, 4), (5,), (2, 2, 2)])
    before = [p.detach().clone() for p in params]
    optimizer = NpuFusedAdamP(params, lr=0.1, weight_decay=0.5, wd_ratio=0.2, engine=engine)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, q, ratio in zip(params, before, (0.2, 1.0, 0.2), strict=True):
        torch.testing.assert_close(p.detach(), q * (1 - 0.1 * 0.5 * ratio), rtol=1e-14, atol=0)
        assert not optimizer.state[p]["exp_avg"].any()


def test_rows_of_zeros_are_as_published(engine):
    params = some([(3, 4), (2, 3), (4, 2)])
    with torch.no_grad():
        params[0][1] = 0
        params[1].zero_()
    optimizer, published = NpuFusedAdamP(params, engine=engine, **MIXED), Published(params, **MIXED)
    for _ in range(4):
        grads = give(params)
        grads[2][3] = 0
        published.step(grads)
        optimizer.step()
        assert_as_published(optimizer, params, published)


def test_what_is_not_a_number_stays_where_it_is(engine):
    """No cosine that is NaN is below a threshold."""
    p = nn.Parameter(torch.ones(3, 4))
    optimizer = NpuFusedAdamP([p], lr=0.1, weight_decay=0.5, delta=100.0, engine=engine)
    p.grad = torch.ones_like(p)
    p.grad[1, 2] = math.nan
    optimizer.step()
    assert p.isnan().sum() == p.isnan()[1, 2] == 1
    torch.testing.assert_close(p.detach()[0], torch.full((4,), 0.95 - 0.1))


def test_tensors_without_elements_are_left_alone(engine):
    params = some([(0, 3), (3, 0), (0,), (2, 0, 3), (2, 2)])
    optimizer, published = NpuFusedAdamP(params, engine=engine, **MIXED), Published(params[4:], **MIXED)
    for _ in range(2):
        published.step(give(params)[4:])
        optimizer.step()
    assert_as_published(optimizer, params[4:], published)


def test_options_may_change_between_steps_and_differ_between_groups(engine):
    params = some([(4, 6), (4, 6)])
    groups = [{"params": params[:1]}, {"params": params[1:], "delta": 0.0, "nesterov": True}]
    optimizer = NpuFusedAdamP(groups, engine=engine, **MIXED)
    each = [Published(params[:1], **MIXED), Published(params[1:], **MIXED | {"delta": 0.0, "nesterov": True})]
    changes = [{}, {"delta": 20.0}, {"nesterov": True, "wd_ratio": 0.7}, {"delta": 0.0, "nesterov": False}]
    for change in changes:
        for group, published in zip(optimizer.param_groups, each, strict=True):
            group.update(change)
            published.o |= change
        for g, published in zip(give(params), each, strict=True):
            published.step([g])
        optimizer.step()
        for p, published in zip(params, each, strict=True):
            assert_as_published(optimizer, [p], published)


def test_frozen_parameters_stay_and_late_gradients_count_from_their_own_first(engine):
    params = some([(4, 6), (3, 2, 2), (5,)])
    optimizer, published = NpuFusedAdamP(params, engine=engine, **MIXED), Published(params, **MIXED)
    for skipped in ((0,), (0, 2), (), (1,), (1, 2), ()):
        for i, p in enumerate(params):
            p.requires_grad_(i not in skipped)
            p.grad = None if i in skipped else torch.randn_like(p)
        published.step([p.grad for p in params])
        optimizer.step()
        assert_as_published(optimizer, params, published)
    assert [optimizer.state[p]["step"] for p in params] == [4, 4, 4]


def test_a_checkpoint_loads_with_weights_only_and_goes_on_bit_by_bit(engine):
    params = some([(4, 6), (5,), (3, 2, 2)], torch.float32)
    optimizer = NpuFusedAdamP(params, engine=engine, **MIXED)
    for _ in range(2):
        give(params)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = NpuFusedAdamP(copies, lr=5.0, delta=7.0, nesterov=True, engine=engine)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    (group,) = resumed.state_dict()["param_groups"]
    assert {name: group[name] for name in DEFAULTS} == DEFAULTS | MIXED
    assert group.keys() == {*DEFAULTS, "params", "maximize"}
    for _ in range(2):
        for p, q in zip(params, copies, strict=True):
            p.grad = q.grad = torch.randn_like(p)
        optimizer.step()
        resumed.step()
    assert all(map(torch.equal, params, copies))


def test_gradients_of_a_group_may_be_clipped_before_they_are_compared(engine):
    params = some([(4, 6), (3, 2, 2), (5,)])
    optimizer = NpuFusedAdamP([{"params": params, "max_grad_norm": 0.5}], engine=engine, **MIXED)
    published = Published(params, **MIXED)
    for _ in range(5):
        grads = give(params)
        norm = float(torch.cat([g.flatten() for g in grads]).norm())
        published.step([g * min(1.0, 0.5 / (norm + 1e-6)) for g in grads])
        optimizer.step()
        assert_as_published(optimizer, params, published)


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, fusedstep.GradScaler])
def test_a_gradscaler_changes_nothing_and_skips_infinities(scaler, engine):
    params = some([(4, 6), (3, 2, 2), (5,)], torch.float32)
    optimizer, published = NpuFusedAdamP(params, engine=engine, **MIXED), Published(params, **MIXED)
    scaler = scaler("cpu", init_scale=8.0, growth_interval=100)
    for step in range(4):
        grads = [g.clone() for g in give(params)]
        for p in params:
            p.grad = scaler.scale(p.grad)
        if step == 2:
            params[1].grad[0, 0, 0] = math.inf
        else:
            published.step(grads)
        scaler.step(optimizer)
        scaler.update()
        assert_as_published(optimizer, params, published, 2e-6)


def test_tensors_that_take_turns_in_a_small_workspace_are_stepped_alike(engine, monkeypatch):
    def stepped():
        torch.manual_seed(0)
        params = some([(4, 6), (5,), (3, 2, 2), (4, 6)], torch.float32)
        optimizer = NpuFusedAdamP(params, engine=engine, **MIXED)
        for _ in range(3):
            give(params)
            optimizer.step()
        return params

    at_once = stepped()
    monkeypatch.setattr(NpuFusedAdamP, "workspace_bytes", 800)
    for p, q in zip(stepped(), at_once, strict=True):
        torch.testing.assert_close(p, q)


def test_a_copy_of_a_pickle_goes_on(engine):
    params = some([(4, 6), (5,)])
    optimizer = NpuFusedAdamP(params, engine=engine, **MIXED)
    give(params)
    optimizer.step()
    others, other = copy.deepcopy((params, optimizer))
    for p, q in zip(params, others, strict=True):
        p.grad = q.grad = torch.randn_like(p)
    optimizer.step()
    other.step()
    assert all(map(torch.equal, params, others))


def test_complex_parameters_are_refused_before_anything_is_written():
    p = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="NpuFusedAdamP does not support complex parameters"):
        NpuFusedAdamP([p]).step()
    assert (p == 1).all()


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [((), (0, 1)), ((5,), (0, 5)), ((1, 5), (1, 5)), ((5, 1), (5, 1)), ((2, 3, 4), (2, 12)), ((0, 3), (0, 0))],
)
def test_sums_over_rows_are_in_every_element_of_a_row(shape, matrix):
    x = torch.randn(2, *shape)
    rows, columns = matrix
    expected = x.view(2, rows, columns).sum(2, keepdim=True).expand(2, rows, columns) if rows else x.clone()
    assert RowSums().matrix(shape) == matrix
    made = x.clone()
    # in the same memory
    RowSums().run(made, made, 0)
    torch.testing.assert_close(made, expected.reshape(x.shape))


# many ranks

DISTRIBUTED = ((8, 8), (8, 8), (3, 12), (12, 5), (1, 6), (6, 2, 2), (8, 2), (5,))


def alone(spread=lambda t: t, steps=4):
    """The parameters after a few steps, whole."""
    torch.manual_seed(0)
    starts = [torch.randn(shape) for shape in DISTRIBUTED]
    params = [nn.Parameter(spread(t)) for t in starts]
    optimizer = NpuFusedAdamP(params, **MIXED)
    for _ in range(steps):
        for p in params:
            p.grad = spread(torch.randn(p.shape))
        optimizer.step()
    return [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in params]


def sharded(placements, dims):
    mesh = ranks.mesh(*dims)
    # a vector has no columns
    cut = lambda t: [Replicate() if getattr(at, "dim", 0) >= t.dim() else at for at in placements]
    return alone(lambda t: distribute_tensor(t, mesh, cut(t)))


def check_shards(world, placements, dims):
    right = alone()
    for found in world.run(sharded, placements, dims):
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_two_ranks_are_stepped_as_by_one(two, dim):
    check_shards(two, [Shard(dim)], (2,))


def test_shards_of_four_ranks_some_of_them_empty_are_stepped_as_by_one(four):
    check_shards(four, [Shard(0)], (4,))
    check_shards(four, [Replicate(), Shard(0)], (2, 2))
    check_shards(four, [Shard(0), Shard(1)], (2, 2))
