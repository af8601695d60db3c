"""The operation without a class, against what the operator's document says it computes, written anew."""

import gc
import itertools
import threading
import weakref

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedstep
from fusedstep import functional

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# dtypes of parameter, gradient and largest second moment: all the document lists
COMBINATIONS = [*itertools.product(FLOATS, FLOATS, FLOATS)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def documented(p, g, m, v, largest, step, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize):
    """New values in float32, before they are rounded to what is stored; scalars are float32 too."""
    lr, beta1, beta2, weight_decay, eps = map(np.float32, (lr, beta1, beta2, weight_decay, eps))
    one, count = np.float32(1), np.float32(step)
    p, g, m, v, largest = (t.cpu().float().numpy() for t in (p, g, m, v, largest))
    g = -g if maximize else g
    p = p * (one - lr * weight_decay)
    m = m + (g - m) * (one - beta1)
    v = v * beta2 + g * g * (one - beta2)
    largest = np.maximum(largest, v) if amsgrad else largest
    rate, root = lr / (one - beta1**count), np.sqrt(one - beta2**count)
    p = p - rate * (m / (np.sqrt(largest if amsgrad else v) / root + eps))
    return [torch.from_numpy(x) for x in (p, m, v, largest)]


def tensors(dtypes, shape=(37, 5), device="cpu"):
    of_param, of_grad, of_largest = dtypes
    p, g, m = torch.randn(shape), torch.randn(shape), torch.randn(shape) / 10
    v, largest = torch.rand(shape), torch.rand(shape)
    stored = zip((p, g, m, v, largest), (of_param, of_grad, of_param, of_param, of_largest), strict=True)
    return [t.to(dtype).to(device) for t, dtype in stored]


def assert_alike(ours, expected, scale, what):
    """float32 within 1e-6 of `scale`, 16 bits equal or one rounding apart."""
    ours = ours.cpu()
    if ours.dtype == torch.float32:
        assert ((ours - expected).abs() <= 1e-6 * scale).all(), what
        return
    rounded = expected.to(ours.dtype)
    steps = [t.view(torch.int16).int() for t in (ours, rounded)]
    near_zero = (ours.float() - rounded.float()).abs() <= 1e-6 * scale
    assert (((steps[0] - steps[1]).abs() <= 1) | near_zero).all(), what


def check(dtypes, amsgrad, engine, device):
    for maximize, weight_decay, step in itertools.product((False, True), (0.0, 0.1), (1, 2, 10, 1000)):
        before = tensors(dtypes, device=device)
        ours = [t.clone() for t in before]
        options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": weight_decay, "eps": 1e-8}
        options |= {"amsgrad": amsgrad, "maximize": maximize}
        functional.adamw_(*ours, step=torch.tensor([step], device=device), engine=engine, **options)
        p, m, v, largest = documented(*before, step, **options)
        old, gradient = before[0].cpu().float(), before[1].cpu().float().abs()
        moved = torch.maximum(old.abs(), (p - old).abs())
        assert torch.equal(ours[1], before[1])
        assert_alike(ours[0], p, moved, f"p, {options}, step {step}")
        assert_alike(ours[2], m, torch.maximum(before[2].cpu().float().abs(), gradient), f"m, {options}")
        assert_alike(ours[3], v, v, f"v, {options}")
        if amsgrad:
            assert_alike(ours[4], largest, largest, f"largest, {options}")
        else:
            assert torch.equal(ours[4], before[4])


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtypes", COMBINATIONS, ids=str)
def test_every_documented_combination_of_dtypes_gives_the_documented_numbers(dtypes, amsgrad, engine):
    check(dtypes, amsgrad, engine, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtypes", COMBINATIONS, ids=str)
def test_every_documented_combination_of_dtypes_gives_the_documented_numbers_on_a_gpu(dtypes, amsgrad):
    check(dtypes, amsgrad, "triton", "cuda")


@pytest.mark.parametrize("step", [10, 10.0, torch.tensor(10), torch.tensor([10]), torch.tensor([10.0])])
def test_the_recorded_example(step, engine):
    p, g, m, v = (torch.full((10, 10), x) for x in (0.5, 0.5, 0.9, 0.9))
    kept = step.clone() if isinstance(step, torch.Tensor) else step
    functional.adamw_(p, g, m, v, step=step, lr=1e-3, beta1=0.9999, beta2=0.9999, engine=engine)
    torch.testing.assert_close(p, torch.full((10, 10), 0.46999559), rtol=1e-6, atol=0)
    torch.testing.assert_close(m, torch.full((10, 10), 0.89995998), rtol=1e-7, atol=0)
    torch.testing.assert_close(v, torch.full((10, 10), 0.89993501), rtol=1e-7, atol=0)
    assert step == kept


@pytest.mark.parametrize("device", DEVICES)
def test_a_list_is_the_same_as_its_tensors_one_by_one(device):
    shapes = [(), (0,), (3,), (70, 33), (2, 1, 4), (5000,)]
    together = [tensors(COMBINATIONS[5 * i], shape, device) for i, shape in enumerate(shapes)]
    alone = [[t.clone() for t in roles] for roles in together]
    for step in range(1, 4):
        lists = [*map(list, zip(*together, strict=True))]
        functional.adamw_(*lists, step=step, amsgrad=True, weight_decay=0.1)
        for roles in alone:
            functional.adamw_(*roles, step=step, amsgrad=True, weight_decay=0.1)
    for ours, theirs in zip(together, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_many_steps_are_those_of_the_optimizer(device):
    params = [torch.nn.Parameter(torch.randn(70, device=device)) for _ in range(3)]
    twins = [p.detach().clone() for p in params]
    states = [[torch.zeros(70, device=device) for _ in params] for _ in range(2)]
    optimizer = fusedstep.AdamW(params, lr=0.01, weight_decay=0.1)
    for step in range(1, 11):
        for p in params:
            p.grad = torch.randn(70, device=device)
        optimizer.step()
        grads = [p.grad for p in params]
        functional.adamw_(twins, grads, *states, step=step, lr=0.01, weight_decay=0.1)
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_may_lie_anyhow(device):
    plain = tensors((torch.float32,) * 3, (6, 8), device)
    odd = [torch.empty(8, 6, device=device).t() for _ in range(4)]
    odd.append(torch.zeros(6, 16, device=device)[:, ::2])
    odd[2] = torch.full((6, 16), 7.0, device=device)[:, 8:]
    for source, target in zip(plain, odd, strict=True):
        target.copy_(source)
    odd[1] = odd[1].contiguous()
    around = odd[2]._base.clone()
    for step in (1, 2):
        functional.adamw_(*plain, step=step, amsgrad=True)
        functional.adamw_(*odd, step=step, amsgrad=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, odd, strict=True))
    assert torch.equal(odd[2]._base[:, :8], around[:, :8])


def test_a_gradient_may_be_expanded():
    p, m, v = torch.randn(4, 3), torch.zeros(4, 3), torch.zeros(4, 3)
    q, s, t = p.clone(), m.clone(), v.clone()
    functional.adamw_(p, torch.tensor(0.5).expand(4, 3), m, v, step=1)
    functional.adamw_(q, torch.full((4, 3), 0.5), s, t, step=1)
    assert torch.equal(p, q)


def broken(**changes):
    """Arguments of a valid call with one of them spoilt."""
    p, g, m, v, largest = tensors((torch.float32,) * 3, (4,))
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
    given = {**dict(zip(names, (p, g, m, v, largest), strict=True)), "step": 1, "amsgrad": True}
    return {**given, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"grads": torch.zeros(5)}, ValueError, r"grads has shape \(5,\)"),
        ({"exp_avgs": torch.zeros(4, dtype=torch.float64)}, TypeError, r"exp_avgs is torch.float64"),
        ({"exp_avg_sqs": torch.zeros(4, dtype=torch.bfloat16)}, TypeError, r"exp_avg_sqs is torch.bf"),
        ({"max_exp_avg_sqs": torch.zeros(4, dtype=torch.int64)}, TypeError, r"max_exp_avg_sqs is"),
        ({"max_exp_avg_sqs": None}, ValueError, "amsgrad=True needs max_exp_avg_sqs"),
        ({"params": torch.zeros(4, dtype=torch.float64)}, TypeError, r"params is torch.float64"),
        ({"grads": torch.zeros(4, device="meta")}, ValueError, r"grads is on meta"),
        ({"grads": torch.zeros(4).to_sparse()}, ValueError, r"grads is torch.sparse_coo"),
        ({"params": torch.zeros(4).to_sparse()}, ValueError, r"params is torch.sparse_coo"),
        ({"grads": "no tensor"}, TypeError, "grads is a str"),
        ({"grads": [None]}, TypeError, r"grads is a NoneType"),
        ({"grads": [torch.zeros(4)] * 2}, ValueError, "1 params, 2 grads"),
        ({"exp_avgs": torch.zeros(1).expand(4)}, ValueError, r"exp_avgs is expanded"),
        ({"step": torch.ones(2)}, ValueError, r"step has shape \(2,\)"),
        ({"step": None}, TypeError, "step is None"),
        ({"step": "1"}, TypeError, "step is '1'; use the number of this update, or a tensor of it"),
        ({"step": 0}, ValueError, "step is 0; use the number of this update, counted from 1"),
        ({"step": float("nan")}, ValueError, "step is nan"),
        ({"lr": torch.tensor(0.1)}, TypeError, "lr is tensor"),
        ({"engine": "cuda"}, ValueError, "Invalid engine: 'cuda'"),
        ({"engine": "triton", "step": torch.ones(1, device="meta")}, ValueError, "step is on meta"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(changes, error, message):
    good = broken()
    arguments = {**good, **changes}
    before = {name: t.clone() for name, t in good.items() if isinstance(t, torch.Tensor)}
    with pytest.raises(error, match=message):
        functional.adamw_(**arguments)
    assert all(torch.equal(good[name], t) for name, t in before.items())


def test_a_mistake_late_in_a_list_leaves_its_first_tensors_alone():
    first, second = tensors((torch.float32,) * 3), tensors((torch.float32,) * 3)
    before = [t.clone() for t in first]
    second[1] = second[1][:3]
    with pytest.raises(ValueError, match=r"grads\[1\] has shape"):
        functional.adamw_(*map(list, zip(first, second, strict=True)), step=1, amsgrad=True)
    assert all(torch.equal(a, b) for a, b in zip(first, before, strict=True))


def test_a_tensor_given_twice_raises():
    p, g, m, v, _ = tensors((torch.float32,) * 3)
    with pytest.raises(ValueError, match="twice"):
        functional.adamw_([p, p], [g, g], [m, m.clone()], [v, v.clone()], step=1)
    with pytest.raises(ValueError, match="twice"):
        functional.adamw_([p, p.clone()], [g, g], [m, m], [v, v.clone()], step=1)


def test_empty_lists_and_empty_tensors_do_nothing():
    functional.adamw_([], [], [], [], step=1)
    functional.adamw_(*(torch.zeros(0) for _ in range(4)), step=1)


def test_a_second_call_may_bring_other_tensors_and_other_numbers():
    """The tables of the first are used again only where everything is stored alike."""
    start = tensors((torch.float32,) * 3, (40,))
    for changed in range(4):
        lists, twins = ([[t.clone()] for t in start[:4]] for _ in range(2))
        functional.adamw_(*lists, step=1)
        functional.adamw_(*twins, step=1, engine="torch")
        # another address for one of them, and another rate
        lists[changed] = [lists[changed][0].clone()]
        functional.adamw_(*lists, step=2, lr=0.1, maximize=True)
        functional.adamw_(*twins, step=2, lr=0.1, maximize=True, engine="torch")
        for (a,), (b,) in zip(lists, twins, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)
    lists[1] = [torch.randn(40, dtype=torch.bfloat16)]
    before = lists[0][0].clone()
    functional.adamw_(*lists, step=3)
    assert not torch.equal(before, lists[0][0])


@pytest.mark.parametrize("lies", [lambda t: t, lambda t: t.t().contiguous().t(), lambda t: t[:, ::2]])
def test_nothing_is_kept_alive(lies):
    roles = [
        lies(t) if i in (0, 2) else t[:, : lies(t).shape[1]] for i, t in enumerate(tensors(COMBINATIONS[0]))
    ]
    references = [weakref.ref(t) for t in roles]
    functional.adamw_(*roles, step=1, amsgrad=True)
    functional.adamw_(*roles, step=2, amsgrad=True)
    del roles
    gc.collect()
    assert all(r() is None for r in references)


def test_threads_may_call_at_once():
    start = tensors((torch.float32,) * 3, (1000,))
    copies = [[t.clone() for t in start] for _ in range(8)]

    def work(roles):
        for step in range(1, 20):
            functional.adamw_(*roles, step=step, amsgrad=True)

    threads = [threading.Thread(target=work, args=(roles,)) for roles in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for roles in copies for a, b in zip(roles, copies[0], strict=True))


@pytest.mark.parametrize("role", [0, 2, 3])
def test_autograd_notices_the_write(role):
    roles = tensors((torch.float32,) * 3)[:4]
    w = torch.ones_like(roles[role], requires_grad=True)
    loss = (w * roles[role]).sum()
    functional.adamw_(*roles, step=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_call_in_inference_mode_leaves_the_next_one_alone():
    p, g, m, v, _ = tensors((torch.float32,) * 3)
    with torch.inference_mode():
        functional.adamw_(p, g, m, v, step=1)
    functional.adamw_(p, g, m, v, step=2, lr=0.1)
    q = torch.nn.Parameter(p.clone())
    q.grad = g
    with torch.inference_mode():
        functional.clip_grad_norm_(q, 0.1)
    functional.clip_grad_norm_(q, 0.01)
    torch.testing.assert_close(q.grad.norm(), torch.tensor(0.01))


def test_the_step_does_not_depend_on_torchs_defaults():
    p, g, m, v, _ = tensors((torch.float32,) * 3)
    q, s, t = p.clone(), m.clone(), v.clone()
    functional.adamw_(p, g, m, v, step=257)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            functional.adamw_(q, g, s, t, step=np.int64(257))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(p, q)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_compiled_function_gives_the_eager_result(amsgrad, device):
    backend = "inductor"

    @torch.compile(fullgraph=True, backend=backend)
    def train(params, grads, *states, step):
        doubled = [g * 2 for g in grads]
        functional.adamw_(params, doubled, *states, step=step, amsgrad=amsgrad, lr=0.01)
        return [p * 1 for p in params]

    roles = [tensors((torch.float32,) * 3, (30,), device) for _ in range(3)]
    lists = [*map(list, zip(*roles, strict=True))]
    twins = [[t.clone() for t in one] for one in lists]
    for count in (1, 2):
        step = torch.tensor([count], device=device)
        results = train(*lists, step=step)
        functional.adamw_(twins[0], [g * 2 for g in twins[1]], *twins[2:], step=step, amsgrad=amsgrad, lr=0.01)
        for ours, theirs in zip([*lists, results], [*twins, twins[0]], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_step_that_is_read_from_a_tensor_is_traced():
    ours, theirs = tensors((torch.float32,) * 3), tensors((torch.float32,) * 3)
    for t, u in zip(ours, theirs, strict=True):
        u.copy_(t)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def train(p, g, m, v, count):
        functional.adamw_(p, g, m, v, step=count.item())

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        train(*ours[:4], torch.tensor(3.0))
    functional.adamw_(*theirs[:4], step=3)
    assert all(map(torch.equal, ours, theirs))


def test_fake_tensors_trace_through():
    with FakeTensorMode():
        p, g, m, v = (torch.randn(4, 3) for _ in range(4))
        functional.adamw_(p, g, m, v, step=torch.tensor([1]))
        with pytest.raises(ValueError, match=r"grads\[0\] has shape"):
            functional.adamw_(p, g[:2], m, v, step=torch.tensor([1]))


def test_the_operator_is_registered_as_torch_wants_it():
    lists = [[torch.rand(5), torch.rand(3, 2)] for _ in range(5)]
    numbers = [1e-3, 0.9, 0.999, 1e-8, 0.0]
    arguments = (*lists, torch.tensor(1.0), numbers, True, False, None)
    torch.library.opcheck(torch.ops.fusedstep.adamw_.default, arguments)


# clipping


def with_grads(dtypes, device="cpu"):
    params = [torch.nn.Parameter(torch.zeros(40 + i, dtype=d, device=device)) for i, d in enumerate(dtypes)]
    for p in params:
        p.grad = torch.randn_like(p) * 3
    return params


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, FLOATS], ids=str)
def test_clipping_scales_all_gradients_and_returns_their_norm(dtypes, max_norm, device):
    params = with_grads(dtypes, device)
    before = [p.grad.double() for p in params]
    exact = torch.cat(before).norm()
    norm = functional.clip_grad_norm_(params, max_norm)
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
    factor = min(1.0, max_norm / (float(exact) + 1e-6))
    for p, g in zip(params, before, strict=True):
        torch.testing.assert_close(p.grad.double(), g * factor, rtol=torch.finfo(p.dtype).eps, atol=0)


@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
@pytest.mark.parametrize("max_norm", [0.0, 0.7])
def test_clipping_agrees_with_torch(norm_type, max_norm):
    ours, theirs = with_grads((torch.float32,) * 3), with_grads((torch.float32,) * 3)
    for p, q in zip(ours, theirs, strict=True):
        q.grad = p.grad.clone()
    found = functional.clip_grad_norm_(iter(ours), max_norm, norm_type)
    torch.testing.assert_close(found, torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_gradient_counts_once_and_its_norm_is_real(norm_type):
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    p.grad = torch.tensor([3 + 4j, 0])
    norm = functional.clip_grad_norm_([p, p], 1.0, norm_type)
    assert norm.dtype == torch.float32
    assert norm == 5
    torch.testing.assert_close(p.grad.abs(), torch.tensor([1.0, 0.0]))
    q = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    q.grad = torch.ones_like(q)
    assert functional.clip_grad_norm_([p, q], 1.0, norm_type).dtype == torch.float64


def test_clipping_may_be_compiled():
    params = with_grads((torch.float32,) * 3)
    twins = with_grads((torch.float32,) * 3)
    for p, q in zip(params, twins, strict=True):
        q.grad = p.grad.clone()
    compiled = torch.compile(
        lambda ps: functional.clip_grad_norm_(ps, 0.5), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(params), functional.clip_grad_norm_(twins, 0.5))
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_clipping_without_gradients_and_of_one_tensor():
    assert functional.clip_grad_norm_([torch.nn.Parameter(torch.ones(3))], 1.0) == 0
    assert functional.clip_grad_norm_([], 1.0) == 0
    (p,) = with_grads((torch.float32,))
    functional.clip_grad_norm_(p, 1.0)
    torch.testing.assert_close(p.grad.norm(), torch.tensor(1.0))


def test_clipping_follows_gradients_that_move_and_change():
    params = with_grads((torch.float32,) * 3)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        exact = torch.cat([p.grad for p in params]).norm()
        torch.testing.assert_close(functional.clip_grad_norm_(params, 0.1), exact)
        torch.testing.assert_close(torch.cat([p.grad for p in params]).norm(), torch.tensor(0.1))
    params[1].grad = None
    exact = torch.cat([p.grad for p in params if p.grad is not None]).norm()
    torch.testing.assert_close(functional.clip_grad_norm_(params, 0.01), exact)


def test_a_norm_that_is_no_number_raises_if_asked_to_and_poisons_otherwise():
    params = with_grads((torch.float32,) * 2)
    params[0].grad[3] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        functional.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert torch.isfinite(params[1].grad).all()
    assert torch.isnan(functional.clip_grad_norm_(params, 1.0))
    assert torch.isnan(params[1].grad).all()
