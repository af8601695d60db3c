"""Gradient scaling: what PyTorch's own tests demand, of our optimizers, with torch's scaler and with ours.

What only torch's scaler does, and what is left in gradients, is in test_unscaling.
"""

import contextlib
import copy
import io
import pickle
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

import fusedstep
from tests.cases import KINDS, name_of


class Way(NamedTuple):
    """Who scales, and the `fused` of our optimizers."""

    scaler: type
    fused: bool | None = None

    @property
    def calls_every_step(self):
        """Whether a step is called that is to be skipped; one that is not does not know of it."""
        return self.fused or self.scaler is fusedstep.GradScaler


WAYS = {
    "torchs": Way(torch.amp.GradScaler),
    "torchs-fused": Way(torch.amp.GradScaler, fused=True),
    "ours": Way(fusedstep.GradScaler),
    "ours-fused": Way(fusedstep.GradScaler, fused=True),
}
INF = float("inf")
# of four steps the third overflows; the scale doubles after each of the others
OVERFLOWS, SCALES = 2, (256, 512, 256, 512)

cases = pytest.mark.parametrize("case", KINDS, ids=name_of)
few_cases = pytest.mark.parametrize(
    "case", [c for c in KINDS if c.name in ("sgd-momentum", "adamw")], ids=name_of
)
bad_numbers = pytest.mark.parametrize("bad", [INF, -INF, float("nan")])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(params=["torchs", "torchs-fused", "ours"])
def way(request):
    return WAYS[request.param]


# those that call step() whatever was found
calling = pytest.mark.parametrize(
    "way", [pytest.param(way, id=name) for name, way in WAYS.items() if way.calls_every_step]
)


def network(device):
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(device)


def close(ours, theirs, **tolerances):
    """The parameters of two optimizers, and the states of those."""
    both = (group["params"] for optimizer in (ours, theirs) for group in optimizer.param_groups)
    for p, q in zip(*both, strict=True):
        torch.testing.assert_close(p, q, **tolerances)
        for name, value in theirs.state[q].items():
            # torch's counts are on the host
            torch.testing.assert_close(ours.state[p][name].to(value.device), value, **tolerances)


def backward(model, scaler, x, y):
    scaler.scale(mse_loss(model(x), y)).backward()


def nothing(model, optimizer, scaler):
    pass


def train(case, device, way, backward=backward, before_step=nothing, engine=None, limit=None, **tolerances):
    """Ours with scaled gradients, one of which overflows, beside its peer without that step or any scale."""
    model, scaler = network(device), made(way, device)
    twin, limited = copy.deepcopy(model), {} if limit is None else {"max_grad_norm": limit}
    ours = case.ours(model.parameters(), engine=engine, fused=way.fused, **{**case.options, **limited})
    theirs = case.theirs(twin.parameters(), **case.options)
    unscaled = torch.amp.GradScaler(device, enabled=False)
    for i in range(4):
        x, y = torch.randn(2, 8, 8, device=device)
        ours.zero_grad()
        backward(model, scaler, x, y)
        if i == OVERFLOWS:
            model[1].weight.grad[3, 4] = INF
        before_step(model, ours, scaler)
        scaler.step(ours)
        scaler.update()
        assert scaler.get_scale() == SCALES[i]
        assert ours.step_was_skipped == (i == OVERFLOWS and way.calls_every_step)
        if i != OVERFLOWS:
            theirs.zero_grad()
            backward(twin, unscaled, x, y)
            if limit is not None:
                clip_grad_norm_(twin.parameters(), limit)
            before_step(twin, theirs, unscaled)
            theirs.step()
    assert ours.skipped_steps == (1 if way.calls_every_step else 0)
    close(ours, theirs, **tolerances)


def made(way, device, **options):
    return way.scaler(device, **{"init_scale": 128.0, "growth_interval": 1, **options})


def started(way, device, **options):
    """A scaler that has scaled a loss."""
    scaler = made(way, device, **options)
    scaler.scale(torch.ones((), device=device))
    return scaler


def parameter(way, grad, device, dtype=torch.float32, **options):
    """A parameter with a gradient, and SGD that subtracts it."""
    p = torch.nn.Parameter(torch.zeros(len(grad), device=device, dtype=dtype))
    p.grad = torch.tensor(grad, device=device, dtype=dtype)
    return p, fusedstep.SGD([p], lr=1.0, fused=way.fused, **options)


