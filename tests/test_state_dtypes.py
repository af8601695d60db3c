"""Which states have 8 bits, and what else an optimizer does with them: clip, skip, average, measure."""

import pytest
import torch

import fusedstep
from tests.cases import KINDS, by_name, name_of
from tests.pairs import copies, set_grads
from tests.test_int8 import SHAPES, follow, gradients, made, run

STATEFUL = [case for case in KINDS if case.rule.states]
kinds = pytest.mark.parametrize("case", STATEFUL, ids=name_of)
engines = pytest.mark.parametrize("engine", ["cpu", "torch"])


def test_small_tensors_stay_in_float32(engine):
    small, large = (torch.nn.Parameter(torch.ones(n)) for n in (4095, 4096))
    asked = torch.nn.Parameter(torch.ones(3))
    groups = [{"params": [small, large]}, {"params": [asked], "state_dtype": "int8"}]
    optimizer = fusedstep.AdamW(groups, state_dtype="int8", engine=engine)
    set_grads([small, large, asked], [torch.ones(4095), torch.ones(4096), torch.ones(3)])
    optimizer.step()
    assert {*optimizer.state[small]} == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[small]["exp_avg"].dtype == torch.float32
    codes = {"step", "exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales"}
    assert {*optimizer.state[large]} == {*optimizer.state[asked]} == codes


@pytest.mark.parametrize("given", ["int8", "torch.int8", torch.int8])
def test_a_dtype_may_be_given_by_its_name(given):
    assert fusedstep.AdamW([torch.nn.Parameter(torch.ones(1))], state_dtype=given).state_dtype is torch.int8


def test_states_may_have_dtypes_of_their_own(engine):
    given = {"exp_avg": torch.bfloat16, "exp_avg_sq": "int8"}
    params, optimizer = made(by_name("adam-amsgrad"), [torch.ones(70)], engine, given)
    run(optimizer, params, gradients(2, [(70,)]))
    found = {name: value.dtype for name, value in optimizer.state[params[0]].items()}
    assert found == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq_codes": torch.uint8,
        "exp_avg_sq_scales": torch.uint8,
        # as the parameter
        "max_exp_avg_sq": torch.float32,
    }


def test_what_was_understood_is_shown():
    p = torch.nn.Parameter(torch.ones(1))
    assert fusedstep.AdamW([p]).state_dtype is None
    assert fusedstep.AdamW([p], state_dtype={"exp_avg": "int8"}).state_dtype == {"exp_avg": torch.int8}
    optimizer = fusedstep.AdamW([{"params": [p], "state_dtype": "bfloat16"}])
    assert optimizer.param_groups[0]["state_dtype"] is torch.bfloat16


@pytest.mark.parametrize(
    "given", [{"momentum": "int8"}, {"exp_avg": "int4"}, "int16", torch.uint8, 8, {"ema": "int8"}], ids=str
)
def test_what_is_no_state_dtype_is_refused(given):
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    with pytest.raises(ValueError, match="Invalid state_dtype"):
        fusedstep.AdamW(params[:1], state_dtype=given)
    optimizer = fusedstep.AdamW(params[:1])
    with pytest.raises(ValueError, match="Invalid state_dtype"):
        optimizer.add_param_group({"params": params[1:], "state_dtype": given})
    assert len(optimizer.param_groups) == 1


def test_a_group_may_have_its_own_or_none(engine):
    params = [torch.nn.Parameter(torch.ones(4096)) for _ in range(3)]
    groups = [{"params": params[:1]}, {"params": params[1:2], "state_dtype": torch.float16}]
    groups += [{"params": params[2:], "state_dtype": None}]
    optimizer = fusedstep.SGD(groups, momentum=0.9, state_dtype="int8", engine=engine)
    set_grads(params, [torch.ones(4096)] * 3)
    optimizer.step()
    names = [{name: t.dtype for name, t in optimizer.state[p].items()} for p in params]
    # codes depend on the step
    codes = {"momentum_buffer_codes": torch.int8, "momentum_buffer_scales": torch.uint8}
    assert names[0] == {"step": torch.float32, **codes}
    assert names[1] == {"momentum_buffer": torch.float16}
    assert names[2] == {"momentum_buffer": torch.float32}


# with other options

