"""Accumulation boundaries, and the time of reduction."""

from __future__ import annotations

import pytest
import torch

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine import CallOrderError
from zengine.testing import rank_batch, small_engine


def weights(engine: zengine.Engine) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in engine.state_dict().values()]


# -- boundaries ----------------------------------------------------------------------------------


def test_unmanaged_every_step_is_a_boundary_and_backwards_before_it_count() -> None:
    managed = small_engine(gradient_accumulation_steps=2)
    own = small_engine(gradient_accumulation_steps=2, managed_gradient_accumulation=False)
    for index in range(4):
        managed.backward(managed(rank_batch(index)))
        wanted = managed.step()
        own.backward(own(rank_batch(index)))
        assert own.is_gradient_accumulation_boundary()
        report = own.step() if index % 2 else None
    assert report == wanted
    assert own.micro_steps == managed.micro_steps == 4
    own.backward(own(rank_batch(0)))
    assert own.step().samples == 10


def test_a_backward_after_one_whose_boundary_was_withheld_is_a_micro_step_of_its_own() -> None:
    counted, withheld = small_engine(gradient_accumulation_steps=2), small_engine(gradient_accumulation_steps=2)
    losses = [withheld(rank_batch(index)) for index in range(2)]
    for index, loss in enumerate(losses):
        withheld.set_gradient_accumulation_boundary(index == 1)
        withheld.backward(loss)
        counted.backward(counted(rank_batch(index)))
        wanted = counted.step()
    assert withheld.step() == wanted
    assert withheld.micro_steps == 2


# -- batch sizes ---------------------------------------------------------------------------------


def test_another_batch_size_changes_the_accumulation_alone() -> None:
    engine = small_engine(gradient_accumulation_steps=2)
    engine.set_train_batch_size(6)
    assert engine.get_batch_info() == (6, 2, 3)
    assert [bool(run_one(engine)) for _ in range(3)] == [False, False, True]
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (15, 5, 3)
    assert [getattr(run_one(engine), "samples", 0) for _ in range(3)] == [0, 0, 21]


def run_one(engine: zengine.Engine) -> zengine.StepReport | None:
    engine.backward(engine(rank_batch(0)))
    return engine.step()


def test_batch_sizes_that_do_not_fit_are_refused_with_the_nearest() -> None:
    engine = small_engine()
    with pytest.raises(
        ValueError, match=r"takes 2 samples \(2 a rank x 1 ranks\); the nearest multiples are 4 and 6"
    ):
        engine.set_train_batch_size(5)
    with pytest.raises(ValueError, match="pass 1 or more"):
        engine.set_train_micro_batch_size(0)
    engine.set_train_batch_size(4)
    run_one(engine)
    with pytest.raises(ValueError, match="micro-step 2 of 2, step 0"):
        engine.set_train_batch_size(2)


# -- dropping a step -----------------------------------------------------------------------------


def test_zero_grad_in_the_middle_of_a_step_is_refused_and_restart_step_begins_again() -> None:
    engine, clean = small_engine(gradient_accumulation_steps=2), small_engine(gradient_accumulation_steps=2)
    run_one(engine)
    with pytest.raises(CallOrderError, match=r"zero_grad\(\) \(micro-step 2 of 2, step 0\).*restart_step"):
        engine.zero_grad()
    engine.restart_step()
    for each in (engine, clean):
        assert run_one(each) is None
        assert run_one(each)
    assert all(torch.equal(a, b) for a, b in zip(weights(engine), weights(clean)))


def test_zero_grad_before_step_drops_what_came_and_nothing_counts() -> None:
    engine = small_engine()
    engine.backward(engine(rank_batch(0)))
    engine.zero_grad()
    with pytest.raises(CallOrderError, match="phase FORWARD"):
        engine.step()
    assert run_one(engine).samples == 2


# -- the moment of reduction ---------------------------------------------------------------------


def _local_micro_steps_equal_reduced_ones() -> list[int]:
    messages = []
    for stage in (0, 1, 2, 3):
        for config in ({}, {"bf16": {"enabled": True}}):
            config = {**config, "zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 4}
            each = {**config, "zero_optimization": {"stage": stage, "reduce_at": "micro_step"}}
            wanted, num_reduced = train(small_engine(**each), sync=True)
            found, num_local = train(small_engine(**config), sync=False)
            torch.testing.assert_close(found, wanted, rtol=1e-2 if "bf16" in config else 1e-6, atol=1e-6)
            messages.append((num_reduced, num_local))
            if stage < 2:
                by_default, num_by_default = train(small_engine(**config), sync=True)
                torch.testing.assert_close(by_default, found, rtol=0, atol=0)
                assert 4 * num_by_default == num_reduced
    assert all(local < reduced for reduced, local in messages if reduced)
    return [reduced for reduced, _ in messages]


def train(engine: zengine.Engine, *, sync: bool) -> tuple[list[torch.Tensor], int]:
    """Weights after two steps, of which the middle micro-steps are not reduced, and messages with gradients."""
    log: list[object] = []
    dtype = next(engine.module.parameters()).dtype
    with zcomm.traced(log.append):
        for index in range(8):
            if sync or index % 4 in (0, 3):
                engine.backward(engine(rank_batch(index).to(dtype)))
            else:
                with engine.no_sync():
                    engine.backward(engine(rank_batch(index).to(dtype)))
                    assert engine.step() is None
                continue
            report = engine.step()
    assert report
    return [value.float() for value in weights(engine)], sum("gradients[" in str(record) for record in log)


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_sync_sends_less_and_changes_nothing_at_any_stage(world_size: int) -> None:
    for reduced in run_ranks(_local_micro_steps_equal_reduced_ones, world_size):
        assert len(reduced) == 8
        assert min(reduced) > 0 or world_size == 1


def _coalesced() -> int:
    for stage in (0, 2, 3):
        engine, clean = (small_engine(zero_optimization={"stage": stage}) for _ in range(2))
        log: list[object] = []
        with zcomm.traced(log.append), engine.coalesce_grad_reduction():
            for index in range(3):
                engine.backward(engine(rank_batch(index)))
            assert not any("gradients[" in str(record) for record in log)
        assert engine.step()
        clean.backward(sum(clean(rank_batch(index)) for index in range(3)))
        assert clean.step()
        torch.testing.assert_close(weights(engine), weights(clean))
    return len(log)


def test_coalesced_backwards_are_reduced_once_at_the_end() -> None:
    assert min(run_ranks(_coalesced, 2)) > 0


def test_a_boundary_inside_no_sync_is_refused_and_taken_outside() -> None:
    engine, clean = small_engine(), small_engine()
    with engine.no_sync():
        engine.backward(engine(rank_batch(0)))
        with pytest.raises(CallOrderError, match=r"update the weights inside no_sync\(\)"):
            engine.step()
    engine.allreduce_gradients()
    assert engine.step() == run_one(clean)
