"""Whatever happens between two steps: parameters, gradients, states, groups and options move or change."""

import contextlib
import copy
import gc
import io
import pickle
import weakref
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # has ForkingPickler share tensors

import fusedstep
from fusedstep._memory import plan, table, watch
from fusedstep._memory.taking import Way, take_step
from tests.cases import KINDS, by_name, name_of
from tests.pairs import Pair

cases = pytest.mark.parametrize("case", KINDS, ids=name_of)


@pytest.fixture
def pair(case, engine):
    pair = Pair(case, engine)
    pair.step()
    pair.step()
    return pair


@cases
def test_late_and_vanishing_gradients(pair):
    for skip in ((0,), (), (1, 2), (0, 1, 2), (), (2,)):
        pair.step(skip)


@cases
def test_a_first_step_without_any_gradient_is_a_no_op(case, engine):
    pair = Pair(case, engine)
    pair.step(skip=(0, 1, 2))
    assert not pair.a.state_dict()["state"]
    pair.step(skip=(1,))
    pair.step()


@cases
def test_parameters_may_be_given_new_memory(pair):
    for p in pair.ours:
        p.data = p.data.clone()
    pair.step()
    for p, q in pair.both():
        p.data, q.data = torch.randn_like(p), q.data
        q.data = p.data.clone()
    pair.step()


@cases
def test_states_may_be_replaced_or_given_new_memory(pair):
    for p in pair.ours:
        for name, value in pair.a.state[p].items():
            pair.a.state[p][name] = value.clone()
    pair.step()
    for p in pair.ours:
        for value in pair.a.state[p].values():
            value.data = value.data.clone()
    pair.step()
    for p in pair.ours:
        pair.a.state[p] = dict(pair.a.state[p])
    pair.step()


@cases
def test_clearing_the_state_starts_over(pair):
    for optimizer in (pair.a, pair.b):
        optimizer.state.clear()
    pair.step()
    pair.a.state, pair.b.state = type(pair.a.state)(dict), type(pair.b.state)(dict)
    pair.step()


@cases
def test_a_plan_keeps_no_state_and_no_gradient_alive(case, engine):
    pair = Pair(case, engine)
    pair.step()
    pair.step()
    gone = [weakref.ref(p.grad) for p in pair.ours]
    gone += [weakref.ref(v) for p in pair.ours for n, v in pair.a.state[p].items() if n != "step"]
    for p in pair.ours:
        p.grad = None
        for name in pair.a.state[p]:
            pair.a.state[p][name] = pair.a.state[p][name].clone()
    gc.collect()
    assert all(ref() is None for ref in gone)


@cases
def test_groups_may_be_added_swapped_and_re_optioned(pair):
    p, q = torch.nn.Parameter(torch.randn(7)), None
    q = torch.nn.Parameter(p.detach().clone())
    pair.a.add_param_group({"params": [p], "lr": 0.5})
    pair.b.add_param_group({"params": [q], "lr": 0.5})
    pair.ours.append(p)
    pair.theirs.append(q)
    pair.step()
    # as accelerate does under FSDP2: an entry replaced in place, with no call
    new, twin = torch.nn.Parameter(torch.randn(5)), None
    twin = torch.nn.Parameter(new.detach().clone())
    pair.a.param_groups[0]["params"][1], pair.b.param_groups[0]["params"][1] = new, twin
    pair.ours[1], pair.theirs[1] = new, twin
    pair.step()
    for group in pair.a.param_groups + pair.b.param_groups:
        group["lr"], group["weight_decay"], group["maximize"] = 0.03, 0.2, True
    pair.step()


def test_turning_amsgrad_or_momentum_on_takes_effect(engine):
    p = torch.nn.Parameter(torch.ones(3))
    adam, sgd = fusedstep.Adam([p], engine=engine), fusedstep.SGD([p], engine=engine)
    p.grad = torch.ones(3)
    adam.step()
    sgd.step()
    adam.param_groups[0]["amsgrad"], sgd.param_groups[0]["momentum"] = True, 0.9
    adam.step()
    sgd.step()
    assert "max_exp_avg_sq" in adam.state[p]
    assert torch.equal(sgd.state[p]["momentum_buffer"], p.grad)
    assert adam.state[p]["step"] == 2


