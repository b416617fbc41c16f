"""`engine.generate` of fused decoders: Transformers' arguments, and its tokens."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zengine
import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers")

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 128,
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "eos_token_id")),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LLaMA": ("LlamaConfig", SIZES),
    "Qwen3": ("Qwen3Config", {**SIZES, "head_dim": 8}),
    "GPT-2": ("GPT2Config", GPT),
    "GPT-NeoX": ("GPTNeoXConfig", {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}),
}


def model(name: str = "LLaMA") -> Any:
    """A random model whose logits are far apart."""
    import transformers

    kind, given = MODELS[name]
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**given))
    with torch.no_grad():
        for param in made.parameters():
            param.mul_(4) if param.dim() > 1 else param
    return made.float().eval()


def engine_of(subject: Any, **given: Any) -> Any:
    return deepspeed.init_inference(subject, {"dtype": "fp32", "replace_with_kernel_inject": True, **given})


def prompts() -> tuple[Tensor, Tensor]:
    """Two prompts of 9 and 5 tokens, padded on the left; with the attention mask."""
    ids = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    ids[1, :4], mask[1, :4] = 0, 0
    return ids, mask


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the passes of fused decoders; -n: one token of each of n sequences."""
    from zengine.inference.decoder import DecoderPass

    lengths: list[int] = []
    forward = DecoderPass.forward

    def counted(self: DecoderPass, ids: Tensor, slot: int) -> Tensor:
        lengths.append(len(ids))
        return forward(self, ids, slot)

    each = DecoderPass.forward_each

    def counted_each(self: DecoderPass, ids: Tensor, slots: Sequence[int]) -> Tensor:
        lengths.append(-len(ids))
        return each(self, ids, slots)

    monkeypatch.setattr(DecoderPass, "forward", counted)
    monkeypatch.setattr(DecoderPass, "forward_each", counted_each)
    return lengths


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_the_module(name: str, calls: list[int]) -> None:
    subject = model(name)
    ids, mask = prompts()
    given = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    wanted = subject.generate(ids, **given)
    engine = engine_of(subject)
    calls.clear()
    found = engine.generate(ids, **given)
    assert torch.equal(found, wanted)
    assert len(set(found[:, 9:].flatten().tolist())) > 3, "tokens differ"
    assert calls[:2] == [9, 5]
    assert calls[2:] == [-2] * 11, "one pass of both rows for each step"


