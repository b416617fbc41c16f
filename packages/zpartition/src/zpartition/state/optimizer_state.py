"""Optimizer state on shards: rebinding an optimizer, and access to its state.

An elementwise optimizer (SGD, Adam and similar) ignores where one parameter ends and the next begins, so it can
update flat spans: a few long tensors instead of thousands, and only this rank's part.  `rebind` swaps the tensors in
its parameter groups; hyperparameters, schedulers and the object stay.  An optimizer that looks at shapes can update
flat spans if it accepts the positions of tensors (shape_aware.py); others (torch's Muon and Adafactor) keep the
module's own parameters, which works as long as nothing is sharded.

A `Holder` maps the elements of one of the optimizer's tensors to parameters; through it the state of both kinds is
read and restored by parameter name (addressing.py).

[Note: portable state] An optimizer may keep state in a form that only it can cut and join, such as 8-bit codes with a
scale for every few elements.  Such a class has two methods.  `portable_state(tensor)` returns the state by key, as
tensors, or, for quantized state, as objects with `dtype`, `shape` and `read(start, stop)`, which decodes a part;
`load_portable_state(tensor, state)` accepts plain tensors in its place and encodes them, and keeps counts and columns
of them (counts.py) as they are.  So a checkpoint holds numbers, and state moves between formats as it moves between
world sizes.  Options that control the format (`kept_options`) belong to the object and not to the checkpoint.  An
attribute `block_numel` is the number of elements that share a scale: parameters begin at multiples of it in shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch.nn import Parameter

from zpartition.layout.layout import SLOT_ALIGNMENT, Layout, Piece, Slot
from zpartition.state.counts import COUNTERS, merged_columns, stack_column
from zpartition.state.shape_aware import accepts_cuts, check_cuts, new_state, segment_states

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"}
)  # of torch.optim: each element's update reads that element's gradient and state only
SHAPED = frozenset(
    {
        *("Adafactor", "Muon", "LBFGS", "SparseAdam"),  # of torch.optim and Transformers
        *("LAMB", "Lamb", "FusedLAMB", "LARS", "Lars", "Shampoo", "SOAP", "CAME"),  # of other packages
        *("GaLoreAdamW", "GaLoreAdamW8bit", "GaLoreAdafactor", "APOLLOAdamW", "AdaLomo", "Adalomo"),
    }
)  # classes that need whole tensors; their subclasses do, too


class StatePlacement(Protocol):
    """Where the state of one tensor lives between steps; see placement.py."""

    def state(self, optimizer: torch.optim.Optimizer, master: Parameter) -> Mapping[str, Any]:
        """Return the optimizer's state, in numbers."""

    def set_state(self, optimizer: torch.optim.Optimizer, master: Parameter, state: dict[str, Any]) -> None:
        """Replace the optimizer's state by `state`."""

    def clear(self, optimizer: torch.optim.Optimizer, master: Parameter) -> None:
        """Remove the optimizer's state."""


class InOptimizer:
    """The identity: state stays in the optimizer."""

    def state(self, optimizer: torch.optim.Optimizer, master: Parameter) -> Mapping[str, Any]:
        return state_of(optimizer, master)

    def set_state(self, optimizer: torch.optim.Optimizer, master: Parameter, state: dict[str, Any]) -> None:
        set_state_of(optimizer, master, state)

    def clear(self, optimizer: torch.optim.Optimizer, master: Parameter) -> None:
        optimizer.state.pop(master, None)


IN_OPTIMIZER: StatePlacement = InOptimizer()


