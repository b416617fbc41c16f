"""`deepspeed.runtime.swap_tensor.aio_config`: the section `aio` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zengine.config.grammar.table import section_of
from zengine.config.keys.zero import AIO, Aio
from zengine.deepspeed.section_model import SectionModel

__all__ = ["AIO_DEFAULT_DICT", "get_aio_config"]


class _Aio(SectionModel):
    rows = section_of(Aio, AIO)
    defaults = {"single_submit": False, "overlap_events": True, "use_gds": False}  # noqa: RUF012
    title = "aio"


AIO_DEFAULT_DICT: dict[str, Any] = _Aio().model_dump()


def get_aio_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of a config, with DeepSpeed's defaults.  Raises as SectionModel does."""
    return _Aio(**(param_dict.get("aio") or {})).model_dump()
