"""torch's LocalTensorMode: all ranks in one process, for tests of distributed code."""

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.cases import KINDS, by_name, name_of

_local_tensor = pytest.importorskip("torch.distributed._local_tensor")
RANKS = 4


@pytest.fixture(scope="module")
def world():
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    distributed.destroy_process_group()


def stepped(case, rows, placements, **options):
    """Parameters of a plain optimizer, and of one whose ranks are all here."""
    given, grads = [torch.randn(n, 3) for n in rows], [[torch.randn(n, 3) for n in rows] for _ in range(3)]
    plain = [torch.nn.Parameter(t.clone()) for t in given]
    eager = case.ours(plain, **case.options, **options)
    with _local_tensor.LocalTensorMode(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        spread = lambda t: distribute_tensor(t.clone(), mesh, placements)
        params = [torch.nn.Parameter(spread(t)) for t in given]
        optimizer = case.ours(params, **case.options, **options)
        for of_step in grads:
            for p, g in zip(params, of_step, strict=True):
                p.grad = spread(g)
            optimizer.step()
        whole = [_whole(p.full_tensor()) for p in params]
        counts = [_whole(values["step"]).item() for values in optimizer.state.values() if "step" in values]
    for of_step in grads:
        for p, g in zip(plain, of_step, strict=True):
            p.grad = g
        eager.step()
    return [p.detach() for p in plain], whole, counts


def _whole(t):
    """What all ranks have alike."""
    return t.detach().reconcile() if isinstance(t, _local_tensor.LocalTensor) else t.detach()


@pytest.mark.parametrize("case", KINDS, ids=name_of)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
# even shards, uneven ones, and ranks that have none
@pytest.mark.parametrize("rows", [(8, 4), (10, 7), (2, 1)], ids=str)
@pytest.mark.usefixtures("world")
def test_a_step_of_all_ranks_in_one_process_is_that_of_whole_tensors(case, placement, rows):
    for options in ({}, {"max_grad_norm": 0.5, "norm_type": float("inf"), "skip_nonfinite": True}):
        plain, whole, counts = stepped(case, rows, [placement], **options)
        for p, q in zip(plain, whole, strict=True):
            torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6)
        assert set(counts) <= {3}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_an_engine_that_works_on_memory_cannot_be_insisted_on(placement):
    with pytest.raises(RuntimeError, match=r"engine='cpu' cannot step.*LocalTensor.*engine=None"):
        stepped(by_name("adamw"), (8,), [placement], engine="cpu")
