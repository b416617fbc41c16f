"""Every key of the reference does what its category says, and shows it.

honoured    another value than the default gives another plan
no effect   a notice names the key
limited     a value that is not available yet is an error that names the key and what to write
refused     the same for every value
renamed     the old name gives the plan of the new one, and a notice

Values are made from the kind of a key.  A key that needs more (a partner, a word of its own) has a line in `EVIDENCE`
or `CONTEXT`; one that is honoured from now on and shows nothing fails here until it has.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import attrs
import pytest

from zengine.config import ConfigError, Facts, Plan, load, resolve
from zengine.config.grammar.kinds import Mismatch
from zengine.config.grammar.table import Key, Section, Support, walk
from zengine.config.keys.root import ROOT

KNOWN = {".".join(path): entry for path, entry in walk(ROOT)}
REFERENCE = Path(__file__).with_name("reference_keys.txt")
BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "config_version": "zengine-0.2"}
FACTS = Facts(world_size=4, replicas=4, device_type="cuda", ranks_per_host=2)

_LAW = {
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_root",
    "schedule_config": {"total_curriculum_step": 10},
}
_DISCRETE = {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [8, 64], "max_step": [2]}}
_PATHS = {"index_to_sample_path": "s.npy", "index_to_metric_path": "m.npy"}
_LTD = {
    "total_layer_num": 4,
    "random_ltd_layer_id": [1, 2],
    "random_ltd_schedule": {"min_value": 8, "max_value": 64, "schedule_config": {"require_steps": 10}},
}
_COMPRESSION = "compression_training"
_GROUPS: dict[str, dict[str, Any]] = {  # a legal group of each technique
    "weight_quantization": {"params": {"start_bits": 8, "target_bits": 4}},
    "activation_quantization": {"params": {"bits": 8}},
    **{name: {"params": {"dense_ratio": 0.5}} for name in ("sparse_pruning", "row_pruning", "channel_pruning")},
    "head_pruning": {"params": {"dense_ratio": 0.5}},
}
_SAMPLING, _ROUTING = "data_efficiency.data_sampling", "data_efficiency.data_routing"
_METRICS = f"{_SAMPLING}.curriculum_learning.curriculum_metrics"


def at(path: str, value: Any) -> dict[str, Any]:
    nested = value
    for part in reversed(path.split(".")):
        nested = {"any_name" if part == "*" else part: nested}
    return dict(nested)


# What has to be there for the keys of a section to act; longer prefixes add to shorter ones.
CONTEXT: dict[str, dict[str, Any]] = {
    "optimizer.params": {"optimizer": {"type": "AdamW"}},
    "scheduler.params": {"scheduler": {"type": "WarmupLR"}},
    "data_types.": {"bf16": {"enabled": True}},
    "zero_optimization.": {"zero_optimization": {"stage": 3}},
    "zero_optimization.zeropp_loco_param.": {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
    "zero_optimization.zenflow.": {
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "zenflow": {"select_interval": 2}}
    },
    "zero_optimization.reduce_at": {"zero_optimization": {"stage": 1}},
    "zero_optimization.offload_optimizer.": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "zero_optimization.offload_param.": {"zero_optimization": {"offload_param": {"device": "cpu"}}},
    "zero_optimization.sub_group_size": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "aio.": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}},
    "diloco.": {"diloco": {"sync_every": 8}},
    "signals.": {"signals": {"save_dir": "/x"}},
    "checkpoint.keep.": {"checkpoint": {"keep": {"last": 2}}},
    "curriculum_learning.": {"curriculum_learning": _LAW},
    "elasticity.": {
        "train_micro_batch_size_per_gpu": "auto",
        "elasticity": {"max_train_batch_size": 64, "micro_batch_sizes": [2, 4], "num_gpus_per_node": 2},
    },
    **{
        f"{_COMPRESSION}.{name}.shared_parameters.": at(f"{_COMPRESSION}.{name}.different_groups.*", group)
        for name, group in _GROUPS.items()
    },
    f"{_COMPRESSION}.head_pruning.shared": at(f"{_COMPRESSION}.head_pruning.shared_parameters.num_heads", 4),
    f"{_COMPRESSION}.layer_reduction.": at(
        f"{_COMPRESSION}.layer_reduction", {"module_name_prefix": "h", "teacher_layer": [0, 2]}
    ),
    "data_efficiency.data_": {"data_efficiency": {"enabled": True}},
    f"{_SAMPLING}.curriculum_learning.": at(f"{_METRICS}.*", {**_LAW, **_PATHS}),
    f"{_SAMPLING}.dynamic_batching.": at(f"{_SAMPLING}.dynamic_batching.max_tokens", 64),
    f"{_ROUTING}.random_ltd.": at(f"{_ROUTING}.random_ltd", _LTD),
}
# What counts as another value, where the kind does not say it: value, and perhaps what has to be there.
EVIDENCE: dict[str, tuple[Any, dict[str, Any]]] = {
    "hybrid_engine.inference_tp_size": (2, {"hybrid_engine": {"enabled": True}}),
    "config_version": ("deepspeed-0.18", {}),
    "optimizer.type": ("AdamW", {}),
    "optimizer.params": ({"lr": 0.5}, {}),
    "scheduler.type": ("WarmupLR", {}),
    "scheduler.params": ({"warmup_num_steps": 7}, {}),
    "train_batch_size": (16, {}),
    "data_parallel_size": (4, {}),
    "sequence_parallel_size": (2, {}),
    "tensor_parallel.autotp_size": (2, {}),
    "tensor_parallel.tp.tp_size": (2, {}),
    "tensor_parallel.preset_model": ("llama", {}),
    "tensor_parallel.vocab_parallel_ce_backend": ("liger", {}),
    "bf16.check_overflow": (False, {}),
    "tensor_parallel.partition_config.layer_specs.*.partition_type": ("row", {}),
    "expert_parallel.enabled": (True, {"expert_parallel": {"autoep_size": 2}}),
    "expert_parallel.autoep_size": (2, {"expert_parallel": {"enabled": True}}),
    "expert_parallel.moe_layer_pattern": ("mlp", {"expert_parallel": {"enabled": True}}),
    "pipeline.stages": (2, {}),
    "pipeline.schedule": ("gpipe", {}),
    "gradient_allreduce_op": ("sum", {}),
    "log_level": ("debug", {}),
    "signals.sigterm": ("exit", {}),
    "signals.sigusr1": ("exit", {}),
    "zero_optimization.zenflow.select_strategy": ("step", {}),
    "diloco.groups": (2, {}),
    "diloco.fragments": (2, {}),
    "diloco.quantize_bits": (4, {}),
    "sparse_attention.mode": ("variable", {}),
    "sparse_attention.attention": ("unidirectional", {}),
    "sparse_attention.local_window_blocks": ([2, 4], {}),
    "sparse_attention.global_block_indices": ([1], {}),
    "sparse_attention.global_block_end_indices": ([2], {}),
    "quantize_training.quantize_bits.start_bits": (12, {}),
    "quantize_training.quantize_algo.q_type": ("asymmetric", {}),
    "quantize_training.quantize_algo.rounding": ("stochastic", {}),
    "autotuning.metric": ("latency", {}),
    "autotuning.tuner_type": ("random", {}),
    "elasticity.max_train_batch_size": (128, {}),
    "elasticity.micro_batch_sizes": ([2], {}),
    "elasticity.version": (0.1, {}),
    "elasticity.num_gpus_per_node": (4, {}),
    "elasticity.model_parallel_size": (1, {}),
    "elasticity.min_gpus": (2, {}),
    "elasticity.max_gpus": (8, {}),
    "elasticity.ignore_non_elastic_batch_info": (True, {}),
    **{f"{_COMPRESSION}.{name}.different_groups.*.related_modules": ([["a"]], {}) for name in _GROUPS},
    **{
        f"{_COMPRESSION}.{name}.shared_parameters.method": ("topk", {})
        for name in ("sparse_pruning", "row_pruning", "channel_pruning")
    },
    **{
        f"{_COMPRESSION}.{name}.shared_parameters.quantization_type": ("asymmetric", {})
        for name in ("weight_quantization", "activation_quantization")
    },
    f"{_COMPRESSION}.head_pruning.shared_parameters.method": ("topk", {}),
    f"{_COMPRESSION}.activation_quantization.shared_parameters.range_calibration": ("static", {}),
    f"{_COMPRESSION}.weight_quantization.shared_parameters.rounding": ("stochastic", {}),
    f"{_COMPRESSION}.sparse_pruning.shared_parameters.block_pattern": ("2:4", {}),
    f"{_COMPRESSION}.layer_reduction.teacher_layer": ([1, 2], {}),
    "comet.mode": ("create", {"comet": {"enabled": True}}),
    "profiler.ranks": ([1], {"profiler": {"enabled": True}}),
    "comms_logger.prof_ops": (["all_reduce"], {"comms_logger": {"enabled": True, "prof_all": False}}),
    "communication_data_type": ("bf16", {}),
    "data_types.grad_accum_dtype": ("bf16", {}),
    "zero_optimization.stage": (2, {}),
    "zero_optimization.reduce_at": ("boundary", {}),
    "zero_optimization.shard_group_size": (2, {}),
    "zero_optimization.zero_hpz_partition_size": (2, {}),
    "zero_optimization.mics_shard_size": (2, {}),
    "zero_optimization.offload_optimizer.device": (
        "nvme",
        {"zero_optimization": {"offload_optimizer": {"nvme_path": "/x"}}},
    ),
    "zero_optimization.offload_optimizer.nvme_path": (
        "/y",
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}},
    ),
    "zero_optimization.offload_param.device": (
        "nvme",
        {"zero_optimization": {"offload_param": {"nvme_path": "/x"}}},
    ),
    "zero_optimization.offload_param.nvme_path": (
        "/y",
        {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/x"}}},
    ),
    "checkpoint.tag_validation": ("FAIL", {}),
    "activation_checkpointing.contiguous_memory_optimization": (
        True,
        {"activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4}},
    ),
    "amp.opt_level": ("O0", {}),
    "bf16.bf16_optimizer_states": (True, {"bf16": {"bf16_master_weights_and_grads": True}}),
    "data_types.param_dtype": ("fp16", {"bf16": {"enabled": False}}),
    "torch_autocast.loss_scale": (8.0, {"torch_autocast": {"dtype": "fp16"}}),
    "checkpoint.keep.best": ("loss:min", {}),
    **{
        f"{section}.{key}": (value, at(section, needs))
        for section in ("curriculum_learning", f"{_METRICS}.*")
        for key, value, needs in (
            ("max_difficulty", 128, {}),
            ("schedule_type", "fixed_linear", {}),
            ("schedule_config.difficulty", [8, 32], _DISCRETE),
            ("schedule_config.max_step", [3], _DISCRETE),
        )
    },
    "curriculum_learning.curriculum_type": ("seqlen", {}),
    "data_efficiency.enabled": (True, at(_SAMPLING, {"enabled": True, "num_workers": 2})),
    f"{_SAMPLING}.enabled": (True, at(f"{_SAMPLING}.num_workers", 2)),
    f"{_METRICS}.*.difficulty_type": ("percentile", {}),
    f"{_METRICS}.*.clustering_type": ("single_cluster", {}),
    f"{_SAMPLING}.dynamic_batching.lr_scaling_method": ("sqrt", {}),
    f"{_SAMPLING}.dynamic_batching.sequence_picking_order": ("random", {}),
    f"{_ROUTING}.enabled": (True, at(f"{_ROUTING}.random_ltd", {"enabled": True, **_LTD})),
    f"{_ROUTING}.random_ltd.random_ltd_layer_num": (2, {}),
    f"{_ROUTING}.random_ltd.random_ltd_layer_id": ([0], {}),
    f"{_ROUTING}.random_ltd.model_type": ("encoder", {}),
    f"{_ROUTING}.random_ltd.hidden_state_order": ("seq_batch_dim", {}),
    f"{_ROUTING}.random_ltd.random_ltd_schedule.max_value": (128, {}),
    f"{_ROUTING}.random_ltd.random_ltd_schedule.schedule_type": ("fixed_linear", {}),
}
# Honoured keys that change no plan on purpose, and what shows them instead.
SHOWN_OTHERWISE = {
    "data_parallel_size": "an expectation: tests/config/plan/test_resolve.py has its refusal",
    "elasticity.model_parallel_size": "an expectation: tests/config/plan/test_elastic.py has its refusal",
    "curriculum_learning.curriculum_type": "one value; others are refused",
    "compression_training.head_pruning.shared_parameters.method": "one value; others are refused",
    f"{_ROUTING}.random_ltd.random_ltd_layer_num": "an expectation: see tests/config/plan/test_data_rules.py",
    f"{_ROUTING}.random_ltd.random_ltd_schedule.schedule_type": "one value; others are refused",
}
CANDIDATES: tuple[Any, ...] = (
    True, False, 3, 2, 1, 0.5, 7.0, "text", ["a", "b"], {"a": 1}, "fp16", "cpu", 0,
)  # fmt: skip


def reference() -> list[str]:
    """Paths of the reference and of ours, without sections."""
    lines = [line for line in REFERENCE.read_text().splitlines() if line and not line.startswith("#")]
    found = []
    for line in lines:
        section, category, names = line.split(": ")
        if category != "section":
            found += [name if section == "." else f"{section}.{name}" for name in names.split()]
    ours = [path for path, entry in KNOWN.items() if isinstance(entry, Key)]
    return sorted({*found, *ours})


def of_support(support: Support) -> list[str]:
    return [path for path in reference() if KNOWN[path].support is support]


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(base)
    for name, value in more.items():
        inner = found.get(name)
        found[name] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return found


def context(path: str) -> dict[str, Any]:
    """The smallest config in which the key at `path` acts, without the key."""
    found = BASE
    sections = [".".join(path.split(".")[:end]) for end in range(1, path.count(".") + 1)]
    for name in sections:
        section = KNOWN.get(name)
        if isinstance(section, Section) and section.switch == "enabled" and f"{name}.enabled" != path:
            switch = KNOWN[f"{name}.enabled"]
            found = merged(found, at(f"{name}.enabled", switch.support is Support.HONOURED))
    for prefix in sorted((prefix for prefix in CONTEXT if path.startswith(prefix)), key=len):
        found = merged(found, CONTEXT[prefix])
    return merged(found, EVIDENCE[path][1]) if path in EVIDENCE else found


def is_inside_what_is_off(path: str) -> bool:
    """Whether a section around that of the key cannot be switched on yet: then the key waits for it."""
    outer = [".".join(path.split(".")[:end]) for end in range(1, path.count("."))]
    switches = [KNOWN[f"{home}.enabled"] for home in outer if f"{home}.enabled" in KNOWN]
    return any(switch.support is Support.FIXED for switch in switches)


def value_of(path: str, key: Key) -> Any:
    """A value of the key's kind that is not what happens anyway."""
    if path in EVIDENCE:
        return EVIDENCE[path][0]
    usual = [*key.matching, key.default] if key.support is Support.HONOURED else [*key.matching]
    for candidate in CANDIDATES:
        try:
            read = key.kind.read(candidate)
        except Mismatch:
            continue
        if not any(type(read) is type(value) and read == value for value in usual):
            return candidate
    raise AssertionError(f"{path} takes none of {CANDIDATES}: give it a value of its own in EVIDENCE, in this file")