@cases
def test_loading_a_state_dict_at_any_time_takes_effect(pair):
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in (pair.a, pair.b)]
    pair.step()
    for optimizer, state in zip((pair.a, pair.b), saved, strict=True):
        optimizer.load_state_dict(state)
    pair.step()


@cases
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
def test_a_copied_optimizer_goes_on_alike(case, copied, engine):
    model = torch.nn.Linear(3, 4)
    optimizer = case.ours(model.parameters(), engine=engine, **case.options)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    both = copied([model, optimizer])
    for _ in range(2):
        optimizer.step()
        for p, q in zip(model.parameters(), both[0].parameters(), strict=True):
            q.grad = p.grad.clone()
        both[1].step()
    for p, q in zip(model.parameters(), both[0].parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("state_dtype", [None, torch.float32, torch.bfloat16])
def test_states_keep_their_dtype_through_save_and_load(state_dtype, engine, tmp_path):
    p = torch.nn.Parameter(torch.randn(9, dtype=torch.bfloat16))
    optimizer = fusedstep.AdamW([p], engine=engine, state_dtype=state_dtype)
    p.grad = torch.randn_like(p)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state")
    other = fusedstep.AdamW([p], engine=engine, state_dtype=state_dtype)
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for name in ("exp_avg", "exp_avg_sq"):
        assert other.state[p][name].dtype == (state_dtype or torch.bfloat16)
        assert torch.equal(other.state[p][name], optimizer.state[p][name])


def test_a_dtype_that_changes_between_steps_is_followed(engine):
    p = torch.nn.Parameter(torch.randn(30))
    optimizer = fusedstep.AdamW([p], engine=engine)
    p.grad = torch.randn(30)
    optimizer.step()
    p.data, p.grad = p.data.bfloat16(), None
    before = p.detach().clone()
    p.grad = torch.randn(30, dtype=torch.bfloat16)
    optimizer.step()
    assert p.dtype == torch.bfloat16
    assert not torch.equal(p, before)
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32


def test_tensor_options_are_read_anew_every_step(engine):
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    lr, betas = torch.tensor(0.1), (torch.tensor(0.9), torch.tensor(0.99))
    a = fusedstep.Adam([p], lr=lr, betas=betas, engine=engine)
    b = torch.optim.Adam([q], lr=0.1, betas=(0.9, 0.99))
    for rate in (0.1, 0.5, 0.01):
        p.grad = torch.randn(3)
        q.grad = p.grad.clone()
        lr.fill_(rate)
        b.param_groups[0]["lr"] = rate
        a.step()
        b.step()
    torch.testing.assert_close(p, q)


def test_options_that_change_in_place_are_noticed(engine):
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    betas = [0.9, 0.99]
    a, b = (
        fusedstep.Adam([{"params": [p], "betas": betas}], engine=engine),
        torch.optim.Adam([q], betas=(0.9, 0.99)),
    )
    for beta in (0.9, 0.5, 0.1):
        p.grad = torch.randn(3)
        q.grad = p.grad.clone()
        betas[0] = beta
        b.param_groups[0]["betas"] = (beta, 0.99)
        a.step()
        b.step()
    torch.testing.assert_close(p, q)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=True),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    ],
    ids=["one-cycle", "cyclic", "cosine"],
)
@pytest.mark.parametrize("kind", ["sgd-momentum", "adamw"])
def test_schedulers_steer_ours_as_they_steer_torch(kind, scheduler, engine):
    pair = Pair(by_name(kind), engine)
    schedulers = scheduler(pair.a), scheduler(pair.b)
    for _ in range(8):
        pair.step()
        for s in schedulers:
            s.step()


