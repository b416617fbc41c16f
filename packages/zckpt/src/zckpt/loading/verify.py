"""Verification of bytes on disk against the checksums of the manifest.

A Verifier remembers what it has verified, so nothing is hashed twice in the life of a Checkpoint.  It reads headers
only; copy.py passes it the chunks that a load reads anyway.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import final

import attrs
import xxhash

from zckpt.errors import CheckpointCorrupt
from zckpt.format.chunks import BadChunk, ChunkChecks, digests
from zckpt.format.manifest import Manifest, Piece
from zckpt.storage.safetensors_file import read_metadata
from zckpt.storage.storage import Reader, Storage

_STEP_NBYTES = 1 << 20


@final
@attrs.define(eq=False)
class Verifier:
    """Verification state of one checkpoint.  Thread-safe."""

    folder: Path
    manifest: Manifest
    storage: Storage
    known: dict[tuple[str, int], ChunkChecks] = attrs.field(factory=dict)  # by file and offset of a piece
    sound: set[tuple[str, int]] = attrs.field(factory=set)  # keys of small pieces that are verified
    headers: set[str] = attrs.field(factory=set)  # files whose header is verified
    mutex: threading.Lock = attrs.field(factory=threading.Lock)

    def checks(self, piece: Piece) -> ChunkChecks:
        """Checksums of a piece and their state; one object per piece."""
        with self.mutex:
            made = self.known.get((piece.file, piece.offset))
            if made is None:
                made = ChunkChecks(piece.nbytes, piece.chunk_nbytes, piece.checksum)
                made.verified[:] = (piece.file, piece.offset) in self.sound
                self.known[piece.file, piece.offset] = made
            return made

    def is_sound(self, piece: Piece) -> bool:
        """True if the whole piece is verified."""
        known = self.known.get((piece.file, piece.offset))
        return (piece.file, piece.offset) in self.sound or (known is not None and bool(known.verified.all()))

    def check_small(self, piece: Piece, data: memoryview) -> None:
        """Verify all bytes of a small piece.  Raises CheckpointCorrupt."""
        if digests(data, piece.chunk_nbytes) != piece.checksum:
            with self.locate_errors(piece):
                self.checks(piece).check(0, data)  # raises
        self.sound.add((piece.file, piece.offset))

    @contextlib.contextmanager
    def locate_errors(self, piece: Piece) -> Iterator[None]:
        """Convert BadChunk inside into CheckpointCorrupt that names the tensor and the file."""
        try:
            yield
        except BadChunk as bad:
            begin, end = piece.offset + bad.begin, piece.offset + bad.end
            raise CheckpointCorrupt(
                f"checkpoint {self.folder}: tensor {piece.key!r} in {piece.file} (bytes {begin:,} to {end:,}): "
                f"checksum is {bad.found}, the manifest says {bad.expected}: damaged",
                path=str(self.folder / piece.file),
            ) from None

    def check_header(self, reader: Reader, file: str) -> None:
        """Raise CheckpointCorrupt if the bytes before the first piece differ from their checksum."""
        entry = self.manifest.files[file]
        found = _hash(reader, entry.header_nbytes)
        if found != entry.header_checksum:
            path = self.folder / file
            raise CheckpointCorrupt(
                f"checkpoint {self.folder}: header of {file}: checksum is {found}, the manifest says "
                f"{entry.header_checksum}: damaged{other_save_hint(self.storage, path, self.manifest)}",
                path=str(path),
            )
        self.headers.add(file)


def _hash(reader: Reader, nbytes: int) -> str:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(nbytes, _STEP_NBYTES)))
    for start in range(0, nbytes, _STEP_NBYTES):
        part = buffer[: min(_STEP_NBYTES, nbytes - start)]
        reader.read_into(start, part)
        digest.update(part)
    return digest.hexdigest()


def other_save_hint(storage: Storage, path: Path, manifest: Manifest) -> str:
    """ "; the file is of another save ..." if its own header says so, else ""."""
    with contextlib.suppress(OSError), storage.open(path) as reader:
        metadata = read_metadata(reader)
        attempt = metadata.get("zckpt_attempt", manifest.attempt)
        if attempt != manifest.attempt:
            return (
                f"; the file is of another save (tag {metadata.get('zckpt_tag')!r}, attempt {attempt}; "
                f"this one is {manifest.attempt})"
            )
    return ""
