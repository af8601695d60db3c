"""Groups of one optimizer with other rules, states and dtypes: clipping, skipping and statistics span them."""

import copy
import math

import pytest
import torch

import fusedstep
from fusedstep._torch.arguments import keyword
from fusedstep.optimizers.lamb import lamb as LAMB
from fusedstep.optimizers.sgd import plain_sgd as PLAIN_SGD

SHAPES = ((4, 3), (5,), (40,), (2, 2))

# options of each group, and those of all. What a group here calls `ema_decay` torch.optim does not know
MIXES = {
    "sgd": (
        fusedstep.SGD,
        torch.optim.SGD,
        [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"maximize": True}],
    ),
    "sgd-ema": (
        fusedstep.SGD,
        torch.optim.SGD,
        [{"ema_decay": 0.5}, {"momentum": 0.9}, {"momentum": 0.5, "ema_decay": 0.9}, {}],
    ),
    "adam": (
        fusedstep.Adam,
        torch.optim.Adam,
        [{"amsgrad": True}, {}, {"decoupled_weight_decay": True, "weight_decay": 0.1}, {"amsgrad": True}],
    ),
    "adamw-ema": (
        fusedstep.AdamW,
        torch.optim.AdamW,
        [{}, {"ema_decay": 0.9}, {"amsgrad": True, "ema_decay": 0.5}, {"amsgrad": True, "maximize": True}],
    ),
}
mixes = pytest.mark.parametrize("mix", MIXES)


class Mixed:
    """Ours and torch's, with a group for each parameter; torch's is clipped and skipped by hand."""

    def __init__(self, mix, engine, dtypes=(torch.float32,) * 4, **spanning):
        cls, theirs, groups = MIXES[mix]
        self.ours = [torch.nn.Parameter(torch.randn(s).to(d)) for s, d in zip(SHAPES, dtypes, strict=True)]
        self.theirs = [torch.nn.Parameter(p.detach().clone()) for p in self.ours]
        bare = [{k: v for k, v in group.items() if k != "ema_decay"} for group in groups]
        self.a = cls(self._groups(self.ours, groups), lr=1e-2, engine=engine, **spanning)
        self.b = theirs(self._groups(self.theirs, bare), lr=1e-2)
        self.decays = [group.get("ema_decay") for group in groups]
        self.averages = [p.detach().clone().float() for p in self.theirs]

    @staticmethod
    def _groups(params, groups):
        return [{"params": [p], **copy.deepcopy(group)} for p, group in zip(params, groups, strict=True)]

    def set_grads(self, skip=(), scale=1.0):
        for i, (p, q) in enumerate(zip(self.ours, self.theirs, strict=True)):
            p.grad = None if i in skip else torch.randn_like(p) * scale
            q.grad = None if i in skip else p.grad.clone()

    def step(self, skip=(), limit=None, norm_type=2.0, **how):
        self.set_grads(skip)
        norm = None
        if limit is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.theirs, limit, norm_type)
        before = [q.detach().clone() for q in self.theirs]
        self.a.step(**how)
        self.b.step()
        self.average(skip)
        self.compare()
        return before, norm

    def average(self, skip):
        for i, (q, decay) in enumerate(zip(self.theirs, self.decays, strict=True)):
            if decay is not None and i not in skip:
                self.averages[i].lerp_(q.detach().float(), 1 - decay)

    def compare(self):
        everything = zip(self.ours, self.theirs, self.averages, self.decays, strict=True)
        for p, q, average, decay in everything:
            exact = p.dtype in (torch.float32, torch.float64)
            near = {"rtol": 1e-5, "atol": 1e-6} if exact else {"rtol": 2e-2, "atol": 2e-2}
            torch.testing.assert_close(p.detach(), q.detach(), **near)
            for name, value in self.b.state[q].items():
                if value is not None:
                    torch.testing.assert_close(self.a.state[p][name], value, **near)
            if decay is not None and "ema" in self.a.state[p]:
                torch.testing.assert_close(self.a.state[p]["ema"].float(), average, **near)
            assert ("ema" in self.a.state[p]) <= (decay is not None)


@mixes
def test_groups_with_other_rules_step_as_in_torch(mix, engine):
    mixed = Mixed(mix, engine)
    for skip in ((), (1,), (), (0, 2), (0, 1, 2, 3), (3,)):
        mixed.step(skip)


# a largest element takes Triton's interpreter seconds
@pytest.mark.parametrize(("mix", "norm_type"), [*((mix, 2.0) for mix in MIXES), ("sgd-ema", math.inf)], ids=str)
def test_one_norm_clips_all_groups(mix, norm_type, engine):
    mixed = Mixed(mix, engine, max_grad_norm=0.5, norm_type=norm_type)
    for skip in ((), (1,), (), (0, 2)):
        mixed.step(skip, limit=0.5, norm_type=norm_type)


