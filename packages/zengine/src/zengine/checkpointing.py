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

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

import zckpt
import zcomm
import zpartition
from zengine.jsonable import decode, encode

if TYPE_CHECKING:
    from zengine.engine import Engine

log = logging.getLogger("zengine")

_MODEL, _OPTIMIZER = "model.", "optimizer."  # prefixes of tensor names; "optimizer.<state key>.<parameter>"


@attrs.frozen
class What:
    """What to restore."""

    optimizer: bool  # its state, hyperparameters, the scaler and the counters
    scheduler: bool
    run: bool  # counters, loader position, random state, features

    @classmethod
    def choose(cls, module_only: bool, optimizer: bool, scheduler: bool) -> What:
        """From the arguments of `load_checkpoint`."""
        return cls(optimizer and not module_only, scheduler and not module_only, not module_only)


@attrs.frozen(eq=False)
class GroupPeers:
    """A process group as zckpt wants to see it."""

    group: torch.distributed.ProcessGroup | None
    rank: int
    world_size: int

    @classmethod
    def of(cls, engine: Engine) -> GroupPeers:
        """All ranks of the engine's partition."""
        group = engine.parts.partition.group
        return cls(group, zcomm.group_rank(group), zcomm.group_size(group))

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        return zcomm.exchange(value, self.group)


def save(engine: Engine, root: str, tag: str | None, client_state: Mapping[str, Any], latest: bool) -> str:
    """Write a checkpoint; returns its folder. `tag` defaults to global_step<N>; every rank must call.

    Raises:
        ValueError: gradients of an unfinished step are pending.
        TypeError: `client_state` holds something that is neither JSON nor a scalar tensor.
        zckpt.CheckpointError: on every rank, when any rank failed; earlier checkpoints are untouched.
    """
    clock = engine.clock
    if not clock.is_between_steps:
        raise ValueError(
            f"save_checkpoint() is legal between steps; micro-step {clock.index + 1} of {clock.accumulation} of "
            f"step {clock.steps} is under way (phase {clock.phase.value}): its gradients would be lost. Save after a "
            "step() that returned a report."
        )
    peers = GroupPeers.of(engine)
    with engine.parts.telemetry.paused():
        folder = zckpt.save(
            root,
            _common_tag(tag or f"global_step{clock.steps}", engine.plan.tag_validation, peers),
            shards=_shards(engine),
            objects=_objects(engine, client_state),
            rank_objects=_rank_objects(engine),
            peers=peers,
            step=clock.steps,
            latest=latest,
            overwrite=True,
        )
    return str(folder)


def load(engine: Engine, root: str, tag: str | None, what: What, *, strict: bool) -> tuple[str, dict[str, Any]]:
    """Restore `what` from the checkpoint `tag` of `root` (None: the newest); returns (folder, client state).

    Phases: find (all ranks the same one), compare names, read, publish, restore the rest.

    Raises:
        zckpt.CheckpointError: on every rank; nothing there, damaged, or not this model. No weight has changed then.
    """
    peers = GroupPeers.of(engine)
    checkpoint = _find(root, tag, peers)
    names = checkpoint.names()
    partition = engine.parts.partition
    if strict:
        _compare_names(partition, names, str(checkpoint.path))
    wanted = [shard for shard in _model_shards(partition) if shard.name in set(names)]
    restored = _prepare_optimizer(engine, checkpoint) if what.optimizer else RestoredState()
    checkpoint.read([*wanted, *restored.shards], strict=False, peers=peers)
    restored.commit()
    partition.publish()
    _restore_objects(engine, checkpoint.objects, what)
    if what.run:
        _restore_rank(engine, checkpoint, peers)
    return str(checkpoint.path), decode(checkpoint.objects["client_state"])


# -- what is saved -------------------------------------------------------------------------------


def _shards(engine: Engine) -> Iterator[zpartition.Shard]:
    partition = engine.parts.partition
    yield from _model_shards(partition)
    if engine.optimizer is not None:
        for key, shard in zpartition.state_shards(engine.optimizer, partition.holders):
            yield attrs.evolve(shard, name=f"{_OPTIMIZER}{key}.{shard.name}")


def _model_shards(partition: zpartition.Partition) -> Iterator[zpartition.Shard]:
    for shard in partition.shards():
        yield attrs.evolve(shard, name=_MODEL + shard.name)


