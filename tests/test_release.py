"""Gradients that are stepped as backward makes them: the results are those of the plain loop, bit by bit."""

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedstep
from fusedstep._memory.part import Part
from tests.cases import CASES, FAMILY, by_name, name_of
from tests.pairs import same_bits
from tests.test_distributed import batch_of, fsdp, hsdp, loss_of, rank
from tests.test_graphs import no_waiting

SIZE = 64
# a layer of the model below, and a little more: several buckets, and something is left
SMALL = 16700

pytestmark = pytest.mark.usefixtures("one_thread")


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    wide = [nn.Linear(SIZE, SIZE) for _ in range(3)]
    return nn.Sequential(*wide, nn.LayerNorm(SIZE), nn.Linear(SIZE, 3)).to(dtype)


def batch(step, like):
    random = torch.Generator().manual_seed(step)
    return torch.randn(4, SIZE, generator=random).to(like.device, like.dtype)


def backward(model, step):
    model(batch(step, next(model.parameters()))).square().mean().backward()


def everything(optimizer):
    """Parameters and states, as numbers that can be compared."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        yield p.detach()
        for name, value in sorted(optimizer.state[p].items() if p in optimizer.state else ()):
            yield torch.as_tensor(value) if name == "step" else value


def assert_same(ours, theirs):
    a, b = [*everything(ours)], [*everything(theirs)]
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        assert same_bits(x, y) if x.is_floating_point() else torch.equal(x, y)


def counted(monkeypatch):
    """How many gradients every step of a part has taken from now on."""
    sizes, step = [], Part.step

    def counting(part, *args):
        sizes.append(sum(p.grad is not None for p in part.params))
        return step(part, *args)

    monkeypatch.setattr(Part, "step", counting)
    return sizes


class Twins:
    """Two equal models: gradients of the first are released, the second is trained by a plain loop."""

    def __init__(self, make, model=model_of, bucket_bytes=SMALL, backward=backward):
        self.models = model(), model()
        self.a, self.b = (make(each.parameters()) for each in self.models)
        self.handle = fusedstep.release_gradients(self.models[0], self.a, bucket_bytes)
        self.backward, self.count = backward, 0

    def step(self, times=1):
        for _ in range(times):
            for model, optimizer in zip(self.models, (self.a, self.b), strict=True):
                self.backward(model, self.count)
                optimizer.step()
                optimizer.zero_grad()
            self.count += 1

    def check(self):
        assert_same(self.a, self.b)


def adamw(params, **options):
    return fusedstep.AdamW(params, lr=1e-2, **options)


UNLIMITED = [case.unlimited() for case in CASES if case.name != "adamw-amsgrad"]
ROWS = [(case.ours, case.options, name_of(case)) for case in UNLIMITED]
ROWS += [(cls, options, f"{cls.__name__}-{i}") for i, (cls, options) in enumerate(FAMILY)]
REFUSED = (fusedstep.Prodigy, fusedstep.ScheduleFreeAdamW, fusedstep.ScheduleFreeSGD)


@pytest.mark.parametrize(("cls", "options"), [pytest.param(c, o, id=i) for c, o, i in ROWS if c not in REFUSED])
def test_every_optimizer_gives_the_bits_of_the_plain_loop(cls, options):
    twins = Twins(lambda params: cls(params, engine="torch", **options))
    twins.step(5)
    twins.check()


BF16 = torch.bfloat16
FEATURES = {
    "int8": (torch.float32, {"state_dtype": "int8"}),
    "split8": (BF16, {"state_dtype": "int8", "master": "split8"}),
    "master": (BF16, {"master": "float32"}),
    "stochastic": (BF16, {"rounding": "stochastic", "state_dtype": "bfloat16", "seed": 7}),
    "average": (torch.float32, {"ema_decay": 0.9}),
    "everything": (
        BF16,
        {"state_dtype": "int8", "master": "split", "rounding": "stochastic", "ema_decay": 0.9},
    ),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_every_way_to_store_gives_the_bits_of_the_plain_loop(feature, engine):
    if engine == "triton":
        pytest.skip("the interpreter is slow; compiled, the gpu tests run it")
    dtype, options = FEATURES[feature]
    twins = Twins(lambda params: adamw(params, engine=engine, **options), lambda: model_of(dtype))
    twins.step(5)
    twins.check()
    codes = {t.dtype for state in twins.a.state.values() for t in state.values()} & {torch.int8, torch.uint8}
    assert bool(codes) == ("int8" in options.values())


@pytest.mark.parametrize("name", ["adamw", "bert-adam", "lamb-unclipped", "sgd-momentum"])
def test_the_compiled_engine_gives_them_too(name):
    case = by_name(name)
    assert case.ours is not fusedstep.BertAdam or case.ours(model_of().parameters()).clip_scope == "tensor"
    twins = Twins(lambda params: case.ours(params, **case.options))
    twins.step(5)
    twins.check()
    assert len(twins.a.unsaved_steps) == len(twins.b.unsaved_steps)


# what happens in a step


def test_a_bucket_is_one_step_of_one_part_and_host_work_is_of_its_size(monkeypatch):
    twins = Twins(adamw)
    twins.step(2)
    sizes = counted(monkeypatch)
    twins.step()
    parts = [len(part.params) for part in twins.a._release.parts]
    assert len(parts) > 1
    assert sorted(sizes) == sorted(parts)
    assert sum(sizes) == len(twins.a.all_params)


def test_gradients_never_exist_all_at_once():
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(12)))
    optimizer, most = adamw(model.parameters()), 0

    def look(_):
        nonlocal most
        most = max(most, sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))

    size = SIZE * SIZE * 4
    fusedstep.release_gradients(model, optimizer, 3 * size)
    for p in model.parameters():
        # after ours; and while gradients are made
        p.register_hook(look)
        p.register_post_accumulate_grad_hook(look)
    for step in range(3):
        backward(model, step)
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
    assert size <= most <= 3 * size


def test_gradients_are_freed_not_only_forgotten():
    model, refs, alive = model_of(), [], []
    optimizer = adamw(model.parameters())

    def look(p):
        # before ours
        refs.append(weakref.ref(p.grad.untyped_storage()))
        alive.append(sum(ref() is not None for ref in refs))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(look)
    fusedstep.release_gradients(model, optimizer, 0)
    backward(model, 0)
    assert alive == [1] * len(optimizer.all_params)
    assert not any(ref() is not None for ref in refs)


def test_options_are_read_when_gradients_come():
    twins = Twins(lambda params: fusedstep.SGD(params, lr=0.1, momentum=0.9))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (twins.a, twins.b)]
    for _ in range(4):
        twins.step()
        for schedule in schedules:
            schedule.step()
    for optimizer in (twins.a, twins.b):
        optimizer.param_groups[0]["weight_decay"] = 0.1
    twins.step(2)
    twins.check()


def skipping(model, step):
    """A backward in which some layers have no part, others than the last time."""
    x = batch(step, next(model.parameters()))
    for i, layer in enumerate(model):
        x = layer(x) if i == len(model) - 1 or (i + step) % 3 else x
    x.square().mean().backward()


def test_gradients_may_be_missing():
    twins = Twins(adamw, backward=skipping)
    twins.step(7)
    twins.check()


def shuffled(model, step):
    """Gradients in another order each time, and of all layers."""
    order = torch.randperm(5, generator=torch.Generator().manual_seed(step)).tolist()
    x = batch(step, next(model.parameters()))
    for i in order:
        x = x + model[i](x).sum(1, keepdim=True)
    x.square().mean().backward()


def test_gradients_may_come_in_another_order():
    twins = Twins(lambda params: adamw(params, ema_decay=0.9), backward=shuffled)
    twins.step(7)
    twins.check()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer, self.head = nn.Embedding(9, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 9)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.layer(self.embedding((x[:, :5].abs() * 3).long() % 9)))


def test_weights_may_be_shared():
    twins = Twins(adamw, Tied, bucket_bytes=0)
    twins.step(4)
    twins.check()


@pytest.mark.parametrize("change", ["freeze", "thaw", "add", "leave"])
def test_parameters_may_come_and_go(change):
    twins = Twins(adamw)
    if change == "thaw":
        twins.handle.remove()
        for model in twins.models:
            model[0].requires_grad_(False)
        twins.handle = fusedstep.release_gradients(twins.models[0], twins.a, SMALL)
    twins.step(2)
    for model, optimizer in zip(twins.models, (twins.a, twins.b), strict=True):
        if change == "add":
            more = nn.Linear(3, 3)
            more.load_state_dict({"weight": torch.eye(3), "bias": torch.ones(3)})
            model.append(more)
            optimizer.add_param_group({"params": more.parameters(), "lr": 0.1})
        elif change == "leave":
            optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][2:]
        else:
            model[0].requires_grad_(change == "thaw")
    twins.step(3)
    if change == "leave":
        gone = [model[0].weight for model in twins.models]
        torch.testing.assert_close(*gone, rtol=0, atol=0)
        assert gone[0] not in twins.a._release._hooks
    twins.check()
    if change in ("add", "thaw"):
        # also while backward is at it
        backward(twins.models[0], 9)
        assert sum(p.grad is not None for p in twins.a.all_params) < 3


def test_groups_may_differ_in_their_options_and_names():
    def make(params):
        params = [(str(i), p) for i, p in enumerate(params)]
        groups = [{"params": params[::2], "max_grad_norm": 0.01}, {"params": params[1::2], "lr": 0.1}]
        return fusedstep.BertAdam(groups, lr=0.01, max_grad_norm=None)

    twins = Twins(make)
    twins.step(4)
    twins.check()


def test_gradients_that_were_there_before_are_taken_with_the_next():
    twins = Twins(adamw)
    for model in twins.models:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    twins.step(2)
    # set by hand, and without a backward
    for model, optimizer in zip(twins.models, (twins.a, twins.b), strict=True):
        model[0].weight.grad = torch.ones(SIZE, SIZE)
        optimizer.step()
        optimizer.zero_grad()
    twins.check()


def test_a_gradient_that_is_not_complete_is_not_stepped_with_its_part():
    twins = Twins(adamw, bucket_bytes=1 << 30)
    twins.step()
    for model in twins.models:
        model[0].weight.grad = torch.ones(SIZE, SIZE)
    assert len(twins.a._release.parts) == 1
    twins.a._release._bucket_bytes = 0
    # the first bucket is now the last layer, in the part of all
    twins.step()
    twins.check()


def test_gradients_by_hand_do_not_say_who_waits_with_whom(monkeypatch):
    twins = Twins(adamw)
    for optimizer in (twins.a, twins.b):
        for p in optimizer.all_params:
            p.grad = torch.ones_like(p)
        optimizer.step(zero_grad=True)
    assert [len(part.params) for part in twins.a._release.parts] == [len(twins.a.all_params)]
    twins.step()
    sizes = counted(monkeypatch)
    twins.step(2)
    assert len(sizes) == 2 * len(twins.a._release.parts) > 2
    twins.check()


def test_a_group_that_is_added_within_a_step_changes_nothing_of_it():
    twins = Twins(adamw)
    twins.step(2)
    more = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for model, optimizer, p in zip(twins.models, (twins.a, twins.b), more, strict=True):
        backward(model, twins.count)
        optimizer.add_param_group({"params": [p]})
        if optimizer is twins.a:
            with pytest.raises(RuntimeError, match="nothing can be accumulated"):
                backward(model, twins.count)
            twins.b.zero_grad()
            # that one has failed at its first gradient
            model[-1].zero_grad()
        p.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    twins.step(2)
    assert_same(twins.a, twins.b)


def test_states_may_be_made_by_torchs_checkpoints():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    twins = Twins(adamw)
    for model, optimizer in zip(twins.models, (twins.a, twins.b), strict=True):
        # takes a step to have states
        saved = get_optimizer_state_dict(model, optimizer)
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(saved))
    twins.step(3)
    twins.check()


def test_a_closure_runs_backward():
    twins = Twins(adamw)
    for step in range(3):
        losses = [
            optimizer.step(lambda m=model: (backward(m, step), torch.tensor(1.0))[1])  # noqa: B023
            for model, optimizer in zip(twins.models, (twins.a, twins.b), strict=True)
        ]
        assert losses == [1, 1]
        twins.b.zero_grad()
    twins.check()


def test_checkpointed_layers_are_stepped_once():
    def recomputed(model, step):
        x = batch(step, next(model.parameters())).requires_grad_()
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=step % 2 == 0)
        x.square().mean().backward()

    twins = Twins(adamw, backward=recomputed)
    twins.step(4)
    twins.check()


def test_a_weight_shared_by_reentrant_checkpoints_is_noticed():
    model, x = nn.Linear(SIZE, SIZE), torch.ones(2, SIZE, requires_grad=True)
    optimizer = adamw(model.parameters())
    fusedstep.release_gradients(model, optimizer, 0)
    y = checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        y.sum().backward()


# what is refused


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda params: adamw(params, max_grad_norm=1.0), "max_grad_norm"),
        (lambda params: adamw(params, max_grad_norm=torch.tensor(1.0)), "max_grad_norm"),
        (fusedstep.Lamb, "max_grad_norm"),
        (lambda params: fusedstep.BertAdam(params, lr=0.1, clip_scope="group"), "max_grad_norm"),
        (lambda params: adamw(params, skip_nonfinite=True), "skip_nonfinite=True"),
        (lambda params: adamw(params, skip_nonfinite="raise"), "skip_nonfinite='raise'"),
        (lambda params: adamw(params, statistics=True), "statistics=True"),
        (fusedstep.Prodigy, "Prodigy"),
        (fusedstep.ScheduleFreeAdamW, "ScheduleFreeAdamW"),
        (lambda params: fusedstep.Muon([p for p in params if p.dim() == 2]), "Muon"),
    ],
)
def test_what_needs_all_gradients_is_refused(make, found):
    model = model_of()
    optimizer = make([*model.parameters()])
    with pytest.raises(RuntimeError, match=f"release_gradients\\(\\) found {found}.*; "):
        fusedstep.release_gradients(model, optimizer)
    assert optimizer._release is None
    backward(model, 0)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer: optimizer.param_groups[0].update(max_grad_norm=1.0),
        lambda optimizer: setattr(optimizer, "skip_nonfinite", True),
        lambda optimizer: setattr(optimizer, "collect_statistics", True),
    ],
)
def test_what_is_set_later_is_refused_later(change):
    twins = Twins(adamw)
    twins.step()
    change(twins.a)
    with pytest.raises(RuntimeError, match="release_gradients"):
        backward(twins.models[0], 1)
    with pytest.raises(RuntimeError, match="release_gradients"):
        twins.a.step()
    twins.check()
    twins.handle.remove()
    twins.a.step()


def test_muon_releases_what_adamw_steps():
    twins = Twins(lambda params: fusedstep.Muon([{"params": params, "use_muon": False}]))
    twins.step(3)
    twins.check()


def test_only_an_optimizer_of_ours_and_its_model_can_be_released():
    model = model_of()
    optimizer = adamw(model.parameters())
    with pytest.raises(TypeError, match=r"found torch\.optim.*SGD"):
        fusedstep.release_gradients(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module"):
        fusedstep.release_gradients(optimizer, model)
    with pytest.raises(ValueError, match="no parameter of the model"):
        fusedstep.release_gradients(model_of(), optimizer)
    for size in (-1, 1.5, True, None):
        with pytest.raises(ValueError, match="Invalid bucket_bytes"):
            fusedstep.release_gradients(model, optimizer, size)
    fusedstep.release_gradients(model, optimizer)
    with pytest.raises(RuntimeError, match="before; remove"):
        fusedstep.release_gradients(model, optimizer)


def test_a_second_backward_is_refused_and_zero_grad_begins_anew():
    twins = Twins(adamw)
    twins.step()
    backward(twins.models[0], 1)
    with pytest.raises(RuntimeError, match="nothing can be accumulated"):
        backward(twins.models[0], 1)
    twins.a.zero_grad()
    backward(twins.models[0], 1)
    twins.a.step()
    assert all(p.grad is None for p in twins.a.all_params)


def test_gradients_of_zero_are_refused():
    twins = Twins(adamw)
    backward(twins.models[0], 0)
    with pytest.raises(RuntimeError, match="are dropped"):
        twins.a.step(zero_grad=True, set_to_none=False)
    with pytest.raises(RuntimeError, match="are dropped"):
        twins.a.zero_grad(set_to_none=False)
    twins.a.step(zero_grad=True)
    twins.handle.remove()
    twins.a.zero_grad(set_to_none=False)


def test_averages_are_not_stepped():
    twins = Twins(lambda params: adamw(params, ema_decay=0.9))
    twins.step()
    with twins.a.ema_parameters(), pytest.raises(RuntimeError, match=r"ema_parameters\(\).*backward"):
        backward(twins.models[0], 1)


def _move(groups):
    groups[1]["params"].insert(0, groups[0]["params"].pop())


def _merge(groups):
    groups[0]["params"] += groups.pop()["params"]


def _insert_an_empty_one(groups):
    groups.insert(1, {**groups[0], "params": [], "lr": 0.5})


@pytest.mark.parametrize("change", [_move, _merge, _insert_an_empty_one])
def test_parameters_follow_their_groups_though_all_stay_in_order(change):
    def trained(releases):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        a, b, c = model.parameters()
        optimizer = fusedstep.SGD([{"params": [a, b], "lr": 0.1}, {"params": [c], "lr": 0.0}])
        if releases:
            fusedstep.release_gradients(model, optimizer, bucket_bytes=0)
        for i in range(4):
            if i == 2:
                change(optimizer.param_groups)
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step(zero_grad=True)
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, trained(True), trained(False)))


SCALERS = [torch.amp.GradScaler, fusedstep.GradScaler]


@pytest.mark.parametrize("fused", [None, False, True])
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_scalers_are_refused(scaler, call, fused):
    twins, scaler = Twins(lambda params: adamw(params, fused=fused)), scaler("cpu", init_scale=8.0)
    for loads in (False, True):
        if loads:
            twins.a.load_state_dict(twins.a.state_dict())
        scaler.scale(twins.models[0](batch(0, torch.ones(1))).sum()).backward()
        with pytest.raises(RuntimeError, match="still scaled"):
            getattr(scaler, call)(twins.a)
        twins.a.zero_grad()
    twins.handle.remove()
    scaler = type(scaler)("cpu", init_scale=8.0)
    scaler.scale(twins.models[0](batch(0, torch.ones(1))).sum()).backward()
    scaler.unscale_(twins.a)
    scaler.step(twins.a)


@pytest.mark.parametrize("scaler", SCALERS)
def test_a_scaler_that_is_switched_off_does_nothing(scaler):
    twins, off = Twins(adamw), scaler("cpu", enabled=False)
    off.scale(twins.models[0](batch(0, torch.ones(1))).sum()).backward()
    off.unscale_(twins.a)
    off.step(twins.a)
    off.update()


def test_a_scale_that_is_set_by_hand_is_refused():
    twins = Twins(adamw)
    twins.a.grad_scale = torch.tensor(2.0)
    with pytest.raises(RuntimeError, match="still scaled"):
        twins.a.step()


def test_a_trace_is_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    twins = Twins(adamw)
    backward(twins.models[0], 0)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="traced"):
        twins.a.step()


# what else an optimizer does


def test_it_is_undone_by_its_handle():
    twins = Twins(adamw)
    twins.step(2)
    groups = twins.a.param_groups
    backward(twins.models[0], twins.count)
    waits = [p for p in twins.a.all_params if p.grad is not None]
    twins.handle.remove()
    twins.handle.remove()
    assert 0 < len(waits) < len(twins.a.all_params)
    assert all(p.grad is not None for p in waits)
    assert not any(p._post_accumulate_grad_hooks for p in twins.a.all_params)
    assert type(twins.a.param_groups) is list
    assert all(a is b for a, b in zip(groups, twins.a.param_groups, strict=True))
    twins.a.step()
    twins.a.zero_grad()
    backward(twins.models[1], twins.count)
    twins.b.step()
    twins.b.zero_grad()
    twins.check()
    twins.step(2)
    assert twins.a._plan is not None
    twins.check()


def test_it_may_last_for_a_block():
    twins = Twins(adamw)
    with twins.handle as handle:
        twins.step(2)
        assert handle is twins.handle
    twins.step(2)
    with fusedstep.release_gradients(twins.models[0], twins.a, 0):
        twins.step(2)
    twins.check()


@pytest.mark.parametrize("direction", ["released to plain", "plain to released"])
def test_checkpoints_go_from_one_loop_to_the_other(direction):
    twins = Twins(lambda params: adamw(params, state_dtype="int8", ema_decay=0.9))
    twins.step(3)
    optimizers = (twins.a, twins.b)
    saving = optimizers[direction != "released to plain"]
    file = io.BytesIO()
    torch.save(saving.state_dict(), file)
    twins.step()
    for optimizer in optimizers:
        file.seek(0)
        optimizer.load_state_dict(torch.load(file))
    twins.step(2)
    twins.check()


def test_replaced_states_are_not_kept_alive():
    twins = Twins(adamw)
    twins.step(2)
    old = [weakref.ref(state["exp_avg"]) for state in twins.a.state.values()]
    gc.disable()
    try:
        twins.a.load_state_dict(copy.deepcopy(twins.b.state_dict()))
        assert not any(ref() is not None for ref in old)
    finally:
        gc.enable()
    twins.step(2)
    twins.check()


@pytest.mark.parametrize("made", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_is_not_released(made):
    twins = Twins(adamw)
    twins.step(2)
    model, optimizer = made((twins.models[0], twins.a))
    assert type(optimizer.param_groups) is list
    assert optimizer._release is None
    backward(model, 5)
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    backward(twins.models[1], 5)
    twins.b.step()
    assert_same(optimizer, twins.b)


def test_nothing_is_left_to_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        twins = Twins(adamw)
        twins.step(2)
        refs = [*map(weakref.ref, (twins.models[0], twins.a, twins.a._release))]
        del twins
        assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()


def test_a_model_outlives_its_optimizer():
    model = model_of()
    fusedstep.release_gradients(model, adamw(model.parameters()), 0)
    backward(model, 0)
    assert all(p.grad is not None for p in model.parameters())


def test_after_an_exception_in_backward_training_goes_on():
    twins = Twins(adamw, lambda: nn.Sequential(nn.Linear(SIZE, 3, bias=False)), bucket_bytes=0)
    twins.models[1].load_state_dict(twins.models[0].state_dict())
    twins.step(2)
    p = twins.models[0][0].weight
    kept, twins.a.state[p]["exp_avg"] = twins.a.state[p]["exp_avg"], "not a tensor"
    with pytest.raises(TypeError, match="not a tensor"):
        backward(twins.models[0], twins.count)
    assert p.grad is not None
    twins.a.state[p]["exp_avg"] = kept
    # what could not be stepped is still there
    twins.a.step()
    backward(twins.models[1], twins.count)
    twins.b.step()
    twins.b.zero_grad()
    twins.check()
    twins.step(2)
    twins.check()


def test_skipped_steps_are_remembered():
    model = model_of()
    optimizer = adamw(model.parameters(), skip_nonfinite=True)
    model[0].weight.grad = torch.full((SIZE, SIZE), torch.inf)
    optimizer.step(zero_grad=True)
    optimizer.skip_nonfinite = False
    with fusedstep.release_gradients(model, optimizer, SMALL):
        backward(model, 0)
        optimizer.step()
        assert (optimizer.skipped_steps, optimizer.step_was_skipped) == (1, False)
    backward(model, 0)
    optimizer.step()
    assert (optimizer.skipped_steps, optimizer.step_was_skipped) == (1, False)


def in_a_thread(model, step):
    thread = threading.Thread(target=backward, args=(model, step))
    thread.start()
    thread.join()


def test_gradients_may_come_from_another_thread_each_time():
    twins = Twins(adamw, backward=in_a_thread)
    twins.step(4)
    twins.check()


def test_a_compiled_model_is_released_at_the_end():
    twins = Twins(adamw)
    models = [torch.compile(model, backend="aot_eager") for model in twins.models]
    for step in range(3):
        for model, optimizer in zip(models, (twins.a, twins.b), strict=True):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    twins.check()


# ranks


def released_on_ranks(wrap, name, make=None, plain_reduce=None):
    case = by_name(name)
    model, other = (wrap(uneven()) for _ in range(2))
    a, b = (case.ours(each.parameters(), **case.options) for each in (model, other))
    fusedstep.release_gradients(model, a, 20)
    for i in range(3):
        for each, optimizer in ((model, a), (other, b)):
            loss_of(each, batch_of(rank(), i)).backward()
            if optimizer is a:
                left = sum(p.grad is not None for p in each.parameters())
                assert left < len([*each.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert same_bits(p.to_local().detach(), q.to_local().detach())
        for key, value in b.state[q].items():
            there = a.state[p][key]
            assert same_bits(*(getattr(t, "_local_tensor", t) for t in (value, there))), key
    assert len(a._release.parts) > 1


def uneven():
    """Five rows are no two halves, and one row leaves ranks without any."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "lamb-unclipped"])
