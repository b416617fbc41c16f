"""Sections of features that do not exist here.

One that would change what is trained is accepted while it is off and rejected while it is on; one that would not (a
compiler, a tuner) is ignored.  Their keys are listed, so that a misspelt key is found even in a section that is off.
"""

from __future__ import annotations

from zengine.config.grammar.kinds import (
    ANYTHING,
    COUNT,
    LIST,
    MAPPING,
    TEXT,
    TRUTH,
    ValueKind,
    null_or,
    number,
    whole,
)
from zengine.config.grammar.table import (
    Row,
    Section,
    all_ignored,
    checked_only,
    fixed,
    ignored,
    rejected,
    unavailable,
)

REMOVED_UPSTREAM = ", which DeepSpeed removed in 0.19.8,"  # precedes "is not available yet"

EIGENVALUE = unavailable(
    f"the eigenvalue computation{REMOVED_UPSTREAM}",
    checked_only(
        verbose=TRUTH,
        max_iter=whole(1),
        tol=number(0),
        stability=number(0),
        gas_boundary_resolution=whole(1),
        layer_name=TEXT,
        layer_num=COUNT,
        model_name=TEXT,
    ),
)

AUTOTUNING = Section(
    switch="enabled",
    keys={
        "enabled": ignored(TRUTH, False, why="zengine plan finds the largest micro-batch and the best stage"),
        **checked_only(
            fast=TRUTH,
            results_dir=null_or(TEXT, ""),
            exps_dir=null_or(TEXT, ""),
            overwrite=TRUTH,
            start_profile_step=COUNT,
            end_profile_step=COUNT,
            metric=TEXT,
            tuner_type=TEXT,
            early_stopping=COUNT,
            num_trials=COUNT,
            tuner_early_stopping=COUNT,
            tuner_num_trials=COUNT,
            arg_mappings=null_or(MAPPING, None),
            max_train_batch_size=null_or(COUNT, 0),
            min_train_batch_size=COUNT,
            max_train_micro_batch_size_per_gpu=COUNT,
            min_train_micro_batch_size_per_gpu=COUNT,
            num_tuning_micro_batch_sizes=COUNT,
            mp_size=COUNT,
            model_info=null_or(MAPPING, None),
            model_info_path=null_or(TEXT, ""),
            metric_path=null_or(TEXT, ""),
            num_nodes=null_or(ANYTHING, None),
            num_gpus=null_or(ANYTHING, None),
        ),
    },
)

QUANTIZE_TRAINING = unavailable(f"mixture of quantization (MoQ){REMOVED_UPSTREAM}", {}, is_open=True)

SPARSE_ATTENTION = rejected(
    "sparse attention is not supported", "Use torch.nn.attention.flex_attention in the model and remove the section."
)

GRAPH_HARVESTING = ignored(TRUTH, False, why='torch.compile(mode="reduce-overhead") records CUDA graphs')

QUANTIZED_WEIGHTS = rejected("quantized inference weights are not available yet", "Remove the section.")

_COMPILES = "torch.compile on the model or its blocks compiles them"

COMPILE = Section(
    keys={
        "deepcompile": ignored(TRUTH, False, why=_COMPILES),
        "autoep_non_moe": ignored(TRUTH, False, why=_COMPILES),
        "enabled": ignored(TRUTH, False, why=_COMPILES),
        **all_ignored(
            _COMPILES,
            backend=TEXT,
            kwargs=MAPPING,
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
)


def _technique(what: str, shared: dict[str, ValueKind], params: dict[str, ValueKind]) -> Section:
    group = Section(
        keys={
            "params": Section(keys=checked_only(**params)),
            **checked_only(modules=LIST, related_modules=null_or(LIST, ())),
        }
    )
    return Section(
        keys={
            "shared_parameters": Section(
                keys={
                    "enabled": fixed(TRUTH, False, why=what + REMOVED_UPSTREAM),
                    **checked_only(schedule_offset=COUNT, schedule_offset_end=COUNT, **shared),
                },
                switch="enabled",
            ),
            "different_groups": Section(members=(group,)),
        }
    )


LAYER_REDUCTION = unavailable(
    f"layer reduction{REMOVED_UPSTREAM}",
    checked_only(
        keep_number_layer=COUNT,
        module_name_prefix=TEXT,
        teacher_layer=LIST,
        other_module_name=LIST,
    ),
)

WEIGHT_QUANTIZATION = _technique(
    "weight quantization",
    {
        "quantizer_kernel": TRUTH,
        "quantize_groups": COUNT,
        "quantize_verbose": TRUTH,
        "quantization_type": TEXT,
        "rounding": TEXT,
        "quantize_weight_in_forward": TRUTH,
        "fp16_mixed_quantize": ANYTHING,
    },
    {"start_bits": COUNT, "target_bits": COUNT, "quantization_period": COUNT},
)

ACTIVATION_QUANTIZATION = _technique(
    "activation quantization", {"quantization_type": TEXT, "range_calibration": TEXT}, {"bits": COUNT}
)

_RATIO: dict[str, ValueKind] = {"dense_ratio": number(0, 1)}

SPARSE_PRUNING = _technique(
    "sparse pruning",
    {
        "method": TEXT,
        "block_pattern": TEXT,
        "dense_ratio": number(0, 1),
        "excluded_modules": LIST,
        "schedule_offset_stride": COUNT,
    },
    _RATIO,
)

ROW_PRUNING = _technique("row pruning", {"method": TEXT}, _RATIO)

HEAD_PRUNING = _technique("head pruning", {"method": TEXT, "num_heads": COUNT}, _RATIO)

CHANNEL_PRUNING = _technique("channel pruning", {"method": TEXT}, _RATIO)

COMPRESSION_TRAINING = Section(
    keys={
        "layer_reduction": LAYER_REDUCTION,
        "weight_quantization": WEIGHT_QUANTIZATION,
        "activation_quantization": ACTIVATION_QUANTIZATION,
        "sparse_pruning": SPARSE_PRUNING,
        "row_pruning": ROW_PRUNING,
        "head_pruning": HEAD_PRUNING,
        "channel_pruning": CHANNEL_PRUNING,
    }
)

_OF_INFERENCE = "a key of the inference config, which is an argument of deepspeed.init_inference()"

_REMOVE = "Remove it from the training config."

_NAMES = (
    "replace_with_kernel_inject enable_cuda_graph use_triton triton_autotune triangular_masking moe "
    "keep_module_on_host quant base_dir set_empty_params save_mp_checkpoint_path checkpoint_config return_tuple "
    "training_mp_size injection_policy max_out_tokens min_out_tokens transposed_mode mp_size mpu ep_size "
    "moe_experts moe_type replace_method"
)

INFERENCE: dict[str, Row] = {
    **{name: rejected(_OF_INFERENCE, _REMOVE) for name in _NAMES.split()},
    "dtype": rejected(_OF_INFERENCE, 'For training write "bf16": {"enabled": true} or "fp16": {"enabled": true}.'),
    "zero": rejected(_OF_INFERENCE, 'For training write "zero_optimization".'),
}

OTHERS: dict[str, Row] = {
    "compile": COMPILE,
    "eigenvalue": EIGENVALUE,
    "compression_training": COMPRESSION_TRAINING,
    "quantize_training": QUANTIZE_TRAINING,
    "autotuning": AUTOTUNING,
    "sparse_attention": SPARSE_ATTENTION,
    "graph_harvesting": GRAPH_HARVESTING,
    "weight_quantization": QUANTIZED_WEIGHTS,
    **INFERENCE,
}
