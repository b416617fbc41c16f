"""What is kept of the inputs of a checkpointed block, and how it becomes whole again.

Problem.  Tensor ranks compute blocks of a model together, and between blocks all of them have the same activations.
Checkpoints of these are the same on every rank: with 8 ranks seven eighths of that memory say nothing new.

Design.  torch's checkpoints save their inputs through autograd, so hooks for saved tensors see them.  `pack` keeps
the part of this rank, ceil(numel / ranks) elements, and `unpack` gathers the parts when autograd asks, which is when
backward reaches the block: tensor ranks do that in one order, as they do everything.  Elements are cut in the order
of memory, and come back with the same strides, so that the same kernels give the same bits.

Only activations are cut: arguments of the block that require gradients.  Masks and positions, which all blocks share,
stay what they are, one tensor; so do weights.  What is nobody's here goes to the hooks around (torch itself applies
the innermost alone).

[Note: the same activations]  Where layers split their activations by tokens (`sequence_dim`), ranks do not have the
same, and parts of different tensors would be joined.  The first times the ranks compare what the joined tensor should
be, and say so.  After that nobody looks: it costs a read and a wait.

Rejected: saving inputs by hand in an autograd function, as other trainers do; it would be a second implementation of
torch's checkpoint, which knows autocast, nesting, devices and early stopping.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter

import zcomm
from zpartition import _compat
from zpartition.activations.stores import AsTheyAre, Back, Store
from zpartition.cells import ALONE, Cell

__all__ = ["WHOLE", "Keeping", "kept_numel"]

_LOOKS = 8  # see [Note: the same activations]
_SAMPLE = 2**14  # elements that are compared
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers by bytes


def kept_numel(numel: int, size: int) -> int:
    """Elements that each of `size` ranks keeps of an activation of `numel`."""
    return -(-numel // size)


@final
@attrs.define(eq=False)
class Keeping:
    """How inputs of checkpointed blocks are kept.  Without arguments, the identity.

    cell: the ranks that have the same activations, each of which keeps a part.
    """

    cell: Cell = ALONE
    store: Store = attrs.field(factory=AsTheyAre)
    looks_left: int = _LOOKS  # how often parts are still compared; the same on all ranks of the cell

    @property
    def is_identity(self) -> bool:
        """Whether inputs are kept as torch does."""
        return self.cell.size == 1 and isinstance(self.store, AsTheyAre)

    def hooks(self, arguments: Iterable[Any]) -> torch.autograd.graph.saved_tensors_hooks:
        """For around a checkpoint: what autograd saves of `arguments` inside is kept so."""
        ours = {_key(each) for each in arguments if _is_activation(each)}
        outer_pack, outer_unpack = _compat.outer_saved_tensor_hooks() or (_same, _same)

        def pack(tensor: Tensor) -> Any:
            return self.kept(tensor) if _key(tensor) in ours else _Foreign(outer_pack(tensor))

        def unpack(packed: Any) -> Any:
            return outer_unpack(packed.value) if isinstance(packed, _Foreign) else self.whole(packed)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def kept(self, tensor: Tensor) -> Kept:
        """This rank's part of `tensor`, any shape and strides; the tensor itself is referred to no more."""
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
        ordered = tensor.detach().permute(order).contiguous()
        flat, digest = ordered.view(-1), None
        if self.cell.size > 1:
            digest = _digest(flat) if self.looks_left > 0 else None
            self.looks_left -= digest is not None
            flat = _part(flat, self.cell)
        return Kept(self.store.put(flat), tuple(order), ordered.shape, digest)

    def whole(self, kept: Kept) -> Tensor:
        """The tensor again, with its shape and strides.  A collective of the cell.

        Raises:
            ValueError: the ranks of the cell had different tensors.
        """
        part, numel = kept.back(), kept.shape.numel()
        if self.cell.size > 1:
            joined = part.new_empty(part.numel() * self.cell.size)
            zcomm.all_gather(joined, part, self.cell.group, label="activations").wait()
            part = joined[:numel]
            if kept.digest is not None:
                self._compare(kept.digest, tuple(kept.shape))
        inverse = [kept.order.index(dim) for dim in range(len(kept.order))]
        return part.view(kept.shape).permute(inverse)

    def _compare(self, digest: Tensor, shape: tuple[int, ...]) -> None:
        bounds = torch.stack((digest, -digest))
        zcomm.all_reduce(bounds, self.cell.group, op="max", label="activations are the same")
        largest, smallest = bounds.tolist()
        if largest != -smallest:
            raise ValueError(
                f"checkpointed activations of {shape} elements (in the order of memory) differ between the "
                f"{self.cell.size} tensor ranks, so that none of them may keep a part only: layers that split "
                "activations by tokens (sequence_dim) have different ones already, or dropout before the block drew "
                "other random numbers on each rank. Keep them whole there (partition_activations: false)."
            )


WHOLE = Keeping()


@final
@attrs.frozen(eq=False)
class Kept:
    """What a checkpoint holds of one input."""

    back: Back  # this rank's part, flat
    order: tuple[int, ...]  # dims of the tensor, by falling stride
    shape: torch.Size  # in that order
    digest: Tensor | None  # () int64 of the whole tensor, where ranks are to compare


@final
@attrs.frozen(eq=False)
class _Foreign:
    """What the hooks around have made of a tensor that is not ours."""

    value: Any


def _same(value: Any) -> Any:
    return value


def _is_activation(value: object) -> bool:
    if not isinstance(value, Tensor) or isinstance(value, Parameter):
        return False
    return value.requires_grad and value.layout is torch.strided and value.numel() > 0


def _key(tensor: Tensor) -> tuple[Any, ...]:
    """Tells tensors apart that are alive at once; autograd hands others on than it was given."""
    if tensor.layout is not torch.strided:
        return ()
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _part(flat: Tensor, cell: Cell) -> Tensor:
    """A copy of this rank's part; the last one is filled up with zeros."""
    numel = kept_numel(flat.numel(), cell.size)
    mine = flat[cell.rank * numel : (cell.rank + 1) * numel]
    return mine.clone() if mine.numel() == numel else torch.cat((mine, mine.new_zeros(numel - mine.numel())))


def _digest(flat: Tensor) -> Tensor:
    """() int64, of the bits of some thousand elements all over `flat`: other activations differ nearly everywhere."""
    sample = flat[:: max(1, flat.numel() // _SAMPLE)].contiguous()
    words = sample.view(_WORDS[flat.element_size()]).to(torch.int64)
    places = torch.arange(1, words.numel() + 1, device=flat.device)
    return (words * (places * 0x9E3779B1 % 0x7FFFFFFF)).sum() >> 1
