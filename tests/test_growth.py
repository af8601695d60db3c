"""Parameters that come later get tables of their own, which become one again: the bits of one table."""

import copy
from typing import ClassVar

import pytest
import torch
from torch import nn

import fusedstep
from fusedstep._memory import plan
from fusedstep._memory.plan import Plan
from fusedstep.rules import extra, rule, total_over_all
from tests.cases import KINDS

ENGINES = ["cpu", "torch", pytest.param("triton", marks=pytest.mark.gpu)]
SHAPES = [(70, 3), (5,), (), (1100,), (16, 64), (0,)]


def grow_never(self, optimizer, spec):
    return False


class Beside:
    """An optimizer whose plan grows, and one whose plan is always made anew."""

    def __init__(self, cls, options, engine, dtype=torch.float32):
        self.device = "cuda" if engine == "triton" else "cpu"
        self.cls, self.options, self.dtype = cls, {**options, "engine": engine}, dtype
        self.params = ([], [])
        first = [nn.Parameter(self.tensor((33, 4)))]
        self.both = [cls(self.new(k, first), **self.options) for k in (0, 1)]

    def tensor(self, shape):
        return torch.randn(shape, device=self.device).to(self.dtype)

    def new(self, k, params):
        made = [nn.Parameter(p.detach().clone(), p.requires_grad) for p in params]
        self.params[k].extend(made)
        return made

    def add(self, params, **options):
        for k, optimizer in enumerate(self.both):
            optimizer.add_param_group({"params": self.new(k, params), **options})

    def step(self, monkeypatch, skip=(), **arguments):
        for i, (p, q) in enumerate(zip(*self.params, strict=True)):
            p.grad = q.grad = None
            if p.requires_grad and i not in skip:
                p.grad = torch.randn_like(p)
                q.grad = p.grad.clone()
        self.both[0].step(**arguments)
        with monkeypatch.context() as patch:
            patch.setattr(Plan, "grow", grow_never)
            self.both[1].step(**arguments)

    def assert_same(self):
        for p, q in zip(*self.params, strict=True):
            assert torch.equal(p, q)
        states = [optimizer.state_dict()["state"] for optimizer in self.both]
        assert states[0].keys() == states[1].keys()
        for i, values in states[0].items():
            assert values.keys() == states[1][i].keys()
            assert all(torch.equal(t, states[1][i][name]) for name, t in values.items())

    @property
    def tables(self):
        return len(self.both[0]._plan.tables)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
def test_groups_that_are_added(case, engine, monkeypatch):
    beside = Beside(case.ours, case.options, engine)
    beside.step(monkeypatch)
    most = 0
    for i in range(2 * plan._MOST_LATER + 3):
        beside.add([nn.Parameter(beside.tensor(shape)) for shape in SHAPES[i % 3 :: 2]], lr=1e-3 * (i + 1))
        beside.step(monkeypatch, skip={i, 2 * i})
        most = max(most, beside.tables)
    beside.assert_same()
    sums = any(rule.sums_over_all for rule in case.ours.rules) or case.ours.limit is not None
    assert most > 1 or sums or "max_grad_norm" in case.options
    # one for what cannot be together anyway, and a few that came since
    assert beside.tables <= plan._MOST_LATER + 2


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_parameters_with_their_first_gradient(engine, monkeypatch):
    beside = Beside(fusedstep.AdamW, {"lr": 1e-2}, engine)
    beside.add([nn.Parameter(beside.tensor(shape), requires_grad=False) for shape in SHAPES * 3])
    for i in range(20):
        for params in beside.params:
            if 2 <= i < len(params):
                params[i].requires_grad_()
        beside.step(monkeypatch, skip={i - 1} if i % 3 else ())
    beside.assert_same()


def test_tables_become_one_after_a_while(monkeypatch):
    monkeypatch.setattr(plan, "_STEPS_TO_JOIN", 3)
    beside = Beside(fusedstep.AdamW, {}, "cpu")
    seen = []
    for i in range(12):
        if i in (1, 2, 9):
            beside.add([nn.Parameter(torch.randn(7))])
        beside.step(monkeypatch)
        seen.append(beside.tables)
    assert seen == [1, 2, 3, 3, 3, 3, 1, 1, 1, 2, 2, 2]
    beside.assert_same()


