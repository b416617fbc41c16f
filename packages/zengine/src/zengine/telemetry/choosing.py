"""Whether anything is measured; what measures is imported if so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from zengine.telemetry.countdown import make_countdown
from zengine.telemetry.plans import TelemetryPlanLike
from zengine.telemetry.silent import Silent

if TYPE_CHECKING:
    from zengine.telemetry.telemetry import Telemetry


@attrs.frozen(kw_only=True)
class Scope:
    """Whose work is measured."""

    device: torch.device  # of this rank
    rank: int
    micro_batch_size: int  # samples of one rank a micro-step
    batch_size: int  # samples of all ranks a step
    replicas: int  # ranks that train together
    pieces: int  # how many of them share each sample's tokens
    num_devices: int  # all ranks, where several share a model's layers; else `replicas`


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
    """The telemetry that the plan asks for on this rank; or Silent: nothing is asked for, or the rank is not 0.

    The sizes are those of `Scope`.
    Raises MissingPackageError, on every rank alike, if an enabled monitor's package is not installed.
    """
    if not plan.is_wanted:
        return Silent(make_countdown(plan.bench_steps, plan.rates.warmup_steps))
    from zengine.telemetry import making

    scope = Scope(
        device=device,
        rank=rank,
        micro_batch_size=micro_batch_size,
        batch_size=batch_size,
        replicas=replicas,
        pieces=pieces,
        num_devices=num_devices or replicas,
    )
    return making.telemetry_of(plan, scope)
