"""`deepspeed.runtime.data_pipeline.config`: the section `data_efficiency` of a config, with DeepSpeed's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zengine.deepspeed.runtime.data_pipeline import constants as keys

__all__ = ["get_data_efficiency_config", "get_data_efficiency_enabled"]

_SAMPLING = {
    keys.DATA_SAMPLING_ENABLED: keys.DATA_SAMPLING_ENABLED_DEFAULT,
    keys.DATA_SAMPLING_NUM_EPOCHS: keys.DATA_SAMPLING_NUM_EPOCHS_DEFAULT,
    keys.DATA_SAMPLING_NUM_WORKERS: keys.DATA_SAMPLING_NUM_WORKERS_DEFAULT,
    keys.DATA_SAMPLING_PIN_MEMORY: keys.DATA_SAMPLING_PIN_MEMORY_DEFAULT,
}
_BATCHING = {
    keys.DYNAMIC_BATCHING_ENABLED: keys.DYNAMIC_BATCHING_ENABLED_DEFAULT,
    keys.DYNAMIC_BATCHING_LR_SCALING_METHOD: keys.DYNAMIC_BATCHING_LR_SCALING_METHOD_DEFAULT,
    keys.DYNAMIC_BATCHING_MIN_BATCH_SIZE: keys.DYNAMIC_BATCHING_MIN_BATCH_SIZE_DEFAULT,
    keys.DYNAMIC_BATCHING_MAX_BATCH_SIZE: keys.DYNAMIC_BATCHING_MAX_BATCH_SIZE_DEFAULT,
    keys.DYNAMIC_BATCHING_SEQUENCE_PICKING_ORDER: keys.DYNAMIC_BATCHING_SEQUENCE_PICKING_ORDER_DEFAULT,
    keys.DYNAMIC_BATCHING_VERBOSE: False,
}
_TOKEN_LR = {keys.RANDOM_LTD_LAYER_TOKEN_LR_ENABLED: keys.RANDOM_LTD_LAYER_TOKEN_LR_ENABLED_DEFAULT}
_RANDOM_LTD = {
    keys.RANDOM_LTD_ENABLED: keys.RANDOM_LTD_ENABLED_DEFAULT,
    keys.RANDOM_LTD_LAYER_TOKEN_LR_SCHEDULE: _TOKEN_LR,
}


def get_data_efficiency_enabled(param_dict: Mapping[str, Any]) -> bool:
    """Return `data_efficiency.enabled`."""
    section = param_dict.get(keys.DATA_EFFICIENCY) or {}
    return bool(section.get(keys.DATA_EFFICIENCY_ENABLED, keys.DATA_EFFICIENCY_ENABLED_DEFAULT))


def get_data_efficiency_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of a config; a curriculum and random-LTD that are off have no other keys."""
    section = param_dict.get(keys.DATA_EFFICIENCY) or {}
    sampling = {**_SAMPLING, **section.get(keys.DATA_SAMPLING, {})}
    routing = section.get(keys.DATA_ROUTING, {})
    sampling[keys.CURRICULUM_LEARNING] = _if_enabled(sampling.get(keys.CURRICULUM_LEARNING, {}), {"enabled": False})
    sampling[keys.DYNAMIC_BATCHING] = {**_BATCHING, **sampling.get(keys.DYNAMIC_BATCHING, {})}
    return {
        keys.DATA_EFFICIENCY_ENABLED: get_data_efficiency_enabled(param_dict),
        keys.DATA_EFFICIENCY_SEED: section.get(keys.DATA_EFFICIENCY_SEED, keys.DATA_EFFICIENCY_SEED_DEFAULT),
        keys.DATA_SAMPLING: sampling,
        keys.DATA_ROUTING: {
            keys.DATA_ROUTING_ENABLED: routing.get(keys.DATA_ROUTING_ENABLED, keys.DATA_ROUTING_ENABLED_DEFAULT),
            keys.RANDOM_LTD: _if_enabled(routing.get(keys.RANDOM_LTD, {}), _RANDOM_LTD),
        },
    }


def _if_enabled(section: Mapping[str, Any], off: Mapping[str, Any]) -> dict[str, Any]:
    return {**off, **section} if section.get("enabled") else dict(off)
