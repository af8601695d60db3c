"""Ascend's optimizers: their recorded results, their signatures, and none of their accidents."""

import copy
import functools
import inspect
import itertools
import json
import math
import pickle
import warnings
from pathlib import Path

import pytest
import torch

from fusedstep import npu

GOLDENS = json.loads((Path(__file__).parent / "goldens.json").read_text())["cases"]
# of each class, options that bring in all of its parts
OPTIONS = {
    "NpuFusedSGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    "NpuFusedAdam": {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True},
    "NpuFusedAdamW": {"lr": 0.01, "weight_decay": 0.1},
    "NpuFusedLamb": {"lr": 0.01, "weight_decay": 0.1},
    "NpuFusedBertAdam": {"lr": 0.1, "warmup": 0.3, "t_total": 20, "max_grad_norm": 0.5},
    "NpuFusedAdadelta": {"lr": 0.5, "eps": 1e-3, "weight_decay": 0.1},
    "NpuFusedRMSprop": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1},
    "NpuFusedRMSpropTF": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1},
    "NpuFusedAdamP": {"lr": 0.01, "weight_decay": 0.1, "delta": 1.0, "nesterov": True},
}
STATES = {
    "NpuFusedSGD": {"momentum_buffer"},
    "NpuFusedAdam": {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "NpuFusedAdamW": {"step", "exp_avg", "exp_avg_sq"},
    "NpuFusedLamb": {"step", "exp_avg", "exp_avg_sq"},
    "NpuFusedBertAdam": {"step", "exp_avg", "exp_avg_sq"},
    "NpuFusedAdadelta": {"step", "square_avg", "acc_delta"},
    "NpuFusedRMSprop": {"step", "square_avg", "momentum_buffer"},
    "NpuFusedRMSpropTF": {"step", "square_avg", "momentum_buffer"},
    "NpuFusedAdamP": {"step", "exp_avg", "exp_avg_sq"},
}
classes = pytest.mark.parametrize("name", OPTIONS)


class Exact:
    """The updates once more, one operation at a time, in float64; shares nothing with the library.

    `each` rounds the result of every operation and `stored` what is kept of a step: with both to float16 this
    is what upstream computes in float16, with only the second it is what float32 arithmetic on float16
    storage comes to.
    """

    def __init__(self, name, params, options, each=lambda x: x, stored=lambda x: x):
        self.update = getattr(self, name)
        self.params = [p.detach().double().clone() for p in params]
        self.states = [{} for _ in params]
        signature = inspect.signature(getattr(npu, name))
        self.o = {k: v.default for k, v in signature.parameters.items()} | options
        self.r, self.stored = each, stored

    def step(self, grads):
        scale = 1.0
        if self.o.get("max_grad_norm", 0) > 0:
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads if g is not None))
            scale = min(1.0, self.o["max_grad_norm"] / (norm + 1e-6))
        for i, g in enumerate(grads):
            if g is not None:
                s = self.states[i]
                s["t"] = s.get("t", 0) + 1
                g = g.double() if scale == 1 else self.r(g.double() * scale)
                self.params[i] = self.stored(self.update(self.params[i], g, s))
                for key in s.keys() - {"t"}:
                    s[key] = self.stored(s[key])

    def moments(self, p, g, s, beta1, beta2):
        zero = torch.zeros_like(p)
        m = self.r(self.r(beta1 * s.get("exp_avg", zero)) + (1 - beta1) * g)
        v = self.r(self.r(beta2 * s.get("exp_avg_sq", zero)) + (1 - beta2) * g * g)
        s["exp_avg"], s["exp_avg_sq"] = m, v
        return m, v

    def NpuFusedSGD(self, p, g, s):
        o, r = self.o, self.r
        d = r(g + o["weight_decay"] * p)
        if o["momentum"]:
            b = s.get("momentum_buffer")
            b = s["momentum_buffer"] = d if b is None else r(r(o["momentum"] * b) + (1 - o["dampening"]) * d)
            d = r(d + o["momentum"] * b) if o["nesterov"] else b
        return r(p - o["lr"] * d)

    def NpuFusedAdam(self, p, g, s):
        o, r = self.o, self.r
        m, v = self.moments(p, r(g + o["weight_decay"] * p), s, *o["betas"])
        return self.descend(p, m, v, s)

    def NpuFusedAdamW(self, p, g, s):
        p = self.r(p * (1 - self.o["lr"] * self.o["weight_decay"]))
        return self.descend(p, *self.moments(p, g, s, *self.o["betas"]), s)

    def descend(self, p, m, v, s):
        o, r = self.o, self.r
        if o["amsgrad"]:
            v = s["max_exp_avg_sq"] = torch.maximum(s.get("max_exp_avg_sq", torch.zeros_like(v)), v)
        root = math.sqrt(1 - o["betas"][1] ** s["t"])
        denominator = r(r(r(v.sqrt()) / root) + o["eps"])
        return r(p - o["lr"] / (1 - o["betas"][0] ** s["t"]) * m / denominator)

    def NpuFusedLamb(self, p, g, s):
        o, r = self.o, self.r
        m, v = self.moments(p, g, s, *o["betas"])
        u = r(r(m / r(r(v.sqrt()) + o["eps"])) + o["weight_decay"] * p)
        w, a = min(float(p.norm()), 10.0), float(u.norm())
        ratio = 1.0 if o["adam"] or w == 0 or a == 0 else w / a
        return r(p - o["lr"] * ratio * u)

    def NpuFusedBertAdam(self, p, g, s):
        o, r = self.o, self.r
        m, v = self.moments(p, g, s, o["b1"], o["b2"])
        u = r(r(m / r(r(v.sqrt()) + o["e"])) + o["weight_decay"] * p)
        return r(p - r(o["lr"] * self.factor(s["t"] - 1) * u))

    def NpuFusedAdadelta(self, p, g, s):
        o, r, zero = self.o, self.r, torch.zeros_like(p)
        g = r(g + o["weight_decay"] * p)
        s["square_avg"] = r(r(o["rho"] * s.get("square_avg", zero)) + (1 - o["rho"]) * g * g)
        before = s.get("acc_delta", zero)
        d = r(r((before + o["eps"]).sqrt()) / r((s["square_avg"] + o["eps"]).sqrt()) * g)
        s["acc_delta"] = r(r(o["rho"] * before) + (1 - o["rho"]) * d * d)
        return r(p - o["lr"] * d)

    def NpuFusedRMSprop(self, p, g, s):
        o, r, zero = self.o, self.r, torch.zeros_like(p)
        g = r(g + o["weight_decay"] * p)
        v = s["square_avg"] = r(r(o["alpha"] * s.get("square_avg", zero)) + (1 - o["alpha"]) * g * g)
        u = r(g / r(r(v.sqrt()) + o["eps"]))
        s["momentum_buffer"] = r(r(o["momentum"] * s.get("momentum_buffer", zero)) + u)
        return r(p - o["lr"] * s["momentum_buffer"])

    def NpuFusedRMSpropTF(self, p, g, s):
        o, r, zero = self.o, self.r, torch.zeros_like(p)
        if o["decoupled_decay"]:
            p = r(p - o["weight_decay"] * p)
        else:
            g = r(g + o["weight_decay"] * p)
        v = s.get("square_avg", torch.ones_like(p))
        v = s["square_avg"] = r(v + (1 - o["alpha"]) * r(g * g - v))
        if o["centered"]:
            a = s.get("grad_avg", zero)
            a = s["grad_avg"] = r(a + (1 - o["alpha"]) * r(g - a))
            v = r(v - a * a)
        u = r(g / r((v + o["eps"]).sqrt()))
        if not o["momentum"]:
            return r(p - o["lr"] * u)
        inside, outside = (o["lr"], 1.0) if o["lr_in_momentum"] else (1.0, o["lr"])
        s["momentum_buffer"] = r(r(o["momentum"] * s.get("momentum_buffer", zero)) + inside * u)
        return r(p - outside * s["momentum_buffer"])

    def NpuFusedAdamP(self, p, g, s):
        o, r = self.o, self.r
        (beta1, beta2), eps = o["betas"], o["eps"]
        m, v = self.moments(p, g, s, beta1, beta2)
        u = r(beta1 * m + (1 - beta1) * g) if o["nesterov"] else m
        u = r(u / r(r(v.sqrt()) / math.sqrt(1 - beta2 ** s["t"]) + eps))
        keep = 1.0
        for view in ((len(p), -1), (1, -1)) if p.dim() > 1 else ():
            x, y, z = p.reshape(view), g.reshape(view), u.reshape(view)
            length = x.norm(dim=1) + eps
            cos = (x * y).sum(1).abs() / (y.norm(dim=1) + eps) / length
            if cos.max() < o["delta"] / math.sqrt(x.shape[1]):
                n = x / length[:, None]
                u, keep = r(z - n * (n * z).sum(1, keepdim=True)).view_as(p), o["wd_ratio"]
                break
        p = r(p * (1 - o["lr"] * o["weight_decay"] * keep))
        return r(p - o["lr"] / (1 - beta1 ** s["t"]) * u)

    def factor(self, s):
        total, w = self.o["t_total"], self.o["warmup"]
        if total == -1:
            return 1.0
        x = s / total
        if x < w:
            return x / w
        return {
            "warmup_constant": lambda: 1.0,
            "warmup_linear": lambda: max((x - 1) / (w - 1), 0.0),
            "warmup_poly": lambda: math.sqrt(max(1 - x, 0.0)),
            "warmup_cosine": lambda: 0.5 * (1 + math.cos(math.pi * x)),
        }[self.o["schedule"]]()


