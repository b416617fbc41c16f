"""Checkpoints of others, in and out.

Nothing here unpickles: `.pt` files go through a machine of our own that makes plain data and tensors (machine.py,
admitted.py), and everything that is written is safetensors, JSON, or torch's own distributed format.
"""

from __future__ import annotations

from .deepspeed import DeepSpeedCheckpoint, import_deepspeed, read_deepspeed

__all__ = ["DeepSpeedCheckpoint", "import_deepspeed", "read_deepspeed"]
