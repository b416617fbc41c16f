"""Private API of torch, all in this file; `tests/test__compat.py` fails by name when a new torch changes it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as RunningNorm
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

__all__ = [
    "RunningNorm",
    "has_plain_memory",
    "has_scaled_matmul",
    "scaled_matmul",
    "spectral_vectors",
    "unsaved_buffers",
]

_OLDEST_CAPABILITY = (8, 9)  # NVIDIA GPUs with 8-bit float matrix units: Ada, Hopper and later


def unsaved_buffers(module: nn.Module) -> Iterator[str]:
    """Names of the module's own non-persistent buffers; none if this torch does not expose them."""
    yield from getattr(module, "_non_persistent_buffers_set", ())


def spectral_vectors(module: nn.Module) -> Iterator[Tensor]:
    """Buffers of a spectral norm, of either kind, by which torch multiplies the weight."""
    if isinstance(module, parametrizations._SpectralNorm):
        yield from module.buffers(recurse=False)
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            yield from (getattr(module, f"{hook.name}_{end}") for end in "uv")


def has_scaled_matmul(device: torch.device) -> bool:
    """True if `device` multiplies 8-bit floats in hardware and this torch supports it."""
    if device.type != "cuda" or not hasattr(torch, "_scaled_mm") or torch.version.hip:
        return False  # the first AMD GPUs use other formats
    return torch.cuda.get_device_capability(device) >= _OLDEST_CAPABILITY


def scaled_matmul(left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """(M, K) @ (K, N) of 8-bit floats times both scales, (M, N) `dtype`, summed in float32.

    left: rows contiguous; right: columns contiguous; K and N multiples of 16; scales: () float32 each.
    """
    product: Tensor = torch._scaled_mm(left, right, scale_a=scales[0], scale_b=scales[1], out_dtype=dtype)
    return product


def has_plain_memory(kind: type[torch.Tensor]) -> bool:
    """Return whether tensors of a class are memory and no more.

    A subclass that takes over torch's functions or operators (DTensor) may have no address.  One of Parameter that
    takes over neither only adds attributes, as the marked parameters of ZeRO stage 3.
    """
    return kind in (torch.Tensor, torch.nn.Parameter) or _only_adds_attributes(kind)


@functools.lru_cache(maxsize=256)
def _only_adds_attributes(kind: type[torch.Tensor]) -> bool:
    own = torch.nn.Parameter
    return (
        issubclass(kind, own)
        and kind.__torch_function__ is own.__torch_function__
        and kind.__torch_dispatch__ is own.__torch_dispatch__
    )
