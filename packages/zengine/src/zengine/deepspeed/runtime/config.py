"""`deepspeed.runtime.config`: a config to inspect before an engine exists, and readers of single keys.

`DeepSpeedConfig` reads and resolves a config exactly as `initialize` does, so it raises the same errors.  The readers
(`get_*`) take a dict as it was written and give DeepSpeed's default for an absent key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, final

import attrs
import torch

from zengine.config import ConfigError as DeepSpeedConfigError
from zengine.config import Facts, Plan, load, resolve
from zengine.config.grammar.source import read
from zengine.config.keys.features import HYBRID_ENGINE, SparseAttention
from zengine.config.plan.technique_rules import KEYS_OF_MODE
from zengine.deepspeed.autotuning.config import DeepSpeedAutotuningConfig
from zengine.deepspeed.comm.config import DeepSpeedCommsConfig
from zengine.deepspeed.comm.world import get_rank, get_world_size
from zengine.deepspeed.compile.config import CompileConfig
from zengine.deepspeed.datastates.config import DeepSpeedDataStatesConfig
from zengine.deepspeed.module_inject.auto_ep_config import AutoEPConfig, parse_autoep_config
from zengine.deepspeed.monitor.config import get_monitor_config
from zengine.deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from zengine.deepspeed.runtime import constants as keys
from zengine.deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
from zengine.deepspeed.runtime.config_utils import (
    ScientificNotationEncoder,
    dict_raise_error_on_duplicate_keys,
    get_scalar_param,
)
from zengine.deepspeed.runtime.constants import (
    GRADIENT_ACCUMULATION_STEPS,
    GRADIENT_CLIPPING,
    TRAIN_BATCH_SIZE,
    TRAIN_MICRO_BATCH_SIZE_PER_GPU,
)
from zengine.deepspeed.runtime.data_pipeline.config import get_data_efficiency_config, get_data_efficiency_enabled
from zengine.deepspeed.runtime.model_checkpointing.config import get_checkpoint_config
from zengine.deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
from zengine.deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from zengine.deepspeed.runtime.tensor_parallel.config import get_tensor_parallel_config
from zengine.deepspeed.runtime.zero.config import get_zero_config
from zengine.deepspeed.section_model import SectionModel
from zengine.deepspeed.utils.config import get_timers_config
from zengine.deepspeed.utils.logging import logger

__all__ = [
    "ADAGRAD_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "DEEPSPEED_OPTIMIZERS",
    "GRADIENT_ACCUMULATION_STEPS",
    "GRADIENT_CLIPPING",
    "LAMB_OPTIMIZER",
    "LION_OPTIMIZER",
    "MUON_OPTIMIZER",
    "TRAIN_BATCH_SIZE",
    "TRAIN_MICRO_BATCH_SIZE_PER_GPU",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedConfigWriter",
    "HybridEngineConfig",
    "get_bfloat16_config",
    "get_communication_data_type",
    "get_expert_parallel_config",
    "get_float16_config",
    "get_gradient_allreduce_op",
    "get_hybrid_engine_config",
    "get_pipeline_config",
    "get_torch_autocast_dtype",
]

ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
DEEPSPEED_OPTIMIZERS = [
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    LAMB_OPTIMIZER,
    LION_OPTIMIZER,
    MUON_OPTIMIZER,
]

TORCH_ADAM_PARAM = "torch_adam"
ADAM_W_MODE = "adam_w_mode"
ADAM_W_MODE_DEFAULT = True

Document = Mapping[str, Any]  # a config as it was written


def _reader(key: str, default: Any) -> Callable[[Document], Any]:
    def get(param_dict: Document) -> Any:
        return get_scalar_param(param_dict, key, default)

    get.__doc__ = f"Return the value of `{key}`, {default!r} if it is absent."
    return get


def _member(section: str, key: str, default: Any) -> Callable[[Document], Any]:
    def get(param_dict: Document) -> Any:
        return (param_dict.get(section) or {}).get(key, default)

    get.__doc__ = f"Return the value of `{section}.{key}`, {default!r} if it is absent."
    return get


get_train_batch_size = _reader(TRAIN_BATCH_SIZE, None)
get_train_micro_batch_size_per_gpu = _reader(TRAIN_MICRO_BATCH_SIZE_PER_GPU, None)
get_gradient_accumulation_steps = _reader(GRADIENT_ACCUMULATION_STEPS, None)
get_managed_gradient_accumulation = _reader(keys.MANAGED_GRADIENT_ACCUMULATION, True)
get_gradient_clipping = _reader(GRADIENT_CLIPPING, keys.GRADIENT_CLIPPING_DEFAULT)
get_gradient_predivide_factor = _reader(keys.GRADIENT_PREDIVIDE_FACTOR, 1.0)
get_prescale_gradients = _reader(keys.PRESCALE_GRADIENTS, False)
get_steps_per_print = _reader(keys.STEPS_PER_PRINT, None)
get_disable_allgather = _reader(keys.DISABLE_ALLGATHER, False)
get_dump_state = _reader(keys.DUMP_STATE, False)
get_disable_python_gc = _reader(keys.DISABLE_PYTHON_GC, False)
get_zero_allow_untested_optimizer = _reader(keys.ZERO_ALLOW_UNTESTED_OPTIMIZER, False)
get_zero_force_ds_cpu_optimizer = _reader(keys.ZERO_FORCE_DS_CPU_OPTIMIZER, True)
get_wall_clock_breakdown = _reader(keys.WALL_CLOCK_BREAKDOWN, False)
get_memory_breakdown = _reader(keys.MEMORY_BREAKDOWN, False)
get_expert_data_topo_config = _reader(keys.USE_DATA_BEFORE_EXPERT_PARALLEL, False)
get_dataloader_drop_last = _reader(keys.DATALOADER_DROP_LAST, False)
get_log_level = _reader(keys.LOG_LEVEL, None)
get_checkpoint_params = _reader(keys.CHECKPOINT, {})
get_data_types_params = _reader(keys.DATA_TYPES, {})
get_optimizer_name = _member(keys.OPTIMIZER, keys.TYPE, None)
get_optimizer_params = _member(keys.OPTIMIZER, keys.OPTIMIZER_PARAMS, None)
get_optimizer_legacy_fusion = _member(keys.OPTIMIZER, keys.LEGACY_FUSION, False)
get_scheduler_name = _member(keys.SCHEDULER, keys.TYPE, None)
get_scheduler_params = _member(keys.SCHEDULER, keys.SCHEDULER_PARAMS, None)
get_lower_precision_safe_modules = _member(
    keys.TORCH_AUTOCAST, keys.TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES, None
)
get_checkpoint_parallel_write_pipeline = _member(
    keys.CHECKPOINT_PARALLEL_WRITE, keys.CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE, False
)
get_torch_autocast_enabled = _member(keys.TORCH_AUTOCAST, keys.TORCH_AUTOCAST_ENABLED, False)

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_AUTOCAST = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES.values()} | _DTYPES
_PIPELINE = {
    "stages": "auto",
    "partition": "best",
    "seed_layers": False,
    "activation_checkpoint_interval": 0,
    "pipe_partitioned": True,
    "grad_partitioned": True,
}


def get_communication_data_type(
    param_dict: Document,
    comm_type: str = keys.COMMUNICATION_DATA_TYPE,
    comm_data_type_default: str | None = None,
) -> torch.dtype | None:
    """Return the dtype of a key; None if it is absent.  Raises ValueError for another word."""
    word = get_scalar_param(param_dict, comm_type, comm_data_type_default)
    if word is not None and str(word).lower() not in _DTYPES:
        raise ValueError(f"Invalid communication_data_type. Supported data types: {list(_DTYPES)}. Got: {word}")
    return None if word is None else _DTYPES[str(word).lower()]


def get_torch_autocast_dtype(param_dict: Document) -> torch.dtype | None:
    """Return the dtype of `torch_autocast`; None if it is absent.  Raises ValueError for another word."""
    word = (param_dict.get(keys.TORCH_AUTOCAST) or {}).get(keys.TORCH_AUTOCAST_DTYPE)
    found = _AUTOCAST.get(str(word).removeprefix("torch."))
    if word is not None and found is None:
        raise ValueError(f"Invalid dtype for torch autocast: {word}. It is one of {', '.join(_AUTOCAST)}")
    return found


def get_gradient_allreduce_op(param_dict: Document) -> str:
    """Return "mean" or "sum".  Raises ValueError for another word."""
    word = str(get_scalar_param(param_dict, keys.GRADIENT_ALLREDUCE_OP, keys.GRADIENT_ALLREDUCE_OP_DEFAULT)).lower()
    if word not in keys.GRADIENT_ALLREDUCE_OP_SUPPORTED:
        allowed = list(keys.GRADIENT_ALLREDUCE_OP_SUPPORTED)
        raise ValueError(f"Invalid gradient_allreduce_op. Supported operations: {allowed}. Got: {word!r}")
    return word


@final
class HybridEngineConfig(SectionModel):
    """Section `hybrid_engine`."""

    rows = HYBRID_ENGINE
    defaults: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("release_inference_cache", "enable_cuda_graph"), False),
        "max_out_tokens": 512,
        "inference_tp_size": 1,
        "pin_parameters": True,
        "tp_gather_partition_size": 8,
    }
    title = "hybrid_engine"
    enabled: bool


def get_hybrid_engine_config(param_dict: Document) -> HybridEngineConfig:
    """Return the section `hybrid_engine`.  Raises as HybridEngineConfig does."""
    return HybridEngineConfig(**(param_dict.get("hybrid_engine") or {}))


def get_expert_parallel_config(param_dict: Document) -> AutoEPConfig:
    """Return the section `expert_parallel`.  Raises as AutoEPConfig does."""
    return parse_autoep_config(param_dict.get("expert_parallel") or {})


def get_sparse_attention(param_dict: Document) -> dict[str, Any] | None:
    """Return mode, block and the keys of the mode, with their defaults; None without the section.

    Raises NotImplementedError for another mode.
    """
    section = param_dict.get("sparse_attention")
    if section is None:
        return None
    mode = section.get("mode", "fixed")
    if mode not in KEYS_OF_MODE:
        raise NotImplementedError(f"sparse_attention.mode = {mode!r}: use one of {', '.join(KEYS_OF_MODE)}")
    values = {**attrs.asdict(SparseAttention()), **section, "mode": mode}
    chosen = {name: values[name] for name in ("mode", "block", *KEYS_OF_MODE[mode])}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()}


def get_pipeline_config(param_dict: Document) -> dict[str, Any]:
    """Return the section `pipeline`, with DeepSpeed's defaults."""
    return {**_PIPELINE, **(param_dict.get("pipeline") or {})}


