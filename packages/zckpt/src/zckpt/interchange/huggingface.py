"""Export of sharded safetensors in the layout of Hugging Face, written as a stream.

    zckpt.interchange.export_huggingface(zckpt.find("runs/gpt"), "gpt-bf16", dtype=torch.bfloat16)

Tensors are read, cast and written in chunks of a fixed size, so memory does not depend on the model.  A tied weight
is one tensor and written once; its aliases are in the header, like those of safetensors.torch.save_model, and
Transformers ties the weights again.  The folder appears by one rename when all of it is on disk.
"""

from __future__ import annotations

import functools
import json
import math
import os
import secrets
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import torch

from zckpt.errors import CheckpointInputError, CheckpointMismatch, CheckpointWarning, CheckpointWriteError
from zckpt.format.regions import whole_box
from zckpt.format.safetensors_layout import dtype_name
from zckpt.format.shard import Shard
from zckpt.interchange.engine_state import MODEL, tied_weights
from zckpt.loading.checkpoint import Checkpoint
from zckpt.storage.safetensors_file import byte_view
from zckpt.storage.storage import LOCAL, Storage, Writer

_CHUNK_NUMEL = 1 << 22  # elements read, cast and written at once: at most 2 x 32 MiB
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@attrs.frozen
class ExportTensor:
    """One tensor to be written."""

    name: str
    stored: str  # its name in the checkpoint
    shape: tuple[int, ...]
    source: torch.dtype
    dtype: torch.dtype
    aliases: tuple[str, ...]  # other names of a tied weight

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def export_huggingface(
    checkpoint: Checkpoint,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_nbytes: int = 5_000_000_000,
    prefix: str = MODEL,
) -> Path:
    """Write weights as `model.safetensors`, or as numbered shards and an index; return the folder.

    dtype: float32, bfloat16 or float16 for floating tensors; None keeps the stored dtype (masters are float32).
    max_shard_nbytes: maximum file size; a larger tensor gets a file of its own.
    prefix: exports the names that begin with it, and strips it; "" exports all.
    Raises CheckpointInputError (arguments, or `folder` exists and is not empty), CheckpointMismatch (no such tensor),
    CheckpointCorrupt (a checksum differs), CheckpointWriteError.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise CheckpointInputError(f"dtype must be torch.float32, torch.bfloat16, torch.float16 or None, not {dtype}")
    if max_shard_nbytes < 1:
        raise CheckpointInputError(f"max_shard_nbytes must be at least 1, not {max_shard_nbytes}")
    files = _plan_files(_plan_tensors(checkpoint, dtype, prefix), max_shard_nbytes)
    with _AtomicFolder(Path(folder), LOCAL) as making:
        for name, entries in files.items():
            making.write(name, functools.partial(_write, checkpoint, entries))
        if len(files) > 1:
            making.write("model.safetensors.index.json", lambda writer: writer.write(memoryview(_index(files))))
    return Path(folder)


def _plan_tensors(checkpoint: Checkpoint, dtype: torch.dtype | None, prefix: str) -> list[ExportTensor]:
    tensors = checkpoint.manifest.tensors
    names = [name for name in checkpoint.names() if name.startswith(prefix) and name != prefix]
    if not names:
        raise CheckpointMismatch(f"checkpoint {checkpoint.path} has no tensor whose name begins with {prefix!r}")
    aliases: dict[str, list[str]] = {}
    for alias, name in tied_weights(checkpoint.objects, tensors).items():
        aliases.setdefault(name, []).append(alias.removeprefix(prefix))
    made = []
    for name in names:
        source, shape = tensors[name].dtype, tensors[name].shape
        target = dtype if dtype is not None and source.is_floating_point else source
        made.append(
            ExportTensor(name.removeprefix(prefix), name, shape, source, target, tuple(aliases.get(name, ())))
        )
    return made


def _plan_files(entries: list[ExportTensor], max_nbytes: int) -> dict[str, list[ExportTensor]]:
    """File name -> its tensors, by decreasing itemsize, so that every tensor is aligned."""
    shards: list[list[ExportTensor]] = [[]]
    for entry in entries:
        if shards[-1] and sum(each.nbytes for each in shards[-1]) + entry.nbytes > max_nbytes:
            shards.append([])
        shards[-1].append(entry)
    count = len(shards)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    ordered = [sorted(mine, key=lambda each: (-each.dtype.itemsize, each.name)) for mine in shards]
    return dict(zip(names if count > 1 else ["model.safetensors"], ordered))


def _index(files: dict[str, list[ExportTensor]]) -> bytes:
    total = sum(entry.nbytes for entries in files.values() for entry in entries)
    table = {entry.name: file for file, entries in files.items() for entry in entries}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(table.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _write(checkpoint: Checkpoint, entries: list[ExportTensor], writer: Writer) -> None:
    tied = {alias: entry.name for entry in entries for alias in entry.aliases}
    header: dict[str, object] = {"__metadata__": {**tied, "format": "pt"}}
    offset = 0
    for entry in entries:
        place = [offset, offset + entry.nbytes]
        header[entry.name] = {"dtype": dtype_name(entry.dtype), "shape": list(entry.shape), "data_offsets": place}
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    writer.write(memoryview(struct.pack("<Q", len(text)) + text))
    for entry in entries:
        for chunk in _chunks(checkpoint, entry):
            writer.write(byte_view(chunk))


def _chunks(checkpoint: Checkpoint, entry: ExportTensor) -> Iterator[torch.Tensor]:
    """Yield the tensor's elements in order, cast, a fixed number at a time."""
    buffer = torch.empty(min(_CHUNK_NUMEL, entry.numel), dtype=entry.source)
    box = whole_box(entry.shape)
    for start in range(0, entry.numel, _CHUNK_NUMEL):
        stop = min(entry.numel, start + _CHUNK_NUMEL)
        part = buffer[: stop - start]
        checkpoint.read([Shard(entry.stored, entry.shape, box, (start, stop), part)], strict=False)
        yield _cast(part, entry)