def test_a_quiet_step_allocates_nothing(monkeypatch):
    """Nothing changed: no table is built, no address written, nothing uploaded or compiled."""
    params = [torch.nn.Parameter(torch.randn(50)) for _ in range(20)]
    for p in params:
        p.grad = torch.randn(50)
    optimizer = fusedstep.AdamW(params)
    for _ in range(3):
        optimizer.step()

    def forbidden(*args, **kwargs):
        raise AssertionError("a quiet step did work")

    for name in ("make_row", "make_tables", "Plan"):
        monkeypatch.setattr(plan, name, forbidden)
    for name in ("upload", "Table"):
        monkeypatch.setattr(table, name, forbidden)
    monkeypatch.setattr(table.Bucket, "write_addresses", forbidden)
    monkeypatch.setattr(watch, "Look", forbidden)
    monkeypatch.setattr(torch, "empty_strided", forbidden)
    monkeypatch.setattr(torch, "zeros", forbidden)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-4
    with pytest.raises(AssertionError, match="did work"):
        optimizer.step()


def shrink(p, optimizer):
    p.data, p.grad = p.data[:2], None
    p.grad = torch.ones_like(p)


def set_options(**options):
    return lambda p, optimizer: optimizer.param_groups[0].update(options)


def swap(p):
    other = torch.nn.Parameter(p.detach().t() * 2)
    other.grad = p.grad.t() * 2
    torch.utils.swap_tensors(p, other)


def free_and_refill(t):
    storage, kept = t.untyped_storage(), t.clone()
    size = storage.nbytes()
    storage.resize_(0)
    # something else gets the memory meanwhile
    other = torch.full((size,), 7, dtype=torch.uint8)
    storage.resize_(size)
    t.data.copy_(kept)
    del other


@torch.no_grad()
def set_into_larger(t, owner=None):
    larger = torch.zeros(100)
    larger[3:39] = t.reshape(-1)
    t = t if owner is None else owner
    t.set_(larger.untyped_storage(), 3, (6, 6), (6, 1))


def to_and_fro(t):
    t.data = t.data.double()
    t.data = t.data.float()


def turn_amsgrad_on(p, optimizer):
    optimizer.param_groups[0]["amsgrad"] = True
    # torch.optim does not make one
    optimizer.state[p]["max_exp_avg_sq"] = torch.zeros_like(p)


# what a step must notice: each is done to a parameter, with what torch.optim then does as the measure
MUTATIONS = {
    "parameter shrunk in place": shrink,
    "parameter turned": lambda p, o: setattr(p, "data", p.data.t()),
    "gradient turned": lambda p, o: p.grad.t_(),
    "gradient given other strides": lambda p, o: setattr(p.grad, "data", p.grad.data.t().contiguous().t()),
    "state turned": lambda p, o: o.state[p].update(exp_avg=o.state[p]["exp_avg"].t()),
    "state made sparse": lambda p, o: o.state[p].update(exp_avg=o.state[p]["exp_avg"].to_sparse()),
    "state no tensor": lambda p, o: o.state[p].update(exp_avg=5),
    "count given other memory": lambda p, o: setattr(o.state[p]["step"], "data", torch.tensor(100.0)),
    # what torch.multiprocessing does to all it sends: their memory is freed
    "everything shared": lambda p, o: [t.share_memory_() for t in (p.data, p.grad, *o.state[p].values())],
    "parameter and gradient swapped": lambda p, o: swap(p),
    "state swapped": lambda p, o: torch.utils.swap_tensors(o.state[p]["exp_avg"], torch.ones(6, 6)),
    "parameter's storage made larger": lambda p, o: p.data.untyped_storage().resize_(1 << 20),
    "parameter's storage freed and made again": lambda p, o: free_and_refill(p.data),
    "gradient's storage freed and made again": lambda p, o: free_and_refill(p.grad),
    "state's storage freed and made again": lambda p, o: free_and_refill(o.state[p]["exp_avg_sq"]),
    "parameter set into a larger storage": lambda p, o: set_into_larger(p.data, p),
    "state set into a larger storage": lambda p, o: set_into_larger(o.state[p]["exp_avg"]),
    "gradient set into a larger storage": lambda p, o: set_into_larger(p.grad),
    "state to another dtype and back": lambda p, o: to_and_fro(o.state[p]["exp_avg"]),
    "count to another dtype and back": lambda p, o: to_and_fro(o.state[p]["step"]),
    "parameter to another dtype and back": lambda p, o: to_and_fro(p),
    "gradient to another dtype and back": lambda p, o: to_and_fro(p.grad),
    "parameter frozen": lambda p, o: p.requires_grad_(False),
    "states replaced": lambda p, o: o.state.update({p: {k: v.clone() for k, v in o.state[p].items()}}),
    "state dict replaced": lambda p, o: setattr(o, "state", type(o.state)(dict, {p: dict(o.state[p])})),
    "state loaded": lambda p, o: o.load_state_dict(o.state_dict()),
    "amsgrad turned on": lambda p, o: turn_amsgrad_on(p, o),
    "gradient negated lazily": lambda p, o: setattr(p, "grad", torch._neg_view(p.grad)),
    "learning rate made a tensor": lambda p, o: set_options(lr=torch.tensor(0.1))(p, o),
    "parameters made a tuple": lambda p, o: set_options(params=(p,))(p, o),
    "parameters made a dict": lambda p, o: set_options(params={p: None})(p, o),
    "parameters made a set": lambda p, o: set_options(params={p})(p, o),
}


