"""`generate` of Transformers' models that have an inference engine: tokens of the plain module, by the fused path."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers_models import MODELS, model

import zengine.deepspeed as deepspeed
from zengine.inference.calls.module_generate import ModuleGenerate

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[0, 0, 9, 11, 3], [60, 7, 8, 2, 5]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
LLAMA = "LLaMA-3, scaled rotary"


def generated(subject: Any, **given: Any) -> Any:
    torch.manual_seed(3)
    return subject.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=8, pad_token_id=0, **given)


def fused(name: str = LLAMA, **given: Any) -> deepspeed.InferenceEngine:
    return deepspeed.init_inference(model(name), {"dtype": "fp32", "replace_with_kernel_inject": True, **given})


class Banning(transformers.LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, ::2] = -torch.inf
        return scores


class Collecting(transformers.generation.streamers.BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.is_ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.is_ended = True


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.3},
    "penalized": {"do_sample": False, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "processor": {"do_sample": False, "logits_processor": [Banning()]},
}


@pytest.mark.parametrize(
    "name", [LLAMA, "Gemma-2, soft caps, windows", "GPT-2", "Phi, partial rotary, parallel", "Mixtral"]
)
@pytest.mark.parametrize("call", CALLS)
def test_tokens_are_those_of_the_plain_module(name: str, call: str, steps_taken: list[int]) -> None:
    wanted = generated(model(name), **CALLS[call])
    engine = fused(name)
    steps_taken.clear()
    assert torch.equal(generated(engine.module, **CALLS[call]), wanted)
    assert len(steps_taken) == 7, "one fused step for each token after the first"


@pytest.mark.parametrize("name", MODELS)
def test_all_known_models_generate_by_the_fused_path(name: str, steps_taken: list[int]) -> None:
    wanted = generated(model(name))
    engine = fused(name)
    steps_taken.clear()
    assert torch.equal(generated(engine.module), wanted)
    assert steps_taken


def test_streamers_scores_and_end_tokens_are_those_of_the_plain_module() -> None:
    plain, module = model(LLAMA), fused().module
    wanted, found = Collecting(), Collecting()
    for subject, streamer in ((plain, wanted), (module, found)):
        torch.manual_seed(0)
        subject.generate(IDS[1:], max_new_tokens=6, streamer=streamer, pad_token_id=0)
    assert found.tokens == wanted.tokens
    assert found.is_ended
    end = wanted.tokens[7]
    given = {"eos_token_id": end, "return_dict_in_generate": True, "output_scores": True}
    one, other = (each.generate(IDS[1:], max_new_tokens=6, pad_token_id=0, **given) for each in (plain, module))
    assert torch.equal(one.sequences, other.sequences)
    for mine, theirs in zip(other.scores, one.scores, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_pipelines_of_transformers_decode_by_the_engine(steps_taken: list[int]) -> None:
    module = fused().module
    assert inspect.signature(module.generate) == inspect.signature(model(LLAMA).generate)
    steps_taken.clear()
    config = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    torch.testing.assert_close(
        module.generate(IDS[1:], generation_config=config),
        model(LLAMA).generate(IDS[1:], generation_config=config),
    )
    assert len(steps_taken) == 4


def test_quantized_modules_generate_by_their_codes(steps_taken: list[int]) -> None:
    engine = fused(quant={"weight": {"num_bits": 8}})
    steps_taken.clear()
    assert torch.equal(generated(engine.module), generated(engine))
    assert len(steps_taken) == 14


def test_long_prompts_are_rejected_as_by_the_engine() -> None:
    module = fused(max_out_tokens=4).module
    with pytest.raises(RuntimeError, match="Input with size 5 exceeds maximum length of 4"):
        module.generate(IDS)


def test_engines_end_and_follow_each_other(steps_taken: list[int]) -> None:
    first = fused()
    module = first.module
    second = deepspeed.init_inference(module, dtype="fp32", replace_with_kernel_inject=True)
    assert module.generate.engine is second
    wanted = generated(module)
    first.destroy()
    assert module.generate.engine is second
    second.destroy()
    assert "generate" not in vars(module)
    steps_taken.clear()
    assert torch.equal(generated(module), wanted)
    assert not steps_taken
    assert torch.equal(generated(second), wanted), "the engine is usable still"
    assert steps_taken


def test_copies_lead_to_their_own_engine() -> None:
    engine = fused()
    wanted = generated(engine.module)
    for made in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        assert made.module.generate.engine is made
        assert torch.equal(generated(made.module), wanted)
    for alone in (copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))):
        assert not isinstance(alone.generate, ModuleGenerate)
        assert torch.equal(generated(alone), wanted)
