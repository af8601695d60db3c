"""Rules that somebody else writes, through the public interface alone, with all that optimizers here do."""

import copy
import io
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR
from torch.testing._internal.two_tensor import TwoTensor

import fusedstep
from fusedstep import rules
from fusedstep.rules import abs, keyword, largest, mix, rule, sign, sqrt, total, total_over_all, where
from tests import formats, ranks
from tests.pairs import copies, same_bits, set_grads, whole
from tests.test_checkpoints import Alone, trained
from tests.test_graphs import WARM_UPS, captured, feed, same, times
from tests.test_graphs import pair as for_graphs

NAN, INF = float("nan"), float("inf")


@rule(states={"m": "exp_avg"}, scalars={"n": "size"}, group_scalars={"k": "count", "d": "way"})
def everything(p, g, m, n, k, d, *, step, numel, lr, beta, keep):
    """A state, what a tensor keeps, what a group keeps, a sum over a tensor, and one over all that needs it."""
    mean = total(g * g) / numel
    n = where(step == 1, mean, mix(n, mean, beta))
    m = mix(m, g, beta)
    u = m / (sqrt(n) + 1e-3)
    d = keep * d + sqrt(total_over_all(u * u))
    return p - lr * u / (1 + d / (k + 1)), m, n, k + 1, d


class Everything(fusedstep.Optimizer):
    rule = everything

    lr: float = 0.1
    beta: float = 0.8
    keep: float = 0.5
    fused: bool | None = keyword(default=None, kw_only=True)


@rule(states={"m": "exp_avg"})
def lion(p, g, m, *, lr, beta1, beta2, weight_decay):
    u = sign(mix(m, g, beta1))
    return p - lr * (u + weight_decay * p), mix(m, g, beta2)


class Lion(fusedstep.Optimizer):
    rule = lion

    lr: float = 1e-2
    betas: tuple[float, float] = rules.pair("beta1", "beta2", (0.9, 0.99))
    weight_decay: float = 0.1


# by hand, in float64


class ByHand:
    """What `everything` does, with torch's operations on whole tensors."""

    def __init__(self, start, groups=None):
        """`groups` have options, and the places of their parameters."""
        self.params, self.groups = [], []
        for t in start:
            self.add(t)
        for options in [{"places": range(len(self.params))}] if groups is None else groups:
            self.add_group(**options)

    def add(self, t):
        p = t.detach().clone().to(torch.complex128 if t.is_complex() else torch.float64)
        self.params.append(SimpleNamespace(p=p, m=torch.zeros_like(p), n=None))

    def add_group(self, places, lr=0.1, beta=0.8, keep=0.5, maximize=False):
        self.groups.append(
            SimpleNamespace(places=[*places], lr=lr, beta=beta, keep=keep, maximize=maximize, k=0.0, d=0.0)
        )

    def step(self, grads):
        squares, updates = 0.0, {}
        for group in self.groups:
            for i in (i for i in group.places if grads[i] is not None):
                of, g = self.params[i], grads[i].detach().to(self.params[i].p.dtype)
                g = -g if group.maximize else g
                # a complex number is two
                mean = float(g.abs().square().sum()) / (g.numel() * (1 + g.is_complex()))
                of.n = mean if of.n is None else group.beta * of.n + (1 - group.beta) * mean
                of.m = group.beta * of.m + (1 - group.beta) * g
                updates[i] = of.m / (math.sqrt(of.n) + 1e-3)
                squares += float(updates[i].abs().square().sum())
        for group in self.groups:
            group.d = group.keep * group.d + math.sqrt(squares)
            for i in (i for i in group.places if i in updates):
                self.params[i].p = self.params[i].p - group.lr * updates[i] / (1 + group.d / (group.k + 1))
            group.k += 1


class LionByHand:
    def __init__(self, start, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1):
        self.params = [SimpleNamespace(p=t.detach().double(), m=t.detach().double() * 0) for t in start]
        self.groups, self.lr, self.betas, self.decay = [], lr, betas, weight_decay

    def step(self, grads):
        first, second = self.betas
        for of, g in ((of, g.detach().double()) for of, g in zip(self.params, grads, strict=True)):
            of.p = of.p - self.lr * ((first * of.m + (1 - first) * g).sign() + self.decay * of.p)
            of.m = second * of.m + (1 - second) * g


def plain(t):
    t = t.detach()
    return t.a if isinstance(t, TwoTensor) else whole(t)


def close(found, expected, tolerance, what):
    expected = torch.as_tensor(expected, dtype=None if isinstance(expected, torch.Tensor) else torch.float64)
    expected = expected if expected.is_complex() else expected.double()
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        plain(found).to(expected.dtype),
        expected,
        rtol=tolerance,
        atol=tolerance * max(largest, 1e-3),
        msg=lambda m: f"{what}: {m}",
    )


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def matches(optimizer, params, hand, tolerance=2e-6):
    """Parameters, states, what tensors keep and what groups keep."""
    for i, (p, of) in enumerate(zip(params, hand.params, strict=True)):
        close(p, of.p, tolerance, f"parameter {i}")
        if getattr(of, "n", None) is not None:
            kept = optimizer.state[p]["size"]
            assert kept.shape == ()
            close(kept, of.n, tolerance, f"size {i}")
        if p in optimizer.state and "exp_avg" in optimizer.state[p]:
            close(optimizer.state[p]["exp_avg"], of.m, tolerance, f"exp_avg {i}")
    for i, (group, of) in enumerate(zip(optimizer.param_groups, hand.groups, strict=False)):
        assert group["count"] == of.k, f"count {i}"
        assert group["way"].shape == ()
        close(group["way"], of.d, tolerance, f"way {i}")


def snapshot(optimizer):
    """All numbers that an optimizer has."""
    found = {}
    for i, p in enumerate(params_of(optimizer)):
        found[i, "param"] = plain(p).clone()
        values = optimizer.state.get(p, {}).items()
        found |= {(i, name): t.detach().clone() for name, t in values}
    for i, group in enumerate(optimizer.param_groups):
        found |= {("group", i, name): torch.as_tensor(group[name]).clone() for name in ("count", "way")}
    return found


def equal(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype, name
        assert torch.equal(value, b[name]), name


def shapes_for(engine):
    return [(3,), (2, 2)] if engine == "triton" else [(3, 4), (5,), (), (70,)]


def randn(shapes, seed, scale=1.0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(shape, generator=random)).to(dtype) for shape in shapes]


def made(start, cls=Everything, **options):
    params = copies(start)
    return params, cls(params, **options)


def take(optimizer, params, grads):
    set_grads(params, grads)
    optimizer.step()


def gradients(shapes, steps, dtype=torch.float32):
    """Of changing size."""
    return [randn(shapes, 10 + i, 10 ** ((i % 3) - 1), dtype) for i in range(steps)]


# engines


