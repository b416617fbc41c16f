"""Keys that split a model over ranks: tensor, expert and pipeline parallelism, activation checkpointing."""

from __future__ import annotations

from typing import Any

import attrs

from zengine.config.grammar.kinds import (
    ANYTHING,
    COUNT,
    DTYPE,
    LIST,
    MAPPING,
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
    renamed,
    section,
    section_of,
    setting,
)

GIVEN_AS_ARGUMENT = "neighbouring ranks split a model unless initialize(mesh=, mpu=) places them"

PRESETS = ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3")


@attrs.frozen(kw_only=True)
class TensorRanks:
    """tensor_parallel.tp: DeepSpeed's second key for the degree."""

    tp_size: int = setting(whole(1), 1, "same as autotp_size")
    tp_grain_size: int = setting(
        whole(1), 1, "granularity of the split of layers without heads, in columns", plan="grain"
    )


TENSOR_RANKS: dict[str, Row] = {
    "mpu": ignored(ANYTHING, None, why=GIVEN_AS_ARGUMENT),
    "tp_group": ignored(ANYTHING, None, why=GIVEN_AS_ARGUMENT),
}


@attrs.frozen(kw_only=True)
class LayerSpec:
    """Member of tensor_parallel.partition_config.layer_specs; zpartition.tensor.read_layer_specs reads it."""

    patterns: tuple[Any, ...] = setting(LIST, (), "regular expressions for names of weights")
    partition_type: str = setting(
        choice("column", "row", "skip", fold=str.lower), "column", "dimension of the weight that is split"
    )
    shape: tuple[Any, ...] = setting(LIST, (), "[n, -1]: n equal blocks of rows; [[a, b], -1]: blocks of these sizes")
    partition_dim: int = setting(COUNT, 0, "dimension of `shape` that is split; 0")
    model_types: tuple[Any, ...] = setting(null_or(LIST, ()), (), "model types that the spec applies to; empty: all")
    gather_output: bool = setting(TRUTH, False, "all-gather the outputs of a column layer")


LAYER_SPEC: dict[str, Row] = {
    "grad_allreduce": ignored(TRUTH, True, why="gradients are summed where required"),
}


def _values(**members: LayerSpec) -> tuple[LayerSpec, ...]:
    """Return specs that were given under names."""
    return tuple(members.values())


@attrs.frozen(kw_only=True)
class PartitionConfig:
    """tensor_parallel.partition_config: split of layers, by name."""

    use_default_specs: bool = setting(
        TRUTH,
        True,
        "split layers without a spec by the model's own plan, an inferred one or names of layers",
        plan="completes",
    )
    strict_mode: bool = setting(
        TRUTH, False, "reject a model with linear layers that neither a spec nor the plan covers", plan="is_strict"
    )
    layer_specs: tuple[LayerSpec, ...] = named_members(section_of(LayerSpec, LAYER_SPEC), _values, in_order=True)


PARTITION_CONFIG: dict[str, Row] = {
    "tp_size": ignored(whole(1), 1, why="autotp_size sets the degree"),
    "embedding_partition_dim": ignored(COUNT, why="embeddings are split by vocabulary"),
    "lm_head_patterns": ignored(LIST, why="the output layer is found in the plan"),
}


@attrs.frozen(kw_only=True)
class TensorParallel:
    """tensor_parallel: layers split over ranks that process the same samples."""

    autotp_size: int = setting(COUNT, 0, "tensor-parallel degree; 0 and 1: layers are not split")
    tp: TensorRanks = section(TensorRanks, TENSOR_RANKS)
    partition_config: PartitionConfig = section(PartitionConfig, PARTITION_CONFIG)
    vocab_parallel_lm_head: bool = setting(
        null_or(TRUTH, False),
        False,
        "also split embeddings and the output layer, by an inferred plan or names",
        plan="splits_vocabulary",
    )


PLAN_IS_INFERRED = "the plan is read off the model, inferred, or follows the names of its layers"
NO_KERNELS = "inference kernels have no place in training"

TENSOR_PARALLEL: dict[str, Row] = {
    "tp_overlap_comm": ignored(
        TRUTH, False, why="layers that read the same tensor share one all-reduce in backward, which is waited for"
    ),
    "preset_model": ignored(null_or(choice(*PRESETS), None), None, why=PLAN_IS_INFERRED),
    "dtype": ignored(DTYPE, why='the sections "bf16" and "fp16" decide'),
    "keep_module_on_host": ignored(TRUTH, False, why="layers are split where they are, before they move"),
    "vocab_parallel_ce_backend": ignored(
        choice("torch", "liger"), "torch", why="torch computes the cross-entropy over a split vocabulary"
    ),
    "injection_policy_tuple": ignored(null_or(LIST, None), None, why=PLAN_IS_INFERRED),
    "replace_with_kernel_inject": ignored(TRUTH, False, why=NO_KERNELS),
    "kernel_inject": ignored(TRUTH, False, why=NO_KERNELS),
    "tensor_parallel": renamed(MAPPING, "tp", what="another name"),
}

ROUTER_DECIDES = "the model's own router and experts compute"