@attrs.frozen(eq=False)
class Holder:
    """One tensor that the optimizer updates, and the parameters whose elements it holds."""

    tensor: Parameter
    pieces: tuple[Piece, ...]
    placement: StatePlacement = IN_OPTIMIZER

    def state(self, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
        """Return the optimizer's state of the tensor, wherever it lives; see [Note: portable state]."""
        return self.placement.state(optimizer, self.tensor)

    def set_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Replace the optimizer's state of the tensor."""
        self.placement.set_state(optimizer, self.tensor, state)

    def clear(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the optimizer's state of the tensor."""
        self.placement.clear(optimizer, self.tensor)

    @classmethod
    def of_parameter(cls, name: str, param: Parameter) -> Holder:
        """Return the holder of a parameter of the module, held whole."""
        slot = Slot(name, tuple(param.shape), 0, param.numel())
        return cls(param, (Piece(slot, (0, slot.numel), 0),))

    @property
    def is_whole(self) -> bool:
        """True if the tensor is one parameter, in its shape."""
        return len(self.pieces) == 1 and self.tensor.shape == self.pieces[0].slot.shape

    @property
    def is_boxed(self) -> bool:
        """True if a piece is a part of a tensor that model-parallel ranks share."""
        return any(piece.slot.address.global_shape != piece.slot.shape for piece in self.pieces)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer` may update flat spans; unknown classes may, with a warning.

    A class can declare it with an attribute `elementwise`.
    """
    kind = type(optimizer)
    declared = getattr(optimizer, "elementwise", None)
    if declared is not None:
        return bool(declared)
    if shaped_class(optimizer):
        return False
    if kind.__module__.startswith("torch.optim"):
        return True
    if inner_optimizers(optimizer):
        return False  # they hold the module's own parameters
    if kind.__name__ not in ELEMENTWISE:
        warnings.warn(
            f"{kind.__name__} is not known to be elementwise; it updates flat shards. If it uses "
            "the shapes of its parameters, set `elementwise = False` on the class and use stage 0.",
            stacklevel=3,
        )
    return True


def shaped_class(optimizer: torch.optim.Optimizer) -> str:
    """Return the first class of `optimizer` that is known to look at shapes; "" if there is none."""
    return next((base.__name__ for base in type(optimizer).__mro__ if base.__name__ in SHAPED), "")


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers among the attributes of `optimizer` that have parameter groups of their own."""
    own = {id(group) for group in optimizer.param_groups}
    found = [each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer)]
    return [each for each in found if own.isdisjoint(map(id, each.param_groups))]


def sparse_params(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Return the ids of the parameters that a SparseAdam updates: `optimizer` itself, or one inside."""
    sparse = [each for each in (optimizer, *inner_optimizers(optimizer)) if type(each).__name__ == "SparseAdam"]
    return frozenset(id(param) for each in sparse for group in each.param_groups for param in group["params"])


def check_split_master(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if `optimizer` keeps the lower halves of weights whose fp32 masters live here."""
    for index, group in enumerate(optimizer.param_groups):
        if group.get("split_master"):
            raise ValueError(
                f"{type(optimizer).__name__} was created with split_master=True (parameter group {index}), but a "
                "partition itself keeps fp32 masters of low-precision weights, so there is nothing to split. Leave "
                'split_master out; state_dtype="bf16" or "8bit" saves memory.'
            )


def check_optimizer(optimizer: torch.optim.Optimizer, *, cuts: bool) -> None:
    """Raise ValueError for an optimizer that cannot update shards; called before anything is moved."""
    check_split_master(optimizer)
    if cuts and accepts_cuts(optimizer):
        check_cuts(optimizer)
    elif cuts:
        check_elementwise(optimizer)


def check_model_parallel(optimizer: torch.optim.Optimizer, layout: Layout) -> None:
    """Raise ValueError for an optimizer that looks at shapes, if model-parallel ranks share tensors."""
    split = [slot.name for _, slot in layout.slots() if slot.address.global_shape != slot.shape]
    if split and (accepts_cuts(optimizer) or not is_elementwise(optimizer)):
        raise ValueError(
            f"{type(optimizer).__name__} needs whole tensors, but {len(split)} are split over tensor-parallel or "
            f"expert-parallel ranks ({split[0]}, ...), and it would treat each part as a tensor. Use an elementwise "
            "optimizer (AdamW, SGD, Lion, ...), or no tensor and expert parallelism."
        )


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer that is known to look at shapes."""
    kind = type(optimizer).__name__
    if inside := inner_optimizers(optimizer):
        raise ValueError(
            f"{kind} has optimizers inside ({', '.join(type(each).__name__ for each in inside)}) that hold the "
            "module's parameters, but this policy updates flat shards or separate masters. Use one optimizer with "
            "several parameter groups, or stage 0 with fp32 parameters."
        )
    base = shaped_class(optimizer)
    if getattr(optimizer, "elementwise", not base) is False:
        same = {"Adafactor": "Adafactor", "Muon": "Muon"}.get(base, "LAMB" if base.upper().endswith("LAMB") else "")
        ours = f"zoptim.{same}, which works on shards" if same else "zoptim.Muon or Adafactor"
        raise ValueError(
            f"{kind} needs whole tensors of full precision, but this policy cuts them into flat shards or keeps "
            f"separate masters. Use {ours}; an elementwise optimizer (AdamW, SGD, ...); or stage 0 with fp32 "
            "parameters."
        )


def rebind(
    optimizer: torch.optim.Optimizer,
    holders: Sequence[Sequence[Holder]],
    params: Mapping[str, Parameter],
    place_over_ranks: Callable[[], None] = lambda: None,
) -> None:
    """Replace the parameters of group i by the tensors of `holders[i]`; existing state moves along.

    `params` are the module's parameters by name, to which the existing state belongs.  `place_over_ranks`
    describes the new tensors to the optimizer before it is given their state.

    Raises:
        ValueError: some state is neither a value by element nor a number.  The optimizer then has its parameters and
            their state.
    """
    old_state = {name: dict(state_of(optimizer, param)) for name, param in params.items() if param in optimizer.state}
    before = dict(optimizer.state), [dict(group) for group in optimizer.param_groups]
    optimizer.state.clear()
    try:
        _rebind(optimizer, holders, old_state, place_over_ranks)
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
    place_over_ranks: Callable[[], None],
) -> None:
    for group, group_holders in zip(optimizer.param_groups, holders):
        group["params"] = [holder.tensor for holder in group_holders]
        group.pop("param_names", None)  # a shard holds parts of several
    place_over_ranks()
    if not old_state:
        return
    for holder in (holder for group_holders in holders for holder in group_holders):
        states = {piece.slot.name: old_state.get(piece.slot.name, {}) for piece in holder.pieces}
        blank = new_state(optimizer, holder.tensor) if any(states.values()) else None
        if state := _merge_state(holder, states) if blank is None else _fill(optimizer, holder, blank, states):
            holder.set_state(optimizer, state)


def state_of(optimizer: torch.optim.Optimizer, tensor: Parameter) -> Mapping[str, Any]:
    """Return the optimizer's state of `tensor`, {} if there is none; see [Note: portable state]."""
    portable = getattr(optimizer, "portable_state", None)
    state: Mapping[str, Any] = optimizer.state.get(tensor, {}) if portable is None else portable(tensor)
    return state


def set_state_of(optimizer: torch.optim.Optimizer, tensor: Parameter, state: dict[str, Any]) -> None:
    """Replace the optimizer's state of `tensor`; see [Note: portable state].

    Raises:
        ValueError: the optimizer finds that something is missing, or of another size.
    """
    load = getattr(optimizer, "load_portable_state", None)
    if load is None:
        optimizer.state[tensor] = state
    else:
        load(tensor, state)


def elements(value: Any, start: int, stop: int) -> torch.Tensor:
    """Return elements [start, stop) of a state: a flat view of a contiguous tensor, or decoded values."""
    if isinstance(value, torch.Tensor):
        return value.detach().view(-1)[start:stop]
    part: torch.Tensor = value.read(start, stop)
    return part


def is_coded(value: object) -> bool:
    """Return whether a state is quantized: not a tensor, but readable as one."""
    return hasattr(value, "read")


def block_numel(optimizer: torch.optim.Optimizer | None) -> int:
    """Return the alignment of parameters in shards, in elements; see [Note: portable state]."""
    return max(SLOT_ALIGNMENT, int(getattr(optimizer, "block_numel", 1)))


def begin_state(optimizer: torch.optim.Optimizer, tensor: Parameter) -> None:
    """Create the optimizer's state of `tensor` that a constructor would create before the first update.

    Of torch's optimizers, only Adagrad creates state in its constructor and not in a step.
    """
    if isinstance(optimizer, torch.optim.Adagrad):
        groups = optimizer.param_groups
        (group,) = (group for group in groups if any(tensor is member for member in group["params"]))
        first = group["initial_accumulator_value"]
        optimizer.state.update(torch.optim.Adagrad([tensor], initial_accumulator_value=first).state)


def _fill(
    optimizer: torch.optim.Optimizer, holder: Holder, blank: dict[str, Any], states: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return `blank`, state kept by segment, filled with the state of whole parameters."""
    for piece, part in zip(holder.pieces, segment_states(optimizer, holder.tensor, blank) or ()):
        for key, value in states[piece.slot.name].items():
            is_cut = part[key].dim() == 1
            part[key].copy_(elements(value, *piece.span) if is_cut else value.view(part[key].shape))
    return blank


def _merge_state(holder: Holder, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of whole parameters, cut and joined to fit `holder`."""
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
    columns = {key: _stack_column(holder, key, values) for key, values in numbers.items()}
    return {**merged, **merged_columns(columns, [bool(states[piece.slot.name]) for piece in holder.pieces])}


def _stack_column(holder: Holder, key: str, values: list[Any]) -> Any:
    try:
        return stack_column(values)
    except ValueError as problem:
        raise ValueError(
            f"cannot merge the optimizer states of the parameters that share a shard with "
            f"{holder.pieces[0].slot.name}: one {key!r} is {problem}. Partition before the first step."
        ) from None
