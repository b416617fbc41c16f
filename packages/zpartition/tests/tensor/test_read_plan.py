"""Plans of other libraries, read for one model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zpartition.tensor import (
    Column,
    NormShard,
    Replicated,
    Row,
    Rule,
    TensorPlan,
    Uncovered,
    Vocabulary,
    read_injection_policy,
    read_layer_specs,
    read_tp_plan,
    resolve,
)
from zpartition.testing.tensor_models import Block, Language


def test_a_tp_plan_is_read_by_style() -> None:
    plan = read_tp_plan(
        {
            "blocks.0.attention.q_proj": "colwise",
            "blocks.*.mlp.down": "rowwise",
            "blocks.*.mlp.up": "colwise_gather_output",
            "blocks.*.norm1": "replicated_with_grad_allreduce",
            "embed": "rowwise_rep",
            "head": "colwise_rep",
            "blocks.*.router": "colwise",  # of other models of the family
        },
        Language(),
    )
    assert plan.uncovered is Uncovered.KEEP
    assert [rule.style for rule in plan.rules] == [
        Column(), Row(), Column(gathers=True), NormShard(), Vocabulary(), Column(gathers=True),
    ]  # fmt: skip
    assert plan.style_of("blocks.2.mlp.down") == Row()


class Stack(nn.Module):
    """Experts as Transformers stacks them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.up = 2, nn.Parameter(torch.ones(2, 3, 3))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise AssertionError


def test_expert_stacks_stay_whole_under_a_tp_plan() -> None:
    model = nn.ModuleDict({"o": nn.Linear(4, 4), "experts": Stack()})
    given = {"experts.up": "packed_colwise", "experts": "moe_tp_experts", "o": "rowwise"}
    assert read_tp_plan(given, model).rules == (Rule("o", Row()),)


def test_an_injection_policy_names_the_rows_of_a_kind_of_block() -> None:
    model = Language()
    plan = read_injection_policy({Block: ("attention.o_proj", "proj", "dense", "down")}, model)
    assert plan.uncovered is Uncovered.KEEP
    rows = [rule.pattern for rule in plan.rules if rule.style == Row()]
    assert rows == [
        *("blocks.0.attention.o_proj", "blocks.0.mlp.down", "blocks.1.attention.proj", "blocks.1.mlp.down"),
        *("blocks.2.attention.dense", "blocks.2.mlp.down"),
    ]
    assert plan.style_of("blocks.1.attention.qkv") == plan.style_of("blocks.0.mlp.gate") == Column()
    assert plan.style_of("head") is None


def test_an_inferred_plan_completes_an_injection_policy() -> None:
    fused = Column(units=4, blocks=(24, 24, 24))
    seen = TensorPlan([Rule("blocks.1.attention.qkv", fused), Rule("blocks.1.mlp.down", Column())])
    plan = read_injection_policy({Block: ("down", "proj")}, Language(), seen)
    assert plan.style_of("blocks.1.attention.qkv") == fused
    assert plan.style_of("blocks.1.mlp.down") == Row(), "the policy names the row layers"


def test_an_injection_policy_that_matches_nothing_raises() -> None:
    with pytest.raises(
        ValueError, match=r"no linear layer in a Block is called 'wo'; there are q_proj, k_proj, .*down"
    ):
        read_injection_policy({Block: ("down", "wo")}, Language())
    with pytest.raises(ValueError, match="in a Conv2d is called 'down'; there are none"):
        read_injection_policy({nn.Conv2d: ("down",)}, Language())


def test_an_unreadable_tp_plan_raises() -> None:
    with pytest.raises(
        ValueError, match=r"style 'packed_colwise' of 'blocks.\*.mlp' is not known; allowed: colwise, "
    ):
        read_tp_plan({"blocks.*.mlp": "packed_colwise"}, Language())
    with pytest.raises(ValueError, match=r"none of its 1 patterns \(layers.\*.q\) fits a module .* called embed"):
        read_tp_plan({"layers.*.q": "colwise"}, Language())


def test_layer_specs_are_read_with_fused_shapes() -> None:
    model = Language()
    config = {
        "strict_mode": True,
        "layer_specs": [
            {"patterns": [r".*\.attention\.qkv\.weight$"], "partition_type": "column", "shape": [3, -1]},
            {"patterns": [r".*query_key_value\.weight$", r".*\.[qkv]_proj\.weight$"], "partition_type": "column"},
            {"patterns": [r".*(o_proj|attention.proj|dense|down)\.weight$"], "partition_type": "row"},
            {"patterns": [r".*\.(gate|up)\.weight$"], "shape": [[37], -1]},
            {"patterns": ["embed.weight"], "partition_type": "column"},
            {"patterns": ["head.weight"], "partition_type": "column", "gather_output": True},
            {"patterns": ["position"], "partition_type": "skip"},
            {"patterns": ["nothing"], "partition_type": "row", "model_types": ["bloom"]},
        ],
    }
    plan = read_layer_specs(config, model)
    assert plan.uncovered is Uncovered.REFUSE
    assert plan.style_of("blocks.1.attention.qkv") == Column(blocks=(24, 24, 24))
    assert plan.style_of("embed") == Vocabulary()
    assert plan.style_of("position") == Replicated()
    assert len(resolve(plan, model, 2, 0)) == 19


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"patterns": ["blocks"], "partition_typ": "row"}, "unknown partition_typ; allowed: .*partition_type"),
        ({"patterns": ["head"], "partition_type": "diagonal"}, r"\[0\]: partition_type 'diagonal'; allowed: row"),
        ({"patterns": ["head"], "shape": [2, 3, -1]}, r"shape \[2, 3, -1\] with partition_dim 0 is not known"),
        ({"patterns": ["head"], "shape": [3, -1]}, "the 29 rows of head cannot be split into 3 equal blocks"),
        ({"patterns": ["h.0"]}, "pattern 'h.0' fits no weight of the model, e.g. 'blocks.0.attention.q_proj.weight'"),
    ],
)
def test_wrong_layer_specs_raise_with_their_path(spec: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_layer_specs({"layer_specs": [spec]}, Language())


def test_without_strict_mode_other_layers_stay_whole() -> None:
    plan = read_layer_specs({"layer_specs": [{"patterns": ["0.weight"]}]}, nn.Sequential(nn.Linear(2, 2)))
    assert plan.uncovered is Uncovered.KEEP


def test_a_pipeline_stage_may_lack_the_layers_of_a_pattern() -> None:
    specs = {"layer_specs": [{"patterns": ["elsewhere", r"0\."]}]}
    stage = nn.Sequential(nn.Linear(4, 4))
    assert [rule.pattern for rule in read_layer_specs(specs, stage, is_part=True).rules] == ["0"]
    with pytest.raises(ValueError, match="pattern 'elsewhere' fits no weight of the model"):
        read_layer_specs(specs, stage)
