"""Hugging Face: its Trainer by our helper, accelerate, PEFT and TRL. test_trainer.py has the Trainer itself."""

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import fusedstep
from fusedstep.integrations.hugging_face import optimizer_cls_and_kwargs
from tests.integrations import twins

QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "bf16": False, "save_strategy": "no"}
WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghij"]
SCHEDULE = {
    "max_steps": 4,
    "learning_rate": 0.02,
    "weight_decay": 0.1,
    "adam_epsilon": 1e-4,
    "logging_steps": 1,
}
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_alpha=8, init_lora_weights="gaussian")


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), initializer_range=0.2, pad_token_id=0, **sizes))


def tokenizer():
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def rows():
    drawn = torch.randint(3, len(WORDS), (16, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in drawn]


def train(path, ours, model=None, name="adamw", checkpoint=None, **arguments):
    """A trainer after four steps: with ours by the helper, or with what its arguments name."""
    args = TrainingArguments(path, **{**QUIET, **SCHEDULE, "max_grad_norm": twins.LIMIT, **arguments})
    given = {"optimizer_cls_and_kwargs": optimizer_cls_and_kwargs(args, name)} if ours else {}
    trainer = Trainer(model or llama(), args, train_dataset=rows(), **given)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trained(trainer):
    return [p for p in trainer.model.parameters() if p.requires_grad]


def test_the_helper_trains_as_the_trainers_own_adamw(tmp_path):
    ours, theirs = train(tmp_path, True), train(tmp_path, False, optim="adamw_torch")
    twins.assert_close(trained(ours), trained(theirs))
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-4)
    groups = [{g["weight_decay"] for g in t.optimizer.param_groups} for t in (ours, theirs)]
    assert groups[0] == groups[1] == {0.1, 0.0}


def test_the_limit_moves_into_the_step_and_gradients_are_clipped_once(tmp_path):
    trainer = train(tmp_path, True, optim_args="statistics=true")
    assert trainer.args.max_grad_norm == 0
    assert {group["max_grad_norm"] for group in trainer.optimizer.param_groups} == {twins.LIMIT}
    seen = trainer.optimizer.optimizer.statistics()
    assert seen.grad_norm > twins.LIMIT  # so nobody had clipped before
    assert seen.clip_factor < 1
    unclipped = train(tmp_path, True, max_grad_norm=0.0)
    twins.assert_differ(trained(trainer), trained(unclipped))


def test_training_that_the_helper_resumes_is_training_without_a_stop(tmp_path):
    rest = {"save_strategy": "steps", "save_steps": 2}
    whole = train(tmp_path, True, **rest)
    again = train(tmp_path, True, checkpoint=tmp_path / "checkpoint-2", **rest)
    twins.assert_equal(trained(whole), trained(again))
    twins.assert_states_equal(whole.optimizer, again.optimizer)


def test_training_begun_with_torchs_adamw_is_resumed_with_ours(tmp_path):
    rest = {"save_strategy": "steps", "save_steps": 2}
    theirs = train(tmp_path, False, optim="adamw_torch", **rest)
    ours = train(tmp_path, True, checkpoint=tmp_path / "checkpoint-2", **rest)
    assert {group["max_grad_norm"] for group in ours.optimizer.param_groups} == {twins.LIMIT}
    twins.assert_close(trained(ours), trained(theirs))


@pytest.mark.parametrize("name", ["fused_lion", "Lamb", "sgd", "schedule-free_adamw"])
def test_the_helper_gives_an_optimizer_what_it_takes(name, tmp_path):
    trainer = train(tmp_path, True, name=name)
    assert all(p.isfinite().all() for p in trained(trainer))
    assert type(trainer.optimizer.optimizer) is fusedstep.by_name(name.removeprefix("fused_"))


