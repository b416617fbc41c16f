"""The whole table: every key that a config may hold, in one tree.

`ROOT` is data.  `structure` reads a document by it, the suggestions and the tests walk it.
"""

from __future__ import annotations

from typing import Any

from zengine.config import compat_features as features
from zengine.config import compat_parallel as parallel
from zengine.config import compat_training as training
from zengine.config import profiling_settings as profiling
from zengine.config import schema
from zengine.config import telemetry_settings as telemetry
from zengine.config.activation_settings import ActivationCheckpointing
from zengine.config.compat_compression import COMPRESSION_TRAINING
from zengine.config.compat_inference import INFERENCE
from zengine.config.kinds import TRUTH
from zengine.config.precision_settings import AMP_OTHERS, Amp, Autocast, Float8
from zengine.config.table import Entry, Section, honoured, no_effect

_OFFLOAD: dict[str, Any] = {"switch": "device", "off": ("none", None)}

SECTIONS: dict[str, Entry] = {
    "optimizer": honoured(schema.Optimizer, training.OPTIMIZER),
    "scheduler": honoured(schema.Scheduler),
    "fp16": honoured(schema.Fp16, switch="enabled"),
    "bf16": honoured(schema.Bf16, training.BF16, switch="enabled"),
    "bfloat16": training.BFLOAT16,
    "amp": honoured(Amp, AMP_OTHERS, switch="enabled"),
    "torch_autocast": honoured(Autocast, switch="enabled"),
    "fp8": honoured(Float8, switch="enabled"),
    "data_types": honoured(schema.DataTypes),
    "zero_optimization": honoured(
        schema.Zero,
        {
            **training.ZERO,
            "leaf_module": honoured(schema.LeafModule),
            "offload_optimizer": honoured(schema.OffloadOptimizer, training.OFFLOAD_OPTIMIZER, **_OFFLOAD),
            "offload_param": honoured(schema.OffloadParam, training.OFFLOAD_PARAM, **_OFFLOAD),
        },
        shorthand=training.ZERO_SHORTHAND,
    ),
    "aio": honoured(schema.Aio, training.AIO),
    "checkpoint": honoured(schema.CheckpointSettings, {**training.CHECKPOINT, "keep": honoured(schema.KeepSettings)}),
    "nebula": training.NEBULA,
    "datastates_ckpt": training.DATASTATES,
    "timers": Section(
        builds=telemetry.Timers,
        keys={
            "throughput": honoured(
                telemetry.Throughput,
                {
                    "synchronized": no_effect(
                        TRUTH, True, why="a step is timed from boundary to boundary, and nothing is waited for"
                    )
                },
                switch="enabled",
            )
        },
    ),
    "comms_logger": honoured(profiling.CommsLogger, switch="enabled"),
    "tensorboard": honoured(telemetry.TensorBoard, switch="enabled"),
    "csv_monitor": honoured(telemetry.EventFiles, switch="enabled"),
    "jsonl_monitor": honoured(telemetry.RunFolder, switch="enabled"),
    "wandb": honoured(telemetry.Wandb, switch="enabled"),
    "comet": honoured(telemetry.Comet, switch="enabled"),
    "data_efficiency": features.DATA_EFFICIENCY,
}

FEATURES: dict[str, Entry] = {
    "activation_checkpointing": honoured(ActivationCheckpointing),
    "tensor_parallel": parallel.TENSOR_PARALLEL,
    "expert_parallel": parallel.EXPERT_PARALLEL,
    "pipeline": parallel.PIPELINE,
    "hybrid_engine": parallel.HYBRID_ENGINE,
    "compile": parallel.COMPILE,
    "flops_profiler": honoured(profiling.FlopsProfiler, switch="enabled"),
    "profiler": honoured(profiling.Profiler, switch="enabled"),
    "progressive_layer_drop": features.PROGRESSIVE_LAYER_DROP,
    "eigenvalue": features.EIGENVALUE,
    "curriculum_learning": features.CURRICULUM_LEARNING,
    "compression_training": COMPRESSION_TRAINING,
    "quantize_training": features.QUANTIZE_TRAINING,
    "elasticity": features.ELASTICITY,
    "autotuning": features.AUTOTUNING,
    "sparse_attention": features.SPARSE_ATTENTION,
    "graph_harvesting": features.GRAPH_HARVESTING,
    "weight_quantization": features.WEIGHT_QUANTIZATION,
}

ROOT = honoured(schema.Settings, {**training.TOP, **SECTIONS, **FEATURES, **INFERENCE})
