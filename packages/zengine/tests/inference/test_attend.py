import pytest
import torch
from torch.nn import functional as F

from zengine.inference.attend import attend, causal_mask


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (7, 1)])
@pytest.mark.parametrize("window", [0, 3])
def test_it_is_torchs_attention(heads: int, groups: int, window: int) -> None:
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 5, heads, 8, generator=draw)
    key, value = (torch.randn(2, 9, groups, 8, generator=draw) for _ in "kv")
    mask = causal_mask(torch.arange(4, 9), torch.arange(9), window)[None]
    found = attend(query, key, value, mask, scale=0.3)
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    k, v = (each.repeat_interleave(heads // groups, dim=1) for each in (k, v))
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=0.3)
    assert torch.allclose(found, wanted.transpose(1, 2).flatten(2), atol=1e-6)


def test_the_soft_cap_bounds_scores() -> None:
    query, key = torch.full((1, 1, 1, 4), 100.0), torch.eye(4)[None, :, None] * 100
    value = torch.arange(4.0)[None, :, None, None].expand(1, 4, 1, 4)
    mask = torch.ones(1, 1, 4, dtype=torch.bool)
    found = attend(query, key, value, mask, scale=1.0, softcap=5.0)
    assert found.flatten().tolist() == pytest.approx([1.5] * 4), "all scores are at the cap"


def test_a_window_and_missing_keys_are_hidden() -> None:
    mask = causal_mask(torch.tensor([2, 5]), torch.tensor([-1, 0, 1, 2, 3, 4, 5]), 2)
    assert mask.tolist() == [
        [False, False, True, True, False, False, False],
        [False, False, False, False, False, True, True],
    ]
