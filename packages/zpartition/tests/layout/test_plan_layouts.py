"""Layouts of a module under a policy: sharded, whole and frozen parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zpartition import ZeroPolicy
from zpartition.layout.plan_layouts import plan_added, plan_layouts


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.LayerNorm(40))
    made[1].requires_grad_(False)
    return made


def groups_of(module: nn.Module) -> dict[str, int]:
    return {name: 0 for name, param in module.named_parameters() if param.requires_grad}


def test_stage_3_has_a_bucket_for_each_unit_and_keeps_small_parameters_whole() -> None:
    module = model()
    policy = ZeroPolicy(stage=3, persist_numel=100, unit_numel=2000)
    trained, frozen = plan_layouts(module, groups_of(module), policy, world_size=2)
    assert {bucket.unit: bucket.num_shards for bucket in trained.buckets} == {"0": 2, None: 2}
    assert trained.names == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {bucket.unit for bucket in frozen.buckets} == {"1"}
    assert frozen.names == {"1.weight"}, "a small frozen parameter needs no bucket at all"


def test_alone_and_below_stage_3_nothing_is_gathered() -> None:
    module = model()
    for stage, world_size in ((3, 1), (2, 2)):
        trained, frozen = plan_layouts(module, groups_of(module), ZeroPolicy(stage=stage), world_size)
        assert {bucket.unit for bucket in trained.buckets} == {None}
        assert frozen.buckets == ()


def test_what_is_added_is_numbered_on_and_in_buckets_of_its_own() -> None:
    module = model()
    policy = ZeroPolicy(stage=3, persist_numel=100, unit_numel=2000)
    added = plan_added(module, {"1.weight": 1, "1.bias": 0}, policy, 2, first_index=5)
    found = [(b.index, b.unit, b.group, tuple(slot.name for slot in b.slots)) for b in added.buckets]
    assert found == [(5, None, 0, ("1.bias",)), (6, "1", 1, ("1.weight",))]


def test_trained_parameters_begin_at_multiples_that_the_optimizer_asks_for() -> None:
    module = model()
    policy = ZeroPolicy(stage=3, persist_numel=100, unit_numel=2000)
    trained, frozen = plan_layouts(module, groups_of(module), policy, 2, alignment=256)
    added = plan_added(module, {"1.weight": 0, "1.bias": 0}, policy, 2, first_index=5, alignment=256)
    slots = [slot for layout in (trained, added) for _, slot in layout.slots()]
    assert {slot.offset % 256 for slot in slots} == {0}
    assert len({slot.offset for slot in slots}) > 1
    usual, _ = plan_layouts(module, groups_of(module), policy, 2)
    assert {slot.offset % 256 for _, slot in usual.slots()} > {0}
    assert frozen.padded_numel == plan_layouts(module, groups_of(module), policy, 2)[1].padded_numel


class Mixed(nn.Module):
    """Linear layers, one of a class of its own, beside what is none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.last = Own(4, 4)


class Own(nn.Linear):
    """A subclass is another class."""


def wires(*classes: str, **policy: object) -> dict[str, torch.dtype | None]:
    chosen = ZeroPolicy(narrow_dtype=torch.bfloat16, narrow_classes=classes, **policy)
    model = Mixed()
    names = dict.fromkeys(dict(model.named_parameters()), 0)
    layout, _ = plan_layouts(model, names, chosen, 2)
    return {slot.name: chosen.wire_for(bucket) for bucket, slot in layout.slots()}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["Linear", "torch.nn.Linear", "torch.nn.modules.linear.Linear"])
def test_gradients_of_some_modules_travel_in_a_dtype_of_their_own(name: str, stage: int) -> None:
    found = wires(name, stage=stage)
    narrow = {key for key, wire in found.items() if wire == torch.bfloat16}
    assert narrow == {"first.weight", "first.bias"}
    assert {wire for key, wire in found.items() if key not in narrow} == {torch.float32}


def test_classes_are_told_apart_by_name_and_path() -> None:
    assert {key for key, wire in wires("Own", "LayerNorm").items() if wire == torch.bfloat16} == {
        *("last.weight", "last.bias", "norm.weight", "norm.bias")
    }
    assert set(wires("other.Linear", "torch.n.Linear", "inear").values()) == {torch.float32}
    assert wires("Own", reduce_dtype=torch.float16)["first.weight"] == torch.float16
