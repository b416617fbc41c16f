"""Optimizer state by parameter name and global address, to be saved and loaded.

Saving reads the optimizer's tensors in place, and decodes quantized state part by part.  Loading reads into separate
tensors, which the optimizer adopts afterwards: quantized state cannot be read into, and a load that fails half-way
changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import torch

from zpartition.layout.address import LazyShard, Shard, cut, whole
from zpartition.layout.layout import Piece
from zpartition.state.counts import ALIKE, is_column, labels_of, merged_columns
from zpartition.state.optimizer_state import Holder, elements, is_coded
from zpartition.state.shape_aware import new_state, segment_states

# For each state key of a parameter: dtype, and shape, or None for a number beside the parameter such as a step count.
Kinds = Mapping[str, tuple[torch.dtype, "tuple[int, ...] | None"]]


def state_shards(
    optimizer: torch.optim.Optimizer, holders: Iterable[Holder]
) -> Iterator[tuple[str, Shard | LazyShard]]:
    """Yield (state key, shard) for every tensor of the optimizer's state, addressed by parameter name.

    A state tensor as large as its parameter is cut like it; each parameter has its own counters (counts.py), and a
    parameter that was never updated has no state.  A parameter that is held whole may have state of any shape, and
    so may one whose optimizer keeps state by segment (shape_aware.py).  Quantized state is decoded piece by piece
    when read.

    Raises:
        TypeError: the optimizer keeps something that is neither.
    """
    for holder in holders:
        state = holder.state(optimizer)
        if (by_segment := segment_states(optimizer, holder.tensor, state)) is not None:
            yield from _by_segment(holder, by_segment)
            continue
        begun = [bool(label) for label in labels_of(state, len(holder.pieces))]
        for key, value in state.items():
            if key == ALIKE:
                continue
            if (shards := _addressed(holder, value, begun)) is None:
                raise TypeError(
                    f"state {key!r} of {type(optimizer).__name__} for {holder.pieces[0].slot.name} is "
                    f"{_describe(value)}; a checkpoint can hold tensors shaped like the parameter, and numbers"
                )
            yield from ((key, shard) for shard in shards)


@final
@attrs.frozen(eq=False)
class StagedState:
    """State loaded for an optimizer, which keeps its own until `hand_over`."""

    optimizer: torch.optim.Optimizer
    held: list[tuple[Holder, dict[str, torch.Tensor], list[bool]]]  # zeros to read into; by piece: has state
    bare: list[Holder]  # holders without state
    forms: Mapping[str, str] = attrs.field(factory=dict)  # see `number_forms`

    def shards(self) -> Iterator[tuple[str, Shard]]:
        """Yield (state key, shard) to read into, addressed as by `state_shards`."""
        for holder, state, begun in self.held:
            if (by_segment := segment_states(self.optimizer, holder.tensor, state)) is not None:
                yield from _by_segment(holder, by_segment)
                continue
            for key, value in state.items():
                if not holder.pieces and value.dim() == 0:  # padding, counted like any parameter
                    yield key, Shard("", (), (), (0, 1), value.view(-1))
                for shard in _addressed(holder, value, begun) or ():
                    assert isinstance(shard, Shard)
                    yield key, shard

    def check(self) -> None:
        """Call `check_portable_state` of the optimizer, if it has that method.

        Raises:
            ValueError: some state is missing.
        """
        check = getattr(self.optimizer, "check_portable_state", lambda tensor, state: None)
        for holder, state, _ in self.held:
            if holder.pieces:  # else padding, whose state is not loaded
                check(holder.tensor, state)

    def hand_over(self) -> None:
        """Replace the optimizer's state by the loaded one, in the order of its parameter groups.  Once."""
        self.optimizer.state.clear()
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        place_of = {id(param): place for place, param in enumerate(params)}
        self.held.sort(key=lambda each: place_of.get(id(each[0].tensor), len(place_of)))
        for holder in self.bare:
            holder.clear(self.optimizer)
        while self.held:
            holder, state, begun = self.held.pop(0)  # freed one by one
            if segment_states(self.optimizer, holder.tensor, state) is None and len(begun) > 1:
                columns = {key: value for key, value in state.items() if is_column(value, len(begun))}
                large = {key: value for key, value in state.items() if key not in columns}
                state = {**merged_columns(columns, begun), **large}
            holder.set_state(self.optimizer, {key: _in_form(self.forms.get(key), state[key]) for key in state})


