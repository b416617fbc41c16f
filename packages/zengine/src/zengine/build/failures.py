"""A rank that fails alone in `initialize` tells the others, which raise within seconds.

A config that only one rank cannot read, or a device that only one rank lacks, ends that rank before its first
message; the others would wait for it until the time-out, minutes later.  So the failing rank publishes its error
(`zcomm.abort`), for which it joins the world if need be.  The same error on every rank, the usual case, leaves the
world as it was: each raises its own error, and `initialize` can be called again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import nn

import zcomm
from zengine.engine.memory_errors import OutOfMemory, describe, is_out_of_memory

__all__ = ["telling_peers"]

_JOIN_LIMIT_S = 20.0  # for the others to come to the rendezvous

_CHANGES = (
    "build the model inside `with zpartition.Init():`, so that no rank holds all of it",
    '"zero_optimization": {"stage": 3}: each rank holds its part of weights and optimizer state',
    '"zero_optimization": {"offload_optimizer": {"device": "cpu"}} (or "nvme"): moves the optimizer',
    '"bf16": {"enabled": true}: half the memory of the weights in use',
)
_FAILED = " failed in "  # between the rank and the call, in the reason

log = logging.getLogger("zengine")


@contextmanager
def telling_peers(call: str, model: object) -> Iterator[None]:
    """Publish an error raised inside, unless every rank raises one; raise it, an allocator's as `OutOfMemory`."""
    try:
        yield
    except zcomm.CollectiveFailed as error:
        if _FAILED not in zcomm.failure():
            raise
        raise zcomm.CollectiveFailed(
            f"{call} ended, because another rank failed: {zcomm.failure()}\nNothing is wrong on this rank, {_rank()}."
        ) from error
    except zcomm.RendezvousFailed:
        raise
    except Exception as error:
        named = _explain_memory(call, error, model) if is_out_of_memory(error) else error
        _tell(call, named)
        if named is error:
            raise
        raise named from error


def _explain_memory(call: str, error: Exception, model: object) -> OutOfMemory:
    rank = dist.get_rank() if dist.is_initialized() else zcomm.detect().rank
    tensors = [] if not isinstance(model, nn.Module) else [*model.parameters(), *model.buffers()]
    devices = [tensor.device for tensor in tensors if not tensor.is_meta]
    device = devices[-1] if devices else torch.device("cpu")
    return describe(
        error,
        f"rank {rank} ran out of memory in {call}",
        lambda: {"the model as it was given": sum(each.nbytes for each in tensors if not each.is_meta)},
        device,
        lambda: list(_CHANGES),
    )


def _tell(call: str, error: Exception) -> None:
    with suppress(ValueError, RuntimeError, OSError):  # of the rendezvous: the error itself is raised by the caller
        if dist.is_initialized():
            _abort(call, error, dist.get_rank())
            return
        launch = zcomm.detect()
        if launch.world_size == 1:
            return
        log.error(
            "rank %d failed in %s: %s\nTelling the other ranks, for at most %.0f s.",
            launch.rank,
            call,
            error,
            _JOIN_LIMIT_S,
        )
        with zcomm.init(timeout_s=_JOIN_LIMIT_S):
            _abort(call, error, launch.rank)


def _abort(call: str, error: Exception, rank: int) -> None:
    text = str(error).splitlines()[0] if isinstance(error, OutOfMemory) else error
    zcomm.abort(f"rank {rank}{_FAILED}{call}: {type(error).__name__}: {text}", unless_all=True)


def _rank() -> str:
    return f"rank {dist.get_rank()}" if dist.is_initialized() else "which has left the world"
