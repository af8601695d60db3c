"""Whoever looks at torch's operations sees a step: a trace records it, a mode sees it, fake tensors stay so."""

import copy

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fusedstep
from fusedstep import functional
from tests.cases import CASES, KINDS, by_name, name_of

cases = pytest.mark.parametrize("case", KINDS, ids=name_of)
every_case = pytest.mark.parametrize("case", CASES, ids=name_of)
SHAPES = [(4, 3), (7,)]


def trained(case, steps=2, **options):
    """Parameters with gradients, and an optimizer that has stepped them."""
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = case.ours(params, **case.options, **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return params, optimizer


def close(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def states(optimizer):
    return [t for values in optimizer.state.values() for t in values.values()]


def values_of(params, optimizer):
    return [t.detach().clone() for t in (*params, *states(optimizer))]


def stepping(params, optimizer):
    """A step as a function of gradients."""

    def step(*grads):
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
        return [p.detach().clone() for p in params]

    return step


@every_case
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_trace_of_a_step_is_a_step(case, steps_before):
    params, optimizer = trained(case, steps_before)
    others, eager = copy.deepcopy((params, optimizer))
    grads = [[torch.randn(shape) for shape in SHAPES] for _ in range(3)]
    # the first runs while it is traced, as torch.optim's would
    graph = make_fx(stepping(params, optimizer))(*grads[0])
    stepping(others, eager)(*grads[0])
    close(values_of(params, optimizer), values_of(others, eager))
    written = {node.args[0].target for node in graph.graph.nodes if node.target is torch.ops.aten.copy_.default}
    constants = {name: t for name, t in vars(graph).items() if isinstance(t, torch.Tensor)} | graph._parameters
    assert {id(constants.get(name)) for name in written} >= {id(p) for p in params}
    with torch.no_grad():
        # what was made in a trace of the first step it makes again; after that, it goes on
        for g in grads[1:] if steps_before else ():
            close(graph(*g), stepping(others, eager)(*g))
            close(values_of(params, optimizer), values_of(others, eager))
    # the real one goes on from there
    close(stepping(params, optimizer)(*grads[2]), stepping(others, eager)(*grads[2]))
    close(values_of(params, optimizer), values_of(others, eager))


def functional_step(case, **options):
    """A step as a function of everything: parameters, gradients and states, that it updates."""

    def step(params, grads, given):
        optimizer = case.ours(params, engine=None, **case.options, **options)
        for p, g, values in zip(params, grads, given, strict=True):
            p.grad = g
            optimizer.state[p] = dict(values)
        optimizer.step()
        return [t for p in params for t in (p, *optimizer.state[p].values())]

    return step


@cases
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_a_step_of_what_a_trace_is_given_updates_what_its_graph_is_given(case, mode, pre_dispatch):
    trained_params, optimizer = trained(case)
    given = [{**optimizer.state[p]} for p in trained_params]

    def inputs():
        params = [p.detach().clone() for p in trained_params]
        return params, [torch.ones_like(p) for p in params], copy.deepcopy(given)

    step, traced_with = functional_step(case), inputs()
    graph = make_fx(step, tracing_mode=mode, pre_dispatch=pre_dispatch)(*traced_with)
    if mode != "real":
        close(traced_with[0], [p.detach() for p in trained_params])
    used, expected = inputs(), inputs()
    with torch.no_grad():
        out = graph(*used)
    close(out, step(*expected))
    # in place, counts as well
    close(used[0], expected[0])
    for values in used[2]:
        assert values.get("step", 3) == 3


@cases
def test_a_step_is_functionalized(case):
    trained_params, optimizer = trained(case)
    params = [p.detach().clone() for p in trained_params]
    given = params, [torch.ones_like(p) for p in params], [{**optimizer.state[p]} for p in trained_params]
    step, inputs = functional_step(case), lambda: copy.deepcopy(given)
    expected = step(*inputs())
    close(functionalize(step)(*inputs()), expected)
    graph = make_fx(functionalize(step))(*inputs())
    close(graph(*inputs()), expected)


@cases
def test_fake_tensors_are_stepped_without_numbers(case):
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        optimizer = case.ours(params, **case.options, max_grad_norm=1.0, skip_nonfinite=True, ema_decay=0.9)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step(zero_grad=True)
        assert all(p.grad is None for p in params)
        assert all(type(t) is type(params[0].data) for t in states(optimizer))


def test_a_trace_that_fails_leaves_all_as_it_was():
    params, optimizer = trained(by_name("adamw"))
    before, counts = values_of(params, optimizer), [optimizer.state[p]["step"] for p in params]
    # real parameters in a trace without numbers
    with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
        make_fx(stepping(params, optimizer), tracing_mode="fake")(*(torch.ones(shape) for shape in SHAPES))
    close(values_of(params, optimizer), before)
    assert all(optimizer.state[p]["step"] is count for p, count in zip(params, counts, strict=True))
    stepping(params, optimizer)(*(torch.ones(shape) for shape in SHAPES))
    assert optimizer.state[params[0]]["step"] == 3


def test_options_that_are_tensors_are_read_by_the_graph():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = fusedstep.SGD([p], lr=0.5)

    def step(g, lr):
        p.grad, optimizer.param_groups[0]["lr"] = g, lr
        optimizer.step()

    graph = make_fx(step)(torch.ones(3), torch.tensor(0.5))
    with torch.no_grad():
        graph(torch.ones(3), torch.tensor(0.25))
    assert torch.equal(p.detach(), torch.full((3,), 0.25))


@pytest.mark.parametrize("engine", ["cpu", "triton"])
def test_an_engine_that_works_on_memory_cannot_be_insisted_on_in_a_trace(engine):
    params, optimizer = trained(by_name("adamw"), engine=engine)
    before = values_of(params, optimizer)
    with pytest.raises(RuntimeError, match=rf"engine='{engine}' cannot.*traces operations.*engine=None"):
        make_fx(stepping(params, optimizer))(*(torch.ones(shape) for shape in SHAPES))
    close(values_of(params, optimizer), before)


class Seen(TorchDispatchMode):
    """Where something was written."""

    def __init__(self):
        super().__init__()
        self.places = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable:
            written = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.places.update(t.data_ptr() for t in written)
        return func(*args, **(kwargs or {}))


@cases
def test_a_mode_that_only_looks_sees_the_update_and_changes_nothing(case):
    params, optimizer = trained(case, statistics=True)
    others, eager = copy.deepcopy((params, optimizer))
    for mode in (Seen(), FlopCounterMode(display=False), None, Seen()):
        for members in (params, others):
            for p in members:
                p.grad = torch.ones_like(p)
        eager.step()
        if mode is None:
            optimizer.step()
        else:
            with mode:
                optimizer.step()
                assert optimizer.statistics().grad_norm == eager.statistics().grad_norm
        if isinstance(mode, Seen):
            assert mode.places >= {p.data_ptr() for p in params}
        close(values_of(params, optimizer), values_of(others, eager))


def test_an_engine_that_is_insisted_on_goes_on_under_a_mode_that_only_looks():
    params, optimizer = trained(by_name("adamw"), engine="cpu")
    with Seen():
        optimizer.step()
    assert optimizer.state[params[0]]["step"] == 3


def test_a_trace_of_clipping_clips():
    def clip(g):
        p = torch.zeros(2, requires_grad=True)
        p.grad = g
        return functional.clip_grad_norm_([p], 1.0)

    # one that is not traced must leave nothing behind that a trace would use
    for _ in range(2):
        clip(torch.tensor([3.0, 4.0]))
    graph, g = make_fx(clip)(torch.tensor([3.0, 4.0])), torch.tensor([6.0, 8.0])
    assert graph(g) == 10
    torch.testing.assert_close(g, torch.tensor([0.6, 0.8]))
