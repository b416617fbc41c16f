"""The manifest: the file that turns a folder of tensors into a checkpoint.

It lists for every tensor the location and the checksums of its pieces, so a reader needs nothing else: it never
parses the header of a tensor file, and a flipped bit anywhere contradicts a checksum.  The manifest is written last,
and the folder gets its name after it; see commit.py.  FORMAT.md is the specification; schema.py reads.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import re

import attrs
import numpy
import torch
import xxhash

from zckpt.format import canonical
from zckpt.format.canonical import JSON
from zckpt.format.regions import Region
from zckpt.format.safetensors_layout import dtype_name

FORMAT = "zckpt"
VERSION = 1
FILE_NAME = "manifest.json"
MAX_NBYTES = 1 << 29  # a larger manifest is rejected unread; 512 MiB hold millions of pieces

# The end of every manifest.  The checksum covers all bytes before it, so a reader need not reproduce our JSON.
TAIL = re.compile(rb',"checksum":"([0-9a-f]{32})"\}\n\Z')
_WORLD_SIZE = b',"world_size":'  # the key after "tensors" and "version"
TAIL_NBYTES = len(b',"checksum":""}\n') + 32


def checksum(data: bytes | memoryview) -> str:
    """xxh3_128 as 32 lower-case hex digits; detects accidental corruption, not forgery."""
    return xxhash.xxh3_128_hexdigest(data)


@attrs.frozen
class Piece:
    """A byte range of one file: the elements of `region` in order."""

    file: str
    key: str  # its name in the safetensors header
    region: Region
    offset: int  # first byte, from the start of the file
    nbytes: int
    chunk_nbytes: int  # of each chunk but the last, which may be shorter
    checksum: str  # xxh3_64 of each chunk in order, 16 hex digits each, joined


@attrs.frozen
class TensorEntry:
    """Invariant: the pieces cover each element of the tensor exactly once; none is empty."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@attrs.frozen
class FileEntry:
    """Invariant: header, then the file's pieces without gap or overlap, then the end."""

    nbytes: int  # of the whole file
    header_nbytes: int  # length field and JSON header of safetensors: everything before the first piece
    header_checksum: str


@attrs.frozen(kw_only=True)
class Manifest:
    """All of one checkpoint except the values of its tensors."""

    tag: str  # also the name of its folder
    step: int  # orders checkpoints; timestamps do not
    attempt: str  # 16 random hex digits per save, also in every tensor file: detects mixed saves
    world_size: int  # ranks that saved
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    objects: dict[str, JSON]  # of the run
    rank_objects: tuple[dict[str, JSON], ...]  # of each rank, in rank order
    libraries: dict[str, str]  # name -> version, of the writer

    @property
    def nbytes(self) -> int:
        """Total size of the tensor files."""
        return sum(entry.nbytes for entry in self.files.values())


class Described:
    """Base of open checkpoints: what their manifest says."""

    __slots__ = ()
    manifest: Manifest

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

    def names(self) -> tuple[str, ...]:
        """Names of the tensors, of any rank, sorted."""
        return tuple(sorted(self.manifest.tensors))


def library_versions() -> dict[str, str]:
    """Versions of the writer's libraries, for the manifest."""
    return {
        "zckpt": _own_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "xxhash": xxhash.VERSION,
        "python": platform.python_version(),
    }


@functools.cache
def _own_version() -> str:
    """Version of the installed distribution: importing it from the package would close a circle of imports."""
    try:
        return importlib.metadata.version("zckpt")
    except importlib.metadata.PackageNotFoundError:  # sources on the path, not installed
        return "unknown"


def encode(manifest: Manifest) -> bytes:
    """The bytes of manifest.json; equal manifests give equal bytes."""
    others = canonical.dump(
        {
            "format": FORMAT,
            "tag": manifest.tag,
            "step": manifest.step,
            "attempt": manifest.attempt,
            "world_size": manifest.world_size,
            "files": {name: _file(entry) for name, entry in manifest.files.items()},
            "objects": manifest.objects,
            "rank_objects": list(manifest.rank_objects),
            "libraries": manifest.libraries,
        }
    )
    before, after = others[: others.rindex(_WORLD_SIZE)], others[others.rindex(_WORLD_SIZE) : -1]
    tensors = ",".join(
        f"{canonical.quote(name)}:{_tensor(entry)}" for name, entry in sorted(manifest.tensors.items())
    )
    body = b"".join([before, b',"tensors":{', tensors.encode(), b'},"version":%d' % VERSION, after])
    return body + f',"checksum":"{checksum(body)}"}}\n'.encode()


def _tensor(entry: TensorEntry) -> str:
    """As `canonical.dump` writes it; text, as there may be very many."""
    pieces = ",".join(map(piece_text, entry.pieces))
    return f'{{"dtype":"{dtype_name(entry.dtype)}","pieces":[{pieces}],"shape":{_list(entry.shape)}}}'


def piece_text(piece: Piece) -> str:
    """One piece, as JSON."""
    box, span = _region(piece.region)
    return (
        f'{{"box":{box},"bytes":{piece.nbytes},"chunk_bytes":{piece.chunk_nbytes},'
        f'"file":{canonical.quote(piece.file)},"key":{canonical.quote(piece.key)},"offset":{piece.offset},'
        f'"span":{span},"xxh3_64":{canonical.quote(piece.checksum)}}}'
    )


@functools.lru_cache(maxsize=1 << 14)  # models have many tensors and few shapes
def _region(region: Region) -> tuple[str, str]:
    return canonical.dump(region.box).decode(), canonical.dump(region.span).decode()


@functools.lru_cache(maxsize=1 << 14)
def _list(numbers: tuple[int, ...]) -> str:
    return canonical.dump(numbers).decode()


def _file(entry: FileEntry) -> JSON:
    return {
        "bytes": entry.nbytes,
        "header_bytes": entry.header_nbytes,
        "header_xxh3_128": entry.header_checksum,
    }
