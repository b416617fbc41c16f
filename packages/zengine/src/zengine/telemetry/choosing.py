"""Whether anything is measured; what measures is imported if so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zengine.telemetry.countdown import make_countdown
from zengine.telemetry.plans import TelemetryPlanLike
from zengine.telemetry.silent import Silent

if TYPE_CHECKING:
    from zengine.telemetry.telemetry import Telemetry


def make_telemetry(
    plan: TelemetryPlanLike,
    *,
    device: torch.device,
    rank: int,
    micro_batch_size: int,
    batch_size: int,
    replicas: int,
    pieces: int = 1,
    num_devices: int = 0,
) -> Telemetry | Silent:
    """The telemetry that the plan asks for on this rank; or Silent. See `making.make_telemetry`."""
    if not plan.is_wanted:
        return Silent(make_countdown(plan.bench_steps, plan.rates.warmup_steps))
    from zengine.telemetry import making

    return making.make_telemetry(
        plan,
        device=device,
        rank=rank,
        micro_batch_size=micro_batch_size,
        batch_size=batch_size,
        replicas=replicas,
        pieces=pieces,
        num_devices=num_devices,
    )
