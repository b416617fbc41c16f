"""Known sections that split or rewrite the model: parallel dimensions, compilation.

What does not exist here yet accepts the values that leave it out and refuses the others.
"""

from __future__ import annotations

from zengine.config import parallel_settings as parallel
from zengine.config import pipeline_settings as pipeline
from zengine.config.kinds import ANYTHING, DTYPE, LIST, TEXT, TRUTH, choice, null_or, whole
from zengine.config.table import Section, all_without_effect, honoured, limited, muted, no_effect, switched

COUNT = whole(0)

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

ROUTER_DECIDES = "the model's own router and experts compute, wherever the experts are"
EXPERT_PARALLEL = honoured(
    parallel.ExpertParallel,
    {
        "expert_tensor_parallel_size": limited(
            whole(1),
            1,
            why="splitting each expert of a block that is not ours",
            instead="Set it to 1, or build the layers as MoE(..., enable_expert_tensor_parallelism=True).",
        ),
        "load_balance_coeff": limited(
            ANYTHING,
            None,
            0,
            why="a balancing bias in routers that are not ours",
            instead="Leave it out, or call layer.gate.balance_by_bias(rate) on MoE layers.",
        ),
        "comm_backend": limited(TEXT, "comm", why="another exchange of tokens than torch.distributed's"),
        "router_pattern": limited(
            null_or(TEXT, ""), "", why="replacing routers", instead="Leave it out: routers stay as they are."
        ),
        "expert_pattern": limited(
            null_or(TEXT, ""),
            "",
            why="naming experts by a pattern",
            instead="Leave it out: stacks of experts are found by their shapes (moe_layer_pattern chooses layers).",
        ),
        "preset_model": no_effect(null_or(TEXT, ""), "", why="experts are found by their shapes, in any model"),
        **all_without_effect(
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
    },
    switch="enabled",
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