EXPERT_PARALLEL: dict[str, Row] = {
    "expert_tensor_parallel_size": ignored(
        whole(1),
        1,
        why="experts of another library's block stay whole; MoE(enable_expert_tensor_parallelism=True) splits them",
    ),
    "load_balance_coeff": fixed(
        ANYTHING,
        None,
        0,
        why="a balancing bias in another library's router",
        hint="Leave it out, or call layer.gate.balance_by_bias(rate) on MoE layers.",
    ),
    "comm_backend": ignored(TEXT, "comm", why="torch.distributed exchanges the tokens"),
    "router_pattern": ignored(null_or(TEXT, ""), "", why="the model's own routers are kept"),
    "expert_pattern": ignored(
        null_or(TEXT, ""), "", why="stacks and lists of experts are found; moe_layer_pattern selects layers"
    ),
    "preset_model": ignored(null_or(TEXT, ""), "", why="stacks and lists of experts are found in the model"),
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
        comm_qp_margin=COUNT,
        comm_max_tokens_per_rank=COUNT,
        validate_folding_routing=TRUTH,
        async_split_plan=TRUTH,
        expert_activation=ANYTHING,
        shared_experts_gate_pattern=ANYTHING,
        combine_impl=ANYTHING,
        row_weighting_impl=ANYTHING,
        gate_up_impl=ANYTHING,
    ),
}


@attrs.frozen(kw_only=True)
class ExpertParallel:
    """expert_parallel: experts of MoE layers distributed over ranks that process different samples."""

    enabled: bool = setting(TRUTH, False, "distribute the experts; MoE layers with an ep_size do not need it")
    autoep_size: int = setting(
        whole(1), 1, "expert-parallel degree: ranks that together hold the experts of a layer", plan="degrees.expert"
    )
    moe_layer_pattern: str | None = setting(
        null_or(TEXT, ""),
        "",
        "regular expression for the paths of the MoE layers; empty: all",
        plan="expert_layers",
    )


def _read_stages(value: object) -> int:
    return 0 if value == "auto" else int(literal(COUNT, "auto").read(value))


STAGES = ValueKind('a whole number >= 1, or "auto"', _read_stages, literal(COUNT, "auto").json_schema)

PIPELINE: dict[str, Row] = {
    "use_reentrant": ignored(TRUTH, True, why="layers are recomputed without re-entering autograd"),
}


OF_THE_MODULE = "(the PipelineModule's)"


@attrs.frozen(kw_only=True)
class Pipeline:
    """pipeline: settings of a PipelineModule, which is partitioned before the config is read."""

    stages: int = setting(
        STAGES, 0, 'pipeline-parallel degree; "auto" (0): that of the PipelineModule', empty=OF_THE_MODULE
    )
    partition: str = setting(
        null_or(TEXT, ""), "", "expected partition_method; empty: not checked", empty=OF_THE_MODULE
    )
    seed_layers: bool = setting(
        TRUTH, False, "expected seed_layers of the PipelineModule; another one there is logged"
    )
    activation_checkpoint_interval: int = setting(
        whole(0),
        0,
        "layers per checkpointed segment, recomputed in backward; 0: that of the PipelineModule",
        empty=OF_THE_MODULE,
    )
    # DeepSpeed's defaults are true.
    pipe_partitioned: bool = setting(TRUTH, False, "each tensor rank sends its part of a stage's activations")
    grad_partitioned: bool = setting(TRUTH, False, "each tensor rank sends its part of a stage's gradients")
    # Ours: DeepSpeed has 1F1B.
    schedule: str = setting(
        choice("1f1b", "gpipe", "interleaved", "zero_bubble"),
        "1f1b",
        "pipeline schedule; 1f1b with several stages on a rank: interleaved",
    )


@attrs.frozen(kw_only=True)
class ActivationCheckpointing:
    """activation_checkpointing: storage of the inputs of checkpointed blocks."""

    partition_activations: bool = setting(TRUTH, False, "split the inputs over the tensor-parallel ranks")
    cpu_checkpointing: bool = setting(TRUTH, False, "keep the inputs in host memory")
    contiguous_memory_optimization: bool = setting(TRUTH, False, "keep the inputs in one buffer, allocated once")
    number_checkpoints: int = setting(null_or(COUNT, 0), 0, "number of inputs of each size in that buffer")
    synchronize_checkpoint_boundary: bool = setting(
        TRUTH, False, "synchronize the device before and after each block"
    )
    profile: bool = setting(TRUTH, False, "log the time of each block's forward and recomputation")
    # Ours: with DeepSpeed the model's code chooses the blocks.
    modules: tuple[str, ...] = setting(
        NAMES, (), "name patterns of the blocks to checkpoint", empty="(those in the model's code)"
    )


@attrs.frozen(kw_only=True, slots=False)
class ParallelKeys:
    """Sections of the top level that split a model over ranks."""

    activation_checkpointing: ActivationCheckpointing = section(ActivationCheckpointing)
    tensor_parallel: TensorParallel = section(TensorParallel, TENSOR_PARALLEL)
    expert_parallel: ExpertParallel = section(ExpertParallel, EXPERT_PARALLEL, switch="enabled")
    pipeline: Pipeline = section(Pipeline, PIPELINE)
