"""What changes again and again from step to step: each step does what torch.optim does, on the same tables."""

import copy
import random

import pytest
import torch

from tests.cases import CASES, KINDS, name_of
from tests.test_changes import Pair

cases = pytest.mark.parametrize("case", KINDS, ids=name_of)
SHAPES = ((4, 3), (5,), (40,))


def case_of(name):
    return next(case for case in CASES if case.name == name)


@pytest.fixture
def pair(case, engine):
    pair = Pair(case, engine, SHAPES)
    pair.step()
    return pair


@cases
def test_lazy_clones_keep_their_values(case, engine):
    """Of parameters, gradients and states, taken before every step, also where gradients are written."""
    pair = Pair(case, engine, SHAPES)
    for i in range(4):
        pair.set_grads()
        tensors = [t for p in pair.ours for t in (p.detach(), p.grad, *pair.a.state.get(p, {}).values())]
        kept = [(torch._lazy_clone(t), t.clone()) for t in tensors]
        clears = i % 2 == 1
        pair.a.step(zero_grad=clears, set_to_none=False)
        pair.b.step()
        pair.compare()
        assert all(torch.equal(lazy, value) for lazy, value in kept)
        assert not clears or not any(p.grad.any() for p in pair.ours)


@cases
def test_what_was_lazily_cloned_may_be_written_on_either_side(pair):
    for _ in range(2):
        clones = [torch._lazy_clone(p.detach()) for p in pair.ours]
        for clone in clones:
            clone.add_(1)
        pair.step()
        # a parameter that is itself the clone
        for p in pair.ours:
            p.data = torch._lazy_clone(p.data)
        pair.step()


@cases
def test_parameters_are_frozen_and_thawed(pair):
    for frozen in ((0,), (0, 2), (), (1,), (0, 1, 2), ()):
        for i, (p, q) in enumerate(pair.both()):
            for t in (p, q):
                t.requires_grad_(i not in frozen)
        pair.step(skip=frozen)
        # with a gradient they are stepped all the same
        pair.step()


@cases
def test_a_frozen_parameter_gets_its_first_gradient_late(case, engine):
    pair = Pair(case, engine, SHAPES)
    for p, q in [*pair.both()][:2]:
        p.requires_grad_(False)
        q.requires_grad_(False)
    pair.step(skip=(0, 1))
    pair.step(skip=(0, 1))
    # of the first before it is thawed
    pair.step(skip=(1,))
    pair.ours[1].requires_grad_(True)
    pair.theirs[1].requires_grad_(True)
    pair.step(skip=(0,))
    pair.step()
    pair.step(skip=(2,))


@cases
def test_some_parameters_never_get_gradients(case, engine):
    pair = Pair(case, engine, (*SHAPES, (3, 2), (2,)))
    for skip in ((3, 4), (0, 3, 4), (3, 4)):
        pair.step(skip)
    # reading the state of a parameter makes it an empty one
    assert not {p for p, state in pair.a.state.items() if state} & {*pair.ours[3:]}


@cases
def test_any_set_of_gradients_may_be_missing(case, engine):
    pair = Pair(case, engine, ((3,), (2, 2), (1,), (), (0,), (5,)))
    generator = random.Random(3)
    for _ in range(10):
        pair.step(skip=[i for i in range(6) if generator.random() < 0.5])


@cases
def test_first_gradients_arrive_one_by_one(case, engine):
    pair = Pair(case, engine, [(3,)] * 5)
    order, plans = (4, 2, 0, 3, 1), set()
    for i in range(5):
        pair.step(skip=order[i + 1 :])
        plans.add(id(pair.a._plan))
    assert len(plans) == 1


def set_layout(g, transposed):
    return g.t().contiguous().t() if transposed else g.contiguous()


@cases
def test_gradients_alternate_between_layouts(case, engine):
    pair = Pair(case, engine, ((4, 3), (2, 5), (6,)))
    for step in range(6):
        pair.set_grads()
        for i, p in enumerate(pair.ours[:2]):
            p.grad = set_layout(p.grad, transposed=(step + i) % 2 == 0)
        if step == 4:
            # every other element of something larger
            p.grad = torch.stack((p.grad, p.grad), -1)[..., 0]
        pair.a.step()
        pair.b.step()
        pair.compare()


@cases
def test_gradients_change_their_dtype(case, engine):
    """torch.optim takes none of another dtype: it gets the same numbers."""
    pair = Pair(case, engine, SHAPES)
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.bfloat16, torch.float16):
        pair.set_grads()
        for p, q in pair.both():
            q.grad.data = q.grad.data.to(dtype).float()
            p.grad.data = q.grad.data.to(dtype)
            assert p.grad.dtype == dtype
        pair.a.step()
        pair.b.step()
        pair.compare()


