"""Whole batches through an engine of two stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import end_ranks, run_ranks
from zengine.pipeline_engine import PipelineEngine
from zpartition.pipeline import LayerSpec, PipelineError, PipelineModule, comparison_svg, simulate_measured

WIDTH, MICRO = 4, 3


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.full((WIDTH,), index / 24), torch.full((1,), index / 12)


class Explodes(nn.Module):
    """Gradients of what comes before are infinite once in the third batch, on whoever holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(WIDTH)), 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        output = value * self.weight
        if self.calls == 2 * MICRO + 1:
            output.register_hook(lambda gradient: gradient * float("inf"))
        return output


def layers(*more: Any) -> list[Any]:
    block = [LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh]
    return [*block, *more, *block, LayerSpec(nn.Linear, WIDTH, 1)]


def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output - labels).square().mean()


def make(*more: Any, num_stages: int = 2, data: Any = None, **config: Any) -> PipelineEngine:
    torch.manual_seed(0)
    model = PipelineModule(layers(*more), num_stages, loss_fn=loss_of, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        **config,
    }
    engine = zengine.initialize(model=model, config=config, training_data=data)[0]
    assert isinstance(engine, PipelineEngine)
    return engine


def batches(seed: int, count: int = MICRO) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    pairs = [
        (torch.randn(2, WIDTH, generator=generator), torch.randn(2, 1, generator=generator)) for _ in range(count)
    ]
    return iter(pairs)


def refusals() -> list[str]:
    """Messages; and the counters, which nothing of this has moved."""
    engine, told = make(), []
    for call in (
        lambda: engine(torch.ones(1, WIDTH)),
        lambda: engine.backward(torch.ones(())),
        engine.step,
        lambda: engine.eval_batch(batches(0), reduce_output="sum"),
    ):
        with pytest.raises((PipelineError, ValueError)) as caught:
            call()
        told.append(str(caught.value))
    assert (engine.global_steps, engine.micro_steps) == (0, 0)
    engine.close()
    with pytest.raises(ValueError, match=r"pattern 'layer\.\*' of activation checkpoints matches none"):
        make(activation_checkpointing={"modules": ["layers.0", "layer.*"]})  # layers.0 is the first stage's
    make(activation_checkpointing={"modules": ["layers.0"]}).close()
    return told


def test_what_a_pipeline_has_no_use_for_says_what_to_call() -> None:
    forward, backward, step, reduce = run_ranks(refusals, 2)[0]
    assert forward.startswith(
        "forward() on a pipeline of 2 stages: micro-batches go through the stages by a schedule."
    )
    assert "Call train_batch(iterator), or eval_batch(iterator) to evaluate." in forward
    assert "Call train_batch(iterator)." in backward
    assert "ends with the optimizer's step" in step
    assert reduce == "eval_batch(reduce_output='sum'): give \"avg\" or None"


def without_data() -> list[str]:
    """What a rank with an iterator and one without are told, at once and after that."""
    engine, told = make(), []
    for _ in range(2):
        with pytest.raises(PipelineError) as caught:
            engine.train_batch(batches(0) if zcomm.group_rank() else None)
        told.append(str(caught.value))
    engine.close()
    return told


def test_a_rank_without_data_is_told_so_and_the_others_who_it_is() -> None:
    own, other = run_ranks(without_data, 2)
    words = "train_batch() has no data: pass an iterator of (inputs, labels), or training_data="
    assert own[0].startswith(words)
    assert other[0].startswith(f"rank 0 (stage 0 of 2) failed in train_batch(): PipelineError: {words}")
    assert all("an earlier batch of this pipeline failed" in each[1] for each in (own, other))


def records() -> tuple[Any, str]:
    engine = make()
    with engine.recording() as recorder:
        engine.train_batch(batches(0))
    engine.train_batch(batches(1))  # not recorded any more
    measured = recorder.timeline()
    engine.close()
    return measured, comparison_svg(simulate_measured(engine.pipeline.schedule(MICRO), measured), measured)


def test_a_batch_is_drawn_as_predicted_and_as_measured() -> None:
    (first, drawn), (second, _) = run_ranks(records, 2)
    assert first == second
    assert len(first.bars) == 2 * 2 * MICRO
    assert drawn.count("<rect") == 2 * len(first.bars)


def in_a_mesh() -> list[float]:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    model = PipelineModule(layers(), 2, loss_fn=loss_of)
    with pytest.raises(ValueError, match="Make pipeline the first axis of a mesh of all ranks"):
        zengine.initialize(model=model, config=config, mesh=zcomm.make_mesh(shard=2, pipeline=2))
    engine = zengine.initialize(model=model, config=config, mesh=zcomm.make_mesh(pipeline=2, shard=2))[0]
    loss = engine.train_batch(batches(engine.parts.groups.get_data_parallel_rank(), 1)).item()
    engine.close()
    return [loss]


def test_a_mesh_has_to_lay_stages_out_as_the_module_does() -> None:
    try:
        found = run_ranks(in_a_mesh, 4)
        assert all(losses == found[0] for losses in found)
    finally:
        end_ranks()  # torch keeps meshes for ever


