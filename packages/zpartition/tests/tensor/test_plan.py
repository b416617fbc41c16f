"""Plans: the rule that applies, and errors before any message."""

from __future__ import annotations

import pytest
from torch import nn

from zpartition.tensor import Column, Replicated, Row, Rule, Scatter, TensorPlan, Uncovered, Vocabulary, resolve
from zpartition.testing.tensor_models import PLAN, WIDTH, Blocked, Grouped, Language


def test_the_first_matching_rule_applies() -> None:
    splits = {split.module: split for split in resolve(PLAN, Language(), 2, 0)}
    assert isinstance(splits["blocks.1.mlp.down"].style, Row)
    assert isinstance(splits["blocks.1.mlp.up"].style, Column)
    assert "position" not in splits


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("layers.*.q_proj", "layers.11.q_proj", True),
        ("layers.*.q_proj", "layers.1.attn.q_proj", False),
        ("layers.**.q_proj", "layers.1.attn.q_proj", True),
        ("**q_proj", "layers.1.attn.q_proj", True),
        ("layers.*", "layers", False),
        ("*_proj", "q_proj", True),
        (r"re:.*\.[qkv]_proj\.weight$", "layers.1.q_proj", True),
        (r"re:.*\.[qkv]_proj\.weight$", "layers.1.o_proj", False),
    ],
)
def test_patterns(pattern: str, name: str, matches: bool) -> None:
    assert Rule(pattern, Replicated()).matches(name) == matches


def test_heads_stay_whole_and_uneven_ones_give_the_first_rank_one_more() -> None:
    splits = {split.module: split for split in resolve(PLAN, Language(), 2, 1)}
    query, key = splits["blocks.0.attention.q_proj"], splits["blocks.0.attention.k_proj"]
    assert (query.sizes, query.num_units, query.own_units) == ((16, 8), 3, 1)  # groups of two heads of four
    assert key.sizes == (8, 4)
    assert splits["blocks.0.attention.o_proj"].addresses["weight"].boxes == (((0, WIDTH), (16, 24)),)
    assert splits["blocks.1.attention.qkv"].addresses["weight"].boxes == tuple(
        ((start + 12, start + 24), (0, WIDTH)) for start in (0, 24, 48)
    )
    assert splits["blocks.0.mlp.up"].sizes == (19, 18)


def with_rules(*rules: Rule) -> TensorPlan:
    return TensorPlan([*rules, *PLAN.rules])


def test_wrong_plans_raise_with_a_remedy() -> None:
    model = Language()
    for plan, num_ranks, message in [
        (with_rules(Rule("blocks.*.ffn", Row())), 2, r"'blocks.\*.ffn' .* matches none of the model's \d+ modules"),
        (TensorPlan(PLAN.rules[1:]), 2, r"leaves out 1 linear ones: blocks.0.attention.q_proj. Add rules"),
        (PLAN, 4, "blocks.0.attention has 3 key-value heads, .* over 4 tensor ranks.*Use at most 3 tensor ranks"),
        (with_rules(Rule("blocks.0.attention.q_proj", Column(units=5))), 2, "24 cannot be split into 5 equal units"),
        (
            with_rules(Rule("blocks.0.attention.q_proj", Column(units=1))),
            2,
            "1 units of 24 cannot be split over 2",
        ),
        (with_rules(Rule("blocks.1.attention.qkv", Column(blocks=(24, 24)))), 2, "72 outputs.*add up to 48"),
        (with_rules(Rule("norm", Column())), 2, "norm is a LayerNorm, but Column.. splits only torch's Linear"),
        (with_rules(Rule("blocks.0.norm1", Vocabulary())), 2, "splits only torch's Embedding"),
        (
            with_rules(Rule("head", Replicated())),
            2,
            "embed.weight and head.weight are one parameter.*Column.gathers=True",
        ),
        (with_rules(Rule("start", Scatter())), 2, "sequence_dim=-1"),
        (TensorPlan(PLAN.rules, sequence_dim=1), 2, r"none of its \d+ layers gathers them, .*NormShard.gathers=True"),
    ]:
        with pytest.raises(ValueError, match=message):
            resolve(plan, model, num_ranks, 0)
    wide = nn.Sequential(Grouped(heads=6, kv_heads=4))
    with pytest.raises(ValueError, match="6 query heads and 4 key-value heads"):
        resolve(TensorPlan([Rule("0.*_proj", Column())]), wide, 2, 0)


def test_torch_multihead_attention_raises() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    with pytest.raises(ValueError, match=r"self_attn is torch's MultiheadAttention"):
        resolve(TensorPlan([Rule("self_attn.out_proj", Row())], Uncovered.KEEP), model, 2, 0)


def test_layers_may_stay_whole() -> None:
    model = nn.Sequential(Blocked(), nn.Linear(WIDTH, 2))
    plan = TensorPlan([Rule("0.qkv", Column(blocks=(WIDTH,) * 3)), Rule("0.proj", Row())], Uncovered.KEEP)
    assert [split.module for split in resolve(plan, model, 2, 0)] == ["0.qkv", "0.proj"]
