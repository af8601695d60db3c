"""Trains a small Llama with Hugging Face's Trainer, which warms up, saves and resumes as ever.

    python examples/with_hf_trainer.py --folder checkpoints

Two lines are ours: the Trainer is told the class with its options, and not to clip, since the step does.
Started again, it goes on from the last checkpoint. Nothing is downloaded; to fine-tune a model of yours, load
it with AutoModelForCausalLM.from_pretrained, and its tokenizer.
"""

import argparse
from importlib import resources

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import fusedstep

LENGTH = 32
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
ON_GPU = torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--folder", default="trainer", help="of checkpoints")
    parser.add_argument("--steps", type=int, default=100, help="in all, with those of a checkpoint")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SIZES))
    text = torch.tensor([*(resources.files("fusedstep.cli") / "sonnets.txt").read_bytes()])
    data = [{"input_ids": piece, "labels": piece} for piece in text.split(LENGTH)[:-1]]
    arguments = TrainingArguments(
        args.folder,
        max_steps=args.steps,
        per_device_train_batch_size=16,
        warmup_steps=max(1, args.steps // 10),
        lr_scheduler_type="cosine",
        weight_decay=0.1,
        max_grad_norm=0,  # the step clips
        save_steps=args.save_every,
        logging_steps=max(1, args.steps // 10),
        bf16=ON_GPU,
        use_cpu=not ON_GPU,
        report_to="none",
        disable_tqdm=True,
    )
    ours = fusedstep.AdamW, {"lr": 5e-3, "max_grad_norm": 1.0, "statistics": True}
    trainer = Trainer(model, arguments, train_dataset=data, optimizer_cls_and_kwargs=ours)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.folder))

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    norm = trainer.optimizer.optimizer.statistics().grad_norm
    steps = trainer.state.global_step
    print(f"{steps} steps: loss {losses[0]:.4f} -> {losses[-1]:.4f}, last gradient norm {norm:.3f}")


if __name__ == "__main__":
    main()
