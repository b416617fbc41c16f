"""Selection of columns: which ones, by the gradients of all ranks, and when their rest has piled up.

Every rank has a part of every column, so sums are taken over the ranks of a copy, in float64, and all ranks find the
same columns and the same end of an interval.  Laws: layout/selective.py; sums over parts of columns: columns.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

import zcomm
from zpartition.core import PartitionState
from zpartition.layout.selective import most_important, num_ripe
from zpartition.selective.columns import MatrixTable, ShardColumns, piece_sums
from zpartition.selective.shards import SelectedShard

__all__ = ["Selection"]


@final
class Selection:
    """Selected columns of a partition's matrices."""

    def __init__(self, partition: PartitionState, parts: Sequence[SelectedShard]) -> None:
        """Begin without any.  partition: may be a weak proxy, since it holds the owner of this object."""
        self.columns: dict[str, Tensor] = {}  # (k,) int64 by matrix
        self.magnitudes = torch.zeros(2, 0, dtype=torch.float64)  # of `num_ripe`; without a fixed interval
        self._partition, self._parts = partition, parts
        self._policy = partition.policy.offload.selective
        self._table = MatrixTable.of(partition.layout)

    @property
    def exists(self) -> bool:
        """True if columns were selected."""
        return all(part.columns is not None for part in self._parts)

    def choose(self) -> dict[str, Tensor]:
        """Return the columns with most of this step's gradient, over all ranks."""
        sums = torch.zeros(self._table.num_columns, dtype=torch.float64)
        for part in self._parts:
            piece_sums(sums, part.storage.pieces(self._partition.rank), part.gradient, self._table)
        self._over_ranks(sums, "sum")
        return {n: most_important(sums[at], self._policy.topk_ratio) for n, at in self._table.places.items()}

    def set(self, chosen: Mapping[str, Tensor]) -> None:
        """Select these columns; nothing of the rest has piled up."""
        for part in self._parts:
            pieces = part.storage.pieces(self._partition.rank)
            part.columns = ShardColumns.of(pieces, part.master.numel(), self._table, chosen)
        self.columns = dict(chosen)
        self.magnitudes = torch.zeros(2, len(self._table.numbers), dtype=torch.float64)

    def clear(self) -> None:
        """Select nothing."""
        self.columns = {}
        for part in self._parts:
            part.columns = None

    def is_ripe(self, factor: float, num_pending: int) -> bool:
        """Add this step's gradients to the magnitudes; return whether enough matrices have a ripe rest.

        factor: reciprocal of the gradients' divisor.  num_pending: steps of the interval, this one included.
        """
        num_matrices = len(self._table.numbers)
        found = torch.zeros(2, 2, num_matrices, dtype=torch.float64)  # sums, counts; of columns, of all
        for part in self._parts:
            gradient = part.gradient
            part.selection.add_magnitudes(found[0], gradient, gradient[part.selection.index])
            part.selection.add_counts(found[1])
        self._over_ranks(found, "sum")
        (columns, everything), (num_selected, num) = found
        self.magnitudes[0] += (columns / num_selected * factor - self.magnitudes[0]) / num_pending
        self.magnitudes[1] += (everything - columns).clamp_(min=0) / (num - num_selected) * factor
        self.magnitudes[1][num == num_selected] = torch.inf
        return num_ripe(*self.magnitudes) >= self._policy.ripe_share * num_matrices

    def agreed_count(self, counts: Iterable[float]) -> int:
        """Return the number of updates that all parameters of all ranks have; 0 without any.

        counts: those of this rank's parameters.

        Raises:
            ValueError: there are several, on all ranks.
        """
        own = [*counts]
        extremes = torch.tensor([max(own, default=-1), -min(own, default=torch.inf)], dtype=torch.float64)
        self._over_ranks(extremes, "max")
        most, least = float(extremes[0]), -float(extremes[1])
        if most > least:
            raise ValueError(
                f"selective updates keep one number of updates, and the parameters have {least:g} to {most:g}: some "
                "were unused in earlier steps. Begin with new optimizer states "
                "(load_checkpoint(load_optimizer_states=False)), or train without zenflow."
            )
        return max(0, int(most))

    def _over_ranks(self, vector: Tensor, op: str) -> None:
        """Reduce `vector`, on the host, over the ranks that hold one copy."""
        if self._partition.layout.num_shards > 1 and vector.numel():
            reduced = vector.to(self._partition.device)
            zcomm.all_reduce(reduced, self._partition.ranks.shard, op=op, label="gradients of columns")
            vector.copy_(reduced)

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the selected columns, and the magnitudes of an interval without a fixed end."""
        numbers = self._table.numbers.items() if self.magnitudes.numel() else ()
        return {
            "selected": {name: columns.tolist() for name, columns in self.columns.items()},
            "magnitudes": {name: self.magnitudes[:, number].tolist() for name, number in numbers},
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError for a state of another model."""
        shapes, selected, magnitudes = self._table.shapes, state.get("selected"), state.get("magnitudes")
        if not isinstance(selected, Mapping):
            raise ValueError(f"selected = {str(selected)[:40]} is no state: it must map matrices to columns")
        if not isinstance(magnitudes, Mapping) or (magnitudes and set(magnitudes) != set(self._table.numbers)):
            raise ValueError(f"magnitudes = {str(magnitudes)[:80]} are not those of the matrices of this model")
        if selected and set(selected) != set(shapes):
            other = sorted(set(selected) ^ set(shapes))
            raise ValueError(f"the saved selection and this model differ in the matrices {', '.join(other[:5])}")
        for name, columns in selected.items():
            width = torch.Size(shapes[name][1:]).numel()
            if columns != sorted(set(columns)) or not all(type(at) is int and 0 <= at < width for at in columns):
                raise ValueError(f"the saved selection of {name} is no ascending list of columns below {width}")

    def load_magnitudes(self, state: Mapping[str, Any]) -> None:
        """Restore the magnitudes, after the columns were selected."""
        if state["magnitudes"]:
            numbers = [state["magnitudes"][name] for name in self._table.numbers]
            self.magnitudes = torch.tensor(numbers, dtype=torch.float64).t().contiguous()

    def saved_columns(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the selected columns of a state; empty if it has none."""
        selected = state["selected"]
        return {name: torch.tensor(selected[name]) for name in self._table.shapes} if selected else {}
