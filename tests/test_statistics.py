"""statistics(): every field is what plain torch computes in float64, and the update does not change a bit."""

import math

import pytest
import torch

import fusedstep
from tests.cases import KINDS, by_name, name_of
from tests.pairs import set_grads

INF, NAN = float("inf"), float("nan")
LIMIT = 0.5
SHAPES = [(3, 2), (), (20,), (0,)]
# gradients are measured before the update or along with it
kinds = pytest.mark.parametrize("case", KINDS, ids=name_of)
limits = pytest.mark.parametrize("limit", [None, LIMIT])
# one that needs no sums, and one that does
FEW = [by_name("adamw"), by_name("lamb")]
few = pytest.mark.parametrize("case", FEW, ids=name_of)


def parameters(shapes=SHAPES, dtype=torch.float32):
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def gradients(params, size=1.0):
    return [size * torch.randn(p.shape) for p in params]


def values(params):
    return [p.detach().double().clone() for p in params]


def norm(tensors, norm_type=2.0):
    """Of all, in float64."""
    flat = torch.cat([t.double().reshape(-1) for t in tensors])
    return torch.linalg.vector_norm(flat, norm_type).item() if flat.numel() else 0.0


def close(seen, expected):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(seen.double(), expected, rtol=2e-6, atol=1e-12, equal_nan=True)


def factor(grads, limit, eps, norm_type=2.0):
    return min(1.0, limit / (norm(grads, norm_type) + eps)) if limit else 1.0


def trust_ratios(optimizer, params, before, step):
    """LAMB's, from its states after the step."""
    ratios = []
    for p, old in zip(params, before, strict=True):
        m, v = (optimizer.state[p][name].double() for name in ("exp_avg", "exp_avg_sq"))
        u = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-6) + 0.01 * old
        ratios.append(norm([old]) / norm([u]) if old.numel() else 1.0)
    return ratios


def assert_seen(optimizer, case, params, before, grads, limit, step, norm_type=2.0):
    seen, after = optimizer.statistics(), values(params)
    updates = [new - old for new, old in zip(after, before, strict=True)]
    clipping = factor(grads, limit, optimizer.clip_eps, norm_type)
    assert not seen.skipped
    assert seen.skipped.dtype == torch.bool
    close(seen.grad_norm, norm(grads, norm_type))
    close(seen.param_norm, norm(after))
    close(seen.update_norm, norm(updates))
    close(seen.clip_factor, clipping)
    close(seen.nonfinite, 0)
    close(seen.grad_norms, [norm([g], norm_type) for g in grads])
    close(seen.param_norms, [norm([p]) for p in after])
    close(seen.update_norms, [norm([u]) for u in updates])
    close(seen.clip_factors, [clipping] * len(params))
    close(seen.nonfinites, [0] * len(params))
    if case.has_trust_ratios:
        close(seen.trust_ratios, trust_ratios(optimizer, params, before, step))
    else:
        assert seen.trust_ratios is None


@limits
@kinds
def test_every_field_is_what_torch_computes_in_float64(case, limit, engine):
    params = parameters()
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.1}]
    optimizer = case.ours(groups, engine=engine, statistics=True, **case.with_limit(limit).options)
    for i, size in enumerate((1.0, 0.01)):
        before, grads = values(params), gradients(params, size)
        set_grads(params, grads)
        optimizer.step()
        assert_seen(optimizer, case, params, before, grads, limit, i + 1)


@limits
@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, fusedstep.GradScaler])
@few
def test_the_scale_of_gradients_does_not_show(case, scaler_class, fused, limit, engine):
    params, scaler = parameters(), scaler_class("cpu", init_scale=64.0)
    options = {"statistics": True, "maximize": True, "fused": fused, **case.with_limit(limit).options}
    optimizer = case.ours(params, engine=engine, **options)
    before, grads = values(params), gradients(params)
    set_grads(params, [scaler.scale(g) for g in grads])
    scaler.step(optimizer, zero_grad=True)
    if not case.has_trust_ratios:
        return assert_seen(optimizer, case, params, before, grads, limit, 1)
    close(optimizer.statistics().grad_norm, norm(grads))
    close(optimizer.statistics().trust_ratios, trust_ratios(optimizer, params, before, 1))


@limits
@pytest.mark.parametrize("case", FEW[:1], ids=name_of)
def test_norms_of_gradients_may_be_their_largest_element(case, limit, engine):
    params = parameters()
    optimizer = case.ours(
        params, engine=engine, norm_type=INF, statistics=True, **case.with_limit(limit).options
    )
    before, grads = values(params), gradients(params)
    set_grads(params, grads)
    optimizer.step()
    with_elements = [g if g.numel() else torch.zeros(1) for g in grads]
    assert_seen(optimizer, case, params, before, with_elements, limit, 1, INF)


