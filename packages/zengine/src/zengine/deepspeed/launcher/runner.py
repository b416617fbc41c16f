"""Names that Accelerate's launcher reads."""

from __future__ import annotations

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME"]

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
