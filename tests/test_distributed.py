"""Ranks that hold parts of tensors, or copies: together they do what one process does with the whole."""

import copy
import functools
import gc
import io
import pickle
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fusedstep
from fusedstep import _engines as engines
from tests import ranks
from tests.cases import KINDS, TORCH_CLASSES, by_name, name_of
from tests.conftest import HAS_GPU, HAS_TRITON
from tests.numerics import assert_alike
from tests.pairs import whole
from tests.test_changes import CHECKS

NAN, INF = float("nan"), float("inf")
SGD, ADAMW, LAMB = by_name("sgd-momentum"), by_name("adamw"), by_name("lamb")
_ALL = {"max_grad_norm": 0.5, "skip_nonfinite": True, "ema_decay": 0.9, "statistics": True}
EVERYTHING = ADAMW.with_options("adamw-everything", **_ALL)
CLIPPED = ADAMW.with_options("adamw-clipped", max_grad_norm=0.5)
LARGEST = CLIPPED.with_options("adamw-largest", norm_type=INF)
MORE = [
    CLIPPED,
    LARGEST,
    ADAMW.with_options("adamw-guarded", skip_nonfinite=True),
    ADAMW.with_options("adamw-averaged", ema_decay=0.9),
    ADAMW.with_options("adamw-measured", statistics=True),
    EVERYTHING,
    SGD.with_options("sgd-everything", **_ALL, norm_type=INF),
    LAMB.with_options("lamb-measured", statistics=True),
    *map(by_name, ("lamb-unclipped", "bert-adam-linear", "bert-adam-poly")),
]
cases = pytest.mark.parametrize("case", [*KINDS, *MORE], ids=name_of)
kinds = pytest.mark.parametrize("case", KINDS, ids=name_of)


def rank():
    return torch.distributed.get_rank()


def part(t):
    return t.to_local().detach() if isinstance(t, DTensor) else t.detach()


def assert_close(a, b, tolerance=1e-6):
    """By the largest element."""
    largest = float(b.abs().max()) if b.numel() else 0.0
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def assert_same_statistics(a, b):
    for name, x, y in zip(a._fields, a, b, strict=True):
        assert (x is None) == (y is None), name
        if x is not None:
            torch.testing.assert_close(
                x, y, rtol=1e-6, atol=1e-9, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )


def warm(case, dtype=torch.float32):
    """Compile here what all ranks would compile at the same time."""
    p = nn.Parameter(torch.ones(3, dtype=dtype))
    p.grad = torch.ones_like(p)
    case.ours([p], **case.options).step()


# parameters that are given


class Layout(NamedTuple):
    """How parameters of these shapes are distributed: each over a mesh, or not at all."""

    name: str
    sizes: tuple
    placements: tuple
    # every other one is plain, or on a mesh of one dimension
    others: str = ""

    def place(self, i, t):
        t, placements = t.clone(), self.placements
        if self.others == "plain" and i % 2:
            return t
        if self.others == "meshes" and i % 2:
            return distribute_tensor(t, ranks.mesh(4), placements[:1], src_data_rank=None)
        if self.others == "crossed" and i % 2:
            placements = placements[::-1]
        placements = [p if isinstance(p, Replicate) or p.dim < t.dim() else Replicate() for p in placements]
        return distribute_tensor(t, ranks.mesh(*self.sizes), placements, src_data_rank=None)


ROWS, COLUMNS, COPIES = Shard(0), Shard(1), Replicate()
LAYOUTS = [
    Layout("rows", (4,), (ROWS,)),
    Layout("columns", (4,), (COLUMNS,)),
    Layout("replicated", (4,), (COPIES,)),
    Layout("hybrid", (2, 2), (COPIES, ROWS)),
    Layout("two-dims", (2, 2), (ROWS, COLUMNS)),
    Layout("one-dim-twice", (2, 2), (ROWS, ROWS)),
    Layout("tensor-parallel", (2, 2), (ROWS, COPIES), "crossed"),
    Layout("mixed", (4,), (ROWS,), "plain"),
    Layout("several-meshes", (2, 2), (ROWS, COLUMNS), "meshes"),
]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
# over four ranks: even, uneven, with empty parts, mostly empty, and what no dimension cuts
SHAPES = [(8, 6), (5, 7), (3, 4), (1, 9), (6,), (40, 30), (1,)]


class Pair:
    """The same optimizer over distributed and over whole tensors."""

    def __init__(self, layout, case, dtype=torch.float32, **options):
        self.layout = layout
        start = [torch.randn(shape).to(dtype) for shape in SHAPES]
        self.whole = [nn.Parameter(t.clone()) for t in start]
        self.parts = [nn.Parameter(layout.place(i, t)) for i, t in enumerate(start)]
        self.ours = case.ours(self.parts, **case.options, **options)
        self.one = case.ours(self.whole, **case.options, **options)

    def give_gradients(self, scale=1.0, bad=None):
        for i, (p, q) in enumerate(zip(self.parts, self.whole, strict=True)):
            q.grad = (scale * torch.randn(q.shape)).to(q.dtype)
            if bad is not None and i == 0:
                # in one rank's part, where there are parts
                q.grad[0, 0] = bad
            p.grad = self.layout.place(i, q.grad)

    def step(self, scale=1.0, bad=None):
        self.give_gradients(scale, bad)
        self.ours.step()
        self.one.step()

    def states(self):
        for p, q in zip(self.parts, self.whole, strict=True):
            assert self.ours.state[p].keys() == self.one.state[q].keys()
            for name, ours in self.ours.state[p].items():
                yield name, p, ours, self.one.state[q][name]

    def assert_alike(self, case):
        """Of every tensor the part that is here: all of them would take ranks a while."""
        for i, (p, q) in enumerate(zip(self.parts, self.whole, strict=True)):
            assert_alike(case, part(p), part(self.layout.place(i, q.detach())))
            for name, state in self.ours.state[p].items():
                if name != "step":
                    assert_close(part(state), part(self.layout.place(i, self.one.state[q][name])))
        assert all(ours == theirs for name, _, ours, theirs in self.states() if name == "step")


def given_parameters(layout, case):
    pair = Pair(layout, case)
    guarded = case.options.get("skip_nonfinite")
    for scale, bad in ((1.0, None), (0.001, None), (100.0, NAN if guarded else None), (10.0, None)):
        pair.step(scale, bad)
        if case.options.get("statistics"):
            assert_same_statistics(pair.ours.statistics(), pair.one.statistics())
    pair.assert_alike(case)
    assert pair.ours.skipped_steps == pair.one.skipped_steps == (1 if guarded else 0)
    for name, p, state, _ in pair.states():
        if name != "step":
            assert type(state) is type(p.data), name
            if isinstance(p, DTensor):
                assert state.device_mesh == p.device_mesh
                assert state.placements == p.placements
                assert (state.shape, state.stride()) == (p.shape, p.stride())
    assert {table.engine for table in pair.ours._plan.tables} == {engines.load("cpu", "cpu")[0]}