def fresh(case, optimizer, params, engine):
    """A new optimizer in the same state, with no plan."""
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = case.ours(copies, engine=engine, **case.options)
    for p, q in zip(params, copies, strict=True):
        if p in optimizer.state:
            other.state[q] = {k: v.clone() for k, v in optimizer.state[p].items()}
        if p in optimizer.unsaved_steps:
            other.unsaved_steps[q] = optimizer.unsaved_steps[p].clone()
    return other, copies


@cases
def test_states_get_another_dtype_for_good(case, engine):
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = case.ours(params, engine=engine, **case.options)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32):
        for p in params[:2]:
            for name, value in optimizer.state.get(p, {}).items():
                if name != "step":
                    value.data = value.data.to(dtype)
        other, copies = fresh(case, optimizer, params, engine)
        for _ in range(2):
            for p, q in zip(params, copies, strict=True):
                p.grad = torch.randn_like(p)
                q.grad = p.grad.clone()
            optimizer.step()
            other.step()
        for p, q in zip(params, copies, strict=True):
            assert torch.equal(p, q)
            for name, value in other.state[q].items():
                assert optimizer.state[p][name].dtype == value.dtype
                assert torch.equal(optimizer.state[p][name], value)
        states = [v for p in params[:2] for k, v in optimizer.state[p].items() if k != "step"]
        assert all(value.dtype == dtype for value in states)


@cases
def test_state_dicts_are_replaced_at_every_step(pair):
    for _ in range(3):
        for p in pair.ours:
            if p in pair.a.state:
                pair.a.state[p] = {name: value.clone() for name, value in pair.a.state[p].items()}
        pair.step()
        pair.a.state = type(pair.a.state)(dict, {p: dict(pair.a.state[p]) for p in pair.a.state})
        pair.step()


@cases
def test_a_state_is_loaded_at_every_step(pair):
    for i in range(4):
        # every other time without a copy: what was loaded is what is there
        copied = copy.deepcopy if i % 2 else lambda state: state
        pair.a.load_state_dict(copied(pair.a.state_dict()))
        pair.b.load_state_dict(copied(pair.b.state_dict()))
        pair.step(skip=(i % 3,))


@cases
def test_statistics_clipping_and_clearing_alternate(case, engine):
    pair = Pair(case, engine, SHAPES)
    for step in range(8):
        pair.a.collect_statistics = step % 2 == 0
        pair.a.skip_nonfinite = step % 3 == 0
        pair.set_grads()
        grads = [q.grad.clone() for q in pair.theirs]
        pair.a.step(zero_grad=step % 4 != 0, set_to_none=step % 4 == 1)
        pair.b.step()
        pair.compare()
        if step % 2 == 0:
            norm = torch.linalg.vector_norm(torch.stack([*map(torch.linalg.vector_norm, grads)]))
            torch.testing.assert_close(pair.a.statistics().grad_norm.float(), norm)
        else:
            with pytest.raises(RuntimeError, match="no statistics"):
                pair.a.statistics()
        cleared = [p.grad for p in pair.ours]
        if step % 4 == 1:
            assert cleared == [None] * 3
        elif step % 4 != 0:
            assert not any(g.any() for g in cleared)
        else:
            assert all(map(torch.equal, cleared, grads))


