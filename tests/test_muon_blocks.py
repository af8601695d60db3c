"""Muon's blocks of rows, by `num_heads` and `split_sizes`: each is stepped as a matrix of its own."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fusedstep
from fusedstep.stages import newton_schulz
from tests import ranks
from tests.pairs import whole

pytestmark = pytest.mark.usefixtures("one_thread")

# the rows of each block, and how they are asked for: queries, keys and values of grouped heads; one row; heads
BLOCKS = {
    "q, k, v": ((6, 3, 3), {"split_sizes": (6, 3, 3)}),
    "one row": ((1, 5, 2), {"split_sizes": [1, 5, 2]}),
    "one block": ((4,), {"split_sizes": (4,)}),
    "heads": ((3, 3, 3, 3), {"num_heads": 4}),
}
blocks = pytest.mark.parametrize(("rows", "cut"), BLOCKS.values(), ids=BLOCKS)
RATES = [None, "original", "match_rms_adamw", "spectral_unclamped"]


def data(rows, steps=3, columns=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(sum(rows), columns, generator=generator) for _ in range(steps + 1)]
    return tensors[0].to(dtype), [g.to(dtype) for g in tensors[1:]]


def train(params, grads, **options):
    """Parameters after a step with each list of gradients, and the states of rows, if there are any."""
    optimizer = fusedstep.Muon(params, lr=0.1, weight_decay=0.3, **options)
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
    squares = [optimizer.state[p].get("variance_neuron", torch.zeros(0)) for p in params]
    return [p.detach() for p in params], squares


def apart(rows, p, grads, **options):
    """Each block as a parameter of its own."""
    params = [nn.Parameter(part.clone()) for part in p.split(rows)]
    found, squares = train(params, [g.split(rows) for g in grads], **options)
    return torch.cat(found), torch.cat(squares)


def check(found, right):
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@blocks
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(
    "more", [{}, {"normalize_rows": 0.9}, {"nesterov": False, "cautious_decay": True}], ids=str
)
def test_blocks_are_stepped_as_separate_matrices(engine, rows, cut, rate, more):
    if engine == "triton" and (more or rate):
        pytest.skip("shown for one, the same for all")
    p, grads = data(rows)
    options = {"adjust_lr_fn": rate, "engine": engine, **more}
    (found,), (squares,) = train([nn.Parameter(p.clone())], [[g] for g in grads], **cut, **options)
    right, its_squares = apart(rows, p, grads, **options)
    check(found, right)
    check(squares, its_squares)


@pytest.mark.parametrize("more", [{}, {"normalize_rows": 0.9}], ids=str)
def test_blocks_of_experts_and_of_convolutions_are_stepped_as_separate_matrices(more):
    rows, options = (6, 3, 3), {"adjust_lr_fn": "spectral_unclamped", **more}
    p, grads = data(rows, columns=8)
    right, _ = apart(rows, p, grads, **options)
    cut = {"split_sizes": rows, **options}
    (found,), _ = train(
        [nn.Parameter(p.clone().view(12, 2, 4))], [[g.view(12, 2, 4)] for g in grads], flatten=True, **cut
    )
    check(found.view(12, 8), right)
    (found,), _ = train([nn.Parameter(torch.stack([p, p]))], [[torch.stack([g, -g])] for g in grads], **cut)
    check(found[0], right)
    check(found[1], apart(rows, p, [-g for g in grads], **options)[0])


def test_blocks_in_bfloat16_are_stepped_as_separate_matrices():
    rows, options = (12, 3, 3), {"adjust_lr_fn": "spectral_unclamped"}
    p, grads = data(rows, dtype=torch.bfloat16)
    (found,), _ = train([nn.Parameter(p.clone())], [[g] for g in grads], split_sizes=rows, **options)
    torch.testing.assert_close(found, apart(rows, p, grads, **options)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"normalize_rows": 0.9}], ids=str)
@pytest.mark.parametrize("rate", RATES)
def test_blocks_on_a_gpu_are_stepped_as_separate_matrices(rate, more):
    rows, options = (1024, 256, 256), {"adjust_lr_fn": rate, **more}
    p, grads = (data(rows, columns=512)[i] for i in (0, 1))
    p, grads = p.cuda(), [g.cuda() for g in grads]
    (found,), _ = train([nn.Parameter(p.clone())], [[g] for g in grads], split_sizes=rows, **options)
    torch.testing.assert_close(found, apart(rows, p, grads, **options)[0], rtol=2**-8, atol=1e-3)


def test_a_gradient_that_is_not_finite_harms_its_own_block_alone():
    p, grads = data((6, 3, 3), steps=1)
    grads[0][7, 1] = torch.nan
    for more in ({}, {"normalize_rows": 0.9}):
        (found,), _ = train([nn.Parameter(p.clone())], [grads], split_sizes=(6, 3, 3), **more)
        assert found[:6].isfinite().all()
        assert found[6:9].isnan().all()
        assert found[9:].isfinite().all()


# many ranks

DIVIDED = {
    **BLOCKS,
    # shards begin within blocks, and some are empty
    "uneven": ((5, 3, 2), {"split_sizes": (5, 3, 2)}),
    "few rows": ((1, 1), {"num_heads": 2}),
}


def sharded(placements, dims, rows, cut, options):
    mesh = ranks.mesh(*dims)
    spread = lambda t: distribute_tensor(t, mesh, placements)
    p, grads = data(rows)
    (found,), (squares,) = train([nn.Parameter(spread(p))], [[spread(g)] for g in grads], **cut, **options)
    return whole(found), whole(squares)


def check_shards(world, placements, dims, rows, cut, options):
    p, grads = data(rows)
    right = apart(rows, p, grads, **options)
    for found in world.call(sharded, placements, dims, rows, cut, options):
        for a, b in zip(found, right, strict=True):
            check(a, b)


divided = pytest.mark.parametrize(("rows", "cut"), DIVIDED.values(), ids=DIVIDED)
more = pytest.mark.parametrize(
    "options", [{"adjust_lr_fn": "spectral_unclamped"}, {"normalize_rows": 0.9}], ids=str
)


@divided
@more
def test_shards_of_blocks_are_stepped_as_separate_matrices(two, rows, cut, options):
    check_shards(two, [Shard(0)], (2,), rows, cut, options)


@divided
@more
def test_shards_of_blocks_on_four_ranks_are_stepped_as_separate_matrices(four, rows, cut, options):
    check_shards(four, [Shard(0)], (4,), rows, cut, options)
    check_shards(four, [Replicate(), Shard(0)], (2, 2), rows, cut, options)


@blocks
def test_blocks_that_are_cut_along_columns_are_stepped_as_separate_matrices(two, rows, cut):
    check_shards(two, [Shard(1)], (2,), rows, cut, {"adjust_lr_fn": "match_rms_adamw"})


def test_rows_that_are_cut_twice_are_not_normalised(four):
    rows, cut = BLOCKS["q, k, v"]
    check_shards(four, [Shard(0), Shard(0)], (2, 2), rows, cut, {"adjust_lr_fn": "spectral_unclamped"})
    for error in four.call(sharded, [Shard(0), Shard(0)], (2, 2), rows, cut, {"normalize_rows": 0.9}):
        assert "over one dimension of the mesh, or use normalize_rows=None" in str(error)


def replicas(rows, cut, options):
    p, grads = data(rows)
    (found,), _ = train(
        [nn.Parameter(p)], [[g] for g in grads], divide_among=torch.distributed.group.WORLD, **cut, **options
    )
    return found


@blocks
@more
def test_replicas_divide_blocks_that_are_stepped_as_separate_matrices(two, rows, cut, options):
    p, grads = data(rows)
    right, _ = apart(rows, p, grads, **options)
    for found in two.call(replicas, rows, cut, options):
        check(found, right)


def test_the_work_of_blocks_is_that_of_separate_matrices():
    cut, each = newton_schulz.NewtonSchulz(sections=(64, 16, 16)), newton_schulz.NewtonSchulz()
    separate = [each.flops((n, 48)) for n in (64, 16, 16)]
    assert cut.flops((96, 48)) == sum(separate)
    assert cut.flops((5, 96, 48)) == 5 * sum(separate)
    heads = newton_schulz.NewtonSchulz(heads=6)
    assert heads.flops((96, 48)) == 6 * each.flops((16, 48))
    # blocks of different sizes take turns
    assert cut.allocates((96, 48)) == each.allocates((64, 48))
    assert heads.allocates((96, 48)) == 6 * each.allocates((16, 48))
