"""Tables of permitted imports (see ARCHITECTURE.md), and the tests that enforce them.

To permit a new import, add a line to a table and give the reason in the change.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import repo
import sources

# Everything outside the standard library that a package may import.
MAY_IMPORT = {
    "zcomm": {"torch", "numpy", "attrs", "cffi"},
    "zprecision": {"torch", "numpy", "attrs", "cffi", "cupy"},
    "zpartition": {"torch", "numpy", "attrs", "zcomm"},
    "zoptim": {"torch", "numpy", "attrs", "cffi", "cupy"},
    "zckpt": {"torch", "numpy", "attrs", "safetensors", "xxhash", "fsspec", "shtab"},
    "zengine": {
        "torch", "numpy", "attrs", "hjson", "tensorboard", "wandb", "comet_ml", "pydantic", "rich", "shtab",
        "transformers", "mlflow", "aim", "trackio",
        "zcomm", "zprecision", "zpartition", "zoptim", "zckpt",
    },
}  # fmt: skip

# Heavy or optional: only inside functions, so `import zengine` does not need them.
ONLY_LAZILY = {
    "aim",
    "cffi",
    "comet_ml",
    "cupy",
    "fsspec",
    "hjson",
    "mlflow",
    "pydantic",
    "rich",
    "shtab",
    "tensorboard",
    "trackio",
    "transformers",
    "wandb",
}

# Imported if the user installed them; never a declared dependency.
OPTIONAL = {"comet_ml", "cupy", "fsspec", "pydantic", "rich", "shtab", "transformers", "wandb"} | {
    "aim",
    "mlflow",
    "trackio",
}

# Inside zengine one file composes the five packages and chooses classes with behaviour.  Other files may use only the
# names listed here: frozen policy values in the config, and functions and errors of a file's own subject.  A key is a
# file or, with a slash, a folder.  Names in annotations are not restricted.
ASSEMBLER = "build/assemble.py"
ZENGINE_MAY_USE: dict[str, dict[str, set[str]]] = {
    "config/": {
        "zprecision": {"Precision", "KeepInFp32", "Unscaled", "StaticScaling", "DynamicScaling"},
        "zpartition": {
            *("ZeroPolicy", "Averaging", "BucketSizing", "ReduceAt", "SparseGradients"),
            *("ColumnMoments", "Offload", "SelectivePolicy", "Speculation", "Tier"),
        },
        "zckpt": {"Best", "CheckpointInputError", "KEEP_ALL", "Retention"},
        "zcomm": {"Degrees"},
    },
    # checks names and options with zoptim, on a dummy parameter, so the config has no list of them
    "config/reading/choices.py": {
        "zoptim": {
            *("make_optimizer", "make_schedule", "UnknownNameError"),
            *("OPTIMIZER_OPTIONS", "SCHEDULE_OPTIONS", "certainly_accepts", "BaseShapesMissingError"),
        }
    },
    # suggests the nearest option
    "config/reading/structure.py": {"zoptim": {"OPTIMIZER_OPTIONS", "SCHEDULE_OPTIONS"}},
    "telemetry/": {"zcomm": {"traced", "Record"}},
    # plans a run without starting it: sizes, and optimizers and schedules on dummy parameters
    "commands/plan.py": {"zcomm": {"Degrees", "Groups", "init"}, "zpartition": {"on_meta"}},
    "planning/": {
        "zpartition": {
            *("on_meta", "plan", "plan_traffic", "ReduceAt", "Tier"),
            *("rounds.RoundPolicy", "rounds.RoundsPlan", "rounds.plan_rounds"),
        },
        "zoptim": {"make_optimizer", "make_schedule"},
        "zprecision": {"DynamicScaling"},
    },
    # full shapes of split tensors; gradient norms by layer, summed over the ranks
    "features/trial_run.py": {"zpartition": {"FullTensors"}},
    "features/measuring.py": {
        "zcomm": {"all_reduce", "all_gather_object"},
        "zpartition": {"FullTensors", "experts.active_fractions", "pipeline_stages_of"},
    },
    # plays ranks of a run: their worlds, engines without kernels, plans without disks
    "ordering/": {
        "zcomm": {"Communicator", "PlayedCall", "World", "played_world"},
        "zoptim": {"use_level"},
        "zpartition": {"Tier"},
    },
    "checkpoint/weights.py": {
        "zpartition": {"FullTensors", "load_slices", "own_parts", "whole_state_dict"},
        "zckpt": {"interchange.read_weights"},
    },
    # slices of files instead of tensors, for Transformers' conversions
    "checkpoint/huggingface.py": {"zckpt": {"CheckpointInputError", "interchange.Patchwork"}},
    # one number a layer, summed over the ranks
    "features/layer_norms.py": {"zcomm": {"all_reduce", "all_gather_object"}, "zpartition": {"pipeline_stages_of"}},
    # ranks agree on signals, and compare replicas
    "features/signals.py": {"zcomm": {"all_reduce", "all_gather_object"}},
    "features/replicas.py": {"zcomm": {"all_gather_object"}, "zpartition": {"state_shards"}},
    # a failing rank tells the others
    "engine/call_notes.py": {"zcomm": {"CollectiveFailed"}},
    "engine/memory_errors.py": {"zcomm": {"CollectiveFailed", "abort"}},
    "build/failures.py": {"zcomm": {"CollectiveFailed", "RendezvousFailed", "abort", "detect", "failure", "init"}},
    # pipeline stages exchange the layers that they hold
    "features/named_layers.py": {"zcomm": {"all_gather_object"}},
    "features/random_ltd.py": {"zpartition": {"pipeline_stages_of"}},
    "features/local_rounds.py": {"zpartition": {"rounds.OuterExchange", "rounds.Rounds"}},
    "features/zenflow.py": {"zpartition": {"selective.SelectiveUpdates"}},
    "features/layer_drop.py": {"zpartition": {"pipeline_stages_of"}},
    "features/moq.py": {"zprecision": {"quant.round_to_bits"}},
    # products with Hessians are averaged over ranks
    "features/eigenvalues.py": {
        "zcomm": {"all_reduce", "group_size"},
        "zprecision": {
            *("PowerIteration", "block_eigenvalues", "hessian_product", "largest_eigenvalue"),
            "relative_eigenvalues",
        },
    },
    # forward rounds weights as formats of inference do
    "compression/techniques.py": {
        "zprecision": {"quantize", "quant.simulate", "quant.simulate_format", "quant.straight_through"}
    },
    "compression/start.py": {"zpartition": {"is_deferred"}},
    "deepspeed/runtime/quantize.py": {"zprecision": {"quant.round_to_bits"}},
    "deepspeed/compression/basic_layer.py": {
        "zpartition": {
            "ModelParallelGroup",
            *("tensor.copy", "tensor.join_features", "tensor.reduce", "tensor.slice_features"),
        }
    },
    "deepspeed/compression/utils.py": {"zprecision": {"quant.simulate", "quant.straight_through"}},
    "config/plan/techniques/compression.py": {"zprecision": {"format_named"}},
    # ranks compare their waits
    "telemetry/stragglers.py": {"zcomm": {"all_gather_object", "group_rank"}},
    "features/comms_summary.py": {"zcomm": {"traced"}},
    "deepspeed/runtime/fp16/onebit/adam.py": {"zoptim": {"OneBitAdam"}},
    "deepspeed/runtime/fp16/onebit/zoadam.py": {"zoptim": {"ZeroOneAdam"}},
    "deepspeed/runtime/fp16/onebit/lamb.py": {"zoptim": {"OneBitLamb"}},
    "deepspeed/runtime/comm/compressed.py": {
        "zcomm": {"CompressedAllReduce", "SignLayout", "group_rank", "group_size"},
    },
    "deepspeed/runtime/fp16/onebit/standalone.py": {
        "zcomm": {"CompressedAllReduce", "SignLayout", "all_reduce", "group_size"},
        "zoptim": {"WholeTensors"},
    },
    "features/compressed_optimizer.py": {"zpartition": {"BucketExchange", "Shard", "check_local_gradients"}},
    # wraps the runner of an engine's passes
    "flops/stage_feature.py": {
        "zcomm": {"all_gather_object"},
        "zpartition": {"pipeline.Passes", "pipeline_stages_of"},
    },
    # adapters of weights that have no memory yet
    "adapters/lora.py": {"zpartition": {"is_deferred"}},
    # layers with adapters are gathered to be merged
    "adapters/merging.py": {"zpartition": {"gathered", "is_gathered"}},
    # codes of frozen weights
    "adapters/quantized_base.py": {
        "zpartition": {"is_deferred"},
        "zprecision": {
            f"quant.{name}" for name in ("Format", "QuantizedTensor", "format_name", "format_named", "quantize")
        },
    },
    # rank 0 writes adapters
    "adapters/files.py": {
        "zcomm": {"group_rank", "group_size"},
        "zpartition": {"gathered"},
        "zckpt": {"interchange.read_weights"},
    },
    # products with quantized weights
    "inference/": {
        "zprecision": {
            *(
                "quant",
                "quant.Format",
                "quant.Int8",
                "quant.PackedTensor",
                "quant.QuantizedTensor",
                "quant.dequantize",
            ),
            *("quant.format_name", "quant.linear", "quant.linear_many", "quant.pack", "quant.quantize"),
            "quant.unit_of",
            *("decoding", "decoding.unsupported", "decoding.Activation"),
            *(f"decoding.Fused{name}" for name in ("Attention", "Block", "Cache", "Decoder", "Head", "MLP")),
            *(f"decoding.Fused{name}" for name in ("MLPInput", "Norm", "Projection", "Rotary")),
            "decoding.MOST_SEQUENCES",
        },
        "zpartition": {"tensor", "expert_ranks_of", "experts.num_experts_of", "experts.own_experts_of"},
    },
    # weights that rest on a drive, or of which each rank has a share
    "inference/offload.py": {
        "zcomm": {"all_gather", "group_rank", "group_size"},
        "zpartition": {"disk.DiskOptions", "disk.DiskStore", "disk.Region"},
    },
    "deepspeed/inference/offloading.py": {"zcomm": {"duplicate_group"}},
    # bytes of quantized weights
    "deepspeed/inference/memory.py": {
        "zprecision": {"quant.Format", "quant.Int4", "quant.Int8"},
        "zpartition": {"experts", "expert_ranks_of"},
    },
    # decoders whose layers are split over tensor ranks
    "inference/structure.py": {"zpartition": {"ModelParallelGroup"}},
    # and whose experts are
    "inference/experts/": {
        "zcomm": {"all_gather_object", "broadcast"},
        "zpartition": {
            *("ModelParallelGroup", "experts.dispatch_around", "experts.own_hf_experts", "experts.whole_hf_experts"),
        },
        "zprecision": {"quant.PackedTensor", "quant.QuantizedTensor"},
    },
    "inference/calls/path.py": {
        "zcomm": {"all_gather_object"},
        "zpartition": {"ModelParallelGroup", "model_parallel_group_of"},
    },
    # one token on all tensor ranks
    "inference/calls/transformers_style.py": {
        "zcomm": {"all_gather_object", "broadcast"},
        "zpartition": {"ModelParallelGroup", "tensor.agree_on_random_numbers"},
    },
    # rollouts open the trainer's weights, or make a copy: quantized, or split over groups of ranks
    "rollout/": {
        "zcomm": {"all_gather_object", "all_reduce", "group_rank"},
        "zpartition": {"ModelParallelGroup", "model_parallel_group_of"},
        "zprecision": {
            *("quant.Format", "quant.Int8", "quant.PackedTensor", "quant.QuantizedTensor", "quant.format_named"),
        },
    },
    # checkpoints hold the rollouts of all ranks; groups that split a copy
    "hybrid_engine.py": {
        "zcomm": {"all_gather_object", "consecutive_group"},
        "zpartition": {"ModelParallelGroup"},
    },
    # files become modules: containers by zckpt, codes by zprecision, names and shapes compared by zpartition
    "inference/loading/": {
        "zckpt": {
            *(
                "Shard",
                "find",
                "interchange",
                "interchange.Patchwork",
                "open_checkpoint",
                "read_gguf",
                "save",
                "whole",
            ),
        },
        "zprecision": {
            *("Precision", "quant.GroupedCodes", "quant.format_named", "quant.from_blocks"),
            *("quant.read_awq", "quant.read_compressed", "quant.read_compressed_bytes", "quant.read_gptq"),
            "quant.read_header",
        },
        "zpartition": {"Address", "FullTensors", "addresses_of", "check_slices", "load_own_slices"},
    },
    "deepspeed/inference/quantization.py": {
        "zprecision": {"quant", "quant.Format", "quant.Int4", "quant.Int8", "quant.format_name"}
    },
    # launches through torch's own functions are announced
    "deepspeed/comm/verbs.py": {"zcomm": {"launching"}},
    # DeepSpeed's names for objects of the packages
    "deepspeed/": {
        # loss scales of a loop of one's own, and of an engine
        "zprecision": {"DynamicScaler", "DynamicScaling", "Scaler", "StaticScaling", "make_scaler"},
        "zoptim": {
            *("Adam", "AdamW", "Adagrad", "LAMB", "Lion", "OneBitAdam", "OneBitLamb", "ZeroOneAdam"),
            "FlatOptimizer",  # optimizers that can be sharded
            *("LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"),
        },
        "zpartition": {
            *(
                "Init",
                "expert_ranks_of",
                "suspend_init",
                "model_parallel_group_of",
                "gathered",
                "tensor",
                "sequence",
                "tensor.TensorPlan",
            ),
            # inference on several ranks, and bases of adapters that ranks share
            *(
                "Address",
                "ModelParallelGroup",
                "FullTensors",
                "expert_shards_of",
                "experts",
                "load_own_slices",
                "check_slices",
            ),
            *("experts.ExpertParameter", "experts.MoE"),
            *("is_gathered", "local_weight"),  # attributes of parameters
            *("pipeline", "pipeline.PipelineModule"),
            *(f"pipeline.{name}" for name in ("LayerSpec", "PipelineError", "TiedLayerSpec")),
            *(
                f"safe_{verb}_full_{what}"
                for verb in ("get", "set")
                for what in ("fp32_param", "grad", "optimizer_state")
            ),
            *(
                f"safe_{verb}_local_{what}"
                for verb in ("get", "set")
                for what in ("fp32_param", "grad", "optimizer_state")
            ),
        },
        "zcomm": {
            *("Degrees", "Groups"),
            *("after", "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "reduce_scatter"),
            "reduce_scatter_quantized",
            *(
                "detect",
                "all_gather_object",
                "group_rank",
                "group_size",
                "init",
                "make_mesh",
                "consecutive_group",
                "traced",
            ),
            *("PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"),
        },
        "zckpt": {
            "CheckpointError",
            "find",
            "interchange",
            "interchange.ForeignCheckpoint",
            "interchange.read_deepspeed",
        },
    },
    # stages send the first one their tensors, or abort
    "checkpoint/export.py": {
        "zcomm": {"close_on_failure", "all_gather_object", "abort"},
        "zpartition": {"gathered", "FullTensors", "pipeline_stages_of"},
    },
    # models of a user's paths: sizes from headers, errors of damaged files, formats
    "commands/models.py": {
        "zckpt": {"CheckpointError", "read_gguf"},
        "zprecision": {
            *("quant", "quant.Format", "quant.Int4", "quant.Int8", "quant.format_name", "quant.format_named"),
        },
    },
    "commands/byte_gpt.py": {"zckpt": {"find", "open_checkpoint"}},
    # reports the kernels in use, and the transport between two ranks that it starts
    "commands/starter/train.py": {"zckpt": {"CheckpointNotFound"}},
    "commands/env.py": {
        "zoptim": {"kernels"},
        "zcomm": {"all_reduce", "transport", "transport_reason", "testing", "testing.run_ranks"},
    },
    # getters of the loss scale
    "deepspeed_getters.py": {"zprecision": {"DynamicScaling", "StaticScaling"}},
    # MoE layers; a value of all ranks
    "deepspeed_engine.py": {"zcomm": {"all_gather", "group_size"}, "zpartition": {"Averaging", "experts.MoE"}},
    # recognizes a pipeline without an import
    "imports.py": {"zpartition": {"pipeline.PipelineModule"}},
    # the world comes before the parts; rank 0 measures bf16
    "initialize.py": {
        "zcomm": {"init", "detect", "all_gather_object", "group_rank"},
        "zprecision": {"measure_bf16_speedup"},
        "zpartition": {"suspend_init"},
    },
    # from degrees, a mesh, an mpu or a split model to groups
    "build/groups.py": {
        "zcomm": {"Groups", "group_size", "mpu_getter", "MPU_NAMES"},
        "zpartition": {"model_parallel_group_of", "replicas_of"},
    },
    # names of an mpu's getters
    "deepspeed/inference/splitting.py": {"zcomm": {"mpu_getter"}},
    "deepspeed/utils/bwc.py": {"zcomm": {"mpu_getter"}},
    # a model split by other code: its marks, and copies compared over the tensor ranks
    "build/mpu.py": {
        "zcomm": {"all_gather_object", "detect", "Groups"},
        "zpartition": {
            *("Partition", "expert_shards_of", "model_parallel_group_of", "tensor.adopt_marked_split"),
            "experts.MoE",
        },
    },
    # a step in a CUDA graph: what the host decides is computed on the device
    "captured_step.py": {
        "zprecision": {"GradientStats", "clip_divisor"},
        "zoptim": {"FlatOptimizer", "SquaresJob", "has_kernels"},
    },
    # activation checkpoints, from the config
    "build/activation_checkpointing.py": {
        "zcomm": {"all_gather_object"},
        "zpartition": {
            *(
                "ModelParallelGroup",
                "pipeline_stages_of",
                "activations.ArenaStore",
                "activations.DeviceStore",
                "activations.Checkpointing",
                "activations.SavedInputs",
            ),
            *("activations.NO_STREAMS", "activations.HostStore", "activations.Store", "activations.Streams"),
            *("activations.CheckpointedBlocks", "activations.Variant"),
        },
    },
    "deepspeed/runtime/activation_checkpointing/": {
        "zpartition": {
            "ModelParallelGroup",
            "activations.Checkpointing",
            "activations.RandomStreams",
            "activations.Variant",
        },
    },
    # shards experts, and updates router biases
    "build/expert_parallel.py": {
        "zpartition": {"expert_shards_of", "experts", "pipeline_stages_of"},
        "zcomm": {"all_gather_object"},
    },
    "features/builtin.py": {"zpartition": {"experts.balance", "experts.balanced_routers"}},
    # pipeline stages exchange their dtypes
    "build/trainable.py": {"zcomm": {"all_gather_object"}, "zpartition": {"pipeline_stages_of"}},
    # splits the module before it is partitioned
    "build/tensor_parallel.py": {
        "zcomm": {"all_gather_object", "group_rank", "group_size"},
        "zpartition": {"model_parallel_group_of", "is_deferred", "pipeline_stages_of", "tensor", "experts"},
    },
    # so does a pipeline, which has an engine of its own
    "build/pipeline.py": {
        "zpartition": {
            "ReduceAt",
            *("pipeline.PipelineModule", "pipeline.ScheduleError", "pipeline.make_schedule", "pipeline.simulate"),
        },
        "zcomm": {"detect"},
    },
    "pipeline_engine.py": {
        "zpartition": {
            *("gathered", "ModelParallelGroup"),
            *(f"pipeline.{name}" for name in ("Passes", "PipelineError", "PipelineRunner", "Recorder")),
        }
    },
    # ranks exchange their state and decide together
    # global shapes of experts
    "build/agreement.py": {"zcomm": {"all_gather_object"}, "zpartition": {"FullTensors", "expert_shards_of"}},
    "engine/nonfinite.py": {"zcomm": {"all_gather_object"}, "zprecision": {"first_nonfinite"}},
    "checkpoint/save_load.py": {
        "zckpt": {"ReadRequest", "collector_paused", "rng", "whole"},
        "zpartition": {"number_forms", "state_shards"},
    },
    "deepspeed/utils/state_files.py": {"zckpt": {"find", "Checkpoint", "whole"}},
    "deepspeed/runtime/zero/offload_states.py": {"zpartition": {"OffloadStateType"}},
    "checkpoint/single_files.py": {"zckpt": {"interchange.read_torch_file", "interchange.write_torch_file"}},
    "deepspeed/checkpoint/deepspeed_checkpoint.py": {"zckpt": {"interchange.read_torch_file"}},
    "deepspeed/checkpoint/reshape_3d_utils.py": {"zckpt": {"interchange.read_torch_file"}},
    "deepspeed/checkpoint/zero_checkpoint.py": {"zckpt": {"interchange.read_torch_file"}},
    "deepspeed/checkpoint/universal_checkpoint.py": {
        "zckpt": {"CheckpointMismatch", "interchange.read_torch_file"},
    },
    "deepspeed/checkpoint/ds_to_universal.py": {
        "zckpt": {
            *(
                "CheckpointInputError",
                "open_checkpoint",
                "interchange.ForeignCheckpoint",
                "interchange.detect_format",
            ),
            *("interchange.export_universal", "interchange.read_deepspeed"),
        },
    },
    "checkpoint/restore.py": {
        "zckpt": {"CheckpointStateError", "MemoryCheckpoint", "Node", "rng"},
        "zpartition": {"Shard", "make_state"},
    },
    "checkpoint/consensus.py": {
        "zckpt": {
            *("find", "Checkpoint", "MemoryCheckpoint", "interchange"),
            *("interchange.ForeignCheckpoint", "interchange.detect_format"),
            "interchange.read_deepspeed_together",
            *("CheckpointError", "CheckpointMismatch", "CheckpointNotFound", "CheckpointStateError", "Node"),
        },
        "zcomm": {"CollectiveFailed", "all_gather_object", "group_rank", "group_size", "this_host"},
    },
}

# Files that may touch private parts of torch; each has a fallback and a test that fails on a torch without them.
MAY_USE_PRIVATE_TORCH = {"_compat.py"}

each_package = pytest.mark.parametrize("package", repo.PACKAGES)


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(repo.ROOT)}:{line}"


def all_imports(package: str) -> list[tuple[Path, sources.Import]]:
    return [(path, item) for path in repo.source_modules(package) for item in sources.imports(path)]


@each_package
def test_a_package_imports_only_what_the_table_allows(package: str) -> None:
    allowed = MAY_IMPORT[package] | set(sys.stdlib_module_names) | {package}
    bad = [
        f"{place(path, item.line)} {item.module}" for path, item in all_imports(package) if item.top not in allowed
    ]
    assert not bad, "\n".join([f"{package} may import {sorted(MAY_IMPORT[package])}, and not:", *bad])


@each_package
def test_heavy_and_optional_libraries_are_imported_inside_functions(package: str) -> None:
    found = [(path, item) for path, item in all_imports(package) if item.at_import and item.top in ONLY_LAZILY]
    bad = [f"{place(path, item.line)} {item.module}" for path, item in found]
    assert not bad, "\n".join(["import these inside the function that needs them:", *bad])


@each_package
def test_a_package_uses_only_the_public_names_of_the_others(package: str) -> None:
    bad = []
    for path in repo.source_modules(package):
        for other in sorted(set(repo.PACKAGES) - {package}):
            hidden = sources.uses(path, other) - public_names(other)
            bad += [f"{path.relative_to(repo.ROOT)} {other}.{name}" for name in sorted(hidden)]
    assert not bad, "\n".join(["not in an `__all__` of the package that has it:", *bad])


def public_names(package: str) -> set[str]:
    """Return the names of `__all__`, with those of public sub-packages: {"init", "testing", "testing.run_ranks"}."""
    root = repo.source_folder(package)
    found = set(importlib.import_module(package).__all__)
    for path in root.glob("*/__init__.py"):
        names = sources.public_names(path) or []
        found |= {path.parent.name, *(f"{path.parent.name}.{name}" for name in names)} if names else set()
    return found


def test_only_the_assembler_composes_the_five_packages() -> None:
    root = repo.source_folder("zengine")
    bad = []
    for path in repo.source_modules("zengine"):
        for package in sorted(set(repo.PACKAGES) - {"zengine"} if path != root / ASSEMBLER else ()):
            extra = sources.uses(path, package, with_types=False) - may_use(
                path.relative_to(root).as_posix(), package
            )
            bad += [f"{path.relative_to(repo.ROOT)} {package}.{name}" for name in sorted(extra)]
    assert not bad, "\n".join([f"{ASSEMBLER} must hand these over, or the table must name them:", *bad])


def may_use(place: str, package: str) -> set[str]:
    """Return the names of `package` that the file of zengine at `place` may use at run time."""
    tables = [
        table for key, table in ZENGINE_MAY_USE.items() if place == key or place.startswith(key.rstrip("/") + "/")
    ]
    return {name for table in tables for name in table.get(package, ())}


@each_package
def test_private_parts_of_torch_are_touched_in_compatibility_files_only(package: str) -> None:
    bad = []
    for path in repo.source_modules(package):
        if path.name in MAY_USE_PRIVATE_TORCH:
            continue
        named = [(f"{item.module}.{item.name}", item.line) for item in sources.imports(path) if item.top == "torch"]
        dotted = [(name, line) for name, line in sources.dotted_names(path) if name.startswith(("torch.", "dist."))]
        bad += [
            f"{place(path, line)} {name}" for name, line in named + dotted if any(map(is_private, name.split(".")))
        ]
    assert not bad, "\n".join([f"move these to one of {sorted(MAY_USE_PRIVATE_TORCH)}:", *bad])


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


# Dependencies of an optional dependency, imported only with it.
COMES_WITH_OPTIONAL = {"zoptim": {"numpy"}, "zprecision": {"numpy"}}  # CuPy's
# Imports of compiled modules.
NEEDED_BY_EXTENSIONS = {"zcomm": {"cffi"}, "zprecision": {"cffi"}, "zoptim": {"cffi"}}


@each_package
def test_the_declared_dependencies_are_the_imported_ones(package: str) -> None:
    declared = {re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0] for line in repo.declared_dependencies(package)}
    tops = {item.top for _, item in all_imports(package)} & (MAY_IMPORT[package] - OPTIONAL)
    tops -= COMES_WITH_OPTIONAL.get(package, set())
    imported = (
        {repo.DISTRIBUTIONS.get(top, top) for top in tops} | {"torch"} | NEEDED_BY_EXTENSIONS.get(package, set())
    )
    assert declared == imported, f"only declared: {declared - imported}; only imported: {imported - declared}"


def test_packages_depend_on_earlier_ones_only_and_leaves_on_none() -> None:
    for position, package in enumerate(repo.PACKAGES):
        assert not MAY_IMPORT[package] & set(repo.PACKAGES[position:])
    leaves = [name for name in repo.PACKAGES if not MAY_IMPORT[name] & set(repo.PACKAGES)]
    assert leaves == ["zcomm", "zprecision", "zoptim", "zckpt"]