def test_all_that_a_rule_may_keep_is_as_by_hand(engine):
    shapes = shapes_for(engine)
    start = randn(shapes, 0)
    params, optimizer = made(start, engine=engine)
    hand = ByHand(start)
    for grads in gradients(shapes, 4):
        take(optimizer, params, grads)
        hand.step(grads)
        matches(optimizer, params, hand)
    assert {table.engine.NAME for table in optimizer._plan.tables} == {engine}


def test_lion_is_as_by_hand(engine):
    shapes = shapes_for(engine)
    start = randn(shapes, 0)
    params, optimizer = made(start, Lion, engine=engine)
    hand = LionByHand(start)
    for grads in gradients(shapes, 4):
        take(optimizer, params, grads)
        hand.step(grads)
    matches(optimizer, params, hand)
    assert all([*optimizer.state[p]] == ["exp_avg"] for p in params)


def test_the_engine_that_is_chosen_is_as_by_hand_for_many_tensors():
    shapes = [(n % 7 + 1, n % 5 + 1) for n in range(150)]
    start = randn(shapes, 0)
    params, optimizer = made(start)
    hand = ByHand(start)
    for grads in gradients(shapes, 2):
        take(optimizer, params, grads)
        hand.step(grads)
    matches(optimizer, params, hand)


@pytest.mark.parametrize("engine", ["torch", "cpu"])
def test_an_empty_tensor_is_stepped_with_the_others(engine):
    @rule(scalars={"n": "size"}, group_scalars={"d": "way"})
    def sizes(p, g, n, d, *, lr, numel):
        return p - lr * g, n + numel, d + total_over_all(g)

    class Sizes(fusedstep.Optimizer):
        rule = sizes
        lr: float = 1.0

    params, optimizer = made([torch.ones(0), torch.ones(2, 3)], Sizes, engine=engine)
    for _ in range(2):
        take(optimizer, params, [torch.ones(0), torch.ones(2, 3)])
    assert [optimizer.state[p]["size"].item() for p in params] == [0, 12]
    assert optimizer.param_groups[0]["way"] == 12
    assert torch.equal(params[1].detach(), -torch.ones(2, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("engine", ["torch", "cpu"])
def test_parameters_of_other_dtypes(dtype, engine):
    shapes = shapes_for(engine)
    start = randn(shapes, 0, dtype=dtype)
    params, optimizer = made(start, engine=engine, state_dtype=None if dtype == torch.float64 else "float32")
    hand = ByHand(start)
    for i, grads in enumerate(gradients(shapes, 3, dtype)):
        take(optimizer, params, grads)
        hand.step(grads)
        matches(optimizer, params, hand, 2e-6 if dtype == torch.float64 else (i + 1) * torch.finfo(dtype).eps)
    kept = [optimizer.state[p]["size"] for p in params]
    assert {t.dtype for t in kept} == {torch.float32}
    assert all(abs(t.item() / of.n - 1) < 2e-6 for t, of in zip(kept, hand.params, strict=True))


@pytest.mark.parametrize("engine", ["torch", "cpu"])
def test_complex_parameters_sum_real_and_imaginary_parts(engine):
    start = [torch.complex(*randn([(3, 4)] * 2, 0)), *randn([(5,)], 1)]
    grads = [[torch.complex(*randn([(3, 4)] * 2, i)), *randn([(5,)], 9 + i)] for i in range(3)]
    params, optimizer = made(start, engine=engine)
    hand = ByHand(start)
    for step in grads:
        take(optimizer, params, step)
        hand.step(step)
        matches(optimizer, params, hand)


@pytest.fixture
def float64_by_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def test_with_float64_by_default_all_digits_are_kept(engine, float64_by_default):
    shapes = shapes_for(engine)
    start = randn(shapes, 0, dtype=torch.float64)
    params, optimizer = made(start, engine=engine)
    hand = ByHand(start)
    for grads in gradients(shapes, 3, torch.float64):
        take(optimizer, params, grads)
        hand.step(grads)
        matches(optimizer, params, hand, 1e-12)
    assert {optimizer.state[p]["size"].dtype for p in params} == {torch.float64}


_NOTEBOOK = """
import fusedstep
from fusedstep.rules import mix, pair, rule, sign, total_over_all

@rule(states={"m": "exp_avg"}, group_scalars={"k": "count"})
def typed(p, g, m, k, *, lr, beta1, beta2):
    k = k + total_over_all(g * g)
    return p - lr * sign(mix(m, g, beta1)) * k, mix(m, g, beta2), k

class Typed(fusedstep.Optimizer):
    rule = typed
    lr: float = 0.5
    betas: tuple = pair("beta1", "beta2", (0.9, 0.99))
"""


def test_a_rule_may_be_typed_in_a_notebook(engine):
    cell = {}
    exec(compile(_NOTEBOOK, "<ipython-input-1>", "exec"), cell)
    params, optimizer = made([torch.tensor([1.0, -2.0])], cell["Typed"], engine=engine)
    for _ in range(2):
        take(optimizer, params, [torch.tensor([1.0, -2.0])])
    assert optimizer.param_groups[0]["count"] == 10
    assert torch.equal(params[0].detach(), torch.tensor([1 - 2.5 - 5, -2 + 2.5 + 5]))


def test_two_tables_of_one_optimizer_share_the_sum_over_all():
    wrapped = lambda t: TwoTensor(t.clone(), t.clone())
    start = randn([(3, 4), (5,), (7,)], 0)
    params = [nn.Parameter(start[0]), nn.Parameter(wrapped(start[1])), nn.Parameter(start[2])]
    optimizer = Everything([{"params": params[:2]}, {"params": params[2:], "keep": 0.25}], max_grad_norm=2.0)
    hand = ByHand(start, [{"places": [0, 1]}, {"places": [2], "keep": 0.25}])
    for step in gradients([(3, 4), (5,), (7,)], 3):
        for p, g in zip(params, step, strict=True):
            p.grad = wrapped(g) if isinstance(p.data, TwoTensor) else g.clone()
        optimizer.step()
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in step))
        hand.step([g.double() * min(1.0, 2.0 / (norm + 1e-6)) for g in step])
        matches(optimizer, params, hand)
    assert sorted(table.engine.NAME for table in optimizer._plan.tables) == ["cpu", "torch"]


# what optimizers do besides


def test_clipped_it_is_clip_grad_norm_and_the_rule(engine):
    shapes = shapes_for(engine)
    start = randn(shapes, 0)
    params, optimizer = made(start, engine=engine, max_grad_norm=2.0)
    hand, twins = ByHand(start), copies([t.double() for t in start])
    for grads in gradients(shapes, 4):
        take(optimizer, params, grads)
        set_grads(twins, [g.double() for g in grads])
        clip_grad_norm_(twins, 2.0)
        hand.step([q.grad for q in twins])
        matches(optimizer, params, hand)
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))


