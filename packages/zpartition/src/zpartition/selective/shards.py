"""Shards of selective updates, and the optimizers that step them; what they need is checked here."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter

from zpartition.core import PartitionState
from zpartition.layout.address import Shard, cut
from zpartition.layout.selective import carried
from zpartition.selective.columns import ShardColumns
from zpartition.weights.sharded import ShardedStorage, Storage

__all__ = [
    "MOMENTS",
    "STEP",
    "SelectedShard",
    "check_layout",
    "check_optimizer",
    "copy_options",
    "held_bytes",
    "shards_of",
    "sibling_of",
    "step_count",
]

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"


@attrs.define(eq=False)
class SelectedShard:
    """One bucket's shard: columns on the device, the rest on the host."""

    storage: Storage
    rest: Parameter  # (span numel,) the master's memory, for the optimizer of the rest
    pending: list[Tensor]  # (span numel,) sums of gradients: filled, and (overlap) being read by the thread
    columns: ShardColumns | None = None  # None: nothing was selected yet
    place: Tensor = attrs.field(factory=lambda: torch.empty(0))  # `columns.index` on the device
    fast: Parameter = attrs.field(factory=lambda: Parameter(torch.empty(0)))  # (selected,) columns' masters, there
    moments: dict[str, Tensor] = attrs.field(factory=dict)  # theirs: (selected,) on the device or, between steps, not
    shown: Tensor | None = None  # (span numel,) loaded weights that the module shows, until all masters are published

    @property
    def master(self) -> Parameter:
        return self.storage.master

    @property
    def gradient(self) -> Tensor:
        """(span numel,) reduced gradient of this step, on the host."""
        gradient = self.master.grad
        assert gradient is not None, "call finish_gradients first"
        return gradient

    @property
    def selection(self) -> ShardColumns:
        assert self.columns is not None
        return self.columns

    def place_columns(self, device: torch.device, home: torch.device) -> None:
        """Allocate the columns' copy on `device`, and its moments on `home`."""
        count, dtype = self.selection.index.numel(), self.master.dtype
        self.place = self.selection.index.to(device)
        self.fast = Parameter(torch.empty(count, dtype=dtype, device=device))
        self.moments = {key: torch.empty(count, dtype=dtype, device=home) for key in MOMENTS}

    def read_columns(self, state: Mapping[str, Any]) -> None:
        """Copy the columns' masters and moments from the host; state: the optimizer's, of the master."""
        index = self.selection.index
        self.fast.data.copy_(self.master.data[index])
        for key, value in self.moments.items():
            value.copy_(state[key][index])

    def write_columns(self, state: Mapping[str, Any]) -> None:
        """Copy them to the host."""
        index = self.selection.index
        self.master.data[index] = self.fast.data.cpu()
        for key, value in self.moments.items():
            state[key][index] = value.cpu()

    def show_columns(self) -> None:
        """Copy the columns into the module's weights."""
        if isinstance(self.storage, ShardedStorage):
            self.storage.source.invalidate()
        span = self.storage.own_span
        span[self.place] = self.fast.data.to(span.dtype)

    def carry(
        self, before: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], counts: tuple[int, int]
    ) -> None:
        """Rescale the moments, on the host, of elements that have changed sides.

        before: earlier `columns.index`.
        group: the master's parameter group.
        counts: numbers of updates of the rest, and of the columns.
        """
        if not group.get("bias_correction", True):
            return
        num_rest, num_columns = counts
        is_fast, was_fast = (torch.zeros(self.master.numel(), dtype=torch.bool) for _ in range(2))
        is_fast[self.selection.index], was_fast[before] = True, True
        for key, beta in zip(MOMENTS, group["betas"]):
            state[key][is_fast & ~was_fast] *= carried(beta, num_rest, num_columns)
            state[key][was_fast & ~is_fast] *= carried(beta, num_columns, num_rest)


def shards_of(parts: Sequence[SelectedShard], values: Sequence[Tensor], rank: int) -> Iterator[Shard]:
    """Yield `values`, (span numel,) each, with their addresses: live memory, to save or to load into."""
    for part, tensor in zip(parts, values):
        for piece in part.storage.pieces(rank):
            own = tensor[piece.offset : piece.offset + piece.numel]
            yield from cut(Shard, piece.slot.name, piece.slot.address, piece.span, own.__getitem__)


def held_bytes(parts: Sequence[SelectedShard], device: torch.device) -> dict[str, int]:
    """Return the bytes of pending gradients and of columns by owner; device: of the module."""
    found: collections.Counter[str] = collections.Counter()
    for part in parts:
        for pending in part.pending:
            found[f"{'pinned' if pending.is_pinned() else 'host'} pending gradients"] += pending.nbytes
        for value in (part.fast, part.place, *part.moments.values()) if part.columns is not None else ():
            found["columns" if value.device == device else "host columns"] += value.nbytes
    return dict(found)


def sibling_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return an optimizer of the same class and options, without members."""
    kind: Any = type(optimizer)
    return kind([{**group, "params": []} for group in optimizer.param_groups])


def copy_options(optimizer: torch.optim.Optimizer, sibling: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Copy the options of each group, but not its members, and return the sibling's groups."""
    for group, own in zip(optimizer.param_groups, sibling.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        own.update({k: value.clone() if isinstance(value, Tensor) else value for k, value in options.items()})
    return sibling.param_groups


def step_count(optimizer: Any, param: Parameter, count: int) -> Tensor:
    """Return a step count where the optimizer keeps it."""
    group = next(group for group in optimizer.param_groups if any(param is member for member in group["params"]))
    on_device = group.get("fused") or getattr(optimizer, "counts_on_device", False)
    return torch.tensor(float(count), device=param.device if on_device else "cpu")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer without two plain moments and one count."""
    kind = type(optimizer).__name__
    if not any(base.__name__ == "Adam" for base in type(optimizer).__mro__):
        raise ValueError(
            f"selective updates (zenflow) carry Adam's moments between the device and the host, and the optimizer is "
            f"{kind}. Use Adam or AdamW, or leave zenflow out."
        )
    for group in optimizer.param_groups:
        for option in ("amsgrad", "state_dtype", "split_master", "capturable"):
            if group.get(option):
                raise ValueError(
                    f"selective updates (zenflow) need plain float32 moments, and {kind} has {option}="
                    f"{group[option]!r}. Leave one of the two out."
                )


def check_layout(partition: PartitionState) -> None:
    """Raise ValueError for a model whose ranks do not all have a part of each matrix."""
    reasons = {
        "tensors are split over ranks": partition.mp_group.size > 1,
        "a pipeline has several stages": partition.pipeline_stages.size > 1,
        "experts are sharded": partition.layout.is_expert_sharded,
        "nothing is sharded (ZeRO stage 0)": partition.policy.stage == 0,
    }
    found = [reason for reason, is_true in reasons.items() if is_true]
    if found:
        raise ValueError(
            f"selective updates (zenflow) are not possible, because {' and '.join(found)}. Use data parallelism and "
            "ZeRO stage 1, 2 or 3."
        )
