"""Stage 3: a rank that skips a layer ends on all ranks with one error that names units and ranks, also over Gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcomm
from zcomm.testing import run_ranks
from zengine.testing import small_engine


class Skipping(nn.Module):
    """Layers of different sizes; rank 1 leaves the second one out from its second forward on."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, width) for width in widths)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        skips = self.forwards >= 2 and dist.get_rank() == 1
        parts = [layer(x).sum() for index, layer in enumerate(self.layers) if not (skips and index == 1)]
        return torch.stack(parts).mean()


def _skips(widths: tuple[int, ...]) -> str:
    stage = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_unit_size": 1,
        "stage3_prefetch_bucket_size": 0,
    }
    engine = small_engine(Skipping(widths), zero_optimization=stage)
    try:
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 8)))
            engine.step()
    except zcomm.CollectiveFailed as error:
        return str(error)
    return ""


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("widths", [(300, 40, 700), (64, 64, 64)], ids=["sizes", "equal"])
def test_a_skipped_layer_is_named_on_all_ranks(
    transport: str, widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZCOMM_TRANSPORT", transport)
    for text in run_ranks(_skips, 2, widths):
        assert "the ranks disagree: rank 0 calls all_gather \"weights of unit 'layers.1'\"" in text, text
        assert "weights of unit 'layers.2'" in text
        assert "rank 1" in text
