"""Tensor parallelism of Transformers' models on two ranks, with inferred plans and with the models' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zengine
import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zpartition.tensor import (
    ColumnConv1D,
    ColumnLinear,
    RowLinear,
    VocabularyEmbedding,
    infer_verified_plan,
    parallelize,
    read_tp_plan,
    tp_model_init,
    verify,
)

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOKENS = {"input_ids": torch.arange(12).view(2, 6)}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32, bos_token_id=1, eos_token_id=2
        )
        return transformers.GPT2LMHeadModel(config)
    kind = {"llama": "Llama", "qwen3": "Qwen3", "phi3": "Phi3", "neox": "GPTNeoX", "bert": "Bert"}[name]
    grouped = {"num_key_value_heads": 2} if name in ("llama", "qwen3", "phi3") else {}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **grouped)
    head = "ForMaskedLM" if name == "bert" else "ForCausalLM"
    return getattr(transformers, f"{kind}{head}")(config)


def losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        loss = model(**TOKENS, labels=TOKENS["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def _split(name: str) -> tuple[list[float], dict[str, str]]:
    model = make(name).double().eval()
    parallelize(model, infer_verified_plan(model, None, kwargs=TOKENS, vocabulary=True))
    kinds = {path: type(module).__name__ for path, module in model.named_modules()}
    if own := getattr(make(name), "tp_plan", None):
        whole = make(name).double()
        verify(whole, read_tp_plan(own, whole), None, kwargs=TOKENS)
    return losses(model), kinds


def _all(names: list[str]) -> dict[str, tuple[list[float], dict[str, str]]]:
    return {name: _split(name) for name in names}


def test_six_model_families_train_split_as_they_do_whole() -> None:
    names = ["llama", "qwen3", "phi3", "neox", "gpt2", "bert"]
    found, _ = run_ranks(_all, 2, names, timeout_s=240)
    for name, (ours, kinds) in found.items():
        assert ours == pytest.approx(losses(make(name).double().eval()), abs=1e-9), name
        assert VocabularyEmbedding.__name__ in kinds.values()  # only positions in BERT, whose head shares a bias
        assert (RowLinear if name != "gpt2" else ColumnConv1D).__name__ in kinds.values()
    assert found["phi3"][1]["model.layers.0.mlp.gate_up_proj"] == ColumnLinear.__name__
    assert found["bert"][1]["bert.encoder.layer.0.attention.self.query"] == ColumnLinear.__name__


def _generate() -> tuple[Any, Any]:
    whole = make("llama").eval()
    model = tp_model_init(make("llama").eval(), 2)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    return whole.generate(**TOKENS, **options).tolist(), model.generate(**TOKENS, **options).tolist()


def test_a_split_model_generates_with_its_own_cache() -> None:
    for expected, found in run_ranks(_generate, 2, timeout_s=240):
        assert found == expected


def _without_memory() -> list[list[float]]:
    """Train by the model's plan at stage 3, built with and without zero.Init."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 20},
        "tensor_parallel": {"autotp_size": 2},
    }
    found = []
    for is_deferred in (False, True):
        with deepspeed.zero.Init(enabled=is_deferred):
            model = make("llama")
        with zengine.initialize(model=model, config=config)[0] as engine:
            assert model.model.layers[0].mlp.down_proj.in_features == 24
            found.append([])
            for _ in range(3):
                loss = engine(**TOKENS, labels=TOKENS["input_ids"]).loss
                engine.backward(loss)
                engine.step()
                found[-1].append(loss.item())
    return found


def test_a_model_built_inside_init_is_split_and_trains_equally() -> None:
    expected = losses(make("llama"))
    for plain, deferred in run_ranks(_without_memory, 2, timeout_s=240):
        assert deferred == plain
        assert plain == pytest.approx(expected, abs=2e-5)
