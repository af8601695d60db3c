"""One rank on a GPU with NCCL: distributed tensors are stepped as plain ones are, and ranks would talk once."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import fusedstep
from tests.cases import CASES, name_of
from tests.test_distributed import MORE, ROUNDS
from tests.test_graphs import capture, no_waiting

pytestmark = pytest.mark.gpu
SHAPES = [(40, 30), (7, 5), (1,), (3, 2, 1000)]


@pytest.fixture(scope="module")
def mesh():
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield dist.init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def sharded(t, mesh):
    return DTensor.from_local(t.detach().clone(), mesh, [Shard(0)])


class Pair:
    """An optimizer over distributed tensors, and one over the same as plain ones."""

    def __init__(self, mesh, cls, options):
        self.mesh = mesh
        self.plain = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in SHAPES]
        self.parts = [nn.Parameter(sharded(p, mesh)) for p in self.plain]
        self.ours, self.one = cls(self.parts, **options), cls(self.plain, **options)
        self.give_gradients()

    def give_gradients(self):
        for p, q in zip(self.parts, self.plain, strict=True):
            q.grad = torch.randn_like(q)
            p.grad = sharded(q.grad, self.mesh)

    def step(self):
        self.give_gradients()
        self.ours.step()
        self.one.step()

    def assert_same(self):
        for p, q in zip(self.parts, self.plain, strict=True):
            assert torch.equal(p.to_local(), q)
            for name, state in self.one.state[q].items():
                mine = self.ours.state[p][name]
                assert torch.equal(mine.to_local() if isinstance(mine, DTensor) else mine, state), name


@pytest.mark.parametrize("case", [*CASES, *MORE], ids=name_of)
def test_distributed_tensors_get_the_bits_of_plain_ones(mesh, case):
    pair = Pair(mesh, case.ours, case.options)
    for _ in range(3):
        pair.step()
    pair.assert_same()


@pytest.mark.parametrize(("cls", "options", "rounds"), ROUNDS)
def test_the_profiler_sees_one_collective_for_all_norms(mesh, cls, options, rounds):
    pair = Pair(mesh, cls, options)
    for _ in range(3):
        pair.step()
    pair.give_gradients()
    torch.cuda.synchronize()
    with torch.profiler.profile() as seen:
        pair.ours.step()
        torch.cuda.synchronize()
    assert sum(event.count for event in seen.key_averages() if event.key == "c10d::allreduce_") == rounds


@pytest.mark.parametrize(("cls", "options", "rounds"), ROUNDS)
def test_a_step_never_waits(mesh, cls, options, rounds):
    pair = Pair(mesh, cls, options)
    pair.step()
    pair.step()
    with no_waiting():
        pair.ours.step()


@pytest.mark.parametrize(("cls", "options", "rounds"), ROUNDS)
def test_a_graph_captures_steps_of_distributed_tensors(mesh, cls, options, rounds):
    pair = Pair(mesh, cls, options)
    pair.step()
    pair.step()
    graph = capture(pair.ours.step)
    for _ in range(3):
        for p, q in zip(pair.parts, pair.plain, strict=True):
            q.grad = torch.randn_like(q)
            p.grad.to_local().copy_(q.grad)
        graph.replay()
        pair.one.step()
    pair.assert_same()


POLICIES = {
    "whole": {},
    "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cls", [fusedstep.AdamW, fusedstep.Lamb, fusedstep.BertAdam])
def test_fully_sharded_models_train_as_plain_tensors_do(mesh, cls, policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)).cuda()
    fully_shard(model[0], mesh=mesh, **POLICIES[policy])
    fully_shard(model, mesh=mesh, **POLICIES[policy])
    params = [*model.parameters()]
    one = [nn.Parameter(p.to_local().detach().clone()) for p in params]
    options = {"lr": 1e-2, "max_grad_norm": 0.1}
    ours, theirs = cls(params, **options), cls(one, **options)
    for _ in range(4):
        model(torch.randn(16, 64, device="cuda")).square().mean().backward()
        for p, q in zip(params, one, strict=True):
            q.grad = p.grad.to_local().clone()
        ours.step(zero_grad=True)
        theirs.step()
    for p, q in zip(params, one, strict=True):
        assert p.device.type == ("cpu" if policy == "offloaded" else "cuda")
        assert torch.equal(p.to_local(), q)


def made_of_layers(mesh, policy):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).cuda()
    for layer in model:
        fully_shard(layer, mesh=mesh, **POLICIES[policy])
    return fully_shard(model, mesh=mesh, **POLICIES[policy])


@pytest.mark.parametrize("policy", ["whole", "mixed"])
@pytest.mark.parametrize("cls", [fusedstep.AdamW, fusedstep.Lamb])
def test_fully_sharded_models_release_gradients_on_their_own_streams(mesh, cls, policy):
    models = [made_of_layers(mesh, policy) for _ in range(2)]
    released, plain = (cls(model.parameters(), lr=1e-2, max_grad_norm=None) for model in models)
    fusedstep.release_gradients(models[0], released, 40_000)
    for _ in range(20):
        inputs = torch.randn(16, 64, device="cuda")
        for model, optimizer in zip(models, (released, plain), strict=True):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p.to_local(), q.to_local())
    assert len(released._release.parts) > 1


def test_offloaded_models_do_not_release_gradients(mesh):
    model = made_of_layers(mesh, "offloaded")
    with pytest.raises(RuntimeError, match="CPUOffloadPolicy"):
        fusedstep.release_gradients(model, fusedstep.AdamW(model.parameters()))


@pytest.mark.parametrize("options", [{}, {"norm_type": float("inf")}, {"skip_nonfinite": True}], ids=str)
@pytest.mark.parametrize("cls", [fusedstep.AdamW, fusedstep.Lamb])
def test_a_norm_over_a_group_of_one_rank_is_its_own(mesh, cls, options):
    start = [torch.randn(shape, device="cuda") for shape in SHAPES]
    params, others = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    options = {"max_grad_norm": 0.1, **options}
    ours, one = cls(params, norm_group=dist.group.WORLD, **options), cls(others, **options)
    for i in range(4):
        for p, q in zip(params, others, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        with no_waiting() if i > 1 else nullcontext():
            ours.step()
        one.step()

    graph = capture(ours.step)
    for _ in range(2):
        for p, q in zip(params, others, strict=True):
            p.grad.copy_(torch.randn_like(p))
            q.grad = p.grad.clone()
        graph.replay()
        one.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}, {"skip_nonfinite": True}], ids=str)
def test_a_rank_without_parameters_takes_part(mesh, options):
    optimizer = fusedstep.AdamW([{"params": []}], norm_group=dist.group.WORLD, **options)
    for found in (None, 0.0, 1.0, 0.0, None):
        optimizer.found_inf = found if found is None else torch.tensor(found, device="cuda")
        optimizer.step()
        with no_waiting():
            optimizer.step()
        graph = capture(optimizer.step)
        graph.replay()
        assert optimizer.step_was_skipped == (found == 1.0)
        assert optimizer.step_was_skipped.device.type == "cuda"
        optimizer.release_graph()
    assert optimizer.skipped_steps == 3


def test_a_graph_refuses_a_group_that_talks_on_the_host(mesh):
    optimizer = fusedstep.AdamW([{"params": []}], norm_group=dist.new_group(backend="gloo"), max_grad_norm=1.0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="norm_group talk on the host"):
        capture(optimizer.step)
    optimizer.step()
