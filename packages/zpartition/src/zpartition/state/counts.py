"""Counters of each parameter of a shard: above all, its number of updates.

An optimizer keeps a step count, and the like, once for each tensor; here a tensor is a shard with pieces of many
parameters.  While all of them have had the same updates, one number serves all, at no cost.  Once a piece was unused,
every number becomes a *column*: (pieces,), in their order; and beside the columns stands `alike`, (pieces,) int64:
pieces with the same label have had the same updates, pieces with label 0 none.

Columns are part of the optimizer's state, so they go where it goes: into state dicts, to disk, and back when a step
is rolled back.  Shards with columns are updated by unused.py.  Checkpoints have no columns: they hold the number of
each parameter under its name (addressing.py).

Rejected: a shard for each count (the layout, and with it messages and sums, would depend on which parameters were
used); one label per count (counts are on the device, and reading them synchronizes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ALIKE",
    "COUNTERS",
    "begin",
    "is_column",
    "is_large",
    "labels_of",
    "merged_columns",
    "number_of",
    "numbers_after",
    "stack_column",
]

ALIKE = "alike"
COUNTERS = frozenset({"step", "mu_product", "eta", "mu", ALIKE})  # of torch.optim: one number a parameter


def is_large(key: str, value: object) -> bool:
    """Return whether a state holds values by element (quantized or not), and not a number or a column."""
    return hasattr(value, "read") or (isinstance(value, Tensor) and value.dim() > 0 and key not in COUNTERS)


def is_column(value: object, num_pieces: int) -> bool:
    """Return whether a state of a shard with columns is one; a shard has far more elements than pieces."""
    if isinstance(value, Tensor):
        return value.dim() == 1 and value.numel() == num_pieces
    return isinstance(value, list) and len(value) == num_pieces


def labels_of(state: Mapping[str, Any], num_pieces: int) -> list[int]:
    """Return a label for each piece: equal for pieces with the same updates; 0 for none."""
    if ALIKE in state:
        return [int(label) for label in state[ALIKE].tolist()]
    return [int(bool(state))] * num_pieces


def begin(state: Mapping[str, Any], index: int) -> None:
    """Give piece `index`, which had no updates, a label of its own."""
    labels = state.get(ALIKE)
    if labels is not None and not labels[index]:
        labels[index] = labels.max() + 1


def number_of(state: Mapping[str, Any], key: str, index: int, num_pieces: int) -> Any:
    """Return state `key` of piece `index`: its own, or the common one."""
    value = state[key]
    return value[index] if ALIKE in state and is_column(value, num_pieces) else value


def stack_column(values: Sequence[Any]) -> Any:
    """Return a column of one number each; a tensor has 0 for None.

    Raises:
        ValueError: a value is a tensor of several numbers.
    """
    given = [value for value in values if value is not None]
    for value in given:
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"a tensor of shape {tuple(value.shape)}, neither a number nor a value for each element")
    if not given or not all(isinstance(value, Tensor) for value in given):
        return list(values)
    blank = torch.zeros((), dtype=given[0].dtype, device=given[0].device)
    return torch.stack([blank if value is None else value.detach().reshape(()) for value in values])


def merged_columns(columns: Mapping[str, Any], has_state: Sequence[bool]) -> dict[str, Any]:
    """Return the counters of a shard: one number where all pieces agree, else columns and labels.

    has_state: whether each piece has any state.  Synchronizes with the device.
    """
    rows = [*zip(*(column.tolist() if isinstance(column, Tensor) else column for column in columns.values()))]
    kinds: list[Any] = [None]
    labels = []
    for row, here in zip(rows or [()] * len(has_state), has_state):
        kind = row if here else None
        if kind not in kinds:
            kinds.append(kind)
        labels.append(kinds.index(kind))
    if set(labels) <= {1}:
        return {key: value[0].clone() if isinstance(value, Tensor) else value[0] for key, value in columns.items()}
    return {**columns, ALIKE: torch.tensor(labels)}


def numbers_after(
    before: Mapping[str, Any], now: Sequence[Mapping[str, Any]], was_updated: Sequence[bool]
) -> dict[str, Any]:
    """Return the columns and labels of a shard after an update of some of its pieces.

    before: its state until then; now: the counters of each updated piece, ignored for the others.
    """
    num_pieces = len(was_updated)
    labels = labels_of(before, num_pieces)
    keys = [key for state in (before, *now) for key, value in state.items() if not is_large(key, value)]
    made: dict[str, Any] = {}
    for key in dict.fromkeys(keys):
        values = [
            now[index].get(key)
            if was_updated[index]
            else number_of(before, key, index, num_pieces)
            if label and key in before
            else None
            for index, label in enumerate(labels)
        ]
        if key != ALIKE and any(value is not None for value in values):
            made[key] = stack_column(values)
    histories = list(zip(labels, was_updated))
    known = {history: index for index, history in enumerate(dict.fromkeys([(0, False), *histories]))}
    return {**made, ALIKE: torch.tensor([known[history] for history in histories])}
