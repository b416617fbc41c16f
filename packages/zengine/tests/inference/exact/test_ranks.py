"""Samples of an engine, at every ZeRO stage and in several worlds: their log-probabilities are those of training."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import zengine
from zcomm.testing import run_ranks
from zengine.adapters import LoRAConfig, add_lora
from zengine.inference.cache import KVCache
from zengine.inference.exact.forward import ExactForward
from zengine.inference.generation import Request, Sample, generate
from zengine.inference.sampling import Sampling
from zpartition import gathered

pytest.importorskip("transformers")

REQUESTS = [
    Request(
        prompt=tuple(range(3, 3 + length)),
        sampling=Sampling(max_new_tokens=4 + length, stop_tokens=(5,), top_p=0.95),
        seeds=tuple(range(length, length + 3)),
    )
    for length in (3, 19, 1, 30)
]


def _llama(dtype: torch.dtype, with_adapters: bool) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    if with_adapters:
        add_lora(model, LoRAConfig(lora_r=4, lora_alpha=8, target_mods=["q_proj", "down_proj"]))
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    param.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
    return model


def _padded(samples: list[list[Sample]], *, on_left: bool) -> tuple[Tensor, Tensor]:
    """Token ids and mask, (samples, time), of prompts and answers."""
    rows = [
        torch.tensor([*request.prompt, *sample.tokens])
        for request, answers in zip(REQUESTS, samples, strict=True)
        for sample in answers
    ]
    time = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), time, dtype=torch.int64)
    for index, row in enumerate(rows):
        where = slice(time - len(row), None) if on_left else slice(0, len(row))
        ids[index, where], mask[index, where] = row, 1
    return ids, mask


def _log_probs(engine: Any, samples: list[list[Sample]], *, on_left: bool) -> list[tuple[float, ...]]:
    """Log-probabilities of the answers by the engine, as a trainer computes them."""
    ids, mask = _padded(samples, on_left=on_left)
    logits = engine(ids, attention_mask=mask, use_cache=False).logits
    found = torch.log_softmax(logits.float(), -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    ends = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    answers = [sample for each in samples for sample in each]
    return [
        tuple(found[row, int(end) - len(answer.tokens) : int(end)].tolist())
        for row, (answer, end) in enumerate(zip(answers, ends, strict=True))
    ]


def _sampled(stage: int, dtype: torch.dtype, with_adapters: bool) -> list[list[list[Sample]]]:
    """Sample, compare, train a step, and again; return the samples of both times."""
    model = _llama(dtype, with_adapters)
    config = {
        "train_micro_batch_size_per_gpu": 12,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    parameters = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = zengine.initialize(model=model, model_parameters=parameters, config=config)
    made = []
    with gathered(engine.module):
        exact = ExactForward.install(engine.module)
    for num_slots in (3, 5):
        cache = KVCache.create(exact.decoder, num_slots, 64)
        with gathered(engine.module):
            samples = generate(exact.steps(cache), REQUESTS)
        wanted = [sample.log_probs for each in samples for sample in each]
        assert _log_probs(engine, samples, on_left=False) == wanted, "bit for bit"
        assert _log_probs(engine.eval(), samples, on_left=True) == wanted, "padded on the left, in eval mode"
        ids, mask = _padded(samples, on_left=False)
        logits = engine.train()(ids, attention_mask=mask, use_cache=False).logits
        engine.backward(torch.log_softmax(logits.float(), -1)[..., 7].mul(mask).mean())
        engine.step()
        made.append(samples)
    exact.close()
    assert not any("forward" in vars(each) for each in model.modules())
    engine.close()
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_adapters", [False, True])
def test_samples_of_all_stages_and_worlds_have_the_trainers_bits(dtype: torch.dtype, with_adapters: bool) -> None:
    run = functools.partial(run_ranks, _sampled)
    first = run(1, 0, dtype, with_adapters)[0]
    assert first[0] != first[1], "weights were trained"
    for world, stage in ((2, 0), (4, 3)) if with_adapters else ((2, 0), (2, 1), (2, 2), (1, 3), (2, 3), (4, 3)):
        for found in run(world, stage, dtype, with_adapters):
            assert found[0] == first[0], "samples depend on weights, prompt and seed alone"
