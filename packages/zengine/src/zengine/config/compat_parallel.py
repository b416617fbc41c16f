"""Known sections that split or rewrite the model: parallel dimensions, activation checkpoints, compilation.

What does not exist here yet accepts the values that leave it out and refuses the others.
"""

from __future__ import annotations

from zengine.config import parallel_settings as parallel
from zengine.config import pipeline_settings as pipeline
from zengine.config.kinds import ANYTHING, DTYPE, LIST, TEXT, TRUTH, choice, null_or, whole
from zengine.config.table import Section, honoured, limited, muted, no_effect, switched

COUNT = whole(0)

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

PRESETS = ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3")
GIVEN_AS_ARGUMENT = "process groups are arguments of initialize(), mesh= or mpu=. Groups in a config"
TENSOR_PARALLEL = honoured(
    parallel.TensorParallel,
    {
        "tp": honoured(
            parallel.TensorRanks,
            {
                "mpu": limited(ANYTHING, None, why=GIVEN_AS_ARGUMENT, instead="Leave it out, and pass mpu=."),
                "tp_group": limited(ANYTHING, None, why=GIVEN_AS_ARGUMENT, instead="Leave it out, and pass mesh=."),
            },
        ),
        "partition_config": honoured(
            parallel.PartitionConfig,
            {
                "layer_specs": Section(
                    each=(
                        honoured(
                            parallel.LayerSpec,
                            {
                                "grad_allreduce": no_effect(
                                    TRUTH, True, why="gradients are summed where they have to be"
                                )
                            },
                        ),
                    ),
                    builds=parallel.in_order,
                )
            },
        ),
        "tp_overlap_comm": no_effect(TRUTH, False, why="messages of split layers are waited for"),
        "preset_model": no_effect(
            null_or(choice(*PRESETS), None), None, why="plans are read off the model itself, whatever its family"
        ),
        "dtype": no_effect(DTYPE, why='the sections "bf16" and "fp16" decide'),
        "keep_module_on_host": limited(TRUTH, False, why="splitting a model before it is on the device"),
        "vocab_parallel_ce_backend": limited(
            choice("torch", "liger"), "torch", why="liger's cross-entropy over a split vocabulary"
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

PIPELINE = honoured(pipeline.Pipeline, pipeline.OTHERS)

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
