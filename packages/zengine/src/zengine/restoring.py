"""What a checkpoint gives back to an engine, in the order in which it can still be refused.

The optimizer's state is staged first, where it is known what there is to read; scaler, schedule and the loader's
position, which may refuse, come before any weight moves, and are put back if the load fails; counters, features and
random state, which cannot refuse, come last.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import torch

import zckpt
import zpartition
from zengine.config.parallel import MODEL_AXES
from zengine.consensus import MODEL, GroupPeers, Source
from zengine.jsonable import decode

if TYPE_CHECKING:
    from zengine.engine import Engine

log = logging.getLogger("zengine")

OPTIMIZER = "optimizer."  # prefix of tensor names: "optimizer.<state key>.<parameter>"

# For each parameter and state key: dtype, and shape, or None for a number beside the parameter.
Kinds = dict[str, dict[str, tuple[torch.dtype, "tuple[int, ...] | None"]]]


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


EVERYTHING = What(optimizer=True, scheduler=True, run=True)


def travelling_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters of each group, without the options that belong to the object, such as its state format."""
    left = {"params", "param_names", *getattr(optimizer, "kept_options", ())}
    return [{key: value for key, value in group.items() if key not in left} for group in optimizer.param_groups]


@attrs.define(eq=False)
class RestoredState:
    """Optimizer state on its way in: where to read."""

    shards: list[zpartition.Shard] = attrs.field(factory=list)
    hand_over: Callable[[], None] = lambda: None  # gives the optimizer what was read

    def commit(self) -> None:
        """Give the optimizer its state.

        Raises:
            ValueError: the optimizer finds that something is missing.
        """
        self.shards.clear()  # staged tensors are freed one by one as the optimizer takes them
        self.hand_over()


def prepare(engine: Engine, checkpoint: Source, what: What) -> RestoredState:
    """What may refuse, or find no memory, on one rank alone."""
    _restore_small(engine, checkpoint.objects, what)
    position = _rank_objects(checkpoint, GroupPeers.of(engine).rank).get("loader") if what.run else None
    if engine.parts.loader is not None and position is not None:
        engine.parts.loader.load_state_dict(decode(position))
    return _prepare_optimizer(engine, checkpoint) if what.optimizer else RestoredState()


def _prepare_optimizer(engine: Engine, checkpoint: Source) -> RestoredState:
    """Stage state for the optimizer as the checkpoint has it, and say where to read it into.

    The options come first: they say which state the optimizer will ask for.
    """
    optimizer = engine.optimizer
    if optimizer is None:
        return RestoredState()
    options: Any = checkpoint.objects["optimizer"]
    _set_options(optimizer, decode(options["groups"]))
    kinds = _following(_state_kinds(checkpoint), checkpoint, engine)
    _say_untrained(engine, frozenset(kinds))
    staged = zpartition.make_state(optimizer, engine.parts.partition.holders, lambda name: kinds.get(name, {}))
    restored = RestoredState(hand_over=staged.hand_over)
    for key, shard in staged.shards():
        if key in kinds.get(shard.name, {}):
            restored.shards.append(attrs.evolve(shard, name=f"{OPTIMIZER}{key}.{shard.name}"))
    return restored


def _say_untrained(engine: Engine, saved: frozenset[str]) -> None:
    """Warn of states that nobody takes, and of weights that begin without one."""
    partition = engine.parts.partition
    fresh = sorted(partition.layout.names - saved) if saved else []
    if fresh and partition.rank == 0:
        log.warning(
            "the checkpoint has no optimizer state of %s (%d parameters in all): it starts afresh, beside that of "
            "the others",
            fresh[0],
            len(fresh),
        )
    here = saved & frozenset(partition.names()) if partition.stages.size > 1 else saved  # others are other stages'
    left = sorted(here - partition.layout.names)
    if left and partition.rank == 0:
        log.warning(
            "the checkpoint has optimizer state of %s (%d parameters in all), which this engine does not train: it "
            "is not read. If the run goes on to train them, unfreeze them (requires_grad_(True)) before "
            "load_checkpoint()",
            left[0],
            len(left),
        )


def _following(kinds: Kinds, checkpoint: Source, engine: Engine) -> Kinds:
    """States that were kept in the dtype of the masters are again, whatever that is now.

    torch's optimizers need it so, and their own load_state_dict does it.  One that has formats of its own
    (`take_portable_state`) is given the numbers as they were saved, and encodes them.
    """
    if hasattr(engine.optimizer, "take_portable_state"):
        return kinds
    saved = {name.removeprefix(MODEL): entry.dtype for name, entry in checkpoint.manifest.tensors.items()}
    held = {piece.slot.name: h.tensor.dtype for h in engine.parts.partition.holders for piece in h.pieces}

    def dtype(param: str, kept: torch.dtype, shape: tuple[int, ...] | None) -> torch.dtype:
        return held.get(param, kept) if shape is not None and kept == saved.get(param) else kept

    return {
        param: {key: (dtype(param, kept, shape), shape) for key, (kept, shape) in states.items()}
        for param, states in kinds.items()
    }


