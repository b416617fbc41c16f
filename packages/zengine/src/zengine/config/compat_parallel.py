"""Known sections that split or rewrite the model: parallel dimensions, activation checkpoints, compilation.

None exists here yet, so each accepts the values that leave it out and refuses the others.
"""

from __future__ import annotations

from zengine.config import parallel_settings as parallel
from zengine.config.kinds import ANYTHING, DTYPE, LIST, TEXT, TRUTH, literal, null_or, whole
from zengine.config.table import Section, all_without_effect, honoured, limited, muted, no_effect, switched

COUNT = whole(0)
ANY_COUNT = whole(-1)

ACTIVATION_CHECKPOINTING = Section(
    keys={
        "partition_activations": limited(TRUTH, False, why="partitioned activation checkpoints"),
        "cpu_checkpointing": limited(TRUTH, False, why="activation checkpoints on the CPU"),
        "contiguous_memory_optimization": limited(TRUTH, False, why="contiguous activation checkpoints"),
        "number_checkpoints": no_effect(null_or(COUNT, 0), 0, why="it sizes a buffer that is not used"),
        "synchronize_checkpoint_boundary": limited(TRUTH, False, why="synchronising at checkpoint boundaries"),
        "profile": limited(TRUTH, False, why="profiling of activation checkpoints"),
    }
)

TENSOR_PARALLEL_OFF = "tensor parallelism is not available yet"
TENSOR_PARALLEL = honoured(
    parallel.TensorParallel,
    {
        "tp": honoured(
            parallel.TensorRanks,
            all_without_effect(TENSOR_PARALLEL_OFF, tp_grain_size=COUNT, mpu=ANYTHING, tp_group=ANYTHING),
        ),
        "partition_config": Section(
            keys={
                **all_without_effect(TENSOR_PARALLEL_OFF, use_default_specs=TRUTH, strict_mode=TRUTH),
                "layer_specs": Section(
                    each=(
                        Section(
                            keys=all_without_effect(
                                TENSOR_PARALLEL_OFF,
                                patterns=LIST,
                                partition_type=TEXT,
                                shape=LIST,
                                partition_dim=ANY_COUNT,
                                model_types=LIST,
                                gather_output=TRUTH,
                                grad_allreduce=TRUTH,
                            )
                        ),
                    )
                ),
            }
        ),
        **all_without_effect(
            TENSOR_PARALLEL_OFF,
            tp_overlap_comm=TRUTH,
            preset_model=null_or(TEXT, ""),
            dtype=DTYPE,
            keep_module_on_host=TRUTH,
            vocab_parallel_lm_head=ANYTHING,
            vocab_parallel_ce_backend=TEXT,
        ),
    },
)

EXPERT_PARALLEL = switched(
    "expert parallelism",
    muted(
        autoep_size=whole(1),
        expert_tensor_parallel_size=whole(1),
        preset_model=null_or(TEXT, ""),
        use_grouped_mm=TRUTH,
        disable_triton_grouped_mm=TRUTH,
        moe_layer_pattern=ANYTHING,
        router_pattern=ANYTHING,
        expert_pattern=ANYTHING,
        score_func=ANYTHING,
        score_apply=ANYTHING,
        route_norm=ANYTHING,
        route_scale=ANYTHING,
        top_k=ANYTHING,
        routed_scaling_factor=ANYTHING,
        num_expert_groups=ANYTHING,
        num_limited_groups=ANYTHING,
        load_balance_coeff=ANYTHING,
        expert_w1=ANYTHING,
        expert_w2=ANYTHING,
        expert_w3=ANYTHING,
        num_experts_attr=ANYTHING,
        top_k_attr=ANYTHING,
        has_shared_experts=ANYTHING,
        shared_experts_pattern=ANYTHING,
        comm_backend=TEXT,
        comm_num_sm=COUNT,
        combine_impl=ANYTHING,
        row_weighting_impl=ANYTHING,
        gate_up_impl=ANYTHING,
    ),
)

PIPELINE = Section(
    keys={
        "stages": limited(literal(whole(1), "auto"), "auto", 1, why="pipeline parallelism"),
        **all_without_effect(
            "the model has no pipeline stages",
            partition=TEXT,
            seed_layers=TRUTH,
            activation_checkpoint_interval=COUNT,
            pipe_partitioned=TRUTH,
            grad_partitioned=TRUTH,
            use_reentrant=TRUTH,
        ),
    }
)

HYBRID_ENGINE = switched(
    "the hybrid train/generate engine",
    muted(
        max_out_tokens=whole(1),
        inference_tp_size=whole(1),
        release_inference_cache=TRUTH,
        pin_parameters=TRUTH,
        tp_gather_partition_size=whole(1),
        enable_cuda_graph=TRUTH,
    ),
)

COMPILE = Section(
    keys={
        "deepcompile": limited(
            TRUTH, False, why="DeepCompile", instead="Set it to false and use torch.compile on the model."
        ),
        **muted(
            free_activation=TRUTH,
            free_activation_threshold=COUNT,
            offload_activation=TRUTH,
            offload_activation_pin_memory=TRUTH,
            offload_opt_states=TRUTH,
            offload_parameters=TRUTH,
            double_buffer=TRUTH,
            symmetric_memory=TRUTH,
            sync_before_reduce=TRUTH,
            sync_after_reduce=TRUTH,
            sync_before_allgather=TRUTH,
            sync_after_allgather=TRUTH,
            keep_int_input_tensors=TRUTH,
            keep_all_input_tensors=TRUTH,
            debug_log=TRUTH,
            passes=null_or(LIST, ()),
        ),
    },
    switch="deepcompile",
)
