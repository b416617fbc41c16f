"""Restore: decode and check everything of a checkpoint on all ranks before anything changes.

Each owner of small state (scaler, schedule, clock, features, loader, random state) checks the saved state and returns
a commit that is not expected to fail; if one does, the engine is HALF_LOADED.  The optimizer's state is staged beside
the present one, its few numbers are read and checked, and all bytes are verified.  Then the ranks vote, tensors are
filled, and the commits run.

Rejected: loading each part in turn and undoing it after an error.  A part that cannot undo, such as a loader whose
iteration has ended, would be changed by a failed load; and random state must come last, when an error is too late.
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
from zengine.checkpoint.consensus import MODEL, GroupPeers, Source, errors_at, small_state
from zengine.checkpoint.foreign_state import (
    check_options,
    check_states,
    prepare_schedule,
    restored_options,
    set_option,
    set_options,
)
from zengine.checkpoint.jsonable import decode
from zengine.checkpoint.replica_names import OPTIMIZER, with_own_objects
from zengine.config.plan.parallel import MODEL_AXES

if TYPE_CHECKING:
    from zengine.engine.parts import Run, SavedFeature

log = logging.getLogger("zengine")

Commit = Callable[[], object]  # restores one part from its checked state

_MOST_STEPS = 2**53

# For each parameter and state key: dtype and shape; the shape is None for a number, such as a step count.
Kinds = dict[str, dict[str, tuple[torch.dtype, "tuple[int, ...] | None"]]]


@attrs.frozen
class RestoreScope:
    """Parts of a run to restore, besides the weights."""

    optimizer: bool  # its state, hyperparameters, the scaler and the counters
    scheduler: bool
    run: bool  # counters, loader position, random state, features

    @classmethod
    def choose(cls, module_only: bool, optimizer: bool, scheduler: bool) -> RestoreScope:
        """Return the scope for the arguments of `load_checkpoint`."""
        return cls(optimizer and not module_only, scheduler and not module_only, not module_only)

    @property
    def parts(self) -> frozenset[str]:
        """Return the names of the parts."""
        chosen = {"weights": True, "optimizer": self.optimizer, "schedule": self.scheduler, "counters": self.run}
        return frozenset(part for part, is_chosen in chosen.items() if is_chosen)


EVERYTHING = RestoreScope(optimizer=True, scheduler=True, run=True)


@attrs.define(eq=False)
class RestoredState:
    """Staged optimizer state: shards to read with the weights, and numbers to read and check before."""

    shards: list[zpartition.Shard] = attrs.field(factory=list)
    numbers: list[zpartition.Shard] = attrs.field(factory=list)  # read first
    staged: list[torch.Tensor] = attrs.field(factory=list)  # destination of each number
    hand_over: Callable[[], None] = lambda: None  # gives the optimizer the staged state
    origin: str = "the checkpoint"  # for errors

    def add(self, name: str, shard: zpartition.Shard) -> None:
        """Add a shard to read into its staged tensor; numbers are read into extra tensors and checked first."""
        if shard.global_shape == () and shard.tensor.numel() == 1:
            self.numbers.append(zpartition.Shard(name, (), shard.box, shard.span, shard.tensor.clone()))
            self.staged.append(shard.tensor)
        else:
            self.shards.append(shard.renamed(name))

    def stage_numbers(self) -> None:
        """Check the numbers that were read, and stage them.

        Raises:
            CheckpointStateError: a step count is negative, not finite or too large.
        """
        for number, staged in zip(self.numbers, self.staged):
            if number.name.startswith(f"{OPTIMIZER}step.") and not 0 <= number.tensor.item() <= _MOST_STEPS:
                value = number.tensor.item()
                raise zckpt.CheckpointStateError(
                    f"{self.origin}: {number.name} = {value} is not a step count of 0 or more"
                )
            staged.copy_(number.tensor)

    def commit(self) -> None:
        """Give the optimizer its state."""
        self.shards.clear()
        self.staged.clear()
        self.hand_over()


@attrs.frozen(eq=False)
class Prepared:
    """Checked small state of a checkpoint, and staged optimizer state."""

    state: RestoredState
    commits: tuple[Commit, ...]  # in order

    def commit(self) -> None:
        """Run all commits."""
        for commit in self.commits:
            commit()


def prepare(run: Run, features: Sequence[SavedFeature], checkpoint: Source, scope: RestoreScope) -> Prepared:
    """Decode and check the small state, and stage the optimizer's; the engine does not change.

    Raises:
        CheckpointStateError: a value is damaged, or its owner rejects it; names file and key.
    """
    parts = run.parts
    objects = with_own_objects(run, small_state(checkpoint), _rank_state(run, checkpoint))
    commits: list[Commit] = []
    state = RestoredState()
    if scope.optimizer:
        _warn_other_sums(run, objects)
        commits += _scaler(run, objects)
    if scope.scheduler and objects.member("scheduler").member("kind").value == type(parts.scheduler).__name__:
        member = objects.member("scheduler").member("state")
        commits.append(_prepare_part(functools.partial(prepare_schedule, parts.scheduler, run.optimizer), member))
    if scope.optimizer and run.optimizer is not None:
        options, state = _optimizer(run, run.optimizer, checkpoint, objects)
        commits += [options, state.commit]
    elif scope.scheduler and run.optimizer is not None and parts.client_scheduler is not None:
        commits.append(functools.partial(_set_rates, run.optimizer, parts.client_scheduler))
    if scope.run:
        commits += _run_state(run, features, checkpoint, objects)
    return Prepared(state, tuple(commits))


def _prepare_part(prepare: Callable[[Any], Commit], node: zckpt.Node) -> Commit:
    """Return the commit of the owner of a value; its errors name file and key."""
    with errors_at(node):
        return prepare(decode(node.value, node.where))


def _warn_other_sums(run: Run, objects: zckpt.Node) -> None:
    """Log that gradients were summed in another order; imported and older checkpoints do not say."""
    saved, moment = objects.member("reduce_at", "").value, run.plan.zero.reduce_at.value
    partition = run.parts.partition
    if saved and saved != moment and partition.layout.world_size > 1 and partition.rank == 0:
        log.warning(
            "the checkpoint was trained with zero_optimization.reduce_at = %s, this engine has %s: gradients are "
            "summed in another order, so losses continue but not to the last bit",
            saved,
            moment,
        )


def _scaler(run: Run, objects: zckpt.Node) -> Iterator[Commit]:
    saved, scaler = objects.member("scaler"), run.parts.scaler
    kind = saved.member("kind").text()
    if kind == type(scaler).__name__:
        yield _prepare_part(scaler.prepare_load, saved.member("state"))
        return
    log.warning(
        "the checkpoint was trained with %s, this engine has %s: the loss scale starts from its initial value",
        kind,
        type(scaler).__name__,
    )


def _optimizer(
    run: Run, optimizer: torch.optim.Optimizer, checkpoint: Source, objects: zckpt.Node
) -> tuple[Commit, RestoredState]:
    """Return the commit of the options, and the staged state.

    The saved options are set while it is staged, since they decide which state the optimizer needs.
    """
    node = objects.member("optimizer").member("groups")
    with errors_at(node):
        options = [decode(group.value, group.where) for group in node.items()]
        check_options(optimizer, options, complete="imported" not in objects.members())
    kinds = _follow_masters(_state_kinds(checkpoint), checkpoint, run)
    _warn_missing_states(run, frozenset(kinds))
    with restored_options(optimizer):
        set_options(optimizer, options)
        in_memory = isinstance(checkpoint, zckpt.MemoryCheckpoint)  # of this rank's own shards
        is_uniform = len({frozenset(states) for states in kinds.values()}) == 1  # not Muon with an AdamW inside
        any_name = next(iter(kinds)) if is_uniform and not in_memory else ""  # padding counts like any parameter
        forms = _number_forms(objects)
        staged = zpartition.make_state(
            optimizer, run.parts.partition.holders, lambda name: kinds.get(name or any_name, {}), forms
        )
        with errors_at(node):
            check_states(optimizer, staged)
    restored = RestoredState(hand_over=staged.hand_over, origin=checkpoint.origin)
    for key, shard in staged.shards():
        name = shard.name or any_name
        if key in kinds.get(name, {}):
            restored.add(f"{OPTIMIZER}{key}.{name}", shard)
    return functools.partial(set_options, optimizer, options), restored


def _number_forms(objects: zckpt.Node) -> dict[str, str]:
    """Return the forms of the saved numbers; a checkpoint before 0.3 has none."""
    return {key: form.text() for key, form in objects.member("number_forms", {}).members().items()}


def _set_rates(optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    """Set each group's lr from the restored schedule."""
    for group, lr in zip(optimizer.param_groups, schedule.get_last_lr()):
        set_option(group, "lr", lr)


