"""Which gradients hold NaN or inf: told by statistics, and by an error before anything is written."""

import copy

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import fusedstep
from tests import ranks
from tests.cases import KINDS, name_of

cases = pytest.mark.parametrize("case", KINDS, ids=name_of)
BAD = [float("nan"), float("inf"), -float("inf")]


def model():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


def give_gradients(net, bad=None, where=()):
    for name, p in net.named_parameters():
        p.grad = torch.full_like(p, 0.1)
        if name in where:
            p.grad.view(-1)[-1] = bad


def everything(net, optimizer):
    grads = [p.grad for p in net.parameters()]
    return copy.deepcopy([net.state_dict(), optimizer.state_dict()["state"], grads])


@cases
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_gradient_raises_with_its_name_before_anything_is_written(case, bad, engine):
    net = model()
    optimizer = case.ours(net.named_parameters(), engine=engine, skip_nonfinite="raise", **case.options)
    give_gradients(net)
    optimizer.step()
    give_gradients(net, bad, ["0.bias", "2.weight"])
    before = everything(net, optimizer)
    for options in ({}, {"zero_grad": True}, {"zero_grad": True, "set_to_none": False}):
        with pytest.raises(FloatingPointError, match=r"of '0.bias', '2.weight', and has updated nothing"):
            optimizer.step(**options)
        torch.testing.assert_close(everything(net, optimizer), before, rtol=0, atol=0, equal_nan=True)
    # the next one is as if it had not been
    give_gradients(net)
    optimizer.step()
    other = model()
    other.load_state_dict(before[0])
    eager = case.ours(other.named_parameters(), engine=engine, **case.options)
    eager.load_state_dict({"state": before[1], "param_groups": optimizer.state_dict()["param_groups"]})
    give_gradients(other)
    eager.step()
    torch.testing.assert_close(net.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_parameters_without_names_are_told_by_their_places(engine):
    net = model()
    groups = [{"params": [p for n, p in net.named_parameters() if kind in n]} for kind in ("weight", "bias")]
    optimizer = fusedstep.AdamW(groups, engine=engine, skip_nonfinite="raise", max_grad_norm=1.0)
    give_gradients(net, float("nan"), ["2.bias"])
    with pytest.raises(FloatingPointError, match=r"of parameter 1 of group 1, shape \(2,\), and"):
        optimizer.step()


def test_many_are_not_all_listed():
    params = [(f"p{i}", torch.nn.Parameter(torch.ones(1))) for i in range(20)]
    optimizer = fusedstep.SGD(params, skip_nonfinite="raise")
    for _, p in params:
        p.grad = torch.full_like(p, float("inf"))
    with pytest.raises(FloatingPointError, match=r"of 'p0', .*'p7' and 12 more, and"):
        optimizer.step()


def test_a_parameter_that_lost_its_gradient_is_not_blamed(engine):
    net = model()
    optimizer = fusedstep.AdamW(net.named_parameters(), engine=engine, skip_nonfinite="raise")
    give_gradients(net)
    optimizer.step()
    give_gradients(net, float("nan"), ["0.bias"])
    net[0].bias.grad = None
    optimizer.step()
    assert optimizer.state[net[0].bias]["step"] == 1
    assert optimizer.state[net[2].bias]["step"] == 2


def test_several_tables_are_all_looked_at():
    # one engine takes plain tensors, the other those of a subclass
    wrapped = lambda t: TwoTensor(t.clone(), t.clone())
    p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(wrapped(torch.ones(3)))
    optimizer = fusedstep.AdamW([("plain", p), ("wrapped", q)], skip_nonfinite="raise")
    good, bad = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    for ours, theirs, name in ((bad, good, "plain"), (good, bad, "wrapped")):
        p.grad, q.grad = ours, wrapped(theirs)
        with pytest.raises(FloatingPointError, match=f"gradients of '{name}', and"):
            optimizer.step()
    assert torch.equal(p.detach(), torch.ones(3))
    assert torch.equal(q.a, torch.ones(3))


def test_what_a_scaler_finds_is_skipped_not_raised():
    # torch's own scaler skips by itself unless `fused` leaves it to the step
    for scaler, fused in ((torch.amp.GradScaler("cpu"), True), (fusedstep.GradScaler("cpu"), None)):
        net = model()
        optimizer = fusedstep.AdamW(net.named_parameters(), skip_nonfinite="raise", fused=fused)
        scaler.scale(net(torch.ones(1, 3)).sum()).backward()
        net[0].bias.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.step_was_skipped


def test_it_can_be_asked_for_later_and_survives_copies():
    net = model()
    optimizer = fusedstep.AdamW(net.named_parameters())
    optimizer.skip_nonfinite = "raise"
    assert copy.deepcopy(optimizer).skip_nonfinite == "raise"
    give_gradients(net, float("nan"), ["0.bias"])
    with pytest.raises(FloatingPointError, match=r"'0.bias'"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"Invalid skip_nonfinite: 'warn'; use True, False or \"raise\""):
        fusedstep.AdamW(net.parameters(), skip_nonfinite="warn")


def test_no_graph_can_raise():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = fusedstep.AdamW([p], skip_nonfinite="raise")

    def step(g):
        p.grad = g
        optimizer.step()

    with pytest.raises(RuntimeError, match=r'skip_nonfinite="raise" reads back.*use skip_nonfinite=True'):
        make_fx(step)(torch.ones(3))


def test_no_capture_can_raise(monkeypatch):
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = fusedstep.AdamW([p], skip_nonfinite="raise")
    optimizer.step()
    monkeypatch.setattr("fusedstep._engines.is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r'skip_nonfinite="raise" reads back.*use skip_nonfinite=True'):
        optimizer.step()


def of_parts(placement):
    """Every rank raises, though one alone holds the bad element."""
    mesh = ranks.mesh(2)
    weights = [distribute_tensor(torch.ones(5, 2), mesh, [placement]) for _ in range(2)]
    params = [*zip("ab", map(torch.nn.Parameter, weights), strict=True)]
    optimizer = fusedstep.AdamW(params, skip_nonfinite="raise", max_grad_norm=1.0)
    good, bad = torch.ones(5, 2), torch.ones(5, 2)
    bad[4, 1] = float("inf")
    for grads, name in (((good, good), None), ((good, bad), "b"), ((good, good), None)):
        for (_, p), g in zip(params, grads, strict=True):
            p.grad = distribute_tensor(g, mesh, [placement])
        if name is None:
            optimizer.step()
        else:
            with pytest.raises(FloatingPointError, match=f"gradients of '{name}', and"):
                optimizer.step()
    assert [optimizer.state[p]["step"].item() for _, p in params] == [2, 2]


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_ranks_that_hold_parts_raise_alike(placement, two):
    two.run(of_parts, placement)


def of_stages(has_parameters):
    """Of ranks that step other parameters all raise; one of them has none."""
    rank = torch.distributed.get_rank()
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = fusedstep.AdamW(
        [(f"stage{rank}.weight", p)], skip_nonfinite="raise", norm_group=torch.distributed.group.WORLD
    )
    for bad in (False, True, False):
        p.grad = torch.ones(3) if rank == 0 or has_parameters else None
        if bad and rank == 0:
            p.grad[1] = float("nan")
        if bad:
            found = "'stage0.weight'" if rank == 0 else "parameters of other ranks"
            with pytest.raises(FloatingPointError, match=f"gradients of {found}, and"):
                optimizer.step()
        else:
            optimizer.step()
    if p.grad is not None:
        assert optimizer.state[p]["step"] == 2


@pytest.mark.parametrize("has_parameters", [True, False])
def test_ranks_of_a_norm_group_raise_alike(has_parameters, two):
    two.run(of_stages, has_parameters)


@cases
def test_statistics_tell_by_name(case, engine):
    net = model()
    options = {**case.options, "skip_nonfinite": True, "statistics": True}
    optimizer = case.ours(net.named_parameters(), engine=engine, **options)
    give_gradients(net, float("nan"), ["0.bias"])
    net[2].weight.grad = None
    optimizer.step()
    seen = optimizer.statistics()
    assert seen.names == tuple(name for name, _ in net.named_parameters())
    found = seen.by_name("nonfinites")
    assert [name for name, count in found.items() if count > 0] == ["0.bias"]
    assert found["2.weight"] != found["2.weight"]
    assert seen.by_name("grad_norms").keys() == found.keys()
    with pytest.raises(ValueError, match=r"'grad_norm' does not tell of each.*use one of \('grad_norms'"):
        seen.by_name("grad_norm")


def test_statistics_without_names_say_how_to_have_them():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = fusedstep.AdamW([p], statistics=True)
    optimizer.step()
    seen = optimizer.statistics()
    assert seen.names is None
    with pytest.raises(RuntimeError, match="named_parameters"):
        seen.by_name("nonfinites")
    with pytest.raises(ValueError, match="no trust_ratios; Lamb and LARS have"):
        seen.by_name("trust_ratios")
