"""`deepspeed.comm.config`: the section `comms_logger` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import attrs

from zengine.deepspeed.comm.constants import COMMS_LOGGER

__all__ = ["CommsLoggerConfig", "DeepSpeedCommsConfig"]


@final
@attrs.define(kw_only=True)
class CommsLoggerConfig:
    """Settings of the comms logger.  Unknown names raise TypeError."""

    enabled: Any = False
    prof_all: Any = True
    prof_ops: list[str] = attrs.field(factory=list)
    verbose: Any = False
    debug: Any = False


@final
class DeepSpeedCommsConfig:
    """What a config (a dict) says of the comms logger; without the section there is no `comms_logger`."""

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.comms_logger_enabled = COMMS_LOGGER in ds_config
        if self.comms_logger_enabled:
            self.comms_logger = CommsLoggerConfig(**ds_config[COMMS_LOGGER])