def _objects(engine: Engine, client_state: Mapping[str, Any]) -> dict[str, Any]:
    parts = engine.parts
    return {
        "client_state": encode(dict(client_state), "client_state"),
        "clock": encode(engine.clock.state_dict()),
        "optimizer": None if engine.optimizer is None else _describe_optimizer(engine.optimizer),
        "scheduler": encode(parts.scheduler.state_dict(), "the scheduler's state"),
        "scaler": encode(parts.scaler.state_dict()),
        "features": {f.name: encode(f.state_dict(), f"feature {f.name}") for f in engine.features if f.name},
        "plan": engine.plan.describe(),
    }


def _describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its kind, and the hyperparameters of each group."""
    groups = [
        encode({key: value for key, value in group.items() if key != "params"}, f"optimizer group {index}")
        for index, group in enumerate(optimizer.param_groups)
    ]
    return {"kind": type(optimizer).__name__, "groups": groups}


def _rank_objects(engine: Engine) -> dict[str, Any]:
    loader = engine.parts.loader
    return {
        "rng": zckpt.rng.capture(),
        "loader": None if loader is None else encode(loader.state_dict(), "the loader's state"),
    }


# -- what is restored ----------------------------------------------------------------------------


@attrs.define(eq=False)
class RestoredState:
    """Optimizer state on its way in: where to read, and scalars to be shared out after the read."""

    shards: list[zpartition.Shard] = attrs.field(factory=list)
    scalars: list[tuple[str, torch.Tensor, torch.Tensor]] = attrs.field(factory=list)  # (name, read, live)

    def add(self, name: str, shard: zpartition.Shard) -> None:
        """Read into the live tensor; a scalar, which several parameters share, through a tensor of its own."""
        if shard.global_shape == () and shard.tensor.numel() == 1:
            own = shard.tensor.clone()
            self.scalars.append((name, own, shard.tensor))
            shard = attrs.evolve(shard, tensor=own)
        self.shards.append(attrs.evolve(shard, name=name))

    def commit(self) -> None:
        """Give every shared scalar its value.

        Raises:
            ValueError: parameters that share a shard here were saved with different values.
        """
        first: dict[int, tuple[str, torch.Tensor]] = {}
        for name, read, live in self.scalars:
            other_name, other = first.setdefault(live.data_ptr(), (name, read))
            if not torch.equal(other, read):
                raise ValueError(
                    f"the checkpoint has {other_name} = {other.item()} and {name} = {read.item()}, but here both "
                    "parameters are updated together; put them into parameter groups of their own"
                )
            live.copy_(read)


def _prepare_optimizer(engine: Engine, checkpoint: zckpt.Checkpoint) -> RestoredState:
    """Make state for the optimizer as the checkpoint has it, and say where to read it into.

    Raises:
        zckpt.CheckpointMismatch: the checkpoint is of another optimizer, or of none.
    """
    restored, optimizer = RestoredState(), engine.optimizer
    if optimizer is None:
        return restored
    partition = engine.parts.partition
    kinds = _state_kinds(checkpoint)
    _compare_optimizers(checkpoint, optimizer)
    zpartition.make_state(optimizer, partition.holders, lambda name: kinds.get(name, {}))
    for key, shard in zpartition.state_shards(optimizer, partition.holders):
        if key in kinds.get(shard.name, {}):
            restored.add(f"{_OPTIMIZER}{key}.{shard.name}", shard)
    return restored


def _state_kinds(checkpoint: zckpt.Checkpoint) -> dict[str, dict[str, tuple[torch.dtype, bool]]]:
    """For each parameter, its state keys with (dtype, whether it is a scalar)."""
    tensors = checkpoint.manifest.tensors
    kinds: dict[str, dict[str, tuple[torch.dtype, bool]]] = {}
    for name, entry in tensors.items():
        if name.startswith(_OPTIMIZER):
            key, _, param = name.removeprefix(_OPTIMIZER).partition(".")
            shape = tensors[_MODEL + param].shape if _MODEL + param in tensors else None
            is_scalar = tuple(entry.shape) == () and (key == "step" or shape != ())
            kinds.setdefault(param, {})[key] = (entry.dtype, is_scalar)
    return kinds


def _restore_objects(engine: Engine, objects: Mapping[str, Any], what: What) -> None:
    parts = engine.parts
    if what.optimizer and engine.optimizer is not None:
        _restore_groups(engine.optimizer, objects["optimizer"]["groups"])
        parts.scaler.load_state_dict(decode(objects["scaler"]))
    if what.scheduler:
        parts.scheduler.load_state_dict(decode(objects["scheduler"]))
    if what.run:
        engine.clock.load_state_dict(decode(objects["clock"]))
        parts.telemetry.load_state_dict({})
        for feature in engine.features:
            if feature.name in objects["features"]:
                feature.load_state_dict(decode(objects["features"][feature.name]))


def _restore_groups(optimizer: torch.optim.Optimizer, saved: list[Any]) -> None:
    for group, state in zip(optimizer.param_groups, saved):
        for key, value in decode(state).items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


def _restore_rank(engine: Engine, checkpoint: zckpt.Checkpoint, peers: GroupPeers) -> None:
    """Random state and loader position; a rank that the saved run did not have takes rank 0's position."""
    saved_world = checkpoint.manifest.world_size
    mine = checkpoint.rank_objects(peers.rank if peers.rank < saved_world else 0)
    if engine.parts.loader is not None and mine["loader"] is not None:
        engine.parts.loader.load_state_dict(decode(mine["loader"]))
    if peers.rank < saved_world:
        for note in zckpt.rng.restore(mine["rng"]):
            log.warning("%s", note)
    if saved_world != peers.world_size and peers.rank == 0:
        log.warning(
            "checkpoint %s was saved by %d ranks and is loaded by %d: weights, optimizer and the order of data "
            "continue exactly; random numbers (dropout) do not repeat those of the saved run",
            checkpoint.path,
            saved_world,
            peers.world_size,
        )