def _run_state(
    run: Run, features: Sequence[SavedFeature], checkpoint: Source, objects: zckpt.Node
) -> Iterator[Commit]:
    """Yield the commits of counters, features, the loader's position and random state."""
    yield _prepare_part(run.clock.prepare_load, objects.member("clock"))
    yield functools.partial(run.parts.telemetry.load_state_dict, {})
    saved = objects.member("features").members()
    for feature in features:
        if feature.name in saved:
            yield _prepare_part(feature.prepare_load, saved[feature.name])
    own = _rank_state(run, checkpoint)
    position = own.member("loader", None)
    if run.parts.loader is not None and position.value is not None:
        yield _prepare_part(run.parts.loader.prepare_load, position)
    yield from _random_state(run, checkpoint, own)


def _warn_missing_states(run: Run, saved: frozenset[str]) -> None:
    """Warn about saved states that are not used, and weights that start without one."""
    partition = run.parts.partition
    fresh = sorted(partition.layout.names - saved) if saved else []
    if fresh and partition.rank == 0:
        log.warning(
            "the checkpoint has no optimizer state of %s (%d parameters in all): it starts from zero, unlike that of "
            "the others",
            fresh[0],
            len(fresh),
        )
    # in a pipeline the states of other stages belong to other ranks
    here = saved & frozenset(partition.names()) if partition.pipeline_stages.size > 1 else saved
    left = sorted(here - partition.layout.names)
    if left and partition.rank == 0:
        log.warning(
            "the checkpoint has optimizer state of %s (%d parameters in all), which this engine does not train: it "
            "is not loaded. To train them, unfreeze them (requires_grad_(True)) before load_checkpoint()",
            left[0],
            len(left),
        )


