"""What ranks must agree on before a checkpoint is saved or loaded.

A rank that decides alone (which folder, which tag, whether the model fits) leaves the others in a collective that
never completes, or in another checkpoint.  Each decision here is either made by all alike or told to all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import attrs
import torch

import zckpt
import zcomm
import zpartition

if TYPE_CHECKING:
    from zengine.engine.parts import Run

log = logging.getLogger("zengine")

T = TypeVar("T")

Source: TypeAlias = "zckpt.Checkpoint | zckpt.MemoryCheckpoint"  # what a load reads from; imported when one does
MODEL = "model."  # prefix of the names of weights and buffers


@attrs.frozen(eq=False)
class GroupPeers:
    """A process group as zckpt wants to see it."""

    group: torch.distributed.ProcessGroup | None
    rank: int
    world_size: int

    @classmethod
    def of(cls, run: Run) -> GroupPeers:
        """Return all ranks of the run, those that hold other parts of the model too."""
        group = run.parts.groups.world()
        return cls(group, zcomm.group_rank(group), zcomm.group_size(group))

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        return zcomm.all_gather_object(value, self.group)


def common_tag(tag: str, validation: str, peers: GroupPeers) -> str:
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


def on_every_rank(work: Callable[[], T], peers: GroupPeers, otherwise: str = "nothing was saved") -> T:
    """The result of `work`, if it succeeds on all ranks; else its error here, or word of where it failed."""
    result: list[T] = []
    problem: Exception | None = None
    try:
        result.append(work())
    except Exception as error:  # whatever it is: the others wait for word of it
        problem = error
    told = ("", "") if problem is None else (type(problem).__name__, str(problem) or type(problem).__name__)
    everybody = peers.exchange(told)
    if problem is not None:
        raise problem
    for rank, (kind, text) in enumerate(everybody):
        if kind:
            raise _error_class(kind)(f"{otherwise}, because of rank {rank}: {text}")
    return result[0]


def _error_class(name: str) -> type[Exception]:
    """The class of another rank's error, if it is one of zckpt's; else ValueError."""
    found = getattr(zckpt, name, None)
    return found if isinstance(found, type) and issubclass(found, zckpt.CheckpointError) else ValueError


def small_state(checkpoint: Source) -> zckpt.Node:
    """Return what the run saved beside tensors, to be taken apart; errors name file and key."""
    return zckpt.Node(checkpoint.objects, f"{checkpoint.origin}: objects", zckpt.CheckpointStateError)


@contextmanager
def named(node: zckpt.Node) -> Iterator[None]:
    """Whatever the owner of a value has against it, or trips over in it, names the file and the key."""
    try:
        yield
    except zckpt.CheckpointStateError:
        raise
    except Exception as error:  # of classes that are not ours, too
        is_plain = isinstance(error, (ValueError, TypeError)) and str(error)
        text = str(error) if is_plain else f"{type(error).__name__}: {error}"
        raise zckpt.CheckpointStateError(f"{node.where}: {text}. Nothing was loaded.") from error


def find(root: str, tag: str | None, peers: GroupPeers) -> zckpt.Checkpoint:
    """The same checkpoint on every rank, or an error on every rank; what was odd about finding it is logged."""
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
    mine, common = found, str(tags[0])
    for note in mine.notes if peers.rank == 0 else ():
        log.warning("%s", note)
    if all(other == common for other in tags):
        return mine
    return on_every_rank(
        lambda: mine if mine.tag == common else zckpt.find(root, common), peers, "nothing was loaded"
    )


def require_run(checkpoint: Source) -> None:
    """Refuse to go on with a run that is not there: only an engine saves one."""
    if "clock" not in small_state(checkpoint).members():
        raise zckpt.CheckpointMismatch(
            f"checkpoint {checkpoint.path} was not saved by an engine: it holds no run to continue. Load its weights "
            "with load_module_only=True"
        )


def compare_kinds(run: Run, checkpoint: Source, *, optimizer: bool, scheduler: bool) -> None:
    """Refuse another optimizer or schedule before anything is read."""
    if optimizer and run.optimizer is not None:
        _compare_optimizers(checkpoint, run.optimizer)
    kind = type(run.parts.scheduler).__name__
    saved = small_state(checkpoint).member("scheduler").member("kind").text() if scheduler else kind
    if run.optimizer is not None and saved != kind:
        raise zckpt.CheckpointMismatch(
            f"checkpoint {checkpoint.path} holds the schedule {saved}, and this engine has {kind}. To start "
            "the present schedule afresh, load with load_lr_scheduler_states=False"
        )


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """The name by which checkpoints know an optimizer; a class may say that its state is another's."""
    return str(getattr(optimizer, "checkpoint_kind", type(optimizer).__name__))


def _compare_optimizers(checkpoint: Source, optimizer: torch.optim.Optimizer) -> None:
    """Refuse the state of another optimizer before anything is read."""
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
            f"checkpoint {checkpoint.path} {problem}. To go on with fresh optimizer state, load with "
            "load_optimizer_states=False"
        )


def say_rounded(wanted: Iterable[zpartition.Shard], checkpoint: Source, rank: int) -> None:
    """Warn of weights that are stored with more bits than they will have here."""
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


def compare_names(
    partition: zpartition.Partition, names: Iterable[str], where: str, peers: GroupPeers, *, strict: bool
) -> None:
    """Refuse a checkpoint of another model before anything is read; not strict, only say what does not fit.

    The stages of a pipeline, which have names of their own, put them together.
    """
    everywhere = (
        peers.exchange(list(partition.names())) if partition.pipeline_stages.size > 1 else [partition.names()]
    )
    ours = {MODEL + name for some in everywhere for name in some}
    theirs = {name for name in names if name.startswith(MODEL)}
    missing, extra = sorted(ours - theirs), sorted(theirs - ours)
    if not missing and not extra:
        return
    differences = (
        f"checkpoint {where} is not of this model: {len(missing)} tensors are missing in it ({_first(missing)}), "
        f"{len(extra)} are not wanted ({_first(extra)})"
    )
    if strict:
        raise zckpt.CheckpointMismatch(f"{differences}. load_module_strict=False loads what fits")
    if peers.rank == 0:
        log.warning("%s: what is missing keeps its values", differences)


def _first(names: list[str]) -> str:
    shown = ", ".join(name.removeprefix(MODEL) for name in names[:10]) or "none"
    return f"{shown}, ..." if len(names) > 10 else shown
