"""Inputs of checkpointed blocks: partitioned over tensor ranks when saved, gathered again in backward.

Problem.  Tensor ranks compute blocks of a model together, and between blocks all of them hold the same activations.
Checkpoints of these are equal on every rank: with 8 ranks seven eighths of that memory are redundant.

Design.  torch's checkpoint saves its inputs through autograd, so saved-tensor hooks see them.  `pack` keeps this
rank's part, ceil(numel / ranks) elements, and `unpack` all-gathers the parts when backward reaches the block; all
tensor ranks do so in the same order.  Elements are split in memory order and come back with the same strides, so that
the same kernels give the same bits.

Only activations are partitioned: arguments of the block that require gradients.  Masks and positions, which all
blocks share, stay one tensor each, and so do weights.  Other tensors go to the enclosing hooks (torch itself applies
only the innermost ones).

[Note: the same activations]  Where layers split their activations by tokens (`sequence_dim`), ranks hold different
activations, and parts of different tensors would be joined.  In the first calls the ranks compare a digest of the
whole tensor, and raise if it differs.  Later calls do not: the check costs a device read and a wait.

Rejected: saving inputs in a custom autograd function, as other trainers do; it would be a second implementation of
torch's checkpoint, which handles autocast, nesting, devices and early stopping.
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
from zpartition.activations.stores import DeviceStore, Restore, Store
from zpartition.layout.model_parallel import ALONE, ModelParallelGroup

__all__ = ["UNPARTITIONED", "SavedInputs", "saved_numel"]

_NUM_CHECKS = 8  # see [Note: the same activations]
_SAMPLE = 2**14  # elements that are compared
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers by bytes


def saved_numel(numel: int, size: int) -> int:
    """Elements that each of `size` ranks saves of an activation of `numel` elements."""
    return -(-numel // size)


@final
@attrs.define(eq=False)
class SavedInputs:
    """Policy for the inputs of checkpointed blocks.  Without arguments, the identity.

    mp_group: the ranks that hold the same activations; each saves a part.
    """

    mp_group: ModelParallelGroup = ALONE
    store: Store = attrs.field(factory=DeviceStore)
    checks_left: int = _NUM_CHECKS  # comparisons still to come; the same on all ranks

    @property
    def is_identity(self) -> bool:
        """True if inputs are saved as torch does."""
        return self.mp_group.size == 1 and isinstance(self.store, DeviceStore)

    def hooks(self, arguments: Iterable[Any]) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the hooks to put around a checkpoint: autograd saves `arguments` by this policy."""
        ours = {_identity_of(each) for each in arguments if _is_activation(each)}
        outer_pack, outer_unpack = _compat.outer_saved_tensor_hooks() or (_identity, _identity)

        def pack(tensor: Tensor) -> Any:
            return self.pack(tensor) if _identity_of(tensor) in ours else _Passthrough(outer_pack(tensor))

        def unpack(packed: Any) -> Any:
            return outer_unpack(packed.value) if isinstance(packed, _Passthrough) else self.unpack(packed)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def pack(self, tensor: Tensor) -> SavedInput:
        """Return this rank's part of `tensor`, of any shape and strides; keeps no reference to the tensor."""
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
        ordered = tensor.detach().permute(order).contiguous()
        flat, digest = ordered.view(-1), None
        if self.mp_group.size > 1:
            digest = _digest(flat) if self.checks_left > 0 else None
            self.checks_left -= digest is not None
            flat = _own_part(flat, self.mp_group)
        return SavedInput(self.store.put(flat), tuple(order), ordered.shape, digest)

    def unpack(self, kept: SavedInput) -> Tensor:
        """Rebuild the tensor with its shape and strides.  Collective of the group.

        Raises:
            ValueError: the ranks of the group had different tensors.
        """
        part, numel = kept.restore(), kept.shape.numel()
        if self.mp_group.size > 1:
            joined = part.new_empty(part.numel() * self.mp_group.size)
            zcomm.all_gather(joined, part, self.mp_group.group, label="activations")
            part = joined[:numel]
            if kept.digest is not None:
                self._check_same(kept.digest, tuple(kept.shape))
        inverse = [kept.order.index(dim) for dim in range(len(kept.order))]
        return part.view(kept.shape).permute(inverse)

    def _check_same(self, digest: Tensor, shape: tuple[int, ...]) -> None:
        bounds = torch.stack((digest, -digest))
        zcomm.all_reduce(bounds, self.mp_group.group, op="max", label="activations are the same")
        largest, smallest = bounds.tolist()
        if largest != -smallest:
            raise ValueError(
                f"checkpointed activations of shape {shape} (in memory order) differ between the "
                f"{self.mp_group.size} tensor ranks, so they cannot be partitioned: the layers split activations by "
                "tokens (sequence_dim), or dropout before the block drew different random numbers on each rank. Set "
                "partition_activations: false."
            )


UNPARTITIONED = SavedInputs()


@final
@attrs.frozen(eq=False)
class SavedInput:
    """One saved input of a checkpoint."""

    restore: Restore  # this rank's part, flat
    order: tuple[int, ...]  # dims of the tensor, by falling stride
    shape: torch.Size  # in that order
    digest: Tensor | None  # () int64 of the whole tensor, where ranks are to compare


@final
@attrs.frozen(eq=False)
class _Passthrough:
    """A tensor that the enclosing hooks packed."""

    value: Any


def _identity(value: Any) -> Any:
    return value


def _is_activation(value: object) -> bool:
    if not isinstance(value, Tensor) or isinstance(value, Parameter):
        return False
    return value.requires_grad and value.layout is torch.strided and value.numel() > 0


def _identity_of(tensor: Tensor) -> tuple[Any, ...]:
    """Identify a tensor among those alive; autograd passes on other objects than it was given."""
    if tensor.layout is not torch.strided:
        return ()
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _own_part(flat: Tensor, mp_group: ModelParallelGroup) -> Tensor:
    """Copy this rank's part; the last one is padded with zeros."""
    numel = saved_numel(flat.numel(), mp_group.size)
    mine = flat[mp_group.rank * numel : (mp_group.rank + 1) * numel]
    return mine.clone() if mine.numel() == numel else torch.cat((mine, mine.new_zeros(numel - mine.numel())))


def _digest(flat: Tensor) -> Tensor:
    """() int64: hash of the bits of some thousand elements spread over `flat`."""
    sample = flat[:: max(1, flat.numel() // _SAMPLE)].contiguous()
    words = sample.view(_WORDS[flat.element_size()]).to(torch.int64)
    places = torch.arange(1, words.numel() + 1, device=flat.device)
    return (words * (places * 0x9E3779B1 % 0x7FFFFFFF)).sum() >> 1