def test_fsdp2_releases_after_its_ranks_have_exchanged(two, name):
    two.run(released_on_ranks, fsdp, name)


def test_hybrid_sharded_models_release_too(four):
    four.run(released_on_ranks, hsdp, "lamb-unclipped")


def accumulated():
    model, other = (fsdp(uneven()) for _ in range(2))
    a, b = (adamw(each.parameters()) for each in (model, other))
    fusedstep.release_gradients(model, a, 20)
    for i in range(4):
        for each, optimizer in ((model, a), (other, b)):
            each.set_requires_gradient_sync(i % 2 == 1)
            loss_of(each, batch_of(rank(), i)).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert same_bits(p.to_local().detach(), q.to_local().detach())


def test_fsdp2_may_accumulate_what_it_has_not_exchanged(two):
    two.run(accumulated)


def refused_on_ranks():
    from torch.distributed._composable import replicate
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    flat = lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    for wrap, found in (
        (DistributedDataParallel, "DistributedDataParallel"),
        (lambda model: nn.Sequential(DistributedDataParallel(model)), "DistributedDataParallel"),
        (flat, "FSDP1"),
        (replicate, r"replicate\(\)"),
    ):
        model = wrap(uneven())
        with pytest.raises(RuntimeError, match=f"found {found}.*exchanged"):
            fusedstep.release_gradients(model, adamw(model.parameters()))
    model = uneven()
    optimizer = adamw(model.parameters(), max_grad_norm=None, norm_group=torch.distributed.group.WORLD)
    with pytest.raises(RuntimeError, match="found norm_group"):
        fusedstep.release_gradients(model, optimizer)