# -- agreement -----------------------------------------------------------------------------------


def _common_tag(tag: str, validation: str, peers: GroupPeers) -> str:
    """Rank 0's tag; what happens when another rank names another one is the config's `tag_validation`."""
    tags = peers.exchange(tag)
    if any(other != tags[0] for other in tags) and validation != "IGNORE":
        named = ", ".join(f"rank {rank}: {other!r}" for rank, other in enumerate(tags))
        message = f"ranks save under different tags ({named}); a checkpoint has one"
        if validation == "FAIL":
            raise ValueError(
                f'{message}. Pass the same tag on all ranks, or set checkpoint.tag_validation to "WARN".'
            )
        log.warning("%s: rank 0's is taken", message)
    return str(tags[0])


def _find(root: str, tag: str | None, peers: GroupPeers) -> zckpt.Checkpoint:
    """The same checkpoint on every rank, or the same error."""
    try:
        found, problem = zckpt.find(root, tag), None
    except zckpt.CheckpointError as error:
        found, problem = None, error
    tags = peers.exchange(None if found is None else found.tag)
    if problem is not None:
        raise problem
    if None in tags:
        raise zckpt.CheckpointNotFound(
            f"rank {tags.index(None)} finds no checkpoint in {root}, this rank finds {found.tag!r}: do all "  # type: ignore[union-attr]
            "hosts see the same file system?"
        )
    assert found is not None
    return found if found.tag == tags[0] else zckpt.find(root, str(tags[0]))


def _compare_optimizers(checkpoint: zckpt.Checkpoint, optimizer: torch.optim.Optimizer) -> None:
    """Refuse the state of another optimizer before anything is read."""
    saved: Any = checkpoint.objects.get("optimizer")
    kind, num_groups = type(optimizer).__name__, len(optimizer.param_groups)
    problem = ""
    if saved is None:
        problem = f"holds no optimizer state, and this engine has an optimizer ({kind})"
    elif saved["kind"] != kind:
        problem = f"holds the state of {saved['kind']}, and this engine's optimizer is {kind}"
    elif len(saved["groups"]) != num_groups:
        problem = f"has {len(saved['groups'])} parameter groups, and this engine's optimizer has {num_groups}"
    if problem:
        raise zckpt.CheckpointMismatch(
            f"checkpoint {checkpoint.path} {problem}. To go on with fresh optimizer state, load with "
            "load_optimizer_states=False"
        )


def _compare_names(partition: zpartition.Partition, names: Iterable[str], where: str) -> None:
    """Refuse a checkpoint of another model before anything is read."""
    ours = {_MODEL + name for name in partition.names()}
    theirs = {name for name in names if name.startswith(_MODEL)}
    missing, extra = sorted(ours - theirs), sorted(theirs - ours)
    if missing or extra:
        raise zckpt.CheckpointMismatch(
            f"checkpoint {where} is not of this model: "
            f"{len(missing)} tensors are missing in it ({_first(missing)}), {len(extra)} are not wanted "
            f"({_first(extra)}). load_module_strict=False loads what fits"
        )


def _first(names: list[str]) -> str:
    shown = ", ".join(name.removeprefix(_MODEL) for name in names[:10]) or "none"
    return f"{shown}, ..." if len(names) > 10 else shown