@pytest.mark.parametrize("engine", ["torch", "cpu"])
def test_lion_clipped_by_its_largest_element(engine):
    shapes = shapes_for(engine)
    start = randn(shapes, 0)
    params, optimizer = made(start, Lion, engine=engine, max_grad_norm=0.25, norm_type=INF)
    hand, twins = LionByHand(start), copies([t.double() for t in start])
    for grads in gradients(shapes, 4):
        take(optimizer, params, grads)
        set_grads(twins, [g.double() for g in grads])
        clip_grad_norm_(twins, 0.25, norm_type=INF)
        hand.step([q.grad for q in twins])
    matches(optimizer, params, hand)


# a scaler, and `fused`
WAYS = {
    "torchs": (torch.amp.GradScaler, None),
    "torchs-fused": (torch.amp.GradScaler, True),
    "ours": (fusedstep.GradScaler, None),
}


@pytest.mark.parametrize("way", WAYS)
def test_scaled_gradients_and_a_step_that_overflows(way, engine):
    kind, fused = WAYS[way]
    shapes = shapes_for(engine)
    start = randn(shapes, 0)
    params, optimizer = made(start, engine=engine, fused=fused, max_grad_norm=2.0)
    hand, twins = ByHand(start), copies([t.double() for t in start])
    scaler = kind("cpu", init_scale=256.0, growth_interval=1000)
    # the very first one, too: what begins with the first step begins with the first that is taken
    for i, grads in enumerate(gradients(shapes, 4 if engine == "triton" else 5)):
        overflows = i in (0, 2)
        if overflows:
            grads[1].view(-1)[1] = INF
        before = snapshot(optimizer)
        optimizer.zero_grad()
        loss = sum((p * g).sum() for p, g in zip(params, grads, strict=True))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if overflows:
            after = snapshot(optimizer)
            equal({name: after[name] for name in before}, _as_placed(before, after))
            assert scaler.get_scale() == 256 / 2 ** (1 + i // 2)
            continue
        set_grads(twins, [g.double() for g in grads])
        clip_grad_norm_(twins, 2.0)
        hand.step([q.grad for q in twins])
        matches(optimizer, params, hand)


def _as_placed(before, after):
    """Numbers of groups become tensors with the first step."""
    return {name: value.to(after[name].dtype) for name, value in before.items()}


@pytest.mark.parametrize("bad", [NAN, INF])
def test_steps_that_are_skipped_leave_all_as_it_was(bad, engine):
    shapes = shapes_for(engine)
    start = randn(shapes, 0)
    params, optimizer = made(start, engine=engine, skip_nonfinite=True)
    hand = ByHand(start)
    for i, grads in enumerate(gradients(shapes, 4)):
        before = snapshot(optimizer)
        if i in (0, 2):
            grads[0].view(-1)[-1] = bad
            take(optimizer, params, grads)
            after = snapshot(optimizer)
            equal({name: after[name] for name in before}, _as_placed(before, after))
            assert optimizer.step_was_skipped
        else:
            take(optimizer, params, grads)
            hand.step(grads)
            matches(optimizer, params, hand)
    assert optimizer.skipped_steps == 2


def test_with_raise_nothing_has_moved():
    params, optimizer = made(randn([(3,), (4,)], 0), skip_nonfinite="raise")
    take(optimizer, params, randn([(3,), (4,)], 1))
    before = snapshot(optimizer)
    with pytest.raises(FloatingPointError, match="parameter 1 of group 0"):
        take(optimizer, params, [torch.ones(3), torch.full((4,), NAN)])
    equal(snapshot(optimizer), before)


@pytest.mark.parametrize("cls", [Everything, Lion])
def test_averages(cls, engine):
    shapes = shapes_for(engine)
    start = randn(shapes, 0)
    params, optimizer = made(start, cls, engine=engine, ema_decay=0.75)
    hand = (ByHand if cls is Everything else LionByHand)(start)
    averages = [t.double() for t in start]
    for grads in gradients(shapes, 3):
        take(optimizer, params, grads)
        hand.step(grads)
        averages = [0.75 * a + 0.25 * of.p for a, of in zip(averages, hand.params, strict=True)]
    matches(optimizer, params, hand)
    for p, a in zip(params, averages, strict=True):
        close(optimizer.state[p]["ema"], a, 2e-6, "average")
    with optimizer.ema_parameters():
        for p, a in zip(params, averages, strict=True):
            close(p, a, 2e-6, "average")


@pytest.mark.parametrize("cls", [Everything, Lion])
def test_statistics(cls, engine):
    shapes = shapes_for(engine)
    start = randn(shapes, 0)
    params, optimizer = made(start, cls, engine=engine, statistics=True, max_grad_norm=2.0)
    hand = (ByHand if cls is Everything else LionByHand)(start)
    norm = lambda tensors: math.sqrt(sum(float(t.double().square().sum()) for t in tensors))
    for grads in gradients(shapes, 3):
        before = [of.p for of in hand.params]
        take(optimizer, params, grads)
        factor = min(1.0, 2.0 / (norm(grads) + 1e-6))
        hand.step([g.double() * factor for g in grads])
        seen, after = optimizer.statistics(), [of.p for of in hand.params]
        changes = [b - a for a, b in zip(before, after, strict=True)]
        expected = {"grad": grads, "param": after, "update": changes}
        for name, tensors in expected.items():
            close(getattr(seen, f"{name}_norm"), norm(tensors), 1e-5, name)
            close(getattr(seen, f"{name}_norms"), [norm([t]) for t in tensors], 1e-5, name)
        close(seen.clip_factor, factor, 1e-6, "clip factor")
        assert seen.nonfinite == 0
        assert seen.trust_ratios is None
    matches(optimizer, params, hand)


def test_states_of_eight_bits(engine):
    shapes = [(70,)] if engine == "triton" else [(3, 40), (70,), (5,)]
    start = randn(shapes, 0)
    params = copies(start)
    optimizer = Everything([{"params": params, "state_dtype": "int8"}], engine=engine)
    hand = ByHand(start)
    for grads in gradients(shapes, 2 if engine == "triton" else 4):
        if optimizer.state:
            # from what was stored, to what is made of it
            stored = optimizer.expanded_state_dict()["state"]
            for i, of in enumerate(hand.params):
                of.m = stored[i]["exp_avg"].double()
        take(optimizer, params, grads)
        hand.step(grads)
        for i, (p, of) in enumerate(zip(params, hand.params, strict=True)):
            close(p, of.p, 2e-6, f"parameter {i}")
            close(optimizer.state[p]["size"], of.n, 2e-6, f"size {i}")
            close(optimizer.expanded_state_dict()["state"][i]["exp_avg"], of.m, 1 / 32, f"exp_avg {i}")
        close(optimizer.param_groups[0]["way"], hand.groups[0].d, 2e-6, "way")
    names = {"step", "size", "exp_avg_codes", "exp_avg_scales"}
    assert all(optimizer.state[p].keys() == names for p in params)


@pytest.mark.parametrize("cls", [Everything, Lion])
def test_a_split_master_is_float32_training_bit_by_bit(cls, engine):
    shapes = shapes_for(engine)
    start = randn(shapes, 0, dtype=torch.bfloat16)
    params, optimizer = made(start, cls, engine=engine, master="split", state_dtype="float32")
    twins, other = made([t.float() for t in start], cls, engine=engine)
    hand = (ByHand if cls is Everything else LionByHand)(start)
    for grads in gradients(shapes, 3 if engine == "triton" else 10, torch.bfloat16):
        take(optimizer, params, grads)
        take(other, twins, [g.float() for g in grads])
        hand.step(grads)
    matches(other, twins, hand, 4e-6)
    for p, q in zip(params, twins, strict=True):
        assert same_bits(formats.joined(p, optimizer.state[p]["master_rest"]), q.detach())
        for name, value in other.state[q].items():
            assert same_bits(optimizer.state[p][name], value), name
    if cls is Everything:
        a, b = ({n: o.param_groups[0][n] for n in ("count", "way")} for o in (optimizer, other))
        equal(a, b)


@pytest.mark.parametrize("cls", [Everything, Lion])
def test_stochastic_rounding_resumes_with_the_same_bits(cls, engine):
    shapes = shapes_for(engine)
    start = randn(shapes, 0, dtype=torch.bfloat16)
    options = {"engine": engine, "rounding": "stochastic", "seed": 5}
    params, optimizer = made(start, cls, **options)
    grads = gradients(shapes, 2 if engine == "triton" else 8, torch.bfloat16)
    half = len(grads) // 2
    for step in grads[:half]:
        take(optimizer, params, step)
    resumed, other = made(params, cls, **options)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for step in grads[half:]:
        take(optimizer, params, step)
        take(other, resumed, step)
    for p, q in zip(params, resumed, strict=True):
        equal({"param": p.detach(), **optimizer.state[p]}, {"param": q.detach(), **other.state[q]})
    if cls is Everything:
        equal(snapshot(optimizer), snapshot(other))


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_that_a_step_is_done_with(set_to_none, engine):
    shapes = shapes_for(engine)
    start = randn(shapes, 0)
    params, optimizer = made(start, engine=engine)
    hand = ByHand(start)
    for grads in gradients(shapes, 2):
        set_grads(params, grads)
        optimizer.step(zero_grad=True, set_to_none=set_to_none)
        hand.step(grads)
        assert all(p.grad is None if set_to_none else not p.grad.any() for p in params)
    matches(optimizer, params, hand)


def test_nan_in_what_a_group_keeps_goes_on_as_nan(engine):
    """An unguarded NaN must give NaN, on every engine, not an exception at the next step."""
    params, optimizer = made([torch.ones(2), torch.ones(1)], engine=engine)
    take(optimizer, params, [torch.tensor([1.0, NAN]), torch.ones(1)])
    assert optimizer.param_groups[0]["way"].isnan()
    take(optimizer, params, [torch.ones(2), torch.ones(1)])
    assert all(p.isnan().all() for p in params)
    assert optimizer.param_groups[0]["count"] == 2


# parameters and groups that come and go


def test_a_gradient_that_is_missing_moves_nothing_of_its_tensor(engine):
    shapes = shapes_for(engine)
    start = randn(shapes, 0)
    params, optimizer = made(start, engine=engine, max_grad_norm=2.0)
    hand, twins = ByHand(start), copies([t.double() for t in start])
    for i, grads in enumerate(gradients(shapes, 5)):
        missing = {0: (), 1: (1,), 2: (0,), 3: (1,), 4: ()}[i]
        grads = [None if k in missing else g for k, g in enumerate(grads)]
        before = snapshot(optimizer)
        take(optimizer, params, grads)
        set_grads(twins, [None if g is None else g.double() for g in grads])
        clip_grad_norm_(twins, 2.0)
        hand.step([q.grad for q in twins])
        matches(optimizer, params, hand)
        after, names = snapshot(optimizer), [name for name in before if name[0] in missing]
        assert len(names) == 4 * len(missing)
        equal({name: after[name] for name in names}, {name: before[name] for name in names})


def test_a_first_gradient_that_comes_late_is_a_first_step(engine):
    shapes = shapes_for(engine)
    start = randn(shapes, 0)
    params, optimizer = made(start, engine=engine)
    hand = ByHand(start)
    for i, grads in enumerate(gradients(shapes, 4)):
        grads = [None if k == 1 and i < 2 else g for k, g in enumerate(grads)]
        take(optimizer, params, grads)
        hand.step(grads)
        assert ("size" in optimizer.state.get(params[1], {})) == (i >= 2)
        matches(optimizer, params, hand)
    assert [optimizer.state[p]["step"].item() for p in params[:2]] == [4, 2]


def test_a_group_without_gradients_keeps_what_all_have_in_common():
    shapes = [(3,), (4,)]
    start = randn(shapes, 0)
    params = copies(start)
    optimizer = Everything([{"params": params[:1]}, {"params": params[1:]}])
    hand = ByHand(start, [{"places": [0]}, {"places": [1]}])
    for i, grads in enumerate(gradients(shapes, 4)):
        grads = [None if i in (1, 2) else grads[0], grads[1]]
        take(optimizer, params, grads)
        hand.step(grads)
        matches(optimizer, params, hand)


@pytest.mark.parametrize("engine", ["torch", "cpu"])
def test_a_parameter_that_is_thawed_later(engine):
    shapes = [(3,), (4,)]
    start = randn(shapes, 0)
    params, optimizer = made(start, engine=engine)
    params[1].requires_grad_(False)
    hand = ByHand(start)
    for i, grads in enumerate(gradients(shapes, 4)):
        params[1].requires_grad_(i >= 2)
        grads = [grads[0], None if i < 2 else grads[1]]
        take(optimizer, params, grads)
        hand.step(grads)
        matches(optimizer, params, hand)


def test_groups_have_options_of_their_own_and_may_come_later(engine):
    shapes = [(3,), (2,), (2, 2)]
    start = randn(shapes, 0)
    params = copies(start)
    optimizer = Everything(
        [
            {"params": params[:1], "lr": 0.3, "beta": 0.5},
            {"params": params[1:2], "maximize": True, "keep": 0.9},
        ],
        engine=engine,
    )
    of_groups = [
        {"places": [0], "lr": 0.3, "beta": 0.5},
        {"places": [1], "maximize": True, "keep": 0.9},
        {"places": [2], "lr": 0.05},
    ]
    hand = ByHand(start, of_groups[:2])
    for i, grads in enumerate(gradients(shapes, 5)):
        if i == 2:
            optimizer.add_param_group({"params": params[2:], "lr": 0.05})
            hand.add_group(**of_groups[2])
        if i < 2:
            grads[2] = None
        take(optimizer, params, grads)
        hand.step(grads)
        matches(optimizer, params, hand)
    assert [group["count"].item() for group in optimizer.param_groups] == [5, 5, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_rate_may_be_a_tensor(dtype, engine):
    shapes = shapes_for(engine)
    start = randn(shapes, 0)
    rate = torch.tensor(0.25, dtype=dtype)
    params, optimizer = made(start, engine=engine, lr=rate)
    hand = ByHand(start, [{"places": range(len(start)), "lr": 0.25}])
    for grads in gradients(shapes, 3):
        take(optimizer, params, grads)
        hand.step(grads)
        matches(optimizer, params, hand)
        rate.mul_(0.5)
        hand.groups[0].lr *= 0.5


@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize(
    ("schedule", "arguments"), [(ExponentialLR, {"gamma": 0.5}), (CosineAnnealingLR, {"T_max": 4})]
)
def test_schedules(schedule, arguments, is_tensor):
    shapes = [(3,), (4, 2)]
    start = randn(shapes, 0)
    params, optimizer = made(start, lr=torch.tensor(0.25) if is_tensor else 0.25)
    scheduler = schedule(optimizer, **arguments)
    hand = ByHand(start)
    for i, grads in enumerate(gradients(shapes, 4)):
        hand.groups[0].lr = 0.25 * (
            0.5**i if schedule is ExponentialLR else (1 + math.cos(math.pi * i / 4)) / 2
        )
        take(optimizer, params, grads)
        scheduler.step()
        hand.step(grads)
        matches(optimizer, params, hand)


def test_what_a_group_keeps_may_be_set(engine):
    """In place, and by a number."""
    params, optimizer = made(randn([(3,)], 0), engine=engine)
    hand = ByHand(params)
    for i, grads in enumerate(gradients([(3,)], 3)):
        if i == 1:
            optimizer.param_groups[0]["way"].fill_(2.0)
            hand.groups[0].d = 2.0
        if i == 2:
            optimizer.param_groups[0]["way"] = hand.groups[0].d = 5.0
        take(optimizer, params, grads)
        hand.step(grads)
        matches(optimizer, params, hand)


def test_what_a_tensor_keeps_may_be_set(engine):
    params, optimizer = made(randn([(3,), (2,)], 0), engine=engine)
    hand = ByHand(params)
    for i, grads in enumerate(gradients([(3,), (2,)], 3)):
        if i == 1:
            optimizer.state[params[1]]["size"].fill_(2.0)
            hand.params[1].n = 2.0
        if i == 2:
            optimizer.state[params[1]]["size"] = torch.tensor(5.0)
            hand.params[1].n = 5.0
        take(optimizer, params, grads)
        hand.step(grads)
        matches(optimizer, params, hand)


# copies and checkpoints


def saved_and_loaded(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deep", "pickle"]
)
def test_a_copy_goes_on_by_itself(copied, engine):
    shapes = shapes_for(engine)
    start = randn(shapes, 0)
    params, optimizer = made(start, engine=engine)
    hand, grads = ByHand(start), gradients(shapes, 5)
    for step in grads[:2]:
        take(optimizer, params, step)
        hand.step(step)
    twin = copied(optimizer)
    before = snapshot(twin)
    equal(snapshot(optimizer), before)
    take(optimizer, params, grads[2])
    equal(snapshot(twin), before)
    after = snapshot(optimizer)
    for step in (grads[2], grads[4]):
        take(twin, params_of(twin), step)
        hand.step(step)
    equal(snapshot(optimizer), after)
    matches(twin, params_of(twin), hand)


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.5, "max_grad_norm": 1.0}], ids=["plain", "more"])
def test_training_resumes_with_the_same_bits(options, steps_before, engine):
    """Also in an optimizer that has stepped before."""
    if engine == "triton" and (options or steps_before):
        pytest.skip("the interpreter takes long")
    shapes, half = shapes_for(engine), 1 if engine == "triton" else 3
    params, optimizer = made(randn(shapes, 0), engine=engine, **options)
    grads = gradients(shapes, 2 * half)
    for step in grads[:half]:
        take(optimizer, params, step)
    saved = saved_and_loaded(optimizer.state_dict())
    assert saved["state"][0]["size"].shape == saved["param_groups"][0]["way"].shape == ()
    resumed, other = made(randn(shapes, 1), engine=engine, **options)
    for step in gradients(shapes, steps_before):
        take(other, resumed, [3 * g for g in step])
    other.load_state_dict(saved)
    with torch.no_grad():
        for p, q in zip(params, resumed, strict=True):
            q.copy_(p)
    equal(snapshot(optimizer), snapshot(other))
    for step in grads[half:]:
        take(optimizer, params, step)
        take(other, resumed, step)
    equal(snapshot(optimizer), snapshot(other))