def make(name, params, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return getattr(npu, name)(params, **options)


# recorded results


def flat(lists):
    return [*itertools.chain.from_iterable(lists)]


class Golden:
    """A recorded run of upstream, and ours with the same parameters, groups and options."""

    def __init__(self, case, engine):
        self.case = case
        kinds = zip(flat(case["shapes"]), flat(case["dtypes"]), strict=True)
        self.params = [
            torch.nn.Parameter(torch.tensor(values, dtype=getattr(torch, dtype[6:])).reshape(shape))
            for values, (shape, dtype) in zip(case["init"], kinds, strict=True)
        ]
        rest = iter(self.params)
        groups = [
            {"params": [next(rest) for _ in shapes], **case["group_kwargs"].get(str(i), {})}
            for i, shapes in enumerate(case["shapes"])
        ]
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in case["kwargs"].items()}
        self.options = options
        self.optimizer = make(case["cls"], groups, engine=engine, **options)

    def run(self):
        """For every step the index of each parameter, its value and the recorded one."""
        for grads, recorded in zip(self.case["grads"], self.case["params_after_each_step"], strict=True):
            for p, g in zip(self.params, grads, strict=True):
                p.grad = torch.tensor(g, dtype=p.dtype).reshape(p.shape)
            self.optimizer.step()
            for i, (p, values) in enumerate(zip(self.params, recorded, strict=True)):
                yield i, p.detach().clone(), torch.tensor(values, dtype=p.dtype).reshape(p.shape)

    def final_states(self):
        for i, recorded in enumerate(self.case["final_state"]):
            p = self.params[i]
            ours = self.optimizer.state[p]
            assert ours.keys() == recorded.keys()
            for key in recorded.keys() - {"step"}:
                yield i, ours[key], torch.tensor(recorded[key], dtype=p.dtype).reshape(p.shape)


def describe(case):
    options = {**case["kwargs"], **({"groups": 2} if case["group_kwargs"] else {})}
    dtypes = "-fp16" if "torch.float16" in flat(case["dtypes"]) else ""
    return case["cls"] + dtypes + "".join(f"-{k}={v}" for k, v in options.items())


def test_there_are_31_recorded_runs_of_every_class():
    assert len(GOLDENS) == 31
    # of the others there are none here
    others = {"NpuFusedAdadelta", "NpuFusedRMSprop", "NpuFusedRMSpropTF", "NpuFusedAdamP"}
    assert {case["cls"] for case in GOLDENS} == OPTIONS.keys() - others


