"""Progressive layer drop: its law, what is skipped, and that nothing else changes."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zengine
from zcomm.testing import run_ranks
from zengine.features.layer_drop import LayerDrop, is_kept, theta_at
from zengine.features.named_layers import find_named_layers
from zpartition.pipeline import LayerSpec, PipelineModule

THETA = {"enabled": True, "theta": 0.2, "gamma": 0.5, "layers": "blocks", "seed": 7}


class Block(nn.Module):
    def __init__(self, is_tuple: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.is_tuple = is_tuple
        self.calls = 0

    def forward(self, hidden: torch.Tensor) -> Any:
        self.calls += 1
        hidden = hidden + torch.tanh(self.linear(hidden))
        return (hidden, None) if self.is_tuple else hidden


class Stack(nn.Module):
    def __init__(self, recompute: bool = False, is_tuple: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(is_tuple) for _ in range(5))
        self.recompute = recompute

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            made = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
            hidden = made[0] if isinstance(made, tuple) else made
        return hidden.square().mean()


class TakesTheta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[tuple[bool, float]] = []

    def forward(
        self, hidden: torch.Tensor, progressive_layer_drop: bool = False, pld_theta: float = 1.0
    ) -> torch.Tensor:
        self.seen.append((progressive_layer_drop, pld_theta))
        return self.linear(hidden).square().mean()


def config(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "progressive_layer_drop": THETA,
        **changes,
    }


def engine_of(model: nn.Module | None = None, **changes: Any) -> zengine.Engine:
    return zengine.initialize(model=model or Stack(), config=config(**changes))[0]


def drop_of(engine: zengine.Engine) -> LayerDrop:
    return next(feature for feature in engine._features if isinstance(feature, LayerDrop))


def batch(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def train(engine: zengine.Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(batch(step, engine.global_rank))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    ("step", "theta"), [(0, 1.0), (1, 0.9995), (100, 0.952419), (1000, 0.683940), (5000, 0.503369), (10000, 0.500023)]
)
def test_theta_follows_the_law(step: int, theta: float) -> None:
    assert theta_at(step, 0.5, 0.001) == pytest.approx(theta, abs=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 1234])
@pytest.mark.parametrize("probability", [0.0, 0.3, 0.625, 1.0])
def test_a_layer_is_kept_as_often_as_the_law_says(seed: int, probability: float) -> None:
    kept = torch.tensor([is_kept(seed, step, probability) for step in range(10_000)]).double()
    assert float(kept.mean()) == pytest.approx(probability, abs=1e-3)
    assert (kept.unfold(0, 12, 1).sum(1) - 12 * probability).abs().max() < 2


@pytest.mark.parametrize("count", [2, 3, 8])
def test_the_micro_steps_of_a_step_share_out_what_is_kept(count: int) -> None:
    engine = engine_of(gradient_accumulation_steps=count)
    drop = drop_of(engine)
    for step in range(20, 200):
        for layer in range(5):
            kept = sum(drop.keeps(layer, step, micro_step) for micro_step in range(count))
            law = count * (1 - layer / 5 * 0.8)  # theta is 0.2
            assert abs(kept - law) < 1
    engine.close()


def test_where_a_layer_runs_all_before_it_run_too() -> None:
    engine = engine_of()
    drop = drop_of(engine)
    depths = set()
    for step in range(100):
        kept = [drop.keeps(layer, step) for layer in range(5)]
        assert kept == sorted(kept, reverse=True)
        depths.add(sum(kept))
    assert depths == {1, 2, 3, 4, 5}
    engine.close()


def test_a_module_that_takes_theta_gets_it_one_step_late_as_with_deepspeed() -> None:
    model = TakesTheta()
    engine = engine_of(model, progressive_layer_drop={"enabled": True, "theta": 0.5, "gamma": 0.001})
    assert engine.get_pld_theta() == 1.0
    train(engine, range(4))
    assert [round(theta, 6) for _, theta in model.seen] == [1.0, 1.0, 0.9995, round(theta_at(2, 0.5, 0.001), 6)]
    assert all(flag for flag, _ in model.seen)
    assert engine.pld_enabled()
    assert (engine.pld_theta(), engine.pld_gamma()) == (0.5, 0.001)
    engine.eval()
    engine(batch(0))
    assert model.seen[-1] == (False, 1.0)
    engine.close()


class TakesAnyKeyword(Stack):
    """As DeepSpeed's tutorial writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.seen.append(kwargs)
        return super().forward(hidden)


def test_a_module_that_takes_any_keyword_gets_theta_with_a_warning_that_names_its_layers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = TakesAnyKeyword()
    with caplog.at_level(logging.WARNING, "zengine"):
        engine = engine_of(model, progressive_layer_drop={"enabled": True, "theta": 0.5, "gamma": 0.1})
    (text,) = [record.getMessage() for record in caplog.records if "progressive_layer_drop" in record.getMessage()]
    assert "pld_theta among its **kwargs" in text
    assert "blocks (5)" in text
    train(engine, range(3))
    assert model.seen == [
        {"progressive_layer_drop": True, "pld_theta": theta} for theta in (1.0, 1.0, theta_at(1, 0.5, 0.1))
    ]
    engine.eval()
    engine(batch(0))
    assert model.seen[-1] == {}
    engine.close()


