"""Models that other code has split: marks that DeepSpeed reads beside those of slices.

tests/contract/test_megatron_model.py trains such models.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcomm
import zengine
from zcomm.testing import run_ranks

CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}


class Sliced(nn.Module):
    """Each tensor rank adds its slice's sum; `scale` is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.slice, self.scale = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
        mark: Any = self.slice
        mark.model_parallel = True

    def forward(self) -> Tensor:
        return self.scale.sum() + self.slice.sum()


def mpu_of(tensor: int) -> Any:
    groups = zcomm.Groups.of(zcomm.Degrees(tensor=tensor))
    return SimpleNamespace(get_slice_parallel_group=groups.tensor, get_data_parallel_group=groups.data)


def _experts() -> str:
    model: Any = Sliced()
    model.scale.allreduce = False
    with pytest.raises(ValueError) as caught:
        zengine.initialize(model=model, mpu=mpu_of(1), config=CONFIG)
    engine = zengine.initialize(model=model, mpu=mpu_of(2), config=CONFIG)[0]  # one replica: nothing is reduced
    engine.backward(engine())
    assert engine.step().grad_norm == pytest.approx(5**0.5)  # 2 x 2 of slices, 1 of what is whole
    engine.close()
    return str(caught.value)


def test_experts_of_other_code_are_refused_where_ranks_would_average_them() -> None:
    for message in run_ranks(_experts, 2):
        assert message.startswith("scale (1 in all) is marked allreduce=False")


def _sequence_parallel() -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zengine").addHandler(handler)
    model: Any = Sliced()
    model.scale.sequence_parallel = True
    for _ in range(2):  # the second engine finds the model split
        zengine.initialize(model=model, mpu=mpu_of(2), config=CONFIG)[0].close()
    logging.getLogger("zengine").removeHandler(handler)
    return [message for message in found if "sequence_parallel" in message]


def test_a_mark_without_effect_is_logged_once() -> None:
    first, second = run_ranks(_sequence_parallel, 2)
    assert len(first) == 1
    assert first[0].startswith("scale (1 in all) is marked sequence_parallel: as in DeepSpeed")
    assert second == []
