"""What a checkpoint gives back to an engine: everything is decoded and proven, on all ranks, before anything changes.

Phases: each owner of small state (scaler, schedule, clock, features, loader, random state) checks what is saved and
returns a commit that is not expected to fail (if it does, the engine is HALF_LOADED); the optimizer's state is staged
beside what it has; its few numbers are read and looked at; all bytes are proven.  Then the ranks have voted, and
tensors are filled, then commits are made.

Rejected: loading each part as it comes and undoing it after an error (a part that cannot undo, as a loader whose
iteration has ended, is changed by a load that fails; and random state has to come last, when it is too late).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

import zckpt
import zpartition
from zengine.checkpoint.consensus import MODEL, GroupPeers, Source, named, small_state
from zengine.checkpoint.foreign_state import (
    check_options,
    check_states,
    options_put_back,
    prepare_schedule,
    set_option,
    set_options,
)
from zengine.checkpoint.jsonable import decode
from zengine.config.plan.parallel import MODEL_AXES

if TYPE_CHECKING:
    from zengine.engine.parts import Run, SavedFeature

log = logging.getLogger("zengine")

Commit = Callable[[], object]  # lets one part of a load count

_MOST_STEPS = 2**53
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

    @property
    def parts(self) -> frozenset[str]:
        """In words."""
        chosen = {"weights": True, "optimizer": self.optimizer, "schedule": self.scheduler, "counters": self.run}
        return frozenset(part for part, is_chosen in chosen.items() if is_chosen)


EVERYTHING = What(optimizer=True, scheduler=True, run=True)


@attrs.define(eq=False)
class RestoredState:
    """Optimizer state on its way in: where to read, and numbers, which are looked at first.

    Numbers are few; the rest is read with the weights.
    """

    shards: list[zpartition.Shard] = attrs.field(factory=list)
    numbers: list[zpartition.Shard] = attrs.field(factory=list)  # to be read before
    staged: list[torch.Tensor] = attrs.field(factory=list)  # where each of them goes
    hand_over: Callable[[], None] = lambda: None  # gives the optimizer what was read
    origin: str = "the checkpoint"  # for errors

    def add(self, name: str, shard: zpartition.Shard) -> None:
        """Read into the staged tensor; a number through a tensor of its own, to be looked at first."""
        if shard.global_shape == () and shard.tensor.numel() == 1:
            self.numbers.append(attrs.evolve(shard, name=name, tensor=shard.tensor.clone()))
            self.staged.append(shard.tensor)
        else:
            self.shards.append(attrs.evolve(shard, name=name))

    def take_numbers(self) -> None:
        """Stage the numbers that were read.

        Raises:
            CheckpointStateError: a step count is negative, not finite or too large.
        """
        for number, staged in zip(self.numbers, self.staged):
            if number.name.startswith(f"{OPTIMIZER}step.") and not 0 <= number.tensor.item() <= _MOST_STEPS:
                value = number.tensor.item()
                raise zckpt.CheckpointStateError(f"{self.origin}: {number.name} = {value}: a step count is 0 or more")
            staged.copy_(number.tensor)

    def commit(self) -> None:
        """Give the optimizer its state."""
        self.shards.clear()
        self.staged.clear()
        self.hand_over()


@attrs.frozen(eq=False)
class Prepared:
    """A checkpoint's small state, decoded and checked, and the optimizer's, staged."""

    state: RestoredState
    commits: tuple[Commit, ...]  # in the order in which they count

    def commit(self) -> None:
        """Let everything of it count."""
        for commit in self.commits:
            commit()


def prepare(run: Run, features: Sequence[SavedFeature], checkpoint: Source, what: What) -> Prepared:
    """Decode all that is restored beside tensors, and stage the optimizer's state; nothing of the engine changes.

    Raises:
        CheckpointStateError: a value is damaged, or is refused by whoever it belongs to; says file and key.
    """
    objects, parts = small_state(checkpoint), run.parts
    commits: list[Commit] = []
    state = RestoredState()
    if what.optimizer:
        commits += _scaler(run, objects)
    if what.scheduler and objects.member("scheduler").member("kind").value == type(parts.scheduler).__name__:
        member = objects.member("scheduler").member("state")
        commits.append(_taken(functools.partial(prepare_schedule, parts.scheduler, run.optimizer), member))
    if what.optimizer and run.optimizer is not None:
        options, state = _optimizer(run, run.optimizer, checkpoint)
        commits += [options, state.commit]
    elif what.scheduler and run.optimizer is not None and parts.client_scheduler is not None:
        commits.append(functools.partial(_follow, run.optimizer, parts.client_scheduler))
    if what.run:
        commits += _run_state(run, features, checkpoint, objects)
    return Prepared(state, tuple(commits))


def _taken(prepare: Callable[[Any], Commit], node: zckpt.Node) -> Commit:
    """Return what the owner of a value makes of it; whatever it has against it names the place."""
    with named(node):
        return prepare(decode(node.value, node.where))


def _scaler(run: Run, objects: zckpt.Node) -> Iterator[Commit]:
    saved, scaler = objects.member("scaler"), run.parts.scaler
    kind = saved.member("kind").text()
    if kind == type(scaler).__name__:
        yield _taken(scaler.prepare_load, saved.member("state"))
        return
    log.warning(
        "the checkpoint was trained with %s, this engine has %s: the loss scale starts afresh",
        kind,
        type(scaler).__name__,
    )


def _optimizer(run: Run, optimizer: torch.optim.Optimizer, checkpoint: Source) -> tuple[Commit, RestoredState]:
    """Return what sets the options, and the state staged as the checkpoint has it.

    While it is staged the options are in place: they say which state the optimizer will ask for.
    """
    objects = small_state(checkpoint)
    node = objects.member("optimizer").member("groups")
    with named(node):
        options = [decode(group.value, group.where) for group in node.items()]
        check_options(optimizer, options, complete="imported" not in objects.members())
    kinds = _following(_state_kinds(checkpoint), checkpoint, run)
    _say_untrained(run, frozenset(kinds))
    with options_put_back(optimizer):
        set_options(optimizer, options)
        staged = zpartition.make_state(optimizer, run.parts.partition.holders, lambda name: kinds.get(name, {}))
        with named(node):
            check_states(optimizer, staged)
    restored = RestoredState(hand_over=staged.hand_over, origin=checkpoint.origin)
    for key, shard in staged.shards():
        if key in kinds.get(shard.name, {}):
            restored.add(f"{OPTIMIZER}{key}.{shard.name}", shard)
    return functools.partial(set_options, optimizer, options), restored


def _follow(optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    """Set each group's lr from the restored schedule."""
    for group, lr in zip(optimizer.param_groups, schedule.get_last_lr()):
        set_option(group, "lr", lr)