@layouts
@cases
def test_parts_are_stepped_as_the_whole(four, layout, case):
    warm(case)
    four.run(given_parameters, layout, case)


def stepped_quietly():
    pair = Pair(LAYOUTS[0], ADAMW)
    for _ in range(3):
        pair.step()
    plan, made = pair.ours._plan, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedstep._memory.plan.make_row", lambda *args: made.append(args))
        patch.setattr("fusedstep._memory.watch.Look", lambda *args: made.append(args))
        pair.ours.step()
    assert pair.ours._plan is plan
    assert not made


def test_a_quiet_step_makes_nothing_anew(four):
    four.run(stepped_quietly)


def replace_part(t):
    """By a copy: what still goes to the old one is lost, and what comes from it is noticed."""
    old, t._local_tensor = t._local_tensor, t._local_tensor.clone()
    old.fill_(NAN)


def move_part(t):
    old = t._local_tensor.data
    t._local_tensor.data = old.clone()
    old.fill_(NAN)


def turn_part(t):
    t._local_tensor = t._local_tensor.t().contiguous().t()


def copy_state(p, optimizer):
    old = optimizer.state[p]["exp_avg"]
    optimizer.state[p]["exp_avg"] = old.clone()
    old._local_tensor.fill_(NAN)


def share_all(p, optimizer):
    for t in (p, p.grad, *optimizer.state[p].values()):
        part(t).share_memory_()


# what a step must notice, and go on with the same numbers
PART_CHANGES = {
    "parameter has another part": lambda p, o: replace_part(p),
    "parameter's part moved": lambda p, o: move_part(p),
    "state has another part": lambda p, o: replace_part(o.state[p]["exp_avg"]),
    "state's part moved": lambda p, o: move_part(o.state[p]["exp_avg_sq"]),
    "state is another": copy_state,
    "gradient has another part": lambda p, o: replace_part(p.grad),
    "gradient's part lies otherwise": lambda p, o: turn_part(p.grad),
    "gradient is another": lambda p, o: setattr(p, "grad", p.grad.clone()),
    "parameter's part lies otherwise": lambda p, o: turn_part(p),
    "everything shared": share_all,
    "nothing": lambda p, o: None,
}


def changed_between_steps(change, checks):
    found = []
    with pytest.MonkeyPatch.context() as patch:
        CHECKS[checks](patch)
        for name in (change, "nothing"):
            torch.manual_seed(1)
            p = nn.Parameter(distribute_tensor(torch.randn(4, 4), ranks.mesh(2), [ROWS]))
            optimizer = fusedstep.AdamW([p], lr=0.1)
            p.grad = distribute_tensor(torch.randn(4, 4), ranks.mesh(2), [ROWS])
            for i in range(6):
                if i in (2, 4):
                    PART_CHANGES[name](p, optimizer)
                optimizer.step()
            found.append([whole(t) for t in (p, *optimizer.state[p].values())])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("checks", CHECKS)
@pytest.mark.parametrize("change", PART_CHANGES)
def test_whatever_is_done_to_parts_between_steps_is_noticed(two, change, checks):
    two.run(changed_between_steps, change, checks)


def left_out(cls, options):
    """A parameter over the first two ranks, beside one over all."""
    meshes = DeviceMesh("cpu", [0, 1]), ranks.mesh(4)
    start, grads = ([torch.randn(5, 3) for _ in meshes] for _ in range(2))
    params = [nn.Parameter(distribute_tensor(t, mesh, [ROWS])) for t, mesh in zip(start, meshes, strict=True)]
    plain = [nn.Parameter(t) for t in start]
    ours, one = (cls(ps, lr=0.1, **options) for ps in (params, plain))
    for p, q, g, mesh in zip(params, plain, grads, meshes, strict=True):
        p.grad, q.grad = distribute_tensor(g, mesh, [ROWS]), g
    if "skip_nonfinite" in options:
        # those that are in it would wait for the others
        if rank() > 1:
            with pytest.raises(RuntimeError, match=r"mesh \[0, 1\] leaves out this rank"):
                ours.step()
        return
    for _ in range(3):
        ours.step()
        one.step()
    for p, q, mesh in zip(params, plain, meshes, strict=True):
        rows = q.detach().chunk(mesh.size())
        if rank() < mesh.size() and rank() < len(rows):
            assert_close(part(p), rows[rank()])
        else:
            assert part(p).numel() == 0


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (fusedstep.AdamW, {}),
        (fusedstep.Lamb, {"max_grad_norm": None}),
        (fusedstep.AdamW, {"skip_nonfinite": True}),
    ],
)
def test_a_mesh_may_leave_out_ranks(four, cls, options):
    four.run(left_out, cls, options)


def of_dtype(layout, case, dtype, engine):
    pair = Pair(layout, case, dtype, engine=engine)
    for scale in (1.0, 0.001, 100.0):
        pair.step(scale)
    pair.assert_alike(case)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("case", [SGD, LAMB], ids=name_of)
def test_parts_of_any_dtype_are_stepped_as_the_whole(four, case, dtype):
    warm(case, dtype)
    four.run(of_dtype, LAYOUTS[0], case, dtype, None)


@pytest.mark.parametrize("case", [SGD, LAMB], ids=name_of)
def test_every_engine_steps_parts(two, case, engine):
    if engine != "cpu":
        two.run(of_dtype, Layout("", (2,), (ROWS,)), case, torch.float32, engine)


def lying_otherwise_on_one_rank(case):
    """Where rows come in another order there, and some are stepped on copies."""
    start = [torch.randn(4, 6, dtype=torch.float32 if i % 2 else torch.float64) for i in range(4)]
    found = []
    for torn in (False, True):
        params = []
        for i, t in enumerate(start):
            part = t[2 * rank() : 2 * rank() + 2].clone()
            if torn and rank() == 0 and i < 2:
                part = torch.empty(2, 12, dtype=t.dtype)[:, ::2].copy_(part)
            part = DTensor.from_local(part, ranks.mesh(2), [ROWS], run_check=False, shape=(4, 6), stride=(6, 1))
            params.append(nn.Parameter(part))
        optimizer = case.ours(params, **case.options)
        for i in range(3):
            torch.manual_seed(i)
            for p in params:
                p.grad = distribute_tensor(torch.randn(4, 6).to(p.dtype), ranks.mesh(2), [ROWS])
            optimizer.step()
        found.append([whole(p) for p in params])
    for p, q in zip(*found, strict=True):
        assert_alike(case, p, q)


