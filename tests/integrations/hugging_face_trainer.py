"""Shared parts of hugging_face.py: a tiny model, its data, a config, and a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

STEPS, SAVED_AT = 4, 2


def tiny() -> GPT2Config:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    size = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2Config(**size, **dropout, bos_token_id=0, eos_token_id=0)


def sentences() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 32, (64, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def settings(stage: int) -> dict[str, Any]:
    """Return a typical config for Trainer; at stage 2 Trainer makes the optimizer."""
    auto = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
    )
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    options = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    return {
        **auto,
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, **dict.fromkeys(sizes, "auto")},
        **({} if stage == 2 else {"optimizer": {"type": "AdamW", "params": options}}),
    }


def arguments_of(folder: Path, config: str | None, micro_batch: int = 2) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        save_steps=SAVED_AT,
        logging_steps=1,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        report_to=[],
        disable_tqdm=True,
        seed=11,
        deepspeed=config,
    )


def trainer_of(folder: Path, model: Callable[[], Any], config: str | None) -> Trainer:
    arguments = arguments_of(folder, config)  # before the model: at stage 3 it configures Transformers
    return Trainer(model=model(), args=arguments, train_dataset=sentences())


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def fresh() -> GPT2LMHeadModel:
    set_seed(11)
    return GPT2LMHeadModel(tiny())


def norms(trainer: Trainer) -> list[float]:
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
