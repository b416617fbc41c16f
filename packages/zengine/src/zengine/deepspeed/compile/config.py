"""`deepspeed.compile.config`: the section `compile` of a config, which has no effect here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

from zengine.config.keys.absent import COMPILE
from zengine.deepspeed.section_model import SectionModel

__all__ = ["CompileConfig"]


@final
class CompileConfig(SectionModel):
    """Section `compile`."""

    rows = COMPILE
    defaults: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("free_activation", "offload_activation", "offload_opt_states", "offload_parameters"), False),
        **dict.fromkeys(("offload_activation_pin_memory", "double_buffer", "keep_int_input_tensors"), True),
        **dict.fromkeys(("symmetric_memory", "keep_all_input_tensors", "debug_log"), False),
        **dict.fromkeys(("sync_before_reduce", "sync_after_reduce"), False),
        **dict.fromkeys(("sync_before_allgather", "sync_after_allgather"), False),
        "free_activation_threshold": 10 * 2**20,
    }
    title = "compile"
    deepcompile: bool