@cases
def test_scaled_training_is_training(case, device, way):
    train(case, device, way)


@cases
def test_scaled_training_is_training_on_every_engine(case, way, engine):
    train(case, "cpu", way, engine=engine)


@pytest.mark.parametrize("separately", [False, True], ids=["fused", "unscaled-before"])
@cases
def test_training_under_autocast_is_scaled(case, separately, device, way):
    def in_half(model, scaler, x, y):
        with torch.autocast(device, dtype=torch.float16):
            loss = mse_loss(model(x), y)
        scaler.scale(loss).backward()

    def unscale(model, optimizer, scaler):
        if separately:
            scaler.unscale_(optimizer)

    train(case, device, way, in_half, unscale, rtol=1e-3, atol=1e-3)


@cases
def test_scaled_gradients_may_be_clipped_to_a_scaled_norm(case, device, way):
    def clip(model, optimizer, scaler):
        clip_grad_norm_(model.parameters(), 0.1 * scaler.get_scale())

    train(case, device, way, before_step=clip)


@cases
def test_gradients_may_be_unscaled_and_then_clipped(case, device, way):
    def clip(model, optimizer, scaler):
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.1)

    train(case, device, way, before_step=clip)


@few_cases
def test_the_optimizer_clips_what_it_unscales(case, device, way):
    train(case, device, way, limit=0.1)


def test_a_loss_may_hold_a_penalty_on_scaled_gradients(device, way):
    def with_penalty(model, scaler, x, y):
        loss = mse_loss(model(x), y)
        grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
        norm = sum((g / scaler.get_scale()).square().sum() for g in grads).sqrt()
        scaler.scale(loss + norm).backward()

    for case in KINDS:
        train(case, device, way, with_penalty)


def test_scaled_gradients_accumulate(device, way):
    def in_halves(model, scaler, x, y):
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            scaler.scale(mse_loss(model(a), b) / 2).backward()

    for case in KINDS:
        train(case, device, way, in_halves)


@pytest.mark.parametrize("second", [fusedstep.AdamW, torch.optim.AdamW], ids=["both-ours", "one-torchs"])
def test_of_several_optimizers_only_those_that_overflow_skip(second, device, way):
    models = [network(device) for _ in range(2)]
    twins = copy.deepcopy(models)
    classes = [fusedstep.SGD, second]
    ours = [cls(m.parameters(), lr=0.1, fused=way.fused) for cls, m in zip(classes, models, strict=True)]
    peers = [torch.optim.SGD, torch.optim.AdamW]
    theirs = [cls(m.parameters(), lr=0.1) for cls, m in zip(peers, twins, strict=True)]
    scaler, unscaled = made(way, device), torch.amp.GradScaler(device, enabled=False)
    for i in range(4):
        x, y = torch.randn(2, 8, 8, device=device)
        for nets, optimizers, s in ((models, ours, scaler), (twins, theirs, unscaled)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            one, other = (net(x) for net in nets)
            s.scale(mse_loss(2 * one - other, y)).backward(retain_graph=True)
            s.scale(mse_loss(one + 3 * other, y)).backward()
        if i == OVERFLOWS:
            models[1][0].bias.grad[5] = INF
        scaler.unscale_(ours[0])
        for optimizer in ours:
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == SCALES[i]
        theirs[0].step()
        if i != OVERFLOWS:
            theirs[1].step()
    for optimizer, peer in zip(ours, theirs, strict=True):
        close(optimizer, peer)


@calling
def test_each_of_several_optimizers_knows_whether_it_skipped_after_the_update(device, way):
    (_, good), (_, bad) = parameter(way, [1.0, 2.0], device), parameter(way, [1.0, INF], device)
    scaler = started(way, device)
    for optimizer in (good, bad):
        scaler.step(optimizer)
    scaler.update()
    assert not good.step_was_skipped
    assert bad.step_was_skipped
    assert (int(good.skipped_steps), int(bad.skipped_steps)) == (0, 1)
    assert scaler.get_scale() == 64


@bad_numbers
@cases
def test_no_bit_changes_where_gradients_overflow(case, bad, device, way):
    model, scaler = network(device), made(way, device)
    optimizer = case.ours(model.parameters(), fused=way.fused, **case.options)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, scaler, *torch.randn(2, 8, 8, device=device))
        if step == 2:
            model[0].bias.grad[-1] = bad
            before = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close([model.state_dict(), optimizer.state_dict()["state"]], before, rtol=0, atol=0)
    assert optimizer.step_was_skipped == way.calls_every_step


