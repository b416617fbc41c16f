"""Numbers of operations, dtypes and reductions, shared by Python, C and the ranks.

The order is that of the enumerations in `csrc/zs_api.h`.  The ranks compare these numbers.  A dtype with a number can
be moved; the first `NUM_REDUCIBLE` can be reduced.
"""

from __future__ import annotations

import torch

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "all_to_all_v", "barrier")
REDUCTIONS = ("sum", "max", "min")
NUM_REDUCIBLE = 9
_DTYPE_NAMES = (
    *("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8", "int8", "bool"),
    *("int16", "uint16", "uint32", "uint64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
# An old torch lacks the last ones; the numbers of the others stay.
DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(_DTYPE_NAMES) if hasattr(torch, name)
}


def dtype_name(code: int) -> str:
    """Name of a dtype by its number; "nothing" for -1, a barrier's."""
    return _DTYPE_NAMES[code] if code >= 0 else "nothing"


def is_supported(dtype: torch.dtype, *, reduced: bool) -> bool:
    """True if tensors of `dtype` can be moved, or reduced, through shared memory."""
    code = DTYPES.get(dtype)
    return code is not None and (code < NUM_REDUCIBLE or not reduced)
