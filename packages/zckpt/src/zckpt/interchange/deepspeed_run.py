"""State of a DeepSpeed run (counters, optimizer, schedule, loss scale), encoded as in engine_state.py."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from zckpt.containers.unpickler import Record
from zckpt.format.canonical import JSON
from zckpt.interchange.deepspeed_files import DeepSpeedFiles
from zckpt.interchange.deepspeed_tensors import STEP, aliases
from zckpt.interchange.engine_state import TIED, engine_objects, to_json

OPTIONS = (
    *("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov"),
    *("bias_correction", "amsgrad", "maximize", "rho", "lr_decay"),
)
_KINDS = {  # DeepSpeed's optimizer type, in lower case -> class in zoptim
    "adamw": "AdamW",
    "fusedadam": "AdamW",
    "adam": "AdamW",  # adam_w_mode is its default
    "lamb": "LAMB",
    "lion": "Lion",
    "adagrad": "Adagrad",
    "sgd": "SGD",
    "muon": "Muon",
}
# Keys that DeepSpeed's engine writes into model states; all others are the client state.
ENGINE_KEYS = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes"),
        *("frozen_param_shapes", "frozen_param_fragments", "shared_params", "lr_scheduler"),
        *("data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"),
        *("global_steps", "global_samples", "dp_world_size", "mp_world_size"),
        *("checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info"),
        *("num_experts", "ds_autoep_layers", "autoep_layers"),
    }
)


@attrs.frozen
class ClassNames:
    """Class names that the files do not hold; "" to infer them."""

    optimizer: str = ""
    scheduler: str = ""


def run_objects(
    files: DeepSpeedFiles, class_names: ClassNames, engine_name: Callable[[str], str] = str
) -> dict[str, JSON]:
    """The JSON values of the checkpoint.  engine_name: our name of a parameter, for DeepSpeed's."""
    tp_rank = files.tp_ranks[0]
    config = tp_rank.model.get("ds_config")
    config = config if isinstance(config, dict) else {}
    client, left = _client_state(tp_rank.model)
    whole = [each for each in files.tp_ranks if each.model.get("module") is not None]
    saved = {
        "client_state": client,
        "clock": _clock(tp_rank.model, config),
        "optimizer": _optimizer(files, config, class_names.optimizer),
        "scheduler": _scheduler(tp_rank.model, config, class_names.scheduler),
        "scaler": _scaler(_optimizer_state(files)),
        TIED: {engine_name(a): engine_name(name) for tp_rank in whole for a, name in aliases(tp_rank).items()},
    }
    if files.universal is not None and files.is_pipeline:  # DeepSpeed's tool leaves the layers' buffers out
        buffers = [str(name) for each in files.tp_ranks for name in each.model.get("buffer_names") or ()]
        saved["left_out"] = sorted(
            {engine_name(name) for name in buffers} - set(_universal_names(files, engine_name))
        )
    stages, tensor = files.degrees
    source = {
        "from": "DeepSpeed",
        "version": reprlib.repr(tp_rank.model.get("ds_version")).strip("'"),
        "tag": files.tag,
        "stage": _stage(files),
        "world": [len(tp_rank.shards) or _count(tp_rank.model.get("dp_world_size")) or 1, tensor],
        "config": to_json(config, left, "ds_config"),
    }
    if files.is_pipeline:
        source["pipeline"] = stages
    return engine_objects(saved, {**source, "left_out": sorted(left)})


def _universal_names(files: DeepSpeedFiles, engine_name: Callable[[str], str]) -> list[str]:
    return [] if files.universal is None else [engine_name(name) for name in files.universal.params]


def _stage(files: DeepSpeedFiles) -> int:
    """ZeRO stage that saved the checkpoint."""
    if files.universal is None:
        return files.tp_ranks[0].stage
    saved = files.universal.optimizer.get("zero_stage", 1)
    value = saved.args[0] if isinstance(saved, Record) and saved.args else saved
    return value if value in (0, 1, 2, 3) else 1


def _optimizer_state(files: DeepSpeedFiles) -> Mapping[str, Any]:
    """The dict that holds the optimizer's groups and the loss scale."""
    if files.universal is not None:
        return files.universal.optimizer
    if files.tp_ranks[0].shards:
        return files.tp_ranks[0].shards[0]
    return files.expert_optimizers[0] if files.expert_optimizers else files.tp_ranks[0].model