@pytest.mark.parametrize("case", [SGD, LAMB, EVERYTHING], ids=name_of)
def test_parts_may_lie_otherwise_on_one_rank(two, case):
    two.run(lying_otherwise_on_one_rank, case)


def arriving_later():
    from torch.distributed._functional_collectives import all_reduce

    mesh, params = ranks.mesh(2), []
    for waits in (False, True):
        p = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [ROWS]))
        optimizer = fusedstep.AdamW([p], lr=0.1, max_grad_norm=0.1)
        for i in range(3):
            g = all_reduce(torch.full((2, 3), 1.0 + i + rank()), "sum", mesh.get_group())
            assert type(g) is not torch.Tensor
            g = g.wait() if waits else g
            p.grad = DTensor.from_local(g, mesh, [ROWS], run_check=False)
            optimizer.step()
        params.append(whole(p))
    assert torch.equal(*params)


def test_gradients_that_are_still_on_their_way_are_waited_for(two):
    two.run(arriving_later)


def copied():
    pair = Pair(Layout("", (2,), (ROWS,)), LAMB)
    pair.step()
    twin = copy.deepcopy(pair.ours)
    pair.give_gradients()
    for p, q in zip(pair.parts, twin.param_groups[0]["params"], strict=True):
        q.grad = p.grad.clone()
    pair.ours.step()
    twin.step()
    for p, q in zip(pair.parts, twin.param_groups[0]["params"], strict=True):
        assert torch.equal(whole(p), whole(q))


def test_a_copy_of_an_optimizer_steps_its_own_parts(two):
    two.run(copied)


def stepped_in_backward():
    mesh, case = ranks.mesh(2), LAMB
    params = [nn.Parameter(distribute_tensor(torch.full((4, 3), 2.0 + i), mesh, [ROWS])) for i in range(3)]
    plain = [nn.Parameter(whole(p).clone()) for p in params]
    optimizers = {p: case.ours([p], **case.options) for p in (*params, *plain)}
    for p, optimizer in optimizers.items():
        p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step(zero_grad=True))
    for _ in range(3):
        sum(p.square().sum().full_tensor() for p in params).backward()
        sum(p.square().sum() for p in plain).backward()
    for p, q in zip(params, plain, strict=True):
        assert_alike(case, whole(p), q.detach())


def test_parts_may_be_stepped_as_soon_as_their_gradients_are_there(two):
    two.run(stepped_in_backward)


def clipped_by_a_function(norm_type):
    pair = Pair(Layout("", (2,), (ROWS,)), ADAMW)
    for scale in (1.0, 0.001, 100.0):
        pair.give_gradients(scale)
        norms = [fusedstep.functional.clip_grad_norm_(ps, 0.5, norm_type) for ps in (pair.parts, pair.whole)]
        assert_close(*norms)
        for p, q in zip(pair.parts, pair.whole, strict=True):
            assert_close(whole(p.grad), q.grad)


@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_the_function_that_clips_takes_parts(two, norm_type):
    two.run(clipped_by_a_function, norm_type)


def stepped_by_a_function():
    pair = Pair(Layout("", (2,), (ROWS,)), ADAMW)
    states = [[[torch.zeros_like(p).detach() for p in ps] for _ in range(2)] for ps in (pair.parts, pair.whole)]
    for i in range(3):
        pair.give_gradients()
        for ps, (m, v) in zip((pair.parts, pair.whole), states, strict=True):
            fusedstep.functional.adamw_(
                [p.detach() for p in ps], [p.grad for p in ps], m, v, step=i + 1, lr=0.1
            )
    for p, q in zip(pair.parts, pair.whole, strict=True):
        assert_close(whole(p), q.detach())


def test_the_function_that_steps_takes_parts(two):
    two.run(stepped_by_a_function)


def with_late_gradients(case):
    pair = Pair(LAYOUTS[0], case)
    for missing in ((0, 2), (), (1,), (0, 1, 2, 3, 4, 5)):
        pair.give_gradients()
        for i in missing:
            pair.parts[i].grad = pair.whole[i].grad = None
        pair.ours.step(zero_grad=True)
        pair.one.step(zero_grad=True)
    pair.assert_alike(case)


@kinds
def test_gradients_may_be_missing_on_all_ranks(four, case):
    four.run(with_late_gradients, case)


def averages_shown(layout):
    pair = Pair(layout, ADAMW.with_options(lr=0.1, ema_decay=0.5))
    for _ in range(3):
        pair.step()
    for some in ((), (nn.ParameterList(pair.parts[1:]),)):
        with pytest.raises(RuntimeError, match=r"use ema_parameters\(model\)"), pair.ours.ema_parameters(*some):
            pass
    with pair.ours.ema_parameters(nn.ParameterList(pair.parts)), pair.one.ema_parameters():
        pair.assert_alike(ADAMW)
    pair.assert_alike(ADAMW)


@layouts
def test_averages_of_parts_are_shown(four, layout):
    four.run(averages_shown, layout)


def averages_seen_by_fsdp(evaluates_before):
    """Where the root module keeps what it has gathered for a forward, until a backward."""
    model = fully_shard(model_of(), mesh=ranks.mesh(2))
    plain = model_of()
    ours, one = (fusedstep.AdamW(m.parameters(), lr=0.1, ema_decay=0.5) for m in (model, plain))
    seen = []
    for m, optimizer in ((model, ours), (plain, one)):
        for i in range(3):
            loss_of(m, batch_of(0, i)).backward()
            optimizer.step(zero_grad=True)
        with torch.no_grad():
            found = [m(batch_of(0))] if evaluates_before else []
            with optimizer.ema_parameters(m):
                found.append(m(batch_of(0)))
            seen.append([*found, m(batch_of(0))])
    assert not torch.equal(*seen[0][-2:])
    for a, b in zip(*seen, strict=True):
        assert_close(a, b, 1e-5)


class Interrupted(nn.Module):
    def forward(self, x):
        if x.isnan().any():
            raise ZeroDivisionError
        return x


