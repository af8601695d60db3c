"""`check_rule`: true for what is right, however little it moves; false for what is a little wrong, anywhere."""

import pytest
import torch

import fusedstep
from fusedstep import Optimizer
from fusedstep.rules import cos, exp, rule, tanh, total, total_over_all, where
from tests.cases import CLASSES, FAMILY

ALL = [getattr(fusedstep, name) for name in fusedstep.optimizers.__all__ if name != "Muon"]
# a row of every class, with options that move parameters far enough to see a hundredth of it in float32
ROWS = {cls: {} for cls in CLASSES} | dict(reversed(FAMILY))
name_of = lambda cls: cls.__name__
classes = pytest.mark.parametrize("cls", ALL, ids=name_of)


def class_of(update, rate=0.1, **kept):
    class Mine(Optimizer):
        rule = rule_of(update, **kept)
        lr: float = rate

    return Mine


def rule_of(update, **kept):
    return rule(**kept)(update)


def spoilt(cls, spoil, dtype=None):
    """A class that does something else after each step, with parameters of this dtype if one is given."""

    class Spoilt(cls):
        def step(self, *args, **kwargs):
            (group,) = self.param_groups
            before = [p.detach().clone() for p in group["params"]]
            super().step(*args, **kwargs)
            if dtype in (None, before[0].dtype):
                with torch.no_grad():
                    spoil(self, group, before)

    return Spoilt


def times(factor):
    def spoil(optimizer, group, before):
        for p, old in zip(group["params"], before, strict=True):
            p.copy_(old + factor * (p - old))

    return spoil


# the interpreter takes long: test_family.py has three steps
@classes
@pytest.mark.parametrize("engine", ["torch", "cpu"])
def test_every_class_is_right_with_its_defaults(cls, engine):
    report = fusedstep.check_rule(cls, engine=engine)
    assert report, report