def test_an_optimizer_may_load_what_it_had(engine):
    params, optimizer = made(randn([(3,), (2,)], 0), engine=engine)
    grads = gradients([(3,), (2,)], 4)
    for step in grads[:2]:
        take(optimizer, params, step)
    saved, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    for step in grads[2:]:
        take(optimizer, params, step)
    expected = snapshot(optimizer)
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for p, w in zip(params, weights, strict=True):
            p.copy_(w)
    for step in grads[2:]:
        take(optimizer, params, step)
    equal(snapshot(optimizer), expected)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_what_is_loaded_is_not_the_sources(steps_before, engine):
    """Whoever goes on first, the other's scalars stay."""
    shapes = [(3,), (2,)]
    params, source = made(randn(shapes, 0), engine=engine)
    twins, target = made(randn(shapes, 0), engine=engine)
    grads = gradients(shapes, 5)
    take(source, params, grads[0])
    for _ in range(steps_before):
        take(target, twins, grads[1])
    target.load_state_dict(source.state_dict())
    kept = lambda optimizer: {
        name: value
        for name, value in snapshot(optimizer).items()
        if name[-1] in ("size", "count", "way", "step")
    }
    before = kept(target)
    take(source, params, grads[2])
    equal(kept(target), before)
    before = kept(source)
    take(target, twins, grads[3])
    equal(kept(source), before)


