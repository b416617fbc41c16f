"""tp_model_init with a plan, the model's tp_plan, DeepSpeed's config, or an inferred plan."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from zcomm.testing import run_ranks
from zpartition.layout.model_parallel import model_parallel_group_of
from zpartition.tensor import ColumnLinear, load_whole_state_dict, tp_model_init, whole_state_dict
from zpartition.testing.tensor_models import PLAN, Language

TOKENS = torch.arange(8).view(2, 4)
SPECS = {
    "layer_specs": [
        {"patterns": [r".*\.down\.weight"], "partition_type": "row"},
        {"patterns": [r".*\.(gate|up)\.weight"]},
    ]
}


class Planned(Language):
    """A model like those of Hugging Face."""

    tp_plan: ClassVar = {"blocks.*.mlp.down": "rowwise", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.gate": "colwise"}


def _ways() -> list[float]:
    whole = Language()
    expected = float(whole(TOKENS).detach())
    made = [
        tp_model_init(Language(), 2, config=PLAN),
        tp_model_init(Language(), 2, config=SPECS),
        tp_model_init(Planned(), 2),
        tp_model_init(Language(), 2, inputs=(TOKENS,)),
    ]
    assert [model_parallel_group_of(model).size for model in made] == [2] * 4
    assert [isinstance(model.blocks[0].mlp.up, ColumnLinear) for model in made] == [True] * 4
    assert [isinstance(model.blocks[0].attention.q_proj, ColumnLinear) for model in made] == [
        True,
        False,
        False,
        True,
    ]
    for model in made:
        state = whole_state_dict(model)
        assert all(torch.equal(state[name], value) for name, value in whole.state_dict().items())
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        load_whole_state_dict(model, state)
    wrong = {**state, "extra": state["norm.bias"], "norm.weight": torch.zeros(2)}
    del wrong["norm.bias"]
    with pytest.raises(
        ValueError, match=r"nothing was loaded: norm.bias is missing; extra is unexpected; .*\[2\], the"
    ):
        load_whole_state_dict(made[0], wrong)
    assert tp_model_init(Language(), 2, torch.bfloat16, PLAN).norm.weight.dtype == torch.bfloat16
    with torch.no_grad():
        return [abs(float(model(TOKENS)) - expected) for model in made]


def test_every_kind_of_config_equals_the_whole_model_and_returns_its_state() -> None:
    for differences in run_ranks(_ways, 2):
        assert max(differences) < 1e-12


def test_a_size_that_does_not_divide_the_ranks_raises() -> None:
    with pytest.raises(ValueError, match="parts of 2 ranks do not fill a group of 1"):
        tp_model_init(Language(), 2, config=PLAN)
