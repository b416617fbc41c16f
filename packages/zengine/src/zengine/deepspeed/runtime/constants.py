"""`deepspeed.runtime.constants`: constants for config keys."""

from __future__ import annotations

TRAIN_BATCH_SIZE = "train_batch_size"
TRAIN_MICRO_BATCH_SIZE_PER_GPU = "train_micro_batch_size_per_gpu"
GRADIENT_ACCUMULATION_STEPS = "gradient_accumulation_steps"
GRADIENT_CLIPPING = "gradient_clipping"
OPTIMIZER = "optimizer"
SCHEDULER = "scheduler"
TYPE = "type"
FP16 = "fp16"
BFLOAT16 = "bf16"
BFLOAT16_OLD = "bfloat16"
ZERO_OPTIMIZATION = "zero_optimization"
STEPS_PER_PRINT = "steps_per_print"
WALL_CLOCK_BREAKDOWN = "wall_clock_breakdown"
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
ROUTE_TRAIN = "train"
ROUTE_PREDICT = "predict"
ROUTE_EVAL = "eval"
