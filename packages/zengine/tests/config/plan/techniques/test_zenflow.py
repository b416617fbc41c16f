"""zero_optimization.zenflow: the policy it gives, and what it is not combined with."""

from __future__ import annotations

from typing import Any

import pytest

from zengine.config import ConfigError, Facts, Plan, load, resolve
from zpartition import ColumnMoments, SelectivePolicy, Tier


def plan_of(zenflow: dict[str, Any] | None, zero: dict[str, Any] | None = None, **source: Any) -> Plan:
    section = {"stage": 2, "offload_optimizer": {"device": "cpu"}, **(zero or {})}
    if zenflow is not None:
        section["zenflow"] = zenflow
    config = load({"train_batch_size": 8, "zero_optimization": section, **source})
    return resolve(config, Facts(world_size=2, replicas=2, device_type="cpu"))


def test_keys_become_a_policy() -> None:
    keys = {
        "topk_ratio": 0.2,
        "select_strategy": "step",
        "select_interval": 8,
        "update_interval": 4,
        "overlap_step": True,
        "offload": True,
        "auto_ratio": 0.9,
        "full_warm_up_rounds": 3,
        "pt_reserved_cores_perc": 0.25,
    }
    assert plan_of(keys).zero.offload.selective == SelectivePolicy(
        topk_ratio=0.2,
        select_every=8,
        update_every=4,
        overlap=True,
        moments=ColumnMoments.HOST,
        ripe_share=0.9,
        warm_up=3,
        reserved_share=0.25,
    )


def test_an_empty_section_is_on_and_an_absent_one_is_off() -> None:
    on, off, zero = plan_of({}), plan_of(None), plan_of({"topk_ratio": 0})
    assert on.zero.offload.selective == SelectivePolicy(topk_ratio=0.1)
    assert on["zero_optimization.zenflow.topk_ratio"] == 0.1
    assert on.zero.offload.states is Tier.HOST  # masters apart from the weights, without a GPU, too
    assert not any("offload_optimizer.device has no effect" in notice for notice in on.notices)
    for plan in (off, zero):
        assert not plan.zero.offload.selective.is_on
        assert plan.zero.offload.states is Tier.DEVICE


def test_epochs_count_the_given_steps() -> None:
    assert plan_of({"steps_per_epoch": 50}).zero.offload.selective.select_every == 50
    keys = {"select_strategy": "epoch", "select_interval": 3, "steps_per_epoch": 50}
    assert plan_of(keys).zero.offload.selective.select_every == 150


@pytest.mark.parametrize(
    ("zenflow", "zero", "source", "message"),
    [
        ({}, {"stage": 0}, {}, r"stage = 0 offloads nothing that zenflow could update. Use stage 1, 2 or 3"),
        ({}, {"offload_optimizer": {"device": "none"}}, {}, r'offload_optimizer.device is "none". Add'),
        ({}, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, {}, "ratio keeps some states on the device"),
        (
            {},
            {"offload_optimizer": {"device": "cpu", "super_offload": True}},
            {},
            "super_offload updates everything during backward, and zenflow is on. Leave one of the two out",
        ),
        ({}, {"stage": 3, "offload_param": {"device": "cpu"}}, {}, "offload_param.device takes the columns off"),
        ({}, {}, {"optimizer": {"type": "Lion"}}, r'optimizer.type is "Lion". Use "Adam" or "AdamW"'),
        ({}, {}, {"diloco": {"sync_every": 5}}, "diloco.sync_every replaces masters"),
        ({}, {}, {"quantize_training": {"enabled": True}}, "quantize_training.enabled rounds weights"),
        (
            {},
            {},
            {
                "compression_training": {
                    "weight_quantization": {
                        "shared_parameters": {"enabled": True, "quantize_weight_in_forward": False},
                        "different_groups": {
                            "all": {"params": {"start_bits": 8, "target_bits": 4}, "modules": ["*"]}
                        },
                    }
                }
            },
            r"quantize_weight_in_forward false\) rounds weights",
        ),
        ({"select_strategy": "step"}, {}, {}, r'"step" needs zero_optimization.zenflow.select_interval'),
        (
            {"select_strategy": "step", "select_interval": 2, "update_interval": 4},
            {},
            {},
            "update_interval = 4 steps are more than the 2 .* Set update_interval to at most 2, or raise",
        ),
        ({"steps_per_epoch": 3, "update_interval": 4}, {}, {}, "more than the 3 from one selection"),
        ({"topk_ratio": 1.5}, {}, {}, "topk_ratio = 1.5"),
        ({"select_strategy": "batch"}, {}, {}, 'select_strategy = "batch"'),
    ],
)
def test_what_zenflow_is_not_combined_with_is_said(
    zenflow: dict[str, Any], zero: dict[str, Any], source: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(zenflow, zero, **source)
