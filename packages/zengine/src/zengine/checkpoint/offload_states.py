"""Offloaded states: memory of training that moves to the host or to files between two phases of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from zengine.engine.parts import Run

__all__ = ["STATES", "empty_partition_cache", "offload_states"]

STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")  # DeepSpeed's names


def offload_states(run: Run, include: Iterable[str] | None, device: str, *, pin_memory: bool, directory: str) -> None:
    """See `DeepSpeedEngine.offload_states`."""
    names = [str(getattr(each, "value", each)) for each in (STATES if include is None else include)]
    device = str(getattr(device, "value", device))
    unknown = sorted(set(names) - set(STATES))
    if unknown or device not in ("cpu", "nvme") or (device == "nvme" and not directory):
        given = f"include={names}, device={device!r}, nvme_path={directory!r}"
        raise ValueError(
            f'offload_states({given}): include takes {", ".join(STATES)}; device is "cpu", or "nvme" with a nvme_path'
        )
    run.clock.require_open("offload_states")
    run.parts.partition.offload_states(names, pin=pin_memory, directory=directory if device == "nvme" else "")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def empty_partition_cache(run: Run) -> None:
    """See `DeepSpeedEngine.empty_partition_cache`."""
    run.clock.require_open("empty_partition_cache")
    run.parts.partition.unsharder.release_all()