def _cast(part: torch.Tensor, entry: ExportTensor) -> torch.Tensor:
    """Cast a chunk; warn if a finite value becomes infinite (harmless in a mask, fatal in a weight)."""
    made = part.to(entry.dtype)
    if entry.dtype is torch.float16 is not entry.source and bool((made.isinf() & part.isfinite()).any()):
        warnings.warn(
            f"{entry.name!r} holds values beyond float16 (65,504), written as infinities: export bfloat16 instead",
            CheckpointWarning,
            stacklevel=2,
        )
    return made


@attrs.define(eq=False)
class _AtomicFolder:
    """A folder that is written under a temporary name and renamed when all of it is on disk."""

    folder: Path
    storage: Storage
    making: Path = attrs.field(init=False)

    def __enter__(self) -> _AtomicFolder:
        is_empty = self.folder.is_dir() and not self.folder.is_symlink() and not any(self.folder.iterdir())
        if not is_empty and os.path.lexists(self.folder):
            raise CheckpointInputError(f"{self.folder} exists: pass a folder that is absent or empty")
        # Not the name pattern of a save's leftovers: the parent may be a root, and the next save sweeps those.
        self.making = self.folder.with_name(f".tmp-{self.folder.name}-{secrets.token_hex(4)}")
        try:
            self.making.mkdir(parents=True)
        except OSError as error:
            raise self._failed(error) from error
        return self

    def write(self, name: str, work: Callable[[Writer], None]) -> None:
        with self.storage.create(self.making / name) as writer:
            work(writer)
            writer.sync()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.storage.sync_folder(self.making)
                self.storage.rename(self.making, self.folder)  # replaces an empty folder
                self.storage.sync_folder(self.folder.parent)
                return
        except OSError as late:
            error = late
        shutil.rmtree(self.making, ignore_errors=True)
        if isinstance(error, OSError):
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> CheckpointWriteError:
        return CheckpointWriteError(f"export to {self.folder}: {error}", path=str(self.folder))
