"""The runs: optimizers and formats that are compared on the main job, and their reference."""

from __future__ import annotations

from typing import Any

import attrs
import torch

__all__ = ["REFERENCE", "RUNS", "Run"]

REFERENCE = "adamw"


@attrs.frozen(kw_only=True)
class Run:
    """One training of the main job's model."""

    key: str
    title: str
    optimizer: str = "AdamW"  # the name in a config; "torch.X" is torch's own
    options: dict[str, Any] = attrs.field(factory=dict)  # added to those of the main job's config
    weights: torch.dtype = torch.float32
    seed: int = 0  # of the initial weights and the order of the text
    as_main_job: bool = True  # starts from the options in the main job's config, which are AdamW's


BF16 = torch.bfloat16

SEEDS = (0, 1, 2)  # of what is seeded

FIRST = (
    Run(key=REFERENCE, title="AdamW, fp32 (reference)"),
    Run(key="bf16", title="AdamW, bf16 states", options={"state_dtype": "bf16"}),
    Run(key="8bit", title="AdamW, 8-bit states", options={"state_dtype": "8bit"}),
    Run(
        key="split",
        title="AdamW, bf16 weights, split master",
        options={"split_master": True},
        weights=BF16,
    ),
)

SECOND = (
    Run(key="torch", title="torch.optim.AdamW, fp32", optimizer="torch.AdamW"),
    Run(
        key="split-8bit",
        title="AdamW, bf16 weights, split master, 8-bit states",
        options={"split_master": True, "state_dtype": "8bit"},
        weights=BF16,
    ),
    Run(
        key="all-bf16",
        title="AdamW, bf16 weights without master, bf16 states",
        options={"state_dtype": "bf16"},
        weights=BF16,
    ),
    Run(
        key="all-bf16-8bit",
        title="AdamW, bf16 weights without master, 8-bit states",
        options={"state_dtype": "8bit"},
        weights=BF16,
    ),
    Run(key="torch-bf16", title="torch.optim.AdamW, bf16 weights and states", optimizer="torch.AdamW", weights=BF16),
    Run(
        key="lion",
        title="Lion, fp32",
        optimizer="Lion",
        options={"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.3},
        as_main_job=False,
    ),
    Run(
        key="lion-8bit",
        title="Lion, 8-bit states",
        optimizer="Lion",
        options={"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.3, "state_dtype": "8bit"},
        as_main_job=False,
    ),
    Run(
        key="lamb",
        title="LAMB, fp32",
        optimizer="LAMB",
        options={"lr": 2e-2, "betas": (0.9, 0.95), "weight_decay": 0.1},
        as_main_job=False,
    ),
    Run(
        key="muon",
        title="Muon, fp32",
        optimizer="Muon",
        options={"lr": 4e-2, "adam_lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1},
        as_main_job=False,
    ),
    Run(
        key="adafactor",
        title="Adafactor",
        optimizer="Adafactor",
        options={"lr": 1e-2, "weight_decay": 0.0},
        as_main_job=False,
    ),
)

# Formats are trained from several initial weights each, to separate their effect from chance; other runs once.
RUNS = (*(attrs.evolve(run, seed=seed) for seed in SEEDS for run in FIRST), *SECOND)
