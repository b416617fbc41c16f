"""`deepspeed.utils.config`: the section timers.throughput, for a `ThroughputTimer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import attrs

__all__ = ["DeepSpeedThroughputTimerConfig", "get_timers_config"]


@final
@attrs.define(kw_only=True)
class DeepSpeedThroughputTimerConfig:
    """Settings of a throughput timer.  Unknown names raise TypeError."""

    enabled: Any = True
    synchronized: Any = True  # wait for the device before the clock is read


def get_timers_config(param_dict: Mapping[str, Any] | None) -> DeepSpeedThroughputTimerConfig:
    """Return what a config (a dict) has for timers.throughput, or the defaults."""
    return DeepSpeedThroughputTimerConfig(**(param_dict or {}).get("timers", {}).get("throughput", {}))
