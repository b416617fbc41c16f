"""`deepspeed.utils`: sharded tensors, groups, logging."""

from __future__ import annotations

from zengine.data import RepeatingLoader
from zengine.deepspeed.comm.world import is_initialized
from zengine.deepspeed.utils import groups
from zengine.deepspeed.utils.comms_logging import get_caller_func
from zengine.deepspeed.utils.init_on_device import OnDevice
from zengine.deepspeed.utils.leaves import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)
from zengine.deepspeed.utils.logging import (
    log_dist,
    log_dist_once,
    logger,
    set_log_level,
    set_log_level_from_string,
)
from zengine.deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state, link_hp_params
from zengine.deepspeed.utils.module_utils import recursive_getattr, recursive_setattr
from zengine.deepspeed.utils.numa import get_numactl_cmd
from zengine.deepspeed.utils.nvtx import instrument_w_nvtx
from zengine.deepspeed.utils.tensor_fragment import (
    fragment_address,
    get_full_hp_grad,
    get_full_hp_param,
    get_hp_fragment_mapping,
    map_to_flat_opt_states,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
    set_full_hp_grad,
    set_full_hp_param,
)

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "fragment_address",
    "get_caller_func",
    "get_full_hp_grad",
    "get_full_hp_param",
    "get_hp_fragment_mapping",
    "get_numactl_cmd",
    "get_z3_leaf_modules",
    "groups",
    "instrument_w_nvtx",
    "is_initialized",
    "lazy_init_hp_params_optimizer_state",
    "link_hp_params",
    "log_dist",
    "log_dist_once",
    "logger",
    "map_to_flat_opt_states",
    "recursive_getattr",
    "recursive_setattr",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_full_hp_grad",
    "set_full_hp_param",
    "set_log_level",
    "set_log_level_from_string",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]
