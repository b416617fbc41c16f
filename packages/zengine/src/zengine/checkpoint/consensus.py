"""Consensus of ranks before a checkpoint is saved or loaded.

A rank that decides alone (which folder, which tag, if the model fits) leaves the others in a collective that never
completes, or in another checkpoint.  Each decision here is made equally by all ranks, or sent to all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import attrs
import torch

import zckpt
import zcomm
import zpartition
from zengine.pages import Page, explained

if TYPE_CHECKING:
    from zengine.engine.parts import Run

log = logging.getLogger("zengine")

T = TypeVar("T")

# source of a load; imported on the first load
Source: TypeAlias = "zckpt.Checkpoint | zckpt.MemoryCheckpoint | zckpt.interchange.ForeignCheckpoint"
ALL_RANKS = (
    "Another rank did not take part in a save or load of a checkpoint, or failed in it. Call save_checkpoint(), "
    "load_checkpoint() and the other verbs of checkpoints on all ranks, not under `if rank == 0`: each rank writes "
    "and reads its own part."
)
MODEL = "model."  # prefix of the names of weights and buffers


@attrs.frozen(eq=False)
class GroupPeers:
    """Process group with the interface that zckpt expects."""

    group: torch.distributed.ProcessGroup | None
    rank: int
    world_size: int

    @classmethod
    def of(cls, run: Run) -> GroupPeers:
        """Return all ranks of the run, including those with other parts of the model."""
        group = run.parts.groups.world()
        return cls(group, zcomm.group_rank(group), zcomm.group_size(group))

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order.

        Raises:
            CollectiveFailed: another rank does something else, or has failed.
        """
        try:
            return zcomm.all_gather_object(value, self.group)
        except zcomm.CollectiveFailed as error:
            raise zcomm.CollectiveFailed(f"{ALL_RANKS} {error}") from error


@explained(Page.CHECKPOINTS)
class TagMismatch(ValueError, AssertionError):
    """Ranks save under different tags; an AssertionError, too, as in DeepSpeed."""


def common_tag(tag: str, validation: str, peers: GroupPeers) -> str:
    """Return rank 0's tag.

    validation: the config's `tag_validation` for different tags: "FAIL" raises TagMismatch, "WARN" logs a warning.
    """
    tags = peers.exchange(tag)
    if any(other != tags[0] for other in tags) and validation != "IGNORE":
        by_rank = ", ".join(f"rank {rank}: {other!r}" for rank, other in enumerate(tags))
        message = f"save_checkpoint() got different tags ({by_rank})"
        if validation == "FAIL":
            raise TagMismatch(
                f'{message}; pass the same tag on every rank, or set checkpoint.tag_validation to "WARN".'
            )
        log.warning("%s; using the tag of rank 0", message)
    return str(tags[0])


def on_every_rank(work: Callable[[], T], peers: GroupPeers, otherwise: str = "nothing was saved") -> T:
    """Return the result of `work` if it succeeds on all ranks; otherwise raise on all.  A collective.

    otherwise: consequence of a failure, for the message.

    A rank on which `work` failed raises its error; others raise one that names the rank and has its message.
    """
    result: list[T] = []
    failure: Exception | None = None
    try:
        result.append(work())
    except Exception as error:  # of any class: the other ranks wait for the outcome
        failure = error
    outcome = ("", "") if failure is None else (type(failure).__name__, str(failure) or type(failure).__name__)
    outcomes = peers.exchange(outcome)
    if failure is not None:
        raise failure
    for rank, (kind, text) in enumerate(outcomes):
        if kind:
            raise _error_class(kind)(f"{otherwise}, because of rank {rank}: {text}")
    return result[0]


def _error_class(name: str) -> type[Exception]:
    """Return the class of another rank's error if it is one of zckpt's, else ValueError."""
    found = getattr(zckpt, name, None)
    return found if isinstance(found, type) and issubclass(found, zckpt.CheckpointError) else ValueError


def small_state(checkpoint: Source) -> zckpt.Node:
    """Return the saved state that is not in tensors; errors in it name file and key."""
    return zckpt.Node(checkpoint.objects, f"{checkpoint.origin}: objects", zckpt.CheckpointStateError)


