"""PEFT's adapters under Transformers' Trainer, on two ranks, for clients.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import safetensors.torch
import torch
from clients_trl import STAGES, forget_deepspeed, llama, wait_for
from hugging_face_trainer import SAVED_AT, losses, norms, sentences, settings, trainer_of
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, set_seed

ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    "whole_head": lambda: LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], use_dora=True, task_type="CAUSAL_LM"
    ),
    "prompt": lambda: PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    "prefix": lambda: PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
}


def adapted(name: str) -> PeftModel:
    set_seed(11)
    model = llama()
    set_seed(12)
    return get_peft_model(model, ADAPTERS[name]())


def train_adapter(folder: Path, name: str) -> dict[str, Any]:
    """Train an adapter without DeepSpeed and at stages 2 and 3; save it, and resume it from the middle."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        forget_deepspeed()
        at = folder / f"{name}-{stage}"
        config = None if stage is None else str(folder / f"ds{stage}.json")
        trainer = trainer_of(at, lambda: adapted(name), config)
        trainer.train()
        trainer.save_model(str(at / "final"))
        found[str(stage)] = {"losses": losses(trainer), "norms": norms(trainer)}
        if stage is None:
            continue
        if name == "lora":
            found[str(stage)] |= merged(trainer)
        trainer.model_wrapped.destroy()
        resumed = trainer_of(at, lambda: adapted(name), config)
        resumed.train(resume_from_checkpoint=str(at / f"checkpoint-{SAVED_AT}"))
        found[str(stage)]["resumed"] = losses(resumed)[SAVED_AT:]
        resumed.model_wrapped.destroy()
    deepspeed.comm.barrier()
    saved = {
        stage: safetensors.torch.load_file(folder / f"{name}-{stage}" / "final" / "adapter_model.safetensors")
        for stage in STAGES
    }
    plain = saved[None]
    for stage in (2, 3):
        found[str(stage)]["names"] = sorted(saved[stage]) == sorted(plain)
        found[str(stage)]["apart"] = max((saved[stage][key] - plain[key]).abs().max().item() for key in plain)
    forget_deepspeed()
    return found


def merged(trainer: Any) -> dict[str, float]:
    """Merge the adapter while the engine lives, as generation servers do, take it out again, and merge for good."""
    engine, model = trainer.model_wrapped, trainer.model
    tokens = sentences()[0]["input_ids"][None]
    engine.eval()
    with torch.no_grad():
        expected = engine(input_ids=tokens).logits
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            model.merge_adapter()
        inside = engine(input_ids=tokens).logits
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            model.unmerge_adapter()
        outside = engine(input_ids=tokens).logits
        engine.destroy()
        alone = model.merge_and_unload()(input_ids=tokens).logits
    return {
        "merged": (inside - expected).abs().max().item(),
        "unmerged": (outside - expected).abs().max().item(),
        "unloaded": (alone - expected).abs().max().item(),
    }


def load_adapter(folder: Path) -> dict[str, Any]:
    """Continue with a saved adapter on a base model that stage 3 loads without its memory."""
    base, config = folder / "base", str(folder / "ds3.json")
    if os.environ["RANK"] == "0":
        llama().save_pretrained(base)
        (base / "done").touch()
    wait_for(base / "done")
    found: dict[str, Any] = {}
    for name, stage in (("plain", None), ("sharded", config)):
        for low in (False, True):
            forget_deepspeed()

            def loaded(low: bool = low) -> PeftModel:
                model = AutoModelForCausalLM.from_pretrained(base)
                adapter = str(folder / "lora-3" / "final")
                return PeftModel.from_pretrained(model, adapter, is_trainable=True, low_cpu_mem_usage=low)

            trainer = trainer_of(folder / f"loaded-{name}-{low}", loaded, stage)
            trainer.train()
            found[f"{name}-{low}"] = losses(trainer)
            if stage is not None:
                trainer.model_wrapped.destroy()
    forget_deepspeed()
    return found


def write_configs(folder: Path) -> None:
    """Write one config for each stage; both ranks write the same."""
    folder.mkdir(exist_ok=True)
    for stage in (2, 3):
        at = folder / f"ds{stage}.json.{os.environ['RANK']}"
        at.write_text(json.dumps(settings(stage)))
        at.replace(folder / f"ds{stage}.json")