@final
class DeepSpeedConfigWriter:
    """Edits the top-level keys of a config file."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data = {} if data is None else data

    def add_config(self, key: str, value: Any) -> None:
        """Set a key."""
        self.data[key] = value

    def load_config(self, filename: str | os.PathLike[str]) -> None:
        """Read a JSON file.  Raises ValueError for a key that occurs twice."""
        text = Path(filename).read_text(encoding="utf-8")
        self.data = json.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)

    def write_config(self, filename: str | os.PathLike[str]) -> None:
        """Write the keys as JSON."""
        Path(filename).write_text(json.dumps(self.data), encoding="utf-8")


@final
class DeepSpeedConfig:
    """Config, read and resolved for the current world size; attributes have DeepSpeed's names.

    config: path, dict, JSON text, or that in base64.  mpu: its data-parallel ranks are the world.  mesh_device: a
    DeviceMesh with an axis "data_parallel", likewise.

    Raises ConfigError (DeepSpeedConfigError), a ValueError, as `initialize` would.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        replicas = _replicas(mpu, mesh_device)
        plan = resolve(load(config), Facts(world_size=replicas, replicas=replicas))
        found: Any = read(config).data or {}
        self._read(plan, dict(found))

    @classmethod
    def of(cls, plan: Plan) -> DeepSpeedConfig:
        """Return the config of an engine with this plan (not DeepSpeed's)."""
        made = cls.__new__(cls)
        made._read(plan, dict(plan.given))
        return made

    def _read(self, plan: Plan, document: dict[str, Any]) -> None:
        self.global_rank, self.world_size = get_rank(), plan.batch.replicas
        self.plan, self._param_dict = plan, document
        self._read_plan(plan)
        self._read_keys(document)
        self._read_sections(document)

    def _read_plan(self, plan: Plan) -> None:
        """Set the values that depend on several keys."""
        self.train_batch_size: int | None = plan.batch.train_batch_size
        self.train_micro_batch_size_per_gpu: int | None = plan.batch.micro_batch_size
        self.gradient_accumulation_steps: int | None = plan.batch.accumulation
        self.gradient_clipping = plan.clip_norm
        self.zero_optimization_stage = plan.zero.stage
        self.zero_enabled = plan.zero.stage > 0
        self.optimizer_name = plan.optimizer.type.lower() or None
        self.optimizer_params = dict(plan.optimizer.params) or None
        self.scheduler_name = plan.scheduler.type or None
        self.scheduler_params = dict(plan.scheduler.params) or None

    def _read_keys(self, document: dict[str, Any]) -> None:
        """Set the values of single keys and sections."""
        for name in _SINGLE_KEYS:
            setattr(self, name, globals()[f"get_{name}"](document))
        self.torch_autocast_lower_precision_safe_modules = get_lower_precision_safe_modules(document)
        self.communication_data_type = get_communication_data_type(document)
        self.seq_parallel_communication_data_type = get_communication_data_type(
            document,
            keys.SEQ_PARALLEL_COMMUNICATION_DATA_TYPE,
            keys.SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_DEFAULT,
        )
        checkpoint = get_checkpoint_params(document)
        mode = checkpoint.get(keys.CHECKPOINT_TAG_VALIDATION, keys.CHECKPOINT_TAG_VALIDATION_DEFAULT).upper()
        self.checkpoint_tag_validation_enabled = mode != keys.ValidationMode.IGNORE
        self.checkpoint_tag_validation_fail = mode == keys.ValidationMode.FAIL
        self.load_universal_checkpoint = checkpoint.get(keys.LOAD_UNIVERSAL_CHECKPOINT, False)
        self.use_node_local_storage = checkpoint.get(keys.USE_NODE_LOCAL_STORAGE_CHECKPOINT, False)
        dtypes = get_data_types_params(document)
        self.grad_accum_dtype = dtypes.get(keys.GRAD_ACCUM_DTYPE)
        self.param_dtype, self.buffer_dtype = dtypes.get(keys.PARAM_DTYPE), dtypes.get(keys.BUFFER_DTYPE)
        self.keep_in_fp32_modules = dtypes.get(keys.KEEP_IN_FP32_MODULES, keys.KEEP_IN_FP32_MODULES_DEFAULT)
        self.use_data_before_expert_parallel_ = get_expert_data_topo_config(document)
        self.data_efficiency_enabled = get_data_efficiency_enabled(document)
        self.checkpoint_parallel_write_pipeline = get_checkpoint_parallel_write_pipeline(checkpoint)
        self.sparse_attention = get_sparse_attention(document)
        self.weight_quantization_config = None  # of inference engines; a config with that section is rejected

    def _read_sections(self, document: dict[str, Any]) -> None:
        """Set the objects of whole sections."""
        self.zero_config = get_zero_config(document)
        self.float16_config = get_float16_config(document)
        self.bfloat16_config = get_bfloat16_config(document)
        self.fp16_enabled, self.bfloat16_enabled = self.float16_config.enabled, self.bfloat16_config.enabled
        self.activation_checkpointing_config = DeepSpeedActivationCheckpointingConfig(document)
        self.comms_config = DeepSpeedCommsConfig(document)
        self.flops_profiler_config = DeepSpeedFlopsProfilerConfig(document)
        self.wall_clock_breakdown = get_wall_clock_breakdown(document) or self.flops_profiler_config.enabled
        self.autotuning_config = DeepSpeedAutotuningConfig(document)
        self.hybrid_engine = get_hybrid_engine_config(document)
        self.pipeline = get_pipeline_config(document)
        self.data_efficiency_config = get_data_efficiency_config(document)
        self.aio_config = get_aio_config(document)
        self.datastates_config = DeepSpeedDataStatesConfig(document)
        self.checkpoint_config = get_checkpoint_config(document)
        self.compile_config = CompileConfig(**(document.get("compile") or {}))
        self.timers_config = get_timers_config(document)
        self.monitor_config = get_monitor_config(document)
        self.tensor_parallel_config = get_tensor_parallel_config(document)
        self.expert_parallel_config = get_expert_parallel_config(document)

    def _configure_train_batch_size(self) -> None:
        """Complete the three batch sizes, which may be set to None before.  Raises AssertionError, as DeepSpeed does.

        Quotients are rounded down, and the sizes must then fit; `initialize` has the better message.
        """
        train, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        steps, world = self.gradient_accumulation_steps, self.world_size
        assert train is not None or micro is not None, (
            "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided"
        )
        if train is None:
            steps = 1 if steps is None else steps
            train = (micro or 0) * steps * world
        elif micro is None:
            steps = 1 if steps is None else steps
            micro = train // world // steps
        elif steps is None:
            steps = train // micro // world
        self.train_batch_size, self.train_micro_batch_size_per_gpu = train, micro
        self.gradient_accumulation_steps = steps
        assert min(train, micro or 0, steps or 0) > 0 and train == (micro or 0) * (steps or 0) * world, (
            "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size: "
            f"{train} != {micro} * {steps} * {world}, or one of them is not greater than 0"
        )

    def print_user_config(self) -> None:
        """Log the config as it was written."""
        text = json.dumps(self._param_dict, sort_keys=True, indent=4, cls=ScientificNotationEncoder)
        logger.info("  json = %s", text)

    def print(self, name: str = "DeepSpeedConfig") -> None:
        """Print the resolved plan with the origin of each value."""
        print(f"{name}:\n{self.plan.describe()}")


# Attributes that are the value of one key.
_SINGLE_KEYS = (
    *("managed_gradient_accumulation", "steps_per_print", "dump_state", "disable_python_gc", "disable_allgather"),
    *("prescale_gradients", "gradient_predivide_factor", "optimizer_legacy_fusion", "torch_autocast_enabled"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "memory_breakdown"),
    *("dataloader_drop_last", "log_level", "gradient_allreduce_op", "torch_autocast_dtype"),
)


def _replicas(mpu: Any, mesh_device: Any) -> int:
    """Return the number of data-parallel ranks."""
    if mpu is not None and hasattr(mpu, "get_data_parallel_world_size"):
        return int(mpu.get_data_parallel_world_size())
    if mpu is not None and hasattr(mpu, "get_data_parallel_group"):
        return get_world_size(mpu.get_data_parallel_group())
    if mpu is not None:
        return get_world_size() // int(mpu.get_sequence_parallel_world_size())
    return get_world_size(None if mesh_device is None else mesh_device.get_group(mesh_dim="data_parallel"))