@classes
@pytest.mark.parametrize("factor", [-1.0, 1.01, 0.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_an_update_that_is_a_little_wrong_is_found_in_both_dtypes(cls, factor, dtype):
    report = fusedstep.check_rule(spoilt(cls, times(factor), dtype), engine="torch", **ROWS[cls])
    assert not report
    assert [row.dtype for row in report.rows if not row.is_right] == [dtype]
    assert "WRONG: " in repr(report)


@pytest.mark.parametrize("lr", [1e-2, 1e-4, 1e-5])
@pytest.mark.parametrize("factor", [-1.0, 0.9, 0.0])
def test_it_is_found_however_small_the_steps_are(lr, factor):
    assert fusedstep.check_rule(fusedstep.Lion, engine="cpu", lr=lr)
    report = fusedstep.check_rule(spoilt(fusedstep.Lion, times(factor)), engine="cpu", lr=lr)
    assert not any(row.is_right for row in report.rows), report


def test_a_factor_that_underflows_is_found(engine):
    """In float32 no parameter moves, though in float64 all do."""

    def update(p, g, *, lr):
        return (p - lr * (g * 1e-30 * 1e-30 * 1e30 * 1e30),)

    report = fusedstep.check_rule(class_of(update, rate=1e-4), 3, engine)
    assert [row.is_right for row in report.rows] == [True, False]
    assert report.rows[1].error == pytest.approx(1)


def test_what_float32_cannot_compute_is_found(engine):
    def update(p, g, *, lr):
        return (p - lr * (g + 1e9 - 1e9),)

    report = fusedstep.check_rule(class_of(update), 3, engine)
    assert not report.rows[1].is_right


@pytest.mark.parametrize("lr", [0.0, 1e-9])
def test_parameters_that_hardly_move_are_refused(lr):
    with pytest.raises(ValueError, match=r"Lion moves its parameters by .* in 20 steps.*with a larger lr"):
        fusedstep.check_rule(fusedstep.Lion, engine="torch", lr=lr)


def keeping(p, g, m, n, k, *, step, lr):
    """Keeps what it does not use."""
    return p - lr * g, m + g, n + total(g * g), k + total_over_all(g * g)


KEPT = {"states": {"m": "sum"}, "scalars": {"n": "size"}, "group_scalars": {"k": "all"}}


def of_state(optimizer, group, before):
    for p in group["params"]:
        optimizer.state[p]["sum"] *= 1.001


def of_a_small_tensor(optimizer, group, before):
    optimizer.state[group["params"][0]]["sum"] *= 1.001


def of_tensor(optimizer, group, before):
    optimizer.state[group["params"][0]]["size"] *= 1.001


def of_group(optimizer, group, before):
    group["all"] *= 1.001


def test_what_is_kept_is_right(engine):
    report = fusedstep.check_rule(class_of(keeping, **KEPT), 3, engine)
    assert report, report


@pytest.mark.parametrize(
    ("spoil", "name"),
    [(of_state, "sum"), (of_a_small_tensor, "sum"), (of_tensor, "size"), (of_group, "all")],
)
def test_what_is_kept_is_compared_though_nothing_uses_it(spoil, name):
    report = fusedstep.check_rule(spoilt(class_of(keeping, **KEPT), spoil), engine="cpu")
    assert [(row.is_right, row.name) for row in report.rows] == [(False, name)] * 2


def test_a_single_nan_is_no_rounding():
    def spoil(optimizer, group, before):
        group["params"][-1][0, 0] = torch.nan

    for dtype in (torch.float64, torch.float32):
        report = fusedstep.check_rule(spoilt(fusedstep.Adam, spoil, dtype), engine="torch")
        assert [row.dtype for row in report.rows if not row.is_right] == [dtype]


def test_a_few_elements_that_move_are_enough_to_see(engine):
    """Of a thousand numbers 20 move, which are fewer than rounding may flip."""

    def update(p, g, *, lr):
        return (where(g > 2, p - lr * g, p),)

    few = class_of(update)
    assert fusedstep.check_rule(few, 1, engine)
    report = fusedstep.check_rule(spoilt(few, times(1.01), torch.float32), 1, engine)
    assert not report.rows[1].is_right


@pytest.mark.parametrize("lowest", [torch.inf, -torch.inf], ids=str)
def test_a_state_may_be_infinite(lowest):
    report = fusedstep.check_rule(
        class_of(lambda p, g, m, *, lr: (p - lr * g, where(p == p, lowest, m)), states={"m": "lowest"})
    )
    assert report, report


def sized(p, g, *, rows, columns, numel, lr):
    return (p - lr * (rows + 2 * columns) / numel * g,)


def test_a_rule_may_take_rows_and_columns(engine):
    report = fusedstep.check_rule(class_of(sized), 3, engine)
    assert report, report


def summed(p, g, *, lr):
    return (p - (total(lr) + total(0.5)) / total(1.0) * g,)


def test_what_all_elements_share_is_summed_as_often_as_there_are_elements(engine):
    report = fusedstep.check_rule(class_of(summed), 3, engine)
    assert report, report


@pytest.mark.parametrize("steps", [0, -1, 2.5, "3", True, None])
def test_no_steps_are_no_success(steps):
    with pytest.raises(ValueError, match=r"Invalid steps: .*; use a whole number from 1 on"):
        fusedstep.check_rule(fusedstep.Lion, steps=steps)


@pytest.mark.parametrize("word", [tanh, exp, cos, lambda x: x / 3, lambda x: -x, abs, total])
def test_a_comparison_is_a_number_of_full_precision(word, engine):
    report = fusedstep.check_rule(class_of(lambda p, g, *, lr: (p - lr * word(g > 0),)), 3, engine)
    assert report, report


def sgd(p, g, *, lr):
    return (p - lr * g,)


class Own(Optimizer):
    """With a constructor that takes nothing but its rate."""

    rule = rule_of(sgd)
    lr: float = 0.5

    def __init__(self, params, rate, **more):
        super().__init__(params, lr=rate, **more)


def test_a_class_may_have_a_constructor_of_its_own(engine):
    class Plain(Own):
        def __init__(self, params, rate):
            # it clips, which is no part of its rule
            super().__init__(params, rate, max_grad_norm=1.0)

    for cls in (Own, Plain):
        report = fusedstep.check_rule(cls, 3, engine, rate=0.25)
        assert report, report
        assert [row.engine for row in report.rows] == [engine] * 2


@pytest.mark.parametrize("more", [{"state_dtype": "bfloat16"}, {"ema_decay": 0.9}, {"skip_nonfinite": True}])
def test_a_constructor_that_adds_to_its_rule_is_told_so(more):
    class More(Own):
        def __init__(self, params):
            super().__init__(params, 0.1, **more)

    with pytest.raises(ValueError, match=rf"\['{next(iter(more))}'\] change what a step does around its rule"):
        fusedstep.check_rule(More)


def test_a_constructor_that_makes_groups_is_told_so():
    class Two(Own):
        def __init__(self, params):
            super().__init__([{"params": params[:1]}, {"params": params[1:]}], 0.1)

    with pytest.raises(TypeError, match="Two made 2 groups of its parameters, and check_rule compares one"):
        fusedstep.check_rule(Two)
