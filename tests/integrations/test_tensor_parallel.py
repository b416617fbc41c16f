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
    find_tp_plan,
    infer_verified_plan,
    parallelize,
    plan_by_names,
    read_tp_plan,
    tp_model_init,
    verify,
    verify_on_first_call,
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
    if name == "opt":
        sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
        return transformers.OPTForCausalLM(transformers.OPTConfig(**SIZES, **sizes))
    if name == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=64, **sizes))
    if name == "deepseek":
        sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8}
        dense: dict[str, Any] = {"num_key_value_heads": 4, "first_k_dense_replace": 1, "num_experts_per_tok": 2}
        dense["experts_implementation"] = "eager"
        return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES, **sizes, **experts, **dense))
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
    found, _ = run_ranks(_all, 2, names)
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
    for expected, found in run_ranks(_generate, 2):
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
    for plain, deferred in run_ranks(_without_memory, 2):
        assert deferred == plain
        assert plain == pytest.approx(expected, abs=2e-5)


def _by_names(name: str) -> list[float]:
    model = make(name).double().train(mode=False)
    plan = plan_by_names(model, 2, vocabulary=True)
    pending = verify_on_first_call(model, plan, None)
    parallelize(model, plan)
    found = losses(model)
    assert not any(block.handle.id in model.get_submodule(block.path)._forward_pre_hooks for block in pending.blocks)
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "neox", "bert", "gpt2", "opt", "deepseek", "t5"])
def test_models_split_by_names_train_as_whole_ones(name: str) -> None:
    expected = losses(make(name).double().eval())
    for found in run_ranks(_by_names, 2, name):
        assert found == pytest.approx(expected, rel=1e-6)


def test_blocks_of_the_usual_form_are_split_between_their_layers() -> None:
    def joined(name: str) -> set[str]:
        rules = plan_by_names(make(name), 2).rules
        return {rule.pattern.rpartition(".")[2] for rule in rules if getattr(rule.style, "gathers", False)}

    assert joined("llama") == joined("qwen3") == joined("opt") == set()
    assert joined("phi3") == {"qkv_proj", "gate_up_proj"}
    assert joined("gpt2") == {"c_attn"}
    assert joined("neox") == {"query_key_value"}


def test_every_form_of_a_declared_plan_is_found() -> None:
    model: Any = make("llama")
    whole = dict(find_tp_plan(model))
    assert whole["model.layers.*.self_attn.o_proj"] == "rowwise"
    model._tp_plan = {"lm_head": "colwise_rep"}  # as before 4.50: the rest is in the config, or in the base model
    assert find_tp_plan(model) == {**whole, "lm_head": "colwise_rep"}
    model.model._tp_plan = {}
    without_embedding = {key: style for key, style in whole.items() if "embed" not in key}
    assert find_tp_plan(model) == {**without_embedding, "lm_head": "colwise_rep"}
    assert find_tp_plan(nn.ModuleDict({"inner": model}))["inner.model.layers.*.mlp.down_proj"] == "rowwise"
    model.config.base_model_tp_plan = None
    assert find_tp_plan(model) == {}, "the head alone is no plan"


def _declared(kind: str) -> tuple[list[float], list[str]]:
    model: Any = make(kind)
    if kind == "llama":  # local layers, whose sums an enclosing module gathers: of versions before 5
        model._tp_plan = {}
        names = {"gate_proj": "local_colwise", "up_proj": "local_colwise", "down_proj": "local_rowwise"}
        model.model._tp_plan = {f"layers.*.mlp.{name}": style for name, style in names.items()}
        model.model._tp_plan |= {"layers.*.mlp": "gather", "layers.*.input_layernorm.weight": "sequence_parallel"}
        model.config.base_model_tp_plan = None
    settings = {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 2}, "gradient_clipping": 0.0}
    settings["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine, *_ = zengine.initialize(model=model.double(), config=settings)
    found = []
    for _ in range(3):
        engine.backward(engine(**TOKENS, labels=TOKENS["input_ids"]).loss)
        found.append(engine.step().loss)
    columns = [name for name, child in model.named_modules() if isinstance(child, ColumnLinear)]
    engine.close()
    return found, columns


@pytest.mark.parametrize("kind", ["llama", "deepseek"])
def test_older_styles_and_unreadable_ones_train_as_one_process(kind: str) -> None:
    expected = losses(make(kind).double())
    for found, columns in run_ranks(_declared, 2, kind):
        assert found == pytest.approx(expected, rel=1e-6)
        assert "model.layers.0.mlp.up_proj" in columns
        assert "model.layers.0.self_attn.q_proj" not in columns
