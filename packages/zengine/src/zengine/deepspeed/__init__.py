"""DeepSpeed's names for zengine: `import zengine.deepspeed as deepspeed` is the one line to change in a script.

Everything here delegates to the six packages and adds no behaviour beyond DeepSpeed's signatures; a name that is not
available raises `NotAvailable` when it is used (absent.py).  packages/zengine/DEEPSPEED.md lists the differences.
Scripts that cannot be edited run under `python -m zengine.as_deepspeed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zengine.as_deepspeed import API_VERSION
from zengine.deepspeed.absent import NotAvailable, absent
from zengine.imports import homes_below, lazy_attributes

if TYPE_CHECKING:
    from zengine.config import ConfigError as DeepSpeedConfigError
    from zengine.deepspeed import (
        accelerator,
        checkpoint,
        comm,
        elasticity,
        inference,
        launcher,
        linear,
        module_inject,
        moe,
        monitor,
        ops,
        pipe,
        profiling,
        runtime,
        sequence,
        utils,
    )
    from zengine.deepspeed import comm as dist
    from zengine.deepspeed.accelerator import get_accelerator
    from zengine.deepspeed.comm import init_distributed
    from zengine.deepspeed.inference import (
        DeepSpeedInferenceConfig,
        InferenceEngine,
        default_inference_config,
        init_inference,
    )
    from zengine.deepspeed.pipe import PipelineModule
    from zengine.deepspeed.runtime import zero
    from zengine.deepspeed.runtime.activation_checkpointing import checkpointing
    from zengine.deepspeed.runtime.config import ADAM_OPTIMIZER, LAMB_OPTIMIZER, DeepSpeedConfig
    from zengine.deepspeed.start import initialize, tp_model_init
    from zengine.deepspeed.utils import OnDevice, log_dist, logger
    from zengine.deepspeed_engine import DeepSpeedEngine
    from zengine.initialize import add_config_arguments
    from zengine.pipeline_engine import PipelineEngine

__version__ = API_VERSION
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in API_VERSION.split("."))
__git_hash__ = __git_branch__ = "[none]"  # wheels are built from releases

DeepSpeedTransformerLayer = absent("DeepSpeedTransformerLayer")
DeepSpeedTransformerConfig = absent("DeepSpeedTransformerConfig")

__all__ = [
    "ADAM_OPTIMIZER",
    "LAMB_OPTIMIZER",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "DeepSpeedInferenceConfig",
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "InferenceEngine",
    "NotAvailable",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "default_inference_config",
    "dist",
    "elasticity",
    "get_accelerator",
    "inference",
    "init_distributed",
    "init_inference",
    "initialize",
    "launcher",
    "linear",
    "log_dist",
    "logger",
    "module_inject",
    "moe",
    "monitor",
    "ops",
    "pipe",
    "profiling",
    "runtime",
    "sequence",
    "tp_model_init",
    "utils",
    "zero",
]

# Imported on first use, as submodules are: a script pays for the parts that it touches.
_HOME_OF = homes_below(
    __name__,
    {
        "accelerator": "get_accelerator",
        "comm": "init_distributed",
        "inference": "DeepSpeedInferenceConfig InferenceEngine default_inference_config init_inference",
        "pipe": "PipelineModule",
        "runtime": "zero",
        "runtime.activation_checkpointing": "checkpointing",
        "runtime.config": "ADAM_OPTIMIZER DeepSpeedConfig LAMB_OPTIMIZER",
        "start": "initialize tp_model_init",
        "utils": "OnDevice log_dist logger",
    },
)
_HOME_OF |= {
    "DeepSpeedConfigError": "zengine.config:ConfigError",
    "DeepSpeedEngine": "zengine.deepspeed_engine",
    "PipelineEngine": "zengine.pipeline_engine",
    "add_config_arguments": "zengine.initialize",
    "dist": f"{__name__}:comm",
}

__getattr__, __dir__ = lazy_attributes(__name__, _HOME_OF, with_submodules=True)
