"""Names of tensors in a checkpoint of independent replica groups (diloco).

Groups have weights and optimizer states of their own:

| name | content |
|---|---|
| `model.<name>` | weights of the last exchange; frozen weights; buffers of group 0 |
| `diloco.<group>.model.<name>` | present weights and buffers of a group |
| `optimizer.<key>.<name>` | optimizer state of group 0 |
| `diloco.<group>.optimizer.<key>.<name>` | of each other group |
| `diloco.momentum.<name>`, `diloco.pending.<name>` | of the outer optimizer; of an exchange in flight |

So a reader that knows no groups (an export, an engine without diloco, inference) finds one common model.  The same
number of groups continues bit for bit.  Another number begins a round at the weights of the last exchange, and group
g takes the optimizer states of group g modulo the saved number.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, final

import attrs

import zckpt
from zengine.checkpoint.consensus import MODEL, Source, small_state

if TYPE_CHECKING:
    from zengine.engine.parts import Run

__all__ = ["GROUPS", "OPTIMIZER", "OWN", "SavedNames", "own_names", "with_own_objects"]

OPTIMIZER = "optimizer."  # prefix of tensor names: "optimizer.<state key>.<parameter>"
GROUPS = "replica_groups"  # their number, in the saved objects; 0: replicas have equal weights
OWN = "replica"  # the objects of its group, in those of each rank
OWN_OBJECTS = ("optimizer", "scheduler", "scaler", "clock")

log = logging.getLogger("zengine")


@final
@attrs.frozen
class SavedNames:
    """Names under which this rank saves."""

    num_groups: int  # 0: replicas have equal weights
    group: int  # of this rank
    frozen: frozenset[str]  # parameters that are equal in all groups
    buffers: frozenset[str]

    @classmethod
    def of(cls, run: Run) -> SavedNames:
        """Return the names of this rank's group."""
        groups, partition = run.parts.groups, run.parts.partition
        if not groups.independent:
            return cls(0, 0, frozenset(), frozenset())
        ranks = groups.ranks("replicate")
        frozen = frozenset(partition.names()) - frozenset(partition.params)
        buffers = frozen & frozenset(name for name, _ in run.module.named_buffers())
        return cls(len(ranks), ranks.index(groups.rank), frozen - buffers, buffers)

    def of_weight(self, name: str) -> tuple[str, ...]:
        """Return the names of a weight or buffer."""
        plain, own = MODEL + name, f"{_prefix(self.group)}{MODEL}{name}"
        if not self.num_groups or name in self.frozen:
            return (plain,)
        return (own, plain) if name in self.buffers and not self.group else (own,)

    def of_state(self, key: str, name: str) -> str:
        """Return the name of an optimizer state."""
        return f"{_prefix(self.group) if self.group else ''}{OPTIMIZER}{key}.{name}"

    def objects(self, objects: dict[str, Any]) -> dict[str, Any]:
        """Return the objects of this rank's group, which other groups do not have; empty without groups."""
        return {key: objects[key] for key in OWN_OBJECTS} if self.num_groups else {}


def own_names(run: Run, checkpoint: Source, names: frozenset[str], *, weights_only: bool) -> dict[str, str]:
    """Return the names that this rank reads in place of those of the common model; logs a change of groups.

    names: of the checkpoint.
    """
    own, saved = SavedNames.of(run), small_state(checkpoint).member(GROUPS, 0).integer()
    if weights_only or not saved:
        return {}
    is_same = saved == own.num_groups
    if not is_same and run.parts.world.rank == 0:
        log.warning(
            "checkpoint %s was saved by %d replica groups, and this run has %s: it continues from the weights of the "
            "last exchange. The steps of each group since then, and an exchange in flight, are dropped",
            checkpoint.path,
            saved,
            own.num_groups or "none",
        )
    prefix = _prefix(own.group % saved)
    kinds = (MODEL, OPTIMIZER) if is_same else (OPTIMIZER,)
    found = (name for name in names if name.startswith(tuple(prefix + kind for kind in kinds)))
    return {name.removeprefix(prefix): name for name in found}


def with_own_objects(run: Run, objects: zckpt.Node, own: zckpt.Node) -> zckpt.Node:
    """Return the saved objects with those of this rank's group.

    own: the objects that a rank of this number saved.
    """
    found = own.member(OWN, {}).members()
    if objects.member(GROUPS, 0).integer() != SavedNames.of(run).num_groups or not found:
        return objects
    return attrs.evolve(objects, value={**objects.value, **{key: node.value for key, node in found.items()}})


def _prefix(group: int) -> str:
    return f"diloco.{group}."
