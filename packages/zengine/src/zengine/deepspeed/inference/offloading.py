"""Weights that do not fit: the section `zero` of an inference config, and modules whose blocks rest elsewhere.

    {"zero": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local/drive"}}}

With several ranks each holds a share of every block, at the place of `offload_param`, and without it on its device.
Ranks of tensor or expert parallelism hold their own parts, whole.

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
from torch.distributed import ProcessGroup

import zcomm
from zengine.build.agreement import compare, parameter_lines
from zengine.config.grammar.kinds import Mismatch
from zengine.deepspeed.comm import init_distributed
from zengine.deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from zengine.inference.loading.weights import stored_tensors
from zengine.inference.offload import BlockList, DriveRest, HostRest, SharedRest, WeightStream, block_list

__all__ = ["WeightOffload", "fill_and_park", "read_offload", "read_zero", "share", "voted"]

log = logging.getLogger("zengine")

_WEIGHTS_STAGE = 3  # of ZeRO: weights are sharded, or offloaded


@attrs.frozen
class WeightOffload:
    """Where blocks rest."""

    directory: str = ""  # on a drive; "": in memory
    stays_on_device: bool = False  # in the device's memory, where only shares of several ranks save any

    def stream(self, device: torch.device, sharing: ProcessGroup | None = None) -> WeightStream:
        """Return a stream to `device`, with nothing in it; sharing: ranks of which each holds a share."""
        rest = self._rest(device)
        return WeightStream(rest if sharing is None else SharedRest(rest, sharing), device)

    def _rest(self, device: torch.device) -> HostRest | DriveRest:
        is_host = device == torch.device("cpu")
        if self.directory:
            return DriveRest(self.directory, stages=not is_host)
        return HostRest(pins=False, device=device) if self.stays_on_device else HostRest(pins=not is_host)

    def idle_reason(self, device: torch.device, num_sharing: int) -> str:
        """Return why nothing is gained; "" if something is.  num_sharing: ranks that share a block."""
        if num_sharing > 1 or self.directory:
            return ""
        if self.stays_on_device:
            return "stage 3 without offload_param shares weights between ranks, and each has its own here"
        return "on a CPU the host has the weights already; none are streamed" if device.type == "cpu" else ""


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
    """Return where blocks rest; None below stage 3.  Raises ValueError for a drive without a folder."""
    if section.get("stage", 0) != _WEIGHTS_STAGE:
        return None
    given = DeepSpeedZeroConfig(**section).offload_param
    if given is None or given.device in ("none", None):
        return WeightOffload(stays_on_device=True)
    if given.device == "nvme" and not given.nvme_path:
        raise ValueError('offload_param.device is "nvme" and nvme_path is missing: name a folder on a local drive')
    return WeightOffload(str(given.nvme_path) if given.device == "nvme" else "")


def share(module: nn.Module, device: torch.device, *, is_filled: bool) -> ProcessGroup | None:
    """Connect all ranks, compare their models, and return the group that shares the blocks.

    is_filled: the module has its weights; those of rank 0 are broadcast.

    Raises RanksDisagree, or what `block_list` raises, before any weight is sent.
    """
    block_list(module)
    init_distributed()
    compare({"parameters": parameter_lines(module)}, None)
    if is_filled:
        with torch.no_grad():
            for name, tensor in stored_tensors(module):
                sent = tensor.detach().to(device).contiguous()
                zcomm.broadcast(sent, None, source=0, label=name)
                tensor.copy_(sent)
    return zcomm.duplicate_group(None)


@contextmanager
def voted(sharing: ProcessGroup | None) -> Iterator[None]:
    """Raise RuntimeError on all ranks if the block inside fails on another one; `sharing` None: alone."""
    if sharing is None:
        yield
        return
    reason, failed = "", None
    try:
        yield
    except Exception as error:
        reason, failed = f"{type(error).__name__}: {error}", error
    reasons = zcomm.all_gather_object(reason, sharing)
    if failed is not None:
        raise failed
    if any(reasons):
        rank = next(rank for rank, each in enumerate(reasons) if each)
        raise RuntimeError(f"init_inference failed on rank {rank}: {reasons[rank]}")


def fill_and_park(
    module: nn.Module,
    offload: WeightOffload,
    device: torch.device,
    fill: Callable[[nn.Module, str], None],
    finish: Callable[[nn.Module, str], None],
    sharing: ProcessGroup | None = None,
) -> WeightStream:
    """Fill and park the blocks one by one, then fill the rest of the module and move it to the device.

    fill: gives a part its weights, in place, on the host; the part's name in the module is its second argument.
    finish: casts and quantizes a part.
    sharing: ranks that hold a share of each block; the blocks are the same on all.
    """
    found, stream = block_list(module), offload.stream(device, sharing)
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
    place = f"in {offload.directory}" if offload.directory else "on the host"
    log.info(
        "init_inference: %d blocks of %s rest %s (%s bytes here); two of them, %s bytes, are on %s at a time",
        *(len(stream.packed), found.name or type(module).__name__),
        f"on {device}, a share on each rank" if offload.stays_on_device else place,
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