@pytest.mark.parametrize("case", GOLDENS, ids=describe)
def test_upstream_results_in_float32_at_every_step_and_in_the_final_state(case, engine):
    golden, compared = Golden(case, engine), 0
    for _, ours, recorded in (*golden.run(), *golden.final_states()):
        if ours.dtype == torch.float32:
            torch.testing.assert_close(ours, recorded, rtol=3e-6, atol=1e-6)
            compared += 1
    assert compared >= len(case["grads"])


def half(x):
    return x.half().double()


def ulp(x):
    """The distance of neighbours in float16, at the size of x."""
    return torch.exp2(x.double().abs().clamp(min=2.0**-14).log2().floor() - 10)


@pytest.mark.parametrize("case", [c for c in GOLDENS if "torch.float16" in flat(c["dtypes"])], ids=describe)
def test_upstream_results_in_float16_differ_only_by_the_rounding_of_its_intermediate_results(case, engine):
    """Where a result is computed in float32 and upstream in float16, how far may they be apart? As far as the
    same formula is from itself, when it is rounded after every operation and when only what is stored is: the
    one must give the recorded numbers and the other ours, both within 2 ulp."""
    golden = Golden(case, engine)
    halves = [i for i, p in enumerate(golden.params) if p.dtype == torch.float16]
    params = [golden.params[i] for i in halves]
    upstream = Exact(case["cls"], params, golden.options, each=half, stored=half)
    ours = Exact(case["cls"], params, golden.options, stored=half)
    largest, steps = [p.detach().abs() for p in params], golden.run()
    for _ in case["grads"]:
        results = {i: (p, recorded) for i, p, recorded in (next(steps) for _ in golden.params)}
        for exact in (upstream, ours):
            exact.step([p.grad for p in params])
        for k, i in enumerate(halves):
            # a difference of two numbers has the rounding of the larger one
            largest[k] = torch.maximum(largest[k], results[i][1].abs())
            assert ((ours.params[k] - results[i][0]).abs() <= 2 * ulp(largest[k])).all()
            assert ((upstream.params[k] - results[i][1]).abs() <= 2 * ulp(largest[k])).all()
    states = [(value, recorded) for i, value, recorded in golden.final_states() if i in halves]
    assert halves
    assert states
    assert all(((value.double() - recorded).abs() <= 2 * ulp(recorded)).all() for value, recorded in states)


# whatever happens between two steps


class Twin:
    """Ours and the exact one on equal parameters; `step` feeds both the same gradients and compares."""

    def __init__(self, name, shapes=((4, 3), (5,), (300,)), dtype=torch.float32, **options):
        self.name, self.options = name, {**OPTIONS[name], **options}
        self.params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
        self.optimizer = make(name, self.params, **self.options)
        self.exact = Exact(name, self.params, self.options)
        self.tolerance = (
            {"rtol": 1e-5, "atol": 2e-6} if dtype != torch.float64 else {"rtol": 1e-12, "atol": 1e-14}
        )

    def set_grads(self, skip=()):
        for i, p in enumerate(self.params):
            p.grad = None if i in skip else torch.randn_like(p)

    def step(self, skip=()):
        self.set_grads(skip)
        self.step_with_these_grads()

    def step_with_these_grads(self):
        self.optimizer.step()
        self.exact.step([p.grad for p in self.params])
        self.compare()

    def compare(self):
        for p, q, states in zip(self.params, self.exact.params, self.exact.states, strict=True):
            torch.testing.assert_close(p.detach().double(), q, **self.tolerance)
            found = self.optimizer.state.get(p, {})
            assert found.keys() == (STATES[self.name] if states else set())
            for key in states.keys() - {"t"}:
                torch.testing.assert_close(found[key].double(), states[key], **self.tolerance)
            if "step" in found:
                assert found["step"] == states["t"]


@pytest.fixture
def twin(name):
    twin = Twin(name)
    twin.step()
    twin.step()
    return twin


@classes
def test_gradients_may_be_replaced_zeroed_or_dropped(twin):
    module = torch.nn.ParameterList(twin.params)
    for reset in (
        lambda: None,
        module.zero_grad,
        twin.optimizer.zero_grad,
        lambda: twin.optimizer.zero_grad(set_to_none=True),
        lambda: twin.optimizer.zero_grad(True),
    ):
        reset()
        for p in twin.params:
            added = torch.randn_like(p)
            p.grad = added if p.grad is None else p.grad + added
        twin.step_with_these_grads()
    for p in twin.params:
        p.grad = None
    twin.step()


@classes
def test_zero_grad_keeps_gradients_and_fills_them_with_zeros_unless_told_otherwise(twin):
    grads = [p.grad for p in twin.params]
    twin.optimizer.zero_grad()
    assert all(p.grad is g and not g.any() for p, g in zip(twin.params, grads, strict=True))
    twin.optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in twin.params)


@classes
def test_parameters_may_be_given_new_memory(twin):
    for p in twin.params:
        p.data = p.data.clone()
    twin.step()
    for i, p in enumerate(twin.params):
        p.data = torch.randn_like(p)
        twin.exact.params[i] = p.detach().double()
    twin.step()
    torch.nn.ParameterList(twin.params).to(torch.float64).to(torch.float32)
    twin.step()


@pytest.mark.gpu
@classes
def test_a_model_may_go_to_the_cpu_and_back(name):
    model = torch.nn.Linear(4, 3).cuda()
    optimizer = make(name, model.parameters(), **OPTIONS[name])
    exact = Exact(name, [p.cpu() for p in model.parameters()], OPTIONS[name])
    for device in ("cuda", "cpu", "cpu", "cuda", "cuda"):
        model.to(device)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        exact.step([p.grad.cpu() for p in model.parameters()])
        for p, q in zip(model.parameters(), exact.params, strict=True):
            torch.testing.assert_close(p.detach().cpu().double(), q, rtol=1e-5, atol=2e-6)


