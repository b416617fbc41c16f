"""From the data sections to their plan, and what is said about them."""

from __future__ import annotations

from typing import Any

from zengine.config import Facts, Plan, load, resolve
from zengine.data import Custom, DifficultyType, FixedDiscrete, FixedRoot, Packing, PickingOrder

LAW = {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_root"}
STEPS = {"total_curriculum_step": 10, "difficulty_step": 8, "root_degree": 2}


def plan_of(**source: Any) -> Plan:
    return resolve(load({"train_batch_size": 1, "gradient_clipping": 1, **source}), Facts(world_size=1, replicas=1))


def test_nothing_given_is_a_plain_loader() -> None:
    data = plan_of().data
    assert (data.metrics, data.packing, data.seqlen, data.ltd, data.needs_data) == ((), (), (), (), "")
    assert (data.seed, data.num_workers, data.pin_memory, data.prefetch) == (1234, 0, False, 1)


def test_the_legacy_section_is_a_schedule_of_lengths() -> None:
    plan = plan_of(curriculum_learning={"enabled": True, **LAW, "schedule_config": STEPS})
    assert plan.data.seqlen == (FixedRoot(low=8, high=64, steps=10, multiple=8, degree=2.0),)
    linear = {**LAW, "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 10}}
    plan = plan_of(curriculum_learning={"enabled": True, **linear})
    assert plan.data.seqlen == (FixedRoot(low=8, high=64, steps=10),)


def test_metrics_become_limits() -> None:
    discrete = {"difficulty": [8, 64], "max_step": [4]}
    metrics = {
        "seqlen": {**LAW, "schedule_type": "fixed_discrete", "schedule_config": discrete},
        "rarity": {
            **LAW,
            "schedule_type": "custom",
            "difficulty_type": "percentile",
            "max_difficulty": 100,
            "index_to_sample_path": "s.npy",
            "index_to_metric_path": "m.npy",
        },
        "shown": {**LAW, "schedule_config": STEPS, "clustering_type": "single_cluster"},
    }
    section = {"enabled": True, "data_cluster_path": "x", "curriculum_metrics": metrics}
    sampling = {
        "enabled": True,
        "num_epochs": 3,
        "num_workers": 2,
        "pin_memory": True,
        "curriculum_learning": section,
    }
    data = plan_of(data_efficiency={"enabled": True, "seed": 5, "data_sampling": sampling}).data
    seqlen, rarity, shown = data.metrics
    assert (seqlen.schedule, seqlen.by) == (FixedDiscrete(difficulties=(8, 64), until=(4,)), DifficultyType.VALUE)
    assert (rarity.schedule, rarity.by, rarity.parts) == (Custom(low=8, high=100), DifficultyType.PERCENTILE, 100)
    assert (rarity.samples_path, rarity.metrics_path) == ("s.npy", "")
    assert shown.by is DifficultyType.SINGLE_CLUSTER
    assert (data.num_epochs, data.num_workers, data.pin_memory, data.seed) == (3, 2, True, 5)
    assert data.needs_data == "data_efficiency.data_sampling.curriculum_learning"


def test_dynamic_batching_and_random_ltd_become_values() -> None:
    batching = {
        "enabled": True,
        "max_tokens": 100,
        "max_batch_size": 9,
        "min_batch_size": 2,
        "lr_scaling_method": "SQRT",
        "sequence_picking_order": "seqlen",
        "metrics_path": "lengths.npy",
    }
    ltd = {
        "enabled": True,
        "total_layer_num": 4,
        "random_ltd_layer_id": [1, 2],
        "model_mask_name": "mask",
        "model_type": "encoder",
        "hidden_state_order": "seq_batch_dim",
        "random_ltd_schedule": {"min_value": 8, "max_value": 32, "schedule_config": {"require_steps": 5}},
    }
    section = {
        "enabled": True,
        "data_sampling": {"enabled": True, "dynamic_batching": batching},
        "data_routing": {"enabled": True, "random_ltd": ltd},
    }
    data = plan_of(data_efficiency=section).data
    (packing,) = data.packing
    assert packing.packing == Packing(max_tokens=100, min_batch_size=2, max_batch_size=9, picking=PickingOrder.SEQLEN)
    assert (packing.lengths_path, packing.lr_scaling) == ("lengths.npy", "sqrt")
    (layers,) = data.ltd
    assert layers.schedule == FixedRoot(low=8, high=32, steps=5)
    assert (layers.layer_ids, layers.mask_name, layers.is_causal, layers.sequence_axis) == ((1, 2), "mask", False, 0)
    assert data.needs_data == "data_efficiency.data_sampling.dynamic_batching"
    off = plan_of(data_efficiency={**section, "enabled": False})
    assert (off.data.packing, off.data.ltd) == ((), ())
    said = [notice for notice in off.notices if "data_efficiency.enabled is false" in notice]
    assert [notice.split()[1] for notice in said] == [
        "data_efficiency.data_sampling.enabled",
        "data_efficiency.data_routing.enabled",
    ]


def test_epochs_without_a_curriculum_are_told() -> None:
    batching = {"enabled": True, "max_tokens": 8}
    sampling = {"enabled": True, "num_epochs": 3, "dynamic_batching": batching}
    (said,) = [
        notice
        for notice in plan_of(data_efficiency={"enabled": True, "data_sampling": sampling}).notices
        if "num_epochs" in notice
    ]
    assert said.endswith("num_epochs has no effect here: no curriculum over samples is enabled")


def test_what_people_would_not_expect_is_said() -> None:
    metric = {"seqlen": {**LAW, "schedule_type": "fixed_linear", "schedule_config": STEPS}}
    sampling = {"enabled": True, "curriculum_learning": {"enabled": True, "curriculum_metrics": metric}}
    plan = plan_of(data_efficiency={"enabled": True, "data_sampling": sampling}, dataloader_drop_last=True)
    text = "\n".join(plan.notices)
    assert "one iteration over the loader of a curriculum takes 1000 epochs" in text
    assert "dataloader_drop_last has no effect here" in text
    assert 'seqlen.schedule_config.root_degree has no effect here: schedule_type is "fixed_linear"' in text
