"""`deepspeed.runtime.pipe.p2p`: messages between neighbouring stages of a grid, for code that schedules by itself.

zengine's pipelines use `zpartition.pipeline`, which needs no grid.  As in DeepSpeed the grid is global.
"""

from __future__ import annotations

import json
from typing import Any

import attrs
import torch
from torch import Tensor

from zengine.deepspeed import comm
from zengine.deepspeed.accelerator import get_accelerator
from zengine.deepspeed.runtime.pipe.topology import PipelineParallelGrid

__all__ = ["can_send_recv", "init_process_groups", "recv", "recv_obj", "send", "send_obj", "wait"]


@attrs.define(eq=False)
class _Current:
    """The grid of `init_process_groups`."""

    grid: PipelineParallelGrid | None = None


_current = _Current()


def can_send_recv() -> bool:
    """Return True: torch sends between two ranks."""
    return True


def init_process_groups(grid: PipelineParallelGrid) -> None:
    """Send along the pipelines of `grid` from now on.  Raises AssertionError (DeepSpeed's) for a single stage."""
    assert grid.pipe_parallel_size > 1, "There is no pipeline parallelism"
    _current.grid = grid


def send(tensor: Tensor, dest_stage: int, async_op: bool = False) -> None:
    """Send to the same pipeline's stage, which must be a neighbour; the first and the last are neighbours, too.

    Raises AssertionError for another stage, without `init_process_groups`, and for async_op (use comm.isend).
    """
    comm.send(tensor, _neighbour(dest_stage, async_op))


def recv(tensor: Tensor, src_stage: int, async_op: bool = False) -> None:
    """Receive into `tensor`; raises as `send`."""
    comm.recv(tensor, _neighbour(src_stage, async_op))


def wait() -> None:
    """Wait for the device: messages are complete when `send` and `recv` return."""
    get_accelerator().synchronize()


def send_obj(msg: Any, dest: int) -> None:
    """Send an object to a rank of the world, as JSON: tuples arrive as lists.  Raises TypeError for other types."""
    device = get_accelerator().current_device_name()
    data = torch.frombuffer(bytearray(json.dumps(msg).encode()), dtype=torch.uint8).to(device)
    comm.send(torch.tensor([data.numel()], device=device), dest)
    comm.send(data, dest)


def recv_obj(sender: int) -> Any:
    """Receive an object of `send_obj`."""
    device = get_accelerator().current_device_name()
    length = torch.zeros(1, dtype=torch.long, device=device)
    comm.recv(length, sender)
    data = torch.empty(int(length), dtype=torch.uint8, device=device)
    comm.recv(data, sender)
    return json.loads(bytes(data.tolist()))


def _neighbour(stage: int, async_op: bool) -> int:
    """Return the rank of a neighbouring stage."""
    grid = _current.grid
    assert grid is not None, "call init_process_groups(grid) first"
    assert not async_op, "Doesn't support async_op true: use deepspeed.comm.isend and irecv"
    distance, last = abs(stage - grid.get_stage_id()), grid.pipe_parallel_size - 1
    assert distance in (1, last) and 0 <= stage <= last, (
        "Functionality currently limited to send and receive between adjacent ranks only: stage "
        f"{grid.get_stage_id()} and {stage} of {last + 1}"
    )
    return grid.stage_to_global(stage_id=stage)
