"""Sections of features that do not exist here.

One that would change what is trained is accepted while it is off and rejected while it is on; one that would not (a
compiler) is ignored.  Their keys are listed, so that a misspelt key is found even in a section that is off.
"""

from __future__ import annotations

from zengine.config.grammar.kinds import (
    COUNT,
    LIST,
    MAPPING,
    TEXT,
    TRUTH,
    null_or,
)
from zengine.config.grammar.table import (
    Row,
    Section,
    all_ignored,
    ignored,
    rejected,
)

REMOVED_UPSTREAM = ", which DeepSpeed removed in 0.19.8,"  # precedes "is not available yet"


GRAPH_HARVESTING = ignored(TRUTH, False, why='torch.compile(mode="reduce-overhead") records CUDA graphs')

QUANTIZED_WEIGHTS = Section(
    keys={
        "post_init_quant": ignored(
            null_or(MAPPING, {}),
            {},
            why="deepspeed.compression.inference.quantization reads it, in _init_group_wise_weight_quantization()",
        ),
        "quantized_initialization": rejected(
            "weights that zero.Init quantizes are not supported",
            "Use post_init_quant, or deepspeed.init_inference(model, quant={...}).",
        ),
    }
)

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
    "graph_harvesting": GRAPH_HARVESTING,
    "weight_quantization": QUANTIZED_WEIGHTS,
    **INFERENCE,
}
