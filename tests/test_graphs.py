"""Steps in CUDA graphs, as PyTorch tests its own; and what a step launches, counted by the profiler."""

import contextlib
import copy
import gc
import io
import pickle
import subprocess
import sys
import time
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR

import fusedstep
from tests.cases import CASES, KINDS, name_of

pytestmark = pytest.mark.gpu

SHAPES = [(7, 5), (), (0,), (1100,), (64, 33)]
WARM_UPS = 3
INF = float("inf")
EVERYTHING = {"max_grad_norm": 0.5, "skip_nonfinite": True, "ema_decay": 0.9, "statistics": True}

cases = pytest.mark.parametrize("case", KINDS, ids=name_of)


def captured(function):
    """A graph of what `function` does, after it has done so a few times on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    return capture(function)


def capture(function):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def on_device(*numbers):
    return [torch.tensor(number, device="cuda") for number in numbers]


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def pair(cls, shapes=SHAPES, groups=1, dtypes=(torch.float32,), **options):
    """Two optimizers of copies of the same parameters, which have gradients; one is for graphs."""
    start = [torch.randn(shape).to("cuda", dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)]
    optimizers = []
    for _ in range(2):
        params = [torch.nn.Parameter(t.clone()) for t in start]
        members = [{"params": params[i::groups]} for i in range(groups)]
        optimizers.append(cls(members, **options))
        for p in params:
            p.grad = torch.ones_like(p)
    return optimizers


def feed(*optimizers, scale=1.0, bad=None):
    """The same gradients for all, where theirs are."""
    for params in zip(*map(params_of, optimizers), strict=True):
        grad = scale * torch.randn_like(params[0])
        if bad is not None and grad.numel():
            grad.view(-1)[-1] = bad
        for p in params:
            p.grad.copy_(grad)


def times(count, function):
    for _ in range(count):
        function()


def same(eager, graphed):
    """The same bits in all parameters and states."""
    for p, q in zip(params_of(eager), params_of(graphed), strict=True):
        assert torch.equal(p, q)
        states, others = eager.state.get(p, {}), graphed.state.get(q, {})
        assert states.keys() == others.keys()
        for name, value in states.items():
            assert torch.equal(value, others[name]), name


def close(eager, graphed):
    for p, q in zip(params_of(eager), params_of(graphed), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


# a graph of step() alone


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_replay_is_a_step(case):
    eager, graphed = pair(case.ours, **case.options)
    graph = captured(graphed.step)
    times(WARM_UPS, eager.step)
    for scale in (1.0, 0.01, 10.0, 1.0):
        feed(eager, graphed, scale=scale)
        eager.step()
        graph.replay()
    same(eager, graphed)


@cases
def test_a_replay_does_everything_besides_the_update(case):
    eager, graphed = pair(case.ours, **{**case.options, **EVERYTHING})
    step = lambda optimizer: optimizer.step(zero_grad=True, set_to_none=False)
    graph = captured(lambda: step(graphed))
    times(WARM_UPS, lambda: step(eager))
    for bad in (None, INF, None, float("nan"), None):
        feed(eager, graphed, bad=bad)
        step(eager)
        graph.replay()
        assert graphed.step_was_skipped == (bad is not None)
        for found, seen in zip(eager.statistics(), graphed.statistics(), strict=True):
            torch.testing.assert_close(found, seen, rtol=0, atol=0, equal_nan=True)
        assert all(p.grad.count_nonzero() == 0 for p in params_of(graphed))
    assert graphed.skipped_steps == 2
    same(eager, graphed)


FEATURES = [
    {"max_grad_norm": 0.5},
    {"max_grad_norm": 0.1, "norm_type": INF},
    {"skip_nonfinite": True},
    {"ema_decay": 0.9},
    {"statistics": True},
    {"maximize": True, "foreach": True, "amsgrad": True},
    {"capturable": True, "fused": True, "state_dtype": torch.float64},
]


@pytest.mark.parametrize("options", FEATURES, ids=str)
def test_every_feature_can_be_captured_alone(options):
    eager, graphed = pair(fusedstep.AdamW, lr=0.1, **options)
    graph = captured(graphed.step)
    times(WARM_UPS, eager.step)
    for bad in (None, INF if "skip_nonfinite" in options else None, None):
        feed(eager, graphed, bad=bad)
        eager.step()
        graph.replay()
        assert torch.equal(eager.step_was_skipped, graphed.step_was_skipped)
    if "statistics" in options:
        assert torch.equal(eager.statistics().grad_norms, graphed.statistics().grad_norms)
    same(eager, graphed)


def test_averages_are_those_of_replays():
    eager, graphed = pair(fusedstep.AdamW, lr=0.1, ema_decay=0.9)
    graph = captured(graphed.step)
    times(WARM_UPS, eager.step)
    for _ in range(3):
        eager.step()
        graph.replay()
    with eager.ema_parameters(), graphed.ema_parameters():
        same(eager, graphed)
    graph.replay()
    eager.step()
    same(eager, graphed)


def test_many_groups_of_many_dtypes_are_one_graph():
    dtypes = torch.float32, torch.bfloat16, torch.float16
    eager, graphed = pair(fusedstep.AdamW, [(10 + i,) for i in range(60)], 20, dtypes, max_grad_norm=0.5)
    for optimizer in (eager, graphed):
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = 1e-3 * (i + 1)
    graph = captured(graphed.step)
    times(WARM_UPS, eager.step)
    for i in range(4):
        for optimizer in (eager, graphed):
            optimizer.param_groups[5 * i].update(lr=0.1, weight_decay=0.1 * i)
        feed(eager, graphed)
        eager.step()
        graph.replay()
    same(eager, graphed)


def test_groups_may_say_that_they_are_capturable_or_not():
    eager, graphed = pair(fusedstep.Adam, groups=2, lr=0.1)
    for i, group in enumerate(graphed.param_groups):
        group["capturable"] = i == 0
    graph = captured(graphed.step)
    times(WARM_UPS, eager.step)
    eager.step()
    graph.replay()
    same(eager, graphed)


def test_steps_and_replays_may_alternate():
    eager, graphed = pair(fusedstep.AdamW, lr=0.1, max_grad_norm=0.5)
    graph = captured(graphed.step)
    times(WARM_UPS, eager.step)
    for step in (graph.replay, graphed.step, graphed.step, graph.replay, graph.replay, graphed.step):
        feed(eager, graphed)
        eager.step()
        step()
    same(eager, graphed)
    assert all(graphed.state[p]["step"] == WARM_UPS + 6 for p in params_of(graphed))


# options


@pytest.mark.parametrize("tensors", [["lr"], ["betas"], ["lr", "betas"]], ids="-".join)
@pytest.mark.parametrize("cls", [fusedstep.Adam, fusedstep.AdamW, fusedstep.Lamb])
def test_tensor_options_are_read_at_every_replay(cls, tensors):
    lr, *betas = on_device(0.1, 0.9, 0.99)
    options = {"lr": lr, "betas": tuple(betas)}
    eager, graphed = pair(cls, **{"lr": 0.1, **{name: options[name] for name in tensors}})
    graph = captured(graphed.step)
    times(WARM_UPS, eager.step)
    for rate, beta in ((0.2, 0.8), (0.05, 0.5), (0.0, 0.9), (0.3, 0.95)):
        lr.fill_(rate)
        betas[0].fill_(beta)
        feed(eager, graphed)
        eager.step()
        graph.replay()
    same(eager, graphed)


def test_a_tensor_limit_is_read_at_every_replay():
    (limit,) = on_device(0.5)
    eager, graphed = pair(fusedstep.SGD, lr=0.1, max_grad_norm=limit)
    graph = captured(graphed.step)
    times(WARM_UPS, eager.step)
    for number in (0.1, 100.0, 0.3):
        limit.fill_(number)
        feed(eager, graphed)
        eager.step()
        graph.replay()
    same(eager, graphed)


def assign(group, lr):
    group["lr"] = lr


def merge(group, lr):
    group |= {"lr": lr}


WAYS = [assign, lambda group, lr: group.update(lr=lr), lambda group, lr: group.update({"lr": lr}), merge]


@pytest.mark.parametrize("change", WAYS, ids=["assign", "update", "update-from", "merge"])
@cases
def test_a_learning_rate_set_between_replays_holds_without_another_capture(case, change):
    eager, graphed = pair(case.ours, groups=2, **case.options)
    graph = captured(graphed.step)
    times(WARM_UPS, eager.step)
    for rate in (0.2, 0.02, 0.0, 0.1):
        for optimizer in (eager, graphed):
            change(optimizer.param_groups[1], rate)
        feed(eager, graphed)
        eager.step()
        graph.replay()
    same(eager, graphed)


OTHER_OPTIONS = [
    (fusedstep.SGD, {"momentum": 0.9}, {"momentum": 0.5, "dampening": 0.1, "weight_decay": 0.2}),
    (fusedstep.AdamW, {}, {"betas": (0.5, 0.6), "eps": 0.1, "weight_decay": 0.2, "maximize": True}),
    (fusedstep.AdamW, {"max_grad_norm": 0.5, "ema_decay": 0.9}, {"max_grad_norm": 0.1, "ema_decay": 0.5}),
    (fusedstep.BertAdam, {"t_total": 20}, {"schedule": "warmup_cosine", "warmup": 0.5, "b1": 0.5}),
    (fusedstep.Lamb, {}, {"trust_bounds": (0.1, 0.2), "always_adapt": True, "weight_decay": 0.0}),
]


@pytest.mark.parametrize(("cls", "before", "after"), OTHER_OPTIONS)
def test_any_number_set_between_replays_holds(cls, before, after):
    eager, graphed = pair(cls, lr=0.1, **before)
    graph = captured(graphed.step)
    times(WARM_UPS, eager.step)
    for name, value in after.items():
        for optimizer in (eager, graphed):
            optimizer.param_groups[0][name] = value
        feed(eager, graphed)
        eager.step()
        graph.replay()
    same(eager, graphed)


SCHEDULES = [
    (fusedstep.SGD, {}, lambda optimizer: ExponentialLR(optimizer, 0.5)),
    (fusedstep.Lamb, {}, lambda optimizer: CosineAnnealingLR(optimizer, 10)),
    # these two change momentum and betas as well
    (fusedstep.SGD, {"momentum": 0.9}, lambda optimizer: OneCycleLR(optimizer, 0.3, total_steps=8)),
    (fusedstep.AdamW, {"max_grad_norm": 0.5}, lambda optimizer: OneCycleLR(optimizer, 0.3, total_steps=8)),
]


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize(("cls", "options", "schedule"), SCHEDULES)
def test_a_scheduler_steers_replays(cls, options, schedule, as_tensor):
    eager, graphed = pair(cls, groups=2, lr=0.1, **options)
    if as_tensor:
        for group in (*eager.param_groups, *graphed.param_groups):
            (group["lr"],) = on_device(0.1)
    schedulers = [schedule(optimizer) for optimizer in (eager, graphed)]
    graph = captured(graphed.step)
    times(WARM_UPS, eager.step)
    rates = set()
    for _ in range(6):
        feed(eager, graphed)
        eager.step()
        graph.replay()
        for scheduler in schedulers:
            scheduler.step()
        rates.add(float(graphed.param_groups[0]["lr"]))
    assert len(rates) == 6
    same(eager, graphed)


def test_a_scheduler_may_come_after_the_capture():
    eager, graphed = pair(fusedstep.AdamW, lr=0.1)
    graph = captured(graphed.step)
    times(WARM_UPS, eager.step)
    schedulers = [OneCycleLR(optimizer, 0.3, total_steps=8) for optimizer in (eager, graphed)]
    # torch's schedulers want to see a step
    for optimizer in (eager, graphed):
        optimizer.step()
    for _ in range(4):
        for scheduler in schedulers:
            scheduler.step()
        feed(eager, graphed)
        eager.step()
        graph.replay()
    same(eager, graphed)


# scaled gradients


@cases
def test_scale_and_found_inf_are_read_at_every_replay(case):
    eager, graphed = pair(case.ours, **case.options)
    scale, found_inf = on_device(4.0, 0.0)
    for optimizer in (eager, graphed):
        optimizer.grad_scale, optimizer.found_inf = scale, found_inf
    graph = captured(graphed.step)
    times(WARM_UPS, eager.step)
    for number, found in ((8.0, 0.0), (2.0, 1.0), (0.5, 0.0), (1024.0, 1.0), (1024.0, 0.0)):
        scale.fill_(number)
        found_inf.fill_(found)
        feed(eager, graphed, scale=number)
        eager.step()
        graph.replay()
        assert graphed.step_was_skipped == (found == 1)
    assert graphed.skipped_steps == 2
    same(eager, graphed)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_scaled_replays_do_what_torchs_fused_optimizers_do(cls):
    shapes = [(7, 5), (), (1100,)]
    ours, _ = pair(getattr(fusedstep, cls.__name__), shapes, lr=0.1)
    theirs = cls([torch.nn.Parameter(p.detach().clone()) for p in params_of(ours)], lr=0.1, fused=True)
    scale, found_inf = on_device(2.0, 0.0)
    for optimizer in (ours, theirs):
        optimizer.grad_scale, optimizer.found_inf = scale, found_inf
    for p, q in zip(params_of(ours), params_of(theirs), strict=True):
        q.grad = p.grad.clone()
    graph = captured(ours.step)
    times(WARM_UPS, theirs.step)
    for number, found in ((8.0, 0.0), (16.0, 1.0), (4.0, 0.0)):
        scale.fill_(number)
        found_inf.fill_(found)
        feed(ours, theirs, scale=number)
        theirs.step()
        graph.replay()
    for p, q in zip(params_of(ours), params_of(theirs), strict=True):
        torch.testing.assert_close(p, q)
        torch.testing.assert_close(p.grad, q.grad)


def model_and_batch():
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    return torch.nn.Sequential(*layers).cuda(), torch.randn(16, 6, device="cuda")


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, fusedstep.GradScaler], ids=["torchs", "ours"])
@pytest.mark.parametrize("limit", [None, 0.1])
def test_an_iteration_with_a_scaler_is_one_graph(limit, scaler_class):
    def prepared():
        model, x = model_and_batch()
        optimizer = fusedstep.AdamW(model.parameters(), lr=0.01, max_grad_norm=limit, fused=True)
        scaler = scaler_class("cuda", init_scale=64.0, growth_interval=2)

        def iteration():
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

        return optimizer, scaler, x, iteration

    (eager, a, x, iteration), (graphed, b, y, other) = prepared(), prepared()
    graph = captured(other)
    times(WARM_UPS, iteration)
    for bad in (None, None, INF, None, float("nan"), None, None):
        batch = torch.randn_like(x)
        if bad is not None:
            batch[0, 0] = bad
        x.copy_(batch)
        y.copy_(batch)
        iteration()
        graph.replay()
        assert b.state_dict() == a.state_dict()
        assert graphed.step_was_skipped == (bad is not None)
    assert graphed.skipped_steps == 2
    close(eager, graphed)


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, fusedstep.GradScaler], ids=["torchs", "ours"])
def test_a_graph_of_the_backward_feeds_scaled_steps(scaler_class):
    weight = torch.nn.Parameter(torch.zeros(100, device="cuda"))
    (x,) = on_device(1.0)
    optimizer = fusedstep.SGD([weight], lr=1.0, fused=True)
    scaler = scaler_class("cuda", init_scale=8.0, growth_interval=3)

    def scaled_backward():
        optimizer.zero_grad()
        scaler.scale((weight.half() * x.half()).sum(dtype=torch.float32)).backward()

    graph = captured(scaled_backward)
    expected = 0.0
    for number, scale, tracker in ((3, 8, 1), (3e4, 4, 0), (7, 4, 1), (6e4, 2, 0), (3e4, 2, 1), (1, 2, 2)):
        x.fill_(number)
        graph.replay()
        before = scaler.get_scale()
        overflows = number * before > 65504
        assert (weight.grad == (INF if overflows else number * before)).all()
        scaler.step(optimizer)
        scaler.update()
        expected -= 0 if overflows else number
        assert (weight == expected).all()
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (scale, tracker)


CAPTURED_WITHOUT_FUSED = """
import torch, fusedstep
p = torch.nn.Parameter(torch.ones(3, device="cuda"))
optimizer, scaler = fusedstep.AdamW([p], fused=None), torch.amp.GradScaler("cuda")
def iteration():
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
iteration()
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    iteration()
"""


def test_torchs_scaler_cannot_be_captured_without_fused():
    # in a process of its own, which is of no use afterwards
    script = [sys.executable, "-c", CAPTURED_WITHOUT_FUSED]
    ended = subprocess.run(script, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "_maybe_opt_step" in ended.stderr
    assert "captur" in ended.stderr


# a graph of a whole iteration


class Training(NamedTuple):
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    x: torch.Tensor
    in_place: bool

    def __call__(self):
        if not self.in_place:
            self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step(zero_grad=self.in_place, set_to_none=False)


def trainings(cls=fusedstep.AdamW, in_place=False, **options):
    """Two that are alike."""
    made = []
    for _ in range(2):
        model, x = model_and_batch()
        made.append(Training(model, cls(model.parameters(), **{"lr": 0.01, **options}), x, in_place))
    return made


def next_batch(*trainings):
    batch = torch.randn_like(trainings[0].x)
    for training in trainings:
        training.x.copy_(batch)


@pytest.mark.parametrize("in_place", [False, True], ids=["set-to-none", "zeroed-in-place"])
@cases
def test_forward_backward_and_step_are_one_graph(case, in_place):
    eager, graphed = trainings(case.ours, in_place, **case.options)
    graph = captured(graphed)
    times(WARM_UPS, eager)
    for _ in range(5):
        next_batch(eager, graphed)
        eager()
        graph.replay()
    close(eager.optimizer, graphed.optimizer)
    grads = [p.grad for p in graphed.model.parameters()]
    assert all((g.count_nonzero() == 0) == in_place for g in grads)


@cases
def test_a_whole_iteration_does_everything_besides_the_update(case):
    eager, graphed = trainings(case.ours, True, **{**case.options, **EVERYTHING})
    graph = captured(graphed)
    times(WARM_UPS, eager)
    for bad in (None, INF, None, None):
        next_batch(eager, graphed)
        if bad is not None:
            eager.x[3, 2] = graphed.x[3, 2] = bad
        eager()
        graph.replay()
        assert graphed.optimizer.step_was_skipped == (bad is not None)
        found, seen = eager.optimizer.statistics(), graphed.optimizer.statistics()
        for name in ("grad_norm", "param_norms"):
            pairs = getattr(found, name), getattr(seen, name)
            torch.testing.assert_close(*pairs, rtol=1e-4, atol=1e-6, equal_nan=True)
    close(eager.optimizer, graphed.optimizer)
    with eager.optimizer.ema_parameters(), graphed.optimizer.ema_parameters():
        close(eager.optimizer, graphed.optimizer)


def test_gradients_that_were_gone_before_the_capture_come_from_its_memory():
    eager, graphed = trainings()
    graph = captured(graphed)
    times(WARM_UPS, eager)
    # whatever happens to other memory
    torch.cuda.empty_cache()
    noise = [torch.full((1000,), float("nan"), device="cuda") for _ in range(100)]
    del noise
    for _ in range(3):
        next_batch(eager, graphed)
        eager()
        graph.replay()
    close(eager.optimizer, graphed.optimizer)


@pytest.mark.parametrize("released", [False, True], ids=["in-use", "released"])
def test_a_step_between_capture_and_first_replay_takes_the_gradients_of_the_graph(released):
    eager, graphed = trainings()
    graph = captured(graphed)
    times(WARM_UPS, eager)
    if released:
        graphed.optimizer.release_graph()
    feed(eager.optimizer, graphed.optimizer)
    eager.optimizer.step()
    graphed.optimizer.step()
    close(eager.optimizer, graphed.optimizer)
    if not released:
        eager()
        graph.replay()
        close(eager.optimizer, graphed.optimizer)


def test_training_may_go_on_eagerly_while_gradients_stay_where_they_are():
    eager, graphed = trainings()
    graph = captured(graphed)
    times(WARM_UPS, eager)
    graph.replay()
    eager()
    for training in (eager, graphed):
        training.optimizer.zero_grad(set_to_none=False)
        training.model(training.x).square().mean().backward()
        training.optimizer.step()
    graph.replay()
    eager()
    close(eager.optimizer, graphed.optimizer)


def test_an_optimizer_that_was_captured_goes_when_it_is_dropped():
    graphed = pair(fusedstep.AdamW)[1]
    graph = captured(graphed.step)
    graph.replay()
    gone = weakref.ref(graphed)
    gc.disable()
    try:
        del graphed
        assert gone() is None
    finally:
        gc.enable()


def test_an_optimizer_may_go_while_another_is_captured():
    old = [pair(fusedstep.AdamW)[1] for _ in range(3)]
    graphs = [captured(optimizer.step) for optimizer in old]
    for graph in graphs:
        graph.replay()
    eager, graphed = pair(fusedstep.AdamW)
    times(WARM_UPS, graphed.step)
    times(WARM_UPS, eager.step)

    def step():
        old.pop()
        graphed.step()
        gc.collect()

    # not those of other tests
    gc.collect()
    graph = capture(step)
    for _ in range(3):
        feed(eager, graphed)
        eager.step()
        graph.replay()
        # pinned memory is asked for
        torch.ones(10).pin_memory()
    same(eager, graphed)


# what cannot be captured


def fails_to_capture(function, match):
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=match), torch.cuda.graph(graph):
        function()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@cases
def test_the_very_first_step_is_not_captured(case):
    eager, graphed = pair(case.ours, **case.options)
    fails_to_capture(graphed.step, "only after one that was not captured")
    graph = captured(graphed.step)
    graph.replay()
    times(WARM_UPS + 1, eager.step)
    same(eager, graphed)


CHANGES = [
    lambda optimizer: optimizer.param_groups[0].update(lr=0.5),
    lambda optimizer: optimizer.param_groups[0].update(betas=(0.5, 0.5)),
    lambda optimizer: optimizer.param_groups[0].update(amsgrad=True),
    lambda optimizer: optimizer.param_groups[0].update(max_grad_norm=0.5),
    lambda optimizer: setattr(optimizer, "skip_nonfinite", True),
    lambda optimizer: optimizer.add_param_group({"params": [parameter_with_gradient()]}),
    lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    lambda optimizer: optimizer.state.clear(),
    lambda optimizer: next(iter(optimizer.state.values())).update(step=torch.tensor(5.0)),
]


CHANGED = ["lr", "betas", "amsgrad", "limit", "guard", "group", "loaded", "cleared", "counted"]


def parameter_with_gradient():
    p = torch.nn.Parameter(torch.ones(3, device="cuda"))
    p.grad = torch.ones_like(p)
    return p


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("change", CHANGES, ids=CHANGED)
def test_what_has_changed_since_the_last_step_is_not_captured(change):
    eager, graphed = pair(fusedstep.AdamW, lr=0.1)
    for optimizer in (eager, graphed):
        optimizer.step()
        change(optimizer)
    fails_to_capture(graphed.step, "changed since the last step|only after one that was not captured")
    graph = captured(graphed.step)
    graph.replay()
    times(WARM_UPS + 1, eager.step)
    same(eager, graphed)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_step_with_other_arguments_is_not_captured():
    _, graphed = pair(fusedstep.AdamW, lr=0.1)
    graphed.step()
    fails_to_capture(lambda: graphed.step(zero_grad=True, set_to_none=False), "with the same arguments")


# what a graph forbids


def graphed_model():
    """With gradients of its own memory, and `step()` captured."""
    training, _ = trainings()
    training.model(training.x).square().mean().backward()
    return training, captured(training.optimizer.step)


def test_a_backward_that_moves_a_gradient_raises():
    training, _ = graphed_model()
    training.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"captured step\(\).*set_to_none=False.*release_graph"):
        training.model(training.x).square().mean().backward()


def test_a_backward_into_the_same_gradients_is_fine():
    training, graph = graphed_model()
    training.optimizer.zero_grad(set_to_none=False)
    training.model(training.x).square().mean().backward()
    training.optimizer.step(zero_grad=False)
    training.model(training.x).square().mean().backward()
    graph.replay()


def test_a_step_with_gradients_elsewhere_raises_and_changes_nothing():
    eager, graphed = pair(fusedstep.AdamW, lr=0.1)
    graph = captured(graphed.step)
    times(WARM_UPS, eager.step)
    p = params_of(graphed)[0]
    kept, p.grad = p.grad, torch.randn_like(p)
    with pytest.raises(RuntimeError, match=r"has moved since then.*release_graph"):
        graphed.step()
    same(eager, graphed)
    # the graph still reads the old one, and so does a step once it is back
    graph.replay()
    p.grad = kept
    graphed.step()
    times(2, eager.step)
    same(eager, graphed)


def test_a_step_without_a_gradient_raises():
    _, graphed = pair(fusedstep.AdamW, lr=0.1)
    captured(graphed.step)
    graphed.zero_grad()
    with pytest.raises(RuntimeError, match="has moved since then"):
        graphed.step()


def test_a_step_that_does_something_else_raises():
    _, graphed = pair(fusedstep.AdamW, lr=0.1)
    captured(graphed.step)
    with pytest.raises(RuntimeError, match=r"captured step\(\) with.*release_graph"):
        graphed.step(zero_grad=True, set_to_none=False)
    graphed.skip_nonfinite = True
    with pytest.raises(RuntimeError, match=r"captured step\(\) with.*release_graph"):
        graphed.step()


def test_loading_and_adding_a_group_raise():
    eager, graphed = pair(fusedstep.AdamW, lr=0.1)
    times(WARM_UPS, eager.step)
    graph = captured(graphed.step)
    with pytest.raises(RuntimeError, match=r"captured step\(\), and load_state_dict\(\).*release_graph"):
        graphed.load_state_dict(eager.state_dict())
    with pytest.raises(RuntimeError, match=r"captured step\(\), and add_param_group\(\).*release_graph"):
        graphed.add_param_group({"params": [parameter_with_gradient()]})
    graph.replay()
    eager.step()
    same(eager, graphed)


number = lambda: {"lr": 0.1}
tensor = lambda: {"lr": torch.tensor(0.1, device="cuda")}
limited = lambda: {"max_grad_norm": 0.5}
# what the options were when captured, and what they are to be
UNFOLLOWED = {
    "another-rule": (number, lambda: {"amsgrad": True}),
    "an-average": (number, lambda: {"ema_decay": 0.5}),
    "a-limit": (number, limited),
    "no-limit": (limited, lambda: {"max_grad_norm": None}),
    "a-tensor": (number, tensor),
    "another-tensor": (tensor, tensor),
    "no-tensor": (tensor, number),
}


@pytest.mark.parametrize(("before", "after"), UNFOLLOWED.values(), ids=UNFOLLOWED)
def test_an_option_that_a_replay_could_not_follow_is_refused(before, after):
    _, graphed = pair(fusedstep.AdamW, **before())
    captured(graphed.step)
    with pytest.raises(RuntimeError, match=r"captured step\(\).*release_graph"):
        graphed.param_groups[0].update(after())
    graphed.release_graph()
    graphed.param_groups[0].update(after())
    graphed.step()


def test_release_lifts_all_of_that():
    eager, graphed = trainings(max_grad_norm=0.5)
    graph = captured(graphed)
    times(WARM_UPS, eager)
    eager()
    graph.replay()
    graphed.optimizer.release_graph()
    graphed.optimizer.release_graph()
    for training in (eager, graphed):
        for group in training.optimizer.param_groups:
            group.update(amsgrad=True, max_grad_norm=None)
        training()
        training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
        training()
        extra = parameter_with_gradient()
        training.optimizer.add_param_group({"params": [extra], "lr": 0.5})
        training.optimizer.step(zero_grad=True, set_to_none=False)
        training()
    close(eager.optimizer, graphed.optimizer)


def test_after_release_it_can_be_captured_anew():
    eager, graphed = trainings()
    for factor in (0.9, 0.5):
        graph = captured(graphed)
        times(WARM_UPS, eager)
        for _ in range(3):
            next_batch(eager, graphed)
            for training in (eager, graphed):
                training.optimizer.param_groups[0]["lr"] *= factor
            eager()
            graph.replay()
        graphed.optimizer.release_graph()
        eager()
        graphed()
    close(eager.optimizer, graphed.optimizer)


def test_another_capture_takes_the_place_of_the_first():
    eager, graphed = pair(fusedstep.AdamW, lr=0.1)
    captured(graphed.step)
    times(WARM_UPS, eager.step)
    for p in params_of(graphed):
        p.grad = torch.empty_like(p)
    graph = capture(graphed.step)
    for rate in (0.2, 0.05):
        for optimizer in (eager, graphed):
            optimizer.param_groups[0]["lr"] = rate
        feed(eager, graphed)
        eager.step()
        graph.replay()
    same(eager, graphed)


# copies and checkpoints


def saved_and_loaded(optimizer):
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer)), saved_and_loaded]


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle", "save"])
@cases
def test_a_copy_of_an_optimizer_belongs_to_no_graph(case, copied):
    eager, graphed = pair(case.ours, groups=2, **case.options)
    graph = captured(graphed.step)
    times(WARM_UPS, eager.step)
    graph.replay()
    eager.step()
    twin = copied(graphed)
    assert all(type(group) is dict for group in twin.param_groups)
    for p in params_of(twin):
        p.grad = torch.ones_like(p)
    for optimizer in (eager, twin):
        optimizer.param_groups[0]["lr"] = 0.3
        optimizer.step()
    same(eager, twin)
    twin.add_param_group({"params": [parameter_with_gradient()]})
    twin.load_state_dict(twin.state_dict())
    twin.step()
    # and the original goes on as it was
    assert graphed.param_groups[0]["lr"] == case.options["lr"]
    graph.replay()


@cases
def test_a_checkpoint_of_a_captured_optimizer_is_plain(case):
    eager, graphed = pair(case.ours, groups=2, **case.options)
    graph = captured(graphed.step)
    times(WARM_UPS, eager.step)
    graph.replay()
    eager.step()
    state = graphed.state_dict()
    assert all(type(group) is dict for group in state["param_groups"])
    assert state["param_groups"] == eager.state_dict()["param_groups"]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = pair(case.ours, groups=2, **case.options)[0]
    other.load_state_dict(torch.load(file, weights_only=True))
    for p, q in zip(params_of(eager), params_of(other), strict=True):
        q.data.copy_(p)
    feed(eager, other)
    eager.step()
    other.step()
    same(eager, other)


# what a step launches


class Profile(NamedTuple):
    """What ran on the device, and for what the host waited within."""

    launched: list[str]
    copied: list[str]
    waits: list[str]


# what the profiler reports of itself and of the driver
OVERHEADS = {
    "Activity Buffer Request",
    "Buffer Flush",
    "Command Buffer Full",
    "Instrumentation",
    "Lazy Function Loading",
    "Resource",
    "Runtime Triggered Module Loading",
}


def profiled(function):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("this"):
            function()
        # well apart from what comes next
        time.sleep(1e-3)
        torch.cuda.synchronize()
    events, on_device = profile.events(), torch.autograd.DeviceType.CUDA
    (this,) = (e.time_range for e in events if e.name == "this" and e.device_type != on_device)
    on_host = [e for e in events if e.device_type != on_device]
    # a range that is named on the host shows on the device, too
    ranges = {e.name for e in on_host}
    ran = [e.name for e in events if e.device_type == on_device and e.name not in ranges | OVERHEADS]
    within = [e.name for e in on_host if this.start <= e.time_range.start <= this.end]
    is_copy = lambda name: name.startswith(("Memcpy", "Memset"))
    return Profile(
        [name for name in ran if not is_copy(name)],
        [name for name in ran if is_copy(name)],
        [name for name in within if "Synchronize" in name],
    )


@contextlib.contextmanager
def no_waiting():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def with_gradients(shapes, dtypes=(torch.float32,)):
    params = [torch.nn.Parameter(torch.randn(shape).to("cuda", dtype)) for shape in shapes for dtype in dtypes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


TWO = torch.float32, torch.bfloat16
ADAMW, SGD, LAMB = fusedstep.AdamW, fusedstep.SGD, fusedstep.Lamb
CLIP, LARGEST, SKIP = {"max_grad_norm": 1.0}, {"max_grad_norm": 1.0, "norm_type": INF}, {"skip_nonfinite": True}
REPORT, AVERAGE = {"statistics": True}, {"ema_decay": 0.9}
CLEAR = {"zero_grad": True, "set_to_none": False}


class Launches(NamedTuple):
    """How many a step of this optimizer makes."""

    count: int
    cls: type
    options: dict[str, Any]
    arguments: dict[str, Any]
    dtypes: tuple[torch.dtype, ...]
    scaled: bool

    def __str__(self):
        parts = [self.cls.__name__, *self.options, *self.arguments, "scaled" if self.scaled else ""]
        return "-".join(part for part in (*parts, "two-dtypes" if len(self.dtypes) > 1 else "") if part)

    def ready(self):
        """One step, after a few of them; and what comes between two."""
        optimizer = self.cls(with_gradients([(100 * i + 1,) for i in range(10)], self.dtypes), **self.options)
        step, between = (lambda: optimizer.step(**self.arguments)), (lambda: None)
        if self.scaled:
            scaler = fusedstep.GradScaler("cuda", init_scale=16.0)
            scaler.scale(torch.ones((), device="cuda"))
            step, between = (lambda: scaler.step(optimizer, **self.arguments)), scaler.update
        for _ in range(2):
            step()
            between()
        return step, between


def launches(count, cls, options, arguments=None, dtypes=(torch.float32,), scaled=False):
    return Launches(count, cls, options, arguments or {}, dtypes, scaled)


ALL = [
    launches(2, SGD, {}),
    launches(2, SGD, {"momentum": 0.9}),
    launches(2, ADAMW, {}),
    launches(2, ADAMW, {"amsgrad": True}),
    launches(2, ADAMW, {}, CLEAR),
    launches(2, ADAMW, AVERAGE),
    launches(2, fusedstep.BertAdam, {"max_grad_norm": None}),
    launches(3, ADAMW, REPORT),
    launches(3, ADAMW, {}, dtypes=TWO),
    launches(4, fusedstep.BertAdam, {}),
    launches(4, SGD, CLIP),
    launches(4, ADAMW, CLIP),
    launches(4, ADAMW, LARGEST),
    launches(4, ADAMW, SKIP),
    launches(4, ADAMW, {**CLIP, **SKIP}),
    launches(4, ADAMW, CLIP, CLEAR),
    launches(4, ADAMW, {**CLIP, **SKIP, **AVERAGE}, CLEAR),
    launches(4, ADAMW, {}, scaled=True),
    launches(4, ADAMW, CLIP, scaled=True),
    launches(4, ADAMW, {**CLIP, **SKIP}, CLEAR, scaled=True),
    launches(5, ADAMW, {**CLIP, **REPORT}),
    launches(5, LAMB, {"max_grad_norm": None}),
    launches(6, ADAMW, CLIP, dtypes=TWO),
    launches(6, ADAMW, CLIP, CLEAR, dtypes=TWO, scaled=True),
    launches(7, LAMB, {}),
    launches(7, LAMB, SKIP, CLEAR, scaled=True),
]


@pytest.mark.parametrize("expected", ALL, ids=str)
def test_a_step_launches_so_many_kernels_and_waits_for_nothing(expected):
    step, between = expected.ready()
    seen = profiled(step)
    assert len(seen.launched) == expected.count, seen.launched
    assert seen.copied == []
    assert seen.waits == []
    between()
    with no_waiting():
        for _ in range(2):
            step()
            between()


def test_the_profiler_would_show_a_wait():
    (number,) = on_device(1.0)
    seen = profiled(number.item)
    assert any("DtoH" in name for name in seen.copied)
    assert seen.waits
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        number.item()


@pytest.mark.parametrize(("count", "options"), [(2, {}), (4, CLIP)], ids=str)
@pytest.mark.parametrize(("tensors", "groups"), [(1, 1), (300, 1), (300, 300)])
def test_the_number_of_tensors_and_groups_does_not_matter(tensors, groups, count, options):
    params = with_gradients([(10 + i,) for i in range(tensors)])
    members = [{"params": params[i::groups], "lr": 1e-3 * (i + 1)} for i in range(groups)]
    optimizer = fusedstep.AdamW(members, **options)
    times(2, optimizer.step)
    seen = profiled(optimizer.step)
    assert len(seen.launched) == count
    assert seen.copied == seen.waits == []


@pytest.mark.parametrize("what", ["gradients", "options"])
def test_what_has_changed_is_one_copy_to_the_device_and_no_wait(what):
    optimizer = fusedstep.AdamW(with_gradients([(10 + i,) for i in range(30)]), **CLIP)

    def change():
        if what == "options":
            optimizer.param_groups[0]["lr"] *= 0.5
        else:
            for p in params_of(optimizer):
                p.grad = torch.ones_like(p)

    for _ in range(3):
        optimizer.step()
        change()
    seen = profiled(optimizer.step)
    assert len(seen.launched) == 4
    assert len(seen.copied) == 1
    assert "HtoD" in seen.copied[0]
    assert seen.waits == []
    change()
    with no_waiting():
        optimizer.step()


def test_setting_an_option_between_replays_waits_for_nothing():
    _, graphed = pair(fusedstep.AdamW, lr=0.1)
    graph = captured(graphed.step)
    graphed.param_groups[0]["lr"] = 0.2
    with no_waiting():
        graphed.param_groups[0]["lr"] = 0.3
        graph.replay()
    seen = profiled(lambda: graphed.param_groups[0].update(lr=0.4))
    assert len(seen.copied) == 1
    assert seen.launched == seen.waits == []