@contextmanager
def errors_at(node: zckpt.Node) -> Iterator[None]:
    """Turn errors inside into a CheckpointStateError that names the file and the key of `node`."""
    try:
        yield
    except zckpt.CheckpointStateError:
        raise
    except Exception as error:  # of any class
        is_plain = isinstance(error, (ValueError, TypeError)) and str(error)
        text = str(error) if is_plain else f"{type(error).__name__}: {error}"
        raise zckpt.CheckpointStateError(f"{node.where}: {text}. Nothing was loaded.") from error


def find(root: str, tag: str | None, peers: GroupPeers) -> zckpt.Checkpoint:
    """Return the same checkpoint on every rank, or raise on every rank; rank 0 logs the notes of the search."""
    try:
        found, problem = zckpt.find(root, None if tag is None else str(tag)), None
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
    own, common = found, str(tags[0])
    for note in own.notes if peers.rank == 0 else ():
        log.warning("%s", note)
    if all(other == common for other in tags):
        return own
    return on_every_rank(lambda: own if own.tag == common else zckpt.find(root, common), peers, "nothing was loaded")


@contextmanager
def found_source(root: str, tag: str | None, peers: GroupPeers) -> Iterator[Source]:
    """Yield the checkpoint that `find` returns; a folder that DeepSpeed wrote is opened where it lies."""
    if not all(peers.exchange(_is_deepspeed(root, tag))):
        try:
            found_here = find(root, tag, peers)
        except zckpt.CheckpointNotFound as error:
            raise zckpt.CheckpointNotFound(f"{error}{_advice(os.fspath(root))}", path=error.path) from error
        yield found_here
        return
    found = _open_deepspeed(root, tag, peers)
    try:
        tags = peers.exchange(found.tag)
        if len(set(tags)) > 1:
            raise zckpt.CheckpointMismatch(f"ranks find different checkpoints in {root}: {', '.join(tags)}")
        if peers.rank == 0:
            log.info("%s was written by DeepSpeed; `zckpt import` converts it for good", found.path)
        yield found
    finally:
        found.close()


def _advice(root: str) -> str:
    """Return what to pass instead of `root`, which holds no checkpoint; "" if that is unknown."""
    if os.path.isfile(root):
        return (
            ": it is a file, and load_checkpoint() takes the folder that was passed to save_checkpoint(). To read "
            f"weights alone from a file, call engine.load_weights({root!r})"
        )
    if os.path.isfile(os.path.join(root, "manifest.json")):
        folder, tag = os.path.split(os.path.abspath(root))
        return f": it is a checkpoint itself; call load_checkpoint({folder!r}, tag={tag!r})"
    if os.path.isdir(root):
        return ". Pass the folder that was passed to save_checkpoint(); engine.load_weights() reads files of weights"
    return ""


def _is_deepspeed(root: str, tag: str | None) -> bool:
    """Return True for a local folder of DeepSpeed with no checkpoint of ours of this tag."""
    if tag is not None and os.path.isfile(os.path.join(root, str(tag), "manifest.json")):
        return False
    if tag is None and any(os.path.isfile(path) for path in _manifests(root)):
        return False
    if not os.path.isdir(root):
        return False
    import zckpt.interchange

    try:
        return zckpt.interchange.detect_format(root) == "deepspeed"
    except zckpt.CheckpointError:
        return False


def _manifests(root: str) -> Iterator[str]:
    with suppress(OSError):
        yield from (os.path.join(root, name, "manifest.json") for name in os.listdir(root))


def _open_deepspeed(root: str, tag: str | None, peers: GroupPeers) -> zckpt.interchange.ForeignCheckpoint:
    """Open the folder on every rank.  The ranks of a host share the verification of the files; a collective."""
    import zckpt.interchange

    hosts = peers.exchange(zcomm.this_host())
    here = [rank for rank, host in enumerate(hosts) if rank == peers.rank or (host and host == hosts[peers.rank])]
    position = here.index(peers.rank), len(here)
    chosen = None if tag is None else str(tag)
    opened = on_every_rank(
        lambda: zckpt.interchange.read_deepspeed_together(root, chosen, *position), peers, "nothing was loaded"
    )
    try:
        return on_every_rank(lambda: zckpt.interchange.ForeignCheckpoint.of(opened), peers, "nothing was loaded")
    except BaseException:
        opened.close()
        raise


