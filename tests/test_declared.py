"""What classes declare, and what groups then have."""

import inspect

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import fusedstep
from fusedstep.rules import rule


def test_a_constructor_says_what_its_arguments_are():
    found = inspect.signature(fusedstep.AdamW)
    said = {name: a.annotation for name, a in found.parameters.items()}
    assert (said["params"], said["lr"], said["amsgrad"]) == ("ParamsT", "float | Tensor", "bool")
    assert said["state_dtype"].startswith("torch.dtype | str")
    assert found.return_annotation == "None"


def test_an_option_that_was_deleted_from_a_group_is_missed():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = fusedstep.AdamW([p], lr=0.5)
    p.grad = torch.ones(2)
    del optimizer.param_groups[0]["lr"]
    with pytest.raises(KeyError, match="has no 'lr' any more"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def test_a_default_that_is_no_number_says_so():
    @rule()
    def plain(p, g, *, beta):
        return (p - beta * g,)

    for default in (None, [0.9], "0.9"):
        with pytest.raises(TypeError, match=r"beta is by default .*use a number"):
            type(
                "Wrong",
                (fusedstep.Optimizer,),
                {"rule": plain, "__annotations__": {"beta": "float"}, "beta": default},
            )

    @rule()
    def two(p, g, *, beta1, beta2):
        return (p - beta1 * beta2 * g,)

    with pytest.raises(
        TypeError, match=r"write `betas: tuple = pair\('beta1', 'beta2', default=\(0.9, 0.99\)\)`"
    ):
        type(
            "Wrong",
            (fusedstep.Optimizer,),
            {"rule": two, "__annotations__": {"betas": "tuple"}, "betas": (0.9, 0.99)},
        )


def test_a_group_refines_the_states_of_all():
    p = torch.nn.Parameter(torch.ones(64, 64).bfloat16())
    groups = [{"params": [p], "state_dtype": {"exp_avg": "int8"}}]
    optimizer = fusedstep.AdamW(groups, state_dtype="float32")
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[p]["exp_avg_sq"].dtype == torch.float32
    assert optimizer.state[p]["exp_avg_codes"].dtype == torch.int8
    # plain values, which checkpoints can hold
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["state_dtype"] == {"exp_avg": "int8"}
    assert optimizer.param_groups[0]["state_dtype"] == {"exp_avg": torch.int8}
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["state_dtype"] == {"exp_avg": torch.int8}


@pytest.mark.parametrize("dtype", ["float32", {"exp_avg": "int8"}])
def test_a_checkpoint_may_hold_all_of_a_group_with_dtypes_of_its_own(dtype):
    model = torch.nn.Linear(64, 64)
    optimizer = fusedstep.AdamW([{"params": model.parameters(), "state_dtype": dtype}], state_dtype="int8")
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    optimizer.step()


def test_masters_are_not_expanded_while_parameters_are_averages():
    p = torch.nn.Parameter(torch.ones(64, 64).bfloat16())
    optimizer = fusedstep.AdamW([p], master="split", ema_decay=0.9)
    p.grad = torch.ones_like(p)
    optimizer.step()
    with optimizer.ema_parameters(), pytest.raises(RuntimeError, match="expanded_state_dict"):
        optimizer.expanded_state_dict()


def test_a_constructor_that_somebody_wrote_is_inherited():
    class Slow(fusedstep.AdamW):
        def __init__(self, params, rate):
            super().__init__(params, lr=rate / 10)

    class Slower(Slow):
        weight_decay: float = 0.5

    p = torch.nn.Parameter(torch.ones(2))
    group = Slower([p], 1.0).param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.5)
