"""Weights of all stages of a pipeline on the rank of the first, one tensor at a time.

Names over the stages are those of the whole model, so an export of all stages is one of the model.  Each stage goes
through its tensors as a model of one stage does; the ranks of the pipeline that begins at rank 0 send what they see,
and rank 0 goes through its own tensors and then through theirs, in the order of the stages' ranks.  Copies of the
pipeline, and tensor ranks, take part in the gathers of their stage and send nothing.

A rank that cannot go through its tensors (no memory, say) leaves others in a message that never comes, so it gives
the world up.  A file that cannot be written is not of that kind: the values are gone through all the same.

Rejected: one state dict of each stage, put together at the end (it has to fit); a gather over all stages (each of
them would have all of it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from zengine.checkpoint.weight_files import Entry

if TYPE_CHECKING:
    from zpartition import ModelParallelGroup

__all__ = ["from_all_stages", "of_all_stages"]


def from_all_stages(
    stages: ModelParallelGroup,
    entries: Sequence[Entry],
    values: Iterator[Tensor],
    *,
    device: torch.device,
    sends: bool,
) -> tuple[list[Entry], Iterator[Tensor]]:
    """Entries of the whole model and their values, in order, on the first rank; elsewhere those of this rank.

    Everyone has to go through the values to their end, which is what moves them.
    stages: the ranks of this pipeline.  device: what their group can send from.
    sends: whether this pipeline is the one whose first rank wants the values.
    A collective of the pipeline.
    """
    own = list(entries)
    if stages.size == 1:
        return own, values
    told = zcomm.all_gather_object([_told(entry) for entry in own], stages.group)
    zcomm.close_on_failure(stages.group)
    if stages.rank:
        return own, _telling(_sent(values, stages, device)) if sends else values
    if not sends:
        return own, values
    theirs = [[_entry(*each) for each in stage] for stage in told]
    return [entry for stage in theirs for entry in stage], _telling(_received(values, theirs, stages, device))


def of_all_stages(stages: ModelParallelGroup, own: dict[str, str]) -> dict[str, str]:
    """Return what every stage says of its own names, together, on every rank.  A collective of the pipeline."""
    told = [own] if stages.size == 1 else zcomm.all_gather_object(own, stages.group)
    return {name: said for each in told for name, said in each.items()}


def _telling(values: Iterator[Tensor]) -> Iterator[Tensor]:
    """The same; if they end with an error, nobody waits for the rest of them."""
    try:
        yield from values
    except Exception as error:
        zcomm.abort(f"rank {dist.get_rank()} failed in an export of all stages: {type(error).__name__}: {error}")
        raise


def _sent(values: Iterator[Tensor], stages: ModelParallelGroup, device: torch.device) -> Iterator[Tensor]:
    for value in values:
        if value.numel():
            data = value.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
            dist.send(data, group=stages.group, group_dst=0)
        yield value


def _received(
    own: Iterator[Tensor], entries: Sequence[Sequence[Entry]], stages: ModelParallelGroup, device: torch.device
) -> Iterator[Tensor]:
    yield from own
    for source, theirs in enumerate(entries[1:], start=1):
        for entry in theirs:
            value = torch.empty(entry.shape, dtype=entry.dtype, device=device)
            if value.numel():
                dist.recv(value.view(-1).view(torch.uint8), group=stages.group, group_src=source)
            yield value


def _told(entry: Entry) -> list[object]:
    return [list(entry.names), list(entry.shape), str(entry.dtype).removeprefix("torch.")]


def _entry(names: list[str], shape: list[int], dtype: str) -> Entry:
    return Entry(tuple(names), tuple(shape), getattr(torch, dtype))
