"""Units of stage 3: which parameters are gathered together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zpartition import ZeroPolicy
from zpartition.layout.units import derive_unit_numel, plan_units


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Model(nn.Module):
    """Embedding, blocks in a ModuleList, a parameter of the root, tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(40))
        self.head = nn.Linear(16, 100, bias=False)


def policy(**fields: object) -> ZeroPolicy:
    return ZeroPolicy(stage=3, **{"persist_numel": 0, "unit_numel": 3000, **fields})


def test_small_modules_are_units_and_what_is_left_belongs_to_whoever_encloses_it() -> None:
    units = plan_units(Model(), policy())
    assert units["embed.weight"] == "embed"
    assert {units[name] for name in units if name.startswith("blocks.1.")} == {"blocks.1"}
    assert units["scale"] == ""
    assert units["head.weight"] == "head"


def test_a_module_that_is_too_large_is_cut_into_its_children() -> None:
    units = plan_units(Model(), policy(unit_numel=1500))
    assert units["blocks.0.up.weight"] == "blocks.0.up"
    assert units["blocks.0.norm.weight"] == "blocks.0.norm"
    assert units["embed.weight"] == "embed", "one parameter is never cut"


def test_a_parameter_of_several_units_belongs_to_the_module_that_encloses_them() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    assert plan_units(model, policy())["embed.weight"] == ""
    model.blocks[0].up.weight = model.blocks[0].down.weight
    assert plan_units(model, policy(unit_numel=100))["blocks.0.up.weight"] == "blocks.0"


def test_a_module_that_is_called_from_two_places_belongs_to_what_encloses_both() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    model[1].append(model[0][0])
    units = plan_units(model, policy(unit_numel=30))
    assert units == {
        "0.0.weight": "", "0.0.bias": "", "1.0.weight": "1.0", "1.0.bias": "1.0", "2.weight": "2", "2.bias": "2",
    }  # fmt: skip


def test_small_parameters_stay_whole_while_their_sum_is_allowed() -> None:
    units = plan_units(Model(), policy(persist_numel=41))
    assert {name for name, unit in units.items() if unit is None} == {
        "scale", *(f"blocks.{i}.{name}" for i in range(3) for name in ("norm.weight", "norm.bias", "down.bias")),
    }  # fmt: skip
    units = plan_units(Model(), policy(persist_numel=41, persist_total_numel=50))
    assert {name for name, unit in units.items() if unit is None} == {"scale"}


def test_a_module_with_experts_is_never_cut() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
            self.router = nn.Linear(64, 4)

    model = nn.Sequential(nn.Linear(64, 64), Mixture())
    units = plan_units(model, policy(unit_numel=100))
    assert {unit for name, unit in units.items() if name.startswith("1.")} == {"1"}


@pytest.mark.parametrize("leaf", ["blocks.1", "Block", f"{__name__}.Block", "*ks.1"])
def test_leaves_are_never_cut(leaf: str) -> None:
    units = plan_units(Model(), policy(unit_numel=100, leaves=(leaf,)))
    assert {unit for name, unit in units.items() if name.startswith("blocks.1.")} == {"blocks.1"}


@pytest.mark.parametrize("leaf", ["", "Model", f"{__name__}.Model", "*"])
def test_the_module_itself_as_a_leaf_is_one_unit(leaf: str) -> None:
    assert set(plan_units(Model(), policy(unit_numel=100, leaves=(leaf,))).values()) == {""}


def test_a_module_that_itself_holds_experts_is_one_unit() -> None:
    model = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(64, 64) for _ in range(4)), "out": nn.Linear(64, 4)})
    assert set(plan_units(model, policy(unit_numel=100)).values()) == {""}


def test_a_leaf_that_names_nothing_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"leaves contains 'Blok', but no module .* embed, blocks, head"):
        plan_units(Model(), policy(leaves=("Blok",)))


def test_the_derived_size_is_an_eighth_within_bounds() -> None:
    assert [derive_unit_numel(numel) for numel in (1000, 80_000_000, 10**12)] == [1 << 16, 10_000_000, 1 << 27]
