"""Weights that rest on the host or on a drive, and visit the device block by block (ZeRO-Inference, stage 3).

Problem.  A model may be larger than the device's memory, or than the host's.  Its blocks are called one after the
other, so the weights of one are needed at a time.

Design.  The longest list of blocks (by bytes) rests outside; everything else stays on the device.  Two buffers of the
largest block's size hold the block that runs and the next one, whose copy or read runs meanwhile.  Hooks bind the
parameters, and the parts of quantized weights, to a buffer before a block and to nothing after it.  On a drive the
regions of a `DiskStore` hold the bytes: they are read past the page cache, with checksums.

With several ranks each has a share of every block's bytes, on its device, its host or its drive, and a block is
gathered into the buffer (`SharedRest`).  Ranks may pass different inputs, but run the blocks equally often.

Tensors that blocks share with each other or with other modules stay on the device.  Between calls the parameters of
resting blocks have no elements, so such a module cannot be saved, moved or trained.

Rejected: stage-3 training partitions (gradients, masters and collectives, of which inference needs none); a map of
the file into memory (the kernel decides what stays, and it counts as the process's memory).
"""

from __future__ import annotations

import collections
import itertools
import math
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, final

import attrs
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import zcomm
from zengine.inference.quantized_modules import QuantizedLinear
from zpartition.disk import DiskOptions, DiskStore, Region

__all__ = ["BlockList", "DriveRest", "HostRest", "SharedRest", "WeightStream", "block_list"]

_ALIGNMENT = 64  # bytes, of tensors in a buffer: what vector loads need


@attrs.frozen(eq=False)
class BlockList:
    """The blocks of a model that rest outside of the device."""

    name: str  # of the list in the model
    container: nn.Module  # nn.ModuleList or nn.Sequential
    blocks: Mapping[str, nn.Module]  # by their names in the model, each once
    shared: frozenset[int]  # identities of parameters that several blocks have, or other modules

    def resting(self, block: nn.Module) -> tuple[Tensor, ...]:
        """Return the tensors of a block that can rest."""
        return tuple(each for each in _tensors(block) if id(each) not in self.shared)


def block_list(model: nn.Module) -> BlockList:
    """Return the list with the most elements.  Raises ValueError if the model has none of two blocks or more."""
    found: dict[str, nn.Module] = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, (nn.ModuleList, nn.Sequential)) and len(each) > 1
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks (nn.ModuleList, nn.Sequential) to stream one by one: "
            "leave out zero"
        )
    name = max(found, key=lambda each: sum(tensor.numel() for tensor in _tensors(found[each])))
    prefix = f"{name}." if name else ""
    blocks = {f"{prefix}{key}": block for key, block in found[name].named_children()}
    return BlockList(name, found[name], blocks, _shared(model, blocks.values()))