def plan_of(source: dict[str, Any]) -> Plan:
    return resolve(load(source), FACTS)


def acts(plan: Plan) -> Plan:
    """What a plan does, without what it says."""
    return attrs.evolve(plan, origins={}, notices=(), given={})


def errors(source: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan_of(source)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("path", of_support(Support.HONOURED))
def test_an_honoured_key_changes_the_plan(path: str) -> None:
    key = KNOWN[path]
    assert isinstance(key, Key)
    before, value = context(path), value_of(path, key)
    after = merged(before, at(path, value))
    if path in SHOWN_OTHERWISE:
        assert plan_of(after)
        return
    assert acts(plan_of(after)) != acts(plan_of(before)), (
        f"{path} is honoured, and {value!r} changes nothing of the plan of {before}. If the key needs something else "
        "to act, add that to CONTEXT in this file; if it needs a certain value, add it to EVIDENCE"
    )
    assert plan_of(after).origins.get(path, "dict") == "dict"


@pytest.mark.parametrize("path", of_support(Support.IGNORED))
def test_a_key_without_effect_is_said_to_have_none(path: str) -> None:
    key = KNOWN[path]
    assert isinstance(key, Key)
    source = merged(context(path), at(path, value_of(path, key)))
    written = path.replace("*", "any_name")
    homes = [".".join(path.split(".")[:end]) for end in range(1, path.count(".") + 1)]
    refused = [home for home in homes if home in KNOWN and KNOWN[home].support is Support.REJECTED]
    if refused:  # the section is, as a whole
        assert any(told.startswith(f"{refused[0]}") for told in errors(source))
        return
    assert_told(source, written)


def assert_told(source: dict[str, Any], written: str) -> None:
    """That a notice names a key which does nothing."""
    notices = load(source).notices
    assert any(written in notice and "no effect here: " in notice for notice in notices), notices


@pytest.mark.parametrize("path", [*of_support(Support.FIXED), *of_support(Support.REJECTED)])
def test_what_is_not_available_is_refused_with_the_reason_and_what_to_do(path: str) -> None:
    key = KNOWN[path]
    source = merged(context(path), at(path, {} if isinstance(key, Section) else value_of(path, key)))
    if is_inside_what_is_off(path):
        assert_told(source, path)
        return
    told = [each for each in errors(source) if each.startswith(path)]
    assert len(told) == 1, told
    reason = key.rejection if isinstance(key, Section) else key.why
    assert f": {reason}. " in told[0]
    assert (
        told[0].split(f": {reason}. ")[1].startswith(("Set it to", "Remove", "Use", "Write", "For training", "Leave"))
    )


@pytest.mark.parametrize("path", of_support(Support.RENAMED))
def test_an_old_name_means_the_new_one_and_says_so(path: str) -> None:
    key = KNOWN[path]
    assert isinstance(key, Key)
    home = path.rpartition(".")[0]
    new = ".".join(filter(None, (home, *key.target)))
    whole = {"bfloat16": {"enabled": True}, "tensor_parallel.tensor_parallel": {"tp_size": 2}}
    value = whole[path] if path in whole else value_of(path, key)
    around = context(path)
    old_plan = plan_of(merged(around, at(path, value)))
    new_plan = plan_of(merged(around, at(new, key.convert(key.kind.read(value)))))
    assert acts(old_plan) == acts(new_plan)
    assert any(f'"{path}" is {key.why}: read as "{new}"' in notice for notice in old_plan.notices)
