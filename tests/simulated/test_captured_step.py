"""Whole steps in a CUDA graph, on the simulated device's recorder: the bits of plain steps."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcomm
import zengine
from simulated_cuda.library import host_waits, stats, take_violations
from zengine.captured_step import NUM_EAGER

DEVICE = torch.device("cuda", 0)
PRECISION: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {"bf16": {"enabled": True}}),
    "fp16": (
        torch.float16,
        {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with contextlib.closing(zcomm.init()):
        yield


def make_engine(stage: int, dtype: str, **more: Any) -> zengine.Engine:
    torch.manual_seed(0)
    torch.cuda.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)
    )
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 3000},
        "gradient_clipping": 0.05,
        **PRECISION[dtype][1],
        **more,
    }
    return zengine.initialize(model=model, config=config)[0]


def batches(dtype: str, num: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num):
        values = torch.randn(4, 16, generator=generator).to(DEVICE, PRECISION[dtype][0])
        yield values, torch.randn(4, 4, generator=generator).to(DEVICE)


def train(engine: zengine.Engine, dtype: str, captures: bool, num: int = NUM_EAGER + 5) -> tuple[list[Any], Any]:
    """Return the reports and the final state; the sixth batch overflows in fp16 and is NaN in the others."""

    def loss_of(values: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(engine(values).float(), targets)

    step = zengine.capture_step(engine, loss_of) if captures else None
    reports = []
    for number, (values, targets) in enumerate(batches(dtype, num)):
        if number == NUM_EAGER + 2:
            values = values * (6e4 if dtype == "fp16" else float("nan"))
        if step is not None:
            reports.append(step(values, targets))
            continue
        engine.backward(loss_of(values, targets))
        report = engine.step()
        assert report is not None
        reports.append(report)
    state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    masters = [each.master.clone() for each in engine.parts.partition.storages]
    moments = [
        value.clone()
        for entry in engine.parts.optimizer.optimizer.state.values()
        for value in entry.values()
        if isinstance(value, Tensor)
    ]
    return reports, (list(state.values()), masters, moments, engine.parts.scaler.state_dict())


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_replayed_steps_equal_plain_ones_bit_for_bit(stage: int, dtype: str) -> None:
    with contextlib.closing(make_engine(stage, dtype)) as engine:
        expected, (*tensors, scale) = train(engine, dtype, captures=False)
        counters = engine.clock.state_dict()
    with contextlib.closing(make_engine(stage, dtype)) as engine:
        found, (*same, same_scale) = train(engine, dtype, captures=True)
        assert engine.clock.state_dict() == counters
    assert [each.applied for each in expected].count(False) == 1
    for one, other in zip(expected, found, strict=True):
        for name in ("applied", "step", "applied_steps", "samples", "lr", "loss_scale"):
            assert getattr(one, name) == getattr(other, name), name
        if one.applied:
            assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    for lists in zip(tensors, same, strict=True):
        for one, other in zip(*lists, strict=True):
            assert one.equal(other)
    assert scale == same_scale
    if dtype == "fp16":
        assert scale["factor"] != 256


def capture(
    engine: zengine.Engine, dtype: str = "bf16"
) -> tuple[zengine.CapturedStep, Iterator[tuple[Tensor, Tensor]]]:
    """Return a step that has been captured, and more batches."""

    def loss_of(values: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(engine(values).float(), targets)

    step, more = zengine.capture_step(engine, loss_of), batches(dtype, NUM_EAGER + 9)
    for _ in range(NUM_EAGER + 1):
        step(*next(more))
    return step, more


def test_a_replay_allocates_nothing_and_waits_once() -> None:
    with contextlib.closing(make_engine(2, "bf16")) as engine:
        step, more = capture(engine)
        inputs = [next(more) for _ in range(3)]
        torch.cuda.synchronize()
        before, allocations, waits = torch.cuda.memory_allocated(), stats()["num_allocations"], Counter(host_waits())
        for batch in inputs:
            step(*batch)
        assert Counter(host_waits()) - waits == {"copy_ to the host": 3}
        assert stats()["num_allocations"] == allocations
        assert torch.cuda.memory_allocated() == before


def test_plain_steps_and_replays_alternate() -> None:
    with contextlib.closing(make_engine(1, "bf16")) as engine:
        step, more = capture(engine)
        for number, (values, targets) in enumerate(more):
            if number % 2:
                step(values, targets)
            else:
                engine.backward(nn.functional.mse_loss(engine(values).float(), targets))
                engine.step()
        found = [each.master.clone() for each in engine.parts.partition.storages]
    with contextlib.closing(make_engine(1, "bf16")) as engine:
        for values, targets in batches("bf16", NUM_EAGER + 9):
            engine.backward(nn.functional.mse_loss(engine(values).float(), targets))
            engine.step()
        assert all(each.master.equal(other) for each, other in zip(engine.parts.partition.storages, found))


def test_steps_that_are_skipped_at_the_beginning_do_not_count() -> None:
    scale = {"enabled": True, "initial_scale_power": 40, "loss_scale_window": 1000, "hysteresis": 1}
    with contextlib.closing(make_engine(1, "fp16", fp16=scale)) as engine:
        step = zengine.capture_step(engine, lambda values: engine(values).float().square().mean())
        reports = [step(values) for values, _ in batches("fp16", 50)]
    applied = [report.applied for report in reports]
    assert not any(applied[: NUM_EAGER + 1])
    assert sum(applied) > NUM_EAGER + 1


def test_a_step_is_captured_soon_after_a_gradient_that_was_not_finite() -> None:
    with contextlib.closing(make_engine(1, "bf16")) as engine:
        step = zengine.capture_step(engine, lambda values: engine(values).float().square().mean())
        for at, (values, _) in enumerate(batches("bf16", NUM_EAGER + 4)):
            report = step(values * float("nan") if at == 1 else values)
            assert report.applied == (at != 1)
        assert engine.parts.partition.reducer.non_finite_probe.steps_left > 0


def test_what_the_graph_contains_must_stay() -> None:
    with contextlib.closing(make_engine(1, "bf16")) as engine:
        step, more = capture(engine)
        with pytest.raises(
            ValueError, match=r"a batch of \[2, 16\] torch.bfloat16, \[2, 4\] torch.float32 does not fit"
        ):
            step(*(each[:2] for each in next(more)))
        (group,) = engine.parts.optimizer.optimizer.param_groups
        group["weight_decay"] = 0.5
        with pytest.raises(ValueError, match="an option other than lr has changed"):
            step(*next(more))
        group["weight_decay"] = 0.1
        step(*next(more))
        engine.offload_states()
        engine.reload_states()
        torch.empty(1 << 20, device=DEVICE)
        with pytest.raises(ValueError, match="have moved"):
            step(*next(more))


def test_a_batch_has_only_tensors() -> None:
    with contextlib.closing(make_engine(1, "fp32")) as engine:
        step = zengine.capture_step(engine, lambda batch, scale: engine(batch["x"]).sum() * scale)
        with pytest.raises(TypeError, match=r"tensors, as in step\(x, y\), not dict, int"):
            step({"x": torch.ones(4, 16)}, 3)  # type: ignore[arg-type]
        assert engine.clock.steps == 0


def test_a_read_on_the_host_ends_the_capture_and_training_goes_on() -> None:
    with contextlib.closing(make_engine(1, "bf16")) as engine:
        reads: list[float] = []

        def loss_of(values: Tensor, targets: Tensor) -> Tensor:
            loss = nn.functional.mse_loss(engine(values).float(), targets)
            if len(reads) == NUM_EAGER:
                loss.item()
            reads.append(0.0)
            return loss

        step, more = zengine.capture_step(engine, loss_of), batches("bf16", NUM_EAGER + 2)
        for _ in range(NUM_EAGER):
            step(*next(more))
        with pytest.raises(RuntimeError, match="during capture"):
            step(*next(more))
        take_violations()
        values, targets = next(more)
        engine.backward(nn.functional.mse_loss(engine(values).float(), targets))
        report = engine.step()
        assert report is not None
        assert (report.applied, report.step) == (True, NUM_EAGER + 1)


def test_unused_parameters_are_not_captured() -> None:
    with contextlib.closing(make_engine(1, "bf16")) as engine:
        first = engine.module[0]

        def loss_of(values: Tensor, targets: Tensor) -> Tensor:
            return first(values).float().square().mean() + 0 * targets.sum()

        step, more = zengine.capture_step(engine, loss_of), batches("bf16", NUM_EAGER + 1)
        for _ in range(NUM_EAGER):
            step(*next(more))
        with pytest.raises(ValueError, match="some parameters have no gradient"):
            step(*next(more))


@pytest.mark.parametrize(
    ("more", "remedy"),
    [
        ({"zero_optimization": {"stage": 3}}, "set zero_optimization.stage to 0, 1 or 2"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "remove offload_optimizer"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps must be 1"),
        ({"activation_checkpointing": {"modules": ["0"]}}, "remove activation_checkpointing.modules"),
        ({"wall_clock_breakdown": True}, "turn off telemetry"),
        ({"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}, "must be one of zoptim's with kernels"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "foreach": True}}}, "must be one of zoptim's"),
    ],
)
def test_settings_that_cannot_be_captured_are_told_with_a_remedy(more: dict[str, Any], remedy: str) -> None:
    with (
        contextlib.closing(make_engine(1, "bf16", **more)) as engine,
        pytest.raises(ValueError, match=r"capture_step\(\) cannot capture this engine: ") as caught,
    ):
        zengine.capture_step(engine, lambda values: engine(values).sum())
    assert remedy in str(caught.value)


def test_features_that_act_inside_the_step_are_named() -> None:
    class Clamp(zengine.Feature):
        def forward_end(self, output: Any) -> Any:
            return output.clamp(-1, 1)

    with contextlib.closing(make_engine(1, "bf16")) as engine:
        engine.add_feature(Clamp())
        with pytest.raises(ValueError, match="features act inside the step on the host: Clamp; turn them off"):
            zengine.capture_step(engine, lambda values: engine(values).sum())
