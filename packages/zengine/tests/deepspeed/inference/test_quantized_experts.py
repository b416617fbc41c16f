"""Quantized models with experts over ranks: lists are quantized, stacks of MoE layers stay and are named."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zengine.deepspeed as deepspeed
import zpartition
from zcomm.testing import run_ranks
from zengine.inference.quantized_modules import QuantizedLinear
from zpartition.testing.expert_list_models import KINDS, ListMoE
from zpartition.testing.expert_models import MoELanguageModel

TOKENS = torch.arange(14).view(2, 7) % 20


class Lists(nn.Module):
    """Experts are modules with linear layers, called by several kinds of loops; (..., 8) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(ListMoE(kind) for kind in KINDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.last(x)


def _lists() -> tuple[bool, list[str], list[int]]:
    """Whether outputs equal those of one rank, the experts that are quantized here, and the engine's expert ranks."""
    rank = torch.distributed.get_rank()
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(rank))
    whole = deepspeed.init_inference(Lists(), dtype="int8")
    split = deepspeed.init_inference(Lists(), dtype="int8", moe={"ep_size": 2})
    quantized = [
        name
        for name, layer in split.module.named_modules()
        if isinstance(layer, QuantizedLinear) and name.startswith("layers.0.experts")
    ]
    (group,) = split.ep_group.values()
    assert list(split.ep_group) == [4]
    return torch.equal(split(x), whole(x)), quantized, torch.distributed.get_process_group_ranks(group)


def test_each_rank_quantizes_its_own_experts() -> None:
    for rank, (equal, quantized, ranks) in enumerate(run_ranks(_lists, 2)):
        assert equal
        own = [f"layers.0.experts.{index}.w{number}" for index in (2 * rank, 2 * rank + 1) for number in (1, 2, 3)]
        assert quantized == own
        assert ranks == [0, 1]


def _saved(folder: str) -> list[str]:
    """What is said of a path to save to, where a group gives the expert ranks, and where the model has them."""
    group = torch.distributed.new_group([0, 1])
    split = deepspeed.init_inference(Lists(), dtype="fp32", moe={"ep_group": group}).module
    told = []
    for module, moe in ((Lists(), {"ep_group": group}), (split, {})):
        with pytest.raises(ValueError, match="save_mp_checkpoint_path") as raised:
            deepspeed.init_inference(module, dtype="int8", moe=moe, save_mp_checkpoint_path=folder)
        told.append(str(raised.value))
    return told


def test_no_model_is_saved_without_the_experts_of_other_ranks(tmp_path: Path) -> None:
    for told in run_ranks(_saved, 2, str(tmp_path / "packed")):
        expected = "writes no parts of expert ranks, and experts are over 2 ranks. Remove it, or use one expert rank."
        assert all(expected in each for each in told)
    assert not (tmp_path / "packed").exists()


def _stacks() -> tuple[float, int]:
    """Difference from one rank, and the number of experts here: stacks keep their dtype."""
    whole = deepspeed.init_inference(MoELanguageModel(), dtype="int8")
    split = deepspeed.init_inference(MoELanguageModel(), dtype="int8", moe={"ep_size": 2})
    (stack,) = {len(param) for param in split.module.blocks[0].moe.experts.parameters()}
    return float((split(TOKENS) - whole(TOKENS)).abs().max()), stack


def test_stacked_experts_stay_as_they_are_over_ranks() -> None:
    for error, local in run_ranks(_stacks, 2):
        assert error < 1e-5
        assert local == 2


def _from_files(kind: type[nn.Module], path: str) -> tuple[float, list[list[int]]]:
    """Difference from one rank, and shapes of the experts' parameters here, of a model that is read from a file."""
    x = TOKENS if kind is MoELanguageModel else torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    whole, empty = deepspeed.init_inference(kind(), dtype="int8"), kind()
    with torch.no_grad():
        for param in empty.parameters():
            param.zero_()
    split = deepspeed.init_inference(empty, dtype="int8", moe={"ep_size": 2}, checkpoint=path)
    shapes = [list(param.shape) for name, param in split.module.named_parameters() if "experts" in name]
    return float((split(x) - whole(x)).abs().max()), shapes


@pytest.mark.parametrize("kind", [Lists, MoELanguageModel])
def test_each_rank_reads_its_own_experts(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.save(kind().state_dict(), tmp_path / "model.pt")
    for error, shapes in run_ranks(_from_files, 2, kind, str(tmp_path / "model.pt")):
        assert error < 1e-5
        assert {shape[0] for shape in shapes if len(shape) > 1} == ({2} if kind is MoELanguageModel else {0})


def test_what_is_not_quantized_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = MoELanguageModel()
    stacks = [name for name, param in model.named_parameters() if param.dim() == 3]
    with caplog.at_level(logging.INFO, "zengine"):
        deepspeed.init_inference(model, dtype="int8")
    (line,) = [each for each in caplog.messages if "quantized to int8" in each]
    assert stacks
    assert all(name in line.partition("not quantized:")[2] for name in stacks)
    assert not zpartition.expert_shards_of(model)
