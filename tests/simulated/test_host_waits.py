"""The host waits for the device once in a step, at the boundary, where it learns norm, loss and skipping together."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
from simulated_cuda.library import host_waits
from zcomm.testing import run_ranks
from zengine.engine.feature import Feature
from zpartition.activations import ArenaStore, HostStore
from zpartition.activations.stores import IN_FLIGHT

DEVICE = torch.device("cuda", 0)
DTYPES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {"bf16": {"enabled": True}}),
    "fp16": (torch.float16, {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1}}),
}
ONE_READ = Counter({"copy_ to the host": 1})
MORE: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "activations on the host": {"activation_checkpointing": {"cpu_checkpointing": True, "modules": ["1", "3"]}},
    "SGD": {"optimizer": {"type": "SGD", "params": {"lr": 0.01}}},
    "LAMB": {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}},
}


@contextlib.contextmanager
def counting(waits: Counter[str]) -> Iterator[None]:
    """Add the waits of the host inside the block to `waits`."""
    before = Counter(host_waits())
    yield
    waits += Counter(host_waits()) - before


def waits_of_a_step(stage: int, dtype: str, clip: float, more: dict[str, Any], *features: Feature) -> Counter[str]:
    """Return the waits of the fourth step of a small model, with a schedule of the learning rate."""
    kind, precision = DTYPES[dtype]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": clip,
        **precision,
        **more,
    }
    engine, *_ = zengine.initialize(model=model, config=config)
    for feature in features:
        engine.add_feature(feature)
    values, targets = torch.randn(4, 16, device=DEVICE, dtype=kind), torch.randn(4, 4, device=DEVICE)
    with contextlib.closing(engine):
        for _ in range(4):
            waits: Counter[str] = Counter()
            report = None
            while report is None:
                with counting(waits):
                    loss = nn.functional.mse_loss(engine(values).float(), targets)
                    engine.backward(loss)
                    report = engine.step()
            assert report.applied
    return waits


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    with contextlib.closing(zcomm.init()):
        yield


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_waits_once(stage: int, dtype: str, clip: float) -> None:
    assert waits_of_a_step(stage, dtype, clip, {}) == ONE_READ


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("more", MORE)
def test_a_step_with_more_waits_once(more: str) -> None:
    assert waits_of_a_step(2, "bf16", 0.1, MORE[more]) == ONE_READ


@pytest.mark.usefixtures("world")
def test_a_wait_that_somebody_adds_is_counted() -> None:
    class Reader(Feature):
        def gradients_ready(self, partition: Any) -> None:
            bool(torch.ones((), device=DEVICE) > 0)
            torch.ones(1, device=DEVICE).cpu()
            torch.ones(1, device=DEVICE).tolist()
            torch.cuda.current_stream().record_event().synchronize()
            torch.cuda.current_stream().synchronize()
            torch.cuda.synchronize()

    added = Counter({"aten::_local_scalar_dense": 1, "copy_ to the host": 2, "synchronize an event": 1})
    added += Counter({"synchronize a stream": 1, "synchronize the device": 1})
    assert waits_of_a_step(2, "bf16", 0.1, {}, Reader()) == ONE_READ + added


def waits_on_a_rank() -> list[Counter[str]]:
    plain = [waits_of_a_step(stage, dtype, 0.1, {}) for stage in range(4) for dtype in ("bf16", "fp16")]
    return [*plain, waits_of_a_step(2, "bf16", 0.1, MORE["LAMB"])]


def test_a_step_of_two_ranks_waits_once() -> None:
    for waits in run_ranks(waits_on_a_rank, 2):
        assert waits == 9 * [ONE_READ]


@pytest.mark.parametrize("store", [HostStore(), ArenaStore(9, on_host=True)], ids=repr)
def test_activations_go_to_the_host_and_return_without_a_wait(store: HostStore | ArenaStore) -> None:
    numel, waits = 1 << 16, Counter[str]()
    store.put(torch.ones(numel, device=DEVICE))()  # makes streams and pinned memory
    before = torch.cuda.memory_allocated()
    with counting(waits):
        restores = []
        for value in range(9):
            restores.append(store.put(torch.full((numel,), float(value), device=DEVICE)))
        assert torch.cuda.memory_allocated() - before <= IN_FLIGHT * 4 * numel
        returned = [restores.pop()()]
        assert torch.cuda.memory_allocated() - before == 2 * 4 * numel, "one more is on its way ahead of its use"
        returned += [restores.pop()() for _ in range(8)]
    assert waits == Counter()
    for value, tensor in enumerate(reversed(returned)):
        assert tensor.eq(value).all()
