"""Many parameters: what one had and another has, and what is left of a plan that was replaced."""

import copy
import gc
import weakref

import pytest
import torch

import fusedstep
from fusedstep._memory import options, plan, watch

COUNT = 150
engines = pytest.mark.parametrize("engine", ["cpu", "torch"])


def parameters(count=COUNT):
    params = [torch.nn.Parameter(torch.randn(3)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn(3)
    return params


@engines
@pytest.mark.parametrize("other", [1, 100])
def test_states_that_are_exchanged_take_their_counts_along(other, engine):
    params = parameters()
    optimizer = fusedstep.AdamW(params, engine=engine)
    optimizer.step()
    for p in params[1:]:
        p.grad = None
    optimizer.step()
    optimizer.step()
    a, b, state = params[0], params[other], optimizer.state
    state[a], state[b] = state[b], state[a]
    b.grad = torch.randn(3)
    optimizer.step()
    assert (float(state[a]["step"]), float(state[b]["step"])) == (2, 4)


@engines
@pytest.mark.parametrize("other", [1, 100])
def test_a_count_that_was_anothers_is_what_it_was(other, engine):
    params = parameters()
    optimizer = fusedstep.AdamW(params, engine=engine)
    for _ in range(3):
        optimizer.step()
    a, b = (optimizer.state[params[i]] for i in (0, other))
    b["step"], a["step"] = a["step"], torch.tensor(50.0)
    optimizer.step()
    assert (float(a["step"]), float(b["step"])) == (51, 4)


@engines
def test_an_option_that_was_a_tensor_may_become_one(engine, monkeypatch):
    """1.0 is also what stands for a tensor in a table."""
    # as if it lived on a device
    monkeypatch.setattr(options, "is_traced", lambda: True)
    p = torch.nn.Parameter(torch.zeros(4))
    p.grad = torch.ones(4)
    optimizer = fusedstep.SGD([p], lr=torch.tensor(0.5), engine=engine)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    assert p.tolist() == [-1.5] * 4


@pytest.mark.gpu
def test_an_option_that_was_a_tensor_on_a_gpu_may_become_one():
    p = torch.nn.Parameter(torch.zeros(4, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer = fusedstep.SGD([p], lr=torch.tensor(0.5, device="cuda"))
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    assert p.tolist() == [-1.5] * 4


@engines
def test_a_skipped_step_clears_what_there_is(engine):
    a, b = (torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64))
    optimizer = fusedstep.AdamW([a, b], engine=engine, skip_nonfinite=True)
    a.grad = torch.tensor([1.0, float("nan"), 1.0])
    optimizer.step(zero_grad=True, set_to_none=False)
    assert optimizer.skipped_steps == 1
    assert a.grad.tolist() == [0, 0, 0]


@engines
def test_without_guards_what_is_no_tensor_is_no_tensor(engine, monkeypatch):
    monkeypatch.setattr(watch, "_table", lambda: None)
    monkeypatch.setattr(watch, "_kinds", {})
    params = parameters(5)
    optimizer = fusedstep.AdamW(params, engine=engine)
    for _ in range(6):
        optimizer.step()
    params[2].grad = None
    optimizer.step()
    optimizer.state[params[0]]["step"] = 5
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [6, 8, 6, 8, 8]


def change_plan(optimizer):
    optimizer.collect_statistics = True
    optimizer.step()


def fail(optimizer):
    p = optimizer.param_groups[0]["params"][70]
    grad, p.grad = p.grad, None
    p.data = torch.randn(5)
    p.grad = torch.randn(5)
    with pytest.raises(RuntimeError, match="shape"):
        optimizer.step()
    p.grad = None
    p.data = torch.randn(3)
    p.grad = grad


@engines
@pytest.mark.parametrize("change", [change_plan, fail])
def test_a_plan_that_is_gone_keeps_nothing_alive(change, engine):
    """Without the garbage collector."""
    params = parameters()
    optimizer = fusedstep.AdamW(params, engine=engine)
    for _ in range(4):
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    gc.collect()
    gc.disable()
    try:
        change(optimizer)
        gone = [weakref.ref(p.grad) for p in params]
        gone += [weakref.ref(optimizer.state[p]["exp_avg"]) for p in params]
        for p in params:
            p.grad = None
        optimizer.load_state_dict(saved)
        assert sum(ref() is not None for ref in gone) == 0
    finally:
        gc.enable()


@engines
def test_a_loaded_momentum_is_no_first_one(engine):
    p, q = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    kept = {"lr": 1.0, "momentum": 0.9, "dampening": 0.5}
    ours = fusedstep.SGD([p], engine=engine, skip_nonfinite=True, **kept)
    theirs = torch.optim.SGD([q], **kept)
    p.grad = torch.full((2,), float("nan"))
    ours.step()
    q.grad = torch.full((2,), 10.0)
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    p.grad = torch.ones(2)
    ours.step()
    assert p.tolist() == [-9.5, -9.5]
    assert p in ours.unsaved_steps


@pytest.mark.parametrize("engine", ["cpu", "torch", "triton"])
def test_gradients_of_other_layouts_keep_their_rows(engine, monkeypatch):
    ours = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizer, peer = fusedstep.AdamW(ours, lr=0.1, engine=engine), torch.optim.AdamW(theirs, lr=0.1)
    layouts = [
        torch.Tensor.clone,
        lambda g: g.t().contiguous().t(),
        lambda g: torch.stack((g, g), -1)[..., 0],
        lambda g: torch.cat((torch.ones(1), g.flatten()))[1:].view(4, 4),
    ]
    for step in range(8):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            q.grad = torch.randn(4, 4)
            p.grad = layouts[(step + i) % 4](q.grad)
        optimizer.step()
        peer.step()
        if step == 0:
            monkeypatch.setattr(plan, "make_row", None)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q)


def stepped(cls, changes, engine=None):
    """Two parameters after steps of Adam, between which their optimizer was changed: ours or torch's."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(3, dtype=torch.float64)) for _ in range(2)]
    options = {} if engine is None else {"engine": engine}
    optimizer, held = cls(params, lr=0.1, **options), {}

    def step(live=params):
        for p in params:
            p.grad = torch.randn(3, dtype=torch.float64) if any(p is q for q in live) else None
        optimizer.step()

    for _ in range(3):
        step()
    step(params[:1])
    for change in changes:
        change(optimizer.state, *params, held)
        step()
    return [p.detach() for p in params] + [optimizer.state[p]["step"].clone() for p in params]


def drop(state, p, q, held):
    held[p], state[p] = state[p], {}


def bring_back(state, p, q, held):
    assert held[p]["step"] == 4
    state[p] = held[p]


def pass_on(state, p, q, held):
    state[q] = state.pop(p)


def set_to_zero(state, p, q, held):
    held["step"], state[p]["step"] = state[p]["step"], torch.tensor(0.0)


def set_back(state, p, q, held):
    state[p]["step"] = held["step"]


def exchange_aliases(state, p, q, held):
    a, b = state[p], state[q]
    a["step"], b["step"] = b["step"].detach(), a["step"].view(())


@pytest.mark.parametrize(
    "changes",
    [(drop, bring_back), (pass_on,), (set_to_zero, set_back), (exchange_aliases,)],
    ids=lambda changes: changes[0].__name__,
)
@engines
def test_a_count_that_somebody_holds_stays_as_it_was(changes, engine):
    ours, theirs = stepped(fusedstep.Adam, changes, engine), stepped(torch.optim.Adam, changes)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, check_dtype=False)


def test_a_state_dict_that_was_kept_keeps_its_counts():
    params = parameters(3)
    optimizer = fusedstep.AdamW(params)
    optimizer.step()
    before = optimizer.state_dict()
    optimizer.load_state_dict(copy.deepcopy(before))
    optimizer.step()
    assert [before["state"][i]["step"].item() for i in range(3)] == [1, 1, 1]