@classes
def test_a_parameter_may_gain_or_lose_its_gradient_and_counts_its_own_steps(name):
    twin = Twin(name)
    for skip in ((0,), (0,), (), (1, 2), (0, 1), (), (2,)):
        twin.step(skip)


@classes
def test_a_step_without_any_gradient_is_a_no_op(name):
    twin = Twin(name)
    twin.step(skip=(0, 1, 2))
    assert not twin.optimizer.state_dict()["state"]
    twin.step()
    twin.step(skip=(0, 1, 2))
    twin.step()


@classes
def test_a_closure_may_call_backward_and_its_value_is_returned(twin):
    def closure():
        assert torch.is_grad_enabled()
        twin.optimizer.zero_grad()
        loss = sum(p.square().sum() for p in twin.params)
        loss.backward()
        return loss

    with torch.no_grad():
        loss = twin.optimizer.step(closure)
    assert loss.requires_grad
    assert all(p.grad.any() for p in twin.params)
    twin.exact.step([p.grad for p in twin.params])
    twin.compare()


@classes
def test_a_group_may_be_added_after_a_step(name):
    # clipping by group would make two of one
    options = {"max_grad_norm": -1} if name == "NpuFusedBertAdam" else {}
    twin = Twin(name, **options)
    twin.step()
    late = torch.nn.Parameter(torch.randn(7))
    twin.optimizer.add_param_group({"params": [late]})
    twin.params.append(late)
    twin.exact.params.append(late.detach().double().clone())
    twin.exact.states.append({})
    twin.step()
    twin.step()


@classes
def test_a_checkpoint_may_be_loaded_after_a_step(twin):
    saved = copy.deepcopy((twin.optimizer.state_dict(), [p.detach().clone() for p in twin.params], twin.exact))
    twin.step()
    twin.step()
    twin.optimizer.load_state_dict(saved[0])
    twin.exact = saved[2]
    with torch.no_grad():
        for p, q in zip(twin.params, saved[1], strict=True):
            p.copy_(q)
    twin.compare()
    twin.step()


@classes
def test_a_checkpoint_of_upstream_may_be_loaded(name):
    """There a step count is a number, and groups have the documented options only."""
    twin = Twin(name)
    twin.step()
    twin.step()
    saved = twin.optimizer.state_dict()
    own = {*inspect.signature(getattr(npu, name)).parameters} | {"params"}
    for state in saved["state"].values():
        if "step" in state:
            state["step"] = int(state["step"])
    groups = [{k: v for k, v in group.items() if k in own} for group in saved["param_groups"]]
    twin.optimizer = make(name, twin.params, lr=0.5)
    twin.optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
    twin.step()


@pytest.mark.parametrize("name", ["NpuFusedSGD", "NpuFusedAdam", "NpuFusedAdamW"])
def test_checkpoints_of_torch_optim_work_in_both_directions(twin):
    theirs = getattr(torch.optim, twin.name.removeprefix("NpuFused"))(twin.params, **twin.options)
    theirs.load_state_dict(twin.optimizer.state_dict())
    ours, twin.optimizer = twin.optimizer, theirs
    twin.step()
    ours.load_state_dict(theirs.state_dict())
    twin.optimizer = ours
    twin.step()


@classes
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_goes_on_like_the_original(twin, copied):
    twin.params, twin.optimizer = copied((twin.params, twin.optimizer))
    assert twin.optimizer.param_groups[0]["params"][0] is twin.params[0]
    assert twin.optimizer.is_fused_optimizer
    twin.step()
    twin.step()


@classes
def test_float64_parameters_are_computed_in_float64(name):
    twin = Twin(name, dtype=torch.float64)
    for _ in range(3):
        twin.step()


@classes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_are_computed_in_float32(name, dtype, engine):
    """Off by the rounding of what is stored, a few times over."""
    params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((4, 3), (40,))]
    optimizer = make(name, params, engine=engine, **OPTIONS[name])
    exact = Exact(name, params, OPTIONS[name], stored=lambda x: x.to(dtype).double())
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        exact.step([p.grad for p in params])
    for p, q in zip(params, exact.params, strict=True):
        allowed = 3 * torch.finfo(dtype).eps * q.abs().clamp(min=1)
        assert ((p.double() - q).abs() <= allowed).all()
        assert p.dtype == optimizer.state[p][next(iter(STATES[name] - {"step"}))].dtype == dtype


@classes
def test_float16_gradients_of_zero_give_numbers(name):
    """Computed in float16, eps would be 0 and this 0 / 0."""
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = make(name, [p], lr=0.1)
    p.grad = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float16)
    optimizer.step()
    assert p.isfinite().all()
    assert p[2] < p[0]


def test_lamb_norms_of_float16_tensors_do_not_overflow(engine):
    """The squares of 600 do, and of 1000 elements their sum would."""
    p = torch.nn.Parameter(torch.full((1000,), 600.0, dtype=torch.float16))
    p.grad = torch.ones_like(p)
    optimizer = npu.NpuFusedLamb([p], lr=10.0, engine=engine)
    exact = Exact("NpuFusedLamb", [p], {"lr": 10.0})
    exact.step([p.grad])
    optimizer.step()
    assert (p != 600).all()
    torch.testing.assert_close(p.detach().double(), exact.params[0], rtol=1e-3, atol=0)


@classes
def test_any_memory_layout_is_updated_correctly(name):
    tensors = [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 4).t(),
        torch.randn(9, 8)[::2, 1:5],
    ]
    params = [t.requires_grad_() for t in tensors]
    optimizer = make(name, params, **OPTIONS[name])
    exact = Exact(name, params, OPTIONS[name])
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape).flip(0).to(memory_format=torch.preserve_format)
        params[1].grad = torch.randn(params[1].shape[::-1]).t()
        optimizer.step()
        exact.step([p.grad for p in params])
        for p, q in zip(params, exact.params, strict=True):
            torch.testing.assert_close(p.detach().double(), q, rtol=1e-5, atol=2e-6)
    assert not params[2].is_contiguous()