def test_options_come_before_optim_args_and_these_before_the_arguments(tmp_path):
    words = "betas=(0.8, 0.9), eps=1e-6, state_dtype=int8"
    args = TrainingArguments(tmp_path, optim_args=words, learning_rate=0.1, use_cpu=True)
    cls, options = optimizer_cls_and_kwargs(args, "adamw", eps=1e-5)
    assert cls is fusedstep.AdamW
    expected = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-5, "state_dtype": "int8", "max_grad_norm": 1.0}
    assert options == expected
    with pytest.raises(ValueError, match="Invalid optim_args: 'fast'"):
        optimizer_cls_and_kwargs(TrainingArguments(tmp_path, optim_args="fast", use_cpu=True))
    with pytest.raises(TypeError, match="AdamW got an unexpected keyword argument"):
        optimizer_cls_and_kwargs(args, nosuch=1)


def test_under_deepspeed_and_fsdp_the_trainer_goes_on_clipping(tmp_path):
    for name, value in (("deepspeed_plugin", object()), ("fsdp", "full_shard")):
        args = TrainingArguments(tmp_path, use_cpu=True)
        setattr(args, name, value)
        assert "max_grad_norm" not in optimizer_cls_and_kwargs(args)[1]
        assert args.max_grad_norm == 1.0


def test_only_what_peft_adds_is_trained_and_as_by_torch(tmp_path):
    ours, theirs = (train(tmp_path, mine, get_peft_model(llama(), LORA)) for mine in (True, False))
    assert 0 < len(trained(ours)) < len([*ours.model.parameters()])
    twins.assert_close(trained(ours), trained(theirs))
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-4)


def sft(path, ours, **arguments):
    args = SFTConfig(path, max_length=8, max_grad_norm=twins.LIMIT, **QUIET, **SCHEDULE, **arguments)
    given = {"optimizer_cls_and_kwargs": optimizer_cls_and_kwargs(args, "adamw")} if ours else {}
    texts = Dataset.from_dict({"text": [" ".join(WORDS[3 + i % 5 :]) for i in range(16)]})
    trainer = SFTTrainer(
        llama(), args, train_dataset=texts, processing_class=tokenizer(), peft_config=LORA, **given
    )
    trainer.train()
    return trainer


def test_trls_sft_trainer_with_peft_trains_as_with_torchs(tmp_path):
    ours, theirs = sft(tmp_path, True), sft(tmp_path, False, optim="adamw_torch")
    assert type(ours.optimizer.optimizer) is fusedstep.AdamW
    twins.assert_close(trained(ours), trained(theirs))
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-4)


def dpo(path, ours):
    args = DPOConfig(path, max_length=12, max_grad_norm=twins.LIMIT, **QUIET, **SCHEDULE)
    given = {"optimizers": (None, None)}
    model = llama()
    if ours:
        cls, options = optimizer_cls_and_kwargs(args, "adamw", weight_decay=0.0)
        given = {"optimizers": (cls(model.parameters(), **options), None)}
    else:
        args.weight_decay = 0.0
    pairs = [{"prompt": "a b", "chosen": f" c {w}", "rejected": f" {w} d"} for w in WORDS[3:11]]
    trainer = DPOTrainer(
        model,
        ref_model=llama(),
        args=args,
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer(),
        **given,
    )
    trainer.train()
    return trainer


def test_trls_dpo_trainer_takes_an_optimizer_and_trains_as_with_torchs(tmp_path):
    ours, theirs = dpo(tmp_path, True), dpo(tmp_path, False)
    assert type(ours.optimizer.optimizer) is fusedstep.AdamW
    twins.assert_close(trained(ours), trained(theirs), 1e-4)


@pytest.mark.parametrize("fused", [None, True])
def test_accelerate_sees_a_skipped_step_unless_fused(fused):
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = fusedstep.AdamW([p], lr=0.1, fused=fused)
    accelerated = AcceleratedOptimizer(optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    schedule = AcceleratedScheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), accelerated)
    for gradient in (1.0, float("inf"), 1.0):
        accelerated.scaler.scale((p * gradient).sum()).backward()
        before = p.detach().clone()
        accelerated.step()
        schedule.step()
        is_bad = gradient != 1.0
        # accelerate asks whether step() was called, which with fused=True it always is
        assert accelerated.step_was_skipped == (is_bad and not fused)
        assert torch.equal(p, before) == is_bad
        accelerated.zero_grad()
    # of its own steps a schedule takes none after one that accelerate saw skipped
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** (3 if fused else 2))
    assert bool(optimizer.skipped_steps) == bool(fused)