def test_a_checkpoint_does_not_move_with_training():
    """As torch's: tensors of a state_dict are the optimizer's own, but a deep copy is not."""
    params, optimizer = made(randn([(3,)], 0))
    take(optimizer, params, randn([(3,)], 1))
    saved = copy.deepcopy(optimizer.state_dict())
    kept = saved["state"][0]["size"].item(), saved["param_groups"][0]["way"].item()
    take(optimizer, params, randn([(3,)], 2))
    assert (saved["state"][0]["size"].item(), saved["param_groups"][0]["way"].item()) == kept
    assert optimizer.state[params[0]]["size"] != kept[0]


def test_a_checkpoint_of_sixteen_bit_parameters_keeps_scalars_as_they_are():
    params, optimizer = made(randn([(3,), (2, 2)], 0, dtype=torch.bfloat16), state_dtype="float32")
    for grads in gradients([(3,), (2, 2)], 2, torch.bfloat16):
        take(optimizer, params, grads)
    _, other = made(params, state_dtype="float32")
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    equal(snapshot(optimizer), snapshot(other))


@rule(scalars={"n": "size"})
def without_states(p, g, n, *, step, lr):
    return p - lr * g / step, n + total(abs(g))


class WithoutStates(fusedstep.Optimizer):
    rule = without_states
    lr: float = 0.5


