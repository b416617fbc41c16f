"""Choice of a run's telemetry: `Telemetry` on rank 0, or `Silent`.

Modules that measure are imported only if the plan enables something.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zengine.telemetry.silent import Silent, make_countdown

if TYPE_CHECKING:
    from zengine.config.plan.telemetry import TelemetryPlan
    from zengine.telemetry.telemetry import Telemetry


def make_telemetry(
    plan: TelemetryPlan,
    *,
    device: torch.device,
    rank: int,
    micro_batch_size: int,
    batch_size: int,
    replicas: int,
    pieces: int = 1,
    num_devices: int = 0,
) -> Telemetry | Silent:
    """Return the telemetry that `plan` enables on this rank.

    `Silent` is returned if nothing is enabled or the rank is not 0.  The sizes are those of `Scope`.
    Raises MissingPackageError on every rank if the package of an enabled sink is not installed.
    """
    countdown = make_countdown(plan.bench_steps, plan.rates.warmup_steps)
    if not plan.is_wanted:
        return Silent(countdown)

    from zengine.telemetry.sinks.table import require_packages

    require_packages(plan)
    if rank != 0:
        return Silent(countdown)

    from zengine.telemetry.telemetry import Scope, assemble

    scope = Scope(
        device=device,
        micro_batch_size=micro_batch_size,
        batch_size=batch_size,
        replicas=replicas,
        pieces=pieces,
        num_devices=num_devices or replicas,
    )
    return assemble(plan, scope, countdown)
