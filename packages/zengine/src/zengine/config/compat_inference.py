"""Keys of the inference config: they are known, so that one found in a training config is explained."""

from __future__ import annotations

from zengine.config.table import Entry, refused

_WHY = "a key of the inference config, which deepspeed.init_inference() takes"
_REMOVE = "Remove it from the training config."
_NAMES = (
    "replace_with_kernel_inject enable_cuda_graph use_triton triton_autotune triangular_masking moe "
    "keep_module_on_host quant base_dir set_empty_params save_mp_checkpoint_path checkpoint_config return_tuple "
    "training_mp_size injection_policy max_out_tokens min_out_tokens transposed_mode mp_size mpu ep_size "
    "moe_experts moe_type replace_method"
)

INFERENCE: dict[str, Entry] = {
    **{name: refused(_WHY, _REMOVE) for name in _NAMES.split()},
    "dtype": refused(_WHY, 'For training write "bf16": {"enabled": true} or "fp16": {"enabled": true}.'),
    "zero": refused(_WHY, 'For training write "zero_optimization".'),
}
