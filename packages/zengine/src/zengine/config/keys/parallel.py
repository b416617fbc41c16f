"""Keys that split a model over ranks: tensor, expert and pipeline parallelism, activation checkpointing."""

from __future__ import annotations

from typing import Any

import attrs

from zengine.config.grammar.kinds import (
    ANYTHING,
    COUNT,
    DTYPE,
    LIST,
    NAMES,
    TEXT,
    TRUTH,
    ValueKind,
    choice,
    literal,
    null_or,
    whole,
)
from zengine.config.grammar.table import (
    Row,
    all_ignored,
    fixed,
    ignored,
    named_members,
    section,
    section_of,
    setting,
)

GIVEN_AS_ARGUMENT = "process groups are arguments of initialize(), mesh= or mpu=. Groups in a config"

PRESETS = ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3")


@attrs.frozen(kw_only=True)
class TensorRanks:
    """tensor_parallel.tp: DeepSpeed's second way to say the size."""

    tp_size: int = setting(whole(1), 1, "the same as autotp_size")
    tp_grain_size: int = setting(whole(1), 1, "columns that stay together where there are no heads", plan="grain")


TENSOR_RANKS: dict[str, Row] = {
    "mpu": fixed(ANYTHING, None, why=GIVEN_AS_ARGUMENT, hint="Leave it out, and pass mpu=."),
    "tp_group": fixed(ANYTHING, None, why=GIVEN_AS_ARGUMENT, hint="Leave it out, and pass mesh=."),
}


@attrs.frozen(kw_only=True)
class LayerSpec:
    """A member of tensor_parallel.partition_config.layer_specs; zpartition.tensor.read_layer_specs reads it."""

    patterns: tuple[Any, ...] = setting(LIST, (), "regular expressions over names of weights")
    partition_type: str = setting(choice("column", "row", "skip"), "column", "which side of the weight is shared out")
    shape: tuple[Any, ...] = setting(LIST, (), "[n, -1]: n equal blocks of rows; [[a, b], -1]: blocks of these sizes")
    partition_dim: int = setting(COUNT, 0, "of `shape`; 0")
    model_types: tuple[Any, ...] = setting(null_or(LIST, ()), (), "only for models of these types; none: for all")
    gather_output: bool = setting(TRUTH, False, "every rank gets all outputs of a column layer")


LAYER_SPEC: dict[str, Row] = {
    "grad_allreduce": ignored(TRUTH, True, why="gradients are summed where they have to be"),
}


def _values(**members: LayerSpec) -> tuple[LayerSpec, ...]:
    """Specs that were given under names."""
    return tuple(members.values())


@attrs.frozen(kw_only=True)
class PartitionConfig:
    """tensor_parallel.partition_config: layers and how they are split, by name."""

    use_default_specs: bool = setting(
        TRUTH, True, "layers that no spec names are split as the model itself suggests", plan="completes"
    )
    strict_mode: bool = setting(TRUTH, False, "a linear layer that nothing names is an error", plan="is_strict")
    layer_specs: tuple[LayerSpec, ...] = named_members(section_of(LayerSpec, LAYER_SPEC), _values, in_order=True)


@attrs.frozen(kw_only=True)
class TensorParallel:
    """tensor_parallel: layers split over ranks that see the same samples."""

    autotp_size: int = setting(COUNT, 0, "ranks that share the layers of one copy; 0 and 1: every rank has all")
    tp: TensorRanks = section(TensorRanks, TENSOR_RANKS)
    partition_config: PartitionConfig = section(PartitionConfig)
    vocab_parallel_lm_head: bool = setting(
        null_or(TRUTH, False),
        False,
        "split embeddings and the output layer of an inferred plan too",
        plan="splits_vocabulary",
    )


TENSOR_PARALLEL: dict[str, Row] = {
    "tp_overlap_comm": ignored(TRUTH, False, why="messages of split layers are waited for"),
    "preset_model": ignored(
        null_or(choice(*PRESETS), None), None, why="plans are read off the model itself, whatever its family"
    ),
    "dtype": ignored(DTYPE, why='the sections "bf16" and "fp16" decide'),
    "keep_module_on_host": fixed(TRUTH, False, why="splitting a model before it is on the device"),
    "vocab_parallel_ce_backend": fixed(
        choice("torch", "liger"), "torch", why="liger's cross-entropy over a split vocabulary"
    ),
}

ROUTER_DECIDES = "the model's own router and experts compute, wherever the experts are"

