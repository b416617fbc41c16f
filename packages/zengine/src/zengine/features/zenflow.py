"""ZenFlow as a feature: the state of selective updates in checkpoints, and their report.

The updates belong to the partition (`zpartition.selective`), which reads its policy.  Masters and moments in a
checkpoint are complete, so that a run without ZenFlow goes on from it as from any other; beside them are the pending
gradients, the selected columns and the counts.  Without these (a checkpoint of a run without ZenFlow) the next step
selects columns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast, final

from zengine.engine.feature import Feature
from zpartition.selective import SelectiveUpdates

if TYPE_CHECKING:
    from zengine.engine.parts import Run
    from zpartition import LazyShard, Shard

log = logging.getLogger("zengine")


@final
class SelectiveState(Feature):
    """Saves and restores what is pending and selected."""

    name = "zenflow"

    updates: SelectiveUpdates

    def attach(self, run: Run) -> None:
        """Let the updates divide gradients as the optimizer does."""
        self.updates = cast(SelectiveUpdates, run.parts.partition.updates)
        self.updates.divide_by(run.parts.optimizer.scaled)
        policy = self.updates.policy
        if run.parts.world.rank == 0:
            log.info(
                "zenflow: %g%% of the columns are updated in each step, the rest %s; columns are selected %s",
                100 * policy.topk_ratio,
                f"every {policy.update_every} steps" if policy.update_every else "when its gradients have piled up",
                f"every {policy.select_every} steps" if policy.select_every else "once",
            )

    def state_dict(self) -> Mapping[str, Any]:
        return self.updates.state_dict()

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state; return a function that restores it.  Raises ValueError."""
        self.updates.check_state(state)
        self.updates.prepare_shown(is_unshown=bool(state["unshown"]))
        return lambda: self.updates.load_state_dict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prepare_load(state)()

    def tensors(self) -> Iterator[Shard | LazyShard]:
        """Yield the pending gradients; and the weights that the model shows, where masters are newer."""
        yield from _renamed(self.updates.pending_shards(), "zenflow.pending.")
        yield from _renamed(self.updates.shown_shards(), "zenflow.shown.")

    def tensors_to_fill(self, *, weights_only: bool) -> Iterator[Shard]:
        if not weights_only:
            yield from _renamed(self.updates.pending_shards(), "zenflow.pending.")
            yield from _renamed(self.updates.shards_to_show(), "zenflow.shown.")

    def reset_tensors(self) -> None:
        """Begin without pending gradients, as in a first step."""
        self.updates.reset()


def _renamed(shards: Iterable[Shard], prefix: str) -> Iterator[Shard]:
    return (shard.renamed(prefix + shard.name) for shard in shards)
