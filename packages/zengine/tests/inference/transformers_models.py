"""Tiny random models of Transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 320,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10_000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}
GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 320, "vocab_size": 96}
OPT = {"word_embed_proj_dim": 48, "ffn_dim": 72}

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "LLaMA-3, scaled rotary": ("Llama", {"rope_parameters": LLAMA3}),
    "LLaMA, YaRN": ("Llama", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "Mistral, sliding window": ("Mistral", {"sliding_window": 13}),
    "Qwen2, biases": ("Qwen2", {}),
    "Qwen3, norms of queries and keys": ("Qwen3", {"head_dim": 16}),
    "Gemma": ("Gemma", {"head_dim": 16}),
    "Gemma-2, soft caps, windows": ("Gemma2", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16}),
    "Phi, partial rotary, parallel": ("Phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 6}),
    "Phi-3, fused projections": ("Phi3", {}),
    "GPT-2": ("GPT2", GPT2),
    "GPT-NeoX, grouped projection": ("GPTNeoX", {"rotary_pct": 0.5}),
    "OPT, learnt positions": ("OPT", OPT),
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "Mixtral of eight": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "Qwen2-MoE, shared expert": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 56}),
    "Qwen3-MoE": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "Qwen3-MoE, weights as they are": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": False}),
    "OLMoE": ("Olmoe", EXPERTS),
}
MODELS = {**DENSE, **MIXTURES}
# their forms of attention have no translation; the module's own forward runs
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BLOOM, ALiBi": ("Bloom", {"n_layer": 2, "n_head": 6}),
    "gpt-oss, attention sinks": ("GptOss", {**EXPERTS, "num_local_experts": 8, "head_dim": 16, "sliding_window": 9}),
}


def model(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> nn.Module:
    """The model with weights that matter; more: of its config."""
    import transformers

    kind, given = {**MODELS, **OTHERS}[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **given, **more})
    torch.manual_seed(0)
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(torch.randn_like(param) * (1.2 * param.shape[-1] ** -0.5 if param.dim() > 1 else 0.2))
    return made.to(dtype)
