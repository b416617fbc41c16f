"""Saved parts of activations: their size, and bit-for-bit restoration with strides."""

from __future__ import annotations

import pytest
import torch

import zcomm
from zcomm.testing import run_ranks
from zpartition.activations import UNPARTITIONED, ArenaStore, HostStore, SavedInputs, saved_numel
from zpartition.layout.model_parallel import ModelParallelGroup

SHAPES = ((4, 6), (3, 5, 2), (7,), (1,), (2, 3, 4))


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return [*plain, plain[0].t(), plain[1].permute(2, 0, 1), plain[4][:, 1], plain[2].expand(3, 7)]


def come_back() -> int:
    mp_group, num_checked = ModelParallelGroup.of(None), 0
    for store in (HostStore(), ArenaStore(3)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            keeping = SavedInputs(mp_group=mp_group, store=store)
            for tensor in tensors(dtype):
                kept = keeping.pack(tensor)
                assert kept.restore().numel() == saved_numel(tensor.numel(), mp_group.size)
                found = keeping.unpack(kept)
                assert found.dtype == dtype
                assert torch.equal(found, tensor)
                is_dense = tensor.numel() == tensor.untyped_storage().nbytes() // tensor.element_size()
                assert found.stride() == tensor.stride() or not is_dense
                num_checked += 1
    return num_checked


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tensors_of_any_strides_are_rebuilt(world_size: int) -> None:
    assert run_ranks(come_back, world_size) == [54] * world_size


def test_each_rank_saves_its_part_rounded_up() -> None:
    assert [saved_numel(24, size) for size in (1, 2, 5)] == [24, 12, 5]
    assert UNPARTITIONED.is_identity
    assert not SavedInputs(store=HostStore()).is_identity


def differ() -> str:
    keeping = SavedInputs(mp_group=ModelParallelGroup.of(None))
    same, other = keeping.pack(torch.ones(4, 2)), keeping.pack(torch.full((4, 2), 1.0 + zcomm.group_rank()))
    keeping.unpack(same)
    with pytest.raises(ValueError, match="differ between the 2 tensor ranks") as caught:
        keeping.unpack(other)
    for _ in range(20):
        assert keeping.unpack(keeping.pack(torch.ones(2))).tolist() == [1, 1]
    assert keeping.checks_left == 0
    return str(caught.value)


def test_ranks_with_different_activations_raise() -> None:
    first, second = run_ranks(differ, 2)
    assert first == second
    assert "(4, 2)" in first
    assert "sequence_dim" in first
