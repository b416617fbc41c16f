"""Rows of the table: every placement of weights, gradients and optimizer state.

To add a tier (offload to a host or a disk, shard groups, secondary shards, quantized messages), add one line to
`ROWS`. The tests train it in every scenario, world, accumulation and dtype, and compare it with the oracle, with the
first row that reduces gradients as often bit by bit, with the predicted messages, and with `zpartition.plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from zpartition import Offload, Speculation, Tier

BUCKET_NUMEL = 1300  # several buckets for the models here
UNIT_NUMEL = 1300  # a block is a unit

_ALL_SHARDED = {"stage3_unit_size": UNIT_NUMEL, "stage3_param_persistence_threshold": 0}
_ALL_STAY = {**_ALL_SHARDED, "stage3_max_live_parameters": 1_000_000}


@attrs.frozen(kw_only=True)
class Messages:
    """Messages of a row for each bucket, without labels."""

    gradients: str = "reduce_scatter"  # the collective of each reduction
    weights_per_step: int = 1  # gathers of each bucket after an update
    weights_per_forward: int = 0  # gathers of each unit per micro-step, in forward
    weights_per_backward: int = 0  # and in backward, for weights that autograd needs
    share: float = 1.0  # bytes of a step with one micro-step, in units of an all-reduce of all weights


REPLICATED = Messages(gradients="all_reduce", weights_per_step=0)
SHARDED = Messages()
KEPT = Messages(weights_per_step=0, weights_per_forward=1)
REGATHERED = Messages(weights_per_step=0, weights_per_forward=1, weights_per_backward=1, share=1.5)


@attrs.frozen
class Row:
    """One line of the table."""

    name: str
    zero: Mapping[str, Any]  # the "zero_optimization" section of the config
    messages: Messages | None = None  # None: not checked
    same_bits: bool = True  # True: results equal the first such row's bit by bit (quantized messages: False)
    tolerance: float = 0.0  # relative, on losses, beyond what the dtype allows (0 for everything exact)
    worlds: tuple[int, ...] = (1, 2, 4)  # supported world sizes (shard groups of two: (2, 4), for example)
    config: Mapping[str, Any] = attrs.field(factory=dict)  # other sections of the config
    offload: Offload | None = None  # replaces the config's, which has no host tier on a CPU

    @property
    def reduces_once(self) -> bool:
        """True if gradients are reduced once per step, however many micro-steps it has."""
        return self.zero["stage"] < 2 and self.zero.get("reduce_at") != "micro_step"

    def writing_to(self, folder: str) -> Row:
        """Return the same row with its disk tier in `folder`."""
        moved = {
            key: {**value, "nvme_path": folder} if isinstance(value, dict) and "nvme_path" in value else value
            for key, value in self.zero.items()
        }
        return attrs.evolve(self, zero=moved)


def _nvme(section: str) -> dict[str, Any]:
    return {section: {"device": "nvme", "nvme_path": "a folder"}}  # see Row.writing_to


ROWS = (
    Row("replicated", {"stage": 0}, REPLICATED),  # the first: others are compared with it
    Row("stage 1", {"stage": 1}, SHARDED),
    Row("replicated, each micro-step", {"stage": 0, "reduce_at": "micro_step"}, REPLICATED),
    Row("stage 1, each micro-step", {"stage": 1, "reduce_at": "micro_step"}, SHARDED),
    Row("stage 2", {"stage": 2}, SHARDED),
    Row(
        "stage 3, defaults", {"stage": 3}, SHARDED, worlds=(1, 2)
    ),  # models as small as these stay whole, as at stage 2
    Row("stage 3, kept", {"stage": 3, **_ALL_STAY}, KEPT, worlds=(2,)),
    Row("stage 3, strict", {"stage": 3, **_ALL_SHARDED, "stage3_max_live_parameters": 0}, REGATHERED),
    Row("hybrid", {"stage": 3, **_ALL_SHARDED, "shard_group_size": 2}, same_bits=False, worlds=(4,)),
    Row(
        "hpZ",
        {"stage": 3, **_ALL_SHARDED, "stage3_max_live_parameters": 0, "zero_hpz_partition_size": 2},
        worlds=(4,),
    ),
    Row("stage 1, states on disk", {"stage": 1, **_nvme("offload_optimizer")}, SHARDED, worlds=(1, 2)),
    Row(
        "stage 3, all on disk",
        {"stage": 3, **_ALL_STAY, **_nvme("offload_optimizer"), **_nvme("offload_param")},
        KEPT,
        worlds=(2,),
    ),
    Row(
        "stage 2, host",
        {"stage": 2},
        SHARDED,
        worlds=(1, 2),
        offload=Offload(states=Tier.HOST, ratio=0.6, step_numel=BUCKET_NUMEL),
    ),
    Row(
        "stage 3, all on the host, ahead",
        {"stage": 3, **_ALL_SHARDED},  # by default two units are whole at a time
        worlds=(2,),
        offload=Offload(states=Tier.HOST, weights=Tier.HOST, speculation=Speculation.LAST_BACKWARD),
    ),
    # tiers: one line each, below this one
)
