"""Save and load of an engine.

A checkpoint has the weights (the masters, if there are any) and the optimizer state, both under logical names with
global addresses, so that any world size and stage can read them.  As JSON it has the counters, the optimizer's
hyperparameters, schedule, scaler, features, the caller's `client_state`, and each rank's random state and loader
position.  A run that restores all of it at the same world size is bit-identical to the uninterrupted run.  At another
world size the order of data continues at the same sample; each rank keeps its present random state, with a warning.

Gradients are not saved.  A save during accumulation has the weights, optimizer state, counters and loader position of
the last boundary, and the present random state and buffers: a run that resumes begins the unfinished step again.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import attrs
import torch
from torch import nn

import zckpt
import zpartition
from zengine.checkpoint import weights
from zengine.checkpoint.consensus import (
    MODEL,
    GroupPeers,
    Source,
    check_kinds,
    check_names,
    common_tag,
    errors_at,
    found_source,
    on_every_rank,
    optimizer_kind,
    require_run,
    small_state,
    warn_rounded,
)
from zengine.checkpoint.export import tied_names
from zengine.checkpoint.foreign_state import saved_options
from zengine.checkpoint.jsonable import decode, encode
from zengine.checkpoint.replica_names import GROUPS, OWN, SavedNames, own_names
from zengine.checkpoint.restore import EVERYTHING, RestoreScope, prepare
from zengine.checkpoint.saver import Content, Saver
from zengine.engine.clock import Phase
from zengine.progress import progress

if TYPE_CHECKING:
    from zengine.engine.parts import Run, SavedFeature

__all__ = ["Checkpoints"]

NOTHING_LOADED = "nothing was loaded"
UNFINISHED = (
    "save_checkpoint() %s: gradients of the unfinished step are not saved. The checkpoint has the weights and the "
    "optimizer state after step %d, and a run that resumes begins the next step again; the engine's loader yields "
    "the same batches again. To save whole steps, call it after a step() that returned a report."
)

log = logging.getLogger("zengine")


@final
@attrs.frozen(eq=False)
class Checkpoints:
    """The engine's `checkpoints` slot: saves and restores runs, and loads weights in other formats."""

    saver: Saver

    @zckpt.collector_paused()
    def save(
        self,
        run: Run,
        features: Sequence[SavedFeature],
        root: str,
        tag: str | None,
        client_state: Mapping[str, Any],
        *,
        latest: bool,
        trained_only: bool,
    ) -> str:
        """See `Engine.save_checkpoint`.  trained_only: omit frozen parameters."""
        clock = run.clock
        clock.require_open("save_checkpoint")
        if not root:
            raise ValueError(f"save_checkpoint(save_dir={root!r}): give the folder that holds the checkpoints")
        peers = GroupPeers.of(run)
        if not clock.is_between_steps:
            run.parts.partition.rollback_speculation()
            if peers.rank == 0:
                log.warning(UNFINISHED, clock.position, clock.steps)
        left_out = frozenset(
            name for name, param in run.module.named_parameters() if trained_only and not param.requires_grad
        )
        common = common_tag(
            f"global_step{clock.steps}" if tag is None else str(tag), run.plan.checkpoint.tag_validation, peers
        )
        objects, rank_objects, held = _small_state(run, features, client_state, peers)
        objects["left_out"] = sorted(left_out)
        objects["tied"] = tied_names(run)
        telemetry = run.parts.telemetry
        with telemetry.paused(), telemetry.span("checkpoint"):
            content = Content(
                shards=itertools.chain(_shards(run, left_out), *(f.tensors() for f in features), held),
                objects=objects,
                rank_objects=rank_objects,
                step=clock.steps,
                latest=latest,
                keep=run.plan.keep,
            )
            with progress(f"saving {root}/{common}"):
                return self.saver.save(root, common, content, peers)

    @zckpt.collector_paused()
    def load(
        self,
        run: Run,
        features: Sequence[SavedFeature],
        root: str,
        tag: str | None,
        *,
        strict: bool,
        module_only: bool,
        optimizer: bool,
        scheduler: bool,
    ) -> tuple[str, dict[str, Any]]:
        """See `Engine.load_checkpoint`.

        Phases: find the same checkpoint on all ranks, compare names and kinds, decode and check everything, fill
        tensors, commit the rest, publish.
        """
        run.clock.require_loadable("load_checkpoint")
        if root is None:
            raise TypeError("load_checkpoint(load_dir=None): give the folder that was passed to save_checkpoint()")
        self.saver.wait()
        peers, scope = GroupPeers.of(run), RestoreScope.choose(module_only, optimizer, scheduler)
        with progress(f"loading {root}"), found_source(root, tag, peers) as checkpoint:
            return _load(run, features, checkpoint, scope, strict=strict)

    def restore_from_memory(self, run: Run, features: Sequence[SavedFeature]) -> dict[str, Any]:
        """See `Engine.restore_from_memory`."""
        run.clock.require_loadable("restore_from_memory")
        return _load(run, features, self.saver.newest(GroupPeers.of(run)), EVERYTHING, strict=True)[1]

    def load_weights(self, run: Run, path: str | os.PathLike[str], *, strict: bool, like: nn.Module | None) -> None:
        """See `Engine.load_weights`."""
        weights.load_weights(run, path, strict=strict, like=like)

    def state_dict(self, run: Run, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See `Engine.state_dict`."""
        return weights.state_dict(run, *args, **kwargs)

    def load_state_dict(self, run: Run, state_dict: Mapping[str, Any], *, strict: bool) -> Any:
        """See `Engine.load_state_dict`."""
        return weights.load_state_dict(run, state_dict, strict=strict)

    def check(self) -> None:
        """Raise the error of a failed background save on all ranks together; never waits for a disk."""
        self.saver.check()

    def wait(self) -> None:
        """See `Engine.wait_for_checkpoint`."""
        self.saver.wait()

    def close(self) -> None:
        """Wait for the background save and free its memory."""
        self.saver.close()


def _load(
    run: Run, features: Sequence[SavedFeature], checkpoint: Source, scope: RestoreScope, *, strict: bool
) -> tuple[str, dict[str, Any]]:
    """Decode and check everything on all ranks without changes; then fill tensors, and commit the rest."""
    partition, names, peers = run.parts.partition, frozenset(checkpoint.names()), GroupPeers.of(run)
    tensors: dict[str, torch.Tensor] = {}  # of the client state
    left_out, client_state = on_every_rank(lambda: _checked(run, checkpoint, scope, tensors), peers, NOTHING_LOADED)
    check_names(partition, names | left_out, str(checkpoint.path), peers, strict=strict)
    partition.admit_unfrozen()
    wanted = [shard for shard in _with_prefix(partition.shards_to_fill()) if shard.name in names]
    warn_rounded(wanted, checkpoint, peers.rank)
    prepared = on_every_rank(lambda: prepare(run, features, checkpoint, scope), peers, NOTHING_LOADED)
    own = own_names(run, checkpoint, names, weights_only=not scope.run)
    numbers: list[zckpt.ShardLike] = [*_renamed(prepared.state.numbers, own), *stored(tensors)]
    checkpoint.read(numbers, strict=False, verify="first", cast=True, peers=peers)
    on_every_rank(prepared.state.stage_numbers, peers, NOTHING_LOADED)
    extra = [shard for f in features for shard in f.tensors_to_fill(weights_only=not scope.run)]
    shards = [*_renamed([*wanted, *prepared.state.shards], own), *(each for each in extra if each.name in names)]
    everything = zckpt.ReadRequest(shards, "ignore", verify="first", cast=True)
    fill = checkpoint.prepare_read(everything, peers)
    with run.clock.loading(f"the load of checkpoint {checkpoint.path}", scope.parts, is_whole=strict):
        partition.zero_grad()
        for feature in features:
            feature.reset_tensors()
        fill()
        if not run.plan.loads_full_masters:
            _round_masters(wanted, partition.params)
        del fill, everything, shards  # staged tensors are freed one by one as the optimizer adopts them
        on_every_rank(prepared.commit, peers, "the load was not completed")
        partition.publish()
    if run.clock.phase is not Phase.HALF_LOADED:
        run.clock.begin_step()
    return str(checkpoint.path), client_state


def _round_masters(shards: Iterable[zpartition.Shard], params: Mapping[str, torch.Tensor]) -> None:
    """Round loaded masters to the dtypes of their weights (zero_optimization.load_from_fp32_weights: false)."""
    for shard in shards:
        param = params.get(shard.name.removeprefix(MODEL))
        if param is not None and param.is_floating_point():
            shard.tensor.copy_(shard.tensor.to(param.dtype))


def _checked(
    run: Run, checkpoint: Source, scope: RestoreScope, tensors: dict[str, torch.Tensor]
) -> tuple[frozenset[str], dict[str, Any]]:
    """Check the kinds; return the names that were not saved and need not match, and the caller's state.

    `tensors` receives the tensors of the caller's state, to be read.
    """
    objects = small_state(checkpoint)
    if scope.run:
        require_run(checkpoint)
    left_out = frozenset(MODEL + name.text() for name in objects.member("left_out", []).items())
    check_kinds(run, checkpoint, optimizer=scope.optimizer, scheduler=scope.scheduler)
    client_state = objects.member("client_state", {})
    client_state.members()
    with errors_at(client_state):
        found = decode(client_state.value, client_state.where, tensors)
        if missing := sorted(tensors.keys() - set(checkpoint.names())):
            raise ValueError(f"the tensors {missing[:5]} are not in the checkpoint")
        return left_out, found


# -- content of a checkpoint ---------------------------------------------------------------------


def _shards(run: Run, left_out: frozenset[str]) -> Iterator[zckpt.ShardLike]:
    partition, names = run.parts.partition, SavedNames.of(run)
    for weight in partition.shards():
        if weight.name not in left_out:
            yield from (weight.renamed(name) for name in names.of_weight(weight.name))
    if run.optimizer is not None:
        for key, shard in zpartition.state_shards(run.optimizer, partition.holders):
            yield shard.renamed(names.of_state(key, shard.name))


def stored(tensors: Mapping[str, torch.Tensor]) -> list[zckpt.Shard]:
    """Return shards of the caller's tensors; those to be read are contiguous, so that a read fills them."""
    return [zckpt.whole(name, tensor.detach().contiguous()) for name, tensor in tensors.items()]


def _with_prefix(shards: Iterable[Any]) -> Iterator[Any]:
    """Yield shards with the names that weights have in a checkpoint."""
    for shard in shards:
        yield shard.renamed(MODEL + shard.name)


def _renamed(shards: Iterable[Any], names: Mapping[str, str]) -> Iterator[Any]:
    """Yield shards with the names under which this rank reads them."""
    for shard in shards:
        yield shard.renamed(names[shard.name]) if shard.name in names else shard


def _small_state(
    run: Run, features: Sequence[SavedFeature], client_state: Mapping[str, Any], peers: GroupPeers
) -> tuple[dict[str, Any], dict[str, Any], list[zckpt.Shard]]:
    """Return the JSON of all ranks, that of this rank, and on rank 0 the tensors of the caller's state."""
    tensors: dict[str, torch.Tensor] = {}
    objects, rank_objects, held = on_every_rank(
        lambda: (_objects(run, features, client_state, tensors), _rank_objects(run), stored(tensors)), peers
    )
    of_group = SavedNames.of(run).objects(objects)
    rank_objects |= {OWN: of_group} if of_group else {}
    # rank 0's counts and caller's state, which may differ between ranks, and what only some ranks know
    is_staged = run.plan.parallel.degrees.pipeline > 1
    own = ("number_forms", "frozen", "features", "optimizer") if is_staged else ("number_forms",)
    common = ("features", "client_state", "metrics", "frozen", *of_group, *own) if peers.rank == 0 else own
    of_ranks = peers.exchange({key: objects[key] for key in common})
    objects |= of_ranks[0]
    objects["number_forms"] = {key: form for each in of_ranks for key, form in each["number_forms"].items()}
    objects["frozen"] = sorted({name for each in of_ranks for name in each.get("frozen", ())})
    if is_staged:
        states = [each["features"] for each in of_ranks]
        objects["features"] = {f.name: f.merge_states([each[f.name] for each in states]) for f in features if f.name}
        objects["optimizer"] = _merged_options([each["optimizer"] for each in of_ranks])
    return objects, rank_objects, held if peers.rank == 0 else []


def _merged_options(saved: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return rank 0's description of the optimizer; options that are by parameter are those of all stages."""
    first = saved[0]
    if first is None:
        return None
    groups = [dict(group) for group in first["groups"]]
    for each in saved[1:]:
        for group, other in zip(groups, [] if each is None else each["groups"]):
            for key, value in other.items():
                if isinstance(value, dict) and isinstance(group.get(key), dict):
                    group[key] = {**value, **group[key]}
    return {**first, "groups": groups}


def _objects(
    run: Run, features: Sequence[SavedFeature], client_state: Mapping[str, Any], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the state that is JSON; `tensors` receives those of the caller's state."""
    parts = run.parts
    return {
        "client_state": encode(_as_dict(client_state), "client_state", tensors),
        "metrics": _metrics(client_state),
        "clock": encode(run.clock.state_dict()),
        "optimizer": None if run.optimizer is None else _describe_optimizer(run.optimizer),
        "number_forms": {} if run.optimizer is None else zpartition.number_forms(run.optimizer),
        "scheduler": {
            "kind": type(parts.scheduler).__name__,
            "state": encode(parts.scheduler.state_dict(), "the scheduler's state"),
        },
        "scaler": {"kind": type(parts.scaler).__name__, "state": encode(parts.scaler.state_dict())},
        "features": {f.name: encode(f.state_dict(), f"feature {f.name}") for f in features if f.name},
        "plan": run.plan.describe(),
        "frozen": [name for name, param in run.module.named_parameters() if not param.requires_grad],
        "zero_stage": run.plan.zero.stage,
        GROUPS: SavedNames.of(run).num_groups,
        "reduce_at": run.plan.zero.reduce_at.value,
        "degrees": attrs.asdict(run.plan.parallel.degrees),
    }


def _as_dict(client_state: object) -> dict[str, Any]:
    """Return the caller's state.  Raises TypeError: it is no mapping."""
    if not isinstance(client_state, Mapping):
        raise TypeError(
            f"save_checkpoint(client_state=...) takes a dict, got {type(client_state).__name__}: "
            'pass {"name": value}, which load_checkpoint() returns'
        )
    return dict(client_state)


def _metrics(client_state: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of client_state["metrics"], which checkpoint.keep.best compares."""
    given = client_state.get("metrics")
    values = given.items() if isinstance(given, Mapping) else ()
    numbers = {str(name): float(value) for name, value in values if _is_number(value)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _is_number(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))


def _describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's kind and the hyperparameters of each group."""
    groups = [encode(options, f"optimizer group {index}") for index, options in enumerate(saved_options(optimizer))]
    return {"kind": optimizer_kind(optimizer), "groups": groups}


def _rank_objects(run: Run) -> dict[str, Any]:
    loader = run.parts.loader
    return {
        "rng": zckpt.rng.capture(),
        "loader": None if loader is None else encode(_position(run), "the loader's state"),
    }


def _position(run: Run) -> dict[str, Any]:
    """Return the loader's position: the present one, or in an unfinished step that of the last boundary."""
    loader = run.parts.loader
    marked: dict[str, Any] = {} if run.clock.is_between_steps else loader.marked
    return marked or loader.state_dict()