CHANGES = {
    "an option": lambda o: o.param_groups[-1].update(lr=0.5),
    "an option that is a tensor": lambda o: o.param_groups[-1].update(lr=torch.tensor(0.25)),
    "an option of all": lambda o: [group.update(weight_decay=0.5) for group in o.param_groups],
    "a limit": lambda o: o.param_groups[-1].update(max_grad_norm=0.1),
    "an average": lambda o: o.param_groups[-1].update(ema_decay=0.9),
    "the sign": lambda o: o.param_groups[-1].update(maximize=True),
    "another rule": lambda o: o.param_groups[-1].update(amsgrad=True),
    "a load": lambda o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "a group less": lambda o: o.param_groups.pop(),
    "a parameter in an old group": lambda o: o.param_groups[0]["params"].append(nn.Parameter(torch.ones(3))),
    "statistics": lambda o: setattr(o, "collect_statistics", True),
    "a skip": lambda o: setattr(o, "skip_nonfinite", True),
    "a state that moves": lambda o: [s.update(exp_avg=s["exp_avg"].clone()) for s in o.state.values()],
}


@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_after_groups_were_added(change, engine, monkeypatch):
    beside = Beside(fusedstep.AdamW, {"lr": 1e-2}, engine)
    beside.step(monkeypatch)
    for i in range(5):
        beside.add([nn.Parameter(torch.randn(shape)) for shape in SHAPES[i:]])
        if i == 2:
            torch.manual_seed(0)
            for optimizer in beside.both:
                change(optimizer)
        beside.step(monkeypatch, skip={3})
    for _ in range(2):
        beside.step(monkeypatch)
    beside.assert_same()


LOSSES = {
    "one state": lambda o: o.state.pop(o.param_groups[0]["params"][0]),
    "all states": lambda o: o.state.clear(),
    "what is in one": lambda o: o.state[o.param_groups[0]["params"][0]].clear(),
    "another dict": lambda o: o.state.update({p: {**s} for p, s in o.state.items()}),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_states_that_are_lost_when_a_group_is_added(lose, engine, monkeypatch):
    beside = Beside(fusedstep.AdamW, {"lr": 1e-2}, engine)
    beside.add([nn.Parameter(beside.tensor((7,)))])
    for _ in range(2):
        beside.step(monkeypatch)
    for optimizer in beside.both:
        lose(optimizer)
    beside.add([nn.Parameter(beside.tensor((5,)))])
    for _ in range(2):
        beside.step(monkeypatch)
    beside.assert_same()


def give(*params):
    for p in params:
        p.grad = torch.ones_like(p)


@pytest.mark.parametrize("engine", ENGINES[:2])
def test_an_option_that_changes_with_a_thaw_leaves_no_states_of_the_rule_before(engine):
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)
    theirs = [nn.Parameter(x.detach().clone(), x.requires_grad) for x in (p, q)]
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    ours, torchs = fusedstep.SGD([p, q], engine=engine, **options), torch.optim.SGD(theirs, **options)
    for optimizer, (a, b) in ((ours, (p, q)), (torchs, theirs)):
        give(a)
        optimizer.step()
        b.requires_grad_()
        for momentum in (0.0, 0.0, 0.9, 0.9):
            optimizer.param_groups[0]["momentum"] = momentum
            give(a, b)
            optimizer.step()
    torch.testing.assert_close([p, q], theirs)


@pytest.mark.parametrize("engine", ENGINES[:2])
def test_a_step_that_raises_gives_nothing_to_parameters_that_came_with_it(engine):
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
    optimizer = fusedstep.AdamW([p], lr=0.1, ema_decay=0.9, engine=engine)
    give(p)
    optimizer.step()
    optimizer.add_param_group({"params": [q]})
    give(q)
    p.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert not optimizer.state[q]
    with torch.no_grad():
        q.fill_(100.0)
    give(p, q)
    optimizer.step()
    with optimizer.ema_parameters():
        assert torch.all(q > 99)


@rule()
def plain(p, g, *, lr):
    return (p - lr * g,)


@rule(group_scalars={"k": "k"})
def counted(p, g, k, *, lr):
    return p - lr * g * (k + 1), k + 1


@rule()
def joint(p, g, *, lr):
    return (p - lr * g / total_over_all(g * g),)