OPTIONS = {
    "clipped": {"max_grad_norm": 0.5},
    "guarded": {"skip_nonfinite": True},
    "averaged": {"ema_decay": 0.9},
    "measured": {"statistics": True},
    "all": {"max_grad_norm": 0.5, "skip_nonfinite": True, "ema_decay": 0.9, "statistics": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@kinds
def test_a_step_with_other_options_is_that_of_float32_on_the_numbers_that_were_read(case, options):
    options = OPTIONS[options]
    for optimizer, plain, ours, theirs in follow(case, "cpu", SHAPES, gradients(3), **options):
        if "ema_decay" in options:
            for p, q in zip(ours, theirs, strict=True):
                assert optimizer.state[p]["ema"].dtype == torch.float32
                torch.testing.assert_close(optimizer.state[p]["ema"], plain.state[q]["ema"])
        if "statistics" in options:
            a, b = optimizer.statistics(), plain.statistics()
            torch.testing.assert_close(a.grad_norm, b.grad_norm)
            torch.testing.assert_close(a.update_norm, b.update_norm)


@kinds
def test_a_skipped_step_leaves_every_bit(case, engine):
    if engine == "triton" and case.name != "adamw":
        pytest.skip("the interpreter takes long")
    (p,), optimizer = made(case, [torch.randn(2, 70)], engine, skip_nonfinite=True)
    for bad, good in zip(gradients(2, [(2, 70)]), gradients(2, [(2, 70)], seed=2), strict=True):
        before = p.detach().clone(), {name: t.clone() for name, t in optimizer.state[p].items()}
        bad[0][1, 3] = float("nan")
        run(optimizer, [p], [bad])
        assert optimizer.step_was_skipped
        assert torch.equal(p, before[0])
        found = optimizer.state[p]
        assert all(torch.equal(found[name], t) for name, t in before[1].items())
        assert not before[1] or found.keys() == before[1].keys()
        run(optimizer, [p], [good])
        assert not optimizer.step_was_skipped


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, fusedstep.GradScaler])
@kinds
def test_scaled_gradients_leave_the_codes_of_unscaled_ones(case, cls, engine):
    if engine == "triton" and case.name != "adamw":
        pytest.skip("the interpreter takes long")
    start, grads = [torch.randn(70)], gradients(3, [(70,)])
    case = case.unlimited()
    ours, a = made(case, start, engine)
    theirs, b = made(case, start, engine)
    scaler = cls("cpu", init_scale=256.0, growth_interval=1)
    scaler.scale(torch.ones(()))
    for i, (g,) in enumerate(grads):
        scale = scaler.get_scale()
        ours[0].grad = g * scale if i != 1 else g * float("inf")
        scaler.step(a)
        scaler.update()
        if i != 1:
            run(b, theirs, [[g]])
    assert torch.equal(ours[0], theirs[0])
    assert all(torch.equal(value, b.state[theirs[0]][name]) for name, value in a.state[ours[0]].items())


@engines
def test_gradients_may_be_cleared_in_the_pass_of_the_update(engine):
    start, grads = [torch.randn(70)], gradients(2, [(70,)])
    ours, a = made(by_name("adamw"), start, engine)
    theirs, b = made(by_name("adamw"), start, engine)
    for step in grads:
        set_grads(ours, step)
        a.step(zero_grad=True, set_to_none=False)
        assert (ours[0].grad == 0).all()
        run(b, theirs, [step])
    assert torch.equal(ours[0], theirs[0])
    assert all(torch.equal(value, b.state[theirs[0]][name]) for name, value in a.state[ours[0]].items())


@engines
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64], ids=str)
def test_parameters_of_other_dtypes_train(dtype, engine):
    """Those of more than 32 bits, or complex, keep float32."""
    p = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype))
    optimizer = fusedstep.AdamW([p], lr=1e-2, state_dtype="int8", engine=engine)
    for _ in range(10):
        p.grad = p.detach().clone()
        optimizer.step()
    assert (p.detach() - 0.9).abs().max() < 0.02
    assert ("exp_avg_codes" in optimizer.state[p]) == (dtype.itemsize == 2)


@engines
def test_a_state_is_what_it_is_until_it_is_made_anew(engine):
    """Another `state_dtype` holds for states that are not there yet, and for those that are loaded."""
    p, late = copies([torch.ones(4096)] * 2)
    optimizer = fusedstep.AdamW([p, late], engine=engine)
    p.grad = torch.ones(4096)
    optimizer.step()
    optimizer.state_dtype = "int8"
    late.grad = torch.ones(4096)
    optimizer.step()
    assert "exp_avg" in optimizer.state[p]
    assert "exp_avg_codes" in optimizer.state[late]
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert "exp_avg_codes" in optimizer.state[p]
    assert "exp_avg" not in optimizer.state[p]
