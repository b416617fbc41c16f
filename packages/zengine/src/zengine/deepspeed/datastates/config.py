"""`deepspeed.datastates.config`: the section `datastates_ckpt` of a config, which has no effect here."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, final

from zengine.deepspeed.runtime.config_utils import DeepSpeedConfigObject

__all__ = ["DeepSpeedDataStatesConfig"]


@final
class DeepSpeedDataStatesConfig(DeepSpeedConfigObject):
    """The section of a config (a dict): `config` is what was written, None without it."""

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        self.enabled = param_dict.get("datastates_ckpt", False) is not False
        self.config = copy.deepcopy(param_dict.get("datastates_ckpt"))
