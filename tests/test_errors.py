"""Bad input gets a clear error before anything is written; what fails half-way leaves nothing half done."""

import copy

import pytest
import torch

import fusedstep
from fusedstep._memory import row
from tests.cases import KINDS, TORCH_CLASSES, name_of

cases = pytest.mark.parametrize("case", KINDS, ids=name_of)


def three_groups(case, engine, **options):
    params = [torch.nn.Parameter(torch.randn(5)) for _ in range(3)]
    for p in params:
        p.grad = torch.randn(5)
    return params, case.ours([{"params": [p]} for p in params], engine=engine, **case.options, **options)


def snapshot(params, optimizer):
    return copy.deepcopy([[p.detach() for p in params], optimizer.state_dict()["state"]])


def assert_untouched(before, params, optimizer):
    after = snapshot(params, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(before[0], after[0], strict=True))
    assert before[1].keys() == after[1].keys()
    for i in before[1]:
        assert before[1][i].keys() == after[1][i].keys()
        assert all(torch.equal(before[1][i][name], after[1][i][name]) for name in before[1][i])


@cases
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_sparse_gradient_in_the_third_group_stops_the_step_before_it_starts(case, steps_before, engine):
    params, optimizer = three_groups(case, engine)
    for _ in range(steps_before):
        optimizer.step()
    before = snapshot(params, optimizer)
    good = params[2].grad
    params[2].grad = torch.randn(5).to_sparse()
    with pytest.raises(RuntimeError, match=f"{type(optimizer).__name__} does not support sparse gradients"):
        optimizer.step()
    assert_untouched(before, params, optimizer)
    params[2].grad = good
    optimizer.step()
    assert all((p != q).any() for p, q in zip(params, before[0], strict=True))


@cases
def test_running_out_of_memory_while_state_is_created_leaves_all_as_it_was(case, engine, monkeypatch):
    params, optimizer = three_groups(case, engine)
    before = snapshot(params, optimizer)
    make, calls = row.make_row, []

    def make_until_memory_ends(*args):
        calls.append(args)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("out of memory")
        return make(*args)

    monkeypatch.setattr("fusedstep._memory.plan.make_row", make_until_memory_ends)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert_untouched(before, params, optimizer)
    optimizer.step()
    assert all((p != q).any() for p, q in zip(params, before[0], strict=True))


@cases
def test_a_kernel_that_does_not_compile_leaves_all_as_it_was(case, monkeypatch):
    params, optimizer = three_groups(case, "cpu")
    before = snapshot(params, optimizer)

    def broken(*args):
        raise SystemError("no compiler")

    monkeypatch.setattr("fusedstep._engines.cpu.engine.compile_sweep", broken)
    with pytest.raises(SystemError):
        optimizer.step()
    assert_untouched(before, params, optimizer)


def test_gradients_that_cannot_be_used_are_named(engine):
    p = torch.nn.Parameter(torch.randn(4))
    optimizer = fusedstep.AdamW([p], engine=engine)
    p.grad = torch.randn(4)
    p.data = torch.randn(6)
    with pytest.raises(RuntimeError, match=r"gradient of shape \(4,\).*parameter of shape \(6,\).*zero_grad"):
        optimizer.step()
    whole = torch.nn.Parameter(torch.randn(1).expand(4))
    whole.grad = torch.randn(4)
    with pytest.raises(RuntimeError, match="share memory, such as an expanded one"):
        fusedstep.SGD([whole], engine=engine).step()
    integers = torch.arange(4).requires_grad_(False)
    integers.grad = torch.arange(4)
    with pytest.raises(TypeError, match="floating-point"):
        fusedstep.SGD([integers], engine=engine).step()


def test_a_parameter_given_twice_is_refused(engine):
    p = torch.nn.Parameter(torch.randn(4))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = fusedstep.SGD([p, p], engine=engine)
    p.grad = torch.randn(4)
    with pytest.raises(ValueError, match="twice"):
        optimizer.step()