ARGUMENTS: dict[str, dict[str, Any]] = {
    "drawn": {"do_sample": True, "temperature": 0.7, "top_k": 12, "top_p": 0.9},
    "penalty": {"repetition_penalty": 1.7},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "end tokens": {"eos_token_id": [5, 8, 13, 21, 34, 55]},
    "no repeats": {"no_repeat_ngram_size": 2, "min_p": 0.01, "do_sample": True},
    "least length": {"min_new_tokens": 6, "eos_token_id": list(range(2, 60))},
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_mean_what_they_mean_in_transformers(case: str, calls: list[int]) -> None:
    subject = model()
    ids, mask = prompts()
    given = {"attention_mask": mask, "max_new_tokens": 10, **ARGUMENTS[case]}
    torch.manual_seed(5)
    wanted = subject.generate(ids, **given)
    engine = engine_of(subject)
    calls.clear()
    torch.manual_seed(5)
    assert torch.equal(engine.generate(ids, **given), wanted)
    assert calls.count(9) == 1, "a prompt is computed once for all its samples"


def test_a_config_a_streamer_and_scores_are_honoured() -> None:
    import transformers

    subject = model()
    ids, _ = prompts()
    given: dict[str, Any] = {
        "generation_config": transformers.GenerationConfig(
            max_new_tokens=5, return_dict_in_generate=True, output_scores=True, output_logits=True, pad_token_id=0
        )
    }
    wanted = subject.generate(ids[:1], **given)
    pieces: list[Tensor] = []

    class Streamer:
        def put(self, value: Tensor) -> None:
            pieces.append(value)

        def end(self) -> None:
            pieces.append(torch.tensor([-1]))

    found = engine_of(subject).generate(ids[:1], streamer=Streamer(), **given)
    assert torch.equal(found.sequences, wanted.sequences)
    assert len(found.scores) == len(found.logits) == 5
    for one, other in zip((*found.scores, *found.logits), (*wanted.scores, *wanted.logits)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.cat([each.flatten() for each in pieces[:-1]]), found.sequences[0])
    assert pieces[-1].item() == -1


def test_stopping_criteria_end_single_rows(calls: list[int]) -> None:
    subject = model()
    ids, mask = prompts()
    first = int(subject.generate(ids, attention_mask=mask, max_new_tokens=3)[0, 9])

    def ends(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return (input_ids[:, 9:] == first).any(-1)

    given = {"attention_mask": mask, "max_new_tokens": 6, "stopping_criteria": [ends]}
    assert torch.equal(engine_of(subject).generate(ids, **given), subject.generate(ids, **given))


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 2}),
        ("output_hidden_states", {"output_hidden_states": True, "return_dict_in_generate": True}),
    ],
)
def test_other_ways_to_decode_run_by_the_module(
    argument: str, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    subject = model()
    ids, _ = prompts()
    wanted = subject.generate(ids[:1], max_new_tokens=6, **given)
    engine = engine_of(subject)
    with caplog.at_level(logging.WARNING, "zengine"):
        found = [engine.generate(ids[:1], max_new_tokens=6, **given) for _ in range(2)]
    for each in found:
        one, other = (x if isinstance(x, Tensor) else x.sequences for x in (each, wanted))
        assert torch.equal(one, other)
    assert caplog.text.count(f"generate({argument}): the fused path cannot do this") == 1


def test_sequences_longer_than_the_cache_are_refused_with_what_fits() -> None:
    ids, _ = prompts()
    engine = engine_of(model(), max_out_tokens=12)
    with pytest.raises(
        RuntimeError, match=r"9 tokens and 5 new ones exceed max_out_tokens = 12.*at most 4 new tokens"
    ):
        engine.generate(ids, max_new_tokens=5)
    assert engine.generate(ids, max_new_tokens=4).shape == (2, 13)
    with pytest.raises(RuntimeError, match="Input with size 13 exceeds maximum length of 12"):
        engine.generate(torch.ones(1, 13, dtype=torch.long))
    learnt = engine_of(model("GPT-2"), max_out_tokens=4096)
    with pytest.raises(RuntimeError, match="exceed the 128 positions that the model has learnt"):
        learnt.generate(ids, max_new_tokens=121)


@pytest.mark.parametrize("name", ["LLaMA", "GPT-2"])
def test_quantized_layers_serve_both_paths(name: str, calls: list[int], caplog: pytest.LogCaptureFixture) -> None:
    ids, mask = prompts()
    given = {"attention_mask": mask, "max_new_tokens": 12}
    with caplog.at_level(logging.INFO, "zengine"):
        engine = engine_of(model(name), quant={"weight": {"num_bits": 8}})
    assert "2 blocks of" in caplog.text
    wanted = engine.module.generate(ids, **given)
    calls.clear()
    assert torch.equal(engine.generate(ids, **given), wanted)
    assert calls[:2] == [9, 5]
    path = engine._fused
    layer = engine.module.get_submodule(path.decoder.blocks[0].attention.out.name)
    assert path.decoder.blocks[0].attention.out.weight is layer.weight, "one copy in memory"


def test_fused_passes_are_timed() -> None:
    ids, mask = prompts()
    engine = engine_of(model())
    engine.profile_model_time()
    engine.generate(ids, attention_mask=mask, max_new_tokens=5)
    assert len(engine.model_times()) == 5, "the prompts, and four steps"
    engine(ids)
    assert len(engine.model_times()) == 1
    engine.destroy()
    engine.generate(ids, attention_mask=mask, max_new_tokens=2)
    with pytest.raises(AssertionError):
        engine.model_times()


def test_without_kernel_injection_the_module_s_own_forward_runs(calls: list[int]) -> None:
    subject = model()
    ids, mask = prompts()
    given = {"attention_mask": mask, "max_new_tokens": 4}
    engine = deepspeed.init_inference(subject, dtype="fp32")
    assert torch.equal(engine.generate(ids, **given), subject.generate(ids, **given))
    assert not calls


def test_a_model_whose_layers_rest_on_a_drive_generates_the_same(tmp_path: Path) -> None:
    ids, mask = prompts()
    given = {"attention_mask": mask, "max_new_tokens": 4}
    wanted = model().generate(ids, **given)
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    engine = deepspeed.init_inference(model(), dtype="fp32", zero={"stage": 3, "offload_param": offload})
    assert torch.equal(engine.generate(ids, **given), wanted)
    assert all(param.numel() == 0 for param in engine.module.model.layers.parameters())


SEVEN = {**SIZES, "hidden_size": 112, "num_attention_heads": 14, "intermediate_size": 72, "tie_word_embeddings": True}
SPLIT_MODELS = {**MODELS, "seven query heads to a key head": ("LlamaConfig", SEVEN)}


def _differences_of_ranks() -> dict[str, float]:
    """Largest difference of logits of two quantized ranks from one, relative to the largest, for each model."""
    MODELS.update(SPLIT_MODELS)
    ids, found = prompts()[0], {}
    for name in SPLIT_MODELS:
        for given in ({"dtype": "int8"}, {"dtype": "fp32", "quant": {"weight": {"num_bits": 4}}}):
            whole = deepspeed.init_inference(model(name), given)(ids).logits
            split = deepspeed.init_inference(model(name), {**given, "mp_size": 2})(ids).logits
            found[f"{name}, {given['dtype']}"] = float((split - whole).abs().max() / whole.abs().max())
    return found


def test_logits_of_quantized_ranks_are_those_of_one() -> None:
    for found in run_ranks(_differences_of_ranks, 2):
        assert len(found) == 10
        assert max(found.values()) <= 1e-5, found


def _tokens_of_ranks() -> list[Any]:
    """Greedy tokens of two quantized ranks and of one; drawn ones, from random states that differ before."""
    ids, mask = prompts()
    given = {"attention_mask": mask, "max_new_tokens": 10}
    whole = deepspeed.init_inference(model(), dtype="int8")
    split = deepspeed.init_inference(model(), dtype="int8", mp_size=2)
    logits = [engine(ids).logits for engine in (whole, split)]
    greedy = [engine.generate(ids, **given).tolist() for engine in (whole, split)]
    torch.manual_seed(torch.distributed.get_rank())
    drawn = split.generate(ids, do_sample=True, temperature=1.5, **given).tolist()
    layer = split.module.get_submodule("model.layers.0.self_attn.o_proj")
    return [torch.equal(*logits), greedy[0] == greedy[1], drawn, layer.weight.shape]


def test_ranks_of_a_quantized_model_emit_one_token() -> None:
    first, second = run_ranks(_tokens_of_ranks, 2)
    assert first[:2] == second[:2] == [True, True]
    assert first[2] == second[2]
    assert first[3] == second[3] == (24, 48)


def changed(subject: Any) -> Any:
    """The same model with other weights."""
    with torch.no_grad():
        for param in subject.parameters():
            param.copy_(param.flip(0))
    return subject


@pytest.mark.parametrize("name", ["LLaMA", "GPT-2"])
@pytest.mark.parametrize("way", ["assigned", "cast", "quantized"])
def test_weights_in_other_memory_show_in_the_fused_path(name: str, way: str, calls: list[int]) -> None:
    """GPT-2's decoder has views of its weights, which a cast leaves behind."""
    ids, mask = prompts()
    given = {"attention_mask": mask, "max_new_tokens": 12}
    quant: dict[str, Any] = {"quant": {"weight": {"num_bits": 8}}} if way == "quantized" else {}
    engine = engine_of(model(name), **quant)
    before = engine.generate(ids, **given)
    other = changed(model(name))
    if way == "cast":
        engine.module.double().load_state_dict(other.state_dict())
        engine.module.float()
    else:
        state = engine_of(other, **quant).module.state_dict()
        engine.module.load_state_dict(state, assign=way == "assigned")
    wanted = engine.module.generate(ids, **given)
    calls.clear()
    found = engine.generate(ids, **given)
    assert torch.equal(found, wanted)
    assert not torch.equal(found, before)
    assert calls[-13:] == [9, 5, *[-2] * 11], "fused again"


def test_a_model_of_few_positions_is_fused(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "short", ("GPT2Config", {**GPT, "n_positions": 16}))
    subject = model("short")
    ids, mask = prompts()
    given = {"attention_mask": mask, "max_new_tokens": 6}
    wanted = subject.generate(ids, **given)
    engine = engine_of(subject)
    calls.clear()
    assert torch.equal(engine.generate(ids, **given), wanted)
    assert calls[:2] == [9, 5]


def test_a_module_whose_probe_fails_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """One position that no config names: the shortest observed pass, of two tokens, is an IndexError."""

    class Short(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = torch.nn.Embedding(7, 8), torch.nn.Embedding(1, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.tokens(ids) + self.places(torch.arange(ids.shape[1]))

    with caplog.at_level(logging.WARNING, "zengine"):
        engine = engine_of(Short())
    assert "Short is not fused, and its own forward runs: index out of range" in caplog.text
    assert engine(torch.arange(1)[None]).shape == (1, 1, 8)


class Adapted(torch.nn.Module):
    """Hands all arguments on to the model inside, as PEFT's models do."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    @property
    def generation_config(self) -> Any:
        return self.inner.generation_config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.generate(*args, **kwargs)


@pytest.mark.parametrize("kind", ["inference", "hybrid"])
def test_positional_prompts_reach_a_model_inside_another(kind: str, calls: list[int]) -> None:
    prompt, options = prompts()[0][:1], {"max_new_tokens": 7, "do_sample": False}
    subject = Adapted(model())
    expected = subject.generate(prompt, **options)
    if kind == "inference":
        engine = engine_of(subject)
    else:
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "gradient_clipping": 1.0}
        engine = zengine.initialize(model=subject, config={**config, "hybrid_engine": {"enabled": True}})[0]
    calls.clear()
    assert torch.equal(engine.generate(prompt, **options), expected)
    assert -1 in calls  # steps of the fused decoder
    engine.close() if kind == "hybrid" else None
