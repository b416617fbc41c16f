"""Optimizer state on shards: rebinding an optimizer, and what it keeps.

An elementwise optimizer (SGD, Adam and their kin) does not care where one parameter ends and the next begins, so
it can update flat spans: a handful of long tensors in place of thousands, and only this rank's part.  `rebind` swaps
the tensors in its parameter groups; hyperparameters, schedulers and the object itself stay.  An optimizer that
looks at shapes can have flat spans if it lets itself be told where tensors lie (shapes.py); another (torch's Muon and
Adafactor) keeps the module's own parameters, which is possible as long as nothing is sharded.

A `Holder` says which parameters' elements live where in one of the optimizer's tensors; through it the state of
both kinds is read and restored by parameter name (addressing.py).

[Note: portable state] An optimizer may keep state in a form that only it can cut and join, such as 8-bit codes with
a scale for every few elements.  Such a class has two methods.  `portable_state(tensor)` returns the state by key, as
tensors, or, for what is coded, as objects with `dtype`, `shape` and `read(start, stop)`, which decodes a part;
`take_portable_state(tensor, state)` accepts plain tensors in its place and encodes them, and keeps counts and columns
of them (counts.py) as they are.  So a checkpoint holds numbers, and state moves between formats as it moves between
world sizes.  The options that say how state is kept (`kept_options`) belong to the object and not to the checkpoint.
An attribute `block_numel` says how many elements share a scale: parameters begin at multiples of it in their shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch.nn import Parameter

from zpartition.counts import COUNTERS, settled, stacked
from zpartition.layout import SLOT_ALIGNMENT, Layout, Piece, Slot
from zpartition.shapes import new_state, refuse_cuts, segment_states, takes_cuts

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"}
)  # of torch.optim: each element's update reads that element's gradient and state only
SHAPED = frozenset({"Adafactor", "Muon", "LBFGS", "SparseAdam"})  # of torch.optim: need whole tensors


class StateHome(Protocol):
    """Where the state of one tensor is between steps; see homes.py."""

    def state(self, optimizer: torch.optim.Optimizer, master: Parameter) -> Mapping[str, Any]:
        """What the optimizer keeps, in numbers."""

    def give(self, optimizer: torch.optim.Optimizer, master: Parameter, state: dict[str, Any]) -> None:
        """Let it keep `state`."""

    def clear(self, optimizer: torch.optim.Optimizer, master: Parameter) -> None:
        """Let it keep nothing."""


class InOptimizer:
    """The identity: the state is in the optimizer at all times."""

    def state(self, optimizer: torch.optim.Optimizer, master: Parameter) -> Mapping[str, Any]:
        return state_of(optimizer, master)

    def give(self, optimizer: torch.optim.Optimizer, master: Parameter, state: dict[str, Any]) -> None:
        give_state(optimizer, master, state)

    def clear(self, optimizer: torch.optim.Optimizer, master: Parameter) -> None:
        optimizer.state.pop(master, None)


IN_OPTIMIZER: StateHome = InOptimizer()


@attrs.frozen(eq=False)
class Holder:
    """One tensor that the optimizer updates, and whose elements it holds."""

    tensor: Parameter
    pieces: tuple[Piece, ...]
    home: StateHome = IN_OPTIMIZER

    def state(self, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
        """What the optimizer keeps of the tensor, wherever it is; see [Note: portable state]."""
        return self.home.state(optimizer, self.tensor)

    def give(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Let the optimizer keep `state` of the tensor."""
        self.home.give(optimizer, self.tensor, state)

    def clear(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer keep nothing of the tensor."""
        self.home.clear(optimizer, self.tensor)

    @classmethod
    def of_parameter(cls, name: str, param: Parameter) -> Holder:
        """The module's own parameter, held whole."""
        slot = Slot(name, tuple(param.shape), 0, param.numel())
        return cls(param, (Piece(slot, (0, slot.numel), 0),))

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is one parameter, in its shape."""
        return len(self.pieces) == 1 and self.tensor.shape == self.pieces[0].slot.shape

    @property
    def is_boxed(self) -> bool:
        """Whether some of it is a part of a tensor that other cells have other parts of."""
        return any(piece.slot.address.global_shape != piece.slot.shape for piece in self.pieces)


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


def refuse_split_master(optimizer: torch.optim.Optimizer) -> None:
    """ValueError if `optimizer` wants to keep the lower halves of weights whose fp32 masters are kept here."""
    for index, group in enumerate(optimizer.param_groups):
        if group.get("split_master"):
            raise ValueError(
                f"{type(optimizer).__name__} was made with split_master=True (parameter group {index}), but a "
                "partition keeps fp32 masters of low-precision weights itself, and there would be nothing to split. "
                'Leave split_master out; state_dtype="bf16" or "8bit" makes the optimizer smaller.'
            )


def refuse_unfit(optimizer: torch.optim.Optimizer, *, cuts: bool) -> None:
    """ValueError for an optimizer that cannot be given shards; to be asked before anything is moved."""
    refuse_split_master(optimizer)
    if cuts and takes_cuts(optimizer):
        refuse_cuts(optimizer)
    elif cuts:
        refuse_shaped(optimizer)


def refuse_cells(optimizer: torch.optim.Optimizer, layout: Layout) -> None:
    """ValueError for an optimizer that looks at shapes, where tensors are split beyond the partition."""
    split = [slot.name for _, slot in layout.slots() if slot.address.global_shape != slot.shape]
    if split and (takes_cuts(optimizer) or not is_elementwise(optimizer)):
        raise ValueError(
            f"{type(optimizer).__name__} looks at whole tensors, and {len(split)} are split over tensor ranks "
            f"({split[0]}, ...) or expert ranks: it would take each part for a tensor of its own. Use an elementwise "
            "optimizer (AdamW, SGD, Lion, ...), or no tensor and expert parallelism."
        )


def refuse_shaped(optimizer: torch.optim.Optimizer) -> None:
    """ValueError for an optimizer that is known to look at shapes."""
    kind = type(optimizer).__name__
    if getattr(optimizer, "elementwise", kind not in SHAPED) is False:
        ours = (
            f"zoptim.{kind}, which works on shards" if kind in ("Adafactor", "Muon") else "zoptim.Muon or Adafactor"
        )
        raise ValueError(
            f"{kind} needs whole tensors of full precision, but this policy cuts them into flat shards or keeps "
            f"masters apart. Use {ours}; an elementwise optimizer (AdamW, SGD, ...); or stage 0 with fp32 parameters."
        )


def rebind(
    optimizer: torch.optim.Optimizer,
    holders: Sequence[Sequence[Holder]],
    params: Mapping[str, Parameter],
    lay_out: Callable[[], None] = lambda: None,
) -> None:
    """Replace the parameters of group i by the tensors of `holders[i]`; existing state moves along.

    `params` are the module's parameters by name, to which the existing state belongs.  `lay_out` tells the optimizer
    what there is to know about its new tensors, before it is given their state.

    Raises:
        ValueError: something of the state is neither a value for each element nor a number.  The optimizer has its
            parameters and their state then.
    """
    old_state = {name: dict(state_of(optimizer, param)) for name, param in params.items() if param in optimizer.state}
    before = dict(optimizer.state), [dict(group) for group in optimizer.param_groups]
    optimizer.state.clear()
    try:
        _rebind(optimizer, holders, old_state, lay_out)
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(before[0])
        for group, members in zip(optimizer.param_groups, before[1]):
            group.update(members)
        raise


def _rebind(
    optimizer: torch.optim.Optimizer,
    holders: Sequence[Sequence[Holder]],
    old_state: Mapping[str, Mapping[str, Any]],
    lay_out: Callable[[], None],
) -> None:
    for group, group_holders in zip(optimizer.param_groups, holders):
        group["params"] = [holder.tensor for holder in group_holders]
        group.pop("param_names", None)  # a shard holds parts of several
    lay_out()
    if not old_state:
        return
    for holder in (holder for group_holders in holders for holder in group_holders):
        states = {piece.slot.name: old_state.get(piece.slot.name, {}) for piece in holder.pieces}
        blank = new_state(optimizer, holder.tensor) if any(states.values()) else None
        if state := _merge_state(holder, states) if blank is None else _fill(optimizer, holder, blank, states):
            holder.give(optimizer, state)


def state_of(optimizer: torch.optim.Optimizer, tensor: Parameter) -> Mapping[str, Any]:
    """What the optimizer keeps of `tensor`, {} for nothing; see [Note: portable state]."""
    portable = getattr(optimizer, "portable_state", None)
    state: Mapping[str, Any] = optimizer.state.get(tensor, {}) if portable is None else portable(tensor)
    return state


def give_state(optimizer: torch.optim.Optimizer, tensor: Parameter, state: dict[str, Any]) -> None:
    """Let the optimizer keep `state` of `tensor`; see [Note: portable state].

    Raises:
        ValueError: the optimizer finds that something is missing, or of another size.
    """
    take = getattr(optimizer, "take_portable_state", None)
    if take is None:
        optimizer.state[tensor] = state
    else:
        take(tensor, state)


def elements(value: Any, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a state: a flat view of a contiguous tensor, or what a coded one decodes to."""
    if isinstance(value, torch.Tensor):
        return value.detach().view(-1)[start:stop]
    part: torch.Tensor = value.read(start, stop)
    return part


def is_coded(value: object) -> bool:
    """Whether a state is not a tensor but can be read as one."""
    return hasattr(value, "read")


def block_numel(optimizer: torch.optim.Optimizer | None) -> int:
    """Of how many elements a parameter's place in a shard is to be a multiple; see [Note: portable state]."""
    return max(SLOT_ALIGNMENT, int(getattr(optimizer, "block_numel", 1)))


def begin_state(optimizer: torch.optim.Optimizer, tensor: Parameter) -> None:
    """Let the optimizer keep what it needs of `tensor`, in one of its groups, before the first update.

    Of torch's, Adagrad alone makes state in its constructor and not in a step.
    """
    if isinstance(optimizer, torch.optim.Adagrad):
        groups = optimizer.param_groups
        (group,) = (group for group in groups if any(tensor is member for member in group["params"]))
        first = group["initial_accumulator_value"]
        optimizer.state.update(torch.optim.Adagrad([tensor], initial_accumulator_value=first).state)


def _fill(
    optimizer: torch.optim.Optimizer, holder: Holder, blank: dict[str, Any], states: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """`blank`, a state that is kept by segment, with the state of whole parameters in it."""
    for piece, part in zip(holder.pieces, segment_states(optimizer, holder.tensor, blank) or ()):
        for key, value in states[piece.slot.name].items():
            is_cut = part[key].dim() == 1
            part[key].copy_(elements(value, *piece.span) if is_cut else value.view(part[key].shape))
    return blank


def _merge_state(holder: Holder, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The state of whole parameters, cut and joined to fit `holder`."""
    merged: dict[str, Any] = {}
    numbers: dict[str, list[Any]] = {}
    for index, piece in enumerate(holder.pieces):
        for key, value in states[piece.slot.name].items():
            if getattr(value, "shape", None) == piece.slot.shape and key not in COUNTERS:
                if key not in merged:
                    wide = torch.promote_types(value.dtype, holder.tensor.dtype)  # beside an fp32 master: fp32
                    merged[key] = torch.zeros_like(holder.tensor.data, dtype=wide)
                value = value.contiguous() if isinstance(value, torch.Tensor) else value
                merged[key][piece.offset : piece.offset + piece.numel].copy_(elements(value, *piece.span))
            else:
                numbers.setdefault(key, [None] * len(holder.pieces))[index] = value
    columns = {key: _stacked(holder, key, values) for key, values in numbers.items()}
    return {**merged, **settled(columns, [bool(states[piece.slot.name]) for piece in holder.pieces])}


def _stacked(holder: Holder, key: str, values: list[Any]) -> Any:
    try:
        return stacked(values)
    except ValueError as problem:
        raise ValueError(
            f"cannot join the optimizer state of parameters that share a shard: {key!r} of one in the shard of "
            f"{holder.pieces[0].slot.name} is {problem}. Partition before the first step."
        ) from None