def _shared(model: nn.Module, blocks: Iterable[nn.Module]) -> frozenset[int]:
    inside = {id(each) for block in blocks for each in block.modules()}
    outside = [
        id(param)
        for module in model.modules()
        if id(module) not in inside
        for param in module.parameters(recurse=False)
    ]
    owners = collections.Counter(id(param) for block in blocks for param in block.parameters())
    return frozenset(outside) | {each for each, count in owners.items() if count > 1}


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return parameters and parts of quantized weights, each once."""
    found = {id(param): param for param in module.parameters()}
    tensors: list[Tensor] = list(found.values())
    for each in module.modules():
        if isinstance(each, QuantizedLinear):
            tensors.extend(each.weight.parts().values())
    return tensors


@attrs.frozen(eq=False)
class _Packed:
    """A block's tensors, and their places in its bytes."""

    tensors: tuple[Tensor, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]  # of the bytes; a cast of the module changes those of the tensors
    starts: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...]) -> _Packed:
        sizes = [-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in tensors]
        ends = list(itertools.accumulate(sizes, initial=0))
        shapes, dtypes = tuple(tuple(each.shape) for each in tensors), tuple(each.dtype for each in tensors)
        return cls(tensors, shapes, dtypes, tuple(ends[:-1]), ends[-1])

    def views(self, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor, and its place in a (bytes,) uint8 buffer."""
        for tensor, shape, dtype, start in zip(self.tensors, self.shapes, self.dtypes, self.starts):
            length = math.prod(shape) * dtype.itemsize
            yield tensor, buffer[start : start + length].view(dtype).view(shape)


class Rest(Protocol):
    """A place where blocks rest."""

    def put(self, index: int, content: Tensor) -> None:
        """Keep the (bytes,) uint8 content of a block."""

    def start(self, index: int, into: Tensor) -> Callable[[], None]:
        """Start to copy a block into a buffer on the device; the result waits for it."""

    def buffer(self, num_bytes: int, device: torch.device) -> Tensor:
        """Allocate a buffer, (at least num_bytes,) uint8."""


def _is_there() -> None:
    """Wait for what is there already."""


@final
@attrs.define(eq=False)
class HostRest:
    """Blocks in memory: the host's, page-locked if the device is a GPU, or a device's own."""

    pins: bool
    device: torch.device | None = None  # where they rest; None: the host
    contents: dict[int, Tensor] = attrs.field(factory=dict)

    def put(self, index: int, content: Tensor) -> None:
        """Keep a copy."""
        self.contents[index] = content.pin_memory() if self.pins else content.to(self.device or "cpu", copy=True)

    def start(self, index: int, into: Tensor) -> Callable[[], None]:
        """Copy on a stream of its own, behind what the device has been told to compute so far."""
        if not self.pins:
            into[: len(self.contents[index])].copy_(self.contents[index])
            return _is_there
        present = torch.cuda.current_stream(into.device)
        stream = torch.cuda.Stream(into.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(present)
        with torch.cuda.stream(stream):
            into[: len(self.contents[index])].copy_(self.contents[index], non_blocking=True)
        return lambda: present.wait_stream(stream)

    def buffer(self, num_bytes: int, device: torch.device) -> Tensor:
        """Allocate a buffer."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


@final
class DriveRest:
    """Blocks in a folder on a drive, which is removed at the end."""

    def __init__(self, directory: str, *, stages: bool) -> None:
        """Create the folder in `directory`, which is made if absent.  stages: the device is not the host."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix="zengine-weights-", dir=directory)
        self.store = DiskStore.create(folder, DiskOptions(durable=False))
        self._regions: dict[int, Region] = {}
        self._stages = stages
        self._staging: Tensor | None = None  # host memory in front of a device's
        self._end = weakref.finalize(self, self.store.close, remove=True)

    def put(self, index: int, content: Tensor) -> None:
        """Write to the drive, and wait."""
        self._regions[index] = self.store.allocate(f"block {index}", max(1, len(content)))
        self.store.write(self._regions[index], content if len(content) else torch.zeros(1, dtype=torch.uint8)).wait()

    def start(self, index: int, into: Tensor) -> Callable[[], None]:
        """Read into a buffer of the host, and from there into one of a device."""
        region = self._regions[index]
        if not self._stages:
            return self.store.read(region, into).wait
        if self._staging is None or len(self._staging) < region.num_bytes:
            self._staging = self.store.buffer(len(into))
        staging, transfer = self._staging, self.store.read(region, self._staging)

        def finish() -> None:
            transfer.wait()
            into[: region.num_bytes].copy_(staging[: region.num_bytes])

        return finish

    def buffer(self, num_bytes: int, device: torch.device) -> Tensor:
        """Allocate a buffer that blocks can be read into."""
        return (
            torch.empty(num_bytes, dtype=torch.uint8, device=device) if self._stages else self.store.buffer(num_bytes)
        )


@final
@attrs.define(eq=False)
class SharedRest:
    """Blocks of which each rank has a share of the bytes; to start one is collective.

    Shares that are in memory leave while the block before runs; those on a drive when the block is needed.
    """

    own: HostRest | DriveRest  # of this rank's shares
    group: ProcessGroup | None
    shares: dict[int, int] = attrs.field(factory=dict)  # bytes of a rank's share, by block
    piece: Tensor | None = None  # (bytes of the largest share,) uint8: this rank's, on its way

    def put(self, index: int, content: Tensor) -> None:
        """Keep this rank's share; the content is the same on all ranks."""
        size, rank = zcomm.group_size(self.group), zcomm.group_rank(self.group)
        share = -(-len(content) // (size * _ALIGNMENT)) * _ALIGNMENT
        padded = torch.nn.functional.pad(content, (0, share * size - len(content)))
        self.shares[index] = share
        self.own.put(index, padded[rank * share : (rank + 1) * share])

    def start(self, index: int, into: Tensor) -> Callable[[], None]:
        """Gather the shares of all ranks."""
        share, most = self.shares[index], max(self.shares.values())
        if self.piece is None or len(self.piece) < most:
            self.piece = self.own.buffer(most, into.device)
        piece, whole = self.piece[:share], into[: share * zcomm.group_size(self.group)]
        arrived = self.own.start(index, self.piece)

        def gather(*, waits: bool) -> zcomm.Handle:
            return zcomm.all_gather(whole, piece, self.group, async_op=not waits, label=f"weights of block {index}")

        def finish() -> None:
            arrived()
            gather(waits=True)

        return gather(waits=False).wait if arrived is _is_there else finish

    def buffer(self, num_bytes: int, device: torch.device) -> Tensor:
        """Allocate a buffer with room for the ends of all shares."""
        return self.own.buffer(num_bytes + zcomm.group_size(self.group) * _ALIGNMENT, device)


@final
@attrs.define(eq=False)
class WeightStream:
    """Binds blocks to buffers while they run.

    Invariant: a block's tensors have elements only while it is `bound`; at most one block is `coming`, into the
    buffer that no bound block has.
    """

    rest: Rest
    device: torch.device
    packed: list[_Packed] = attrs.field(factory=list)
    buffers: list[Tensor] = attrs.field(factory=list)  # two, (bytes,) uint8 each, on the device
    bound: dict[int, int] = attrs.field(factory=dict)  # block -> buffer
    coming: tuple[int, int, Callable[[], None]] | None = None  # block, buffer, and the wait for it

    @property
    def buffer_bytes(self) -> int:
        """Bytes on the device for all resting blocks."""
        return sum(each.nbytes for each in self.buffers)

    @property
    def is_shared(self) -> bool:
        """Whether each rank has a share of the weights, so that all must run the blocks equally often."""
        return isinstance(self.rest, SharedRest)

    @property
    def resting_bytes(self) -> int:
        """Bytes that rest at this rank's place."""
        if isinstance(self.rest, SharedRest):
            return sum(self.rest.shares.values())
        return sum(each.num_bytes for each in self.packed)

    def park(self, block: nn.Module, tensors: tuple[Tensor, ...]) -> None:
        """Move a block's tensors, on the host, to their rest; from now on hooks bring them back.

        Blocks are parked in the order in which they run.
        """
        packed, index = _Packed.of(tensors), len(self.packed)
        content = aligned = torch.zeros(packed.num_bytes, dtype=torch.uint8)
        for tensor, view in packed.views(aligned):
            view.copy_(tensor.detach())
        self.rest.put(index, content)
        self.packed.append(packed)
        self._unbind(packed)
        block.register_forward_pre_hook(lambda *_: self.acquire(index), prepend=True)
        block.register_forward_hook(lambda *_: self.release(index), always_call=True)

    def acquire(self, index: int) -> None:
        """Bind a block to the buffer that has it, or wait for that; start the next one."""
        if not self.buffers:
            self._allocate()
        if index not in self.bound:
            if self.coming is None or self.coming[0] != index:
                self._settle()
                self._start(index)
            assert self.coming is not None
            _, buffer, wait = self.coming
            self.coming = None
            wait()
            self.bound[index] = buffer
            for tensor, view in self.packed[index].views(self.buffers[buffer]):
                tensor.data = view.to(tensor.dtype)  # the view itself, unless the module was cast
        following = (index + 1) % len(self.packed)
        if self.coming is None and following not in self.bound:
            self._start(following)

    def release(self, index: int) -> None:
        """Unbind a block; its buffer may be overwritten."""
        self.bound.pop(index, None)
        self._unbind(self.packed[index])

    def _start(self, index: int) -> None:
        free = next(each for each in range(len(self.buffers)) if each not in self.bound.values())
        self.coming = index, free, self.rest.start(index, self.buffers[free])

    def _settle(self) -> None:
        """End a copy that nobody needs."""
        if self.coming is not None:
            self.coming[2]()
            self.coming = None

    def _allocate(self) -> None:
        largest = max(each.num_bytes for each in self.packed)
        self.buffers = [self.rest.buffer(largest, self.device) for _ in range(2)]

    def _unbind(self, packed: _Packed) -> None:
        for tensor in packed.tensors:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=self.device)
