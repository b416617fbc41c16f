"""TRL's trainers on two ranks, for clients.py: each without DeepSpeed, and at stages 2 and 3."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset, load_from_disk
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

WORDS = ("<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(29)))
STAGES = (None, 2, 3)


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def llama_config(**more: Any) -> LlamaConfig:
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaConfig(max_position_embeddings=32, **size, **tokens, **more)


def llama() -> LlamaForCausalLM:
    set_seed(11)
    return LlamaForCausalLM(llama_config())


def forget_deepspeed() -> None:
    """Let the next trainer choose anew whether it uses DeepSpeed."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    AcceleratorState._reset_state()
    unset_hf_deepspeed_config()


def settings(stage: int | None) -> dict[str, Any] | None:
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    auto = dict.fromkeys((*sizes, "gradient_clipping"), "auto")
    return None if stage is None else {**auto, "bf16": {"enabled": "auto"}, "zero_optimization": zero}


def options(folder: Path, stage: int | None) -> dict[str, Any]:
    """Return what all trainers' arguments have."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 11,
        "deepspeed": settings(stage),
    }


def texts(count: int, length: int, seed: int) -> list[str]:
    numbers = torch.randint(0, 29, (count, length), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{number}" for number in row) for row in numbers.tolist()]


PREFERENCES = {"prompt": texts(32, 4, 1), "chosen": texts(32, 5, 2), "rejected": texts(32, 6, 3)}
ADAPTER = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


def sft(folder: Path, stage: int | None, saved: Path, *, adapts: bool = False) -> Any:
    return SFTTrainer(
        model=llama(),
        args=SFTConfig(max_length=16, **options(folder, stage)),
        train_dataset=Dataset.from_dict({"text": texts(32, 10, 1)}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(**ADAPTER) if adapts else None,
    )


def sft_lora(folder: Path, stage: int | None, saved: Path) -> Any:
    return sft(folder, stage, saved, adapts=True)


def dpo(folder: Path, stage: int | None, saved: Path) -> Any:
    """DPO with a reference model that follows the trained one."""
    return DPOTrainer(
        model=llama(),
        ref_model=llama(),
        args=DPOConfig(max_length=16, sync_ref_model=True, ref_model_sync_steps=1, **options(folder, stage)),
        train_dataset=Dataset.from_dict(PREFERENCES),
        processing_class=tokenizer(),
    )


def dpo_precomputed(folder: Path, stage: int | None, saved: Path) -> Any:
    """DPO whose reference is the model itself before training, evaluated by an engine of its own."""
    folder.mkdir(exist_ok=True)
    data = on_disk(Dataset.from_dict(PREFERENCES), folder / "data")
    return DPOTrainer(
        model=llama(),
        args=DPOConfig(max_length=16, precompute_ref_log_probs=True, **options(folder, stage)),
        train_dataset=data,
        processing_class=tokenizer(),
        peft_config=LoraConfig(**ADAPTER),
    )


def kto(folder: Path, stage: int | None, saved: Path) -> Any:
    data = {"prompt": texts(32, 4, 1), "completion": texts(32, 5, 2), "label": [True, False] * 16}
    return KTOTrainer(
        model=llama(),
        ref_model=llama(),
        args=KTOConfig(max_length=16, **options(folder, stage)),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(),
    )


def reward(folder: Path, stage: int | None, saved: Path) -> Any:
    arguments = RewardConfig(max_length=16, **options(folder, stage))  # before the model, which stage 3 shards
    return RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(saved / "reward"),
        args=arguments,
        train_dataset=Dataset.from_dict({name: PREFERENCES[name] for name in ("chosen", "rejected")}),
        processing_class=tokenizer(),
    )


def score(completions: list[str], **_: Any) -> list[float]:
    return [sum(word.endswith("3") for word in text.split()) + len({*text.split()}) / 10 for text in completions]


def grpo(
    folder: Path, stage: int | None, saved: Path, *, kinds: Any = None, adapts: bool = False, **more: Any
) -> Any:
    """GRPO with a reference model; generation runs inside `unwrap_model_for_generation`."""
    trainer, arguments = kinds or (GRPOTrainer, GRPOConfig)
    fixed = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
    return trainer(
        model=str(saved / "causal"),
        reward_funcs=score,
        args=arguments(**{**options(folder, stage), **fixed, **more}),
        train_dataset=Dataset.from_dict({"prompt": texts(32, 4, 1)}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(**ADAPTER) if adapts else None,
    )


def grpo_sharded(folder: Path, stage: int | None, saved: Path) -> Any:
    return grpo(folder, stage, saved, ds3_gather_for_generation=False)


def grpo_lora(folder: Path, stage: int | None, saved: Path) -> Any:
    return grpo(folder, stage, saved, adapts=True)


def grpo_hybrid(folder: Path, stage: int | None, saved: Path) -> Any:
    """GRPO whose answers the hybrid engine generates."""
    section = {"hybrid_engine": {"enabled": True, "max_out_tokens": 32}}
    chosen = settings(stage)
    return grpo(folder, stage, saved, deepspeed=None if chosen is None else {**chosen, **section})


def grpo_reused(folder: Path, stage: int | None, saved: Path) -> Any:
    """Each generation is trained on twice, with checkpointing, and the reference follows every second step."""
    follows = {"sync_ref_model": True, "ref_model_sync_steps": 2, "gradient_checkpointing": True}
    return grpo(folder, stage, saved, num_iterations=2, steps_per_generation=4, max_steps=6, **follows)


def rloo(folder: Path, stage: int | None, saved: Path) -> Any:
    return grpo(folder, stage, saved, kinds=(RLOOTrainer, RLOOConfig))


TRAINERS = (
    *(sft, sft_lora, dpo, dpo_precomputed, kto, reward),
    *(grpo, grpo_sharded, grpo_lora, grpo_hybrid, grpo_reused, rloo),
)
LOGGED = ("loss", "grad_norm", "reward", "kl", "rewards/margins")


def on_disk(data: Dataset, folder: Path) -> Dataset:
    """Return `data` from a folder that rank 0 writes: TRL's ranks share results through its files."""
    if os.environ["RANK"] == "0":
        shutil.rmtree(folder, ignore_errors=True)
        data.save_to_disk(str(folder))
        (folder / "done").touch()
    wait_for(folder / "done")
    return load_from_disk(str(folder))


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def save_models(folder: Path) -> None:
    """Save a language model and a reward model; rank 0 writes."""
    if os.environ["RANK"] == "0":
        llama().save_pretrained(folder / "causal")
        tokenizer().save_pretrained(folder / "causal")
        AutoModelForSequenceClassification.from_config(llama_config(num_labels=1)).save_pretrained(folder / "reward")
        (folder / "done").touch()
    wait_for(folder / "done")


def compare(folder: Path, saved: Path, make: Any) -> dict[str, Any]:
    """Train with `make(folder, stage, saved)` without DeepSpeed and at both stages; return what was logged."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        forget_deepspeed()
        trainer = make(folder / f"{make.__name__}-{stage}", stage, saved)
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        found[str(stage)] = [[entry[name] for name in LOGGED if name in entry] for entry in logged]
        found[f"type-{stage}"] = type(trainer.model_wrapped).__name__
        if stage is not None:
            for engine in (trainer.model_wrapped, getattr(trainer, "ref_model", None)):
                if hasattr(engine, "destroy"):
                    engine.destroy()
    forget_deepspeed()
    return found