def _run_state(
    run: Run, features: Sequence[SavedFeature], checkpoint: Source, objects: zckpt.Node
) -> Iterator[Commit]:
    """Counters, features, the loader's position, random state."""
    yield _taken(run.clock.prepare_load, objects.member("clock"))
    yield functools.partial(run.parts.telemetry.load_state_dict, {})
    saved = objects.member("features").members()
    for feature in features:
        if feature.name in saved:
            yield _taken(feature.prepare_load, saved[feature.name])
    mine = _rank_state(run, checkpoint)
    position = mine.member("loader", None)
    if run.parts.loader is not None and position.value is not None:
        yield _taken(run.parts.loader.prepare_load, position)
    yield from _random_state(run, checkpoint, mine)


def _say_untrained(run: Run, saved: frozenset[str]) -> None:
    """Warn of states that nobody takes, and of weights that begin without one."""
    partition = run.parts.partition
    fresh = sorted(partition.layout.names - saved) if saved else []
    if fresh and partition.rank == 0:
        log.warning(
            "the checkpoint has no optimizer state of %s (%d parameters in all): it starts afresh, beside that of "
            "the others",
            fresh[0],
            len(fresh),
        )
    here = (
        saved & frozenset(partition.names()) if partition.pipeline_stages.size > 1 else saved
    )  # others are other stages'
    left = sorted(here - partition.layout.names)
    if left and partition.rank == 0:
        log.warning(
            "the checkpoint has optimizer state of %s (%d parameters in all), which this engine does not train: it "
            "is not read. If the run goes on to train them, unfreeze them (requires_grad_(True)) before "
            "load_checkpoint()",
            left[0],
            len(left),
        )


