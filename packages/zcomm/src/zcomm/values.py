"""Small host values from every rank to every rank, as JSON.

torch's all_gather_object pickles: what arrives is executed.  Here two flat gathers move the lengths and then the
padded UTF-8 bytes, so nothing but data can arrive, and on NCCL groups both travel through GPU memory.  What
JSON does to a value happens at world size 1 too: tuples come back as lists and keys as strings.

A value that JSON cannot hold must not leave the other ranks waiting: its rank takes part with length -1, and
*every* rank raises, naming it.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zcomm.collectives import all_gather, group_rank, group_size, wire_device

__all__ = ["JSON", "exchange"]

JSON = Any  # None, bool, int, float, str, and lists and string-keyed dicts of these; floats may be nan or inf


def exchange(value: JSON, group: ProcessGroup | None = None) -> list[JSON]:
    """Every rank's `value`, in the order of the group's ranks.  A collective: every rank of the group must call.

    Raises TypeError on every rank if one rank's value is not JSON, and ValueError if this process is not a
    member of the group.
    """
    size, rank = group_size(group), group_rank(group)
    data, problem = _encoded(value)
    if size == 1:
        if problem:
            raise TypeError(f"exchange: {problem}")
        return [json.loads(data)]
    lengths = _gathered(torch.tensor([-1 if problem else len(data)]), size, group, "exchange lengths").tolist()
    refused = [number for number, length in enumerate(lengths) if length < 0]
    if refused:
        reason = problem or "another rank's value is not JSON; see its own error"
        culprits = ", ".join(map(str, refused))
        raise TypeError(f"exchange: {reason} (refused: rank {culprits} of {size}; this is rank {rank})")
    padded = np.zeros(max(lengths), dtype=np.uint8)
    padded[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    rows = _gathered(torch.from_numpy(padded), size, group, "exchange values").view(size, -1).numpy()
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths)]


def _encoded(value: JSON) -> tuple[bytes, str]:
    """The bytes of `value`, never empty, or why there are none."""
    try:
        return json.dumps(value).encode(), ""
    except (TypeError, ValueError, RecursionError) as error:
        return b"", f"{type(value).__name__} is not JSON: {error}. Use None, bool, int, float, str, list, dict."


def _gathered(mine: Tensor, size: int, group: ProcessGroup | None, label: str) -> Tensor:
    """All ranks' copies of the 1-D CPU tensor `mine`, one after the other, on the CPU."""
    device = wire_device(group)
    output = torch.empty(mine.numel() * size, dtype=mine.dtype, device=device)
    all_gather(output, mine.to(device), group, label=label)
    return output.cpu()
