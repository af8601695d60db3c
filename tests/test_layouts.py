"""Strides, sizes and places: however tensors lie in memory, the result is that of plain ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedstep
from tests.cases import KINDS, name_of
from tests.numerics import assert_alike


def sliced(shape):
    """A window into a larger tensor, and that tensor."""
    whole = torch.randn([2 * n + 1 for n in shape])
    return whole[tuple(slice(1, n + 1) for n in shape)], whole


LAYOUTS = {
    "contiguous": lambda shape: torch.randn(shape),
    "transposed": lambda shape: torch.randn(shape[::-1]).permute(tuple(reversed(range(len(shape))))),
    "channels_last": lambda shape: torch.randn(shape).to(memory_format=torch.channels_last),
    "sliced": lambda shape: sliced(shape)[0],
    "strided": lambda shape: torch.randn(*shape, 2)[..., 1],
    "unaligned": lambda shape: torch.randn(1 + torch.Size(shape).numel())[1:].view(shape),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def step_both(case, engine, param, grads):
    """Three steps of ours on `param` as it lies, and on a contiguous copy of it; both results."""
    p = torch.nn.Parameter(param)
    assert p.stride() == param.stride()
    q = torch.nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format))
    a, b = case.ours([p], engine=engine, **case.options), case.ours([q], engine=engine, **case.options)
    for g in grads:
        p.grad, q.grad = g, g.detach().clone(memory_format=torch.contiguous_format)
        a.step()
        b.step()
    return p, q, a, b


@layouts
@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_a_parameter_may_lie_anyhow(case, layout, engine):
    param = LAYOUTS[layout]((3, 4, 5, 2))
    grads = [torch.empty_like(param).copy_(torch.randn(param.shape)) for _ in range(3)]
    p, q, a, b = step_both(case, engine, param, grads)
    assert_alike(case, p.detach(), q.detach())
    for name, state in a.state[p].items():
        assert_alike(case, state, b.state[q][name])


@layouts
@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_a_gradient_may_lie_otherwise_than_its_parameter(case, layout, engine):
    # torch's CPU fused kernels pair up the wrong elements here
    param = torch.randn(3, 4, 5, 2)
    p, q, *_ = step_both(case, engine, param, [LAYOUTS[layout]((3, 4, 5, 2)) for _ in range(3)])
    assert_alike(case, p.detach(), q.detach())


@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_neighbours_of_a_sliced_parameter_stay_untouched(case, engine):
    # torch's CPU fused kernels overwrite them
    window, whole = sliced((5, 7))
    inside = torch.zeros_like(whole, dtype=torch.bool)
    inside[1:6, 1:8] = True
    before = whole.clone()
    p = torch.nn.Parameter(window)
    optimizer = case.ours([p], engine=engine, **case.options)
    for _ in range(2):
        p.grad = torch.randn(5, 7)
        optimizer.step()
    assert torch.equal(whole[~inside], before[~inside])
    assert (whole[inside] != before[inside]).any()


def test_a_gradient_that_turns_in_place_is_noticed(engine):
    p, q = (torch.nn.Parameter(torch.ones(6, 6)) for _ in range(2))
    a, b = fusedstep.SGD([p], lr=1, engine=engine), torch.optim.SGD([q], lr=1)
    g = torch.randn(6, 6)
    for view in (g, g.t(), g):
        p.grad, q.grad = view, view
        a.step()
        b.step()
    torch.testing.assert_close(p, q)


@pytest.mark.parametrize("kind", ["plain", "conj", "transposed"])
@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_complex_parameters_step_as_pairs_of_real_ones(case, kind, engine):
    p = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    q = torch.nn.Parameter(torch.view_as_real(p.detach().clone()).contiguous())
    a, b = case.ours([p], engine=engine, **case.options), case.ours([q], engine=engine, **case.options)
    for _ in range(3):
        g = torch.randn(4, 4, dtype=torch.complex64)
        p.grad = {"plain": g, "conj": g.conj(), "transposed": g.t()}[kind]
        q.grad = torch.view_as_real(p.grad.resolve_conj()).contiguous()
        a.step()
        b.step()
    assert_alike(case, torch.view_as_real(p.detach()), q.detach())


@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_tensors_without_elements_are_stepped_and_counted(case, engine):
    params = [torch.nn.Parameter(torch.randn(n)) for n in (0, 3, 0)]
    optimizer = case.ours(params, engine=engine, **case.options)
    before = params[1].detach().clone()
    for _ in range(2):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    assert not torch.equal(params[1], before)
    if "step" in optimizer.state[params[0]]:
        assert [int(optimizer.state[p]["step"]) for p in params] == [2, 2, 2]


@settings(deadline=None, derandomize=True, max_examples=40)
@given(data=st.data())
def test_any_mix_of_shapes_dtypes_layouts_groups_and_missing_gradients_equals_torch(data):
    case = data.draw(st.sampled_from(KINDS))
    chosen = data.draw(st.sampled_from(["torch", "cpu"]))
    ours, theirs, groups = [], [], []
    for _ in range(data.draw(st.integers(1, 3))):
        members = []
        for _ in range(data.draw(st.integers(1, 3))):
            shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
            layout = data.draw(st.sampled_from([n for n in LAYOUTS if n != "channels_last"]))
            dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
            param = LAYOUTS[layout](shape).to(dtype)
            members.append(torch.nn.Parameter(param))
        # not 1: LAMB would take a single number to zero but for rounding, and its ratio there is another
        options = {**case.options, "lr": data.draw(st.floats(1e-4, 0.5))}
        groups.append({"params": members, **options})
        ours += members
    theirs = [torch.nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in ours]
    twins = dict(zip(map(id, ours), theirs, strict=True))
    others = [{**group, "params": [twins[id(p)] for p in group["params"]]} for group in groups]
    a, b = case.ours(groups, engine=chosen), case.theirs(others, foreach=False)
    for _ in range(4):
        for p, q in zip(ours, theirs, strict=True):
            if data.draw(st.booleans()):
                p.grad = data.draw(st.sampled_from([torch.randn(p.shape).to(p.dtype), None]))
            q.grad = None if p.grad is None else p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-5)
        assert set(a.state[p]) == set(b.state[q])


@settings(deadline=None, derandomize=True, max_examples=20)
@given(
    values=st.lists(
        st.sampled_from([0.0, 1.0, -2.5, float("nan"), float("inf"), -float("inf"), 1e-40]),
        min_size=1,
        max_size=40,
    )
)
def test_nan_and_inf_go_where_torch_sends_them(values):
    for case in KINDS:
        p = torch.nn.Parameter(torch.ones(len(values)))
        q = torch.nn.Parameter(p.detach().clone())
        a, b = case.ours([p], engine="cpu", **case.options), case.theirs([q], **case.options)
        for _ in range(2):
            p.grad = torch.tensor(values)
            q.grad = p.grad.clone()
            a.step()
            b.step()
        torch.testing.assert_close(p, q, equal_nan=True)
