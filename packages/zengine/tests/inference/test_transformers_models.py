"""Tiny random models of Transformers: all parts of each are fused, and compute what the module computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers_models import MIXTURES, MODELS, OTHERS, model

from zengine.inference.cache import KVCache
from zengine.inference.decoder import DecoderPass
from zengine.inference.quantized import quantized
from zengine.inference.recognize import NotRecognized, recognize
from zengine.inference.structure import Decoder, Mixture
from zengine.inference.verify import verify
from zprecision.backends import native
from zprecision.quant import Int4, Int8

pytest.importorskip("transformers")
needs_kernels = pytest.mark.skipif(native.library() is None, reason="the kernels are not built")


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


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_of_one_key_head_are_told_from_those_of_all_heads(dtype: torch.dtype) -> None:
    subject = model("Qwen3, norms of queries and keys", dtype, num_key_value_heads=1)
    decoder = recognize(subject)
    attention = decoder.blocks[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_size) == (6, 1, 16)
    assert steps_of(decoder).fused.reasons == {}
    verify(decoder, subject)


@pytest.mark.parametrize("name", OTHERS)
def test_other_attention_is_named(name: str) -> None:
    with pytest.raises(
        NotRecognized, match=r"biases of the scores, such as ALiBi's, and attention sinks have no form"
    ):
        recognize(model(name))
