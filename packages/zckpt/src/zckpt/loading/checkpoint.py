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
from zckpt.format.manifest import FILE_NAME, Manifest
from zckpt.format.schema import ManifestSummary
from zckpt.format.shard import ShardLike, whole
from zckpt.loading.plan_reads import (
    LoadReport,
    ReadItem,
    ReadRequest,
    check_problems,
    is_disjoint,
    merge_plans,
    plan_read,
    stored,
)
from zckpt.loading.run_reads import ReadRunner
from zckpt.loading.verify import Verifier, other_save_hint
from zckpt.ranks import ALONE, Peers, Vote
from zckpt.storage.locate import resolve_checkpoint
from zckpt.storage.storage import LOCAL, PathKind, Storage, read_all
from zckpt.storage.thread_pool import run_jobs


@final
@attrs.define(eq=False)
class Checkpoint:
    """Made by `find`; its manifest is checked and its files have the right sizes.  Tensors are read on demand."""

    path: Path
    manifest: Manifest
    storage: Storage
    notes: tuple[str, ...] = ()  # what was odd about finding it, for a log
    verifier: Verifier = attrs.field(init=False)  # remembers what it has hashed

    def __attrs_post_init__(self) -> None:
        self.verifier = Verifier(self.path, self.manifest, self.storage)

    @property
    def tag(self) -> str:
        return self.manifest.tag

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def objects(self) -> dict[str, JSON]:
        """The run's JSON values."""
        return self.manifest.objects

    @property
    def origin(self) -> str:
        """Location of the objects, for errors."""
        return str(self.path / FILE_NAME)

    def rank_objects(self, rank: int) -> dict[str, JSON]:
        """The JSON values that this rank saved; CheckpointMismatch if fewer ranks saved."""
        count = self.manifest.world_size
        if not 0 <= rank < count:
            raise CheckpointMismatch(
                f"checkpoint {self.path} was saved by {count} ranks: it has no objects of rank {rank}"
            )
        return self.manifest.rank_objects[rank]

    def names(self) -> tuple[str, ...]:
        """Names of the tensors, sorted."""
        return tuple(sorted(self.manifest.tensors))

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

        strict: refuse if a wanted name is missing, or if the checkpoint holds a name that nobody wants.
        verify: compare every chunk with its checksum, as it is read (True); all of them in a pass of its own before
            the first tensor is touched ("first": what is read twice comes from the page cache the second time, if it
            fits there); or not at all.  A chunk is compared once in the life of a Checkpoint.
        cast: convert between floating dtypes; otherwise dtypes must be equal.
        ignore: prefixes of names that are not extra, wanted or not.
        readers: threads of this rank.
        peers: the ranks that read together.  They fail together, and a name counts as extra only if no rank wants it;
            a rank that holds a part of the names and reads ALONE needs strict=False.

        Phases: check all addresses; verify all bytes, if that comes first; only then copy.  Until the copy no tensor
        is touched.  An error in the copy leaves the wanted tensors partly filled, and says so.
        Raises CheckpointInputError, CheckpointMismatch, CheckpointCorrupt, CheckpointReadError.
        """
        reading = ReadRequest(wanted, "refuse" if strict else "leave", verify, cast, tuple(ignore), readers)
        return self.prepare_read(reading, peers)()

    def prepare_read(self, reading: ReadRequest, peers: Peers = ALONE) -> Callable[[], LoadReport]:
        """The phases of `read` before a tensor is touched; what is returned does the copy.  All ranks call both."""
        vote = Vote(peers, f"load of {self.path}", CheckpointReadError)
        plans = []  # this rank's, out of the closure that the team runs

        def check() -> JSON:
            plans.append(plan_read(self.manifest, reading.wanted, cast=reading.cast))
            return plans[0].as_json()

        answers = vote.run("checking", check)
        report, problems = merge_plans(answers, self.manifest, reading.ignore)
        check_problems(problems, strict=reading.misfits == "refuse", where=f"checkpoint {self.path}")
        once = reading.verify != "first" and is_disjoint(answers, self.manifest)
        items = plans[0].items
        runner = ReadRunner(self.path, self.storage, self.verifier, reading.readers, once=once)
        if reading.verify == "first":
            vote.run("verifying", lambda: runner.prove(items))

        def copy() -> LoadReport:
            with _partial_load_errors(proven=reading.verify == "first"):
                read_nbytes = vote.run("copying", lambda: runner.fill(items, bool(reading.verify)))
            return attrs.evolve(report, read_nbytes=read_nbytes[peers.rank])

        return copy

    def tensor(self, name: str, verify: bool = True) -> Tensor:
        """One tensor whole, on the CPU, in its stored dtype and global shape."""
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointMismatch(f"checkpoint {self.path} has no tensor {name!r}")
        made = torch.empty(entry.shape, dtype=entry.dtype)
        self.read([whole(name, made)], strict=False, verify=verify)
        return made

    def verify(self, readers: int = 4) -> None:
        """Read everything and compare every checksum; CheckpointCorrupt lists the first ten that are wrong."""
        runner = ReadRunner(self.path, self.storage, self.verifier, num_threads=1)
        items = (stored(name, entry) for name, entry in sorted(self.manifest.tensors.items()))
        found = run_jobs((partial(self._problem, runner, item) for item in items), readers)
        problems = dict.fromkeys(filter(None, found))  # a damaged header is the problem of many tensors: told once
        if problems:
            more = f"\n... and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise CheckpointCorrupt("\n".join([*problems][:10]) + more, path=str(self.path))

    def _problem(self, runner: ReadRunner, item: ReadItem) -> str:
        """Error text about the bytes of a tensor; "" if there is none."""
        try:
            runner.prove([item])
        except CheckpointCorrupt as error:
            return str(error)
        except OSError as error:
            return f"checkpoint {self.path}: {os_error_text(error)}"
        return ""


def open_checkpoint(
    path: str | os.PathLike[str], *, tag: str = "", notes: tuple[str, ...] = (), storage: Storage = LOCAL
) -> Checkpoint:
    """The checkpoint in this very folder, which `tag` (by default the folder's name) must match."""
    folder, storage = resolve_checkpoint(path, storage)
    with named_os_errors(f"opening checkpoint {folder}"):
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
def named_os_errors(task: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointReadError(f"{task}: {os_error_text(error)}", path=os_error_path(error)) from error


def read_summary(storage: Storage, folder: Path) -> ManifestSummary:
    """Summary of the manifest in this folder; only its checksum is checked."""
    path = folder / manifests.FILE_NAME
    return schema.read_summary(read_all(storage, path, manifests.MAX_NBYTES), path)


@contextlib.contextmanager
def _partial_load_errors(*, proven: bool) -> Iterator[None]:
    """Errors inside say that tensors were touched.  proven: every byte was right before that."""
    try:
        yield
    except CheckpointError as error:
        advice = "" if proven else ' (verify="first" proves all bytes before it touches one)'
        error.args = (f"{error}. Tensors were being filled: load again, or another checkpoint, first{advice}.",)
        raise


def _read_manifest(storage: Storage, folder: Path) -> Manifest:
    path = folder / manifests.FILE_NAME
    kind = storage.kind(path)
    if kind is PathKind.ABSENT:
        state = "never committed" if storage.kind(folder) is PathKind.FOLDER else "not there"
        raise CheckpointNotFound(f"{folder} has no {manifests.FILE_NAME}: {state}", path=str(path))
    if kind is not PathKind.FILE:
        raise CheckpointCorrupt(f"{path} is a {kind.value}, not a plain file: refused", path=str(path))
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
            why = "truncated" if found < entry.nbytes else "longer than what was saved"
            raise CheckpointCorrupt(
                f"checkpoint {folder}: {name} is {found:,} bytes, the manifest says {entry.nbytes:,}: {why}"
                f"{other_save_hint(storage, path, manifest)}",
                path=str(path),
            )
