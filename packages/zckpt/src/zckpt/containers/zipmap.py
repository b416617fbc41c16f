"""The zip files of torch.save, mapped into memory: each member is a byte range of the file.

torch stores members uncompressed and aligned, so a tensor of any size is a view of the mapping, and only the pages
that are accessed are read from disk.  Opening rejects everything that makes zip dangerous (compression, overlapping
members, sizes beyond the file, names that lead out of a folder) before any content is used.  Nothing is extracted;
`zipfile` reads only the directory.

Rejected: torch's own reader, which unpickles; `zipfile`'s streams, which copy.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import struct
import zipfile
import zlib
from pathlib import Path
from types import TracebackType
from typing import final

import attrs
import torch
from torch import Tensor

from zckpt.containers.mapping import UNMAPPED, map_file
from zckpt.errors import CheckpointCorrupt
from zckpt.storage.thread_pool import run_jobs

_MAX_MEMBERS = 4_000_000
_LOCAL_HEADER = struct.Struct("<4s5HLLL2H")  # signature, ..., length of the name, length of the extra field
_CHUNK_NBYTES = 1 << 24  # read at once by a checksum pass
_THREADS = 4  # of a checksum pass


@attrs.frozen
class Member:
    """One member of the zip file.  Invariant: its byte range lies within the file and overlaps no other."""

    name: str  # without the common folder of all members
    start: int  # offset of its first byte in the file
    nbytes: int
    crc32: int


@final
@attrs.define(eq=False)
class ZipMap:
    """An open archive.  Its tensors keep the mapping alive after `close`."""

    path: Path
    members: dict[str, Member]
    mapping: mmap.mmap  # private: a write to it never reaches the file
    copies: dict[str, bytearray] = attrs.field(factory=dict)  # of members that are not aligned for their dtype

    @classmethod
    def open(cls, path: Path) -> ZipMap:
        """Map a file.  Raises CheckpointReadError, and CheckpointCorrupt if torch.save did not write it."""
        mapping = map_file(path)
        return cls(path, _members(path, mapping), mapping)

    def data(self, name: str, limit_nbytes: int) -> bytes:
        """Read a small member and verify its checksum."""
        member = self.member(name)
        if member.nbytes > limit_nbytes:
            raise self._corrupt(f"member {name!r} has {member.nbytes:,} bytes, more than {limit_nbytes:,}")
        data = self.mapping[member.start : member.start + member.nbytes]
        if zlib.crc32(data) != member.crc32:
            raise self._corrupt(f"member {name!r}: its checksum differs")
        return data

    def member(self, name: str) -> Member:
        if name not in self.members:
            raise self._corrupt(f"it has no member {name[:80]!r}")
        return self.members[name]

    def tensor(self, name: str, dtype: torch.dtype, numel: int) -> Tensor:
        """(numel,) of `dtype`: a view of the mapping.  The member may be longer, not shorter."""
        member = self.member(name)
        if numel < 0 or numel * dtype.itemsize > member.nbytes:
            raise self._corrupt(
                f"member {name!r} has {member.nbytes:,} bytes, too few for {numel:,} elements of {dtype}"
            )
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        if member.start % dtype.itemsize:  # torch aligns members; other writers may not
            if name not in self.copies:  # one copy for all tensors of the member
                self.copies[name] = bytearray(self.mapping[member.start : member.start + member.nbytes])
            return torch.frombuffer(self.copies[name], dtype=dtype, count=numel)
        return torch.frombuffer(self.mapping, dtype=dtype, count=numel, offset=member.start)

    def verify(self) -> None:
        """Read every member and compare its checksum (torch writes checksums but does not compare them)."""
        run_jobs((functools.partial(self._verify, each) for each in self.members.values()), _THREADS)

    def _verify(self, member: Member) -> None:
        found, end = 0, member.start + member.nbytes
        with memoryview(self.mapping) as view:
            for start in range(member.start, end, _CHUNK_NBYTES):
                with view[start : min(start + _CHUNK_NBYTES, end)] as chunk:
                    found = zlib.crc32(chunk, found)
        if found != member.crc32:
            raise self._corrupt(f"member {member.name!r}: its checksum differs")

    def close(self) -> None:
        """Release the mapping; it is unmapped with the last tensor, as closing it would invalidate their memory."""
        self.members, self.copies, self.mapping = {}, {}, UNMAPPED

    def __enter__(self) -> ZipMap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _corrupt(self, problem: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self.path}: {problem}", path=str(self.path))


def _members(path: Path, mapping: mmap.mmap) -> dict[str, Member]:
    def corrupt(problem: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{path}: {problem}", path=str(path))

    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError) as error:
        hint = ""
        if mapping[:1] == b"\x80":
            hint = ". It is a bare pickle of torch before 1.6: load it with torch and save it again"
        raise corrupt(f"not a zip file as torch.save writes it ({error}){hint}") from None
    if not 0 < len(entries) <= _MAX_MEMBERS:
        raise corrupt(f"{len(entries):,} members; 1 to {_MAX_MEMBERS:,} are allowed")
    members: dict[str, Member] = {}
    for entry in entries:
        if problem := _entry_problem(entry):
            raise corrupt(f"member {entry.filename[:80]!r} {problem}")
        member = Member(entry.filename.partition("/")[2], _data_start(entry, mapping), entry.file_size, entry.CRC)
        if member.start < 0 or member.start + member.nbytes > len(mapping):
            raise corrupt(f"member {entry.filename[:80]!r} lies outside the file: truncated")
        if member.name in members:
            raise corrupt(f"member {entry.filename[:80]!r} occurs twice")
        members[member.name] = member
    ordered = sorted((m for m in members.values() if m.nbytes), key=lambda m: m.start)
    for one, other in itertools.pairwise(ordered):
        if one.start + one.nbytes > other.start:
            raise corrupt(f"members {one.name[:80]!r} and {other.name[:80]!r} overlap")
    return members


def _entry_problem(entry: zipfile.ZipInfo) -> str:
    parts = entry.filename.split("/")
    if len(parts) < 2 or any(part in ("", ".", "..") for part in parts) or "\\" in entry.filename:
        return "has an invalid name: torch writes <archive>/<path>, without '..'"
    if entry.flag_bits & 0x1:
        return "is encrypted"
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        return (
            f"is compressed ({entry.compress_size:,} bytes for {entry.file_size:,}); torch stores members "
            "uncompressed"
        )
    return ""


def _data_start(entry: zipfile.ZipInfo, mapping: mmap.mmap) -> int:
    """Offset after the member's local header; -1 if there is none."""
    head = mapping[max(0, entry.header_offset) : entry.header_offset + _LOCAL_HEADER.size]
    if entry.header_offset < 0 or len(head) < _LOCAL_HEADER.size:
        return -1
    fields = _LOCAL_HEADER.unpack(head)
    return entry.header_offset + _LOCAL_HEADER.size + fields[9] + fields[10] if fields[0] == b"PK\x03\x04" else -1