@cases
def test_groups_come_and_go_and_the_others_keep_what_they_have(case, engine):
    """Bit by bit as if nothing had been added; no option here spans groups."""
    options = {**case.options, "max_grad_norm": None}
    alone = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    params = [torch.nn.Parameter(p.detach().clone()) for p in alone]
    a, b = (case.ours(ps, engine=engine, **options) for ps in (alone, params))
    for step in range(8):
        if step in (2, 3, 6):
            added = torch.nn.Parameter(torch.randn(7))
            b.add_param_group({"params": [added], "lr": 0.5})
        if step in (4, 7):
            gone = b.param_groups.pop(1)["params"]
            for p in gone:
                b.state.pop(p, None)
        for p, q in zip(alone, params, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for group in b.param_groups[1:]:
            for p in group["params"]:
                p.grad = torch.randn_like(p)
        a.step()
        b.step()
        for p, q in zip(alone, params, strict=True):
            assert torch.equal(p, q)
            assert a.state[p].keys() == b.state[q].keys()
            assert all(torch.equal(a.state[p][k], b.state[q][k]) for k in a.state[p])


@cases
def test_groups_come_and_go_as_in_torch(case, engine):
    pair = Pair(case, engine, SHAPES)
    for step in range(6):
        pair.step()
        if step in (1, 2):
            p = torch.nn.Parameter(torch.randn(4))
            q = torch.nn.Parameter(p.detach().clone())
            pair.a.add_param_group({"params": [p], "lr": 0.1 * step})
            pair.b.add_param_group({"params": [q], "lr": 0.1 * step})
            pair.ours.append(p)
            pair.theirs.append(q)
        if step == 3:
            # the second group goes, the third takes its place
            for optimizer, params in ((pair.a, pair.ours), (pair.b, pair.theirs)):
                assert optimizer.param_groups.pop(1)["params"] == [params.pop(3)]


def two_groups(case, engine, **options):
    pair = Pair(case, engine, SHAPES)
    pair.a = case.ours([{"params": [p]} for p in pair.ours], engine=engine, **options)
    pair.b = case.theirs([{"params": [p]} for p in pair.theirs], **options)
    return pair


@pytest.mark.parametrize("clipped", [False, True], ids=["", "clipped"])
def test_momentum_is_turned_on_off_and_on_in_one_of_several_groups(clipped, engine):
    pair = two_groups(case_of("sgd"), engine, lr=1e-2)
    if clipped:
        pair.a.param_groups[2]["max_grad_norm"] = 1e6
    for momentum in (0, 0.9, 0.9, 0, 0.5, 0.5):
        for optimizer in (pair.a, pair.b):
            optimizer.param_groups[1]["momentum"] = momentum
            optimizer.param_groups[0]["nesterov"] = momentum != 0
            optimizer.param_groups[0]["momentum"] = 0.3 if momentum else 0
        pair.set_grads()
        pair.a.step()
        pair.b.step()
        for p, q in pair.both():
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)
            theirs = pair.b.state[q].get("momentum_buffer")
            if theirs is not None:
                torch.testing.assert_close(pair.a.state[p]["momentum_buffer"], theirs)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_amsgrad_is_turned_on_in_one_of_several_groups(name, engine):
    pair = two_groups(case_of(name), engine, lr=1e-2)
    pair.step()
    pair.step()
    for optimizer, params in ((pair.a, pair.ours), (pair.b, pair.theirs)):
        optimizer.param_groups[1]["amsgrad"] = True
        # torch.optim makes one at the first step only
        optimizer.state[params[1]].setdefault("max_exp_avg_sq", torch.zeros_like(params[1]))
    for skip in ((), (1,), (0,), ()):
        pair.step(skip)
    assert [("max_exp_avg_sq" in pair.a.state[p]) for p in pair.ours] == [False, True, False]
    for optimizer in (pair.a, pair.b):
        optimizer.param_groups[1]["amsgrad"] = False
    pair.step()


def test_an_average_is_turned_on_in_one_of_several_groups(engine):
    pair = two_groups(case_of("adamw"), engine, lr=1e-2)
    pair.step()
    pair.a.param_groups[1]["ema_decay"] = 0.5
    expected = pair.ours[1].detach().clone()
    for _ in range(3):
        pair.step()
        expected.lerp_(pair.ours[1].detach(), 0.5)
    torch.testing.assert_close(pair.a.state[pair.ours[1]]["ema"], expected)
    assert [("ema" in pair.a.state[p]) for p in pair.ours] == [False, True, False]


def test_a_parameter_moves_from_one_group_to_another(engine):
    """With its state: options and rule are those of its new group."""
    pair = two_groups(case_of("sgd-momentum"), engine, lr=1e-2, momentum=0.9)
    for i in range(3):
        pair.step()
        for optimizer in (pair.a, pair.b):
            groups = optimizer.param_groups
            groups[i]["params"], groups[i - 1]["params"] = groups[i - 1]["params"], groups[i]["params"]
            groups[0]["lr"], groups[1]["momentum"] = 0.1, 0.5
    pair.step()


# what builds new tables, which take over rows that are still right
REBUILDS = {
    "group added": lambda o: o.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]}),
    "group removed": lambda o: o.param_groups.pop(),
    "option of another group": lambda o: o.param_groups[-1].update(amsgrad=True),
    "gradients cleared": lambda o: None,
}


@pytest.mark.parametrize("rebuild", REBUILDS)
def test_new_tables_go_on_from_counts_that_were_replaced(rebuild, engine):
    pair = two_groups(case_of("adam"), engine, lr=1e-2)
    pair.step()
    pair.step()
    for optimizer, params in ((pair.a, pair.ours), (pair.b, pair.theirs)):
        optimizer.state[params[0]]["step"] = torch.tensor(50.0)
        optimizer.state[params[1]]["step"].fill_(20.0)
        optimizer.state[params[2]]["max_exp_avg_sq"] = torch.zeros_like(params[2])
        REBUILDS[rebuild](optimizer)
    for _ in range(2):
        pair.set_grads()
        pair.a.step(zero_grad=rebuild == "gradients cleared", set_to_none=False)
        pair.b.step()
        pair.compare()


def test_states_exchanged_between_parameters(engine):
    pair = Pair(case_of("adam"), engine, [(3,)] * 3)
    pair.step(skip=(2,))
    pair.step(skip=(2,))
    for optimizer, (p, q, _) in ((pair.a, pair.ours), (pair.b, pair.theirs)):
        states = optimizer.state
        states[p], states[q] = states[q], states[p]
    pair.step()
    for optimizer, params in ((pair.a, pair.ours), (pair.b, pair.theirs)):
        # the same dicts in the same order, of other parameters
        states = [optimizer.state[p] for p in params]
        optimizer.state = type(optimizer.state)(dict, zip(reversed(params), states, strict=True))
    pair.step()
    pair.step()
