"""Export and import of torch's distributed checkpoints (DCP), through its public interface, in one process.

Export: the planner receives meta tensors, and reads each tensor from the checkpoint when the writer requests it.
Each tensor gets a file of its own: torch's writer (2.13) keeps all tensors of a file in memory until the file is
closed, and this way memory is two tensors.  JSON objects are stored as one tensor of bytes, since torch would pickle
them.

Import: torch unpickles the file `.metadata`, which can run code.  So unpickler.py reads it first, and it may name
only the few classes that describe tensors.  Then tensors are loaded one at a time; other values are skipped, since
torch would unpickle them too.
"""

from __future__ import annotations

import contextlib
import os
import reprlib
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from zckpt.containers.unpickler import Constructor, DataUnpickler, Record
from zckpt.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointInputError,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointReadError,
    CheckpointWriteError,
)
from zckpt.format import canonical
from zckpt.format.canonical import JSON
from zckpt.format.regions import Box, Region, Span, box_numel, region_problem, tiling_problem, whole_box
from zckpt.interchange.engine_state import MODEL, NO_RANK_STATE, engine_objects, tied_weights
from zckpt.loading.checkpoint import Checkpoint
from zckpt.saving.save import save
from zckpt.storage.storage import LOCAL, read_all

METADATA = ".metadata"
OBJECTS = "zckpt.objects"  # name of the byte tensor that holds the JSON objects
_MAX_METADATA_NBYTES = 1 << 28
_MODULE = "torch.distributed.checkpoint.metadata"
_ALLOWED = frozenset(
    {
        *(f"{_MODULE} {name}" for name in ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata")),
        *(
            f"{_MODULE} {name}"
            for name in ("BytesStorageMetadata", "TensorProperties", "MetadataIndex", "StorageMeta")
        ),
        f"{_MODULE} _MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem _StorageInfo",
        "torch Size",
        "torch.serialization _get_layout",
        "collections OrderedDict",
        "pathlib PosixPath",
        "pathlib._local PosixPath",
        *(f"torch {str(v).removeprefix('torch.')}" for v in vars(torch).values() if isinstance(v, torch.dtype)),
    }
)


def export_dcp(checkpoint: Checkpoint, folder: str | os.PathLike[str]) -> Path:
    """Write every tensor under its stored name, and tied weights under each alias; return the folder.

    The objects are JSON bytes under "zckpt.objects".
    `torch.distributed.checkpoint.load` reads it at any world size.  `folder` must be absent or empty.
    Raises CheckpointInputError, CheckpointCorrupt (a checksum of the checkpoint differs), CheckpointWriteError,
    OSError.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointInputError(f"{target} exists: pass a folder that is absent or empty")
    target.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".tmp-{target.name}-", dir=target.parent))
    try:
        tensors = checkpoint.manifest.tensors
        tied = tied_weights(checkpoint.objects, tensors)
        state: dict[str, Any] = {
            name: torch.empty(tensors[stored].shape, dtype=tensors[stored].dtype, device="meta")
            for name, stored in {**dict(zip(tensors, tensors)), **tied}.items()
        }
        objects = torch.tensor(list(_objects(checkpoint)), dtype=torch.uint8)
        state[OBJECTS] = torch.empty_like(objects, device="meta")
        with warnings.catch_warnings(), _as_checkpoint_errors(CheckpointWriteError, f"export to {target}"):
            warnings.simplefilter("ignore")  # torch warns about a single process
            save_dcp(
                state,
                storage_writer=FileSystemWriter(making, single_file_per_rank=False),
                planner=_StreamingPlanner(checkpoint, objects, tied),
                no_dist=True,
            )
        making.rename(target)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    return target


def import_dcp(
    folder: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    tag: str = "imported",
    step: int = 0,
    prefix: str = MODEL,
) -> Path:
    """Save the tensors of a DCP checkpoint into `root`; return the new checkpoint's folder.

    prefix: prepended to every name.  An export of `export_dcp` keeps its own names and objects instead.
    Raises CheckpointNotFound, CheckpointCorrupt (e.g. its metadata names something that is not allowed; no code was
    run), CheckpointMismatch (no tensors), and the errors of `zckpt.save`.
    """
    path = Path(folder)
    check_metadata(path)
    reader = FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {name: each for name, each in entries.items() if isinstance(each, TensorStorageMetadata)}
    left = sorted(set(entries) - set(tensors))
    source: dict[str, JSON] = {"from": "torch.distributed.checkpoint", "left_out": left}
    objects, ours = engine_objects({}, source), OBJECTS in tensors
    loader = _Loader(reader)
    for name, each in tensors.items():
        if problem := _coverage_problem(each):
            raise CheckpointCorrupt(f"{path}: tensor {name!r} is not whole: {problem}", path=str(path))
    if ours:
        objects = _our_objects(path, loader.load(OBJECTS, tensors.pop(OBJECTS)).flatten().tolist())
        step = step or objects["exported"]["step"]
        tied = tied_weights(objects, tensors)
        tensors = {name: each for name, each in tensors.items() if name not in tied}
    if not tensors:
        raise CheckpointMismatch(f"{path} holds no tensors", path=str(path))
    shards = [_DcpShard("" if ours else prefix, name, each, loader) for name, each in sorted(tensors.items())]
    return save(root, tag, shards=shards, objects=objects, rank_objects=NO_RANK_STATE, step=step)


def check_metadata(folder: Path) -> None:
    """Check that `.metadata` only describes tensors in files of this folder.  Raises CheckpointCorrupt otherwise.

    unpickler.py reads the pickle with every class as a record, so no code runs; torch unpickles it only if all names
    in it are in the table.
    """
    path = folder / METADATA
    if not path.is_file():
        raise CheckpointNotFound(f"{folder} has no {METADATA}: not a torch.distributed.checkpoint", path=str(folder))
    try:
        metadata = DataUnpickler(_find, _no_storage).run(read_all(LOCAL, path, _MAX_METADATA_NBYTES))
        if not isinstance(metadata, Record) or not isinstance(metadata.get("storage_data"), dict):
            raise CheckpointCorrupt("it has no storage_data")
        names = [each.get("relative_path") for each in metadata.get("storage_data").values()]
    except OSError as error:
        raise CheckpointReadError(f"{path}: {error.strerror or error}", path=str(path)) from error
    except (CheckpointCorrupt, AttributeError) as error:
        raise CheckpointCorrupt(f"{path}: {error}", path=str(path)) from None
    for name in names:
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", ".."):
            raise CheckpointCorrupt(
                f"{path} refers to {reprlib.repr(name)}, which is not a file of its folder", path=str(path)
            )


def _coverage_problem(metadata: TensorStorageMetadata) -> str:
    """Error text if the chunks do not cover the tensor; "" if they do.  torch would leave the rest uninitialized."""
    shape, regions = tuple(metadata.size), []
    for chunk in metadata.chunks:
        box = tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))
        region = Region(box, (0, box_numel(box)))
        if problem := region_problem(shape, region):
            return problem
        regions += [region] if region.numel else []
    try:
        return tiling_problem(shape, regions)
    except ValueError as error:
        return str(error)


def _our_objects(path: Path, data: list[int]) -> dict[str, JSON]:
    """Decode the output of `_objects`, and check the parts used here."""
    try:
        objects: dict[str, JSON] = canonical.load(bytes(data))
        if type(objects["exported"]["step"]) is int:
            return objects
        problem = "no step"
    except (ValueError, TypeError, KeyError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise CheckpointCorrupt(f"{path}: its tensor {OBJECTS!r} is not what an export wrote: {problem}", path=str(path))


@contextlib.contextmanager
def _as_checkpoint_errors(kind: type[CheckpointError], task: str) -> Iterator[None]:
    """Unwrap a CheckpointError from torch's CheckpointException (a BaseException); convert others to `kind`."""
    try:
        yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if isinstance(cause, CheckpointError):
                raise cause from None
        raise kind(f"{task}: {', '.join(map(repr, causes))}"[:2000]) from error
    except RuntimeError as error:  # out of memory, for a forged size
        raise kind(f"{task}: {error}") from error


def _find(name: str) -> Constructor:
    if name not in _ALLOWED:
        dotted = name.replace(" ", ".")[:120]
        raise CheckpointCorrupt(f"it names {dotted!r}, which does not describe a tensor. None of its code was run")
    return Constructor(name, lambda *args: Record(name, args))


def _no_storage(metadata: Any) -> Any:
    raise CheckpointCorrupt("it refers to a storage, which metadata must not contain")


def _objects(checkpoint: Checkpoint) -> bytes:
    return canonical.dump({**checkpoint.objects, "exported": {"tag": checkpoint.tag, "step": checkpoint.step}})


class _StreamingPlanner(DefaultSavePlanner):
    """Reads each tensor when the writer requests it."""

    def __init__(self, checkpoint: Checkpoint, objects: Tensor, tied: Mapping[str, str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.checkpoint, self.objects, self.tied = checkpoint, objects, tied

    def lookup_object(self, index: Any) -> Tensor:
        return self.objects if index.fqn == OBJECTS else self.checkpoint.tensor(self.tied.get(index.fqn, index.fqn))


@final
@attrs.define(eq=False)
class _Loader:
    """Loads one tensor at a time, and caches the last."""

    reader: FileSystemReader
    held: tuple[str, Tensor] = ("", torch.empty(0))  # name and values of the last tensor
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def load(self, name: str, metadata: TensorStorageMetadata) -> Tensor:
        task = f"{self.reader.path}: loading tensor {name!r} failed"
        with self.lock, warnings.catch_warnings(), _as_checkpoint_errors(CheckpointCorrupt, task):
            warnings.simplefilter("ignore")  # torch warns about a single process
            if self.held[0] != name:
                self.held = "", torch.empty(0)
                made = torch.empty(metadata.size, dtype=metadata.properties.dtype)
                load_dcp({name: made}, storage_reader=self.reader, no_dist=True)
                self.held = name, made
            return self.held[1]


@final
@attrs.frozen(eq=False)
class _DcpShard:
    """A tensor of the DCP checkpoint as a shard; `tensor` reads it."""

    prefix: str
    stored: str
    metadata: TensorStorageMetadata
    loader: _Loader

    @property
    def name(self) -> str:
        return self.prefix + self.stored

    @property
    def global_shape(self) -> tuple[int, ...]:
        return tuple(self.metadata.size)

    @property
    def box(self) -> Box:
        return whole_box(self.global_shape)

    @property
    def span(self) -> Span:
        return 0, self.metadata.size.numel()

    @property
    def tensor(self) -> Tensor:
        return self.loader.load(self.stored, self.metadata).view(-1)
