"""Loops of Transformers, or of one's own, that call a module with the static cache of its engine."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from transformers_models import model

import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zengine.inference.calls.decoder_cache import ModuleForward

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[0, 0, 9, 11, 3], [60, 7, 8, 2, 5]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
LLAMA = "LLaMA-3, scaled rotary"


def fused(name: str = LLAMA, **given: Any) -> deepspeed.InferenceEngine:
    return deepspeed.init_inference(model(name), {"dtype": "fp32", "replace_with_kernel_inject": True, **given})


@pytest.mark.parametrize("name", [LLAMA, "Gemma-2, soft caps, windows", "GPT-2", "Mixtral"])
@pytest.mark.parametrize(
    "given",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True},
        {"num_beams": 2, "do_sample": True, "top_k": 20},
    ],
    ids=["search", "several", "drawn"],
)
def test_beams_are_those_of_the_plain_module(name: str, given: dict[str, Any], steps_taken: list[int]) -> None:
    plain, engine = model(name), fused(name)
    given = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, **given}
    torch.manual_seed(1)
    wanted = plain.generate(IDS, attention_mask=MASK, **given)
    for subject in (engine, engine.module):
        steps_taken.clear()
        torch.manual_seed(1)
        assert torch.equal(subject.generate(IDS, attention_mask=MASK, **given), wanted)
        assert steps_taken
        assert set(steps_taken) == {2 * given["num_beams"]}


RANKS = {LLAMA: {"tensor_parallel": {"tp_size": 2}}, "Mixtral of eight": {"moe": {"ep_size": 2}}}


def _beams_of_ranks(name: str) -> tuple[bool, list[list[int]], set[str]]:
    whole, split = fused(name), fused(name, **RANKS[name])
    given = {"num_beams": 3, "max_new_tokens": 6, "pad_token_id": 0}
    wanted = whole.generate(IDS[1:], do_sample=False, **given)
    is_equal = torch.equal(split.module.generate(IDS[1:], do_sample=False, **given), wanted)
    torch.manual_seed(torch.distributed.get_rank())
    drawn = split.generate(IDS[1:], do_sample=True, top_k=9, **given)
    return is_equal, drawn.tolist(), split._told


@pytest.mark.parametrize("name", RANKS)
def test_ranks_search_the_same_beams(name: str) -> None:
    one, other = run_ranks(_beams_of_ranks, 2, name)
    assert one == other
    assert one[0]
    assert one[2] == set()


def test_beams_of_the_models_own_config_are_searched(steps_taken: list[int]) -> None:
    plain, engine = model(LLAMA), fused()
    for each in (plain, engine.module):
        each.generation_config.num_beams = 2
    wanted = plain.generate(IDS, attention_mask=MASK, max_new_tokens=5, pad_token_id=0)
    steps_taken.clear()
    assert torch.equal(engine.generate(IDS, attention_mask=MASK, max_new_tokens=5, pad_token_id=0), wanted)
    assert set(steps_taken) == {4}


def test_a_loop_of_ones_own_gets_the_logits_of_the_module(steps_taken: list[int]) -> None:
    plain, engine = model(LLAMA), fused()
    cache = engine.static_cache(2)
    assert isinstance(cache, transformers.Cache)
    steps_taken.clear()
    ids, mask = IDS, MASK
    out = engine.module(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    wanted = plain(ids, attention_mask=mask).logits
    torch.testing.assert_close(out.logits[mask.bool()], wanted[mask.bool()], atol=1e-5, rtol=1e-5)
    for _ in range(3):
        token = out.logits[:, -1].argmax(-1)[:, None]
        ids, mask = torch.cat((ids, token), 1), torch.cat((mask, torch.ones_like(token)), 1)
        out = engine(token, attention_mask=mask, past_key_values=cache)
        assert out.past_key_values is cache
        assert cache.get_seq_length() == ids.shape[1]
        wanted = plain(ids, attention_mask=mask, logits_to_keep=1).logits
        torch.testing.assert_close(out.logits, wanted, atol=1e-5, rtol=1e-5)
    assert steps_taken == [2] * 3
    cache.reset()
    assert cache.get_seq_length() == 0
    last = engine.module(IDS, attention_mask=MASK, past_key_values=cache, logits_to_keep=1).logits
    torch.testing.assert_close(last, plain(IDS, attention_mask=MASK).logits[:, -1:], atol=1e-5, rtol=1e-5)


def test_turns_of_a_conversation_continue_the_cache(steps_taken: list[int]) -> None:
    plain, engine = model(LLAMA), fused()
    cache, ids = engine.static_cache(1), IDS[1:]
    for turn in range(2):
        wanted = plain.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
        subject = engine.module if turn else engine
        given = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        steps_taken.clear()
        assert torch.equal(subject.generate(ids, past_key_values=cache, **given), wanted)
        assert steps_taken == [1] * 3
        assert cache.get_seq_length() == wanted.shape[1] - 1
        ids = torch.cat((wanted, torch.tensor([[7, 8]])), 1)
    assert engine._told == set()


def test_several_tokens_continue_a_row() -> None:
    plain, engine = model(LLAMA), fused()
    cache = engine.static_cache(1)
    parts = [engine.module(each, past_key_values=cache).logits for each in (IDS[1:, :2], IDS[1:, 2:])]
    torch.testing.assert_close(torch.cat(parts, 1), plain(IDS[1:]).logits, atol=1e-5, rtol=1e-5)


def test_rows_of_one_token_and_padding_have_logits_at_every_position() -> None:
    engine, plain = fused(), model(LLAMA)
    ids, mask = torch.tensor([[0, 5], [0, 9]]), torch.tensor([[0, 1], [0, 1]])
    found = engine.module(ids, attention_mask=mask, past_key_values=engine.static_cache(2)).logits
    wanted = plain(ids, attention_mask=mask).logits
    assert found.shape == wanted.shape
    torch.testing.assert_close(found[:, 1], wanted[:, 1], atol=1e-4, rtol=1e-4)


def test_tokens_that_do_not_fit_leave_the_length_of_the_cache() -> None:
    engine = fused(max_out_tokens=8)
    cache = engine.static_cache(1)
    with pytest.raises(ValueError, match="do not fit into a cache of 8"):
        engine.module(torch.ones(1, 9, dtype=torch.long), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_a_call_that_fails_leaves_all_rows_as_they_were() -> None:
    plain, engine = model(LLAMA), fused(max_out_tokens=8)
    cache = engine.static_cache(2)
    ids, mask = torch.tensor([[0, 0, 9], [60, 7, 8]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    engine.module(ids, attention_mask=mask, past_key_values=cache)
    before = cache.rows.steps.cache.lengths[:]
    more = torch.ones(2, 6, dtype=torch.long)
    for wrong in (more, torch.tensor([[1, 2], [3, 10**6]])):  # the second row is too long, or no row of the table
        seen = torch.cat((mask, torch.ones_like(wrong)), 1)
        with pytest.raises((ValueError, IndexError)):
            engine.module(wrong, attention_mask=seen, past_key_values=cache)
        assert cache.rows.steps.cache.lengths == before
        assert cache.get_seq_length() == 3
    token = torch.tensor([[5], [6]])
    whole, mask = torch.cat((ids, token), 1), torch.cat((mask, torch.ones_like(token)), 1)
    found = engine.module(token, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(
        found, plain(whole, attention_mask=mask, logits_to_keep=1).logits, atol=1e-5, rtol=1e-5
    )


def test_what_the_decoder_cannot_do_is_named() -> None:
    engine = fused(max_out_tokens=8)
    cache = engine.static_cache(2)
    with pytest.raises(ValueError, match="got output_hidden_states: pass another cache"):
        engine.module(IDS, past_key_values=cache, output_hidden_states=True)
    with pytest.raises(ValueError, match="the cache has 2 rows, and input_ids 1"):
        engine.module(IDS[:1], past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask must be \(rows, tokens\)"):
        engine.module(IDS, past_key_values=cache, attention_mask=torch.ones(2, 1, 5, 5))
    with pytest.raises(ValueError, match="do not fit into a cache of 8: raise max_out_tokens"):
        engine.module(IDS.repeat(1, 2), past_key_values=cache)
    with pytest.raises(ValueError, match="layers of a module were called one by one"):
        engine.module.model(IDS, past_key_values=cache)
    plain = deepspeed.init_inference(model(LLAMA), dtype="fp32")
    with pytest.raises(RuntimeError, match="needs a fused model of Transformers"):
        plain.static_cache(2)


def test_the_module_has_its_own_forward_otherwise() -> None:
    plain, engine = model(LLAMA), fused()
    module = engine.module
    assert inspect.signature(module.forward) == inspect.signature(plain.forward)
    torch.testing.assert_close(module(IDS, labels=IDS).loss, plain(IDS, labels=IDS).loss)
    given = {"attention_mask": MASK, "max_new_tokens": 4, "pad_token_id": 0, "prompt_lookup_num_tokens": 2}
    assert torch.equal(
        module.generate(IDS[1:], **{**given, "attention_mask": MASK[1:]}),
        plain.generate(IDS[1:], **{**given, "attention_mask": MASK[1:]}),
    )
    for alone in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert not isinstance(alone.forward, ModuleForward)
        assert torch.equal(alone(IDS).logits, plain(IDS).logits)
    made = copy.deepcopy(engine)
    assert made.module.forward.module is made.module
    assert torch.equal(
        made.generate(IDS, num_beams=2, max_new_tokens=3, pad_token_id=0),
        plain.generate(IDS, num_beams=2, max_new_tokens=3, pad_token_id=0),
    )
    engine.destroy()
    assert "forward" not in vars(module)
    assert torch.equal(module(IDS).logits, plain(IDS).logits)
