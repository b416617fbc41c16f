"""`deepspeed.runtime.swap_tensor.utils`: tensors from and to files, by a handle of `ops.aio`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from zengine.deepspeed.ops.aio import aio_handle

__all__ = [
    "AIO_ALIGNED_BYTES",
    "MIN_AIO_BYTES",
    "MIN_SWAPPABLE_BYTES",
    "get_sized_buffer",
    "get_sized_buffers",
    "swap_in_tensors",
    "swap_out_tensors",
]

MIN_AIO_BYTES = MIN_SWAPPABLE_BYTES = 1 << 20
AIO_ALIGNED_BYTES = 1 << 10


def swap_in_tensors(swap_handle: aio_handle, tensor_buffers: Iterable[Tensor], swap_paths: Iterable[str]) -> None:
    """Begin to read each file into its tensor; `swap_handle.wait()` ends it."""
    for buffer, path in zip(tensor_buffers, swap_paths):
        swap_handle.async_pread(buffer, path)


def swap_out_tensors(swap_handle: aio_handle, tensor_buffers: Iterable[Tensor], swap_paths: Iterable[str]) -> None:
    """Begin to write each tensor to its file; `swap_handle.wait()` ends it."""
    for buffer, path in zip(tensor_buffers, swap_paths):
        swap_handle.async_pwrite(buffer, path)


def get_sized_buffer(buffer: Tensor, num_elems: int) -> Tensor:
    """Return the first elements of `buffer`, a view.  Raises AssertionError (DeepSpeed's) if it has fewer."""
    assert num_elems <= buffer.numel(), f"num_elems {num_elems} > buffer {buffer.numel()}"
    return buffer if num_elems == buffer.numel() else buffer.narrow(0, 0, num_elems)


def get_sized_buffers(buffer_list: Sequence[Tensor], num_elems_list: Sequence[int]) -> list[Tensor]:
    """Return `get_sized_buffer` of each pair."""
    return [get_sized_buffer(buffer, numel) for buffer, numel in zip(buffer_list, num_elems_list)]