def averages_after_an_exception():
    """FSDP2 keeps what it has gathered for a forward that never ended: that is told, and can be mended."""
    model = fully_shard(nn.Sequential(nn.Linear(6, 5), Interrupted(), nn.Linear(5, 1)), mesh=ranks.mesh(2))
    optimizer = fusedstep.AdamW(model.parameters(), lr=0.1, ema_decay=0.5)
    loss_of(model, batch_of(0)).backward()
    optimizer.step(zero_grad=True)
    with torch.no_grad():
        before = model(batch_of(0))
        advice = r"call set_reshard_after_forward\(True\) and reshard"
        with pytest.raises(RuntimeError, match=advice), optimizer.ema_parameters(model):
            model(batch_of(0) * NAN)
        model.set_reshard_after_forward(True)
        model.reshard()
        assert torch.equal(model(batch_of(0)), before)
    loss_of(model, batch_of(0)).backward()
    optimizer.step()


def test_a_forward_that_fails_with_averages_leaves_none_behind(two):
    two.run(averages_after_an_exception)


@pytest.mark.parametrize("evaluates_before", [False, True])
def test_averages_are_seen_by_what_fsdp_has_gathered(two, evaluates_before):
    two.run(averages_seen_by_fsdp, evaluates_before)


def zeroed_in_place():
    pair = Pair(LAYOUTS[7], CLIPPED)
    for _ in range(2):
        pair.give_gradients()
        kept = [p.grad for p in pair.parts]
        pair.ours.step(zero_grad=True, set_to_none=False)
        pair.one.step()
    for p, g in zip(pair.parts, kept, strict=True):
        assert p.grad is g
        assert not whole(g).any()
    pair.assert_alike(CLIPPED)


def test_gradients_of_parts_are_zeroed_in_place(four):
    four.run(zeroed_in_place)


# models that are wrapped


def model_of(rank=0):
    torch.manual_seed(rank)
    # over four ranks: uneven, with an empty part, mostly empty
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


def batch_of(rank, i=0):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * i + rank))


def loss_of(model, x):
    return (model(x) - x[:, :1]).square().mean()


def ddp(model, **options):
    return nn.parallel.DistributedDataParallel(model, **options)