def trained(cls, mutation, kept, **options):
    """A parameter after five steps with a mutation before the third, or the type of what was raised."""
    torch.manual_seed(1)
    p = torch.nn.Parameter(torch.randn(6, 6))
    optimizer = cls([p], lr=0.1, **options)
    p.grad = torch.randn(6, 6)
    try:
        for i in range(5):
            if i == 2:
                MUTATIONS[mutation](p, optimizer)
            elif not kept:
                p.grad = p.grad.clone()
            optimizer.step()
            if isinstance(optimizer.param_groups[0]["lr"], torch.Tensor):
                optimizer.param_groups[0]["lr"].mul_(0.5)
    except Exception as error:
        return type(error)
    return p.detach()


def python_checks(monkeypatch):
    """As where torch has no table of DLPack's functions."""
    monkeypatch.setattr(watch, "_table", lambda: None)
    monkeypatch.setattr(watch, "_kinds", {})


# how a step looks for changes: as here, and as where tensors are compared in Python
CHECKS = {"compiled checks": lambda monkeypatch: None, "python checks": python_checks}


def share(p, optimizer):
    """As torch.multiprocessing shares what it sends."""
    ForkingPickler(io.BytesIO(), 2).dump(optimizer)


# what is done to the count of the first of two parameters
COUNT_CHANGES = {
    "sent": share,
    "alias of another's": lambda p, o: setattr(o.state[p]["step"], "data", [*o.state.values()][1]["step"].data),
    "another dtype": lambda p, o: setattr(
        o.state[p]["step"], "data", o.state[p]["step"].data.view(torch.int32)
    ),
    "sparse": lambda p, o: torch.utils.swap_tensors(o.state[p]["step"], torch.ones(3).to_sparse()),
}


@pytest.mark.parametrize("checks", CHECKS)
@pytest.mark.parametrize("change", COUNT_CHANGES)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_counts_that_move_are_noticed(kind, change, checks, engine, monkeypatch):
    CHECKS[checks](monkeypatch)
    params = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    optimizer = kind.ours(params, engine=engine, **kind.options)
    for p in params:
        p.grad = torch.randn(3)
    optimizer.step()
    optimizer.step()
    if change != "sent" and "step" not in optimizer.state[params[0]]:
        pytest.skip("nobody else has its counts")
    counts = lambda: [float(row.once["step"]) for table in optimizer._plan.tables for row in table.rows]
    plan, before = optimizer._plan, counts()
    COUNT_CHANGES[change](params[0], optimizer)
    if change == "sparse":
        with pytest.raises((RuntimeError, NotImplementedError)):
            optimizer.step()
        return
    optimizer.step()
    if change == "sent":
        assert counts() == [count + 1 for count in before]
    # what is no address does not dangle
    assert optimizer._plan is not plan or (change == "sent" and engine == "torch")


