"""Facts: properties of the machine and the caller that `resolve` needs besides the config."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

__all__ = ["Facts"]


@attrs.frozen(kw_only=True)
class Facts:
    """World that a config is resolved for.

    Raises:
        ValueError: sizes that contradict each other.
    """

    world_size: int  # processes in the run
    replicas: int  # copies of the caller's model, over which the config places its own degrees
    device_type: str = "cpu"  # "cpu" | "cuda"
    ranks_per_host: int = 0  # processes on each machine; 0: unknown or irrelevant
    bf16_is_faster: bool = False  # measured: a bf16 matmul beats an fp32 one here
    axes: Mapping[str, int] = attrs.field(factory=dict)  # degrees of the caller's mesh or model, by zcomm's axes
    axes_source: str = ""  # origin of `axes`, for errors: "mesh=", "mpu=", "the model"

    def __attrs_post_init__(self) -> None:
        if self.world_size < 1 or self.replicas < 1 or self.world_size % self.replicas:
            raise ValueError(
                f"Facts(world_size={self.world_size}, replicas={self.replicas}): both must be at least 1 "
                "and replicas must divide world_size"
            )