def fsdp(model, mesh=None, **options):
    fully_shard(model[0], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def hsdp(model, **options):
    return fsdp(model, ranks.mesh(2, 2), **options)


def fsdp_of_tp(_):
    """Tensor parallelism in pairs, FSDP over what is left."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    # what it cuts must be even
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1))
    mesh = ranks.mesh(2, 2)
    parallelize_module(model, mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fsdp(model, mesh["outer"])


def average_of_ranks(model, i, size):
    """Gradients as if each rank had given its own, added up in pairs."""
    sums = []
    for r in range(size):
        model.zero_grad()
        loss_of(model, batch_of(r, i)).backward()
        sums.append([p.grad.clone() for p in model.parameters()])
    while len(sums) > 1:
        sums = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(sums[::2], sums[1::2], strict=True)]
    for p, total in zip(model.parameters(), sums[0], strict=True):
        p.grad = total / size


def trained_from_batches(wrap, case):
    model, one = wrap(model_of()), model_of()
    ours, theirs = case.ours(model.parameters(), **case.options), case.ours(one.parameters(), **case.options)
    for i in range(3):
        ours.zero_grad()
        loss_of(model, batch_of(rank(), i)).backward()
        ours.step()
        average_of_ranks(one, i, torch.distributed.get_world_size())
        theirs.step()
        if case.options.get("statistics"):
            assert_same_statistics(ours.statistics(), theirs.statistics())
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        assert_close(whole(p), q.detach())


@pytest.mark.parametrize("wrap", [ddp, fsdp])
@cases
def test_a_wrapped_model_trains_as_one_process_does_with_all_batches(two, wrap, case):
    two.run(trained_from_batches, wrap, case)


@cases
def test_a_hybrid_sharded_model_trains_as_one_process_does_with_all_batches(four, case):
    four.run(trained_from_batches, hsdp, case)


def trained_from_gradients(wrap, case, backward=None, steps=3):
    """Steps of a wrapped model, and of one process that is given the gradients it arrived at."""
    model = wrap(model_of())
    twins = [nn.Parameter(whole(p).clone()) for p in model.parameters()]
    ours, one = case.ours(model.parameters(), **case.options), case.ours(twins, **case.options)
    for i in range(steps):
        ours.zero_grad()
        (backward or plain_backward)(model, i)
        for p, q in zip(model.parameters(), twins, strict=True):
            q.grad = whole(p.grad).clone()
        ours.step()
        one.step()
        if case.options.get("statistics"):
            assert_same_statistics(ours.statistics(), one.statistics())
    for p, q in zip(model.parameters(), twins, strict=True):
        assert_alike(case, whole(p), q.detach())
    assert all(ours.state[p]["step"] == steps for p in model.parameters() if "step" in ours.state[p])


def plain_backward(model, i):
    loss_of(model, batch_of(rank(), i)).backward()


def same_backward(model, i):
    loss_of(model, batch_of(0, i)).backward()


def accumulating_backward(model, i):
    model.set_requires_gradient_sync(False)
    loss_of(model, batch_of(rank(), i)).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, batch_of(rank(), i + 50)).backward()


def no_sync_backward(model, i):
    with model.no_sync():
        loss_of(model, batch_of(rank(), i)).backward()
    loss_of(model, batch_of(rank(), i + 50)).backward()


def low_precision(model):
    return fsdp(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def with_views(model):
    return ddp(model, gradient_as_bucket_view=True)


def with_hook(model):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = ddp(model)
    model.register_comm_hook(None, fp16_compress_hook)
    return model


def keeping_whole(model):
    return fsdp(model, reshard_after_forward=False)


def offloaded(model):
    return fsdp(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


@cases
def test_parts_of_fsdp_may_be_uneven_and_empty(four, case):
    four.run(trained_from_gradients, fsdp, case)


@cases
def test_fsdp_over_tensor_parallelism_is_stepped_as_the_whole(four, case):
    four.run(trained_from_gradients, fsdp_of_tp, case, same_backward)


WRAPPERS = {
    "ddp-views": (with_views, None),
    "ddp-hook": (with_hook, None),
    "ddp-accumulating": (ddp, no_sync_backward),
    "ddp-accumulating-views": (with_views, no_sync_backward),
    "fsdp-bf16": (low_precision, None),
    "fsdp-accumulating": (fsdp, accumulating_backward),
    "fsdp-not-resharding": (keeping_whole, None),
    "fsdp-offloading": (offloaded, None),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", [SGD, CLIPPED, LAMB], ids=name_of)
def test_ways_to_wrap_a_model(two, wrapper, case):
    two.run(trained_from_gradients, WRAPPERS[wrapper][0], case, WRAPPERS[wrapper][1])


def clipped_by_torch():
    model, twin = fsdp(model_of()), fsdp(model_of())
    ours = fusedstep.AdamW(model.parameters(), lr=0.1, max_grad_norm=0.1)
    theirs = fusedstep.AdamW(twin.parameters(), lr=0.1)
    norms = []
    for i in range(4):
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            plain_backward(net, i)
        norms.append(float(whole(nn.utils.clip_grad_norm_(twin.parameters(), 0.1))))
        ours.step()
        theirs.step()
    assert max(norms) > 0.1, norms
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(whole(p), whole(q))


def test_clipping_is_torchs_clip_grad_norm_over_parts(four):
    four.run(clipped_by_torch)


def zero_redundancy(cls, options):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, one = ddp(model_of()), ddp(model_of())
    clips = options.get("max_grad_norm", 1.0 if cls is fusedstep.Lamb else None) is not None
    made = functools.partial(cls, norm_group=torch.distributed.group.WORLD) if clips else cls
    ours = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=made, lr=0.1, **options)
    theirs = cls(one.parameters(), lr=0.1, **options)
    for i in range(4):
        for net, optimizer in ((model, ours), (one, theirs)):
            optimizer.zero_grad()
            plain_backward(net, i)
            optimizer.step()
    ours.consolidate_state_dict()
    if rank() == 0:
        assert len(ours.state_dict()["state"]) == 6
    # it can be saved, whatever the local optimizer was given
    torch.save(ours.state_dict() if rank() == 0 else {}, io.BytesIO())
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        if clips:
            assert_close(p.detach(), q.detach())
        else:
            assert torch.equal(p, q)


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9}, {"max_grad_norm": None}, {"max_grad_norm": 0.1}])
@pytest.mark.parametrize("cls", [fusedstep.AdamW, fusedstep.Lamb])
def test_zero_redundancy_optimizer_splits_states(two, cls, options):
    two.run(zero_redundancy, cls, options)


# ranks that hold other parameters


class Stages:
    """An optimizer for the parameters that this rank has, and one for those of all ranks."""

    def __init__(self, case, held, **options):
        """`held`: of every parameter the rank that has it."""
        self.whole = [nn.Parameter(torch.randn(shape)) for shape in SHAPES[: len(held)]]
        self.mine = [i for i, stage in enumerate(held) if stage == rank()]
        self.params = [nn.Parameter(self.whole[i].detach().clone()) for i in self.mine]
        self.world = torch.distributed.group.WORLD
        options = {**case.options, **options}
        self.ours = case.ours([{"params": self.params}], norm_group=self.world, **options)
        self.one = case.ours(self.whole, **options)

    def step(self, scale=1.0, bad=None, absent=()):
        for i, q in enumerate(self.whole):
            q.grad = None if i in absent else scale * torch.randn(q.shape)
            if i == 0 and bad is not None:
                q.grad[0, 0] = bad
        for i, p in zip(self.mine, self.params, strict=True):
            p.grad = None if self.whole[i].grad is None else self.whole[i].grad.clone()
        self.ours.step()
        self.one.step()

    def assert_alike(self):
        for i, p in zip(self.mine, self.params, strict=True):
            assert_close(p.detach(), self.whole[i].detach())


def staged(case, held, engine):
    stages = Stages(case, held, engine=engine)
    guarded = case.options.get("skip_nonfinite")
    for scale, bad in ((1.0, None), (0.001, None), (100.0, NAN if guarded else None), (10.0, None)):
        stages.step(scale, bad)
    # only one rank has a gradient, then none has
    stages.step(absent=range(1, len(held)))
    stages.step(absent=range(len(held)))
    stages.step()
    stages.assert_alike()
    assert stages.ours.skipped_steps == stages.one.skipped_steps == (1 if guarded else 0)
    if stages.params:
        factors = stages.ours.statistics().clip_factors
        assert_close(factors, stages.one.statistics().clip_factors[stages.mine])


_CLIPPED = [case for case in MORE if "everything" in case.name] + [
    CLIPPED,
    LARGEST,
    LAMB,
]


@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("held", [(0, 1, 0, 1, 1, 0), (0, 0, 0), (0, 1, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("case", _CLIPPED, ids=name_of)
def test_ranks_with_other_parameters_clip_and_skip_together(four, case, held, engine):
    four.run(staged, case._replace(options={**case.options, "statistics": True}), held, engine)


@pytest.mark.skipif(HAS_GPU or not HAS_TRITON, reason="Triton takes CPU tensors in its interpreter only")
@pytest.mark.parametrize("held", [(0, 1, 0, 1, 1, 0), (0, 0, 0)], ids=str)
def test_ranks_with_other_parameters_clip_together_on_the_triton_engine(two, held):
    case = EVERYTHING
    two.run(staged, case, held, "triton")


def staged_and_scaled(held, unscales):
    """The scale of a GradScaler follows what any rank has found."""
    case = CLIPPED.with_options(lr=0.1)
    stages, scaler = Stages(case, held), fusedstep.GradScaler("cpu", init_scale=64.0)
    one = fusedstep.GradScaler("cpu", init_scale=64.0)
    seen = []
    for bad in (None, INF, None, None):
        scales = [float(s.scale(torch.ones(()))) for s in (scaler, one)]
        assert scales[0] == scales[1]
        for i, q in enumerate(stages.whole):
            q.grad = scales[0] * torch.randn(q.shape)
            if i == 0 and bad is not None:
                q.grad[0, 0] = bad
        for i, p in zip(stages.mine, stages.params, strict=True):
            p.grad = stages.whole[i].grad.clone()
        for s, optimizer in ((scaler, stages.ours), (one, stages.one)):
            if unscales:
                s.unscale_(optimizer)
            s.step(optimizer)
            s.update()
        seen.append((bool(stages.ours.step_was_skipped), int(stages.ours.skipped_steps)))
    stages.assert_alike()
    return seen


def staged_and_scaled_by_torchs(held, fused):
    """Every rank takes part in a step that one of them has found an infinity for."""
    case = CLIPPED.with_options(lr=0.1)
    stages, scaler = Stages(case, held, fused=fused), torch.amp.GradScaler("cpu", init_scale=4.0)
    assert stages.ours._step_supports_amp_scaling
    scaler.scale(torch.ones(()))
    seen = []
    for bad in (None, INF, None):
        grads = [torch.randn(q.shape) for q in stages.whole]
        if bad is not None:
            grads[0][0, 0] = bad
        else:
            for q, g in zip(stages.whole, grads, strict=True):
                q.grad = g
            stages.one.step()
        for i, p in zip(stages.mine, stages.params, strict=True):
            p.grad = 4 * grads[i]
        scaler.step(stages.ours)
        if stages.params:
            scaler.update(4.0)
        else:
            scaler._per_optimizer_states.clear()
        for i, p in zip(stages.mine, stages.params, strict=True):
            # on a skipped step they stay scaled
            assert torch.equal(p.grad, grads[i] if bad is None else 4 * grads[i])
        seen.append(bool(stages.ours.step_was_skipped))
    stages.assert_alike()
    return seen


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("held", [(0, 1), (0, 0, 0)], ids=str)
def test_with_torchs_scaler_ranks_with_other_parameters_skip_together(two, held, fused):
    assert two.run(staged_and_scaled_by_torchs, held, fused) == [[False, True, False]] * 2


def on_two_meshes(fused):
    """A parameter that both ranks hold parts of, and one that each rank has for itself."""
    mesh, zeros = ranks.mesh(2, 1), torch.zeros(4, 3)
    place = lambda t, dim, placement: distribute_tensor(t, mesh[dim], [placement], src_data_rank=None)
    layout = ("outer", ROWS), ("inner", COPIES)
    plain = [nn.Parameter(zeros.clone()) for _ in layout]
    optimizer = fusedstep.SGD(plain, lr=1.0, max_grad_norm=100.0, fused=fused)
    assert optimizer._step_supports_amp_scaling == bool(fused)
    # as accelerate puts DTensors in the place of parameters
    params = [nn.Parameter(place(zeros, *where)) for where in layout]
    optimizer.param_groups[0]["params"] = params
    assert optimizer._step_supports_amp_scaling == (fused is not False)
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=4.0), []
    scaler.scale(torch.ones(()))
    for overflows in (False, True, False):
        for i, (p, where) in enumerate(zip(params, layout, strict=True)):
            grad = torch.full((4, 3), 4.0)
            if overflows and i == 1 and rank() == 0:
                grad[0, 0] = INF
            p.grad = place(grad, *where)
        scaler.step(optimizer)
        scaler.update(4.0)
        seen.append([p.to_local().unique().tolist() for p in params])
    assert all((p.grad.to_local() == 1).all() for p in params)
    return seen


@pytest.mark.parametrize("fused", [None, True])
def test_with_torchs_scaler_ranks_skip_together_what_is_on_several_meshes(two, fused):
    assert two.run(on_two_meshes, fused) == [[[[-1.0]] * 2, [[-1.0]] * 2, [[-2.0]] * 2]] * 2


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("held", [(0, 1, 0, 1), (0, 0, 0), (1, 1)], ids=str)
def test_a_scaler_of_ours_follows_all_ranks(two, held, unscales):
    assert two.run(staged_and_scaled, held, unscales) == [[(False, 0), (True, 1), (False, 1), (False, 1)]] * 2


def watched_by_one_rank(options):
    case = CLIPPED.with_options(**options)
    stages = Stages(case, (0, 1, 0, 1), statistics=rank() == 0)
    for _ in range(3):
        stages.step()
    stages.ours.collect_statistics = rank() == 1
    stages.step()
    stages.assert_alike()
    if rank() == 1:
        stages.ours.statistics()


@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}, {"norm_type": INF}], ids=str)
def test_one_of_the_ranks_may_collect_statistics(two, options):
    two.run(watched_by_one_rank, options)


def grouped():
    """A process group that an optimizer was given goes with the last that uses it."""
    group = torch.distributed.new_group([0, 1])
    gone, p = weakref.ref(group), nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = fusedstep.AdamW([p], max_grad_norm=1.0, norm_group=group)
    optimizer.step()
    del optimizer
    torch.distributed.destroy_process_group(group)
    del group
    gc.collect()
    return gone() is None


def test_process_groups_are_not_kept(two):
    assert two.run(grouped) == [True, True]


def copied_stages():
    stages = Stages(CLIPPED, (0, 1, 0, 1))
    stages.step()
    twin = copy.deepcopy(stages.ours)
    assert twin.norm_group is stages.ours.norm_group
    for p, q in zip(twin.param_groups[0]["params"], stages.params, strict=True):
        p.grad = q.grad.clone()
    twin.step()
    stages.ours.step()
    for p, q in zip(twin.param_groups[0]["params"], stages.params, strict=True):
        assert torch.equal(p, q)
    with pytest.raises(TypeError, match=r"save its state_dict\(\), and load that"):
        pickle.dumps(stages.ours)
    # another group is another step, for all ranks at once
    stages.ours.norm_group = None
    stages.ours.step()
    assert stages.ours._plan.settings.norm_ranks is None


def test_a_copy_talks_to_the_same_ranks(two):
    two.run(copied_stages)


def staged_found_inf():
    stages = Stages(ADAMW.with_options(lr=0.1), (0, 1, 2, 3))
    stages.step()
    before = [p.detach().clone() for p in stages.params]
    stages.ours.grad_scale, stages.ours.found_inf = torch.tensor(1.0), torch.tensor(float(rank() == 2))
    stages.ours.step()
    assert all(map(torch.equal, stages.params, before))
    return bool(stages.ours.step_was_skipped)


def test_ranks_with_other_parameters_skip_what_one_of_them_found(four):
    assert four.run(staged_found_inf) == [True] * 4


def staged_and_sharded(case):
    """Two stages of a pipeline, each sharded over two ranks."""
    mesh = ranks.mesh(2, 2)
    stage, start = mesh.get_local_rank("outer"), [torch.randn(shape) for shape in SHAPES]
    place = lambda t: distribute_tensor(t.clone(), mesh["inner"], [Shard(0)], src_data_rank=None)
    whole_ones = [nn.Parameter(t.clone()) for t in start]
    mine = [i for i in range(len(start)) if i % 2 == stage]
    params = [nn.Parameter(place(start[i])) for i in mine]
    ours = case.ours(params, norm_group=mesh.get_group("outer"), **case.options)
    one = case.ours(whole_ones, **case.options)
    for scale in (1.0, 0.001, 10.0):
        for q in whole_ones:
            q.grad = scale * torch.randn(q.shape)
        for i, p in zip(mine, params, strict=True):
            p.grad = place(whole_ones[i].grad)
        ours.step()
        one.step()
    for i, p in zip(mine, params, strict=True):
        assert_close(whole(p), whole_ones[i].detach())


@pytest.mark.parametrize("case", _CLIPPED, ids=name_of)
def test_stages_may_be_sharded(four, case):
    four.run(staged_and_sharded, case)


def refused_norm_groups():
    p = nn.Parameter(distribute_tensor(torch.ones(4, 3), ranks.mesh(2), [Shard(0)]))
    world = torch.distributed.group.WORLD
    p.grad = torch.ones_like(p)
    optimizer = fusedstep.AdamW([p], max_grad_norm=1.0, norm_group=world)
    with pytest.raises(RuntimeError, match=r"leave norm_group out, or give it ranks that hold other"):
        optimizer.step()
    assert not optimizer.state
    assert (whole(p) == 1).all()
    with pytest.raises(ValueError, match="use clip_scope='global', or leave norm_group out"):
        fusedstep.BertAdam([p], lr=0.1, clip_scope="tensor", norm_group=world)
    with pytest.raises(ValueError, match="holds for the whole optimizer"):
        fusedstep.AdamW([{"params": [p], "norm_group": world}])
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with pytest.raises(ValueError, match=r"functools.partial\(Lamb, norm_group=...\)"):
        ZeroRedundancyOptimizer(model_of().parameters(), optimizer_class=fusedstep.Lamb, norm_group=world)


def test_groups_that_would_count_twice_are_refused(two):
    two.run(refused_norm_groups)


@pytest.mark.parametrize("given", ["pp", 0, object()], ids=["word", "number", "object"])
def test_what_is_no_process_group_is_refused(given):
    with pytest.raises(TypeError, match=r"use a process group that this rank is in"):
        fusedstep.AdamW([nn.Parameter(torch.ones(2))], norm_group=given)


def flat(cls, torchs, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrap = lambda: FullyShardedDataParallel(
        model_of(), use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    model, twin = wrap(), wrap()
    ours, theirs = cls(model.parameters(), lr=0.1), torchs(twin.parameters(), lr=0.1)
    for i in range(4):
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            plain_backward(net, i)
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(p.detach(), q.detach())


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("cls", TORCH_CLASSES, ids=lambda cls: cls.__name__)
def test_flat_parameters_of_fsdp1_are_stepped(two, cls, use_orig_params):
    two.run(flat, cls, getattr(torch.optim, cls.__name__), use_orig_params)


def flat_norms(cls, options, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(model_of(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    optimizer = cls(model.parameters(), **options)
    plain_backward(model, 0)
    before = copy.deepcopy([p.detach() for p in model.parameters()])
    with pytest.raises(RuntimeError, match=r"norms of whole tensors.*FSDP2"):
        optimizer.step()
    assert not optimizer.state
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (fusedstep.Lamb, {"max_grad_norm": None}),
        (fusedstep.Lamb, {}),
        (fusedstep.AdamW, {"max_grad_norm": 1.0}),
        (fusedstep.AdamW, {"skip_nonfinite": True}),
        (fusedstep.AdamW, {"statistics": True}),
        (fusedstep.BertAdam, {}),
    ],
)
def test_norms_of_flat_parameters_are_refused(two, cls, options, use_orig_params):
    two.run(flat_norms, cls, options, use_orig_params)


# decisions


def agreed_by_fsdp1(use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model = FullyShardedDataParallel(model_of(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    optimizer, scaler = fusedstep.AdamW(model.parameters()), ShardedGradScaler("cpu", init_scale=8.0)
    for finds in (False, True):
        before = copy.deepcopy([p.detach() for p in model.parameters()])
        scaler.scale(loss_of(model, batch_of(rank()))).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None and p.grad.numel()]
        if finds and rank() == 0:
            grads[0].view(-1)[0] = INF
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert finds == all(map(torch.equal, model.parameters(), before))
        assert scaler.get_scale() == (4 if finds else 8)
    # what cannot know of other ranks
    ours = fusedstep.GradScaler("cpu", init_scale=8.0)
    ours.scale(loss_of(model, batch_of(rank()))).backward()
    with pytest.raises(RuntimeError, match="ShardedGradScaler"):
        ours.step(optimizer)
    averaged = fusedstep.AdamW(model.parameters(), ema_decay=0.9)
    averaged.step()
    with pytest.raises(RuntimeError, match="FSDP1 keeps gathered copies"), averaged.ema_parameters(model):
        pass


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_scaler_of_fsdp1_skips_on_all_ranks_what_one_of_them_found(two, use_orig_params):
    two.run(agreed_by_fsdp1, use_orig_params)


def agreed(layout, how):
    options = {"lr": 0.1, "skip_nonfinite": how == "guard", "fused": True if how == "torchs-fused" else None}
    pair = Pair(layout, ADAMW._replace(options=options))
    pair.step()
    before = [p.detach().clone() for p in pair.parts]
    scaler = {"ours": fusedstep.GradScaler, "torchs": torch.amp.GradScaler}.get(how.removesuffix("-fused"))
    if scaler is not None:
        scaler = scaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
    pair.give_gradients(bad=None if how == "found_inf" else NAN)
    if how == "found_inf":
        pair.ours.grad_scale, pair.ours.found_inf = torch.tensor(1.0), torch.tensor(float(rank() == 0))
        pair.ours.step()
        del pair.ours.grad_scale, pair.ours.found_inf
    elif scaler is not None:
        scaler.step(pair.ours)
        scaler.update()
        assert scaler.get_scale() == 2
    else:
        pair.ours.step()
    for p, q in zip(pair.parts, before, strict=True):
        assert torch.equal(part(p), part(q))
    assert all(pair.ours.state[p]["step"] == 1 for p in pair.parts)
    skipped = bool(pair.ours.step_was_skipped), int(pair.ours.skipped_steps)
    pair.ours.step() if how == "found_inf" else pair.step()
    return skipped, bool(pair.ours.step_was_skipped), int(pair.ours.skipped_steps)


@pytest.mark.parametrize("how", ["guard", "ours", "torchs", "torchs-fused", "found_inf"])
@layouts
def test_all_ranks_skip_what_one_of_them_cannot_step(four, layout, how):
    if how == "found_inf" and all(isinstance(p, Replicate) for p in layout.placements):
        pytest.skip("copies are the same on all ranks")
    if how.startswith("torchs") and layout.others == "plain":
        pytest.skip("torch's GradScaler takes no plain tensors among distributed ones")
    # a step that torch's does not call knows nothing of it
    called = how != "torchs" or layout.others == "meshes"
    assert four.run(agreed, layout, how) == [((True, 1), False, 1) if called else ((False, 0), False, 0)] * 4


def first_step_skipped(layout):
    case = SGD.with_options(lr=0.1, dampening=0.5, skip_nonfinite=True)
    pair = Pair(layout, case)
    pair.give_gradients(bad=NAN)
    # one that comes later makes the optimizer look at everything anew
    pair.parts[-1].grad = pair.whole[-1].grad = None
    pair.ours.step()
    pair.one.step()
    pair.step()
    pair.step()
    pair.assert_alike(case)


def test_a_momentum_whose_first_step_was_skipped_starts_with_the_second(four):
    four.run(first_step_skipped, LAYOUTS[0])


def with_summands(of_parameter):
    mesh = ranks.mesh(2)
    shard = lambda t: distribute_tensor(t, mesh, [Shard(0)])
    params = [nn.Parameter(shard(torch.ones(4, 3))) for _ in range(2)]
    if of_parameter:
        params[1] = nn.Parameter(DTensor.from_local(torch.ones(4, 3), mesh, [Partial()]))
    params[0].grad = shard(torch.ones(4, 3))
    params[1].grad = DTensor.from_local(torch.ones(4, 3), mesh, [Partial()])
    optimizer = fusedstep.AdamW(params, max_grad_norm=1.0)
    with pytest.raises(RuntimeError, match=r"every rank holds a summand; redistribute it"):
        optimizer.step()
    assert not optimizer.state
    assert all((whole(p) == (2 if of_parameter and p is params[1] else 1)).all() for p in params)


@pytest.mark.parametrize("of_parameter", [False, True])
def test_summands_are_refused(two, of_parameter):
    two.run(with_summands, of_parameter)


def distributed_otherwise(stepped):
    mesh = ranks.mesh(2)
    shard = lambda t, *where: distribute_tensor(t.clone(), mesh, [*where])
    params = [nn.Parameter(shard(torch.ones(4, 4), Shard(0))) for _ in range(2)]
    optimizer = fusedstep.AdamW(params)
    for p in params:
        p.grad = shard(torch.ones(4, 4), Shard(0))
    if stepped:
        optimizer.step()
    kept = copy.deepcopy([whole(t) for p in params for t in (p, *optimizer.state[p].values())])
    for wrong, advice in (
        (shard(torch.ones(4, 4), Shard(1)), "grad.redistribute"),
        (shard(torch.ones(4, 4), Replicate()), "grad.redistribute"),
        (torch.ones(4, 4), "distribute_tensor"),
    ):
        params[1].grad = None
        params[1].grad = wrong
        with pytest.raises(RuntimeError, match=f"is not distributed as its parameter is: .*{advice}"):
            optimizer.step()
    found = [whole(t) for p in params for t in (p, *optimizer.state[p].values())]
    assert all(map(torch.equal, found, kept))
    params[1].grad = shard(torch.ones(4, 4), Shard(0))
    optimizer.step()
    assert optimizer.state[params[1]]["step"] == 1 + stepped


@pytest.mark.parametrize("stepped", [False, True])
def test_a_gradient_distributed_otherwise_is_refused(two, stepped):
    two.run(distributed_otherwise, stepped)


def noticed_by_autograd():
    mesh = ranks.mesh(2)
    p = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    p.grad = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    optimizer = fusedstep.AdamW([p])
    for _ in range(2):
        loss = p.square().sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_changing_parts_between_forward_and_backward_is_noticed_by_autograd(two):
    two.run(noticed_by_autograd)


def with_whole_states():
    pair = Pair(Layout("", (2,), (ROWS,)), ADAMW)
    pair.step()
    pair.ours.load_state_dict(pair.one.state_dict())
    pair.give_gradients()
    before = [whole(p).clone() for p in pair.parts]
    with pytest.raises(RuntimeError, match=r"not distributed as its parameter is; .*set_optimizer_state_dict"):
        pair.ours.step()
    assert all(map(torch.equal, map(whole, pair.parts), before))


def test_whole_states_of_parts_are_refused(two):
    two.run(with_whole_states)


# what ranks tell each other


def collectives(cls, options, layout, count):
    case = ADAMW._replace(ours=cls, options=options)
    pair = Pair(layout, case)
    more = [nn.Parameter(pair.layout.place(0, torch.randn(4, 4))) for _ in range(count)]
    pair.ours.add_param_group({"params": more})
    called, real = [], torch.distributed.all_reduce

    def counting(*args, **kwargs):
        called.append(args[0].numel())
        return real(*args, **kwargs)

    counts = []
    for _ in range(3):
        pair.give_gradients()
        for p in more:
            p.grad = pair.layout.place(0, torch.randn(4, 4))
        torch.distributed.all_reduce = counting
        try:
            pair.ours.step()
        finally:
            torch.distributed.all_reduce = real
        counts.append(len(called))
        called.clear()
    return counts


ROUNDS = [
    (fusedstep.SGD, {"momentum": 0.9}, 0),
    (fusedstep.AdamW, {}, 0),
    (fusedstep.AdamW, {"ema_decay": 0.9}, 0),
    (fusedstep.AdamW, {"max_grad_norm": 1.0}, 1),
    (fusedstep.AdamW, {"max_grad_norm": 1.0, "norm_type": INF}, 1),
    (fusedstep.AdamW, {"max_grad_norm": 1.0, "skip_nonfinite": True}, 1),
    (fusedstep.BertAdam, {}, 1),
    (fusedstep.AdamW, {"statistics": True}, 1),
    (fusedstep.AdamW, {"max_grad_norm": 1.0, "statistics": True}, 2),
    (fusedstep.AdamW, {"max_grad_norm": 1.0, "norm_type": INF, "statistics": True}, 3),
    (fusedstep.Lamb, {"max_grad_norm": None}, 1),
    (fusedstep.Lamb, {}, 2),
]


@pytest.mark.parametrize("count", [0, 20])
@pytest.mark.parametrize(("cls", "options", "rounds"), ROUNDS)
def test_ranks_talk_once_for_all_norms(four, cls, options, rounds, count):
    assert four.run(collectives, cls, options, LAYOUTS[0], count) == [[rounds] * 3] * 4


@pytest.mark.parametrize(
    ("layout", "groups"),
    [("replicated", 0), ("hybrid", 1), ("two-dims", 2), ("mixed", 1), ("several-meshes", 3)],
)
def test_ranks_talk_once_in_every_process_group(four, layout, groups):
    layout = next(other for other in LAYOUTS if other.name == layout)
    found = four.run(collectives, fusedstep.AdamW, {"max_grad_norm": 1.0}, layout, 5)
    assert found == [[groups] * 3] * 4