@mixes
def test_a_group_with_a_limit_of_its_own(mix, engine):
    """The norm is that of all gradients; only the group that has a limit is scaled down."""
    mixed = Mixed(mix, engine)
    mixed.a.param_groups[1]["max_grad_norm"] = 0.25
    for _ in range(3):
        mixed.set_grads()
        everything = torch.cat([p.grad.flatten() for p in mixed.theirs])
        mixed.theirs[1].grad *= 0.25 / (everything.norm() + 1e-6)
        mixed.a.step()
        mixed.b.step()
        mixed.average(())
        mixed.compare()


@mixes
@pytest.mark.parametrize("bad", [0, 2])
def test_nan_in_any_group_skips_all_of_them(mix, bad, engine):
    mixed = Mixed(mix, engine, skip_nonfinite=True, max_grad_norm=10.0, statistics=True)
    mixed.step(limit=10.0)
    states = copy.deepcopy(mixed.a.state_dict()["state"])
    before = [p.detach().clone() for p in mixed.ours]
    mixed.set_grads()
    mixed.ours[bad].grad.view(-1)[0] = math.nan
    mixed.a.step()
    assert mixed.a.step_was_skipped
    assert all(map(torch.equal, before, mixed.ours))
    for key, state in mixed.a.state_dict()["state"].items():
        assert all(torch.equal(value, states[key][name]) for name, value in state.items())
    seen = mixed.a.statistics()
    assert seen.skipped
    assert seen.nonfinites.tolist() == [float(i == bad) for i in range(4)]
    # as if it had not been
    mixed.step(limit=10.0)
    assert int(mixed.a.skipped_steps) == 1


@mixes
@pytest.mark.parametrize("limit", [None, 0.5])
def test_statistics_are_those_of_each_parameter_in_turn(mix, limit, engine):
    mixed = Mixed(mix, engine, statistics=True, max_grad_norm=limit)
    for skip in ((), (1,), (0, 3), ()):
        before, norm = mixed.step(skip, limit=limit)
        seen = mixed.a.statistics()
        norms = [math.nan if p.grad is None else float(p.grad.norm()) for p in mixed.ours]
        torch.testing.assert_close(seen.grad_norms.float(), torch.tensor(norms), equal_nan=True)
        present = [p for p in mixed.ours if p.grad is not None]
        total = torch.cat([p.grad.flatten() for p in present]).norm()
        torch.testing.assert_close(seen.grad_norm.float(), total)
        for i, (p, old) in enumerate(zip(mixed.ours, before, strict=True)):
            if p.grad is not None:
                torch.testing.assert_close(seen.param_norms[i].float(), p.detach().norm())
                change = (p.detach() - old).norm()
                torch.testing.assert_close(seen.update_norms[i].float(), change, rtol=1e-3, atol=1e-6)
        if limit is not None:
            torch.testing.assert_close(norm, total)
            torch.testing.assert_close(float(seen.clip_factor), min(1.0, limit / (float(norm) + 1e-6)))
        else:
            assert seen.clip_factor == 1


DTYPES = {
    "float32 and bfloat16": (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32),
    "all": (torch.bfloat16, torch.float64, torch.float16, torch.float32),
}


@mixes
@pytest.mark.parametrize("dtypes", DTYPES)
def test_dtypes_and_rules_are_mixed(mix, dtypes, engine):
    dtypes = [*DTYPES[dtypes]]
    if "adam" in mix:
        # where torch.optim computes in float16, eps is 0 and so is many a square
        dtypes = [torch.bfloat16 if dtype == torch.float16 else dtype for dtype in dtypes]
    mixed = Mixed(mix, engine, dtypes, statistics=True, max_grad_norm=1.0, skip_nonfinite=True)
    for skip in ((), (1,), ()):
        mixed.set_grads(skip)
        present = [p for p in mixed.ours if p.grad is not None]
        norm = torch.cat([p.grad.double().flatten() for p in present]).norm()
        for p in mixed.theirs:
            if p.grad is not None:
                p.grad.mul_(min(1.0, 1 / (float(norm) + 1e-6)))
        mixed.a.step()
        mixed.b.step()
        mixed.average(skip)
        mixed.compare()
        torch.testing.assert_close(mixed.a.statistics().grad_norm, norm)


@mixes
def test_gradients_are_unscaled_clipped_and_cleared_over_all_groups(mix, engine):
    mixed = Mixed(mix, engine, max_grad_norm=1.0)
    scaler = fusedstep.GradScaler("cpu", init_scale=8.0)
    for _ in range(3):
        mixed.set_grads()
        for p in mixed.ours:
            p.grad = scaler.scale(p.grad)
        torch.nn.utils.clip_grad_norm_(mixed.theirs, 1.0)
        scaler.step(mixed.a, zero_grad=True, set_to_none=False)
        scaler.update()
        mixed.b.step()
        mixed.average(())
        mixed.compare()
        assert not any(p.grad.any() for p in mixed.ours)


