"""Optimizer state on shards: rebinding an optimizer, and addressing what it keeps.

An elementwise optimizer (SGD, Adam and their kin) does not care where one parameter ends and the next begins, so
it can update flat spans: a handful of long tensors in place of thousands, and only this rank's part.  `rebind` swaps
the tensors in its parameter groups; hyperparameters, schedulers and the object itself stay.  An optimizer that
looks at shapes (Muon, Adafactor) keeps the module's own parameters, which is possible as long as nothing is sharded.

A `Holder` says which parameters' elements live where in one of the optimizer's tensors; through it the state of
both kinds is read and restored by parameter name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.nn import Parameter

from zpartition.layout import Piece, Slot
from zpartition.shard import Shard, full_box

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"}
)  # of torch.optim: each element's update reads that element's gradient and state only
SHAPED = frozenset({"Adafactor", "Muon", "LBFGS", "SparseAdam"})  # of torch.optim: need whole tensors


COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})  # state of torch.optim that is one number a parameter


@attrs.frozen(eq=False)
class Holder:
    """One tensor that the optimizer updates, and whose elements it holds."""

    tensor: Parameter
    pieces: tuple[Piece, ...]

    @classmethod
    def of_parameter(cls, name: str, param: Parameter) -> Holder:
        """The module's own parameter, held whole."""
        slot = Slot(name, tuple(param.shape), 0, param.numel())
        return cls(param, (Piece(slot, (0, slot.numel), 0),))


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` may be given flat spans; unknown classes are believed, with a warning.

    A class can say so itself with an attribute `elementwise`.
    """
    kind = type(optimizer)
    declared = getattr(optimizer, "elementwise", None)
    if declared is not None:
        return bool(declared)
    if kind.__name__ in SHAPED:
        return False
    if kind.__module__.startswith("torch.optim"):
        return True
    if kind.__name__ not in ELEMENTWISE:
        warnings.warn(
            f"{kind.__name__} is not known to update each element by itself; it is given flat shards. If it uses "
            "the shapes of its parameters, set `elementwise = False` on the class and use stage 0.",
            stacklevel=3,
        )
    return True


def rebind(
    optimizer: torch.optim.Optimizer,
    holders: Sequence[Sequence[Holder]],
    params: Mapping[str, Parameter],
) -> None:
    """Replace the parameters of group i by the tensors of `holders[i]`; existing state moves along.

    `params` are the module's parameters by name, to which the existing state belongs.

    Raises:
        ValueError: the state of parameters that now share a tensor disagrees (step counts, say).
    """
    old_state = {name: optimizer.state[param] for name, param in params.items() if param in optimizer.state}
    optimizer.state.clear()
    for group, group_holders in zip(optimizer.param_groups, holders):
        group["params"] = [holder.tensor for holder in group_holders]
    if not old_state:
        return
    for holder in (holder for group_holders in holders for holder in group_holders):
        if state := _merge_state(holder, {p.slot.name: old_state.get(p.slot.name, {}) for p in holder.pieces}):
            optimizer.state[holder.tensor] = state


def state_shards(optimizer: torch.optim.Optimizer, holders: Iterable[Holder]) -> Iterator[tuple[str, Shard]]:
    """(state key, shard) for every tensor that the optimizer keeps, addressed by parameter name.

    A state tensor as large as its parameter is cut like it; a scalar belongs whole to each parameter of the holder.

    Raises:
        TypeError: the optimizer keeps something that is neither.
    """
    for holder in holders:
        for key, value in optimizer.state.get(holder.tensor, {}).items():
            if isinstance(value, torch.Tensor) and value.numel() == holder.tensor.numel() and value.dim():
                flat = value.detach().view(-1)
                for piece in holder.pieces:
                    part = flat[piece.offset : piece.offset + piece.numel]
                    shape = piece.slot.shape
                    yield key, Shard(piece.slot.name, shape, full_box(shape), piece.span, part)
            elif isinstance(value, torch.Tensor) and value.numel() == 1:
                for piece in holder.pieces:
                    yield key, Shard(piece.slot.name, (), (), (0, 1), value.detach().view(-1))
            else:
                raise TypeError(
                    f"state {key!r} of {type(optimizer).__name__} for {holder.pieces[0].slot.name} is "
                    f"{_describe(value)}; a checkpoint can hold tensors shaped like the parameter, and scalars"
                )


def make_state(
    optimizer: torch.optim.Optimizer,
    holders: Iterable[Holder],
    kinds_of: Callable[[str], Mapping[str, tuple[torch.dtype, bool]]],
) -> None:
    """Create zeroed state for every holder, so that `state_shards` yields targets to load into.

    `kinds_of(parameter name)[key]` is (dtype, is_scalar).  A scalar lives where the optimizer keeps it: with the
    parameter when the group is fused or capturable or the class says `counts_on_device`, else on the CPU.
    """
    group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    optimizer.state.clear()
    for holder in holders:
        group = group_of[id(holder.tensor)]
        beside = group.get("fused") or group.get("capturable") or getattr(optimizer, "counts_on_device", False)
        scalar_device = holder.tensor.device if beside else "cpu"
        state: dict[str, torch.Tensor] = {}
        for key, (dtype, is_scalar) in _kinds_of_holder(holder, kinds_of).items():
            if is_scalar:
                state[key] = torch.zeros((), dtype=dtype, device=scalar_device)
            else:
                state[key] = torch.zeros_like(holder.tensor.data, dtype=dtype)
        if state:
            optimizer.state[holder.tensor] = state


def _kinds_of_holder(
    holder: Holder, kinds_of: Callable[[str], Mapping[str, tuple[torch.dtype, bool]]]
) -> dict[str, tuple[torch.dtype, bool]]:
    kinds: dict[str, tuple[torch.dtype, bool]] = {}
    for piece in holder.pieces:
        kinds.update(kinds_of(piece.slot.name))
    return kinds


def _merge_state(holder: Holder, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The state of whole parameters, cut and joined to fit `holder`."""
    merged: dict[str, Any] = {}
    for piece in holder.pieces:
        name = piece.slot.name
        for key, value in states[name].items():
            if isinstance(value, torch.Tensor) and value.shape == piece.slot.shape and key not in COUNTERS:
                if key not in merged:
                    wide = torch.promote_types(value.dtype, holder.tensor.dtype)  # beside an fp32 master: fp32
                    merged[key] = torch.zeros_like(holder.tensor.data, dtype=wide)
                part = value.detach().reshape(-1)[piece.span[0] : piece.span[1]]
                merged[key][piece.offset : piece.offset + piece.numel].copy_(part)
            elif merged.setdefault(key, value) != value:
                raise ValueError(
                    f"cannot join the optimizer state of parameters that share a shard: {key!r} is {value} for "
                    f"{name} and {merged[key]} for {holder.pieces[0].slot.name}. Partition before the first step."
                )
    return merged


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