EXPERT_PARALLEL: dict[str, Row] = {
    "expert_tensor_parallel_size": fixed(
        whole(1),
        1,
        why="splitting each expert of a block that is not ours",
        hint="Set it to 1, or build the layers as MoE(..., enable_expert_tensor_parallelism=True).",
    ),
    "load_balance_coeff": fixed(
        ANYTHING,
        None,
        0,
        why="a balancing bias in routers that are not ours",
        hint="Leave it out, or call layer.gate.balance_by_bias(rate) on MoE layers.",
    ),
    "comm_backend": fixed(TEXT, "comm", why="another exchange of tokens than torch.distributed's"),
    "router_pattern": fixed(
        null_or(TEXT, ""), "", why="replacing routers", hint="Leave it out: routers stay as they are."
    ),
    "expert_pattern": fixed(
        null_or(TEXT, ""),
        "",
        why="naming experts by a pattern",
        hint="Leave it out: stacks of experts are found by their shapes (moe_layer_pattern chooses layers).",
    ),
    "preset_model": ignored(null_or(TEXT, ""), "", why="experts are found by their shapes, in any model"),
    **all_ignored(
        ROUTER_DECIDES,
        use_grouped_mm=TRUTH,
        disable_triton_grouped_mm=TRUTH,
        score_func=ANYTHING,
        score_apply=ANYTHING,
        route_norm=ANYTHING,
        route_scale=ANYTHING,
        top_k=ANYTHING,
        routed_scaling_factor=ANYTHING,
        num_expert_groups=ANYTHING,
        num_limited_groups=ANYTHING,
        expert_w1=ANYTHING,
        expert_w2=ANYTHING,
        expert_w3=ANYTHING,
        num_experts_attr=ANYTHING,
        top_k_attr=ANYTHING,
        has_shared_experts=ANYTHING,
        shared_experts_pattern=ANYTHING,
        comm_num_sm=COUNT,
        combine_impl=ANYTHING,
        row_weighting_impl=ANYTHING,
        gate_up_impl=ANYTHING,
    ),
}


@attrs.frozen(kw_only=True)
class ExpertParallel:
    """expert_parallel: the experts of MoE layers shared out over ranks that see different samples."""

    enabled: bool = setting(TRUTH, False, "share the experts out; MoE layers made with an ep_size are without it")
    autoep_size: int = setting(
        whole(1), 1, "ranks that hold the experts of one layer together", plan="degrees.expert"
    )
    moe_layer_pattern: str | None = setting(
        null_or(TEXT, ""),
        "",
        "regular expression found in the paths of the layers to share out; empty: all",
        plan="expert_layers",
    )


def _read_stages(value: object) -> int:
    return 0 if value == "auto" else int(literal(COUNT, "auto").read(value))


STAGES = ValueKind('a whole number >= 1, or "auto"', _read_stages, literal(COUNT, "auto").json_schema)

PIPELINE: dict[str, Row] = {
    "pipe_partitioned": ignored(TRUTH, True, why="stages hand whole activations to each other"),
    "grad_partitioned": ignored(TRUTH, True, why="stages hand whole gradients to each other"),
    "use_reentrant": ignored(TRUTH, True, why="layers are computed again without re-entering autograd"),
}


OF_THE_MODULE = "(the PipelineModule's)"


@attrs.frozen(kw_only=True)
class Pipeline:
    """pipeline: of a model that is a PipelineModule, which is cut before there is a config."""

    stages: int = setting(
        STAGES, 0, 'ranks along the model\'s depth; "auto" (0): as the PipelineModule was made', empty=OF_THE_MODULE
    )
    partition: str = setting(
        null_or(TEXT, ""), "", "what its partition_method has to be; empty: whatever it is", empty=OF_THE_MODULE
    )
    seed_layers: bool = setting(TRUTH, False, "whether its layers have seeds of their own; checked where it is given")
    activation_checkpoint_interval: int = setting(
        whole(0),
        0,
        "layers that are computed again together in backward; 0: as the PipelineModule says",
        empty=OF_THE_MODULE,
    )
    # Ours: DeepSpeed has 1F1B.
    schedule: str = setting(
        choice("1f1b", "gpipe", "interleaved", "zero_bubble"), "1f1b", "in which order micro-batches are worked on"
    )


@attrs.frozen(kw_only=True)
class ActivationCheckpointing:
    """activation_checkpointing: how blocks that are checkpointed keep their inputs."""

    partition_activations: bool = setting(TRUTH, False, "each tensor rank keeps a part of what all of them have")
    cpu_checkpointing: bool = setting(TRUTH, False, "they wait in memory of the host")
    contiguous_memory_optimization: bool = setting(TRUTH, False, "in one piece of memory, made at the first")
    number_checkpoints: int = setting(null_or(COUNT, 0), 0, "how many inputs of a size that piece holds")
    synchronize_checkpoint_boundary: bool = setting(TRUTH, False, "wait for the device before and after each block")
    profile: bool = setting(TRUTH, False, "log the time of each block, forwards and again")
    # Ours: with DeepSpeed the model's code says which.
    modules: tuple[str, ...] = setting(
        NAMES, (), "blocks that are checkpointed, by patterns of their names", empty="(those that the model says)"
    )


@attrs.frozen(kw_only=True, slots=False)
class ParallelKeys:
    """Sections of the top level that split a model over ranks."""

    activation_checkpointing: ActivationCheckpointing = section(ActivationCheckpointing)
    tensor_parallel: TensorParallel = section(TensorParallel, TENSOR_PARALLEL)
    expert_parallel: ExpertParallel = section(ExpertParallel, EXPERT_PARALLEL, switch="enabled")
    pipeline: Pipeline = section(Pipeline, PIPELINE)
