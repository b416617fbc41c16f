import pytest
import torch

from zengine.inference.attend import attend, causal_mask


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (7, 1)])
@pytest.mark.parametrize("window", [0, 3])
def test_it_is_the_softmax_of_the_seen_scores_times_the_values(heads: int, groups: int, window: int) -> None:
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 5, heads, 8, generator=draw, dtype=torch.float64)
    key, value = (torch.randn(2, 9, groups, 8, generator=draw, dtype=torch.float64) for _ in "kv")
    mask = causal_mask(torch.arange(4, 9), torch.arange(9), window)[None]
    k, v = (each.repeat_interleave(heads // groups, dim=2) for each in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, k) * 0.3
    wanted = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1), v).flatten(2)
    assert torch.allclose(attend(query, key, value, mask, scale=0.3), wanted, atol=1e-12)
    narrow = attend(query.float(), key.bfloat16(), value.bfloat16(), mask, scale=0.3)
    exact = attend(query.float(), key.bfloat16().float(), value.bfloat16().float(), mask, scale=0.3)
    assert torch.equal(narrow, exact)
    assert narrow.dtype == torch.float32


def test_a_soft_cap_that_nothing_reaches_changes_nothing() -> None:
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 3, 4, 8, generator=draw, dtype=torch.float64) for _ in "qkv")
    mask = causal_mask(torch.arange(3), torch.arange(3))[None]
    capped = attend(query, key, value, mask, scale=0.3, softcap=1e8)
    assert torch.allclose(capped, attend(query, key, value, mask, scale=0.3), atol=1e-12)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_a_query_that_sees_no_key_gives_zeros(softcap: float) -> None:
    query, key, value = (torch.ones(1, 2, 2, 8) for _ in "qkv")
    mask = torch.tensor([[[False, False], [True, True]]])
    found = attend(query, key, value, mask, scale=1.0, softcap=softcap)
    assert not found[0, 0].any()
    assert torch.equal(found[0, 1], torch.ones(16))


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