@limits
@few
def test_a_parameter_without_a_gradient_has_none_and_does_not_count(case, limit, engine):
    params = parameters()
    optimizer = case.ours(params, engine=engine, statistics=True, **case.with_limit(limit).options)
    # one that never had any, one that loses it, one that gets it back
    for missing in ((1,), (0, 1), (1, 2), (2,)):
        before, grads = values(params), gradients(params)
        set_grads(params, [None if i in missing else g for i, g in enumerate(grads)])
        optimizer.step()
        seen, after = optimizer.statistics(), values(params)
        there = [i for i in range(len(params)) if i not in missing]
        or_none = lambda of, there=there: [of(i) if i in there else NAN for i in range(len(params))]
        clipping = factor([grads[i] for i in there], limit, optimizer.clip_eps)
        close(seen.grad_norm, norm([grads[i] for i in there]))
        close(seen.param_norm, norm([after[i] for i in there]))
        close(seen.update_norm, norm([after[i] - before[i] for i in there]))
        close(seen.clip_factor, clipping)
        close(seen.nonfinite, 0)
        close(seen.grad_norms, or_none(lambda i, grads=grads: norm([grads[i]])))
        close(seen.param_norms, or_none(lambda i, after=after: norm([after[i]])))
        close(seen.clip_factors, or_none(lambda i, clipping=clipping: clipping))
        close(seen.nonfinites, or_none(lambda i: 0))
        if seen.trust_ratios is not None:
            assert torch.isnan(seen.trust_ratios).tolist() == [i in missing for i in range(len(params))]


def test_parameters_come_in_the_order_of_the_groups_whatever_their_dtype(engine):
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.bfloat16]
    params = [torch.nn.Parameter(torch.full((2,), 2.0**i, dtype=dtype)) for i, dtype in enumerate(dtypes)]
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, 3.0**i)
    groups = [{"params": params[3:]}, {"params": params[:3]}]
    optimizer = fusedstep.SGD(groups, lr=0.0, engine=engine, statistics=True)
    optimizer.step()
    seen = optimizer.statistics()
    close(seen.grad_norms, [math.sqrt(2) * 3.0**i for i in (3, 4, 0, 1, 2)])
    close(seen.param_norms, [math.sqrt(2) * 2.0**i for i in (3, 4, 0, 1, 2)])


@pytest.mark.parametrize("scope", ["tensor", "group"])
def test_every_gradient_has_the_factor_of_its_scope(scope, engine):
    params = parameters([(3,), (4,), (5,)])
    groups = [{"params": params[:2]}, {"params": params[2:], "max_grad_norm": 0.1}]
    options = {"max_grad_norm": LIMIT, "clip_scope": scope, "statistics": True}
    optimizer, grads = fusedstep.BertAdam(groups, engine=engine, **options), gradients(params)
    set_grads(params, grads)
    optimizer.step()
    seen = optimizer.statistics()
    together = [[g] for g in grads] if scope == "tensor" else [grads[:2], grads[:2], grads[2:]]
    limits = (LIMIT, LIMIT, 0.1)
    expected = [factor(same, limit, 1e-6) for same, limit in zip(together, limits, strict=True)]
    close(seen.clip_factors, expected)
    close(seen.clip_factor, min(expected))


LAMBS = [*map(by_name, ("lamb-bounds", "lamb-no-decay", "lamb-always"))]


@pytest.mark.parametrize("case", LAMBS, ids=name_of)
def test_trust_ratios_are_those_that_were_used(case, engine):
    (p,) = parameters([(20,)])
    optimizer = case.ours([p], engine=engine, statistics=True, **case.options)
    (before,), (p.grad,) = values([p]), gradients([p])
    optimizer.step()
    seen = optimizer.statistics()
    m, v = (optimizer.state[p][name].double() for name in ("exp_avg", "exp_avg_sq"))
    u = (m / 0.1) / ((v / 0.001).sqrt() + 1e-6) + case.options.get("weight_decay", 0.01) * before
    ratio = norm([before]) / norm([u])
    expected = {"lamb-no-decay": 1.0, "lamb-bounds": min(max(ratio, 1.0), 1.1), "lamb-always": ratio}[case.name]
    close(seen.trust_ratios, [expected])
    torch.testing.assert_close(seen.update_norm.item(), 1e-2 * expected * norm([u]), rtol=1e-4, atol=0)


# steps that are skipped