def test_a_checkpoint_of_another_optimizer_or_model_is_refused(engine):
    p = torch.nn.Parameter(torch.randn(4))
    p.grad = torch.randn(4)
    sgd = fusedstep.SGD([p], momentum=0.9, engine=engine)
    sgd.step()
    adam = fusedstep.Adam([p], engine=engine)
    adam.step()
    saved = adam.state_dict()
    for cls, found in ((fusedstep.SGD, saved), (fusedstep.Adam, sgd.state_dict())):
        with pytest.raises(ValueError, match=r"no (momentum|betas).*another optimizer"):
            cls([p], engine=engine).load_state_dict(found)
    adam.load_state_dict({"state": sgd.state_dict()["state"], "param_groups": saved["param_groups"]})
    with pytest.raises(RuntimeError, match="another optimizer"):
        adam.step()
    rmsprop = torch.optim.RMSprop([p])
    rmsprop.step()
    adam.load_state_dict({"state": rmsprop.state_dict()["state"], "param_groups": saved["param_groups"]})
    with pytest.raises(RuntimeError, match="another optimizer"):
        adam.step()
    other = torch.nn.Parameter(torch.randn(2, 2))
    other.grad = torch.randn(2, 2)
    adam = fusedstep.Adam([other], engine=engine)
    adam.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"exp_avg.*shape"):
        adam.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"differentiable": True}, "differentiable=True is not supported.*torch.optim"),
        ({"fused": True, "foreach": True}, "cannot be `True` together"),
    ],
)
def test_flags_that_cannot_be_honoured_raise(options, message):
    for cls in TORCH_CLASSES:
        with pytest.raises(RuntimeError, match=message):
            cls([torch.nn.Parameter(torch.ones(1))], **options)


def test_settings_that_do_not_exist_are_listed():
    p = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"Invalid engine: 'cuda'.*'torch', 'cpu', 'triton'"):
        fusedstep.SGD([p], engine="cuda")
    with pytest.raises(ValueError, match=r"Invalid state_dtype: torch.int32.*float32"):
        fusedstep.AdamW([p], state_dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "warmup_square"}, r"Invalid schedule: 'warmup_square'.*'warmup_constant'"),
        ({"warmup": 1.0}, "Invalid warmup: 1.0"),
        ({"warmup": -0.5}, "Invalid warmup: -0.5"),
        ({"t_total": 0}, "Invalid t_total: 0"),
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"b1": 1.0}, "Invalid beta parameter at index 0"),
        ({"b2": -0.1}, "Invalid beta parameter at index 1"),
        ({"e": -1e-6}, "Invalid epsilon value"),
    ],
    ids=str,
)
def test_options_that_make_no_schedule_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fusedstep.BertAdam([torch.nn.Parameter(torch.ones(1))], **options)


@pytest.mark.parametrize("lr", [None, "0.1", [0.1], (0.1, 0.2), torch.tensor([0.1, 0.2])], ids=str)
def test_an_option_that_is_no_number_stops_the_step_before_it_starts(lr, engine):
    p = torch.nn.Parameter(torch.randn(4))
    p.grad = torch.randn(4)
    optimizer = fusedstep.AdamW([p], engine=engine)
    optimizer.step()
    before, optimizer.param_groups[0]["lr"] = p.detach().clone(), lr
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match="group 0 has"):
            optimizer.step()
    assert torch.equal(p, before)
    assert optimizer.state[p]["step"] == 1


def test_a_state_that_belongs_to_no_parameter_is_loaded_as_it_is():
    p = torch.nn.Parameter(torch.randn(4))
    p.grad = torch.randn(4)
    optimizer = fusedstep.AdamW([p])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"]["mine"] = {"step": 7, "exp_avg": torch.ones(2)}
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.state["mine"]["step"] == 7
    assert torch.equal(optimizer.state["mine"]["exp_avg"], torch.ones(2))


def test_complex_parameters_refuse_a_state_dtype_they_cannot_have(engine):
    p = torch.nn.Parameter(torch.randn(4, dtype=torch.complex64))
    p.grad = torch.randn(4, dtype=torch.complex64)
    with pytest.raises(ValueError, match="no complex bfloat16"):
        fusedstep.AdamW([p], engine=engine, state_dtype=torch.bfloat16).step()


@pytest.mark.parametrize("bad", [{"schedule": "linear"}, {"t_total": 0}, {"warmup": 1.5}, {"b1": 1.0}])
def test_a_group_of_bert_adam_is_checked_when_it_is_added(bad):
    p, q = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = fusedstep.BertAdam([p], lr=0.1)
    with pytest.raises(ValueError, match="Invalid"):
        optimizer.add_param_group({"params": [q], **bad})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("option", "value"), [("schedule", "linear"), ("schedule", 7), ("lr", "warmup_cosine")]
)
def test_a_word_counts_only_where_words_are_asked_for(option, value):
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = fusedstep.BertAdam([p], lr=0.1)
    optimizer.param_groups[0][option] = value
    with pytest.raises(
        (TypeError, ValueError), match="warmup_constant" if option == "schedule" else "has lr=.*use a number"
    ):
        optimizer.step()
    assert torch.equal(p, torch.ones(2))


@pytest.mark.parametrize("limit", ["1.0", float("nan")])
def test_a_limit_that_is_no_number_is_refused(limit):
    with pytest.raises(ValueError, match="Invalid max_grad_norm"):
        fusedstep.AdamW([torch.nn.Parameter(torch.ones(2))], max_grad_norm=limit)
