"""Transformers' Trainer with the configs that its documentation publishes, on two ranks, for clients.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from clients_trl import forget_deepspeed, llama
from deepspeed.runtime.lr_schedules import WarmupLR
from hugging_face_trainer import losses, sentences
from transformers import Trainer, TrainingArguments

RATE, WARM = 5e-3, 2


def published(stage: int) -> dict[str, Any]:
    """Return ds_config_zero2.json or ds_config_zero3.json: offload, fp16, a schedule, and "auto" values."""
    host = {"device": "cpu", "pin_memory": True}
    reduced = {"overlap_comm": True, "contiguous_gradients": True, "offload_optimizer": host}
    second = {"allgather_partitions": True, "allgather_bucket_size": 2e8, "reduce_scatter": True}
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    third = {
        "offload_param": host,
        "sub_group_size": 1e9,
        **dict.fromkeys(sizes, "auto"),
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    scale = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2}
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    warmup = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
    options = ("lr", "betas", "eps", "weight_decay")
    return {
        "fp16": {"enabled": "auto", **scale, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(options, "auto")},
        "scheduler": {"type": "WarmupLR", "params": dict.fromkeys(warmup, "auto")},
        "zero_optimization": {"stage": stage, **reduced, **(second if stage == 2 else third)},
        **dict.fromkeys((*batch, "gradient_clipping"), "auto"),
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }


def trainer_of(folder: Path, stage: int | None, **more: Any) -> Trainer:
    """Return a trainer; without a stage, a plain one with DeepSpeed's schedule."""
    forget_deepspeed()
    arguments = TrainingArguments(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "per_device_train_batch_size": 2,
            "max_steps": 4,
            "save_strategy": "no",
            "logging_steps": 1,
            "learning_rate": RATE,
            "warmup_steps": WARM,
            "report_to": [],
            "disable_tqdm": True,
            "seed": 11,
            "deepspeed": None if stage is None else published(stage),
            **more,
        }
    )
    model, optimizers = llama(), (None, None)
    if stage is None:
        plain = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
        optimizers = plain, WarmupLR(plain, 0.0, RATE, WARM)
    rows = sentences()
    return Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:8], optimizers=optimizers)


def train(folder: Path) -> dict[str, Any]:
    found = {}
    for stage in (None, 2, 3):
        trainer = trainer_of(folder / f"{stage}", stage)
        trainer.train()
        found[str(stage)] = losses(trainer)
        if stage is not None:
            trainer.model_wrapped.destroy()
    return found


def resume(folder: Path) -> dict[str, Any]:
    """Train in 16 bits, resume from the middle, and end with the best of the saved models."""
    found: dict[str, Any] = {}
    saves = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    for half, stage in (("fp16", 2), ("bf16", 3)):
        make = functools.partial(
            trainer_of, folder / half, stage, **saves, load_best_model_at_end=True, **{half: True}
        )
        whole = make()
        whole.train()
        best = whole.evaluate()["eval_loss"]
        whole.model_wrapped.destroy()
        resumed = make()
        resumed.train(resume_from_checkpoint=str(folder / half / "checkpoint-2"))
        resumed.model_wrapped.destroy()
        found[half] = {"losses": losses(whole), "resumed": losses(resumed)[2:]}
        found[half] |= {"best": best, "metric": whole.state.best_metric}
    return found


def evaluate(folder: Path) -> dict[str, Any]:
    """Evaluate and predict with a model that was never trained: ZeRO inference at stage 3."""
    found = {}
    for stage in (None, 3):
        trainer = trainer_of(folder / f"{stage}", stage)
        logits = torch.as_tensor(trainer.predict(sentences()[:8]).predictions)
        found[str(stage)] = [trainer.evaluate()["eval_loss"], logits.abs().sum().item()]
    return found


def checks(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    made = {"train": train, "resume": resume, "evaluate": evaluate}
    return {f"published-{name}": functools.partial(check, folder / name) for name, check in made.items()}
