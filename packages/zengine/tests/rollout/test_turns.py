"""Turns of a conversation: a later rollout continues the sequences that the cache has, and its bits do not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_lm import PROMPTS, TinyLM, engine_of, train

from zcomm.testing import run_ranks
from zengine.adapters import LoRAConfig, add_lora
from zengine.inference.cache import Forgotten, KeptSequences
from zengine.rollout import RolloutConfig, SamplingConfig

SAMPLING = SamplingConfig(max_new_tokens=6, stop_tokens=(3,))
REPLY = (11, 12, 13)


def replies(rollout: Any) -> list[tuple[int, ...]]:
    return [(*each.prompt, *each.tokens, *REPLY) for each in rollout.samples]


def _turns(stage: int, is_bf16: bool, n: int) -> list[Any]:
    """Return, of the second and the third turn: samples, those of a fresh rollout, and prefilled tokens of both."""
    model = TinyLM()
    add_lora(model, LoRAConfig(lora_r=2, target_mods=["q", "v"]))
    engine, config = engine_of(stage, model, bf16={"enabled": is_bf16}), RolloutConfig(exact=True, num_slots=24)
    train(engine, 2)
    found, wanted = [], []
    with engine.turns():
        prompts: Any = PROMPTS
        for each in (n, 1, 2):
            found.append(engine.rollout(prompts, n=each, sampling=SAMPLING, seed=1, config=config))
            prompts = replies(found[-1])
    for turn, each in ((1, 1), (2, 2)):
        wanted.append(engine.rollout(replies(found[turn - 1]), n=each, sampling=SAMPLING, seed=1, config=config))
    engine.close()
    return [
        (one.samples, other.samples, one.stats.num_prefilled, other.stats.num_prefilled)
        for one, other in zip(found[1:], wanted)
    ]


@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 3)])
@pytest.mark.parametrize("n", [1, 4])
def test_a_turn_has_the_bits_of_a_rollout_of_the_whole_text(world: int, stage: int, is_bf16: bool, n: int) -> None:
    for ranks in run_ranks(_turns, world, stage, is_bf16, n):
        for samples, wanted, computed, of_all in ranks:
            assert samples == wanted, "bit for bit"
            assert computed == (len(REPLY) + 1) * 3 * n  # the last token of a sample had no keys yet
            assert of_all == sum(len(prompt) for prompt in {each.prompt for each in wanted})


def test_what_changes_the_weights_or_the_way_forgets_the_sequences(tmp_path: Any) -> None:
    engine, exact = engine_of(0), RolloutConfig(exact=True)

    def prefilled(config: RolloutConfig = exact) -> int:
        return int(engine.rollout(PROMPTS, n=1, sampling=SAMPLING, seed=1, config=config).stats.num_prefilled)

    whole, known = sum(map(len, PROMPTS)), len(PROMPTS)
    assert prefilled() == prefilled() == whole
    with engine.turns():
        assert [prefilled(), prefilled()] == [whole, known]
        train(engine, 1)
        assert [prefilled(), prefilled()] == [whole, known]
        assert [prefilled(RolloutConfig()), prefilled(RolloutConfig())] == [whole, known]
        assert prefilled(RolloutConfig(num_slots=20)) == whole  # another cache
        engine.save_checkpoint(str(tmp_path))
        assert prefilled() == whole
        engine.load_checkpoint(str(tmp_path))
        assert prefilled() == whole
        with pytest.raises(RuntimeError, match="inside another block of turns"), engine.turns():
            pass
        assert prefilled() == known
    assert prefilled() == whole
    assert engine._rollouts.weights.kept_sequences(0) is Forgotten.emptied(engine._rollouts.weights.kept)
    engine.close()


def test_the_cache_is_given_back_after_the_turns() -> None:
    engine = engine_of(hybrid_engine={"enabled": True, "max_out_tokens": 40, "release_inference_cache": True})
    with engine.turns():
        engine.rollout(PROMPTS, n=1, sampling=SAMPLING)
        assert engine._rollouts.weights.cache is not None
    assert engine._rollouts.weights.cache is None
    engine.close()


def test_more_samples_than_slots_lose_some_sequences_and_no_bits() -> None:
    engine, config = engine_of(0), RolloutConfig(exact=True, num_slots=2)
    with engine.turns():
        first = engine.rollout(PROMPTS, n=2, sampling=SAMPLING, config=config)
        second = engine.rollout(replies(first), n=1, sampling=SAMPLING, config=config)
    seeds = [[each.seed] for each in second.samples]
    wanted = engine.rollout(replies(first), n=1, sampling=SAMPLING, seeds=seeds, config=config)
    assert second.samples == wanted.samples
    missed = sorted(len(each.prompt) for each in second.samples)[:4]
    assert sum(missed) <= second.stats.num_prefilled - 2 * (len(REPLY) + 1) < wanted.stats.num_prefilled / 1.4
    engine.close()


def test_a_slot_that_is_continued_is_written_over_last() -> None:
    kept = KeptSequences({0: (1, 2, 3), 1: (1, 4), 2: (7, 8, 9)})
    assert kept.begin([(5,), (7, 8, 9, 4), (7, 8, 6), (1, 2, 3)]) == [1, 2, 3, 0]
    assert kept.source(0) == (-1, 0)
    assert kept.choose([0, 1, 2], -1) == 1  # no prompt continues it
    assert kept.choose([0, 1, 2, 3], -1) == 3  # it is empty
    kept.write(1, (5,))
    assert kept.source(1) == (2, 3)
    assert kept.choose([2, 1, 0], 2) == 1  # prompt 2 continues slot 2, too
    assert kept.source(2) == (2, 2)
    assert kept.choose([2, 0], 2) == 2
    kept.write(2, (7, 8, 6))
    assert kept.source(3) == (0, 2)  # the logits after the last token are computed
    assert torch.equal(torch.tensor(kept.by_slot[2]), torch.tensor([7, 8, 6]))