def test_what_exchanges_gradients_later_is_refused(two):
    two.run(refused_on_ranks)


# a gpu


def on_gpu(dtype=torch.float32):
    return model_of(dtype).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("feature", FEATURES)
def test_a_gpu_gives_the_bits_of_the_plain_loop(feature):
    dtype, options = FEATURES[feature]
    twins = Twins(lambda params: adamw(params, **options), lambda: on_gpu(dtype))
    twins.step(5)
    twins.check()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bert-adam", "lamb-unclipped", "sgd-momentum"])
def test_rules_that_sum_give_them_on_a_gpu_too(name):
    case = by_name(name)
    twins = Twins(lambda params: case.ours(params, **case.options), on_gpu)
    twins.step(5)
    twins.check()


def on_side_streams(model, step):
    """Layers forward, and so backward, on streams of their own."""
    main, x = torch.cuda.current_stream(), batch(step, next(model.parameters()))
    if not hasattr(model, "streams"):
        model.streams = [torch.cuda.Stream() for _ in model]
    for layer, stream in zip(model, model.streams, strict=True):
        stream.wait_stream(main)
        x.record_stream(stream)
        with torch.cuda.stream(stream):
            x = layer(x)
        main.wait_stream(stream)
    x.record_stream(main)
    x.square().mean().backward()