@rule()
def counting(p, g, *, step, lr):
    return (p - lr * g / step,)


class Counting(fusedstep.Optimizer):
    rule = counting
    lr: float = 0.5


@pytest.mark.parametrize("cls", [WithoutStates, Counting])
def test_a_rule_that_keeps_nothing_for_elements_resumes(cls, engine):
    params, optimizer = made([torch.zeros(2)], cls, engine=engine)
    for _ in range(2):
        take(optimizer, params, [torch.ones(2)])
    resumed, other = made(params, cls, engine=engine)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    take(other, resumed, [torch.ones(2)])
    close(resumed[0], torch.full((2,), -0.5 * (1 + 1 / 2 + 1 / 3)), 1e-6, "parameter")
    if cls is WithoutStates:
        assert other.state[resumed[0]]["size"] == 6


@rule(scalars={"n": "size"}, saves_step=False)
def asking_for_the_first(p, g, n, *, step, lr):
    return p - lr * g, where(step == 1, 5.0, n + 1)


class AskingForTheFirst(fusedstep.Optimizer):
    rule = asking_for_the_first
    lr: float = 0.5


def test_a_rule_that_keeps_only_scalars_knows_its_first_step(engine):
    params, optimizer = made([torch.zeros(2)], AskingForTheFirst, engine=engine)
    for i in range(3):
        take(optimizer, params, [torch.ones(2)])
        assert optimizer.state[params[0]]["size"] == 5 + i
    resumed, other = made(params, AskingForTheFirst, engine=engine)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    take(other, resumed, [torch.ones(2)])
    assert other.state[resumed[0]]["size"] == 8


# several rules


@rule(states={"m": "exp_avg"}, scalars={"a": "first", "b": "second"}, group_scalars={"k": "count"})
def keeping_two(p, g, m, a, b, k, *, lr):
    return p - lr * g, m + g, a + total(g), b + largest(abs(g)), k + 1


@rule(scalars={"b": "second"})
def keeping_one(p, g, b, *, lr):
    return p + lr * g, b + 10 * total(g)


class TwoRules(fusedstep.Optimizer):
    rules = (keeping_two, keeping_one)
    lr: float = 0.5
    up: bool = False

    def rule_of(self, group):
        return self.rules[bool(group["up"])]


def test_rules_of_one_optimizer_may_keep_other_scalars(engine):
    params = copies([torch.zeros(2), torch.zeros(3), torch.zeros(1)])
    optimizer = TwoRules(
        [{"params": params[:1]}, {"params": params[1:2], "up": True}, {"params": params[2:]}], engine=engine
    )
    for _ in range(2):
        take(optimizer, params, [torch.tensor([1.0, -3.0]), torch.ones(3), torch.tensor([4.0])])
    kept = [{n: v.item() for n, v in optimizer.state[p].items() if v.dim() == 0} for p in params]
    assert kept[0] == {"first": -4, "second": 6}
    assert kept[1] == {"second": 60}
    assert [optimizer.state[params[2]][n].item() for n in ("first", "second", "exp_avg")] == [8, 8, 8]
    assert [float(group["count"]) for group in optimizer.param_groups] == [2, 0, 2]
    assert [p.detach().tolist() for p in params] == [[-1, 3], [1, 1, 1], [-4]]


# whoever watches


def test_a_traced_step_moves_all_that_is_kept():
    shapes = [(3,), (2, 2)]
    start = randn(shapes, 0)
    params, optimizer = made(start)
    hand, grads = ByHand(start), gradients(shapes, 3)

    def stepped(*given):
        set_grads(params, given)
        optimizer.step()
        return [p.detach().clone() for p in params]

    stepped(*grads[0])
    hand.step(grads[0])
    # it runs while it is traced
    graph = make_fx(stepped)(*grads[1])
    hand.step(grads[1])
    matches(optimizer, params, hand)
    with torch.no_grad():
        graph(*grads[2])
    hand.step(grads[2])
    matches(optimizer, params, hand)


# ranks


def placed(i, t):
    """Rows on two ranks, one of them without any of the last; a copy on each; a plain tensor."""
    if i == 3:
        return t.clone()
    return distribute_tensor(
        t.clone(), ranks.mesh(2), [Replicate() if i == 2 else Shard(0)], src_data_rank=None
    )


def given_parts(options, bad_step):
    shapes = [(5, 3), (4,), (2, 2), (3,), (1, 3)]
    start = randn(shapes, 0)
    params = [nn.Parameter(placed(i, t)) for i, t in enumerate(start)]
    groups = [{"params": params[:2]}, {"params": params[2:], "keep": 0.25}]
    optimizer, hand = (
        Everything(groups, **options),
        ByHand(start, [{"places": [0, 1]}, {"places": [2, 3, 4], "keep": 0.25}]),
    )
    twins = copies([t.double() for t in start])
    for i, grads in enumerate(gradients(shapes, 4)):
        if i == bad_step:
            # in the part of one rank
            grads[0][0, 0] = NAN
        if i == 3:
            grads[1] = None
        for k, (p, g) in enumerate(zip(params, grads, strict=True)):
            p.grad = None if g is None else placed(k, g)
        optimizer.step()
        if i != bad_step:
            set_grads(twins, [None if g is None else g.double() for g in grads])
            if "max_grad_norm" in options:
                clip_grad_norm_(twins, options["max_grad_norm"])
            hand.step([q.grad for q in twins])
        matches(optimizer, params, hand)
    assert optimizer.skipped_steps == (bad_step is not None)


@pytest.mark.parametrize("engine", ["torch", "cpu"])
@pytest.mark.parametrize(
    ("options", "bad_step"),
    [({}, None), ({"max_grad_norm": 1.0, "skip_nonfinite": True}, 1)],
    ids=["plain", "more"],
)
def test_parts_of_tensors_are_stepped_as_the_whole(two, options, bad_step, engine):
    made([torch.ones(2)], engine=engine)[1].step()
    two.run(given_parts, {"engine": engine, **options}, bad_step)