def make_state(
    optimizer: torch.optim.Optimizer,
    holders: Iterable[Holder],
    kinds_of: Callable[[str], Kinds],
    forms: Mapping[str, str] | None = None,
) -> StagedState:
    """Return zeroed state for every holder, to load into and then to hand over; the optimizer is not changed.

    `kinds_of(parameter name)[key]` is (dtype, shape), with None as the shape of a scalar; `kinds_of("")` is that of
    a shard without parameters; `forms` are the saving optimizer's `number_forms`.  A scalar lives where the
    optimizer keeps it: on the parameter's device if the group is fused or capturable or the class has
    `counts_on_device`, else on the CPU.
    """
    group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    staged = StagedState(optimizer, [], [], forms or {})
    for holder in holders:
        group = group_of[id(holder.tensor)]
        beside = group.get("fused") or group.get("capturable") or getattr(optimizer, "counts_on_device", False)
        scalar_device = holder.tensor.device if beside else torch.device("cpu")
        of_pieces = [kinds_of(piece.slot.name) for piece in holder.pieces]
        kinds = {key: kind for found in of_pieces for key, kind in found.items()}
        if not holder.pieces:  # only padding, which optimizers update as well: ranks agree on what has state
            kinds = dict(kinds_of(""))
        state = (new_state(optimizer, holder.tensor) if kinds else None) or {}
        for key, (dtype, shape) in kinds.items() if not state else ():
            if shape is None:
                numbers = (len(of_pieces),) if len(of_pieces) > 1 else ()
                state[key] = torch.zeros(numbers, dtype=dtype, device=scalar_device)
            elif holder.is_whole and not holder.is_boxed:
                state[key] = torch.zeros(shape, dtype=dtype, device=holder.tensor.device)
            else:
                state[key] = torch.zeros_like(holder.tensor.data, dtype=dtype)
        if state:
            staged.held.append((holder, state, list(map(bool, of_pieces))))
        else:
            staged.bare.append(holder)
    return staged


def number_forms(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the form of each state that is a number, but no 0-d tensor: "int", "float", or "vector": (1,).

    A checkpoint holds numbers as 0-d tensors; with their forms, `make_state` restores them as they were.
    """
    found: dict[str, str] = {}
    others: set[str] = set()  # states that have another form of some parameter
    for state in optimizer.state.values():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            numbers = [each for each in value if each is not None] if isinstance(value, list) else [value]
            if isinstance(value, torch.Tensor) and value.shape == (1,):
                found[key] = "vector"
            elif numbers and all(map(_is_number, numbers)):
                found[key] = type(numbers[0]).__name__
            else:
                others.add(key)
    return {key: form for key, form in found.items() if key not in others}


def _in_form(form: str | None, value: Any) -> Any:
    """Return a loaded number in its form of `number_forms`; another value unchanged."""
    if form is None or not isinstance(value, torch.Tensor) or value.dim() > 1:
        return value
    if form == "vector":
        return value.view(1) if value.dim() == 0 else value
    return value.tolist() if value.dim() else value.item()


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _by_segment(holder: Holder, states: Iterable[Mapping[str, torch.Tensor]]) -> Iterator[tuple[str, Shard]]:
    """Yield (state key, shard) of state kept by segment: cut as the tensor where it is flat, else whole."""
    for piece, state in zip(holder.pieces, states):
        name = piece.slot.name
        for key, value in state.items():
            if value.dim() == 1:
                yield from ((key, shard) for shard in _cut(piece, value))
            elif value.dim():
                yield key, whole(name, value)
            else:
                yield key, Shard(name, (), (), (0, 1), value.view(-1))


def _addressed(holder: Holder, value: Any, begun: Sequence[bool]) -> Iterator[Shard | LazyShard] | None:
    """Return the shards of one state of `holder`, for the pieces with state; None for a value without an address."""
    numel = holder.tensor.numel()
    pieces = [piece for piece, has_state in zip(holder.pieces, begun) if has_state]
    if _is_number(value) or (isinstance(value, list) and is_column(value, len(begun))):
        value = _as_tensor(value)
    if isinstance(value, torch.Tensor) and value.dim() and holder.is_whole and not holder.is_boxed:
        return iter([whole(holder.pieces[0].slot.name, value)])
    if isinstance(value, torch.Tensor) and value.dim() and value.numel() == numel:
        return (shard for piece in pieces for shard in _cut(piece, elements(value, *_range(piece))))
    if isinstance(value, torch.Tensor) and (value.numel() == 1 or is_column(value, len(begun))):
        numbers = value.detach().view(-1)
        places = range(len(begun)) if numbers.numel() > 1 else [0] * len(begun)
        found = zip(holder.pieces, places, begun)
        return (Shard(p.slot.name, (), (), (0, 1), numbers[at : at + 1]) for p, at, has_state in found if has_state)
    if is_coded(value) and value.shape == holder.tensor.shape:
        return (shard for piece in pieces for shard in _coded(piece, value))
    return None


def _as_tensor(value: Any) -> torch.Tensor | None:
    """Return a number as a 0-d tensor, a column of numbers (None: no update) as (pieces,); None for other values."""
    numbers = [each for each in value if each is not None] if isinstance(value, list) else [value]
    if not numbers or not all(map(_is_number, numbers)):
        return None
    dtype = torch.int64 if all(type(each) is int for each in numbers) else torch.float64
    given = [each if each is not None else 0 for each in value] if isinstance(value, list) else value
    return torch.tensor(given, dtype=dtype)


def _cut(piece: Piece, values: torch.Tensor) -> Iterator[Shard]:
    """Return the shards of `piece`, (its numel,) values."""
    return cut(Shard, piece.slot.name, piece.slot.address, piece.span, values.__getitem__)


def _coded(piece: Piece, value: Any) -> Iterator[LazyShard]:
    """Return the same for quantized state, decoded when read."""

    def reader(part: slice) -> Callable[[], torch.Tensor]:
        return functools.partial(value.read, piece.offset + part.start, piece.offset + part.stop)

    return cut(LazyShard, piece.slot.name, piece.slot.address, piece.span, reader)


def _range(piece: Piece) -> tuple[int, int]:
    """Return the position of `piece` in its holder's tensor."""
    return piece.offset, piece.offset + piece.numel


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