class Mixed(fusedstep.Optimizer):
    rules: ClassVar = (plain, counted, joint)
    lr: float = 0.01
    kind: str = extra(default="plain", kw_only=True)

    def rule_of(self, group):
        return {"plain": plain, "counted": counted, "joint": joint}[self.option(group, "kind")]


@pytest.mark.parametrize("engine", ENGINES[:2])
def test_a_group_whose_rule_looks_beyond_a_tensor_gets_another_plan(engine):
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = Mixed([p], engine=engine)
    give(p, q)
    optimizer.step()
    optimizer.add_param_group({"params": [q], "kind": "counted"})
    optimizer.step()
    optimizer.step()
    torch.testing.assert_close(q.detach(), torch.full((3,), 0.97))
    assert float(optimizer.param_groups[1]["k"]) == 2.0
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "kind": "joint"})
    with pytest.raises(TypeError, match="groups with different rules"):
        optimizer.step()


def test_matrices_that_come_to_vectors_take_turns_in_the_workspace():
    vectors, matrices = ([nn.Parameter(torch.ones(s)) for _ in range(5)] for s in ((4,), (16, 8)))
    group = {"params": vectors, "use_muon": False}
    optimizer = fusedstep.Muon([group], workspace_bytes=2048)
    give(*vectors, *matrices)
    optimizer.step()
    optimizer.add_param_group({"params": matrices, "use_muon": True})
    optimizer.step()
    turns = {table.turn for table in optimizer._plan.tables}
    assert len(turns) > 2


@pytest.mark.parametrize("engine", ENGINES)
def test_random_bits_are_those_of_a_place_among_all(engine, monkeypatch):
    beside = Beside(fusedstep.AdamW, {"rounding": "stochastic", "seed": 1}, engine, torch.bfloat16)
    for i in range(4):
        beside.step(monkeypatch)
        beside.add([nn.Parameter(beside.tensor(shape)) for shape in SHAPES[i:]])
    beside.step(monkeypatch)
    beside.assert_same()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_scaler_skips_all_or_nothing(engine, monkeypatch):
    beside = Beside(fusedstep.AdamW, {"lr": 1e-2, "fused": True}, engine)
    beside.step(monkeypatch)
    for found in (0.0, 1.0, 0.0):
        beside.add([nn.Parameter(beside.tensor((9,)))])
        for optimizer in beside.both:
            optimizer.grad_scale = torch.tensor(4.0, device=beside.device)
            optimizer.found_inf = torch.tensor(found, device=beside.device)
        beside.step(monkeypatch)
        for optimizer in beside.both:
            del optimizer.grad_scale, optimizer.found_inf
    beside.assert_same()
    assert [int(optimizer.skipped_steps) for optimizer in beside.both] == [1, 1]
    assert [bool(optimizer.step_was_skipped) for optimizer in beside.both] == [False, False]


def test_a_group_that_cannot_be_stepped_raises_before_anything_is_written():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = fusedstep.AdamW([p])
    p.grad = torch.ones(3)
    optimizer.step()
    before, saved = p.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.add_param_group({"params": [q]})
    q.grad = torch.sparse_coo_tensor([[0]], [1.0], (3,))
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert torch.equal(p, before)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], saved[0]["exp_avg"])
    q.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[p]["step"] == 2
    assert optimizer.state[q]["step"] == 1


def test_a_parameter_given_twice_raises():
    p = nn.Parameter(torch.ones(3))
    optimizer = fusedstep.AdamW([p])
    p.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [p]})
    with pytest.raises(ValueError, match="given a parameter twice"):
        optimizer.step()


@pytest.mark.gpu
def test_a_capture_comes_after_a_group_that_was_added():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(64, device="cuda")) for _ in range(3)]
    others = [nn.Parameter(p.detach().clone()) for p in params]
    for p, q in zip(params, others, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    ours, eager = (fusedstep.AdamW([each[0]], lr=1e-2) for each in (params, others))
    for optimizer, each in ((ours, params), (eager, others)):
        optimizer.step()
        optimizer.add_param_group({"params": each[1:]})
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for _ in range(3):
        graph.replay()
        eager.step()
    assert all(map(torch.equal, params, others))
    ours._plan._steps_to_join = -1
    ours.step()
    eager.step()
    assert all(map(torch.equal, params, others))
