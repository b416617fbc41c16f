"""Which dtype buffers have in a model whose weights are cast.  [Note: state is not rounded]

A buffer is state that nobody can learn again: running statistics, a codebook, a routing bias, a counter.  A sum in
bf16 stops moving once a term is 256 times smaller than it (the running mean of a BatchNorm reaches 96.0 where it is
100.3).  So buffers keep their dtype, as in DeepSpeed, unless one is asked for.  They only ever become wider, where
weights do.

torch wants some buffers and the weights beside them in one dtype, and for these there is a rule of their own:

  - norms with running statistics: the statistics count, so the weights stay with them in float32.  torch takes
    inputs of 16 bits beside them, on every device; weights of 16 bits it refuses on a CPU.  FSDP and Apex do so too.
  - spectral norms: two vectors of length one that every forward makes again from the weight, which decides.

Rejected: casting what is not saved (`persistent=False`), which is mostly rotary frequencies and masks.  The
frequencies are what 8 bits ruin, and for masks torch raises an error, which `WideBuffers` explains.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zprecision._compat import RunningNorm, spectral_vectors

__all__ = ["beside_weights", "is_castable"]

_CASTABLE = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def is_castable(tensor: Tensor) -> bool:
    """Whether `tensor` holds numbers of 16, 32 or 64 bits; codes of 8 bits mean nothing in another dtype."""
    return tensor.dtype in _CASTABLE


def beside_weights(module: nn.Module, param: torch.dtype, buffer: torch.dtype | None) -> dict[int, torch.dtype]:
    """id of a tensor -> its dtype, of those that torch wants in one dtype with others, when weights become `param`.

    buffer: what was asked for buffers; None: nothing.
    """
    found: dict[int, torch.dtype] = {}
    for child in module.modules():
        if (
            isinstance(child, RunningNorm)
            and isinstance(child.running_mean, Tensor)
            and is_castable(child.running_mean)
        ):
            dtype = _of_norm(buffer or child.running_mean.dtype, param)
            own = (child.weight, child.bias, child.running_mean, child.running_var)
            found.update((id(tensor), dtype) for tensor in own if isinstance(tensor, Tensor))
        found.update((id(vector), param) for vector in spectral_vectors(child))
    return found


def _of_norm(statistics: torch.dtype, param: torch.dtype) -> torch.dtype:
    """Inputs of 16 bits go with norms of the same dtype or of float32, others with their own."""
    is_narrow = param.itemsize < torch.float32.itemsize
    return torch.float32 if is_narrow and statistics != param else param