@few
def test_a_skipped_step_tells_what_was_wrong_and_updates_nothing(case, engine):
    params = parameters([(4,), (5,), (6,)])
    optimizer = case.ours(params, engine=engine, statistics=True, skip_nonfinite=True, **case.options)
    grads = gradients(params)
    grads[0][1:3] = NAN
    grads[2][0] = INF
    set_grads(params[:2], grads[:2])
    params[2].grad = None
    for missing in (True, False):
        params[2].grad = None if missing else grads[2].clone()
        optimizer.step()
        seen, gone = optimizer.statistics(), NAN if missing else None
        assert seen.skipped
        close(seen.nonfinite, 2 if missing else 3)
        close(seen.nonfinites, [2, 0, 1 if gone is None else NAN])
        assert torch.isnan(seen.grad_norm)
        close(seen.grad_norms, [NAN, norm([grads[1]]), INF if gone is None else NAN])
        close(seen.update_norm, 0)
        close(seen.update_norms, [0, 0, 0 if gone is None else NAN])
        unknown = (seen.param_norm, seen.clip_factor, seen.param_norms, seen.clip_factors)
        assert all(torch.isnan(value).all() for value in unknown)
        assert seen.trust_ratios is None or torch.isnan(seen.trust_ratios).all()
    grads = gradients(params)
    before = values(params)
    set_grads(params, grads)
    optimizer.step()
    seen = optimizer.statistics()
    assert not seen.skipped
    close(seen.nonfinite, 0)
    close(seen.grad_norm, norm(grads))
    close(seen.update_norm, norm([new - old for new, old in zip(values(params), before, strict=True)]))


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, fusedstep.GradScaler])
def test_without_a_measuring_pass_nothing_is_known_of_a_skipped_steps_gradients(scaler_class, engine):
    (p,), scaler = parameters([(4,)]), scaler_class("cpu", init_scale=8.0)
    optimizer = fusedstep.AdamW([p], engine=engine, statistics=True, fused=True)
    p.grad = scaler.scale(torch.tensor([1.0, INF, 1.0, 1.0]))
    scaler.step(optimizer)
    seen = optimizer.statistics()
    assert seen.skipped
    close(seen.update_norm, 0)
    measured = scaler_class is fusedstep.GradScaler
    close(seen.grad_norm, INF if measured else NAN)
    close(seen.nonfinite, 1 if measured else NAN)


def test_what_is_no_number_is_counted_where_nothing_is_skipped(engine):
    params = parameters([(4,), (5,)])
    set_grads(params, gradients(params))
    params[1].grad[1], params[1].grad[2] = NAN, -INF
    optimizer = fusedstep.SGD(params, engine=engine, statistics=True)
    optimizer.step()
    seen = optimizer.statistics()
    assert not seen.skipped
    close(seen.nonfinite, 2)
    close(seen.nonfinites, [0, 2])
    assert torch.isnan(seen.grad_norm)
    close(seen.grad_norms[0], norm([params[0].grad]))


# and else


@limits
@kinds
def test_statistics_change_no_bit_of_the_update(case, limit, engine):
    ours = parameters()
    others = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = case.ours(ours, engine=engine, statistics=True, **case.with_limit(limit).options)
    twin = case.ours(others, engine=engine, **case.with_limit(limit).options)
    grads = gradients(ours)
    set_grads(ours, grads)
    set_grads(others, grads)
    optimizer.step()
    twin.step()
    for p, q in zip(ours, others, strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(optimizer.state[p][name], value) for name, value in twin.state[q].items())


def test_a_complex_number_has_one_norm(engine):
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    p.grad = torch.tensor([3 + 4j, 12j])
    optimizer = fusedstep.SGD([p], lr=1.0, engine=engine, statistics=True)
    optimizer.step()
    seen = optimizer.statistics()
    assert seen.grad_norm == seen.update_norm == seen.param_norm == 13


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_norms_of_sixteen_bits_do_not_overflow(dtype, engine):
    p = torch.nn.Parameter(torch.full((2000,), 3e4, dtype=dtype))
    p.grad = torch.full_like(p, 3e4)
    optimizer = fusedstep.SGD([p], lr=0.0, engine=engine, statistics=True)
    optimizer.step()
    seen, expected = optimizer.statistics(), norm([p])
    close(seen.grad_norm, expected)
    close(seen.param_norm, expected)


def test_an_update_is_seen_before_it_is_rounded_away(engine):
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = fusedstep.SGD([p], lr=2.0**-12, engine=engine, statistics=True)
    optimizer.step()
    assert p.tolist() == [1] * 4
    close(optimizer.statistics().update_norm, 2.0**-11)


def test_what_was_seen_stays_as_it_was_when_the_next_step_is_taken(engine):
    params = parameters()
    optimizer = fusedstep.Lamb(params, engine=engine, statistics=True, skip_nonfinite=True)
    set_grads(params, gradients(params))
    optimizer.step(zero_grad=True)
    seen = optimizer.statistics()
    copies = [None if value is None else value.clone() for value in seen]
    set_grads(params, gradients(params, NAN))
    optimizer.step()
    assert optimizer.statistics().skipped
    for value, copy in zip(seen, copies, strict=True):
        assert torch.equal(value, copy)


def test_nothing_was_seen_unless_asked_for(engine):
    params = parameters([(3,), (4,)])
    optimizer = fusedstep.SGD(params, engine=engine, statistics=True)
    message = "statistics=True, then step"
    with pytest.raises(RuntimeError, match=message):
        optimizer.statistics()
    # a step of nothing
    optimizer.step()
    with pytest.raises(RuntimeError, match=message):
        optimizer.statistics()
    set_grads(params, gradients(params))
    for asked in (True, False, True):
        optimizer.collect_statistics = asked
        optimizer.step()
        if asked:
            close(optimizer.statistics().grad_norm, norm([p.grad for p in params]))
        else:
            with pytest.raises(RuntimeError, match=message):
                optimizer.statistics()