def _state_kinds(checkpoint: Source) -> Kinds:
    """For each parameter, its state keys with dtype and shape, None for the shape of a scalar."""
    tensors = checkpoint.manifest.tensors
    shapes = {name.removeprefix(MODEL): tuple(e.shape) for name, e in tensors.items() if name.startswith(MODEL)}
    entries = [
        (*name.removeprefix(OPTIMIZER).partition(".")[::2], entry)
        for name, entry in tensors.items()
        if name.startswith(OPTIMIZER)
    ]
    # A counter is () beside parameters of any shape; beside a parameter of shape () it looks like its state.
    counters = {key for key, param, entry in entries if tuple(entry.shape) == () and shapes.get(param, ()) != ()}
    kinds: Kinds = {}
    for key, param, entry in entries:
        shape = tuple(entry.shape)
        is_scalar = shape == () and (key in counters or key == "step")
        kinds.setdefault(param, {})[key] = (entry.dtype, None if is_scalar else shape)
    return kinds


@contextmanager
def undone_on_error(engine: Engine) -> Iterator[None]:
    """Put back the optimizer's state, scaler, schedule and position if the load fails before any weight has moved."""
    parts, optimizer = engine.parts, engine.optimizer
    state = {} if optimizer is None else dict(optimizer.state)
    scaler, scheduler = parts.scaler.state_dict(), copy.deepcopy(parts.scheduler.state_dict())
    options = [] if optimizer is None else copy.deepcopy(travelling_options(optimizer))
    position = None if parts.loader is None else parts.loader.state_dict()
    try:
        yield
    except BaseException:
        if parts.loader is not None and parts.loader.state_dict() != position:
            parts.loader.load_state_dict(position)
        parts.scaler.load_state_dict(scaler)
        parts.scheduler.load_state_dict(scheduler)
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(state)
            _set_options(optimizer, options)
        raise


def _restore_small(engine: Engine, objects: Mapping[str, Any], what: What) -> None:
    """Scaler and schedule, which may refuse: before any weight moves."""
    parts = engine.parts
    if what.optimizer and objects["scaler"]["kind"] == type(parts.scaler).__name__:
        parts.scaler.load_state_dict(decode(objects["scaler"]["state"]))
    elif what.optimizer:
        log.warning(
            "the checkpoint was trained with %s, this engine has %s: the loss scale starts afresh",
            objects["scaler"]["kind"],
            type(parts.scaler).__name__,
        )
    if what.scheduler and objects["scheduler"]["kind"] == type(parts.scheduler).__name__:
        parts.scheduler.load_state_dict(decode(objects["scheduler"]["state"]))


def restore_objects(engine: Engine, objects: Mapping[str, Any], what: What) -> None:
    parts, optimizer = engine.parts, engine.optimizer
    if what.scheduler and not what.optimizer and optimizer is not None and parts.client_scheduler is not None:
        for group, lr in zip(optimizer.param_groups, parts.client_scheduler.get_last_lr()):
            _set_option(group, "lr", lr)
    if what.run:
        engine.clock.load_state_dict(decode(objects["clock"]))
        parts.telemetry.load_state_dict({})
        for feature in engine.features:
            if feature.name in objects["features"]:
                feature.load_state_dict(decode(objects["features"][feature.name]))


def _set_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    """Put `options`, one dict for each group, in the place of what is there."""
    kept = getattr(optimizer, "kept_options", ())
    for group, values in zip(optimizer.param_groups, options):
        for key, value in values.items():
            if key not in kept:
                _set_option(group, key, value)


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Into the tensor that is there (a captured graph may hold it), else in its place."""
    if isinstance(group.get(key), torch.Tensor):
        group[key].copy_(torch.as_tensor(value))
    else:
        group[key] = value


def _rank_objects(checkpoint: Source, rank: int) -> Mapping[str, Any]:
    """What `rank` saved; one that the saved run did not have takes rank 0's, of which the position is everybody's."""
    return checkpoint.rank_objects(rank if rank < checkpoint.manifest.world_size else 0)


def restore_rank(engine: Engine, checkpoint: Source, peers: GroupPeers) -> None:
    """Random state.  A checkpoint that was imported from another engine has none, nor a position, and says so.

    Ranks that shared a copy of the model drew alike; where they are replicas now they must not, so each goes on with
    the state that it has.
    """
    saved_world = checkpoint.manifest.world_size
    mine = _rank_objects(checkpoint, peers.rank)
    if mine["rng"] is None:
        if peers.rank == 0:
            log.warning(
                "checkpoint %s was imported: it has no random states and no position of the data loader; "
                "both start afresh",
                checkpoint.path,
            )
        return
    is_split_alike = _copies_split(checkpoint.objects.get("degrees", {})) == _copies_split(
        attrs.asdict(engine.plan.parallel.degrees)
    )
    if peers.rank < saved_world and is_split_alike:
        for note in zckpt.rng.restore(mine["rng"]):
            log.warning("%s", note)
    if (saved_world != peers.world_size or not is_split_alike) and peers.rank == 0:
        log.warning(
            "checkpoint %s was saved by %d ranks%s and is loaded by %d: weights, optimizer and the order of data "
            "continue exactly; random numbers (dropout) do not repeat those of the saved run",
            checkpoint.path,
            saved_world,
            "" if is_split_alike else ", which split the model in another way,",
            peers.world_size,
        )


def _copies_split(degrees: Mapping[str, int]) -> tuple[int, ...]:
    """Ranks that work on the same samples, by axis."""
    return tuple(degrees.get(axis, 1) for axis in MODEL_AXES)
