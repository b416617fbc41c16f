"""Whole tensors out of a split model, and into it: for files in the plain format of the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import zcomm
from zpartition.cells import Cell, addresses_of, cell_of
from zpartition.shard import Address
from zpartition.tensor.parallelize import part_of

__all__ = ["load_whole_state_dict", "whole_state_dict"]


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state of the model that was split, in memory of its own on every tensor rank; all of them call it.

    At ZeRO stage 3 the tensor ranks' own parts have to be gathered first, as `model.state_dict()` does it by itself.
    """
    cell, addresses = cell_of(model), _by_state_name(model)
    state = model.state_dict()
    return {name: _joined(tensor, addresses.get(name), cell) for name, tensor in state.items()}


def load_whole_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Let each rank take its parts of a state of the whole model; nothing is sent.

    Raises:
        ValueError: a tensor is missing or of another shape, or there is one too many; nothing was loaded then.
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
        for name, tensor in own.items():
            tensor.copy_(part_of(state[name], addresses[name]) if name in addresses else state[name])


def _by_state_name(model: nn.Module) -> dict[str, Address]:
    """Addresses under all names that a parameter has, tied ones too."""
    addresses = addresses_of(model)
    name_of = {id(param): name for name, param in model.named_parameters()}
    names = model.named_parameters(remove_duplicate=False)
    return {name: addresses[name_of[id(param)]] for name, param in names}


def _joined(tensor: Tensor, address: Address | None, cell: Cell) -> Tensor:
    """The global tensor of which each rank has the part at its `address`."""
    if address is None or address.global_shape == tuple(tensor.shape):
        return tensor.clone()
    boxes = zcomm.exchange([[list(side) for side in box] for box in address.boxes], cell.group)
    numels = [sum(torch.Size(hi - lo for lo, hi in box).numel() for box in rank) for rank in boxes]
    padded = tensor.new_zeros(max(numels))
    padded[: tensor.numel()] = tensor.reshape(-1)
    parts = tensor.new_empty(cell.size * padded.numel())
    zcomm.all_gather(parts, padded, cell.group, label="whole tensors")
    found = tensor.new_empty(address.global_shape)
    for rank, part in zip(boxes, parts.view(cell.size, -1)):
        start = 0
        for box in rank:
            place = found[tuple(slice(lo, hi) for lo, hi in box)]
            place.copy_(part[start : start + place.numel()].view(place.shape))
            start += place.numel()
    return found
