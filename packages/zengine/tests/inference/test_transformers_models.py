"""Tiny random models of Transformers: all parts of each are fused, and compute what the module computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zengine.inference.cache import KVCache
from zengine.inference.decoder import DecoderPass
from zengine.inference.quantized import quantized
from zengine.inference.recognize import recognize
from zengine.inference.structure import Decoder, Mixture
from zengine.inference.verify import verify
from zprecision.backends import native
from zprecision.quant import Int4, Int8

transformers = pytest.importorskip("transformers")
needs_kernels = pytest.mark.skipif(native.library() is None, reason="the kernels are not built")

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
    "Qwen2-MoE, shared expert": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 56}),
    "Qwen3-MoE": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "Qwen3-MoE, weights as they are": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": False}),
    "OLMoE": ("Olmoe", EXPERTS),
}
MODELS = {**DENSE, **MIXTURES}


def model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model with weights that matter."""
    kind, given = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **given})
    torch.manual_seed(0)
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(torch.randn_like(param) * (1.2 * param.shape[-1] ** -0.5 if param.dim() > 1 else 0.2))
    return made.to(dtype)


def steps_of(decoder: Decoder, num_slots: int = 4) -> DecoderPass:
    return DecoderPass(decoder, KVCache.create(decoder, num_slots, 48))


@needs_kernels
@pytest.mark.parametrize("name", MODELS)
def test_all_parts_are_fused_and_within_1e5_of_the_module(name: str) -> None:
    subject = model(name)
    decoder = recognize(subject)
    assert decoder.opaque == ()
    assert [isinstance(block.mlp, Mixture) for block in decoder.blocks] == [name in MIXTURES] * 2
    report = steps_of(decoder).fused
    assert report.reasons == {}
    assert len(report.fused) == 3
    verified = verify(decoder, subject, num_tokens=40)
    assert max(verified.prompt_error, verified.decode_error) < 1e-5


@needs_kernels
@pytest.mark.parametrize("name", ["GPT-2", "LLaMA-3, scaled rotary", "OPT, learnt positions", "Mixtral"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_weights_are_fused(name: str, dtype: torch.dtype) -> None:
    subject = model(name, dtype)
    decoder = recognize(subject)
    assert steps_of(decoder).fused.reasons == {}
    verify(decoder, subject)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2-MoE, shared expert"])
def test_a_mixture_says_how_it_chooses(name: str) -> None:
    mixture = recognize(model(name)).blocks[1].mlp
    assert isinstance(mixture, Mixture)
    if name == "Mixtral":
        assert (mixture.top_k, mixture.is_renormalized, mixture.shared, len(mixture.experts)) == (2, True, None, 5)
    else:
        assert (mixture.top_k, mixture.is_renormalized, len(mixture.experts)) == (3, False, 8)
        assert mixture.shared is not None
        assert mixture.shared_gate is not None


@needs_kernels
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("format", [Int8(), Int4()], ids=str)
def test_quantized_experts_are_fused(name: str, format: Any) -> None:
    decoder, report = quantized(recognize(model(name)), format)
    per_expert = sum(".experts." in row.name for row in report.layers)
    assert per_expert == 2 * 2 * (5 if name == "Mixtral" else 8)
    steps, ids = steps_of(decoder), torch.arange(12) * 7 % 96
    assert steps.fused.reasons == {}
    found = torch.cat([steps.forward_each(ids[at : at + 1], [1]) for at in range(12)])
    with native.use_level("none"):
        slow = steps_of(decoder)
        wanted = torch.cat([slow.forward_each(ids[at : at + 1], [1]) for at in range(12)])
    assert float((found - wanted).norm() / wanted.norm()) < 0.02


class Listed(nn.Module):
    """Experts as modules of their own, with a linear router, as models had them before they were stacked."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.top_k = nn.Linear(width, 4, bias=False), 2
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 40), nn.GELU(), nn.Linear(40, width)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.softmax(self.router(flat), -1).topk(self.top_k, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, column = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, row, expert(flat[row]) * weights[row, column, None])
        return out.view_as(x)


@needs_kernels
def test_lists_of_experts_are_fused() -> None:
    subject: Any = model("LLaMA-3, scaled rotary")
    for layer in subject.model.layers:
        layer.mlp = Listed(48)
    decoder = recognize(subject.eval())
    assert steps_of(decoder).fused.reasons == {}
    verify(decoder, subject)


class Noisy(Listed):
    """A router that no form has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.router(x).sigmoid().amax(-1, keepdim=True)


def test_other_mixtures_are_called_as_they_are() -> None:
    subject: Any = model("LLaMA-3, scaled rotary")
    subject.model.layers[1].mlp = Noisy(48)
    decoder = recognize(subject.eval())
    assert decoder.opaque == ("model.layers.1.mlp",)
    verify(decoder, subject)


@needs_kernels
def test_new_memory_of_stacked_experts_shows() -> None:
    subject: Any = model("Mixtral")
    decoder = recognize(subject)
    steps, ids = steps_of(decoder), torch.tensor([5, 9])
    before = steps.forward_each(ids, [0, 1])
    stack = subject.model.layers[0].mlp.experts.down_proj
    with torch.no_grad():
        stack.mul_(0)
    assert not torch.equal(steps.forward_each(ids, [2, 3]), before)
    fusion = steps._fusion
    stack.data = stack.data.clone()
    steps.cache.clear(0)
    assert fusion is not None
    assert not fusion.is_current
