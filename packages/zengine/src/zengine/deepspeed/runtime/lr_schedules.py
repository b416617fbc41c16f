"""`deepspeed.runtime.lr_schedules`: zoptim's schedules and DeepSpeed's names of them."""

from __future__ import annotations

import argparse

from zoptim import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "LR_RANGE_TEST",
    "ONE_CYCLE",
    "VALID_LR_SCHEDULES",
    "WARMUP_COSINE_LR",
    "WARMUP_DECAY_LR",
    "WARMUP_LR",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
]

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule NAME` and `--warmup_num_steps N`; a schedule's other parameters belong in the config."""
    group = parser.add_argument_group("Convergence Tuning", "learning-rate schedule")
    group.add_argument(f"--{LR_SCHEDULE}", choices=VALID_LR_SCHEDULES, default=None, help="name of the schedule")
    group.add_argument("--warmup_num_steps", type=int, default=1000, metavar="N", help="updates of the warm-up")
    return parser
