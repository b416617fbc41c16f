"""Comparing bytes on disk with the checksums of the manifest."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import final

import attrs
import xxhash

from .errors import CheckpointCorrupt
from .manifest import Manifest, Piece
from .safefile import CHUNK_NBYTES, read_metadata
from .storage import Reader, Storage


@final
@attrs.define(eq=False)
class Verifier:
    """Reads what is asked for through and hashes it, each thing once in its life."""

    folder: Path
    manifest: Manifest
    storage: Storage
    done: set[tuple[str, int]] = attrs.field(factory=set)  # (file, offset) found sound; offset 0 is the header

    def check(self, pieces: Iterable[Piece]) -> None:
        """CheckpointCorrupt naming the file, and the tensor's key, of the first that is not what was saved."""
        wanted: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            if (piece.file, piece.offset) not in self.done:
                wanted[piece.file].append(piece)
        for file, its_pieces in sorted(wanted.items()):
            with self.storage.open(self.folder / file) as reader:
                self._check_header(reader, file)
                for piece in sorted(its_pieces, key=lambda each: each.offset):
                    self._check_piece(reader, piece)

    def _check_header(self, reader: Reader, file: str) -> None:
        if (file, 0) in self.done:
            return
        entry = self.manifest.files[file]
        found = _hash(reader, 0, entry.header_nbytes)
        if found != entry.header_checksum:
            path = self.folder / file
            raise CheckpointCorrupt(
                f"checkpoint {self.folder}: header of {file}: checksum is {found}, the manifest says "
                f"{entry.header_checksum}: damaged{foreign(self.storage, path, self.manifest)}",
                path=str(path),
            )
        self.done.add((file, 0))

    def _check_piece(self, reader: Reader, piece: Piece) -> None:
        found = _hash(reader, piece.offset, piece.nbytes)
        if found != piece.checksum:
            raise CheckpointCorrupt(
                f"checkpoint {self.folder}: tensor {piece.key!r} in {piece.file} (bytes {piece.offset:,} to "
                f"{piece.offset + piece.nbytes:,}): checksum is {found}, the manifest says {piece.checksum}: damaged",
                path=str(self.folder / piece.file),
            )
        self.done.add((piece.file, piece.offset))


def _hash(reader: Reader, offset: int, nbytes: int) -> str:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(nbytes, CHUNK_NBYTES)))
    for start in range(offset, offset + nbytes, CHUNK_NBYTES):
        part = buffer[: min(CHUNK_NBYTES, offset + nbytes - start)]
        reader.read_into(start, part)
        digest.update(part)
    return digest.hexdigest()


def foreign(storage: Storage, path: Path, manifest: Manifest) -> str:
    """ "; it is of another save ..." if the file says so itself, else ""."""
    with contextlib.suppress(OSError), storage.open(path) as reader:
        metadata = read_metadata(reader)
        attempt = metadata.get("zckpt_attempt", manifest.attempt)
        if attempt != manifest.attempt:
            return (
                f"; the file is of another save (tag {metadata.get('zckpt_tag')!r}, attempt {attempt}; "
                f"this one is {manifest.attempt})"
            )
    return ""