@classes
def test_sparse_gradients_are_refused_by_name(twin):
    before = [p.detach().clone() for p in twin.params]
    twin.set_grads()
    twin.params[2].grad = twin.params[2].grad.to_sparse()
    with pytest.raises(RuntimeError, match=f"{twin.name} does not support sparse gradients"):
        twin.optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(twin.params, before, strict=True))


# signatures and errors

SIGNATURES = {
    "NpuFusedSGD": "params, lr, momentum=0, dampening=0, weight_decay=0, nesterov=False",
    "NpuFusedAdam": "params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0, amsgrad=False",
    "NpuFusedAdamW": "params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, amsgrad=False",
    "NpuFusedLamb": "params, lr=0.001, betas=(0.9, 0.999), eps=1e-06, weight_decay=0, adam=False, "
    "use_global_grad_norm=False",
    "NpuFusedBertAdam": "params, lr=0.001, warmup=-1, t_total=-1, schedule='warmup_linear', b1=0.9, b2=0.999, "
    "e=1e-06, weight_decay=0.01, max_grad_norm=1.0",
    "NpuFusedAdamP": "params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0, delta=0.1, "
    "wd_ratio=0.1, nesterov=False",
    "npu_apply_fused_adamw_v2": "var, grad, m, v, max_grad_norm, step, lr=0.001, beta1=0.9, beta2=0.999, "
    "weight_decay=0.0, eps=1e-08, amsgrad=False, maximize=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_positional_arguments_and_defaults_are_as_documented(name):
    parameters = inspect.signature(getattr(npu, name)).parameters.values()
    plain = [p.replace(annotation=p.empty) for p in parameters if p.kind != p.KEYWORD_ONLY]
    found = ", ".join(str(p).replace(" = ", "=") for p in plain)
    # lr of SGD is required, but a group may have it
    assert found.replace("lr=None", "lr") == SIGNATURES[name]
    assert [p.name for p in parameters if p.kind == p.KEYWORD_ONLY] in ([], ["state_dtype", "engine"])


ADAM_ERRORS = [
    {"lr": -1.0},
    {"eps": -1e-8},
    {"betas": (-0.1, 0.9)},
    {"betas": (0.9, 1.0)},
    {"betas": (1.5, 0.9)},
]
ERRORS = {
    "NpuFusedSGD": [{"lr": -1.0}, {"momentum": -0.1}, {"weight_decay": -0.1}],
    "NpuFusedAdam": [*ADAM_ERRORS, {"weight_decay": -0.1}],
    "NpuFusedAdamW": [*ADAM_ERRORS, {"weight_decay": -0.1}],
    "NpuFusedLamb": ADAM_ERRORS,
    "NpuFusedAdamP": [*ADAM_ERRORS, {"weight_decay": -0.1}, {"delta": -0.1}, {"wd_ratio": -0.1}],
    "NpuFusedBertAdam": [
        *(
            {"lr": -1.0},
            {"warmup": -0.5},
            {"warmup": 1.0},
            {"b1": -0.1},
            {"b1": 1.0},
            {"b2": -0.1},
            {"b2": 1.0},
        ),
        *({"e": -1e-6}, {"schedule": "warmup_square"}),
    ],
}


@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name in ERRORS for wrong in ERRORS[name]])
def test_documented_mistakes_are_value_errors_that_show_the_value(name, wrong):
    (value,) = wrong.values()
    value = next((x for x in value if not 0 <= x < 1), None) if isinstance(value, tuple) else value
    with pytest.raises(ValueError, match=str(value)):
        getattr(npu, name)([torch.nn.Parameter(torch.ones(1))], **{"lr": 0.1, **wrong})


@pytest.mark.parametrize("handler", [ValueError, TypeError])
@pytest.mark.parametrize("wrong", [{"momentum": 0}, {"momentum": 0.9, "dampening": 0.1}])
def test_nesterov_without_momentum_is_what_the_document_says_and_what_the_code_raises(handler, wrong):
    with pytest.raises(handler, match="nesterov=True needs"):
        npu.NpuFusedSGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, nesterov=True, **wrong)


def test_sgd_needs_a_learning_rate_for_every_group():
    p, q = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    with pytest.raises(ValueError, match="no learning rate"):
        npu.NpuFusedSGD([p])
    with pytest.raises(ValueError, match="no learning rate"):
        npu.NpuFusedSGD([{"params": [p], "lr": 0.1}, {"params": [q]}])
    optimizer = npu.NpuFusedSGD([{"params": [p], "lr": 0.1}])
    with pytest.raises(ValueError, match="no learning rate"):
        optimizer.add_param_group({"params": [q]})
    p.grad = torch.ones(1)
    optimizer.step()
    assert p.item() == pytest.approx(0.9)


@classes
def test_state_dtype_and_engine_are_passed_on(name):
    p = torch.nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
    p.grad = torch.randn_like(p)
    optimizer = make(name, [p], state_dtype=torch.float32, engine="torch", **OPTIONS[name])
    optimizer.step()
    assert all(optimizer.state[p][key].dtype == torch.float32 for key in STATES[name])
    with pytest.raises(ValueError, match="Invalid engine"):
        make(name, [p], engine="npu", **OPTIONS[name])


# clipping


@classes
@pytest.mark.parametrize("norm_type", [2, 1, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e4])
def test_clipping_is_torch_s_over_all_groups_and_dtypes(name, norm_type, max_norm):
    dtypes = torch.float32, torch.float16, torch.bfloat16
    params = [torch.nn.Parameter(torch.randn(30, dtype=dtype)) for dtype in dtypes]
    groups = [{"params": params[:1]}, {"params": params[1:]}, {"params": torch.nn.Parameter(torch.ones(1))}]
    optimizer = make(name, groups, **OPTIONS[name])
    for p in params:
        p.grad = torch.randn_like(p)
    grads = [p.grad.double() for p in params]
    norm = torch.linalg.vector_norm(torch.cat(grads), norm_type)
    found = optimizer.clip_grad_norm_fused_(max_norm, norm_type)
    assert found.dtype == torch.float32
    assert found.shape == ()
    torch.testing.assert_close(found.double(), norm, rtol=2e-3 if norm_type == 1 else 1e-3, atol=0)
    factor = min(1.0, max_norm / (float(norm) + 1e-6))
    for p, g in zip(params, grads, strict=True):
        rounding = 4 * torch.finfo(p.dtype).eps
        torch.testing.assert_close(p.grad.double(), g * factor, rtol=rounding + 1e-3 * (factor < 1), atol=1e-6)
        assert factor < 1 or torch.equal(p.grad.double(), g)


