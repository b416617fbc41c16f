"""Rollouts that stop and go on; what a switch to generation sends, and what refilled slots save."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_lm import PROMPTS, TIME, engine_of, train

import zcomm
from zcomm.testing import run_ranks
from zengine.inference.cache import KVCache
from zengine.inference.decoder import DecoderPass
from zengine.inference.generation import Request, generate
from zengine.inference.recognize import recognize
from zengine.inference.sampling import Sampling
from zengine.rollout import RolloutConfig, SamplingConfig
from zpartition.weights.sharded import ShardedStorage

RULE = SamplingConfig(max_new_tokens=10, n_samples_per_prompt=3, continuous_batch_size=4)


def _in_parts(stage: int) -> tuple[Any, Any, int]:
    engine = engine_of(stage)
    train(engine, 1)
    whole = engine.rollout(PROMPTS, sampling=RULE, seed=0)
    pending, parts = engine.begin_rollout(PROMPTS, sampling=RULE, seed=0), 1
    while (found := pending.run(max_steps=4)) is None:
        assert engine.pending_rollout is pending
        parts += 1
    assert engine.pending_rollout is None
    train(engine, 1)
    with pytest.raises(RuntimeError, match="began with the weights of step 1, and they are those of step 2"):
        pending.run()
    engine.close()
    return whole, found, parts


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rollout_in_parts_has_the_bits_of_one_that_never_stopped(stage: int) -> None:
    for whole, found, parts in run_ranks(_in_parts, 2, stage):
        assert found.samples == whole.samples
        assert parts == 7  # 9 samples of 10 tokens, 4 at once: 27 steps
        assert found.stats.num_decode_steps == whole.stats.num_decode_steps == 27


def _resumed(folder: str) -> tuple[Any, Any]:
    prompts = PROMPTS[torch.distributed.get_rank() :]
    engine = engine_of(3)
    train(engine, 1)
    pending = engine.begin_rollout(prompts, sampling=RULE)
    assert pending.run(max_steps=5) is None
    engine.save_checkpoint(folder)
    whole = pending.run()
    engine.close()
    other = engine_of(2)
    other.load_checkpoint(folder)
    loaded = other.pending_rollout
    assert loaded is not None
    assert max(len(each.tokens) for each in loaded.progress) == 6
    found = loaded.run()
    assert other.pending_rollout is None
    other.close()
    return whole, found


def test_a_run_resumes_in_mid_rollout_at_another_stage(tmp_path: Any) -> None:
    for whole, found in run_ranks(_resumed, 2, str(tmp_path)):
        assert found.samples == whole.samples


def _alone(folder: str) -> bool:
    engine = engine_of(0)
    engine.load_checkpoint(folder)
    is_dropped = engine.pending_rollout is None
    engine.close()
    return is_dropped


def test_another_number_of_ranks_drops_the_rollout(tmp_path: Any) -> None:
    run_ranks(_resumed, 2, str(tmp_path))
    assert run_ranks(_alone, 1, str(tmp_path)) == [True]


def _traffic(stage: int) -> tuple[list[str], int, int]:
    """Return the operations of a later switch, the elements of all units, and the most that were gathered at once."""
    engine = engine_of(stage)
    config = RolloutConfig(compare=0)
    engine.rollout(PROMPTS, sampling=RULE, config=config)  # recognizes the decoder
    partition, log = engine.parts.partition, list[zcomm.Record]()
    partition.unsharder.peak_numel = 0
    with zcomm.traced(log), engine.opened():
        engine._rollouts.weights.present_decoder()
    numel = sum(unit.numel for unit in partition.unsharder.units.values())
    peak = partition.unsharder.peak_numel
    names = [record.op for record in log]
    engine.close()
    return names, numel, peak


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nothing_is_sent_below_stage_3(stage: int) -> None:
    for names, *_ in run_ranks(_traffic, 2, stage):
        assert names == []


def test_stage_3_gathers_each_bucket_once_and_holds_the_model_once() -> None:
    for names, numel, peak in run_ranks(_traffic, 2, 3):
        assert set(names) == {"all_gather"}
        assert peak == numel


def _order_of_the_switch() -> tuple[list[str], int]:
    """Return issues and waits of a switch, and the number of units."""
    engine = engine_of(3)
    engine.rollout([[1]], n=1, sampling=SamplingConfig(max_new_tokens=1))
    order, gather, arrive = list[str](), ShardedStorage.gather, ShardedStorage.arrive
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedStorage, "gather", lambda *args, **keys: (order.append("issue"), gather(*args, **keys)))
        patch.setattr(ShardedStorage, "arrive", lambda self: (order.append("wait"), arrive(self)))
        with engine.opened():
            assert all(unit.is_used for unit in engine.parts.partition.unsharder.units.values())
    units = engine.parts.partition.unsharder.units.values()
    assert all(unit.is_sharded for unit in units)
    engine.close()
    return order, len(units)


def test_all_gathers_of_a_switch_start_before_the_first_is_waited_for() -> None:
    for order, num_units in run_ranks(_order_of_the_switch, 2):
        assert num_units > 2
        assert order == ["issue"] * num_units + ["wait"] * num_units


def _num_steps(monkeypatch: pytest.MonkeyPatch, *, continuous: bool) -> int:
    """Return the steps of 40 samples over 4 slots; the mean length is 0.4 of the longest."""
    engine = engine_of(0)
    decoder = recognize(engine.module.eval())
    requests = [
        Request(prompt=(1 + index % 20, 3), sampling=Sampling(max_new_tokens=length))
        for index, length in enumerate([40, 4, 8, 12] * 10)
    ]
    steps, num_running, plain = (
        DecoderPass(decoder, KVCache.create(decoder, 4, TIME)),
        list[int](),
        DecoderPass.forward_each,
    )

    def counted(self: DecoderPass, ids: torch.Tensor, slots: Any) -> torch.Tensor:
        num_running.append(len(slots))
        return plain(self, ids, slots)

    with monkeypatch.context() as patch:
        patch.setattr(DecoderPass, "forward_each", counted)
        for group in [requests] if continuous else [requests[at : at + 4] for at in range(0, 40, 4)]:
            generate(steps, group)
    engine.close()
    return len(num_running)


def test_refilled_slots_need_far_fewer_steps_than_static_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    static, refilled = (_num_steps(monkeypatch, continuous=each) for each in (False, True))
    assert static == 390
    assert static >= 1.8 * refilled