@mixes
def test_bits_do_not_depend_on_which_groups_there_are_besides(mix, engine):
    """Each group alone, in an optimizer of its own."""
    mixed = Mixed(mix, engine)
    cls, _, groups = MIXES[mix]
    alone = [torch.nn.Parameter(p.detach().clone()) for p in mixed.ours]
    optimizers = [cls([p], lr=1e-2, engine=engine, **group) for p, group in zip(alone, groups, strict=True)]
    for _ in range(3):
        mixed.set_grads()
        for p, q, optimizer in zip(alone, mixed.ours, optimizers, strict=True):
            p.grad = q.grad.clone()
            optimizer.step()
        mixed.a.step()
    for p, q, optimizer in zip(alone, mixed.ours, optimizers, strict=True):
        assert torch.equal(p, q)
        for name, value in optimizer.state[p].items():
            assert torch.equal(mixed.a.state[q][name], value)


@pytest.mark.parametrize("limit", [None, 1.0])
def test_lamb_with_an_average_in_one_group_and_mixed_dtypes(limit, engine):
    """Sixteen bits lose some, so that its sweeps store other things; each as in an optimizer of its own."""
    dtypes, decays = (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16), (None, None, 0.5, 0.9)
    params = [torch.nn.Parameter(torch.randn(s).to(d)) for s, d in zip(SHAPES, dtypes, strict=True)]
    alone = [torch.nn.Parameter(p.detach().clone()) for p in params]
    options = {"lr": 1e-2, "statistics": True, "skip_nonfinite": True, "engine": engine}
    groups = [{"params": [p], "ema_decay": decay} for p, decay in zip(params, decays, strict=True)]
    together = fusedstep.Lamb(groups, max_grad_norm=limit, **options)
    optimizers = [
        fusedstep.Lamb([p], max_grad_norm=None, ema_decay=decay, **options)
        for p, decay in zip(alone, decays, strict=True)
    ]
    for _ in range(3):
        for p in params:
            # of a norm that is not clipped
            p.grad = torch.randn_like(p) * 1e-3
        for p, q, optimizer in zip(alone, params, optimizers, strict=True):
            p.grad = q.grad.clone()
            optimizer.step()
        together.step()
        ratios = torch.cat([optimizer.statistics().trust_ratios for optimizer in optimizers])
        torch.testing.assert_close(together.statistics().trust_ratios, ratios)
    assert all(map(torch.equal, alone, params))


class LambOrSGD(fusedstep.Lamb):
    """Some groups need sums over whole tensors and a sweep more than others."""

    plain: bool = keyword(default=False, kw_only=True)
    rules = (LAMB, PLAIN_SGD)

    def rule_of(self, group):
        return PLAIN_SGD if group["plain"] else LAMB


@pytest.mark.parametrize("lamb_first", [True, False], ids=["lamb first", "sgd first"])
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("statistics", [False, True], ids=["", "statistics"])
def test_groups_that_sum_other_things(lamb_first, limit, statistics, engine):
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    halves = (ours[:2], ours[2:]), (theirs[:2], theirs[2:])
    options = {"lr": 0.1, "statistics": statistics, "engine": engine}
    groups = [{"params": half, "plain": lamb_first == bool(i)} for i, half in enumerate(halves[0])]
    together = LambOrSGD(groups, max_grad_norm=limit, **options)
    by_lamb, by_sgd = halves[1] if lamb_first else halves[1][::-1]
    apart = [
        fusedstep.Lamb(by_lamb, max_grad_norm=None, **options),
        fusedstep.SGD(by_sgd, weight_decay=0.01, **options),
    ]
    for skip in ((), (0,), (2, 3), ()):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = None if i in skip else torch.randn_like(p)
            q.grad = None if i in skip else p.grad.clone()
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(theirs, limit)
        together.step()
        for optimizer in apart:
            optimizer.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)
    if statistics:
        seen, found = together.statistics(), [optimizer.statistics() for optimizer in apart]
        none = torch.full((2,), math.nan, dtype=seen.param_norms.dtype)
        ratios = [found[0].trust_ratios, none]
        if not lamb_first:
            found, ratios = found[::-1], ratios[::-1]
        torch.testing.assert_close(seen.param_norms, torch.cat([f.param_norms for f in found]))
        near = {"rtol": 1e-4, "atol": 1e-7, "equal_nan": True}
        torch.testing.assert_close(seen.update_norms, torch.cat([f.update_norms for f in found]), **near)
        torch.testing.assert_close(seen.trust_ratios, torch.cat(ratios), **near)