@classes
@pytest.mark.parametrize(("norm_type", "norm"), [(2, 12000.0), (1, 240000.0), (math.inf, 600.0)])
def test_clipping_takes_the_norm_in_float32(name, norm_type, norm):
    """In float16 the square of 600 is infinite, and so is the sum of 400."""
    p = torch.nn.Parameter(torch.zeros(400, dtype=torch.float16))
    p.grad = torch.full_like(p, 600.0)
    found = make(name, [p], **OPTIONS[name]).clip_grad_norm_fused_(norm / 2, norm_type)
    assert found == norm
    assert found.dtype == torch.float32
    assert torch.equal(p.grad, torch.full_like(p, 300.0))


@classes
def test_clipping_without_gradients_gives_zero(name):
    p = torch.nn.Parameter(torch.ones(3))
    norm = make(name, [p], **OPTIONS[name]).clip_grad_norm_fused_(1.0)
    assert norm == 0
    assert norm.dtype == torch.float32
    assert p.grad is None


# BertAdam


@pytest.mark.parametrize("schedule", ["warmup_constant", "warmup_linear", "warmup_poly", "warmup_cosine"])
@pytest.mark.parametrize("warmup", [-1, 0, 0.3])
def test_schedules_before_during_and_past_the_end(schedule, warmup, engine):
    p = torch.nn.Parameter(torch.tensor([1.0]))
    options = {"lr": 0.1, "warmup": warmup, "t_total": 10, "schedule": schedule, "weight_decay": 0.0}
    optimizer = make("NpuFusedBertAdam", [p], engine=engine, **options)
    exact = Exact("NpuFusedBertAdam", [p], options)
    factors = [exact.factor(s) for s in range(13)]
    for s in range(13):
        before = p.detach().clone()
        p.grad = torch.randn(1)
        optimizer.step()
        exact.step([p.grad])
        torch.testing.assert_close(p.detach().double(), exact.params[0], rtol=1e-5, atol=1e-6)
        assert torch.equal(p, before) == (factors[s] == 0)
    if schedule in ("warmup_poly", "warmup_linear"):
        assert factors[10:] == [0, 0, 0]


def test_a_resumed_run_resumes_its_schedule():
    twin = Twin("NpuFusedBertAdam")
    for _ in range(4):
        twin.step()
    saved = copy.deepcopy(twin.optimizer.state_dict())
    assert [state["step"] for state in saved["state"].values()] == [4, 4, 4]
    twin.optimizer = npu.NpuFusedBertAdam(twin.params, lr=7.0)
    twin.optimizer.load_state_dict(saved)
    twin.step()
    twin.step()


def test_a_group_clips_by_its_own_norm_and_limit_and_leaves_gradients_alone(engine):
    params = [torch.nn.Parameter(torch.randn(5)) for _ in range(4)]
    groups = [{"params": params[:2]}, {"params": params[2:], "max_grad_norm": 0.1}]
    optimizer = npu.NpuFusedBertAdam(groups, lr=0.1, max_grad_norm=0.5, e=1e-2, engine=engine)
    halves = [
        Exact("NpuFusedBertAdam", ps, {"lr": 0.1, "e": 1e-2, "max_grad_norm": limit})
        for ps, limit in ((params[:2], 0.5), (params[2:], 0.1))
    ]
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(5)
        before = [p.grad.clone() for p in params]
        optimizer.step()
        for half_of, ps in zip(halves, (params[:2], params[2:]), strict=True):
            half_of.step([p.grad for p in ps])
        assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))
        for p, q in zip(params, halves[0].params + halves[1].params, strict=True):
            torch.testing.assert_close(p.detach().double(), q, rtol=1e-5, atol=2e-6)


def test_a_group_clips_each_dtype_by_its_own_norm():
    params = [torch.nn.Parameter(torch.randn(6)), torch.nn.Parameter(torch.randn(6).half())]
    options = {"lr": 0.1, "e": 1e-2, "max_grad_norm": 0.5}
    optimizer = npu.NpuFusedBertAdam(params, **options)
    exacts = [Exact("NpuFusedBertAdam", [p], options) for p in params]
    for p, exact in zip(params, exacts, strict=True):
        p.grad = torch.randn_like(p)
        exact.step([p.grad])
    optimizer.step()
    torch.testing.assert_close(params[0].detach().double(), exacts[0].params[0], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(params[1].detach().double(), exacts[1].params[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("in_a_group", [True, False])
def test_a_linear_schedule_that_starts_at_half_the_rate_warns_once_and_says_how_not_to(in_a_group):
    p, total = torch.nn.Parameter(torch.ones(1)), {"t_total": 10}
    params = [{"params": [p], **total}, {"params": torch.nn.Parameter(torch.ones(1)), **total}]
    p.grad = torch.ones(1)
    with pytest.warns(UserWarning, match="warmup=0 to start at the full rate") as caught:
        optimizer = npu.NpuFusedBertAdam(params if in_a_group else [p], lr=0.1, **({} if in_a_group else total))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"warmup": 0, "t_total": 10},
        {"warmup": 0.1, "t_total": 10},
        {"schedule": "warmup_poly", "t_total": 10},
    ],
)
def test_other_schedules_do_not_warn(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        npu.NpuFusedBertAdam([torch.nn.Parameter(torch.ones(1))], lr=0.1, **options)


# Lamb


@pytest.mark.parametrize("size", [0.1, 10.0])
def test_lamb_divides_gradients_by_their_norm_over_everything_if_that_is_above_one(size, engine):
    params = [torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.randn(7).half())]
    params.append(torch.nn.Parameter(torch.randn(3)))
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
    # a large eps: without bias correction, and with a small one, the size of gradients would hardly matter
    optimizer = npu.NpuFusedLamb(groups, lr=0.01, eps=0.1, use_global_grad_norm=True, adam=True, engine=engine)
    options = [{"lr": lr, "eps": 0.1, "adam": True} for lr in (0.01, 0.01, 0.02)]
    exacts = [Exact("NpuFusedLamb", [p], o) for p, o in zip(params, options, strict=True)]
    for _ in range(3):
        for p in params:
            p.grad = (size * torch.randn(p.shape)).to(p.dtype)
        before = [p.grad.clone() for p in params]
        norm = float(torch.cat([g.double().flatten() for g in before]).norm())
        assert (norm > 1) == (size == 10.0)
        optimizer.step()
        for p, g, exact in zip(params, before, exacts, strict=True):
            exact.step([g.double() / max(norm, 1.0)])
            accuracy = 2e-3 if p.dtype == torch.float16 else 1e-5
            torch.testing.assert_close(p.detach().double(), exact.params[0], rtol=accuracy, atol=accuracy)
            assert torch.equal(p.grad, g)


