"""Full tensors of a split model (tensor or expert parallel), and the way back, for files in its plain format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn

import zcomm
from zpartition.layout.address import Address, Box
from zpartition.layout.model_parallel import (
    ModelParallelGroup,
    addresses_of,
    expert_shards_of,
    model_parallel_group_of,
)

__all__ = ["FullTensors", "load_whole_state_dict", "own_parts", "part_of", "whole_state_dict"]


@final
@attrs.frozen(eq=False)
class FullTensors:
    """Gathers full tensors of a split model, one parameter at a time."""

    # by id of the parameter: its address, and the groups of ranks that hold the other parts
    parts: Mapping[int, tuple[Address, tuple[ModelParallelGroup, ...]]]

    @classmethod
    def of(cls, model: nn.Module) -> FullTensors:
        """Return the full tensors of the model's current parameters."""
        mp_group, addresses = model_parallel_group_of(model), addresses_of(model)
        expert_groups = expert_shards_of(model)
        parts = {}
        for name, param in model.named_parameters():
            is_split = mp_group.size > 1 and addresses[name].num_copies == 1
            mp_groups = [*([expert_groups[name]] if name in expert_groups else ()), *([mp_group] if is_split else ())]
            parts[id(param)] = addresses[name], tuple(mp_groups)
        return cls(parts)

    @property
    def is_idle(self) -> bool:
        """True if every parameter is whole on every rank."""
        return not any(mp_groups for _, mp_groups in self.parts.values())

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        found = self.parts.get(id(tensor))
        return tuple(tensor.shape) if found is None else found[0].global_shape

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the full tensor of a gathered parameter; others unchanged.  All ranks with parts call."""
        address, mp_groups = self.parts.get(id(tensor), (None, ()))
        return _joined(tensor.detach(), address, mp_groups) if mp_groups else tensor.detach()


def part_of(tensor: Tensor, address: Address) -> Tensor:
    """Return a copy of the part at `address` of a full tensor."""
    boxes = [tensor[tuple(slice(lo, hi) for lo, hi in box)] for box in address.boxes]
    return torch.cat(boxes) if len(boxes) > 1 else boxes[0].clone(memory_format=torch.contiguous_format)


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the unsplit model, in new memory on each tensor and expert rank.  A collective.

    At ZeRO stage 3 it gathers, as `model.state_dict()` does.

    >>> import torch, zpartition
    >>> model = torch.nn.Linear(4, 2)
    >>> partition = zpartition.shard(model, policy=zpartition.ZeroPolicy(stage=3))
    >>> {name: tuple(tensor.shape) for name, tensor in zpartition.whole_state_dict(model).items()}
    {'weight': (2, 4), 'bias': (2,)}
    """
    full_tensors, params = FullTensors.of(model), dict(model.named_parameters(remove_duplicate=False))
    found = {}
    for name, tensor in model.state_dict().items():
        address, mp_groups = full_tensors.parts.get(id(params.get(name)), (None, ()))
        found[name] = _joined(tensor, address, mp_groups)
    return found


def load_whole_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load this rank's parts of a state dict of the unsplit model; not a collective.

    Raises:
        ValueError: a tensor is missing, unexpected or of another shape; nothing is loaded then.
    """
    addresses = _by_state_name(model)
    own = model.state_dict()
    shapes = {n: addresses[n].global_shape if n in addresses else tuple(t.shape) for n, t in own.items()}
    wrong = [f"{name} is missing" for name in shapes if name not in state]
    wrong += [f"{name} is unexpected" for name in state if name not in shapes]
    wrong += [
        f"{name} has shape {list(state[name].shape)}, the model's {list(shape)}"
        for name, shape in shapes.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    if wrong:
        raise ValueError(f"the state does not fit the model, and nothing was loaded: {'; '.join(wrong[:10])}.")
    with torch.no_grad():
        for name, value in own_parts(model, state).items():
            own[name].copy_(value)


def own_parts(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's parts of a state dict of the unsplit model; other entries stay unchanged."""
    addresses = _by_state_name(model)

    def own(name: str, value: Any) -> Any:
        fits = name in addresses and isinstance(value, Tensor) and tuple(value.shape) == addresses[name].global_shape
        return part_of(value, addresses[name]) if fits else value

    return {name: own(name, value) for name, value in state.items()}


def _by_state_name(model: nn.Module) -> dict[str, Address]:
    """Return the address of each parameter, under all of its names."""
    addresses = addresses_of(model)
    name_of = {id(param): name for name, param in model.named_parameters()}
    names = model.named_parameters(remove_duplicate=False)
    return {name: addresses[name_of[id(param)]] for name, param in names}


def _joined(tensor: Tensor, address: Address | None, mp_groups: Sequence[ModelParallelGroup]) -> Tensor:
    """Gather the global tensor of which each rank of `mp_groups` holds the part at its `address`."""
    if address is None or not mp_groups:
        return tensor.clone()
    boxes, flat = list(address.boxes), tensor.reshape(-1)
    for mp_group in mp_groups:
        boxes, flat = _gathered(boxes, flat, mp_group)
    found = tensor.new_empty(address.global_shape)
    for box, part in zip(boxes, torch.split(flat, [_numel(box) for box in boxes])):
        place = found[tuple(slice(lo, hi) for lo, hi in box)]
        place.copy_(part.view(place.shape))
    return found


def _gathered(boxes: list[Box], flat: Tensor, mp_group: ModelParallelGroup) -> tuple[list[Box], Tensor]:
    """Gather the boxes of all ranks of `mp_group`, and their elements one after another."""
    gathered = zcomm.all_gather_object([[list(side) for side in box] for box in boxes], mp_group.group)
    boxes_by_rank: list[list[Box]] = [[tuple((lo, hi) for lo, hi in box) for box in rank] for rank in gathered]
    numels = [sum(map(_numel, rank)) for rank in boxes_by_rank]
    padded = flat.new_zeros(max(numels))
    padded[: flat.numel()] = flat
    parts = flat.new_empty(mp_group.size * padded.numel())
    zcomm.all_gather(parts, padded, mp_group.group, label="whole tensors")
    own = [part[:numel] for part, numel in zip(parts.view(mp_group.size, -1), numels)]
    return [box for rank in boxes_by_rank for box in rank], torch.cat(own)


def _numel(box: Box) -> int:
    return torch.Size(hi - lo for lo, hi in box).numel()