@pytest.mark.parametrize("checks", CHECKS)
@pytest.mark.parametrize("kept", [True, False], ids=["gradient kept", "gradient new"])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_whatever_is_done_between_steps_we_do_as_torch_does(mutation, kept, checks, engine, monkeypatch):
    CHECKS[checks](monkeypatch)
    ours = trained(fusedstep.Adam, mutation, kept, engine=engine)
    theirs = trained(torch.optim.Adam, mutation, kept)
    if isinstance(theirs, type):
        assert isinstance(ours, type), f"torch raises {theirs}"
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_after_an_exception_the_next_step_starts_over(engine):
    a, b = (torch.nn.Parameter(torch.zeros(1000)) for _ in range(2))
    optimizer = fusedstep.SGD([a, b], lr=0.1, momentum=0.9, engine=engine)
    a.grad, b.grad = torch.ones(1000), torch.ones(1000)
    optimizer.step()
    kept = optimizer.state[b]["momentum_buffer"]
    a.grad, optimizer.state[b]["momentum_buffer"] = torch.full((1000,), 100.0), 5
    with pytest.raises((AttributeError, TypeError, RuntimeError)):
        optimizer.step()
    optimizer.state[b]["momentum_buffer"] = kept
    optimizer.step()
    torch.testing.assert_close(a.detach(), torch.full((1000,), -0.1 - 0.1 * (0.9 + 100)))


def test_momentum_may_be_turned_off(engine):
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = fusedstep.SGD([p], lr=0.1, momentum=0.9, engine=engine)
    p.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), -0.2))


def test_the_first_step_may_happen_in_inference_mode(engine):
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    optimizer = fusedstep.AdamW([p], engine=engine)
    with torch.inference_mode():
        optimizer.step()
        optimizer.step()
    assert optimizer.state[p]["step"] == 2


def test_an_option_may_turn_from_a_tensor_into_a_number_and_go_on_changing(engine):
    p = torch.nn.Parameter(torch.zeros(1))
    p.grad = torch.ones(1)
    optimizer = fusedstep.SGD([p], lr=torch.tensor(1.0), engine=engine)
    optimizer.step()
    for lr in (0.125, 8.0, torch.tensor(2.0), 64.0, 16.0):
        optimizer.param_groups[0]["lr"] = lr
        before = p.item()
        optimizer.step()
        assert before - p.item() == lr


def test_a_parameter_that_is_a_conjugate_or_a_negative_moves(engine):
    z = torch.randn(3, dtype=torch.complex64)
    for view in (lambda z: z.conj(), lambda z: z.conj().imag):
        p, q = (torch.nn.Parameter(view(z.clone())) for _ in range(2))
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        fusedstep.SGD([p], lr=0.5, engine=engine).step()
        torch.optim.SGD([q], lr=0.5).step()
        assert torch.equal(p, q)


def test_an_optimizer_may_step_in_inference_mode_and_then_without():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = fusedstep.AdamW([p], max_grad_norm=1.0)
    with torch.inference_mode():
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert optimizer.state[p]["step"] == 2


def test_a_gradient_may_get_another_layout_in_inference_mode(engine):
    p = torch.nn.Parameter(torch.zeros(4, 3))
    optimizer = fusedstep.AdamW([p], engine=engine)
    p.grad = torch.ones(4, 3)
    optimizer.step()
    p.grad = torch.ones(3, 4).t()
    with torch.inference_mode():
        optimizer.step()
    optimizer.step()
    assert optimizer.state[p]["step"] == 3


def test_a_state_that_is_made_in_inference_mode_is_a_usual_tensor(engine):
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    optimizer = fusedstep.AdamW(params, engine=engine)
    params[0].grad = torch.ones(3)
    optimizer.step()
    params[1].grad = torch.ones(3)
    with torch.inference_mode():
        optimizer.step()
    optimizer.step()
    assert not any(value.is_inference() for p in params[:2] for value in optimizer.state[p].values())
    assert [int(optimizer.state[p]["step"]) for p in params[:2]] == [3, 2]


def test_autograd_notices_that_a_parameter_was_written():
    p = torch.nn.Parameter(torch.randn(5))
    view, apart = p.view(-1), p.data
    p.grad = torch.randn(5)
    optimizer = fusedstep.AdamW([p])
    loss = p.square().sum()
    for _ in range(3):
        before = p._version, view._version, apart._version
        optimizer.step()
        assert (p._version, view._version, apart._version) == (before[0] + 1, before[1] + 1, before[2])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def negate(t):
    return torch._neg_view(t.clone())


def negate_the_parameter(p, state):
    p.data = negate(p.data)