def _client_state(model: Mapping[str, Any]) -> tuple[JSON, set[str]]:
    """The client state, and the locations of values that JSON cannot represent."""
    left: set[str] = set()
    mine = {key: value for key, value in model.items() if isinstance(key, str) and key not in ENGINE_KEYS}
    return to_json(mine, left, "client_state"), left


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _clock(model: Mapping[str, Any], config: Mapping[str, Any]) -> JSON:
    """Counters of the run; micro-steps, which DeepSpeed does not save, follow from the accumulation steps."""
    steps, skipped = _count(model.get("global_steps")), _count(model.get("skipped_steps"))
    accumulation = _count(config.get("gradient_accumulation_steps")) or 1
    return {
        "micro_steps": steps * accumulation,
        "steps": steps,
        "applied_steps": max(0, steps - skipped),
        "skipped_steps": skipped,
        "samples": _count(model.get("global_samples")),
    }


def _optimizer(files: DeepSpeedFiles, config: Mapping[str, Any], kind: str) -> JSON:
    source = _optimizer_state(files)
    saved = source.get("base_optimizer_state") or source.get("optimizer_state_dict") or source.get("optimizer")
    if files.universal is not None:
        states = next((keys for keys in files.universal.params.values() if len(keys) > 1), {})
        saved = {"param_groups": source.get("param_groups"), "state": {0: states}}
    if not isinstance(saved, dict) or not saved.get("param_groups"):
        return None
    groups = [{key: to_json(group[key]) for key in OPTIONS if key in group} for group in saved["param_groups"]]
    return {"kind": kind or _optimizer_kind(saved, config), "groups": groups}


def _optimizer_kind(saved: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    section = config.get("optimizer")
    section = section if isinstance(section, dict) else {}
    name, options = _text(section.get("type")), section.get("params") or {}
    coupled = name.lower() == "adam" and isinstance(options, dict) and options.get("adam_w_mode") is False
    if coupled:
        return "Adam"
    if name:
        return _KINDS.get(name.lower(), name)
    first = saved["param_groups"][0]
    states: dict[str, Any] = next(iter(saved["state"].values()), {}) if isinstance(saved.get("state"), dict) else {}
    if {"exp_avg", "exp_avg_sq"} <= set(states):
        return "AdamW" if first.get("decoupled_weight_decay", True) else "Adam"
    return {"exp_avg": "Lion", "momentum_buffer": "SGD", "sum": "Adagrad"}.get(
        next(iter(set(states) - {STEP, "fp32"}), ""), ""
    )


def _scheduler(model: Mapping[str, Any], config: Mapping[str, Any], kind: str) -> JSON:
    state, section = model.get("lr_scheduler"), config.get("scheduler")
    if state is None:
        return {"kind": kind or "ConstantRate", "state": {}}
    named = _text(section.get("type")) if isinstance(section, dict) else ""
    plain = state.state if isinstance(state, Record) else state
    return {"kind": kind or named or "an unnamed schedule of the caller", "state": to_json(plain)}


def _scaler(optimizer: Mapping[str, Any]) -> JSON:
    """The loss scale; converts DeepSpeed's iterations since the last overflow to clean steps of a window."""
    saved = optimizer.get("loss_scaler")
    scale = saved.get("cur_scale") if isinstance(saved, Record) else None
    if not isinstance(saved, Record) or not isinstance(scale, (int, float)):
        return {"kind": "NoScaling", "state": {}}
    if not saved.get("dynamic"):
        return {"kind": "StaticScaler", "state": {"static_factor": scale}} if scale != 1 else _NO_SCALING
    window = max(1, int(saved.get("scale_window", 1000)))
    stable = max(0, int(saved.get("cur_iter", 0)) - int(saved.get("last_overflow_iter", -1)) - 1)
    clean = stable if stable <= window else (stable - 1) % window + 1
    left = max(1, int(saved.get("cur_hysteresis", 1)))
    return {
        "kind": "DynamicScaler",
        "state": {"factor": float(scale), "clean_steps": clean, "hysteresis_left": left},
    }


_NO_SCALING = {"kind": "NoScaling", "state": {}}
