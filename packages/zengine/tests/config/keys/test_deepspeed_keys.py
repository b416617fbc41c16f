"""Every key that DeepSpeed reads is honoured, has no effect and says so, or is rejected with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zengine.config import ConfigError, Facts, load, resolve
from zengine.config.grammar.table import walk
from zengine.config.keys.root import ROOT

TABLE = Path(__file__).with_name("deepspeed_keys.txt")
FACTS = Facts(world_size=4, replicas=4, device_type="cuda", ranks_per_host=2)
KNOWN = {".".join(path): row for path, row in walk(ROOT)}

# Keys whose legal values are rejected: the feature is not there (yet), and without it the training is another one.
REJECTED = {
    "weight_quantization",
    "data_efficiency.data_routing.random_ltd.layer_token_lr_schedule.enabled",
    "compression_training.sparse_pruning.shared_parameters",  # method snip_momentum
}


def _one_group(**params: Any) -> dict[str, Any]:
    return {"different_groups": {"g": {"params": params}}}


# What else a key needs, by the start of its path.
AROUND: dict[str, Any] = {
    "zero_optimization.": {"zero_optimization": {"stage": 3}},
    "zero_optimization.zeropp_loco_param": {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
    "zero_optimization.zenflow": {
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "zenflow": {"select_interval": 4}}
    },
    "zero_optimization.mics": {"zero_optimization": {"stage": 1}},
    "zero_optimization.offload_optimizer.": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
    "zero_optimization.offload_param.": {"zero_optimization": {"offload_param": {"device": "nvme"}}},
    "bf16.bf16_optimizer_states": {"bf16": {"bf16_master_weights_and_grads": True}},
    "optimizer.params": {"optimizer": {"type": "Adam"}},
    "scheduler.": {"scheduler": {"type": "WarmupLR"}},
    "data_types.": {"bf16": {"enabled": True}},
    "activation_checkpointing.contiguous": {
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4}
    },
    "curriculum_learning.": {
        "curriculum_learning": {
            "min_difficulty": 8,
            "max_difficulty": 1024,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 10},
        }
    },
    "compression_training.": {
        "compression_training": {
            "weight_quantization": _one_group(start_bits=8, target_bits=4),
            "activation_quantization": _one_group(bits=8),
            **{f"{name}_pruning": _one_group(dense_ratio=0.5) for name in ("sparse", "row", "head", "channel")},
        }
    },
    "elasticity.": {
        "elasticity": {
            "max_train_batch_size": 64,
            "micro_batch_sizes": [2, 4],
            "ignore_non_elastic_batch_info": True,
            "num_gpus_per_node": 2,
        }
    },
    "data_efficiency.data_": {"data_efficiency": {"enabled": True}},
    "data_efficiency.data_sampling.": {"data_efficiency": {"data_sampling": {"enabled": True}}},
    "data_efficiency.data_sampling.dynamic_batching.": {
        "data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True, "max_tokens": 64}}}
    },
    "data_efficiency.data_routing.random_ltd.layer_token_lr_schedule.": {
        "data_efficiency": {
            "data_routing": {
                "enabled": True,
                "random_ltd": {
                    "enabled": True,
                    "total_layer_num": 4,
                    "random_ltd_layer_id": [1],
                    "random_ltd_schedule": {
                        "min_value": 8,
                        "max_value": 64,
                        "schedule_config": {"require_steps": 10},
                    },
                },
            }
        }
    },
}
ENABLED = (
    *("fp16.", "bf16.", "amp.", "torch_autocast.", "expert_parallel.", "tensorboard.", "wandb.", "csv_monitor."),
    *("comet.", "comms_logger.", "flops_profiler.", "curriculum_learning.", "elasticity.", "autotuning."),
)


def table() -> list[tuple[str, Any]]:
    """(path, legal value) of every line."""
    lines = [line for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    return [(path, json.loads(value)) for path, _, value in (line.partition(" = ") for line in lines)]


def at(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.replace("*", "any_name").split(".")):
        value = {part: value}
    return dict(value)


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for name, value in more.items():
        inner = found.get(name)
        found[name] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return found


def source_of(path: str, value: Any) -> dict[str, Any]:
    source: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "config_version": "zengine-0.2"}
    for home in (home for home in ENABLED if path.startswith(home)):
        source = merged(source, at(f"{home}enabled", True))
    for start, more in AROUND.items():
        source = merged(source, more) if path.startswith(start) else source
    source = merged(source, at(path, value))
    offloads = source.get("zero_optimization")
    for section in offloads.values() if isinstance(offloads, dict) else ():
        if isinstance(section, dict) and section.get("device") == "nvme":
            section.setdefault("nvme_path", "/local_nvme")
    return source


@pytest.mark.parametrize(("path", "value"), table(), ids=[path for path, _ in table()])
def test_a_legal_value_is_accepted_or_rejected_with_the_reason(path: str, value: Any) -> None:
    source, written = source_of(path, value), path.replace("*", "any_name")
    if path in REJECTED:
        with pytest.raises(ConfigError) as caught:
            load(source)
        (problem,) = caught.value.problems
        assert problem.key.startswith(written)
        assert any(reason in problem.reason for reason in ("not available yet", "not supported"))
        assert problem.suggestion
        return
    plan = resolve(load(source), FACTS)
    given = load(source).given
    is_honoured = any(f"{key}.".startswith(f"{written}.") for key in given)
    is_told = any(written in notice for notice in plan.notices)
    matching = getattr(KNOWN[path], "matching", ()) if path in KNOWN else ()
    if value == "auto" and getattr(KNOWN.get(path), "empty", None) == "auto":  # the default means it
        return
    assert is_honoured or is_told or value in matching or value is None, plan.notices


def test_the_rest_of_a_config_with_a_rejected_section_is_checked() -> None:
    for path, value in table():
        if path in REJECTED:
            with pytest.raises(ConfigError) as caught:
                load(merged(source_of(path, value), {"gradient_cliping": 1, "steps_per_print": "often"}))
            assert {problem.key for problem in caught.value.problems} >= {"gradient_cliping", "steps_per_print"}


@pytest.mark.parametrize("huge", [1e308, -1e308, 10**400, float("-inf")])
def test_a_number_that_overflows_is_an_error_that_names_the_key(huge: float) -> None:
    numbers = [path for path, value in table() if type(value) in (int, float) and path not in REJECTED]
    for path in numbers:
        source, written = source_of(path, huge), path.replace("*", "any_name")
        try:
            plan = resolve(load(source), FACTS)
        except ConfigError as error:
            told = [str(problem) for problem in error.problems]
            assert any(written.rpartition(".")[2] in each for each in told), (path, told)
        else:  # a number without an upper bound, or a key whose value is not read
            assert KNOWN.get(path) is None or plan.describe(), path
    assert len(numbers) > 100


def test_no_key_is_listed_twice() -> None:
    paths = [path for path, _ in table()]
    assert len(paths) == len(set(paths)) > 400