def test_lamb_s_switches_act_for_a_single_group_and_when_they_change(engine):
    params = [torch.nn.Parameter(torch.randn(5)) for _ in range(3)]
    groups = [{"params": params[0]}, {"params": params[1], "adam": True}]
    groups.append({"params": params[2], "use_global_grad_norm": True})
    optimizer = npu.NpuFusedLamb(groups, lr=0.01, eps=0.1, engine=engine)
    exacts = [
        Exact("NpuFusedLamb", [p], {"lr": 0.01, "eps": 0.1, "adam": i == 1}) for i, p in enumerate(params)
    ]
    clips = [False, False, True]
    for k in range(6):
        # one at a time: each must be noticed by itself
        if k == 2:
            clips = [True, True, False]
            for group, clip in zip(optimizer.param_groups, clips, strict=True):
                group["use_global_grad_norm"] = clip
        if k == 4:
            for group, exact in zip(optimizer.param_groups, exacts, strict=True):
                group["adam"] = exact.o["adam"] = not group["adam"]
        for p in params:
            p.grad = 3 * torch.randn(5)
        norm = float(torch.cat([p.grad.double() for p in params]).norm())
        assert norm > 1
        optimizer.step()
        for p, exact, clip in zip(params, exacts, clips, strict=True):
            exact.step([p.grad.double() / (norm if clip else 1.0)])
            torch.testing.assert_close(p.detach().double(), exact.params[0], rtol=1e-5, atol=2e-6)


def test_lamb_divides_by_the_norm_itself_with_nothing_added(engine):
    p = torch.nn.Parameter(torch.randn(6, dtype=torch.float64))
    optimizer = npu.NpuFusedLamb([p], lr=0.1, eps=0.1, adam=True, use_global_grad_norm=True, engine=engine)
    exact = Exact("NpuFusedLamb", [p], {"lr": 0.1, "eps": 0.1, "adam": True})
    p.grad = torch.randn_like(p)
    assert p.grad.norm() > 1
    optimizer.step()
    exact.step([p.grad / p.grad.norm()])
    torch.testing.assert_close(p.detach(), exact.params[0], rtol=1e-12, atol=1e-14)


def test_lamb_counts_no_weight_as_larger_than_ten_and_adapts_nothing_of_size_zero(engine):
    large, zero = torch.nn.Parameter(torch.full((400,), 5.0)), torch.nn.Parameter(torch.zeros(3))
    optimizer = npu.NpuFusedLamb([large, zero], lr=1.0, engine=engine)
    exact = Exact("NpuFusedLamb", [large, zero], {"lr": 1.0})
    for p in (large, zero):
        p.grad = torch.ones_like(p)
    optimizer.step()
    exact.step([large.grad, zero.grad])
    # |p| is 100, and counts as 10: the update has that norm
    assert float((large.detach() - 5).norm()) == pytest.approx(10, rel=1e-5)
    for p, q in zip((large, zero), exact.params, strict=True):
        torch.testing.assert_close(p.detach().double(), q, rtol=1e-5, atol=2e-6)


# the operator


def filled(dtype=torch.float32):
    values = {"var": 0.5, "grad": 0.5, "m": 0.9, "v": 0.9, "max_grad_norm": 0.9}
    return {name: torch.full((10, 10), value, dtype=dtype) for name, value in values.items()}


@pytest.mark.parametrize(("step", "var"), [(1, 0.40514034), (10, 0.46999559)])
@pytest.mark.parametrize("as_step", [int, lambda n: torch.full((1,), n), lambda n: torch.tensor(float(n))])
def test_the_operator_gives_the_recorded_values_of_the_document_s_example(step, var, as_step):
    t, count = filled(), as_step(step)
    untouched = copy.deepcopy((t["grad"], t["max_grad_norm"], count))
    result = npu.npu_apply_fused_adamw_v2(*t.values(), count, 1e-3, 0.9999, 0.9999, 0.0, 1e-8, False, False)
    assert result is None
    for name, value in (("var", var), ("m", 0.89995998), ("v", 0.89993501)):
        torch.testing.assert_close(t[name], torch.full((10, 10), value), rtol=2e-7, atol=0)
    assert torch.equal(t["grad"], untouched[0])
    assert torch.equal(t["max_grad_norm"], untouched[1])
    assert torch.equal(torch.as_tensor(count), torch.as_tensor(untouched[2]))


