"""An engine to disk and back.

What is saved: weights (the masters, where there are any), optimizer state, both under logical names with global
addresses, so that any world size and any stage can read them; and as JSON the counters, the optimizer's
hyperparameters, schedule, scaler, features, the caller's `client_state`, and each rank's random state and loader
position.  Restoring all of it makes the continued run bit-identical to the uninterrupted one at the same world size.
At another one the order of data continues at the same sample, and each rank keeps the random state it started
with, which is said.

Gradients are not saved: a checkpoint is taken between steps, and a save in the middle of accumulation is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

import zckpt
import zpartition
from zengine.consensus import (
    MODEL,
    GroupPeers,
    Source,
    common_tag,
    compare_kinds,
    compare_names,
    find,
    on_every_rank,
    optimizer_kind,
    require_run,
    say_rounded,
)
from zengine.jsonable import decode, encode
from zengine.restoring import (
    EVERYTHING,
    OPTIMIZER,
    What,
    prepare,
    restore_objects,
    restore_rank,
    travelling_options,
    undone_on_error,
)
from zengine.saving import Content

if TYPE_CHECKING:
    from zengine.engine import Engine

__all__ = ["What", "load", "restore", "save"]


def save(
    engine: Engine,
    root: str,
    tag: str | None,
    client_state: Mapping[str, Any],
    *,
    latest: bool = True,
    left_out: frozenset[str] = frozenset(),
) -> str:
    """Write a checkpoint; returns its folder. `tag` defaults to global_step<N>; every rank must call.

    left_out: names of weights that are not written, because they can be had elsewhere; a load leaves them alone.

    Raises:
        ValueError: gradients of an unfinished step are pending.
        TypeError: `client_state` holds something that is neither JSON nor a scalar tensor.
        zckpt.CheckpointError: on every rank, when any rank failed; earlier checkpoints are untouched.
    """
    clock = engine.clock
    clock.require_open("save_checkpoint")
    if not clock.is_between_steps:
        raise ValueError(
            f"save_checkpoint() is legal between steps; micro-step {clock.index + 1} of {clock.accumulation} of "
            f"step {clock.steps} is under way (phase {clock.phase.value}): its gradients would be lost. Save after a "
            "step() that returned a report."
        )
    peers = GroupPeers.of(engine)
    common = common_tag(f"global_step{clock.steps}" if tag is None else str(tag), engine.plan.tag_validation, peers)
    objects, rank_objects = on_every_rank(lambda: (_objects(engine, client_state), _rank_objects(engine)), peers)
    objects["left_out"] = sorted(left_out)
    telemetry = engine.parts.telemetry
    with telemetry.paused(), telemetry.span("checkpoint"):
        content = Content(
            shards=_shards(engine, left_out),
            objects=objects,
            rank_objects=rank_objects,
            step=clock.steps,
            latest=latest,
            keep=engine.plan.keep,
        )
        return engine.parts.saver.save(root, common, content, peers)


def load(engine: Engine, root: str, tag: str | None, what: What, *, strict: bool) -> tuple[str, dict[str, Any]]:
    """Restore `what` from the checkpoint `tag` of `root` (None: the newest); returns (folder, client state).

    Phases: find (all ranks the same one), compare names and kinds, restore what may refuse, read, publish, restore
    the rest.

    Raises:
        zckpt.CheckpointError: on every rank; nothing there, damaged, or not this model. No weight has changed then.
        ValueError: on every rank; scaler, schedule or loader refuses its state (no weight has changed); or the
            optimizer finds that something of its state is missing (weights have been read: load again or start over).
    """
    engine.clock.require_open("load_checkpoint")
    engine.parts.saver.wait()
    peers = GroupPeers.of(engine)
    return _take(engine, find(root, tag, peers), what, peers, strict=strict)


def restore(engine: Engine) -> dict[str, Any]:
    """Put back what the newest background save has copied, whether the disk has it yet or not; its client state.

    Every rank must call, with the same stage and world as then.

    Raises:
        ValueError: on every rank; nothing was saved with "async_save" yet.
        zckpt.CheckpointError: on every rank; the copy is not of this engine as it is now. Nothing has changed then.
    """
    engine.clock.require_open("restore_from_memory")
    peers = GroupPeers.of(engine)
    return _take(engine, engine.parts.saver.newest(peers), EVERYTHING, peers, strict=True)[1]


def _take(
    engine: Engine, checkpoint: Source, what: What, peers: GroupPeers, *, strict: bool
) -> tuple[str, dict[str, Any]]:
    names = frozenset(checkpoint.names())
    partition = engine.parts.partition
    left_out = {MODEL + name for name in checkpoint.objects.get("left_out", ())}
    compare_names(partition, names | left_out, str(checkpoint.path), peers, strict=strict)
    if what.run:
        require_run(checkpoint)
    compare_kinds(engine, checkpoint, optimizer=what.optimizer, scheduler=what.scheduler)
    partition.zero_grad()
    partition.admit_unfrozen()
    wanted = [shard for shard in _named(partition.shards_to_fill()) if shard.name in names]
    say_rounded(wanted, checkpoint, peers.rank)
    with undone_on_error(engine):
        restored = on_every_rank(lambda: prepare(engine, checkpoint, what), peers, "nothing was loaded")
        checkpoint.read([*wanted, *restored.shards], strict=False, cast=True, verify="first", peers=peers)
        on_every_rank(restored.commit, peers, "the optimizer's state was not taken")
    partition.publish()
    restore_objects(engine, checkpoint.objects, what)
    if what.run:
        restore_rank(engine, checkpoint, peers)
    return str(checkpoint.path), decode(checkpoint.objects.get("client_state", {}))


# -- what is saved -------------------------------------------------------------------------------


def _shards(engine: Engine, left_out: frozenset[str]) -> Iterator[zckpt.ShardLike]:
    partition = engine.parts.partition
    yield from _named(shard for shard in partition.shards() if shard.name not in left_out)
    if engine.optimizer is not None:
        for key, shard in zpartition.state_shards(engine.optimizer, partition.holders):
            yield attrs.evolve(shard, name=f"{OPTIMIZER}{key}.{shard.name}")


def _named(shards: Iterable[Any]) -> Iterator[Any]:
    """With the names that weights have in a checkpoint."""
    for shard in shards:
        yield attrs.evolve(shard, name=MODEL + shard.name)


def _objects(engine: Engine, client_state: Mapping[str, Any]) -> dict[str, Any]:
    parts = engine.parts
    return {
        "client_state": encode(dict(client_state), "client_state"),
        "metrics": _metrics(client_state),
        "clock": encode(engine.clock.state_dict()),
        "optimizer": None if engine.optimizer is None else _describe_optimizer(engine.optimizer),
        "scheduler": {
            "kind": type(parts.scheduler).__name__,
            "state": encode(parts.scheduler.state_dict(), "the scheduler's state"),
        },
        "scaler": {"kind": type(parts.scaler).__name__, "state": encode(parts.scaler.state_dict())},
        "features": {f.name: encode(f.state_dict(), f"feature {f.name}") for f in engine.features if f.name},
        "plan": engine.plan.describe(),
        "degrees": attrs.asdict(engine.plan.parallel.degrees),
    }


def _metrics(client_state: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of client_state["metrics"], by which checkpoint.keep.best judges; a NaN is no number."""
    given = client_state.get("metrics")
    values = given.items() if isinstance(given, Mapping) else ()
    is_number = (int, float, torch.Tensor)
    numbers = {str(name): float(value) for name, value in values if isinstance(value, is_number)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its kind, and the hyperparameters of each group."""
    groups = [
        encode(options, f"optimizer group {index}") for index, options in enumerate(travelling_options(optimizer))
    ]
    return {"kind": optimizer_kind(optimizer), "groups": groups}


def _rank_objects(engine: Engine) -> dict[str, Any]:
    loader = engine.parts.loader
    return {
        "rng": zckpt.rng.capture(),
        "loader": None if loader is None else encode(loader.state_dict(), "the loader's state"),
    }
