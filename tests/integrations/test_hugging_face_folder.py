"""A Hugging Face folder in several files fills models that are split in every way, each rank reading its own rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zengine
from zckpt import CheckpointError
from zcomm.testing import run_ranks

IDS = torch.arange(12).view(2, 6) % 31


def llama() -> nn.Module:
    """With weights that no folder has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    made: nn.Module = LlamaForCausalLM(config)
    with torch.no_grad():
        for param in made.parameters():
            param.fill_(7.0)
    return made


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_unit_size": 900}
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": zero, **more}


def losses(engine: zengine.Engine) -> list[float]:
    """Before and after a step, in which masters show."""
    found = []
    for _ in range(2):
        loss = engine(input_ids=IDS, labels=IDS).loss
        found.append(loss.item())
        engine.backward(loss)
        engine.step()
    return found


def _filled(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, stage, more in (
        ("stage 1", 1, {}),
        ("stage 3", 3, {}),
        ("tensor ranks", 0, {"tensor_parallel": {"autotp_size": 2}}),
        ("tensor ranks, stage 2", 2, {"tensor_parallel": {"autotp_size": 2}}),
    ):
        with zengine.initialize(model=llama(), config=config(stage, **more))[0] as engine:
            assert engine.dp_world_size == (1 if more else 2)
            engine.load_weights(folder)
            found[name] = losses(engine)
    with zengine.initialize(model=llama(), config=config(3))[0] as engine:
        missing = folder if torch.distributed.get_rank() else folder / "absent"
        with pytest.raises(CheckpointError, match="absent"):
            engine.load_weights(missing)
    return found


def test_a_folder_fills_models_that_are_split(tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = type(llama())(llama().config)
    whole.save_pretrained(tmp_path / "llama", max_shard_size="4KB")
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) > 2
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01, weight_decay=0.0)
    expected = []
    for _ in range(2):
        loss = whole(input_ids=IDS, labels=IDS).loss
        expected.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
    for rank in run_ranks(_filled, 2, tmp_path / "llama", timeout_s=120):
        for name, curve in rank.items():
            assert curve == pytest.approx(expected, rel=1e-5), name