def reference_adamw(var, grad, m, v, largest, step, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize):
    g, p = grad.double() * (-1 if maximize else 1), var.double() * (1 - lr * weight_decay)
    m = m.double() + (g - m.double()) * (1 - beta1)
    v = v.double() * beta2 + g * g * (1 - beta2)
    largest = torch.maximum(largest.double(), v) if amsgrad else largest.double()
    root = ((largest if amsgrad else v) / (1 - beta2**step)).sqrt()
    return p - lr / (1 - beta1**step) * m / (root + eps), m, v, largest


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("amsgrad", [True, False])
@pytest.mark.parametrize("largest", DTYPES)
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("var", DTYPES)
def test_the_operator_takes_all_documented_combinations_of_dtypes(var, grad, largest, amsgrad):
    dtypes = (var, grad, var, var, largest)
    tensors = [torch.rand(37, dtype=dtype) + 0.1 for dtype in dtypes]
    options = (3, 1e-2, 0.9, 0.99, 0.1, 1e-6, amsgrad, True)
    before = [t.clone() for t in tensors]
    exact = reference_adamw(*before, *options)
    npu.npu_apply_fused_adamw_v2(*tensors[:5], torch.tensor([3]), *options[1:])
    assert torch.equal(tensors[1], before[1])
    for i, expected in zip((0, 2, 3, 4), exact, strict=True):
        assert tensors[i].dtype == dtypes[i]
        rounding = max(torch.finfo(dtypes[i]).eps, 4 * torch.finfo(torch.float32).eps)
        torch.testing.assert_close(tensors[i].double(), expected, rtol=rounding, atol=rounding / 10)
    assert amsgrad or torch.equal(tensors[4], before[4])


def test_the_operator_takes_the_names_of_upstream_s_code_too():
    t, same = filled(), filled()
    npu.npu_apply_fused_adamw_v2(*same.values(), 2, lr=0.1, amsgrad=True)
    names = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    npu.npu_apply_fused_adamw_v2(
        **dict(zip(names, t.values(), strict=True)), state_step=2, lr=0.1, amsgrad=True
    )
    assert all(torch.equal(t[name], same[name]) for name in t)
    assert (t["var"] != 0.5).all()


def test_the_operator_names_arguments_that_are_missing_or_given_twice():
    t = filled()
    apply = functools.partial(npu.npu_apply_fused_adamw_v2, t["var"], t["grad"], t["m"])
    with pytest.raises(TypeError, match=r"missing.*'v'.*'max_grad_norm'.*'step'"):
        apply()
    with pytest.raises(TypeError, match="multiple values for argument 'var'"):
        apply(t["v"], None, 1, param=t["var"])
    with pytest.raises(TypeError, match="got 'step' and 'state_step', two names of one argument"):
        apply(t["v"], None, step=1, state_step=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'exp_avg_square'"):
        apply(t["v"], None, 1, exp_avg_square=t["v"])
    assert all(torch.equal(t[name], fresh) for name, fresh in filled().items())


def test_the_operator_s_amsgrad_needs_the_largest_v_and_nothing_else_does():
    t = filled()
    del t["max_grad_norm"]
    with pytest.raises(ValueError, match=r"amsgrad=True needs max_grad_norm.*torch\.zeros_like"):
        npu.npu_apply_fused_adamw_v2(**t, max_grad_norm=None, step=1, amsgrad=True)
    assert (t["var"] == 0.5).all()
    npu.npu_apply_fused_adamw_v2(**t, max_grad_norm=torch.zeros(3, dtype=torch.int8), step=1)
    assert (t["var"] != 0.5).all()


@pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones(10, 10, dtype=torch.float64), None])
@pytest.mark.parametrize("argument", ["var", "grad", "m", "v", "max_grad_norm"])
def test_the_operator_writes_nothing_if_an_argument_is_wrong(argument, wrong):
    t = {**filled(), argument: wrong}
    with pytest.raises((TypeError, ValueError)):
        npu.npu_apply_fused_adamw_v2(**t, step=1, amsgrad=True)
    assert all(torch.equal(t[name], fresh) for name, fresh in filled().items() if name != argument)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "lr_in_momentum": False},
        {"momentum": 0.9, "centered": True, "weight_decay": 0.1},
        {"centered": True, "weight_decay": 0.1, "decoupled_decay": True},
    ],
    ids=str,
)
def test_rmsprop_of_tensorflow_in_all_its_ways(options, engine):
    params = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((5, 3), (7,))]
    exact = Exact("NpuFusedRMSpropTF", params, options)
    optimizer = npu.NpuFusedRMSpropTF(params, engine=engine, **options)
    for _ in range(4):
        grads = [torch.randn_like(p) for p in params]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
        exact.step(grads)
    for p, q in zip(params, exact.params, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("mode", [0, 1])
def test_the_operator_that_averages(mode, bias_correction, dtype):
    grad, var = (torch.randn(40).to(dtype) for _ in range(2))
    m, v, s = torch.randn(40), torch.rand(40), torch.randn(40)
    step, lr, beta1, beta2, eps, keep, decay = 3, 0.1, 0.8, 0.9, 1e-3, 0.7, 0.2
    p, g, a, b, c = (t.double() for t in (var, grad, m, v, s))
    g = g + decay * p if mode == 0 else g
    a, b = beta1 * a + (1 - beta1) * g, beta2 * b + (1 - beta2) * g * g
    bias1, bias2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1, 1)
    u = (a / bias1) / ((b / bias2).sqrt() + eps) + (decay * p if mode == 1 else 0)
    p = p - lr * u
    c = keep * c + (1 - keep) * p
    found = npu.npu_apply_fused_ema_adamw(
        grad, var, m, v, s, torch.tensor([step]), lr, keep, beta1, beta2, eps, mode, bias_correction, decay
    )
    assert all(x is y for x, y in zip(found, (var, m, v, s), strict=True))
    for ours, exact in zip(found, (p, a, b, c), strict=True):
        tolerance = 1e-5 if ours.dtype == torch.float32 else 8e-3
        torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance)


def test_the_operator_that_averages_refuses_what_makes_no_sense():
    t = [torch.ones(2) for _ in range(5)]
    with pytest.raises(ValueError, match="Invalid mode: 2; use 0"):
        npu.npu_apply_fused_ema_adamw(*t, 1, mode=2)
    with pytest.raises(ValueError, match=r"s has shape \(3,\)"):
        npu.npu_apply_fused_ema_adamw(*t[:4], torch.ones(3), 1)
    with pytest.raises(TypeError, match=r"m is torch\.float64"):
        npu.npu_apply_fused_ema_adamw(*t[:2], t[2].double(), *t[3:], 1)