def evaluates() -> list[Any]:
    engine = make()
    was = engine.train_batch(batches(0))
    mean, outputs = engine.eval_batch(batches(1), return_logits=True)
    each = engine.eval_batch(batches(1), reduce_output=None)
    only = engine.eval_batch(batches(1), bcast_loss=False)
    more = engine.eval_batch(batches(1, 5), num_micro_batches=5)
    values = engine.eval_batch(batches(1), compute_loss=False)
    assert mean.item() == pytest.approx(each.mean().item())
    assert each.shape == (MICRO,)
    assert (only is None) == (outputs is None) == (values is None) == engine.is_first_stage()
    assert engine.is_first_stage() != engine.is_last_stage()
    for mine, again in zip(outputs or [], values or []):
        assert torch.equal(mine, again)
    assert engine.module.training
    found = [was.item(), mean.item(), more.item(), engine.stage_id, engine.num_stages, engine.micro_batches]
    engine.set_batch_fn(lambda batch: (batch["x"], batch["y"]))
    engine.set_dataloader([{"x": x, "y": y} for x, y in batches(2, 2)])  # of two: read again and again
    found += [engine.train_batch().item(), engine.global_samples, engine.micro_steps]
    engine.set_batch_fn(lambda batch: batch)
    with pytest.raises(PipelineError, match=r"is a pair \(inputs, labels\), and the data have a dict"):
        next(engine._pairs(iter([{}])))
    engine.reset_activation_shape()
    engine.close()
    return found


def test_evaluation_and_ways_to_give_data() -> None:
    first, second = run_ranks(evaluates, 2)
    assert first[3:6] == [0, 2, MICRO]
    assert second[3] == 1
    assert first[:3] + first[6:] == second[:3] + second[6:]
    assert first[-2:] == [2 * 2 * MICRO, 2 * MICRO]


def outputs_first() -> float:
    """The mean loss of what follows a batch of which outputs alone were asked for: 0 where pairs stay pairs."""
    model = PipelineModule([LayerSpec(nn.Identity)] * 2, 2, loss_fn=loss_of, partition_method="uniform")
    engine = zengine.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})[0]
    assert isinstance(engine, PipelineEngine)
    pairs = iter([(torch.full((1, 1), float(i)),) * 2 for i in range(4)])
    engine.eval_batch(pairs, compute_loss=False, num_micro_batches=2)
    loss: float = engine.eval_batch(pairs, num_micro_batches=2).item()
    engine.close()
    return loss


def test_outputs_alone_read_labels_too_so_that_ranks_stay_alike() -> None:
    assert run_ranks(outputs_first, 2) == [0.0, 0.0]


def own_loader() -> tuple[list[float], list[Any]]:
    """Three stages: the one between uses nothing, and its loader moves along, however it is handed over."""
    engine = make(data=Data(), num_stages=torch.distributed.get_world_size())
    losses = [engine.train_batch().item()]
    engine.set_dataloader(engine.training_dataloader)
    losses.append(engine.train_batch().item())
    losses.append(engine.train_batch(iter(engine.training_dataloader)).item())
    state = engine.parts.loader.state_dict()
    engine.close()
    return losses, sorted((key, value) for key, value in state.items() if isinstance(value, int))


def test_the_engine_s_own_loader_stands_at_one_place_on_all_ranks() -> None:
    (alone,) = run_ranks(own_loader, 1)
    together = run_ranks(own_loader, 3)
    assert all(found == together[0] for found in together)
    assert together[0][0] == pytest.approx(alone[0], rel=1e-5)
    assert together[0][1] == alone[1]


def overflows(num_stages: int) -> list[Any]:
    """fp16 with an overflow in the first stage, in the third batch."""
    engine = make(
        LayerSpec(Explodes), num_stages=num_stages, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    )
    engine.set_batch_fn(lambda pair: (pair[0].half(), pair[1].half()))
    found: list[Any] = []
    for seed in range(5):
        engine.train_batch(batches(seed))
        report = engine.last_report
        found.append(
            (report.applied, report.loss_scale, report.reason, report.loss, report.grad_norm, report.samples)
        )
    found.append((engine.applied_steps, engine.skipped_steps, engine.current_loss_scale))
    engine.close()
    return found


def test_an_overflow_in_one_stage_skips_the_step_on_all_of_them() -> None:
    (alone,) = run_ranks(overflows, 1, 1)
    first, second = run_ranks(overflows, 2, 2)
    assert str(first) == str(second)
    assert [each[0] for each in first[:-1]] == [True, True, False, True, True]
    assert first[-1] == alone[-1] == (4, 1, 2.0**7)
    assert first[2][2].startswith("gradient of layers.")
    for ours, expected in zip(first[:-1], alone[:-1]):
        assert ours[:2] == expected[:2]
        if expected[0]:
            assert ours[3:5] == pytest.approx(expected[3:5], rel=2e-3)  # halves: the norm is summed in another order


def fails_and_goes_on() -> list[float]:
    engine = make(num_stages=1)
    with pytest.raises(ValueError, match="the data ended after 2 micro-batches"):
        engine.train_batch(batches(0, 2))
    losses = [engine.train_batch(batches(seed)).item() for seed in range(2)]
    assert engine.global_steps == 2
    engine.close()
    return losses


def test_a_batch_that_failed_counts_for_nothing() -> None:
    engine = make(num_stages=1)
    expected = [engine.train_batch(batches(seed)).item() for seed in range(2)]
    engine.close()
    assert fails_and_goes_on() == expected
