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
from zengine.clock import Phase
from zengine.consensus import (
    MODEL,
    GroupPeers,
    Source,
    common_tag,
    compare_kinds,
    compare_names,
    find,
    named,
    on_every_rank,
    optimizer_kind,
    require_run,
    say_rounded,
    small_state,
)
from zengine.exporting import tied_names
from zengine.foreign_state import travelling_options
from zengine.jsonable import decode, encode
from zengine.restoring import EVERYTHING, OPTIMIZER, What, prepare
from zengine.saving import Content

if TYPE_CHECKING:
    from zengine.engine import Engine

__all__ = ["What", "load", "restore", "save"]


NOTHING_LOADED = "nothing was loaded"


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
    objects["features"] = peers.exchange(objects["features"])[0]  # counts of ranks may differ
    objects["left_out"] = sorted(left_out)
    objects["tied"] = tied_names(engine)
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

    Phases: find (all ranks the same one), compare names and kinds, decode and prove everything, fill tensors, let the
    rest count, publish.

    Raises:
        zckpt.CheckpointError: on every rank; nothing there, damaged, or not of this run: the engine is as it was.  If
            the medium fails after all was proven, the error says so, and the engine refuses to go on (`HalfLoaded`)
            until a load restores all of it.
    """
    engine.clock.require_loadable("load_checkpoint")
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
    engine.clock.require_loadable("restore_from_memory")
    peers = GroupPeers.of(engine)
    return _take(engine, engine.parts.saver.newest(peers), EVERYTHING, peers, strict=True)[1]


def _take(
    engine: Engine, checkpoint: Source, what: What, peers: GroupPeers, *, strict: bool
) -> tuple[str, dict[str, Any]]:
    """Decode and prove everything on all ranks, touching nothing; then fill tensors, then let the rest count."""
    partition, names = engine.parts.partition, frozenset(checkpoint.names())
    left_out, client_state = on_every_rank(lambda: _checked(engine, checkpoint, what), peers, NOTHING_LOADED)
    compare_names(partition, names | left_out, str(checkpoint.path), peers, strict=strict)
    partition.admit_unfrozen()
    wanted = [shard for shard in _named(partition.shards_to_fill()) if shard.name in names]
    say_rounded(wanted, checkpoint, peers.rank)
    prepared = on_every_rank(lambda: prepare(engine, checkpoint, what), peers, NOTHING_LOADED)
    checkpoint.read(prepared.state.numbers, strict=False, verify="first", cast=True, peers=peers)
    on_every_rank(prepared.state.take_numbers, peers, NOTHING_LOADED)
    everything = zckpt.Reading([*wanted, *prepared.state.shards], "leave", verify="first", cast=True)
    fill = checkpoint.prepare_read(everything, peers)
    with engine.clock.loading(f"the load of checkpoint {checkpoint.path}", what.parts, is_whole=strict):
        partition.zero_grad()
        fill()
        del fill, everything  # staged tensors are freed one by one as the optimizer takes them
        on_every_rank(prepared.commit, peers, "the load was not completed")
        partition.publish()
    if engine.clock.phase is not Phase.HALF_LOADED:
        engine.clock.begin_step()
    return str(checkpoint.path), client_state


def _checked(engine: Engine, checkpoint: Source, what: What) -> tuple[frozenset[str], dict[str, Any]]:
    """What is not compared, and the caller's state; after kinds were found to be this engine's."""
    objects = small_state(checkpoint)
    if what.run:
        require_run(checkpoint)
    left_out = frozenset(MODEL + name.text() for name in objects.member("left_out", []).items())
    compare_kinds(engine, checkpoint, optimizer=what.optimizer, scheduler=what.scheduler)
    client_state = objects.member("client_state", {})
    client_state.members()
    with named(client_state):
        return left_out, decode(client_state.value, client_state.where)


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
        "features": {f.name: encode(f.state_dict(), f"feature {f.name}") for f in engine._features if f.name},
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
