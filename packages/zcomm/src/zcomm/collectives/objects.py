"""Object collectives: small host values of every rank to every rank, as JSON.

torch's all_gather_object pickles, and unpickling executes code.  Here two flat gathers move the lengths and then the
padded UTF-8 bytes, so only data can arrive; on NCCL groups both travel through GPU memory.  Values pass through JSON
at world size 1 too: tuples come back as lists and keys as strings.

A value that JSON cannot hold must not leave the other ranks waiting: its rank takes part with length -1, and *every*
rank raises, naming it.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zcomm.collectives.verbs import all_gather, group_device, group_rank, group_size

__all__ = ["JSON", "all_gather_object"]

JSON = Any  # None, bool, int, float, str, and lists and string-keyed dicts of these; floats may be nan or inf


def all_gather_object(value: JSON, group: ProcessGroup | None = None) -> list[JSON]:
    """Gather every rank's `value`, in the order of the group's ranks.

    A collective: every rank of the group must call.  Raises TypeError on every rank if one rank's value is not
    JSON, and ValueError if this process is not a member of the group.
    """
    size, rank = group_size(group), group_rank(group)
    data, problem = _encode(value)
    if size == 1:
        if problem:
            raise TypeError(f"all_gather_object: {problem}")
        return [json.loads(data)]
    lengths = _all_gather(torch.tensor([-1 if problem else len(data)]), size, group, "exchange lengths").tolist()
    rejected = [number for number, length in enumerate(lengths) if length < 0]
    if rejected:
        reason = problem or "another rank's value is not JSON; see its own error"
        failed = ", ".join(map(str, rejected))
        raise TypeError(f"all_gather_object: {reason} (rejected: rank {failed} of {size}; this is rank {rank})")
    padded = np.zeros(max(lengths), dtype=np.uint8)
    padded[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    rows = _all_gather(torch.from_numpy(padded), size, group, "exchange values").view(size, -1).numpy()
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths)]


def _encode(value: JSON) -> tuple[bytes, str]:
    """Return (bytes of `value`, ""), or (b"", error text) if it is not JSON."""
    try:
        return json.dumps(value).encode(), ""
    except (TypeError, ValueError, RecursionError) as error:
        return b"", f"{type(value).__name__} is not JSON: {error}. Use None, bool, int, float, str, list, dict."


def _all_gather(mine: Tensor, size: int, group: ProcessGroup | None, label: str) -> Tensor:
    """Gather the 1-D CPU tensor `mine` of all ranks, concatenated, on the CPU."""
    device = group_device(group)
    output = torch.empty(mine.numel() * size, dtype=mine.dtype, device=device)
    all_gather(output, mine.to(device), group, label=label)
    return output.cpu()
