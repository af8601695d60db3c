"""Formats and everything that may change or go wrong around them."""

import pytest
import torch

import fusedstep


def parameter(*shape, dtype=torch.float32):
    p = torch.nn.Parameter(torch.ones(shape).to(dtype))
    p.grad = torch.ones_like(p)
    return p


@pytest.mark.parametrize("shape", [(100, 64), (80, 64), (64, 90)])
@pytest.mark.parametrize("state_dtype", ["int8", "bfloat16"])
def test_states_of_another_shape_are_refused_at_the_next_step(shape, state_dtype):
    other = torch.optim.AdamW([parameter(*shape)])
    other.step()
    optimizer = fusedstep.AdamW([p := parameter(90, 64)], state_dtype=state_dtype)
    optimizer.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match=r"has shape .* load a matching checkpoint"):
        optimizer.step()
    assert torch.equal(p, torch.ones(90, 64))


def test_a_load_that_fails_leaves_tensors():
    params = [parameter(64, 64, dtype=dtype) for dtype in (torch.float16, torch.bfloat16)]
    plain = fusedstep.AdamW(params)
    plain.step()
    optimizer = fusedstep.AdamW(params, master="split")
    with pytest.raises(RuntimeError, match='use master="float32"'):
        optimizer.load_state_dict(plain.state_dict())
    values = [value for state in optimizer.state.values() for value in state.values()]
    assert all(isinstance(value, torch.Tensor) for value in values)


def test_gradients_are_measured_before_they_are_cleared(engine):
    p = parameter(64, 64)
    optimizer = fusedstep.AdamW([p], state_dtype="int8", statistics=True, engine=engine)
    optimizer.step(zero_grad=True, set_to_none=False)
    assert optimizer.statistics().grad_norm == 64
    assert not p.grad.any()


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_complex_numbers_are_rounded_to_nearest():
    results = []
    for engine in ("cpu", "torch"):
        p = torch.nn.Parameter(torch.full((8,), 1 + 1j))
        p.grad = torch.full((8,), 1 + 2j)
        fusedstep.AdamW([p], lr=0.1, state_dtype="float16", rounding="stochastic", engine=engine).step()
        results.append(p.detach())
    torch.testing.assert_close(*results)


def test_a_master_that_is_asked_for_later_is_kept_from_then_on():
    p = parameter(64, 64, dtype=torch.bfloat16)
    optimizer = fusedstep.AdamW([p])
    optimizer.step()
    optimizer.param_groups[0]["master"] = "split"
    optimizer.step()
    assert "master_rest" in optimizer.state[p]
    optimizer.param_groups[0]["master"] = "halves"
    with pytest.raises(ValueError, match="Invalid master: 'halves'; use one of"):
        optimizer.step()


def test_a_master_goes_with_the_dtype_that_needed_it():
    p = parameter(64, 64, dtype=torch.bfloat16)
    optimizer = fusedstep.AdamW([p], master="split")
    optimizer.step()
    p.data, p.grad = p.data.float(), torch.ones(64, 64)
    optimizer.step()
    assert "master_rest" not in optimizer.state[p]


def test_the_step_is_saved_as_long_as_states_need_it():
    p = parameter(64, 64)
    optimizer = fusedstep.SGD([p], momentum=0.9, state_dtype="int8")
    optimizer.step()
    optimizer.state_dtype = None
    optimizer.step()
    assert optimizer.state[p]["step"] == 2
