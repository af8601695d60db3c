"""Whether training notices how states and masters are stored: one layer, for thousands of steps."""

import pytest
import torch

import fusedstep

RULES = {"AdamW": {"lr": 2e-3}, "SGD": {"lr": 5e-2, "momentum": 0.9}}


def trained(name, dtype, steps, disturbed=False, **options):
    """Parameters, and the mean loss of the last hundred steps."""
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=random)
    teacher, p = draw(64, 64) / 8, torch.nn.Parameter((draw(64, 64) / 8).to(dtype))
    optimizer = getattr(fusedstep, name)([p], **options)
    rate, losses = options["lr"], []
    for step in range(steps):
        x = draw(8, 64)
        loss = (x @ p.float() - torch.tanh(x @ teacher)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        if disturbed:
            p.grad.mul_(0.0 if 1000 <= step < 1100 else 1e4 if step == 2000 else 1.0)
            optimizer.param_groups[0]["lr"] = 10 * rate if step == 3000 else rate
        optimizer.step(zero_grad=True)
    return p, float(torch.stack(losses[-100:]).mean())


@pytest.mark.parametrize("rule", RULES)
def test_eight_bits_train_as_float32(rule):
    _, expected = trained(rule, torch.float32, 1000, **RULES[rule])
    _, loss = trained(rule, torch.float32, 1000, **RULES[rule], state_dtype="int8")
    assert loss < 1.01 * expected


def test_bfloat16_stalls_without_a_master_and_not_with_one_or_drawn():
    settings = [{"master": "split"}, {"rounding": "stochastic"}, {}]
    rates = {"lr": 1e-4, "state_dtype": "float32"}
    exact, split, drawn, plain = (
        trained("AdamW", dtype, 2000, **rates, **setting)[1]
        for dtype, setting in [(torch.float32, {}), *((torch.bfloat16, setting) for setting in settings)]
    )
    assert max(split, drawn) < 1.01 * exact < plain


def test_nothing_breaks_in_5000_steps_with_zeros_an_outlier_and_a_leap():
    _, expected = trained("AdamW", torch.float32, 5000, disturbed=True, **RULES["AdamW"])
    small = {"state_dtype": "int8", "master": "split8"}
    p, loss = trained("AdamW", torch.bfloat16, 5000, disturbed=True, **RULES["AdamW"], **small)
    assert p.isfinite().all()
    assert loss < 1.1 * expected
