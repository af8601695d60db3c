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


DAMAGES = [
    ({}, ["exp_avg"], "exp_avg"),
    ({}, ["exp_avg_sq"], "exp_avg_sq"),
    ({}, ["step"], "step"),
    ({"amsgrad": True}, ["exp_avg_sq"], "exp_avg_sq"),
    ({"state_dtype": "int8"}, ["exp_avg_scales"], "exp_avg_scales"),
    ({"state_dtype": "int8"}, ["exp_avg_sq_codes"], "exp_avg_sq"),
]


@pytest.mark.parametrize("way", ["loaded", "deleted"])
@pytest.mark.parametrize(("options", "lost", "named"), DAMAGES, ids=str)
def test_a_state_that_is_not_all_there_is_refused_as_by_torch(options, lost, named, way, engine):
    """Beside moments that begin anew, the others would make steps of any size."""
    p = torch.nn.Parameter(torch.randn(64, 64))
    optimizer = fusedstep.AdamW([p], engine=engine, **options)
    p.grad = torch.randn(64, 64)
    optimizer.step()
    if way == "loaded":
        checkpoint = copy.deepcopy(optimizer.state_dict())
        for name in lost:
            del checkpoint["state"][0][name]
        optimizer.load_state_dict(checkpoint)
    else:
        for name in lost:
            del optimizer.state[p][name]
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match=rf"without \['{named}'\], which it updates at every step"):
        optimizer.step()
    assert torch.equal(p, before)
    optimizer.state.clear()
    optimizer.step()
    assert not torch.equal(p, before)


def test_a_state_that_is_none_is_not_there():
    p = torch.nn.Parameter(torch.randn(5))
    optimizer = fusedstep.AdamW([p])
    p.grad = torch.randn(5)
    optimizer.step()
    optimizer.state[p]["exp_avg_sq"] = None
    with pytest.raises(RuntimeError, match=r"without \['exp_avg_sq'\]"):
        optimizer.step()


def test_an_average_may_be_all_that_is_kept(engine):
    """The moments begin anew, and the average goes on."""
    p = torch.nn.Parameter(torch.randn(5))
    optimizer = fusedstep.AdamW([p], ema_decay=0.9, engine=engine)
    p.grad = torch.randn(5)
    for _ in range(3):
        optimizer.step()
    average = optimizer.state[p]["ema"].clone()
    optimizer.state[p] = {"ema": optimizer.state[p]["ema"]}
    optimizer.step()
    assert optimizer.state[p]["step"] == 1
    torch.testing.assert_close(optimizer.state[p]["ema"], 0.9 * average + 0.1 * p.detach())


@pytest.mark.parametrize("name", ["RMSprop", "Adadelta"])
def test_a_count_that_no_rule_asks_for_may_be_missing(name):
    p = torch.nn.Parameter(torch.randn(5))
    optimizer = getattr(fusedstep, name)([p])
    p.grad = torch.randn(5)
    optimizer.step()
    del optimizer.state[p]["step"]
    optimizer.step()


def test_a_state_of_a_parameter_without_a_gradient_can_wait(engine):
    p, q = (torch.nn.Parameter(torch.randn(5)) for _ in range(2))
    optimizer = fusedstep.AdamW([p, q], engine=engine)
    optimizer.state[q] = {"exp_avg_sq": torch.zeros(5), "step": torch.tensor(1.0)}
    before = p.detach().clone()
    p.grad = torch.randn(5)
    optimizer.step()
    assert not torch.equal(p, before)
    q.grad = torch.randn(5)
    with pytest.raises(RuntimeError, match=r"without \['exp_avg'\]"):
        optimizer.step()


def test_an_option_of_later_may_add_a_state():
    p = torch.nn.Parameter(torch.randn(5))
    optimizer = fusedstep.AdamW([p])
    p.grad = torch.randn(5)
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.step()
    assert "max_exp_avg_sq" in optimizer.state[p]


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


WRONG = [
    (
        {"lrr": 1},
        TypeError,
        r"unexpected keyword argument 'lrr'; did you mean 'lr'\? It takes params, lr, betas",
    ),
    ({"nothing_like_it": 1}, TypeError, "unexpected keyword argument 'nothing_like_it'; It takes params"),
    ({"lr": "1e-3"}, TypeError, "AdamW was given lr='1e-3'; use a number"),
    ({"betas": ("a", 0.9)}, TypeError, r"betas=\('a', 0.9\); use 2 numbers"),
    ({"maximize": "no"}, TypeError, "maximize='no'; use True or False"),
    ({"statistics": "all"}, TypeError, "statistics='all'; use True or False"),
    ({"max_grad_norm": torch.ones(2)}, ValueError, "Invalid max_grad_norm"),
    ({"ema_decay": torch.ones(2)}, ValueError, "Invalid ema_decay"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=lambda x: str(x)[:40])
def test_a_constructor_says_which_argument_is_wrong_and_what_it_takes(options, error, message):
    with pytest.raises(error, match=message):
        fusedstep.AdamW([torch.nn.Parameter(torch.ones(3))], **options)


def test_too_many_or_too_few_arguments_name_the_class():
    with pytest.raises(TypeError, match=r"AdamW.__init__\(\): too many positional arguments"):
        fusedstep.AdamW([torch.nn.Parameter(torch.ones(3))], *range(30))
    with pytest.raises(TypeError, match=r"AdamW.__init__\(\): missing a required argument: 'params'"):
        fusedstep.AdamW()


def test_a_group_says_which_option_is_wrong():
    group = {"params": [torch.nn.Parameter(torch.ones(3))], "eps": "1e-8"}
    with pytest.raises(TypeError, match="eps='1e-8'; use a number"):
        fusedstep.AdamW([group])


def test_a_models_state_dict_is_no_checkpoint_of_an_optimizer():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(KeyError, match=r"begins with .*weight"):
        fusedstep.AdamW(model.parameters()).load_state_dict(model.state_dict())


def test_a_gradient_of_another_layout_is_named():
    p = torch.nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
    optimizer = fusedstep.SGD([p])
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"layout torch.jagged, which is not dense"):
        optimizer.step()


def test_groups_for_muon_take_its_options_only():
    model = torch.nn.Linear(2, 2)
    for wrong in ({"lrr": 1}, {"adamw": {"lrr": 1}}):
        with pytest.raises(TypeError, match=r"'lrr'; did you mean 'lr'\?"):
            fusedstep.muon_groups(model, **wrong)
    for wrong, named in ((model.parameters(), "model=generator"), (None, "model=NoneType")):
        with pytest.raises(TypeError, match=f"{named}.*use the whole model"):
            fusedstep.muon_groups(wrong)
    with pytest.raises(TypeError, match="adamw=int"):
        fusedstep.muon_groups(model, adamw=3)
    # entries of one's own, and of schedulers
    groups = fusedstep.muon_groups(model, initial_lr=0.1, lr_scale=2.0)
    assert groups[0]["lr_scale"] == 2.0
