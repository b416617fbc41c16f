"""Plans inferred from a run, and verified."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zcomm
from zcomm.testing import run_ranks
from zpartition.tensor import Column, NormShard, Row, TensorPlan, Vocabulary, infer_plan, infer_verified_plan
from zpartition.testing.tensor_models import WIDTH, Grouped, Language

TOKENS = torch.arange(8).view(2, 4)


def styles(plan: TensorPlan) -> dict[str, object]:
    return {rule.pattern: rule.style for rule in plan.rules}


def test_pairs_of_many_models_are_found_without_names() -> None:
    assert styles(infer_plan(Language(), TOKENS)) == {
        **{f"blocks.*.attention.{name}_proj": Column(units=3) for name in "qkv"},
        "blocks.*.attention.o_proj": Row(units=3),
        "blocks.*.attention.qkv": Column(units=4, blocks=(24, 24, 24)),
        "blocks.*.attention.proj": Row(units=4),
        "blocks.*.attention.query_key_value": Column(units=4),
        "blocks.*.attention.dense": Row(units=4),
        **{f"blocks.*.mlp.{name}": Column(units=37) for name in ("gate", "up")},
        "blocks.*.mlp.down": Row(units=37),
    }


def test_chains_are_paired_once_and_norms_over_all_columns_keep_layers_whole() -> None:
    chain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    assert styles(infer_plan(chain, torch.zeros(1, 4))) == {
        "0": Column(units=4), "1": Row(units=4), "2": Column(units=4), "3": Row(units=4),
    }  # fmt: skip
    with pytest.raises(ValueError, match="none of the 2 linear layers of Sequential that ran could be paired"):
        infer_plan(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4)), torch.zeros(1, 4))
    with pytest.raises(
        ValueError, match=r"a plan for Sequential is inferred from a run on a small input.*pass the argu"
    ):
        infer_plan(chain)


class Normed(Grouped):
    """A norm over each head, whose weights all ranks need."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_norm(self.q_proj(x).view(*x.shape[:2], self.num_heads, -1)).transpose(1, 2)
        k, v = (
            p(x).view(*x.shape[:2], self.num_key_value_heads, -1).transpose(1, 2) for p in (self.k_proj, self.v_proj)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Slopes(nn.Module):
    """A buffer with one number per head, which is not split: the heads cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.register_buffer("slopes", torch.tensor([1.0, 0.5, 0.25]))

    def forward(self, x: Tensor) -> Tensor:
        return self.down((self.up(x).unflatten(-1, (3, 4)) * self.slopes[:, None]).flatten(-2))


class Mixed(nn.Module):
    """A softmax over split features: it runs, and is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.softmax(self.up(x), -1))


def _fitted() -> dict[str, object]:
    torch.manual_seed(0)
    model = nn.Sequential(Normed(), Slopes(), Mixed()).double()
    return styles(infer_verified_plan(model, None, torch.randn(1, 3, WIDTH, dtype=torch.float64)))


def _all_fitted() -> tuple[dict[str, object], dict[str, object]]:
    assert zcomm.group_size() == 2
    return _fitted(), styles(infer_verified_plan(Language(), None, TOKENS, vocabulary=True))


def test_unsplittable_activations_are_whole_between_split_layers() -> None:
    for found, language in run_ranks(_all_fitted, 2):
        assert found == {
            **{f"*.{name}_proj": Column(units=3) for name in "qkv"},
            "*.q_norm": NormShard(),
            "*.o_proj": Row(units=3),
            "*.up": Column(gathers=True),
            "*.down": Row(takes_part=True),
        }
        assert (language["embed"], language["head"]) == (Vocabulary(), Column(gathers=True))
        assert language["blocks.*.attention.k_proj"] == Column(units=3)  # as many outputs as there are positions
