"""Compressed models in an engine: the schedule, all ZeRO stages, checkpoints, and a section that is off."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_models import Decoder, config, group, technique, tokens, weights
from torch import Tensor, nn

import zengine
from zcomm.testing import run_ranks
from zengine.compression import compressed_layers
from zengine.compression.start import compression_of
from zengine.features.compression import CompressionSchedule
from zprecision.quant import simulate

FOUR = {"start_bits": 8, "target_bits": 4}
EVERYTHING = {
    **weights(group(["query", "up", "embed"], **FOUR), group(["down"], format="int8-row"), schedule_offset=1),
    "activation_quantization": technique({"schedule_offset": 2}, group(["down", "head"], bits=8)),
    "sparse_pruning": technique({"method": "topk", "schedule_offset": 1}, group(["value", "key"], dense_ratio=0.5)),
    "row_pruning": technique({"method": "topk", "schedule_offset": 2}, group(["up"], dense_ratio=0.5)),
    "head_pruning": technique(
        {"method": "topk", "num_heads": 4, "schedule_offset": 3}, group(["attention.out"], dense_ratio=0.5)
    ),
}


def engine_of(section: dict[str, Any], model: nn.Module | None = None, **others: Any) -> zengine.Engine:
    source = config(section, **others)
    made = zengine.init_compression(model or Decoder(), source)
    return zengine.initialize(model=made, config=source)[0]


def train(engine: zengine.Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = tokens(step, 6, 5).view(2, 3, 5)[engine.global_rank % 2].to(engine.device)
        loss = engine(batch, batch.roll(-1, 1))
        engine.backward(loss)
        losses.append(engine.step().loss)
    return losses


def on_two_ranks(stage: int, folder: str, section: dict[str, Any], more: dict[str, Any]) -> Any:
    zero = {"zero_optimization": {"stage": stage}}
    engine = engine_of(section, Decoder(seed=3 + torch.distributed.get_rank() if more else 5), **zero, **more)
    losses = train(engine, range(5))
    engine.save_checkpoint(folder, "five")
    losses += train(engine, range(5, 7))
    engine.close()
    resumed = engine_of(section, Decoder(seed=11), **zero, **more)
    resumed.load_checkpoint(folder, "five")
    again = train(resumed, range(5, 7))
    resumed.close()
    return losses, again


def test_a_loaded_module_computes_as_the_saved_one(tmp_path: Path) -> None:
    """Also without a forward of the engine in between."""
    engine = engine_of(EVERYTHING)
    train(engine, range(5))
    engine.save_checkpoint(str(tmp_path), "five")
    expected = engine.module(tokens())
    engine.close()
    loaded = engine_of(EVERYTHING, Decoder(seed=11))
    loaded.load_checkpoint(str(tmp_path), "five")
    assert torch.equal(loaded.module(tokens()), expected)
    cleaned = zengine.redundancy_clean(loaded.module, config(EVERYTHING))
    assert torch.equal(cleaned(tokens()), expected)
    loaded.close()


def test_every_stage_trains_alike_and_resumes(tmp_path: Path) -> None:
    expected = None
    for stage in range(4):
        ranks = run_ranks(on_two_ranks, 2, stage, str(tmp_path / str(stage)), EVERYTHING, {})
        (losses, again), other = ranks
        assert other == (losses, again)
        assert again == losses[5:]
        expected = expected or losses
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-5, atol=0)
    assert expected is not None
    assert expected[-1] < expected[0]


def test_masks_of_initial_weights_are_those_of_rank_0_and_of_checkpoints(tmp_path: Path) -> None:
    section = {"sparse_pruning": technique({}, group(["up", "down"], dense_ratio=0.25))}
    for stage in (1, 3):
        ranks = run_ranks(on_two_ranks, 2, stage, str(tmp_path / str(stage)), section, {"gradient_clipping": 1.0})
        (losses, again), other = ranks
        assert other == (losses, again)
        assert again == losses[5:]  # the resumed model had other weights, and so other masks


def test_a_step_is_that_of_simulated_weights() -> None:
    class Simulated(Decoder):
        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
            return super().forward(ids, labels)

    model = Simulated()
    for block in model.layers:
        up = block.up
        up.forward = lambda x, up=up: nn.functional.linear(x, simulate(up.weight, 4), up.bias)
    reference = zengine.initialize(model=model, config={**config({}), "compression_training": {}})[0]
    engine = engine_of(weights(group(["up"], **FOUR)))
    assert train(engine, range(4)) == train(reference, range(4))


def test_techniques_are_switched_on_by_applied_steps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zengine"):
        engine = engine_of(weights(group(["up"], **FOUR), schedule_offset=2))
        plain = zengine.initialize(model=Decoder(), config=config({}))[0]
        assert train(engine, range(2)) == train(plain, range(2))
        assert train(engine, range(2, 4)) != train(plain, range(2, 4))
    assert "weight_quantization is on after 2 steps" in caplog.text
    state = compression_of(engine.module)
    assert state is not None
    assert state.count.steps == 4


def test_learned_scores_train_and_are_saved() -> None:
    engine = engine_of({"row_pruning": technique({"method": "topk"}, group(["up"], dense_ratio=0.5))})
    scores = engine.module.layers[0].up.row_mask_scores
    before = scores.detach().clone()
    train(engine, range(3))
    assert not torch.equal(scores, before)
    assert "layers.0.up.row_mask_scores" in engine.module.state_dict()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_weights_are_rounded_in_their_dtype(dtype: str) -> None:
    engine = engine_of(EVERYTHING, **{dtype: {"enabled": True}})
    losses = train(engine, range(6))
    assert losses[-1] < losses[0]
    for layer in compressed_layers(engine.module).values():
        assert layer.effective()[0].dtype == layer.layer.weight.dtype


def test_a_section_that_is_off_is_absent() -> None:
    section = {**EVERYTHING, "row_pruning": {"shared_parameters": {"enabled": False}}}
    off = {name: {**each, "shared_parameters": {"enabled": False}} for name, each in section.items()}
    engine = engine_of(off)
    assert not any(isinstance(feature, CompressionSchedule) for feature in engine._features)
    assert not compressed_layers(engine.module)
    assert train(engine, range(3)) == train(zengine.initialize(model=Decoder(), config=config({}))[0], range(3))


def test_a_model_that_was_not_prepared_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zengine"):
        zengine.initialize(model=Decoder(), config=config(weights(group(["up"], **FOUR))))
    assert "compression_training has no effect: no layer of this Decoder is compressed" in caplog.text


def test_compiled_layers_are_compressed() -> None:
    plain, compiled = (engine_of(weights(group(["*"], **FOUR))) for _ in range(2))
    for block in compiled.module.layers:
        block.compile(backend="eager")
    torch.testing.assert_close(
        torch.tensor(train(compiled, range(2))), torch.tensor(train(plain, range(2))), rtol=1e-6, atol=0
    )


def test_weights_outside_of_forward_are_rounded_after_updates_as_quantize_training_does() -> None:
    params = {"start_bits": 5, "target_bits": 4, "quantization_period": 2}
    section = {"weight_quantization": technique({}, group([r"up$", "head"], **params))}
    moq = {
        "enabled": True,
        "quantize_bits": {"start_bits": 5, "target_bits": 4},
        "quantize_schedule": {"quantize_period": 2, "schedule_offset": 0},
        "modules": [r"up\.weight", "head"],
    }
    bf16 = {"bf16": {"enabled": True}}
    engine = engine_of(section, **bf16)
    assert not compressed_layers(engine.module)
    other = zengine.initialize(model=Decoder(), config=config({}, quantize_training=moq, **bf16))[0]
    assert train(engine, range(4)) == train(other, range(4))
    assert len(engine.module.layers[0].up.weight.unique()) <= 16
    with pytest.raises(zengine.ConfigError, match="rounds weights after each update as well"):
        engine_of(section, quantize_training=moq, **bf16)


def test_split_layers_and_generation_are_refused() -> None:
    section = weights(group(["up"], **FOUR))
    with pytest.raises(ValueError, match="hybrid_engine generates with the weights themselves"):
        engine_of(section, hybrid_engine={"enabled": True})


def test_deepspeeds_getter_tells_that_weights_are_rounded_in_forward() -> None:
    engine = engine_of(weights(group(["up"], **FOUR)))
    assert engine.quantize_training() == (True, True, 1, False, 0.001, "symmetric", "nearest", False, False)
    assert not engine.quantize_training_enabled()
    engine.close()