def test_a_module_without_the_keyword_is_told_to_name_its_layers() -> None:
    with pytest.raises(
        ValueError, match=r'keyword pld_theta, so it would skip nothing. Set "layers" .* blocks \(5\)'
    ):
        engine_of(progressive_layer_drop={"enabled": True})
    with pytest.raises(ValueError, match=r"layers = 'block' is not a list of layers of Stack; did you mean 'blocks'"):
        engine_of(progressive_layer_drop={**THETA, "layers": "block"})
    with pytest.raises(
        ValueError, match=r"their lengths: none\. Put the layers in an nn\.ModuleList .* and name that"
    ):
        find_named_layers(nn.Sequential(nn.Linear(2, 2)), "layers", "progressive_layer_drop.layers")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("is_tuple", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_losses_equal_a_plain_loop_that_skips_the_same_layers(recompute: bool, is_tuple: bool, count: int) -> None:
    engine = engine_of(Stack(recompute, is_tuple), gradient_clipping=0, gradient_accumulation_steps=count)
    drop = drop_of(engine)
    plain = Stack()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    expected, skipped = [], 0
    for step in range(12):
        for micro_step in range(count):
            hidden = batch(count * step + micro_step)
            for number, block in enumerate(plain.blocks):
                if drop.keeps(number, step, micro_step):
                    hidden = block(hidden)
                else:
                    skipped += 1
            loss = hidden.square().mean()
            (loss / count).backward()
            expected.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    assert train(engine, range(12 * count)) == pytest.approx(expected, rel=1e-6)
    assert skipped > 10 * count
    engine.close()


def test_micro_batches_in_flight_skip_the_same_layers_so_their_backward_replays_them() -> None:
    losses = []
    for recompute in (False, True):
        engine = engine_of(Stack(recompute), gradient_accumulation_steps=2)
        drop = drop_of(engine)
        for step in range(20):
            pair = [engine(batch(2 * step + each)) for each in range(2)]
            for loss in pair:
                engine.backward(loss)
                engine.step()
            losses.append([float(loss) for loss in pair])
        assert any(drop.keeps(layer, step) != drop.keeps(layer, step, 1) for layer in range(5) for step in range(20))
        engine.close()
    assert losses[:20] == losses[20:]


def test_the_share_of_layers_that_ran_is_charted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(gradient_accumulation_steps=2)
    charted: list[tuple[str, float, int]] = []
    monkeypatch.setattr(type(drop_of(engine).telemetry), "write_events", lambda _, events: charted.extend(events))
    for step in range(12):
        calls = [block.calls for block in engine.module.blocks]
        train(engine, range(2 * step, 2 * step + 2))
        ran = sum(block.calls for block in engine.module.blocks) - sum(calls)
        assert charted[-1] == ("data/pld_kept_layers", ran / 10, step + 1)
    engine.close()


def test_evaluation_runs_every_layer_and_close_restores_forward() -> None:
    model = Stack()
    engine = engine_of(model)
    train(engine, range(8))
    copied = copy.deepcopy(model)
    engine.eval()
    before = [block.calls for block in model.blocks]
    engine(batch(0))
    assert [block.calls for block in model.blocks] == [calls + 1 for calls in before]
    engine.close()
    assert all("forward" not in block.__dict__ for block in model.blocks)
    before = [block.calls for block in model.blocks]
    copied.eval()(batch(0))
    assert [block.calls for block in model.blocks] == before  # a copy runs its own layers


def test_a_layer_with_a_second_output_is_rejected() -> None:
    class Two(Block):
        def forward(self, hidden: torch.Tensor) -> Any:
            return hidden, hidden

    model = Stack()
    model.blocks = nn.ModuleList([Two(), Two()])
    engine = engine_of(model)
    with pytest.raises(TypeError, match=r"Two must return the hidden state.*returned \(Tensor, Tensor\)"):
        engine(batch(0))
    engine.close()


def test_a_resumed_run_skips_the_same_layers(tmp_path: Any) -> None:
    engine = engine_of()
    train(engine, range(5))
    engine.save_checkpoint(str(tmp_path))
    expected = train(engine, range(5, 12))
    engine.close()
    resumed = engine_of()
    resumed.load_checkpoint(str(tmp_path))
    assert train(resumed, range(5, 12)) == expected
    resumed.close()


def _losses_at_stage(stage: int, count: int) -> list[float]:
    engine = engine_of(zero_optimization={"stage": stage}, gradient_accumulation_steps=count)
    losses = train(engine, range(8 * count))
    engine.close()
    return losses


def _stages(count: int) -> list[list[float]]:
    return [_losses_at_stage(stage, count) for stage in range(4)]


def test_stages_agree_bit_for_bit() -> None:
    for by_stage in run_ranks(_stages, 2, 1):
        assert all(losses == by_stage[0] for losses in by_stage)


def test_stages_agree_where_micro_steps_skip_other_layers() -> None:
    for by_stage in run_ranks(_stages, 2, 2):  # stages 2 and 3 sum over ranks before micro-steps
        assert all(losses == pytest.approx(by_stage[0], rel=1e-6) for losses in by_stage)


def _loss_of(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).square().mean()


def _pipeline_losses(num_stages: int) -> list[float]:
    torch.manual_seed(5)
    model = PipelineModule([LayerSpec(Block) for _ in range(4)], num_stages=num_stages, loss_fn=_loss_of)
    engine = zengine.initialize(
        model=model,
        config=config(
            gradient_accumulation_steps=2, progressive_layer_drop={**THETA, "layers": "Block"}, gradient_clipping=0
        ),
    )[0]
    losses = [float(engine.train_batch(iter([(batch(step), batch(step + 50))] * 2))) for step in range(8)]
    engine.close()
    return losses


def test_a_pipeline_skips_the_same_layers_on_every_split() -> None:
    whole = run_ranks(_pipeline_losses, 1, 1)[0]
    split = run_ranks(_pipeline_losses, 2, 2)[0]
    assert split == pytest.approx(whole, rel=1e-6)
