"""The facts of a machine that a command is told about, and not the one that it runs on."""

from __future__ import annotations

import torch

from zengine.config import Config, Facts
from zengine.measure import bf16_is_faster

__all__ = ["facts_of"]


def facts_of(config: Config, world_size: int, device: str = "") -> Facts:
    """`world_size` data-parallel ranks on `device` ("cpu", "cuda"; "" is what this machine has)."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = device or here
    is_faster = bf16_is_faster(config, torch.device(here), None) if device == here else device == "cuda"
    return Facts(world_size=world_size, replicas=world_size, device_type=device, bf16_is_faster=is_faster)