def sharded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    hand = ByHand([p.detach().clone() for p in model.parameters()])
    fully_shard(model[0], mesh=ranks.mesh(2))
    fully_shard(model, mesh=ranks.mesh(2))
    optimizer = Everything(model.parameters())
    for i in range(3):
        random = torch.Generator().manual_seed(10 * i + torch.distributed.get_rank())
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=random)).square().sum().backward()
        grads = [whole(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        hand.step(grads)
        matches(optimizer, [*model.parameters()], hand)
    # what is kept once is no part of anything, and the same on all ranks
    kept = [optimizer.state[p]["size"] for p in model.parameters()]
    assert {type(t) for t in kept} == {torch.Tensor}
    return [t.item() for t in kept], optimizer.param_groups[0]["way"].item()


def test_fsdp_is_stepped_as_one_process_steps(two):
    first, second = two.run(sharded)
    assert first == second


KIND = (Everything, {"max_grad_norm": 0.5})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_is_loaded_by_one_process_and_by_two(two, tmp_path):
    uninterrupted = two.run(trained, KIND, range(6))
    two.run(trained, KIND, range(3), None, tmp_path / "a")
    assert two.run(trained, KIND, range(3, 6), tmp_path / "a") == uninterrupted
    (alone,) = Alone().run(trained, KIND, range(3, 6), tmp_path / "a")
    for (name, a), (other, b) in zip(alone, uninterrupted[0], strict=True):
        assert name == other
        close(torch.tensor(a), torch.tensor(b), 4e-6, name)


def left_out():
    """A parameter of the first rank alone, which the other cannot sum over; beside a plain one."""
    mesh = DeviceMesh("cpu", [0])
    placed = lambda: distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    params = [nn.Parameter(placed()), nn.Parameter(torch.ones(3))]
    optimizer = Everything(params)
    params[0].grad, params[1].grad = placed(), torch.ones(3)
    if torch.distributed.get_rank() == 1:
        with pytest.raises(RuntimeError, match=r"mesh \[0\] leaves out this rank"):
            optimizer.step()
    else:
        optimizer.step()
    return float(optimizer.param_groups[0]["way"])


def test_a_sum_over_all_with_a_mesh_that_leaves_out_a_rank_is_refused(two):
    two.run(left_out)


def refused_norm_group():
    params, optimizer = made([torch.ones(3)], norm_group=torch.distributed.group.WORLD)
    with pytest.raises(TypeError, match=r"Everything.* sums over all tensors, which norm_group does not reach"):
        take(optimizer, params, [torch.ones(3)])


def test_a_norm_group_with_a_sum_over_all_is_refused(two):
    two.run(refused_norm_group)


# graphs


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("cls", [Everything, Lion])
@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 0.5, "skip_nonfinite": True, "ema_decay": 0.9}], ids=["plain", "more"]
)
def test_a_replay_is_a_step(cls, groups, options):
    # of no elements there is no mean
    eager, graphed = for_graphs(cls, [(7, 5), (), (1100,), (64, 33)], groups, **options)
    graph = captured(graphed.step)
    times(WARM_UPS, eager.step)
    same(eager, graphed)
    for i, scale in enumerate((1.0, 0.01, 10.0, 1.0)):
        feed(eager, graphed, scale=scale, bad=INF if options and i == 2 else None)
        eager.step()
        graph.replay()
        same(eager, graphed)
        for ours, theirs in zip(eager.param_groups, graphed.param_groups, strict=True):
            for name in ("count", "way") if cls is Everything else ():
                assert ours[name].is_cuda
                assert torch.equal(ours[name], theirs[name]), name
    if cls is Everything:
        assert eager.param_groups[0]["count"] == WARM_UPS + 4 - bool(options)


@pytest.mark.gpu
def test_replays_are_as_by_hand():
    start = [t.cuda() for t in randn([(7, 5), (), (1100,)], 0)]
    params, optimizer = made(start)
    hand, ones = ByHand([t.cpu() for t in start]), [torch.ones_like(t) for t in start]
    set_grads(params, ones)
    graph = captured(optimizer.step)
    for _ in range(WARM_UPS):
        hand.step([g.cpu() for g in ones])
    for grads in gradients([(7, 5), (), (1100,)], 3):
        for p, g in zip(params, grads, strict=True):
            p.grad.copy_(g)
        graph.replay()
        hand.step(grads)
    for p, of in zip(params, hand.params, strict=True):
        close(p.cpu(), of.p, 4e-6, "parameter")
        close(optimizer.state[p]["size"].cpu(), of.n, 4e-6, "size")
    close(optimizer.param_groups[0]["way"].cpu(), hand.groups[0].d, 4e-6, "way")
    assert optimizer.param_groups[0]["count"] == WARM_UPS + 3


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["torch", "triton"])
def test_devices_share_the_sum_over_all(engine):
    shapes = [(3, 4), (5,)]
    start = randn(shapes, 0)
    params = [nn.Parameter(start[0].cuda()), nn.Parameter(start[1])]
    # a group on two devices, too
    optimizer, hand = Everything(params, engine="torch" if engine == "torch" else None), ByHand(start)
    for grads in gradients(shapes, 3):
        take(optimizer, params, [grads[0].cuda(), grads[1]])
        hand.step(grads)
    for p, of in zip(params, hand.params, strict=True):
        close(p.cpu(), of.p, 4e-6, "parameter")
    close(optimizer.param_groups[0]["way"].cpu(), hand.groups[0].d, 4e-6, "way")


# what is refused


def stepped(update, **options):
    """A step of a class with this rule."""

    class Own(fusedstep.Optimizer):
        rule = update
        lr: float = 0.5

    params, optimizer = made([torch.ones(3), torch.ones(2)], Own, **options)
    take(optimizer, params, [torch.ones(3), torch.ones(2)])
    return params, optimizer


def test_a_scalar_of_each_element_is_refused(engine):
    of_tensor = rule(scalars={"n": "size"})(lambda p, g, n, *, lr: (p - lr * g, n + g))
    of_group = rule(group_scalars={"n": "size"})(lambda p, g, n, *, lr: (p - lr * g, n + g))
    for each in (of_tensor, of_group):
        with pytest.raises(
            TypeError, match=r"a number of each element for 'size', which is kept once; sum it up"
        ):
            stepped(each, engine=engine)


@pytest.mark.parametrize(
    "update",
    [
        lambda p, g, d, *, lr: (p - lr * g, d + total(g)),
        lambda p, g, d, *, lr: (p - lr * g, d + largest(abs(g)) * total_over_all(g)),
        lambda p, g, d, *, lr, step: (p - lr * g, d + step),
        lambda p, g, d, *, lr, step: (p - lr * g, where(step == 1, 1.0, d)),
        lambda p, g, d, *, lr, numel: (p - lr * g, d + 1 / numel),
    ],
    ids=["total", "largest", "step", "first-step", "numel"],
)
def test_what_differs_between_tensors_is_no_groups(update):
    with pytest.raises(TypeError, match=r"a number of each tensor for 'way'.*sums over all, total_over_all"):
        stepped(rule(group_scalars={"d": "way"})(update))


