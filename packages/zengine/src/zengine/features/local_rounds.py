"""Rounds of local steps (DiLoCo) as a feature: the exchange of replica groups after each step.

The engine's groups are independent along `replicate` (`zcomm.Groups.independent`): gradients, norms, loss scales and
skipped updates are those of one group; before `start_step`, of the mean gradient of all.  This feature is all that
connects the groups: `zpartition.rounds.Rounds`, the outer optimizer, sends and applies the exchanges that are due.

A checkpoint has the weights of the last exchange under the names of weights, so that everything which reads
checkpoints reads the common model, and beside them the outer momentum, an exchange in flight, and the weights and
optimizer states of each group (checkpoint/replica_names.py).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, final

from zengine.checkpoint.consensus import MODEL
from zengine.engine.feature import Feature
from zengine.planning.rounds import round_policy
from zpartition.rounds import OuterExchange, Rounds

if TYPE_CHECKING:
    from zengine.config.keys.features import DiLoCo
    from zengine.engine.clock import Clock
    from zengine.engine.parts import Run
    from zengine.step_report import StepReport
    from zpartition import LazyShard, Partition, Shard

T = TypeVar("T", "Shard", "Shard | LazyShard")

log = logging.getLogger("zengine")


@final
class LocalRounds(Feature):
    """Exchanges weights between replica groups."""

    name = "diloco"

    rounds: Rounds
    clock: Clock

    def __init__(self, plan: DiLoCo) -> None:
        self.policy = round_policy(plan)
        self._loaded: OuterExchange | None = None  # in flight when the checkpoint was saved

    def attach(self, run: Run) -> None:
        """Begin with the weights of the first group; a collective of all ranks."""
        groups, self.clock = run.parts.groups, run.clock
        self.rounds = Rounds(run.parts.partition, groups.across(), self.policy)
        # no cycle of references with the partition
        restart, ledger = weakref.WeakMethod(self.rounds.restart), weakref.WeakMethod(self.rounds.ledger)
        run.parts.partition.weights_replaced = lambda: (restart() or _nothing)()
        run.parts.partition.held_beside = lambda: (ledger() or dict)()
        if run.parts.world.rank == 0:
            log.info(
                "diloco: %d groups of %d ranks exchange weights every %d steps, in %d fragments",
                self.rounds.size,
                len(groups.replica_ranks()),
                self.policy.sync_every,
                self.policy.num_fragments,
            )

    def step_end(self, report: StepReport) -> None:
        self.rounds.step_end(report.step)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the number of groups, and the exchange in flight."""
        fragment, ends = self.rounds.pending
        return {
            "groups": self.rounds.size,
            "fragments": self.policy.num_fragments,
            "pending": {"fragment": fragment, "ends": ends},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prepare_load(state)()

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state; return a function that restores it.  Raises ValueError.

        An exchange in flight continues if the groups and fragments are those of the saved run.
        """
        groups, fragments, pending = (state.get(key) for key in ("groups", "fragments", "pending"))
        numbers = [groups, fragments, *(pending.values() if isinstance(pending, Mapping) else [None])]
        if len(numbers) != 4 or not all(type(each) is int for each in numbers):
            raise ValueError(f"groups = {groups!r}, fragments = {fragments!r}, pending = {pending!r} are no numbers")
        assert isinstance(pending, Mapping)
        fragment, ends = int(pending["fragment"]), int(pending["ends"])
        continues = groups == self.rounds.size and fragments == self.policy.num_fragments and fragment >= 0
        loaded = self._loaded = self.rounds.stage(fragment, ends) if continues else None

        def commit() -> None:
            self._loaded = None
            if loaded is not None:
                self.rounds.resume(loaded)

        return commit

    def tensors(self) -> Iterator[Shard | LazyShard]:
        """Yield the weights of the last exchange under the names of weights, and the rest of the outer state."""
        if self.clock.steps < self.policy.start:
            self.rounds.follow()
        yield from _renamed(self.rounds.shards(), MODEL)
        yield from _renamed(self.rounds.shards("momentum"), f"{self.name}.momentum.")
        yield from _renamed(self.rounds.pending_shards(), f"{self.name}.pending.")

    def tensors_to_fill(self, *, weights_only: bool) -> Iterator[Shard]:
        yield from _renamed(self.rounds.shards(), MODEL)
        if weights_only:
            return
        yield from _renamed(self.rounds.shards("momentum"), f"{self.name}.momentum.")
        if self._loaded is not None:
            yield from _renamed(self.rounds.shards_of(self._loaded), f"{self.name}.pending.")

    def reset_tensors(self) -> None:
        """Clear the momentum, and drop the exchange in flight."""
        self.rounds.reset()

    def close(self) -> None:
        """Drop the exchange in flight."""
        self.rounds.drop_pending()


@final
class GradientsOfAllGroups(Feature):
    """Data parallelism over all groups before the first round (`diloco.start_step`)."""

    def __init__(self, rounds: LocalRounds) -> None:
        self.local_rounds = rounds

    def gradients_ready(self, partition: Partition) -> None:
        if self.local_rounds.clock.steps < self.local_rounds.policy.start:
            self.local_rounds.rounds.average_gradients()


def _nothing() -> None:
    """Stand in for a closed engine's exchange."""


def _renamed(shards: Iterable[T], prefix: str) -> Iterator[T]:
    return (shard.renamed(prefix + shard.name) for shard in shards)
