"""`deepspeed.compression.inference`: the path of ZeRO-Inference's quantization."""
