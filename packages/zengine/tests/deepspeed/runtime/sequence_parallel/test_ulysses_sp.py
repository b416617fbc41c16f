"""The adapter of loaders; what is refused before any message.  tests/integrations trains a model with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import zcomm
from zcomm.testing import run_ranks
from zengine.deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.full((4,), self.first + index)
        return {"input_ids": row, "labels": row}


def core(_module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> Any:
    out = scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
    return out.transpose(1, 2), None


def _adapted() -> dict[str, Any]:
    rank, group = zcomm.group_rank(), torch.distributed.group.WORLD
    loader = torch.utils.data.DataLoader(Rows(10 * rank), batch_size=1)
    pieces = UlyssesSPDataLoaderAdapter(loader, rank, group, 2, torch.device("cpu"))
    assert (len(pieces), pieces.dataset.first) == (4, 10 * rank)
    epochs = [[int(piece["input_ids"][0, 0]) for piece in pieces] for _ in range(2)]
    piece = next(pieces)
    with pytest.raises(ValueError, match=r"sp_rank=5, sp_world_size=2, but this is rank \d of 2"):
        UlyssesSPDataLoaderAdapter(loader, 5, group, 2, None)
    positions = torch.arange(2).unsqueeze(0) + 2 * rank
    q, k = torch.randn(1, 4, 2, 3), torch.randn(1, 2, 2, 3)
    attention = UlyssesSPAttentionHF(core, 1, 4, 3, 2, 1, group, seq_length_is_variable=True)
    out, _ = attention(nn.Module(), q, k, k, None, position_ids=positions)
    with pytest.raises(ValueError, match="1 query heads cannot be split over 2"):
        UlyssesSPAttentionHF(core, 1, 1, 3, 1, 1, group)
    return {"epochs": epochs, "keys": sorted(piece), "shape": list(out.shape)}


def test_every_rank_gets_a_piece_of_every_batch() -> None:
    for found in run_ranks(_adapted, 2):
        assert found["epochs"] == [[0, 10, 1, 11]] * 2
        assert found["keys"] == ["input_ids", "position_ids", "shift_labels"]
        assert found["shape"] == [1, 2, 12]


def _config(heads: int, keys: int) -> Any:
    made = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=keys, _attn_implementation="sdpa")
    made.get_text_config = lambda: made
    return SimpleNamespace(config=made)


def test_what_cannot_be_shared_out_is_refused_with_the_numbers() -> None:
    register = UlyssesSPAttentionHF.register_with_transformers
    assert register(_config(4, 2), "sdpa", 1, 1) is None
    for model, size, more, message in [
        (_config(4, 2), 8, {}, "4 query heads cannot be split over 8 sequence ranks"),
        (_config(4, 2), 2, {"seq_length": 7}, "seq_length: 7 tokens cannot be split over 2"),
        (_config(4, 2), 2, {"seq_length_is_variable": False}, "needs seq_length="),
    ]:
        with pytest.raises(ValueError, match=message):
            register(model, "sdpa", size, 1, **more)
    with pytest.raises(ValueError, match="loaded with attn_implementation='sdpa'"):
        register(_config(4, 2), "flex_attention", 2, 1)
    with pytest.raises(TypeError, match="a model with a config"):
        register(object(), "sdpa", 2, 1)
