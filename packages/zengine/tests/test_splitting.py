"""The module is split as the config, the model or its behaviour says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zengine
from zcomm.testing import run_ranks
from zengine.splitting import first_batch
from zpartition.tensor import ColumnLinear, RowLinear
from zpartition.tensor.testing import Gated

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


class Rows(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((24,), float(index))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Gated(8), nn.LayerNorm(24))


def _kinds() -> list[Any]:
    found: list[Any] = []
    for config in ({"autotp_size": 2}, {"autotp_size": 1}):
        engine, _, loader, _ = zengine.initialize(
            model=model(), training_data=Rows(), config={**CONFIG, "tensor_parallel": config}
        )
        kinds = [type(engine.module[0].up).__name__, type(engine.module[0].down).__name__]
        found.append((kinds, len(loader), engine.dp_world_size))
        engine.close()
    for given, split in (({}, model()), ({"tp_plan": {"0.down": "diagonal_row"}}, model())):
        for name, value in given.items():
            setattr(split, name, value)
        with pytest.raises(ValueError, match=r"small input|style 'diagonal_row'"):
            zengine.initialize(model=split, config={**CONFIG, "tensor_parallel": {"autotp_size": 2}})
    other = nn.Sequential(Gated(8 + torch.distributed.get_rank()))
    with pytest.raises(zengine.RanksDisagree, match=r"0\.gate\.weight \(8, 24\).*0\.gate\.weight \(9, 24\)"):
        zengine.initialize(model=other, config={**CONFIG, "tensor_parallel": {"autotp_size": 2}})
    return found


def test_a_model_is_split_by_a_plan_that_is_found_with_a_sample() -> None:
    for split, whole in run_ranks(_kinds, 2):
        assert split == ([ColumnLinear.__name__, RowLinear.__name__], 2, 1)
        assert whole == (["Linear", "Linear"], 1, 2)


def test_a_sample_is_a_batch_of_one() -> None:
    assert first_batch(Rows(), None, torch.device("cpu")).shape == (1, 24)
    assert first_batch(Rows(), lambda items: {"x": items[0]}, torch.device("cpu"))["x"].shape == (24,)
    assert first_batch(None, None, torch.device("cpu")) is None
    assert first_batch(iter([1]), None, torch.device("cpu")) is None
