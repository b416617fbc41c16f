"""Decoders of Transformers are recognized by what they compute, and equal their modules.

Tiny models with random weights and odd sizes; no class of Transformers is named in zengine.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from zengine.inference.cache import KVCache
from zengine.inference.decoder import DecoderPass
from zengine.inference.generation import Request, generate
from zengine.inference.recognize import NotRecognized, recognize
from zengine.inference.sampling import Sampling
from zengine.inference.structure import MLP
from zengine.inference.verify import verify

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers")

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
FULL = {**SIZES, "num_key_value_heads": 6}
GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 128,
    **dict.fromkeys(("bos_token_id", "eos_token_id")),
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LLaMA": ("LlamaConfig", SIZES),
    "LLaMA, seven query heads to one": (
        "LlamaConfig",
        {**SIZES, "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "LLaMA 3": ("LlamaConfig", {**SIZES, "rope_parameters": LLAMA_3}),
    "YaRN": ("LlamaConfig", {**SIZES, "rope_parameters": YARN}),
    "Mistral": ("MistralConfig", {**SIZES, "sliding_window": 16}),
    "Qwen 2": ("Qwen2Config", SIZES),
    "Qwen 3": ("Qwen3Config", {**SIZES, "head_dim": 16}),
    "Gemma": ("GemmaConfig", {**SIZES, "head_dim": 16}),
    "Gemma 2": ("Gemma2Config", {**SIZES, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 20}),
    "Gemma 3": ("Gemma3TextConfig", {**SIZES, "head_dim": 16, "sliding_window": 16}),
    "Phi": ("PhiConfig", {**FULL, "partial_rotary_factor": 0.5}),
    "Phi 3": ("Phi3Config", SIZES),
    "GPT-2": ("GPT2Config", GPT),
    "GPT-J": ("GPTJConfig", {**GPT, "rotary_dim": 4}),
    "GPT-NeoX": ("GPTNeoXConfig", {**FULL, "rotary_pct": 0.5}),
    "OPT": ("OPTConfig", {**FULL, "ffn_dim": 80, "word_embed_proj_dim": 48}),
    "Mixtral": ("MixtralConfig", {**SIZES, "num_local_experts": 4}),
    "Qwen 3, experts": (
        "Qwen3MoeConfig",
        {**SIZES, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "Granite": (
        "GraniteConfig",
        {
            **SIZES,
            "residual_multiplier": 0.3,
            "embedding_multiplier": 4.0,
            "logits_scaling": 3.0,
            "attention_multiplier": 0.1,
        },
    ),
    "OLMo 2": ("Olmo2Config", SIZES),
    "Cohere": ("CohereConfig", SIZES),
    "StableLM": ("StableLmConfig", SIZES),
    "Falcon": ("FalconConfig", {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model with weights three times as large as usual, and gains that differ."""
    import transformers

    kind, given = MODELS[name]
    torch.manual_seed(1)
    model: Any = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**given))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) / 10) if param.dim() == 1 else param.mul_(3)
    return model.to(dtype).eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_decoder_equals_its_module(name: str) -> None:
    model = make(name)
    decoder = recognize(model)
    verified = verify(decoder, model, num_tokens=40)
    assert max(verified.prompt_error, verified.decode_error) < 1e-5
    is_mixture = name in ("Mixtral", "Qwen 3, experts")
    assert all(isinstance(block.mlp, MLP) != is_mixture for block in decoder.blocks)


@pytest.mark.parametrize("name", ["LLaMA", "Gemma 2", "Qwen 3", "GPT-2", "Phi", "Mixtral"])
def test_bfloat16_weights_are_recognized(name: str) -> None:
    model = make(name, torch.bfloat16)
    verify(recognize(model), model)


@pytest.mark.parametrize("name", ["LLaMA 3", "Mistral", "Gemma 3", "GPT-2", "GPT-NeoX", "Qwen 3, experts"])
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    model = make(name)
    decoder = recognize(model)
    ids = torch.randint(0, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(2))
    wanted = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, 9:].tolist()
    rule = Sampling(max_new_tokens=24, temperature=0)
    request = Request(prompt=tuple(ids[0].tolist()), sampling=rule)
    ((found,),) = generate(DecoderPass(decoder, KVCache.create(decoder, 2, 40)), [request])
    assert list(found.tokens) == wanted


def test_positions_by_slopes_are_said_to_be_unknown() -> None:
    import transformers

    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=48, n_layer=2, n_head=6)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(NotRecognized, match=r"what transformer\.h\.0\.self_attention\.dense reads is no causal"):
        recognize(model)