def test_gradients_that_are_large_but_finite_are_no_overflow(device, way):
    p, optimizer = parameter(way, [1e30, -1e30, 3.4e38], device)
    expected = -p.grad / 2.0**100
    scaler = started(way, device, init_scale=2.0**100)
    scaler.step(optimizer)
    scaler.update()
    assert not optimizer.step_was_skipped
    torch.testing.assert_close(p.detach(), expected)
    assert scaler.get_scale() == 2.0**101


@pytest.mark.parametrize("fused", [None, False, True])
def test_our_scaler_leaves_gradients_scaled_unless_asked(fused, device):
    way = Way(fusedstep.GradScaler, fused)
    p, optimizer = parameter(way, [256.0, 512.0], device)
    scaler = started(way, device)
    scaler.step(optimizer)
    assert p.tolist() == [-2, -4]
    assert p.grad.tolist() == [256, 512]
    scaler.update()
    scaler.unscale_(optimizer)
    assert p.grad.tolist() == [1, 2]


def test_scale_and_growth_tracker_go_as_with_torchs_optimizers(device, way):
    ours, theirs = (made(each, device, growth_interval=3) for each in (way, WAYS["torchs"]))
    (p, a), (q, _) = parameter(way, [1.0], device), parameter(way, [1.0], device)
    b = torch.optim.SGD([q], lr=1.0)
    seen = []
    for overflows in (0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0):
        for scaler, param, optimizer in ((ours, p, a), (theirs, q, b)):
            optimizer.zero_grad()
            scaler.scale(param.sum() * (INF if overflows else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert ours.state_dict() == theirs.state_dict()
        seen.append((ours.get_scale(), ours._get_growth_tracker()))
    assert seen[2:5] == [(256, 0), (256, 1), (128, 0)]
    assert seen[-1] == (64, 0)
    assert torch.equal(p, q)


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_a_new_scale_holds_from_the_next_step(as_tensor, device, way):
    p, optimizer = parameter(way, [128.0], device)
    scaler = started(way, device)
    scaler.step(optimizer)
    scaler.update(torch.tensor(4.0, device=device) if as_tensor else 4.0)
    p.grad.fill_(4.0)
    scaler.step(optimizer)
    scaler.update()
    assert p.item() == -2
    assert scaler.get_scale() == 8


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("other", [WAYS["torchs"], WAYS["ours"]], ids=["torchs", "ours"])
def test_the_state_of_a_scaler_loads_into_another(other, used, device, way):
    first = started(way, device, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    first.step(parameter(way, [1.0], device)[1])
    first.update()
    second = (started if used else made)(other, device, init_scale=2.0)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    for bad in (1.0, INF, 1.0):
        for scaler in (first, second):
            scaler.scale(torch.ones((), device=device))
            scaler.step(parameter(way, [bad], device)[1])
            scaler.update()
        assert second.state_dict() == first.state_dict()
    assert first.get_scale() == 128


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_scaler_can_be_copied_between_iterations(copied, device, way):
    scaler = started(way, device)
    scaler.step(parameter(way, [1.0], device)[1])
    with pytest.raises(AssertionError, match="may only be pickled at the beginning"):
        copied(scaler)
    scaler.update()
    twin = copied(scaler)
    assert type(twin) is way.scaler
    assert twin.state_dict() == scaler.state_dict()
    twin.scale(torch.ones((), device=device))
    p, optimizer = parameter(way, [256.0], device)
    twin.step(optimizer)
    twin.update()
    assert p.item() == -1
    assert (twin.get_scale(), scaler.get_scale()) == (512, 256)


def test_training_goes_on_from_checkpoints_of_model_optimizer_and_scaler(device, way):
    def more(model, optimizer, scaler):
        torch.manual_seed(1)
        for _ in range(2):
            optimizer.zero_grad()
            backward(model, scaler, *torch.randn(2, 8, 8, device=device))
            scaler.step(optimizer)
            scaler.update()

    model, saved = network(device), io.BytesIO()
    optimizer, scaler = fusedstep.AdamW(model.parameters(), lr=0.1, fused=way.fused), made(way, device)
    more(model, optimizer, scaler)
    torch.save([part.state_dict() for part in (model, optimizer, scaler)], saved)
    other = network(device)
    parts = other, fusedstep.AdamW(other.parameters(), fused=way.fused), way.scaler(device)
    saved.seek(0)
    for part, state in zip(parts, torch.load(saved, weights_only=True), strict=True):
        part.load_state_dict(state)
    more(model, optimizer, scaler)
    more(*parts)
    close(optimizer, parts[1], rtol=0, atol=0)
    assert parts[2].get_scale() == 2048


def test_a_second_step_before_the_update_is_refused(device, way):
    p, optimizer = parameter(way, [128.0], device)
    scaled = p.grad.clone()
    scaler = started(way, device)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update"):
        scaler.step(optimizer)
    assert p.item() == -1
    scaler.update()
    p.grad = scaled
    scaler.step(optimizer)
    assert p.item() == -1.5


def test_unscaling_twice_or_after_the_step_is_refused(device, way):
    p, optimizer = parameter(way, [128.0], device)
    scaler = started(way, device)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called on this optimizer"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.unscale_(optimizer)
    assert (p.item(), p.grad.item()) == (-1, 1)


def test_an_update_without_a_step_is_refused(device, way):
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        started(way, device).update()


def test_a_step_before_anything_was_scaled_is_refused(device, way):
    p, optimizer = parameter(way, [128.0], device)
    scaler = made(way, device)
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(AssertionError, match="_scale is None"):
            call(optimizer)
    assert p.item() == 0


def test_a_closure_is_refused(device, way):
    _, optimizer = parameter(way, [128.0], device)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        started(way, device).step(optimizer, closure=lambda: 1.0)


def test_a_scaler_that_is_switched_off_only_steps(device, way):
    p, optimizer = parameter(way, [3.0], device)
    scaler = made(way, device, enabled=False)
    assert scaler.scale(p) is p
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, closure=lambda: 5.0) == 5
    scaler.update()
    assert p.item() == -3
    assert scaler.get_scale() == 1
    assert scaler.state_dict() == {}


def test_infinities_are_recorded_under_the_device_as_a_key(device, way):
    p, optimizer = parameter(way, [INF], device)
    scaler = started(way, device)
    scaler.step(optimizer)
    found = scaler._found_inf_per_device(optimizer)
    assert list(found) == [p.device]
    assert found[torch.zeros(1, device=device).device].item() == 1


class TakesTensors(torch.optim.Optimizer):
    _step_supports_amp_scaling = True

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        self.seen = self.grad_scale, self.found_inf


class TakesTheScaler(TakesTensors):
    def step(self, *, grad_scaler=None):
        self.seen = grad_scaler


@pytest.mark.parametrize("bad", [1.0, INF])
def test_other_fused_optimizers_get_what_torchs_scaler_gives_them(bad, device, way):
    p, _ = parameter(way, [bad], device)
    scaler, tensors, itself = started(way, device), TakesTensors([p]), TakesTheScaler([p])
    scaler.step(tensors)
    with pytest.warns(FutureWarning, match="stop passing itself"):
        scaler.step(itself)
    assert itself.seen is scaler
    assert [t.item() for t in tensors.seen] == [128, bad == INF]
    assert not hasattr(tensors, "grad_scale")
    scaler.update()
    assert scaler.get_scale() == (64 if bad == INF else 256)


@calling
def test_our_optimizers_hold_the_scale_only_during_a_step(device, way):
    p, optimizer = parameter(way, [128.0], device)
    seen = []
    look = lambda *_: seen.append([vars(optimizer).get(name) for name in ("grad_scale", "found_inf")])
    handle = optimizer.register_step_pre_hook(look)
    scaler = started(way, device)
    scaler.step(optimizer)
    scaler.update()
    handle.remove()
    scale, found_inf = seen[0]
    assert isinstance(scale, torch.Tensor)
    # ours leaves it to the step to find out
    assert (found_inf is None) == (way.scaler is fusedstep.GradScaler)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
    p.grad.fill_(1.0)
    optimizer.step()
    assert p.item() == -2


def test_a_step_that_fails_leaves_no_scale_behind(device):
    way = WAYS["ours"]
    p, optimizer = parameter(way, [128.0], device)
    scaler = started(way, device)
    good, p.grad = p.grad, torch.ones(1, device=device).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        scaler.step(optimizer)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
    p.grad = good
    scaler.step(optimizer)
    scaler.update()
    assert p.item() == -1


@calling
@cases
def test_a_scale_that_the_caller_set_counts_too(case, device, way):
    weights, grads = torch.randn(2, 5, 5, device=device)
    ours, theirs = (torch.nn.Parameter(weights.clone()) for _ in range(2))
    ours.grad, theirs.grad = 15 * grads, grads
    optimizer = case.ours([ours], fused=way.fused, **case.options)
    scaler = started(way, device, init_scale=5.0)
    optimizer.grad_scale = torch.tensor([3.0], device=device)
    scaler.step(optimizer)
    scaler.update()
    peer = case.theirs([theirs], **case.options)
    peer.step()
    close(optimizer, peer)
    assert not hasattr(optimizer, "grad_scale")


@calling
@pytest.mark.parametrize("clips", [False, True], ids=["unlimited", "limited"])
@few_cases
def test_float16_gradients_are_unscaled_in_the_step(case, clips, device, way):
    weights, *grads = (t.half() for t in torch.randn(5, 30, device=device))
    options = {**case.options, **({"max_grad_norm": 0.5} if clips else {})}
    scaled, plain = (torch.nn.Parameter(weights.clone()) for _ in range(2))
    a, b = (case.ours([p], state_dtype=torch.float32, fused=way.fused, **options) for p in (scaled, plain))
    # a power of two rounds nothing
    scaler = started(way, device, init_scale=1024.0, growth_interval=100)
    for i, g in enumerate(grads):
        scaled.grad, plain.grad = 1024 * g, g
        if i == OVERFLOWS:
            scaled.grad[7] *= 1e5
            assert torch.isinf(scaled.grad).any()
        scaler.step(a)
        scaler.update(1024.0)
        if i != OVERFLOWS:
            b.step()
    assert torch.equal(scaled, plain)


def test_float16_gradients_are_not_unscaled_before_the_step(device, way):
    p, optimizer = parameter(way, [128.0], device, torch.float16)
    scaler = started(way, device)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
    assert (p.item(), p.grad.item()) == (0, 128)


@contextlib.contextmanager
def passes_over_gradients(monkeypatch):
    """How often torch looks for infinities."""
    name = "_amp_foreach_non_finite_check_and_unscale_"
    counted, calls = getattr(torch, name), []

    def count(*args):
        calls.append(name)
        return counted(*args)

    with monkeypatch.context() as patch:
        patch.setattr(torch, name, count)
        yield calls


@cases
def test_our_scaler_saves_the_pass_over_gradients_that_torchs_makes(case, device, monkeypatch):
    counts = {}
    for name, way in WAYS.items():
        model, scaler = network(device), made(way, device)
        optimizer = case.ours(model.parameters(), fused=way.fused, **case.options)
        with passes_over_gradients(monkeypatch) as calls:
            for _ in range(3):
                optimizer.zero_grad()
                backward(model, scaler, *torch.randn(2, 8, 8, device=device))
                scaler.step(optimizer)
                scaler.update()
        counts[name] = len(calls)
        assert scaler.get_scale() == 1024
    assert counts == {"torchs": 3, "torchs-fused": 3, "ours": 0, "ours-fused": 0}


@pytest.mark.parametrize("what", ["unscaled before", "torch's optimizer"])
def test_our_scaler_makes_the_pass_where_the_step_does_not(what, device, monkeypatch):
    p, optimizer = parameter(WAYS["ours"], [128.0], device)
    scaler = started(WAYS["ours"], device)
    if what == "torch's optimizer":
        optimizer = torch.optim.SGD([p], lr=1.0)
    with passes_over_gradients(monkeypatch) as calls:
        if what == "unscaled before":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert len(calls) == 1
    assert (p.item(), p.grad.item()) == (-1, 1)


@calling
@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_scaled_step_may_clear_gradients(set_to_none, overflows, device, way):
    p, optimizer = parameter(way, [128.0, INF if overflows else 256.0], device)
    scaler = started(way, device)
    scaler.step(optimizer, zero_grad=True, set_to_none=set_to_none)
    assert p.tolist() == ([0, 0] if overflows else [-1, -2])
    assert p.grad is None if set_to_none else p.grad.tolist() == [0, 0]


@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_statistics_are_those_of_unscaled_gradients(norm_type, device, way):
    options = {"max_grad_norm": 1.0, "norm_type": norm_type, "statistics": True}
    p, optimizer = parameter(way, [3.0 * 128, 4.0 * 128], device, **options)
    scaler = started(way, device)
    scaler.step(optimizer)
    scaler.update()
    seen, norm = optimizer.statistics(), 5 if norm_type == 2 else 4
    torch.testing.assert_close(seen.grad_norm.item(), float(norm))
    torch.testing.assert_close(seen.clip_factor.item(), 1 / norm, rtol=1e-5, atol=0)
    assert (bool(seen.skipped), int(seen.nonfinite)) == (False, 0)
    p.grad[1] = INF
    scaler.step(optimizer)
    scaler.update()
    seen = optimizer.statistics()
    if way.calls_every_step:
        assert (bool(seen.skipped), seen.update_norm.item()) == (True, 0)
    else:
        assert not seen.skipped


def test_parameters_without_a_gradient_are_left_out(device, way):
    p, _ = parameter(way, [128.0], device)
    frozen, unused = (torch.nn.Parameter(torch.ones(2, device=device)) for _ in range(2))
    frozen.requires_grad_(False)
    optimizer = fusedstep.AdamW([frozen, p, unused], lr=1.0, weight_decay=0, fused=way.fused)
    scaler = started(way, device)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(p.detach(), -torch.ones_like(p))
    assert torch.equal(frozen, unused)
    assert list(optimizer.state) == [p]


@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_a_step_that_looks_for_itself_and_a_scaler_agree(bad, device, way):
    p, optimizer = parameter(way, [128.0, bad], device, skip_nonfinite=True)
    scaler = started(way, device)
    scaler.step(optimizer)
    scaler.update()
    seen = 1 if way.calls_every_step else 0
    assert p.tolist() == [0, 0]
    assert (int(optimizer.skipped_steps), scaler.get_scale()) == (seen, 64)
    p.grad.fill_(64.0)
    scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == [-1, -1]
    assert (int(optimizer.skipped_steps), scaler.get_scale()) == (seen, 128)


def on_both_devices():
    """Parameters on CPU and GPU, and their twins on the CPU."""
    twins = [torch.nn.Parameter(torch.randn(n)) for n in (50, 3000)]
    devices = "cpu", "cuda"
    return [torch.nn.Parameter(q.detach().to(d, copy=True)) for q, d in zip(twins, devices, strict=True)], twins


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [None, 0.5])
def test_parameters_on_two_devices_are_unscaled_and_skipped_together(limit):
    params, twins = on_both_devices()
    make = partial(fusedstep.AdamW, lr=0.1, max_grad_norm=limit)
    a, b, scaler = make(params), make(twins), started(WAYS["ours"], "cuda", growth_interval=100)
    for bad in (None, 0, None, 1, None):
        scale = scaler.get_scale()
        for i, (p, q) in enumerate(zip(params, twins, strict=True)):
            q.grad = torch.randn(q.shape)
            p.grad = (scale * q.grad).to(p.device)
            if i == bad:
                p.grad[-1] = INF
        # the scale is still on its way when the step begins
        torch.cuda._sleep(50_000_000)
        scaler.step(a)
        scaler.update()
        if bad is None:
            b.step()
    assert scaler.get_scale() == 32
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_a_scale_on_the_gpu_reaches_parameters_on_the_cpu_before_it_is_read(found):
    params, twins = on_both_devices()
    a, b = (fusedstep.SGD(both, lr=1.0) for both in (params, twins))
    for p, q in zip(params, twins, strict=True):
        q.grad = torch.randn(q.shape)
        p.grad = (64 * q.grad).to(p.device)
    a.step()
    for p, q in zip(params, twins, strict=True):
        p.data.copy_(q)
    a.grad_scale, a.found_inf = torch.zeros(2, device="cuda")
    torch.cuda._sleep(50_000_000)
    a.grad_scale.fill_(64.0)
    a.found_inf.fill_(found)
    a.step()
    if not found:
        b.step()
    assert all(torch.equal(p.cpu(), q) for p, q in zip(params, twins, strict=True))