def require_run(checkpoint: Source) -> None:
    """Raise CheckpointMismatch unless an engine saved the checkpoint: only those contain the state of a run."""
    if "clock" not in small_state(checkpoint).members():
        raise zckpt.CheckpointMismatch(
            f"checkpoint {checkpoint.path} was not saved by an engine: it holds no run to continue. Load its weights "
            "with load_module_only=True"
        )


def check_kinds(run: Run, checkpoint: Source, *, optimizer: bool, scheduler: bool) -> None:
    """Raise CheckpointMismatch for another optimizer or schedule, before tensors are read."""
    if optimizer and run.optimizer is not None:
        _compare_optimizers(checkpoint, run.optimizer)
    kind = type(run.parts.scheduler).__name__
    saved = small_state(checkpoint).member("scheduler").member("kind").text() if scheduler else kind
    if run.optimizer is not None and saved != kind:
        raise zckpt.CheckpointMismatch(
            f"checkpoint {checkpoint.path} holds the schedule {saved}, and this engine has {kind}. To start "
            "the present schedule from its beginning, load with load_lr_scheduler_states=False"
        )


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer in checkpoints; a class may set the name of a class with the same state."""
    return str(getattr(optimizer, "checkpoint_kind", type(optimizer).__name__))


def _compare_optimizers(checkpoint: Source, optimizer: torch.optim.Optimizer) -> None:
    """Raise CheckpointMismatch for the state of another optimizer, before tensors are read."""
    saved = small_state(checkpoint).member("optimizer", None)
    kind, num_groups = optimizer_kind(optimizer), len(optimizer.param_groups)
    problem = ""
    if saved.value is None:
        problem = f"holds no optimizer state, and this engine has an optimizer ({kind})"
    elif (other := saved.member("kind").text()) != kind:
        problem = f"holds the state of {other}, and this engine's optimizer is {kind}"
    elif (count := len(saved.member("groups").items())) != num_groups:
        problem = f"has {count} parameter groups, and this engine's optimizer has {num_groups}"
    if problem:
        raise zckpt.CheckpointMismatch(
            f"checkpoint {checkpoint.path} {problem}. To continue with new optimizer state, load with "
            "load_optimizer_states=False"
        )


def warn_rounded(wanted: Iterable[zpartition.Shard], checkpoint: Source, rank: int) -> None:
    """Warn about weights that are saved in a wider dtype than this engine has."""
    tensors = checkpoint.manifest.tensors
    rounded = [each for each in wanted if tensors[each.name].dtype.itemsize > each.tensor.dtype.itemsize]
    if rounded and rank == 0:
        name, dtype = rounded[0].name, rounded[0].tensor.dtype
        log.warning(
            "checkpoint %s has %s in %s and this engine in %s: it is rounded (%d tensors in all)",
            checkpoint.path,
            name.removeprefix(MODEL),
            str(tensors[name].dtype).removeprefix("torch."),
            str(dtype).removeprefix("torch."),
            len(rounded),
        )


def check_names(
    partition: zpartition.Partition, names: Iterable[str], where: str, peers: GroupPeers, *, strict: bool
) -> None:
    """Raise CheckpointMismatch for a checkpoint of another model, before tensors are read; if not strict, only warn.

    The names of all stages of a pipeline count together.
    """
    everywhere = (
        peers.exchange(list(partition.names())) if partition.pipeline_stages.size > 1 else [partition.names()]
    )
    expected = {MODEL + name for some in everywhere for name in some}
    saved = {name for name in names if name.startswith(MODEL)}
    missing, extra = sorted(expected - saved), sorted(saved - expected)
    if not missing and not extra:
        return
    differences = (
        f"checkpoint {where} is not of this model: {len(missing)} tensors are missing in it ({_first(missing)}), "
        f"{len(extra)} are unknown to the model ({_first(extra)})"
    )
    if strict:
        raise zckpt.CheckpointMismatch(f"{differences}. load_module_strict=False loads what fits")
    if peers.rank == 0:
        log.warning("%s: missing tensors keep their values", differences)


def _first(names: list[str]) -> str:
    shown = ", ".join(name.removeprefix(MODEL) for name in names[:10]) or "none"
    return f"{shown}, ..." if len(names) > 10 else shown
