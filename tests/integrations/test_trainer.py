"""Hugging Face's Trainer with our optimizers: mixed precision, clipping, warm-up, checkpoints."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

import fusedstep
from fusedstep.cli import references

LIMIT = 0.5
STEPS, WARMUP = 12, 3

optimizers = pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (fusedstep.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        # a smaller eps would make a whole step of a gradient that is but the noise of sixteen bits
        (fusedstep.AdamW, torch.optim.AdamW, {"lr": 0.01, "eps": 1e-2}),
        (fusedstep.Lamb, references.Lamb, {"lr": 0.02, "eps": 1e-2, "max_grad_norm": None}),
    ],
    ids=["sgd", "adamw", "lamb"],
)
pytestmark = pytest.mark.usefixtures("one_thread")
# weights that differ in their last bit may be cast to neighbours in bfloat16
precisions = pytest.mark.parametrize(("bf16", "tolerance"), [(False, 1e-5), (True, 5e-3)], ids=["fp32", "bf16"])
ways = pytest.mark.parametrize("as_class", [True, False], ids=["class", "instance"])


def train(path, cls, options, as_class=True, checkpoint=None, seed=0, **arguments):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, initializer_range=0.2, **sizes))
    tokens = torch.randint(3, 50, (32, 8), generator=torch.Generator().manual_seed(0))
    if as_class:
        given = {"optimizer_cls_and_kwargs": (cls, options)}
    else:
        optimizer = cls(model.parameters(), **options)
        given = {"optimizers": (optimizer, get_linear_schedule_with_warmup(optimizer, WARMUP, STEPS))}
    arguments = {"bf16": True, "max_grad_norm": LIMIT, "save_strategy": "no", **arguments}
    arguments |= {"max_steps": STEPS, "warmup_steps": WARMUP, "weight_decay": 0.1, "logging_steps": 1}
    arguments = TrainingArguments(path, use_cpu=True, report_to="none", disable_tqdm=True, **arguments)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model, arguments, train_dataset=data, **given)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def assert_close(trainer, other, tolerance):
    for p, q in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@ways
@precisions
@optimizers
def test_clipped_by_the_trainer_it_gives_what_the_replaced_optimizer_gives(
    ours, theirs, options, bf16, tolerance, as_class, tmp_path
):
    a, b = (train(tmp_path, cls, options, as_class, bf16=bf16) for cls in (ours, theirs))
    assert_close(a, b, tolerance)


@precisions
@optimizers
def test_clipping_in_the_step_gives_what_clipping_by_the_trainer_gives(
    ours, theirs, options, bf16, tolerance, tmp_path
):
    a = train(tmp_path, ours, {**options, "max_grad_norm": LIMIT}, bf16=bf16, max_grad_norm=0)
    b = train(tmp_path, theirs, options, bf16=bf16)
    assert_close(a, b, tolerance)


@ways
@optimizers
def test_the_loss_goes_down_while_the_rate_warms_up_and_falls(ours, theirs, options, as_class, tmp_path):
    trainer = train(tmp_path, ours, options, as_class)
    losses, rates = logged(trainer, "loss"), logged(trainer, "learning_rate")
    assert sum(losses[-4:]) < sum(losses[:4]) - 0.5
    slope = [min(i / WARMUP, (STEPS - i) / (STEPS - WARMUP)) for i in range(STEPS)]
    assert rates == pytest.approx([options["lr"] * x for x in slope])


@ways
@optimizers
def test_training_resumed_from_a_checkpoint_ends_where_training_without_a_stop_does(
    ours, theirs, options, as_class, tmp_path
):
    options = {**options, "max_grad_norm": LIMIT}
    rest = {"max_grad_norm": 0, "save_strategy": "steps", "save_steps": 6}
    whole = train(tmp_path, ours, options, as_class, **rest)
    # from other weights, which the checkpoint replaces
    resumed = train(tmp_path, ours, options, as_class, tmp_path / "checkpoint-6", seed=1, **rest)
    assert logged(resumed, "loss") == logged(whole, "loss")
    a, b = whole.optimizer.state, resumed.optimizer.state
    for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)
        assert a[p].keys() == b[q].keys()
        assert all(torch.equal(value, b[q][name]) for name, value in a[p].items())
