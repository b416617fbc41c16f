"""Weights that do not fit: the section `zero` of an inference config, and modules whose blocks rest elsewhere.

    {"zero": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local/drive"}}}

A module on the meta device is filled from its checkpoint block by block: the host holds one block, in the dtype of
the file and in the new one, beside what stays on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import nn

from zengine.config.grammar.kinds import Mismatch
from zengine.deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from zengine.inference.offload import BlockList, DriveRest, HostRest, WeightStream, block_list

__all__ = ["WeightOffload", "fill_and_park", "read_offload", "read_zero"]

log = logging.getLogger("zengine")

_WEIGHTS_STAGE = 3  # of ZeRO: weights are sharded, or offloaded


@attrs.frozen
class WeightOffload:
    """Where blocks rest."""

    directory: str = ""  # on a drive; "": in the host's memory

    def stream(self, device: torch.device) -> WeightStream:
        """Return a stream to `device`, with nothing in it."""
        is_host = device == torch.device("cpu")
        return WeightStream(
            DriveRest(self.directory, stages=not is_host) if self.directory else HostRest(pins=not is_host), device
        )


def read_zero(value: object) -> dict[str, Any]:
    """Read a section `zero`; {} if it is off.  Raises Mismatch."""
    section = value if isinstance(value, Mapping) else {"stage": _WEIGHTS_STAGE if value else 0}
    if not section or section.get("stage", 0) == 0:
        return {}
    try:
        DeepSpeedZeroConfig(**section)
        read_offload(section)
    except (ValueError, AssertionError) as error:
        raise Mismatch(f"is no ZeRO section: {error}") from None
    return dict(section)


def read_offload(section: Mapping[str, Any]) -> WeightOffload | None:
    """Return the offload of a section; None if it has none.  Raises ValueError for a drive without a folder."""
    if section.get("stage", 0) != _WEIGHTS_STAGE:
        return None
    given = DeepSpeedZeroConfig(**section).offload_param
    if given is None or given.device in ("none", None):
        return None
    if given.device == "nvme" and not given.nvme_path:
        raise ValueError('offload_param.device is "nvme" and nvme_path is missing: name a folder on a local drive')
    return WeightOffload(str(given.nvme_path) if given.device == "nvme" else "")


def fill_and_park(
    module: nn.Module,
    offload: WeightOffload,
    device: torch.device,
    fill: Callable[[nn.Module, str], None],
    finish: Callable[[nn.Module, str], None],
) -> WeightStream:
    """Fill and park the blocks one by one, then fill the rest of the module and move it to the device.

    fill: gives a part its weights, in place, on the host; the part's name in the module is its second argument.
    finish: casts and quantizes a part.
    """
    found, stream = block_list(module), offload.stream(device)
    inside = {id(param): param for block in found.blocks.values() for param in block.parameters()}
    if any(inside[each].is_meta for each in found.shared & inside.keys()):
        raise ValueError(
            f"blocks of {type(module).__name__} share weights and are on the meta device: build the model with memory"
            ", or leave out zero"
        )
    for name, block in found.blocks.items():
        fill(block, name)
        finish(block, name)
        stream.park(block, found.resting(block))
    with _without(found):
        fill(module, "")
        finish(module, "")
        module.to(device)
    module.register_state_dict_pre_hook(_reject_state_dict)  # type: ignore[no-untyped-call]
    log.info(
        "init_inference: %d blocks of %s rest %s (%s bytes); two of them, %s bytes, are on %s at a time",
        *(len(stream.packed), found.name or type(module).__name__),
        "in " + offload.directory if offload.directory else "on the host",
        *(f"{stream.resting_bytes:,}", f"{2 * max(each.num_bytes for each in stream.packed):,}", device),
    )
    return stream


def _reject_state_dict(module: nn.Module, *_: Any) -> None:
    raise RuntimeError(
        f"the blocks of {type(module).__name__} rest outside of the device (init_inference.zero), so its state_dict "
        "would lack their weights: take them from the checkpoint, or from an engine without zero"
    )


@contextmanager
def _without(found: BlockList) -> Iterator[None]:
    """Take the blocks out of the module inside."""
    children = dict(found.container._modules)
    found.container._modules.clear()
    try:
        yield
    finally:
        found.container._modules.update(children)