def test_what_a_tensor_keeps_is_no_groups():
    update = rule(scalars={"n": "size"}, group_scalars={"d": "way"})(
        lambda p, g, n, d, *, lr: (p - lr * g, n + 1, d + n)
    )
    with pytest.raises(TypeError, match="a number of each tensor for 'way'"):
        stepped(update)


def test_nothing_has_changed_after_a_rule_was_refused():
    @rule(scalars={"n": "size"})
    def odd(p, g, n, *, lr):
        return p - lr * g, g

    class Odd(fusedstep.Optimizer):
        rule = odd
        lr: float = 0.5

    params, optimizer = made([torch.ones(3)], Odd)
    for _ in range(2):
        with pytest.raises(TypeError, match="kept once"):
            take(optimizer, params, [torch.ones(3)])
    assert torch.equal(params[0].detach(), torch.ones(3))
    assert not optimizer.state


@rule()
def summing(p, g, *, lr):
    return (p - lr * g * total_over_all(g),)


@rule()
def descending(p, g, *, lr):
    return (p - lr * g,)


def test_a_sum_over_all_and_another_rule_in_one_optimizer_are_refused():
    class Mixed(fusedstep.Optimizer):
        rules = (summing, descending)
        lr: float = 0.5
        sums: bool = True

        def rule_of(self, group):
            return self.rules[0 if group["sums"] else 1]

    params = copies([torch.ones(2), torch.ones(3)])
    optimizer = Mixed([{"params": params[:1]}, {"params": params[1:], "sums": False}])
    with pytest.raises(TypeError, match="Mixed has groups with different rules, and one of them sums over all"):
        take(optimizer, params, [torch.ones(2), torch.ones(3)])
    assert torch.equal(params[0].detach(), torch.ones(2))
    # one rule that a class has two of is fine
    optimizer = Mixed(params)
    take(optimizer, params, [torch.ones(2), torch.ones(3)])
    assert torch.equal(params[0].detach(), torch.full((2,), -1.5))


@pytest.mark.parametrize("name", ["step", "numel", "params", "ema", "master", "master_rest"])
@pytest.mark.parametrize("kind", ["states", "scalars", "group_scalars"])
def test_names_that_mean_something_else_are_refused(kind, name):
    with pytest.raises(TypeError, match=rf"keeps \['{name}'\]; give each a name of its own"):
        rule(**{kind: {"n": name}})(lambda p, g, n, *, lr: (p, n))


def test_one_name_for_two_is_refused():
    with pytest.raises(TypeError, match=r"keeps \['n'\]; give each a name of its own"):
        rule(states={"a": "n"}, scalars={"b": "n"})(lambda p, g, a, b: (p, a, b))


@pytest.mark.parametrize("name", ["scale", "found_inf"])
def test_an_option_of_any_name_is_the_groups(name, engine):
    """Or it is refused; a rule that silently takes something else is neither."""
    cell = {}
    text = f"""
import fusedstep
from fusedstep.rules import rule

@rule()
def own(p, g, *, {name}):
    return (p - {name} * g,)

class Own(fusedstep.Optimizer):
    rule = own
    {name}: float = 0.25
"""
    try:
        exec(text, cell)
    except TypeError:
        return
    params, optimizer = made([torch.ones(2)], cell["Own"], engine=engine)
    take(optimizer, params, [torch.ones(2)])
    assert torch.equal(params[0].detach(), torch.full((2,), 0.75))


@pytest.mark.parametrize("name", ["maximize", "ema_decay", "max_grad_norm", "lr", "seed"])
def test_a_groups_scalar_does_not_take_the_name_of_something_else(name):
    with pytest.raises(TypeError):
        stepped(rule(group_scalars={"k": name})(lambda p, g, k, *, lr: (p - lr * g, k + 1)))


@pytest.mark.parametrize("given", [lambda p, g: (p,), 3, None], ids=["function", "number", "none"])
def test_a_rule_that_is_none_is_refused(given):
    with pytest.raises(TypeError, match=r"Odd.rule is .*@rule\(states=...\)"):

        class Odd(fusedstep.Optimizer):
            rule = given


def test_an_option_that_nobody_declares_is_refused():
    @rule(group_scalars={"k": "count"})
    def odd(p, g, k, *, rate):
        return p - rate * g, k

    message = (
        r"rule 'odd' .*test_own_features.py:\d+\) of Odd takes \['rate'\], .*declare an option of that name"
    )
    with pytest.raises(TypeError, match=message):

        class Odd(fusedstep.Optimizer):
            rule = odd
            lr: float = 1e-3


def test_arguments_of_a_rule_are_in_order():
    with pytest.raises(TypeError, match=r"takes \['p', 'g', 'n', 'm'\] by position.*\['p', 'g', 'm', 'n'\]"):
        rule(states={"m": "exp_avg"}, scalars={"n": "size"})(lambda p, g, n, m, *, lr: (p, n, m))
    with pytest.raises(TypeError, match="a tuple of 3"):
        stepped(rule(states={"m": "exp_avg"}, scalars={"n": "size"})(lambda p, g, m, n, *, lr: (p, m)))


def test_what_groups_keep_is_no_argument():
    with pytest.raises(TypeError, match="unexpected keyword argument 'way'"):
        Everything([nn.Parameter(torch.ones(2))], way=1.0)
    optimizer = Everything([nn.Parameter(torch.ones(2))])
    assert (optimizer.param_groups[0]["way"], optimizer.param_groups[0]["count"]) == (0.0, 0.0)


def test_a_checkpoint_of_another_rule_is_refused():
    params, optimizer = made([torch.ones(2)])
    others, lions = made([torch.ones(2)], Lion)
    take(lions, others, [torch.ones(2)])
    with pytest.raises(ValueError, match=r"has no beta, keep for a group of Everything"):
        optimizer.load_state_dict(lions.state_dict())
    take(optimizer, params, [torch.ones(2)])


def test_a_subclass_may_change_defaults():
    class Faster(Everything):
        lr: float = 0.4

    start = randn([(3,)], 0)
    params, optimizer = made(start, Faster)
    hand = ByHand(start, [{"places": [0], "lr": 0.4}])
    for grads in gradients([(3,)], 2):
        take(optimizer, params, grads)
        hand.step(grads)
    matches(optimizer, params, hand)


def test_of_plain_numbers_a_rule_just_computes():
    p, m, n, k, d = everything(1.0, 3.0, 0.0, 0.0, 0.0, 0.0, step=1, numel=1, lr=0.1, beta=0.8, keep=0.5)
    hand = ByHand([torch.tensor(1.0)])
    hand.step([torch.tensor(3.0)])
    (of,), (group,) = hand.params, hand.groups
    for found, expected in ((p, of.p), (m, of.m), (n, of.n), (k, group.k), (d, group.d)):
        close(torch.tensor(found, dtype=torch.float64), expected, 1e-12, "number")