def _following(kinds: Kinds, checkpoint: Source, run: Run) -> Kinds:
    """States that were kept in the dtype of the masters are again, whatever that is now.

    torch's optimizers need it so, and their own load_state_dict does it.  One that has formats of its own
    (`load_portable_state`) is given the numbers as they were saved, and encodes them.
    """
    if hasattr(run.optimizer, "load_portable_state"):
        return kinds
    saved = {name.removeprefix(MODEL): entry.dtype for name, entry in checkpoint.manifest.tensors.items()}
    held = {piece.slot.name: h.tensor.dtype for h in run.parts.partition.holders for piece in h.pieces}

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
    # Scalars such as step counts have shape (). For a parameter of shape () they cannot be told from its moments.
    counters = {key for key, param, entry in entries if tuple(entry.shape) == () and shapes.get(param, ()) != ()}
    kinds: Kinds = {}
    for key, param, entry in entries:
        shape = tuple(entry.shape)
        is_scalar = shape == () and (key in counters or key == "step")
        kinds.setdefault(param, {})[key] = (entry.dtype, None if is_scalar else shape)
    return kinds


def _rank_state(run: Run, checkpoint: Source) -> zckpt.Node:
    """Return what this rank saved; one that the saved run did not have takes rank 0's, whose position is
    everybody's."""
    rank = GroupPeers.of(run).rank
    saved_by = rank if rank < checkpoint.manifest.world_size else 0
    where = f"{checkpoint.origin}: rank_objects[{saved_by}]"
    return zckpt.Node(checkpoint.rank_objects(saved_by), where, zckpt.CheckpointStateError)


def _random_state(run: Run, checkpoint: Source, mine: zckpt.Node) -> Iterator[Commit]:
    """Random state.  A checkpoint that was imported from another engine has none, nor a position, and says so.

    Ranks that shared a copy of the model drew alike; where they are replicas now they must not, so each goes on with
    the state that it has.
    """
    peers, saved_world, saved = GroupPeers.of(run), checkpoint.manifest.world_size, mine.member("rng", None)
    if saved.value is None:
        if peers.rank == 0:
            log.warning(
                "checkpoint %s was imported: it has no random states and no position of the data loader; "
                "both start afresh",
                checkpoint.path,
            )
        return
    with named(saved):
        put_back = zckpt.rng.prepare(saved.value)
    is_split_alike = _copies_split(small_state(checkpoint)) == _copies_split_here(run)
    if peers.rank < saved_world and is_split_alike:
        yield functools.partial(_tell_what_is_left, put_back)
    if (saved_world != peers.world_size or not is_split_alike) and peers.rank == 0:
        log.warning(
            "checkpoint %s was saved by %d ranks%s and is loaded by %d: weights, optimizer and the order of data "
            "continue exactly; random numbers (dropout) do not repeat those of the saved run",
            checkpoint.path,
            saved_world,
            "" if is_split_alike else ", which split the model in another way,",
            peers.world_size,
        )


def _tell_what_is_left(put_back: Callable[[], tuple[str, ...]]) -> None:
    for note in put_back():
        log.warning("%s", note)


def _copies_split(objects: zckpt.Node) -> tuple[int, ...]:
    """Ranks that worked on the same samples, by axis."""
    degrees = objects.member("degrees", {}).members()
    return tuple(degrees[axis].integer(1) if axis in degrees else 1 for axis in MODEL_AXES)


def _copies_split_here(run: Run) -> tuple[int, ...]:
    degrees = attrs.asdict(run.plan.parallel.degrees)
    return tuple(degrees.get(axis, 1) for axis in MODEL_AXES)
