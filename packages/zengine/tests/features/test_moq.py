"""Mixture of quantization: its law, and engines that round alike at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zengine
import zpartition
from zcomm.testing import run_ranks
from zengine.config import ConfigError, Facts, load, resolve
from zengine.features.moq import BitSchedule, MixtureOfQuantization
from zprecision.quant import round_to_bits

SECTION = {
    "enabled": True,
    "quantize_bits": {"start_bits": 8, "target_bits": 3},
    "quantize_schedule": {"quantize_period": 2, "schedule_offset": 1},
    "quantize_groups": 4,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden).float().square().mean()


def config(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "quantize_training": SECTION,
        **changes,
    }


def engine_of(model: nn.Module | None = None, **changes: Any) -> zengine.Engine:
    return zengine.initialize(model=model or Net(), config=config(**changes))[0]


def batch(step: int, rank: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def train(engine: zengine.Engine, steps: range, dtype: torch.dtype = torch.bfloat16) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(batch(step, engine.global_rank, dtype).to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def moq_of(engine: zengine.Engine) -> MixtureOfQuantization:
    return next(each for each in engine._features if isinstance(each, MixtureOfQuantization))


def falls(start: int, target: int, period: int, factor: int, last: int) -> list[int]:
    schedule = BitSchedule(start, target, period)
    return [step for step in range(1, last + 1) if schedule.advance(step, factor)]


def test_bits_fall_by_the_law() -> None:
    assert falls(8, 4, 10, 1, 1000) == [10, 20, 40, 80]
    assert falls(16, 8, 100, 1, 20_000) == [100, 200, 400, 800, 1600, 3200, 6400, 12800]
    assert falls(8, 5, 10, 5, 2000) == [10, 100, 1000]
    assert falls(8, 8, 1, 1, 10) == []


def test_weights_are_the_masters_rounded_and_masters_are_not() -> None:
    engine, plain = engine_of(), engine_of(quantize_training={"enabled": False})
    moq, bits = moq_of(engine), []
    for step in range(10):
        train(engine, range(step, step + 1))
        masters = {s.name: s.tensor for s in engine.parts.partition.shards()}
        for name, param in engine.module.named_parameters():
            master = masters[name].view(param.shape).to(torch.bfloat16)
            is_rounded = param.dim() > 1 and step >= 1
            expected = round_to_bits(master, moq.schedules[name].bits, groups=4) if is_rounded else master
            assert torch.equal(param.detach(), expected), (step, name)
            assert (name in moq.schedules) == (param.dim() > 1)
        bits.append(moq.schedules["head.weight"].bits)
    assert bits == [8, 8, 7, 7, 6, 6, 6, 6, 5, 5]  # falls 2, 4 and 8 steps after the offset of 1
    assert train(plain, range(1)) == train(engine_of(), range(1))
    engine.close()
    plain.close()


@pytest.mark.parametrize("ratio", [0.25, 0.1])
def test_mixed_weights_move_from_full_to_rounded_after_each_fall(ratio: float) -> None:
    section = {**SECTION, "fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": ratio}}
    engine = engine_of(quantize_training=section)
    moq, shares = moq_of(engine), {2: 1 - ratio, 3: 1.0, 4: 1 - ratio, 5: 1.0, 6: 1 - ratio, 7: 1 - 2 * ratio}
    for step in range(1, 8):
        train(engine, range(step, step + 1))
        if step not in shares:
            continue
        masters = {s.name: s.tensor for s in engine.parts.partition.shards()}
        master = masters["head.weight"].view(4, 8).to(torch.bfloat16)
        rounded = round_to_bits(master, moq.schedules["head.weight"].bits, groups=4)
        expected = shares[step] * master + (1 - shares[step]) * rounded
        torch.testing.assert_close(engine.module.head.weight.detach(), expected, rtol=1e-2, atol=1e-4)
    engine.close()


@pytest.mark.parametrize("algo", [{"q_type": "asymmetric"}, {"rounding": "stochastic"}])
def test_kinds_and_roundings_have_their_grids(algo: dict[str, str]) -> None:
    engine = engine_of(quantize_training={**SECTION, "quantize_algo": algo})
    train(engine, range(4))
    masters = {s.name: s.tensor for s in engine.parts.partition.shards()}
    master = masters["head.weight"].view(4, 8).to(torch.bfloat16)
    kind = algo.get("q_type", "symmetric")
    nearest = round_to_bits(master, 7, groups=4, kind=kind)
    found = engine.module.head.weight.detach()
    step = (2 if kind == "symmetric" else 1) * 2 * float(master.abs().max()) / 2**7
    assert float((found - nearest).abs().max()) <= 1.01 * step
    assert torch.equal(found, nearest) == ("q_type" in algo)
    engine.close()


def _weights(stage: int, section: dict[str, Any], fp16: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    narrow = {"bf16": {"enabled": False}, "fp16": {"enabled": True, "loss_scale": 64}} if fp16 else {}
    dtype = torch.float16 if fp16 else torch.bfloat16
    engine = engine_of(zero_optimization={"stage": stage}, quantize_training=section, **narrow)
    losses = train(engine, range(8), dtype)
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.close()
    return losses, weights


def _at_stages(section: dict[str, Any], fp16: bool) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    return [_weights(stage, section, fp16) for stage in range(4)]


STOCHASTIC = {**SECTION, "quantize_algo": {"rounding": "stochastic"}}
TO_ONE = {**SECTION, "quantize_bits": {"start_bits": 4, "target_bits": 1}}


@pytest.mark.parametrize(("section", "fp16"), [(SECTION, False), (STOCHASTIC, True), (TO_ONE, False)])
def test_stages_round_alike_bit_for_bit(section: dict[str, Any], fp16: bool) -> None:
    for by_stage in run_ranks(_at_stages, 2, section, fp16):
        losses, weights = by_stage[0]
        assert len(set(weights["head.weight"][0, :2].tolist())) <= 16
        for other_losses, other_weights in by_stage[1:]:
            assert other_losses == losses
            assert all(torch.equal(other_weights[name], weights[name]) for name in weights)


def _resumed(stage: int, folder: str) -> bool:
    engine = engine_of(zero_optimization={"stage": stage}, quantize_training=STOCHASTIC)
    train(engine, range(5))
    engine.save_checkpoint(folder)
    expected = train(engine, range(5, 10))
    engine.close()
    resumed = engine_of(zero_optimization={"stage": stage}, quantize_training=STOCHASTIC)
    resumed.load_checkpoint(folder)
    found = train(resumed, range(5, 10))
    resumed.close()
    return found == expected


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_resumed_run_continues_bit_for_bit(stage: int, tmp_path: Path) -> None:
    assert all(run_ranks(_resumed, 2, stage, str(tmp_path)))


def _edited(stage: int) -> tuple[bool, bool]:
    engine = engine_of(zero_optimization={"stage": stage})
    train(engine, range(3))
    before = {s.name: s.tensor.clone() for s in engine.parts.partition.shards()}

    with zpartition.gathered(engine.module.head, modifier_rank=0), torch.no_grad():
        engine.module.head.bias.fill_(2.0)
    after = {s.name: s.tensor for s in engine.parts.partition.shards()}
    same = all(torch.equal(before[name], after[name]) for name in before if name != "head.bias")
    edited = "head.bias" not in after or bool((after["head.bias"] == 2.0).all())
    engine.close()
    return same, edited


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_edits_of_other_weights_leave_masters_unrounded(stage: int) -> None:
    assert run_ranks(_edited, 2, stage) == [(True, True)] * 2


@pytest.mark.parametrize("stage", [0, 3])
def test_exports_have_the_rounded_weights(stage: int, tmp_path: Path) -> None:
    engine = engine_of(
        zero_optimization={"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        quantize_training=SECTION,
    )
    train(engine, range(4))
    engine.save_16bit_model(str(tmp_path), "model.bin")
    saved = torch.load(tmp_path / "model.bin")
    masters = {s.name: s.tensor for s in engine.parts.partition.shards()}
    master = masters["head.weight"].view(4, 8).to(torch.bfloat16)
    assert torch.equal(saved["head.weight"], round_to_bits(master, 7, groups=4))
    engine.close()


def test_curved_blocks_lose_their_bits_later() -> None:
    section = {
        **SECTION,
        "quantize_schedule": {"quantize_period": 2, "schedule_offset": 0},
        "eigenvalue": {"enabled": True, "layer_name": "layers", "gas_boundary_resolution": 1},
    }
    engine = engine_of(quantize_training=section)
    moq, computed = moq_of(engine), []
    for step in range(5):
        train(engine, range(step, step + 1))
        computed.append(len(engine.block_eigenvalue))
        if step == 1:
            by_id = engine.block_eigenvalue
            for name, param in engine.module.named_parameters():
                if param.dim() > 1:
                    factor = 1 + int(4 * by_id[id(param)][0]) if name.startswith("layers") else 1
                    assert moq.schedules[name].period == 2 * 2 * factor, name
    assert {schedule.period for schedule in moq.schedules.values()} & {20}  # the most curved block: factor 5
    assert computed[0] == 0  # no fall was due in the first step
    assert engine.eigenvalue_enabled()
    engine.close()


def test_what_cannot_be_rounded_is_told() -> None:
    with pytest.raises(ValueError, match=r"^quantize_training: .*no master of its own.*float32 masters: \"bf16\""):
        engine_of(bf16={"enabled": False})
    with pytest.raises(ValueError, match=r"quantize_groups = 3 does not divide the 64 elements of layers.0.weight"):
        engine_of(quantize_training={**SECTION, "quantize_groups": 3})
    with pytest.raises(ValueError, match="none of the 8 trained parameters is chosen"):
        engine_of(quantize_training={**SECTION, "modules": ["decoder"]})
    engine = engine_of(quantize_training={**SECTION, "modules": ["^layers"]})
    assert set(moq_of(engine).schedules) == {f"layers.{number}.weight" for number in range(3)}
    assert engine.quantize_training_enabled()
    assert engine.quantize_training() == (False, True, 4, False, 0.001, "symmetric", "nearest", False, False)
    engine.close()


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"quantize_bits": {"start_bits": 4, "target_bits": 8}}, "bits only fall"),
        ({"quantize_bits": {"target_bits": 2}, "quantize_algo": {"q_type": "asymmetric"}}, "has no zero point"),
    ],
)
def test_bits_that_cannot_be_are_rejected(section: dict[str, Any], reason: str) -> None:
    facts = Facts(world_size=1, replicas=1, device_type="cpu", ranks_per_host=1)
    with pytest.raises(ConfigError, match=reason):
        resolve(load(config(quantize_training={"enabled": True, **section})), facts)


def test_the_section_eigenvalue_is_written_once() -> None:
    facts = Facts(world_size=1, replicas=1, device_type="cpu", ranks_per_host=1)
    section = {**SECTION, "eigenvalue": {"enabled": True}}
    with pytest.raises(ConfigError, match=r"are both on. Write the section once"):
        resolve(load(config(quantize_training=section, eigenvalue={"enabled": True})), facts)
    outer = resolve(load(config(eigenvalue={"enabled": True, "layer_name": "layers"})), facts)
    assert outer.eigenvalues.layer_name == "layers"


def test_a_state_without_some_weights_follows_the_law() -> None:
    engine = engine_of()
    moq = moq_of(engine)
    moq.load_state_dict({"steps": 10, "weights": {"head.weight": [8, 40, 0]}})
    assert moq.schedules["head.weight"] == BitSchedule(8, 3, 40)
    assert moq.schedules["layers.0.weight"] == BitSchedule(5, 3, 16, 8)
    for state, message in (
        ({"steps": -1, "weights": {}}, "steps = -1"),
        ({"steps": 1, "weights": {"head.weight": [8]}}, "must be bits, period and step"),
    ):
        with pytest.raises(ValueError, match=message):
            moq.load_state_dict(state)
    engine.close()


def test_an_exchange_of_replica_groups_rounds_the_masters_once() -> None:
    engine = engine_of(diloco={"sync_every": 1}, quantize_training={**SECTION, "quantize_groups": 1})
    train(engine, range(4))
    schedules = moq_of(engine).schedules
    for storage in engine.parts.partition.storages:
        for slot in storage.bucket.slots:
            if slot.name in schedules:
                master, shown = (
                    each.detach()[slot.offset : slot.end].view(slot.shape) for each in (storage.master, storage.flat)
                )
                assert torch.equal(shown, round_to_bits(master.bfloat16(), schedules[slot.name].bits))
