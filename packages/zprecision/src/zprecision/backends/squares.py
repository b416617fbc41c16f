"""Sums of squares by the C kernel: one read of the gradients at the speed of memory.

Squares of float32 and narrower values are exact in float64, where they are summed in spans of 16384 elements and a
fixed order inside: the same bits for any number of threads and any instruction set.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zprecision.backends.native import is_addressable, library, num_threads

__all__ = ["sum_of_squares"]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # numbers of zq_api.h


def sum_of_squares(shards: Sequence[Tensor]) -> Tensor | None:
    """Return the sum of squares of 1-D contiguous tensors, (1,) float64; None where the kernel cannot serve.

    A square that overflows float64 does not exist in these dtypes, so the sum is finite if all elements are.
    """
    if not shards or any(not is_addressable(shard) or shard.dtype not in _DTYPES for shard in shards):
        return None
    found = library()
    if found is None:
        return None
    total = 0.0
    for dtype in dict.fromkeys(shard.dtype for shard in shards):
        rows = [shard.contiguous() for shard in shards if shard.dtype == dtype]
        numel = found.ffi.new("int64_t[]", [row.numel() for row in rows])
        addresses = found.ffi.new("uint64_t[]", [row.data_ptr() for row in rows])
        num_partials = found.lib.zq_num_partials(len(rows), numel)
        partials = torch.empty(num_partials, dtype=torch.float64, device="cpu")
        into = found.ffi.cast("double *", partials.data_ptr())
        total += found.lib.zq_squares(_DTYPES[dtype], len(rows), addresses, numel, into, num_threads())
    return torch.tensor([total], dtype=torch.float64, device="cpu")