def negate_a_state(p, state):
    state[p]["exp_avg"] = negate(state[p]["exp_avg"])


@pytest.mark.parametrize("change", [negate_the_parameter, negate_a_state])
def test_what_is_negated_lazily_is_noticed_beside_another_change(change):
    def trained(cls):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64)) for _ in range(3)]
        optimizer = cls(params, lr=0.1)
        for i in range(4):
            if i == 2:
                change(params[1], optimizer.state)
                params[0].data = params[0].data.t().contiguous().t()
            for p in params:
                p.grad = torch.randn(4, 3, dtype=torch.float64)
            optimizer.step()
        return [p.detach().resolve_neg() for p in params]

    for ours, theirs in zip(trained(fusedstep.AdamW), trained(torch.optim.AdamW), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_negated_gradient_is_noticed_beside_one_of_another_dtype():
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = fusedstep.SGD(params, lr=1.0)
    for p in params:
        p.grad = torch.ones(3)
    optimizer.step()
    params[1].grad_dtype = None
    params[0].grad, params[1].grad = torch._neg_view(torch.ones(3)), torch.ones(3, dtype=torch.bfloat16)
    optimizer.step()
    assert [p.tolist() for p in params] == [[0.0] * 3, [-2.0] * 3]


def leaked():
    """A gradient that torch.func has wrapped, after it is done."""
    found = []
    torch.func.vmap(lambda x: found.append(x) or x)(torch.ones(3, 4, 10))
    return found[0]


def freed():
    grad = torch.ones(4, 10)
    grad.untyped_storage().resize_(0)
    return grad


WITHOUT_MEMORY = {"leaked": leaked, "zeros": lambda: torch._efficientzerotensor(4, 10), "freed": freed}


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_gradient_without_memory_is_refused_and_forgotten(engine, kind, steps):
    p = torch.nn.Parameter(torch.ones(4, 10))
    optimizer = fusedstep.SGD([p], lr=1.0, engine=engine)
    for _ in range(steps):
        p.grad = torch.zeros(4, 10)
        optimizer.step()
    p.grad = WITHOUT_MEMORY[kind]()
    with pytest.raises(RuntimeError, match=r"gradient of shape \(4, 10\) without memory"):
        optimizer.step()
    assert p.tolist() == [[1.0] * 10] * 4
    p.grad = torch.ones(4, 10)
    optimizer.step()
    assert not p.any()
    # others like it are looked at by compiled code
    assert watch.kind_of(p).described_at is not None


def test_a_parameter_of_a_lazy_module_is_left_out_until_it_has_a_shape():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LazyLinear(2))
    optimizer = fusedstep.AdamW(model.parameters())
    before = model[0].weight.detach().clone()
    model[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert all(optimizer.state[p]["step"] > 0 for p in model.parameters())


def test_an_option_is_brought_to_tables_that_stay_after_they_were_found_not_to_fit():
    """As those of a captured step do, which raises until the other option is set back."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = fusedstep.SGD([{"params": [p]} for p in params], lr=0.5)
    for p in params:
        p.grad = torch.ones(3)
    optimizer.step()
    kept, (first, second) = optimizer._plan, optimizer.param_groups
    first["lr"], second["max_grad_norm"] = 0.25, 1.0
    assert not kept.refresh(optimizer, kept.spec)
    second["max_grad_norm"] = None
    assert kept.refresh(optimizer, kept.spec)
    (table,) = kept.tables
    assert table.options[:, table.option_columns["lr"]].tolist() == [0.25, 0.5]
    optimizer.step()
    assert [p.tolist() for p in params] == [[0.25] * 3, [0.0] * 3]


def test_a_state_without_memory_is_refused(engine):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = fusedstep.AdamW([p], engine=engine)
    for _ in range(2):
        p.grad = torch.ones(3)
        optimizer.step()
    before = p.detach().clone()
    optimizer.state[p]["exp_avg"].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="state 'exp_avg' of parameter has no memory"):
        optimizer.step()
    assert torch.equal(p, before)


def test_a_count_that_is_given_away_in_inference_mode_is_a_usual_tensor():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = fusedstep.AdamW([p])
    p.grad = torch.ones(3)
    optimizer.step()
    held = optimizer.state[p]["step"]
    with torch.inference_mode():
        optimizer.state[p]["step"] = torch.tensor(5.0)
        optimizer.step()
    assert held == 1
    assert optimizer.state[p]["step"] == 6
    assert not held.is_inference()


class MadeWhenAsked(torch.nn.Parameter):
    """Its gradient is another tensor whenever it is asked for."""

    @property
    def grad(self):
        found = torch.Tensor.grad.__get__(self)
        return None if found is None else found * 1.0

    @grad.setter
    def grad(self, value):
        torch.Tensor.grad.__set__(self, value)


class AnotherGradient(torch.overrides.TorchFunctionMode):
    """The same of every tensor, while it is active."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 1.0 if func == torch.Tensor.grad.__get__ and found is not None else found


@pytest.mark.parametrize("way", ["of a property", "of a mode"])
def test_gradients_that_are_made_when_they_are_asked_for_live_until_the_step_ends(way, engine):
    cls, mode = (MadeWhenAsked, contextlib.nullcontext) if way == "of a property" else (None, AnotherGradient)
    params = [(cls or torch.nn.Parameter)(torch.ones(300)) for _ in range(20)]
    optimizer = fusedstep.SGD(params, lr=0.1, engine=engine)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones(300)
        with mode():
            optimizer.step()
    assert all(torch.equal(p.detach(), params[0].detach()) for p in params)
    torch.testing.assert_close(params[0].detach(), torch.full((300,), 0.7))


def test_no_gradient_is_kept_after_a_step(engine):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = fusedstep.AdamW([p], engine=engine)
    for _ in range(2):
        p.grad = torch.ones(3)
        held = weakref.ref(p.grad)
        optimizer.step()
        p.grad = None
        assert held() is None


def test_a_subclass_that_gets_a_torch_function_later_is_asked_through_it():
    class Late(torch.nn.Parameter):
        pass

    def threefold(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        return found * 3 if func == torch.Tensor.grad.__get__ and found is not None else found

    p = Late(torch.ones(3))
    optimizer = fusedstep.SGD([p], lr=0.1, engine="torch")
    p.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(p.detach().tolist(), [0.9] * 3)
    Late.__torch_function__ = classmethod(threefold)
    optimizer.step()
    with torch._C.DisableTorchFunctionSubclass():
        torch.testing.assert_close(p.detach().tolist(), [0.6] * 3)


def test_a_parameter_that_gets_another_shape_is_counted_anew(engine):
    def stepped(keeps_plan):
        p = torch.nn.Parameter(torch.ones(2))
        optimizer = fusedstep.StableAdamW([p], lr=0.1, engine=engine)
        p.grad = torch.ones(2)
        optimizer.step()
        p.grad, p.data = None, torch.ones(1000)
        del optimizer.state[p]
        if not keeps_plan:
            optimizer._plan = None
        for factor in (1.0, 7.0):
            p.grad = torch.full((1000,), factor)
            optimizer.step()
        return p.detach()

    assert torch.equal(stepped(True), stepped(False))


def _first_gradient(optimizer):
    p = optimizer.param_groups[0]["params"][1]
    p.grad = torch.ones_like(p)


def _loaded(optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _counted(optimizer):
    next(iter(optimizer.state.values()))["step"] = torch.tensor(5.0)


@pytest.mark.parametrize(
    "change", [_first_gradient, _loaded, _counted, lambda optimizer: optimizer.state.clear()]
)
def test_a_graph_captures_no_step_that_would_prepare_states(change, engine):
    """A replay would do it again: zero them, or copy counts from memory that holds something else by then."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = fusedstep.AdamW(params, engine=engine)
    params[0].grad = torch.ones(3)
    optimizer.step()
    change(optimizer)
    before = [{**optimizer.state[p]} for p in optimizer.state]
    plan = optimizer._plan
    with pytest.raises(RuntimeError, match="only after one that was not captured"):
        take_step(optimizer, plan, plan.spec, Way(captures=True))
    assert [{**optimizer.state[p]} for p in optimizer.state] == before
    optimizer._plan = None
    optimizer.step()
