"""A committed checkpoint: open its folder, read and verify its tensors.

Opening checks the manifest in full and compares the size of every file; bytes are verified as they are read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, final

import attrs
import torch
from torch import Tensor

from zckpt.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointReadError,
    os_error_path,
    os_error_text,
)
from zckpt.format import manifest as manifests
from zckpt.format import schema
from zckpt.format.canonical import JSON
from zckpt.format.manifest import FILE_NAME, Described, Manifest
from zckpt.format.schema import ManifestSummary
from zckpt.format.shard import ShardLike, whole
from zckpt.gc_pause import collector_paused
from zckpt.loading.plan_reads import (
    LoadReport,
    ReadItem,
    ReadRequest,
    check_problems,
    is_disjoint,
    merge_plans,
    plan_read,
    whole_item,
)
from zckpt.loading.run_reads import ReadRunner
from zckpt.loading.verify import Verifier, other_save_hint
from zckpt.ranks import ALONE, Peers, Vote
from zckpt.storage.locate import resolve_checkpoint
from zckpt.storage.storage import LOCAL, PathKind, Storage, read_all
from zckpt.storage.thread_pool import run_jobs


@final
@attrs.define(eq=False, repr=False)
class Checkpoint(Described):
    """A checkpoint whose manifest and file sizes are checked; `find` opens it.  Tensors are read on demand."""

    path: Path
    manifest: Manifest
    storage: Storage
    notes: tuple[str, ...] = ()  # irregularities found while selecting it, for a log
    verifier: Verifier = attrs.field(init=False)  # remembers the verified chunks

    def __attrs_post_init__(self) -> None:
        self.verifier = Verifier(self.path, self.manifest, self.storage)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, step={self.step}, {len(self.names())} tensors)"

    @property
    def origin(self) -> str:
        """Location of the objects, for errors."""
        return str(self.path / FILE_NAME)

    def rank_objects(self, rank: int) -> dict[str, JSON]:
        """The JSON values that `rank` saved; raises CheckpointMismatch if fewer ranks saved."""
        count = self.manifest.world_size
        if not 0 <= rank < count:
            raise CheckpointMismatch(
                f"checkpoint {self.path} was saved by {count} ranks: it has no objects of rank {rank}"
            )
        return self.manifest.rank_objects[rank]

    @collector_paused()
    def read(
        self,
        wanted: Iterable[ShardLike],
        strict: bool = True,
        verify: bool | Literal["first"] = True,
        *,
        cast: bool = False,
        ignore: Sequence[str] = (),
        readers: int = 4,
        peers: Peers = ALONE,
    ) -> LoadReport:
        """Fill the wanted tensors in place, whatever boxes and spans the checkpoint was saved with.

        strict: raise if a wanted name is missing, or if the checkpoint holds a name that no rank wants.
        verify: True compares each chunk with its checksum as it is read.  "first" verifies all bytes in a pass of its
            own before it modifies a tensor; the second read comes from the page cache, or from the disk again if the
            data does not fit there or filling it takes longer.  False verifies nothing.  A Checkpoint verifies each
            chunk once.
        cast: convert between floating dtypes; otherwise dtypes must be equal.
        ignore: name prefixes that never count as extra.
        readers: threads of this rank.
        peers: the ranks that read together.  They fail together, and a name counts as extra only if no rank wants it;
            a rank that holds a part of the names and reads ALONE needs strict=False.

        Phases: check all addresses; verify all bytes (verify="first"); copy.  Only the copy modifies tensors.  An
        error in the copy leaves them partly filled, and its message says so.
        Raises CheckpointInputError, CheckpointMismatch, CheckpointCorrupt, CheckpointReadError.
        """
        reading = ReadRequest(wanted, "raise" if strict else "ignore", verify, cast, tuple(ignore), readers)
        return self.prepare_read(reading, peers)()

    def prepare_read(self, reading: ReadRequest, peers: Peers = ALONE) -> Callable[[], LoadReport]:
        """Run the phases of `read` before the copy; the returned function copies.  Every rank calls both."""
        vote = Vote(peers, f"load of {self.path}", CheckpointReadError)
        plans = []  # of this rank; set by the closure that the vote runs

        def check() -> JSON:
            plans.append(plan_read(self.manifest, reading.wanted, cast=reading.cast))
            return plans[0].as_json()

        answers = vote.run("checking", check)
        report, problems = merge_plans(answers, self.manifest, reading.ignore)
        check_problems(problems, strict=reading.on_mismatch == "raise", where=f"checkpoint {self.path}")
        items = plans[0].items
        is_once = reading.verify != "first" and is_disjoint(answers, self.manifest)
        runner = ReadRunner(self.path, self.storage, self.verifier, reading.readers, is_once=is_once)
        if reading.verify == "first":
            vote.run("verifying", lambda: runner.verify(items))

        def copy() -> LoadReport:
            with _partial_load_errors(verified=reading.verify == "first"):
                read_nbytes = vote.run("copying", lambda: runner.fill(items, bool(reading.verify)))
            return attrs.evolve(report, read_nbytes=read_nbytes[peers.rank])

        return copy

    def tensor(self, name: str, verify: bool = True) -> Tensor:
        """Return one whole tensor, on the CPU, in its stored dtype and global shape.

        Raises CheckpointMismatch if there is none of this name, CheckpointCorrupt if its checksum differs.
        """
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointMismatch(f"checkpoint {self.path} has no tensor {name!r}")
        made = torch.empty(entry.shape, dtype=entry.dtype)
        self.read([whole(name, made)], strict=False, verify=verify)
        return made

    def verify(self, readers: int = 4) -> None:
        """Read everything and compare every checksum; raises CheckpointCorrupt with the first ten problems."""
        runner = ReadRunner(self.path, self.storage, self.verifier, num_threads=1)
        items = (whole_item(name, entry) for name, entry in sorted(self.manifest.tensors.items()))
        found = run_jobs((partial(self._problem, runner, item) for item in items), readers)
        problems = dict.fromkeys(filter(None, found))  # unique: a damaged header fails every tensor of its file
        if problems:
            more = f"\n... and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise CheckpointCorrupt("\n".join([*problems][:10]) + more, path=str(self.path))

    def _problem(self, runner: ReadRunner, item: ReadItem) -> str:
        """Error text if bytes of a tensor are damaged or unreadable; "" if they are sound."""
        try:
            runner.verify([item])
        except CheckpointCorrupt as error:
            return str(error)
        except OSError as error:
            return f"checkpoint {self.path}: {os_error_text(error)}"
        return ""


def open_checkpoint(
    path: str | os.PathLike[str], *, tag: str = "", notes: tuple[str, ...] = (), storage: Storage = LOCAL
) -> Checkpoint:
    """Open the checkpoint in this folder; its manifest must hold `tag` (default: the folder's name).

    Raises CheckpointNotFound if there is no checkpoint, CheckpointCorrupt if the tag or the size of a file differs,
    CheckpointReadError if it cannot be read.
    """
    folder, storage = resolve_checkpoint(path, storage)
    with as_read_errors(f"opening checkpoint {folder}"):
        found = _read_manifest(storage, folder)
        expected = tag or os.path.basename(os.path.abspath(folder))  # of "." too
        if found.tag != expected:
            raise CheckpointCorrupt(
                f"{folder}: its manifest says tag {found.tag!r}, expected {expected!r}: renamed or copied",
                path=str(folder),
            )
        _check_sizes(storage, folder, found)
        return Checkpoint(folder, found, storage, notes)


@contextlib.contextmanager
def as_read_errors(task: str) -> Iterator[None]:
    """Convert an OSError inside into CheckpointReadError with `task` and the path."""
    try:
        yield
    except OSError as error:
        raise CheckpointReadError(f"{task}: {os_error_text(error)}", path=os_error_path(error)) from error


def read_summary(storage: Storage, folder: Path) -> ManifestSummary:
    """Summary of the manifest in this folder; checks its checksum only."""
    path = folder / manifests.FILE_NAME
    return schema.read_summary(read_all(storage, path, manifests.MAX_NBYTES), path)


@contextlib.contextmanager
def _partial_load_errors(*, verified: bool) -> Iterator[None]:
    """Add to errors inside that tensors are partly filled.  verified: every byte was verified before."""
    try:
        yield
    except CheckpointError as error:
        advice = "" if verified else ' (verify="first" verifies all bytes before it modifies a tensor)'
        error.args = (
            f"{error}. Tensors are partly filled: load this or another checkpoint before using them{advice}.",
        )
        raise


def _read_manifest(storage: Storage, folder: Path) -> Manifest:
    path = folder / manifests.FILE_NAME
    kind = storage.kind(path)
    if kind is PathKind.ABSENT:
        state = "never committed" if storage.kind(folder) is PathKind.FOLDER else "the folder does not exist"
        raise CheckpointNotFound(f"{folder} has no {manifests.FILE_NAME}: {state}", path=str(path))
    if kind is not PathKind.FILE:
        raise CheckpointCorrupt(f"{path} is a {kind.value}, not a plain file", path=str(path))
    return schema.decode(read_all(storage, path, manifests.MAX_NBYTES), path)


def _check_sizes(storage: Storage, folder: Path, manifest: Manifest) -> None:
    for name, entry in manifest.files.items():
        path = folder / name
        kind = storage.kind(path)
        if kind is not PathKind.FILE:
            what = "is missing" if kind is PathKind.ABSENT else f"is a {kind.value}, not a plain file"
            raise CheckpointCorrupt(f"checkpoint {folder}: {name} {what}", path=str(path))
        found = storage.nbytes(path)
        if found != entry.nbytes:
            why = "truncated" if found < entry.nbytes else "longer than when it was saved"
            raise CheckpointCorrupt(
                f"checkpoint {folder}: {name} is {found:,} bytes, the manifest says {entry.nbytes:,}: {why}"
                f"{other_save_hint(storage, path, manifest)}",
                path=str(path),
            )
