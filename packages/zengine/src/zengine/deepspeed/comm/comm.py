"""`deepspeed.comm.comm`: everything of `deepspeed.comm`, and `cdb`, the back end of this process."""

from __future__ import annotations

from typing import Any

from zengine.deepspeed.comm.constants import *  # noqa: F403
from zengine.deepspeed.comm.discovery import *  # noqa: F403
from zengine.deepspeed.comm.summary import *  # noqa: F403
from zengine.deepspeed.comm.torch import TorchBackend
from zengine.deepspeed.comm.utils import *  # noqa: F403
from zengine.deepspeed.comm.verbs import *  # noqa: F403
from zengine.deepspeed.comm.world import *  # noqa: F403
from zengine.deepspeed.comm.world import is_initialized

__all__ = ["TorchBackend"]


def __getattr__(name: str) -> Any:
    """Return the back end of the default process group as `cdb`; None without one."""
    if name == "cdb":
        return TorchBackend() if is_initialized() else None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
