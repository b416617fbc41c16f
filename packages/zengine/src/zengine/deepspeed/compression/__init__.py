"""`deepspeed.compression`: functions that replace layers."""

from __future__ import annotations

from zengine.deepspeed.compression import helper

__all__ = ["helper"]