@pytest.mark.gpu
def test_gradients_of_other_streams_are_stepped_when_they_are_there():
    def wide():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(8))).cuda()

    twins = Twins(adamw, wide, 3 * SIZE * SIZE * 4, on_side_streams)
    twins.step(20)
    torch.cuda.synchronize()
    twins.check()


@pytest.mark.gpu
def test_every_device_has_parts_of_its_own():
    def mixed():
        model = nn.ModuleList(nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(6))) for _ in range(2))
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
        model[1].cuda()
        return model

    def both(model, step):
        # autograd has a thread for each
        losses = [each(batch(step, each[0].weight)).square().mean() for each in model]
        (losses[0] + losses[1].cpu()).backward()

    twins = Twins(adamw, mixed, backward=both)
    twins.step(10)
    twins.check()
    assert all(len({p.device for p in part.params}) == 1 for part in twins.a._release.parts)


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    twins = Twins(adamw, on_gpu)
    batches = [batch(step, next(twins.models[0].parameters())) for step in range(6)]
    twins.backward = lambda model, step: model(batches[step]).square().mean().backward()
    twins.step(3)
    with no_waiting():
        twins.step(3)
    twins.check()


@pytest.mark.gpu
def test_memory_never_holds_all_gradients():
    size, layers, buckets = 1024, 24, 2
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers))).cuda().bfloat16()
    optimizer = adamw(model.parameters(), state_dtype="int8", master="split8")
    of_layer = size * size * 2
    x = torch.zeros(1, size, device="cuda", dtype=torch.bfloat16)
    with fusedstep.release_gradients(model, optimizer, buckets * of_layer):
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x).sum().backward()
        optimizer.step()
        most = torch.cuda.max_memory_allocated() - before
    assert of_layer <= most <= (buckets + 1.5) * of_layer


@pytest.mark.gpu
def test_a_capture_is_refused():
    model = on_gpu()
    optimizer = adamw(model.parameters())
    for _ in range(2):
        backward(model, 0)
        optimizer.step(zero_grad=True, set_to_none=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step(zero_grad=True, set_to_none=False)
    with pytest.raises(RuntimeError, match="CUDA graph has captured"):
        fusedstep.release_gradients(model, optimizer)
    optimizer.release_graph()
    fusedstep.release_gradients(model, optimizer).remove()