def _follow_masters(kinds: Kinds, checkpoint: Source, run: Run) -> Kinds:
    """Return `kinds` with the masters' present dtype for states that were saved in the masters' dtype.

    torch's optimizers need that, and their load_state_dict does the same.  An optimizer with its own formats
    (`load_portable_state`) gets the values as saved, and encodes them.
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
    """Return the state keys of each parameter with dtype and shape; None for the shape of a scalar."""
    tensors = checkpoint.manifest.tensors
    shapes = {name.removeprefix(MODEL): tuple(e.shape) for name, e in tensors.items() if name.startswith(MODEL)}
    entries = [
        (*name.removeprefix(OPTIMIZER).partition(".")[::2], entry)
        for name, entry in tensors.items()
        if name.startswith(OPTIMIZER)
    ]
    # Scalars such as step counts have shape (), as do the moments of a parameter of shape ().
    counters = {key for key, param, entry in entries if tuple(entry.shape) == () and shapes.get(param, ()) != ()}
    kinds: Kinds = {}
    for key, param, entry in entries:
        shape = tuple(entry.shape)
        is_scalar = shape == () and (key in counters or key == "step")
        kinds.setdefault(param, {})[key] = (entry.dtype, None if is_scalar else shape)
    return kinds


def _rank_state(run: Run, checkpoint: Source) -> zckpt.Node:
    """Return the state that this rank saved; a rank that the saved run did not have uses rank 0's."""
    rank = GroupPeers.of(run).rank
    saved_by = rank if rank < checkpoint.manifest.world_size else 0
    where = f"{checkpoint.origin}: rank_objects[{saved_by}]"
    return zckpt.Node(checkpoint.rank_objects(saved_by), where, zckpt.CheckpointStateError)


def _random_state(run: Run, checkpoint: Source, own: zckpt.Node) -> Iterator[Commit]:
    """Yield the commit of the random state, if this rank uses the saved one; warn otherwise.

    A checkpoint that was imported from another engine has none.  Ranks of one replica had equal states; under another
    split they may be different replicas, so each keeps its present state.
    """
    peers, saved_world, saved = GroupPeers.of(run), checkpoint.manifest.world_size, own.member("rng", None)
    if saved.value is None:
        if peers.rank == 0:
            log.warning(
                "checkpoint %s was imported: it has no random states and no position of the data loader; "
                "both start new",
                checkpoint.path,
            )
        return
    with errors_at(saved):
        restore = zckpt.rng.prepare(saved.value)
    is_same_split = _saved_model_degrees(small_state(checkpoint)) == _model_degrees(run)
    if peers.rank < saved_world and is_same_split:
        yield functools.partial(_restore_random_state, restore)
    if (saved_world != peers.world_size or not is_same_split) and peers.rank == 0:
        log.warning(
            "checkpoint %s was saved by %d %s%s and is loaded by %d: weights, optimizer and the order of data "
            "continue exactly; random numbers (dropout) do not repeat those of the saved run",
            checkpoint.path,
            saved_world,
            "rank" if saved_world == 1 else "ranks",
            "" if is_same_split else ", which split the model differently,",
            peers.world_size,
        )


def _restore_random_state(restore: Callable[[], tuple[str, ...]]) -> None:
    for note in restore():
        log.warning("%s", note)


def _saved_model_degrees(objects: zckpt.Node) -> tuple[int, ...]:
    """Return the saved degrees of the axes whose ranks share samples."""
    degrees = objects.member("degrees", {}).members()
    return tuple(degrees[axis].integer(1) if axis in degrees else 1 for axis in MODEL_AXES)


def _model_degrees(run: Run) -> tuple[int, ...]:
    degrees = attrs.asdict(run.plan.parallel.degrees)
    return tuple(degrees.get(axis, 1) for axis in MODEL_AXES)
