"""Reader for manifests that may be damaged or forged.

Every field is typed and bounded, unknown keys are rejected, and entries are checked against each other: pieces lie in
listed files, cover their tensor, and fill their file.  After that the sizes in a manifest are bounded by the sizes of
existing files, so no allocation depends on a forged number.  Raises CheckpointCorrupt only.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import attrs

from zckpt.errors import CheckpointCorrupt, CheckpointInputError
from zckpt.format import canonical
from zckpt.format import manifest as manifests
from zckpt.format.canonical import JSON
from zckpt.format.chunks import DIGITS, num_chunks
from zckpt.format.manifest import (
    FORMAT,
    TAIL,
    TAIL_NBYTES,
    VERSION,
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
    checksum,
)
from zckpt.format.nodes import MAX_INTEGER, Node
from zckpt.format.paths import tag_problem
from zckpt.format.regions import Region, box_numel, region_problem, tiling_problem, whole_box
from zckpt.format.safetensors_layout import dtype_of
from zckpt.format.shard import name_problem

_CHUNKS = frozenset(
    1 << power for power in range(10, 24)
)  # bounds the work and the memory that a manifest can ask for
_MAX_DIMS = 64
_HASH = re.compile(r"[0-9a-f]{32}")
_HASHES = re.compile(r"[0-9a-f]*")
_ATTEMPT = re.compile(r"[0-9a-f]{16}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors")  # a plain name: no folder, no ".."


def _matches(pattern: re.Pattern[str], what: str) -> Callable[[str], str]:
    return lambda text: "" if pattern.fullmatch(text) else f"is not {what}"


def decode(data: bytes, path: Path) -> Manifest:
    """Parse and check a manifest; `path` is its origin, for the error."""
    try:
        return _manifest(_top(data))
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(f"{path}: {error}", path=str(path)) from None


def check(manifest: Manifest, path: Path) -> None:
    """Check the values of a manifest that is to be written, as `decode` does; its addresses come from a checked plan.

    Raises CheckpointCorrupt.
    """
    try:
        for name, entry in manifest.tensors.items():
            for number, piece in enumerate(entry.pieces):
                nbytes = piece.region.numel * entry.dtype.itemsize
                is_sound = 0 < nbytes == piece.nbytes and _HASHES.fullmatch(piece.checksum)
                if not is_sound or len(piece.checksum) != DIGITS * num_chunks(nbytes, piece.chunk_nbytes):
                    _piece_at(name, number, piece, entry)
        _check_files(manifest)
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(f"{path}: {error}", path=str(path)) from None


def _piece_at(name: str, number: int, piece: Piece, entry: TensorEntry) -> None:
    """Raise the error of `decode` for a piece."""
    where = Node(canonical.load(manifests.piece_text(piece).encode()), f"tensors[{name[:80]!r}].pieces[{number}]")
    _piece(where, entry.shape, entry.dtype.itemsize)


@attrs.frozen
class ManifestSummary:
    """Identity of a checkpoint."""

    tag: str
    step: int
    attempt: str


def read_summary(data: bytes, path: Path) -> ManifestSummary:
    """Summary of a manifest whose checksum is right, without checking the rest."""
    try:
        members = Node(_top(data), "").members()
        return ManifestSummary(_tag(members["tag"]), members["step"].integer(), _attempt(members["attempt"]))
    except KeyError as error:
        raise CheckpointCorrupt(f"{path}: missing {error}", path=str(path)) from None
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(f"{path}: {error}", path=str(path)) from None


def _top(data: bytes) -> JSON:
    tail = TAIL.search(data, max(0, len(data) - TAIL_NBYTES))
    if tail is None:
        raise CheckpointCorrupt("does not end with a checksum: truncated, or not a manifest")
    found = checksum(memoryview(data)[: tail.start()])
    if found != tail[1].decode():
        raise CheckpointCorrupt(f"checksum is {found}, its last line says {tail[1].decode()}: damaged or edited")
    try:
        top = canonical.load(data)
    except ValueError as error:
        raise CheckpointCorrupt(f"not valid JSON: {error}") from None
    if not isinstance(top, dict) or top.get("format") != FORMAT:
        raise CheckpointCorrupt(f'top level: must be an object with "format": "{FORMAT}"')
    version = Node(top.get("version"), "version").integer(1)
    if version > VERSION:
        raise CheckpointCorrupt(f"format version {version}, this reader knows up to {VERSION}: upgrade zckpt")
    return top


def _tag(node: Node) -> str:
    return node.text(tag_problem)


def _attempt(node: Node) -> str:
    return node.text(_matches(_ATTEMPT, "16 hex digits"))


def _manifest(top: JSON) -> Manifest:
    names = ("tag", "step", "attempt", "world_size", "tensors", "files", "objects", "rank_objects", "libraries")
    root = Node(top, "")
    tag, step, attempt, world, tensors, files, objects, rank_objects, libraries, *_ = root.fields(
        *names, "format", "version", "checksum"
    )
    manifest = Manifest(
        tag=_tag(tag),
        step=step.integer(),
        attempt=_attempt(attempt),
        world_size=world.integer(1),
        tensors=_tensors(tensors),
        files={_file_name(node, name): _file(node) for name, node in files.members().items()},
        objects=_object(objects),
        rank_objects=tuple(_object(node) for node in rank_objects.items()),
        libraries={name: node.text() for name, node in libraries.members().items()},
    )
    if len(manifest.rank_objects) != manifest.world_size:
        rank_objects.fail(f"has {len(manifest.rank_objects)} items for {manifest.world_size} ranks")
    _check_files(manifest)
    return manifest


def _name(node: Node, name: str) -> str:
    if trouble := name_problem(name):
        node.fail(trouble)
    return name


def _file_name(node: Node, name: str) -> str:
    if not _FILE.fullmatch(name):
        node.fail("must be a plain name of letters, digits, - and _ that ends with .safetensors")
    return name


def _object(node: Node) -> dict[str, JSON]:
    node.members()
    try:
        made: dict[str, JSON] = canonical.plain(node.value, node.where)
    except CheckpointInputError as error:
        raise CheckpointCorrupt(str(error)) from None
    return made


def _file(node: Node) -> FileEntry:
    nbytes, header_nbytes, header_checksum = node.fields("bytes", "header_bytes", "header_xxh3_128")
    return FileEntry(
        nbytes=nbytes.integer(),
        header_nbytes=header_nbytes.integer(8),
        header_checksum=header_checksum.text(_matches(_HASH, "32 hex digits")),
    )


def _tensors(node: Node) -> dict[str, TensorEntry]:
    if not isinstance(node.value, dict):
        node.members()  # raises
    made = {}
    for name, value in node.value.items():
        entry = None if name_problem(name) else _plain_tensor(value)
        if entry is None:
            child = node.at(value, f"[{name[:80]!r}]")
            _name(child, name)
            entry = _tensor(child)
        made[name] = entry
    return made


def _plain_tensor(value: JSON) -> TensorEntry | None:
    """The entry of a tensor whose only piece is the whole: nearly all entries, without a Node for each field.

    Accepts less than `_tensor`; returns None for anything else, which `_tensor` reads, or describes in its error.
    """
    try:
        (piece,) = value["pieces"]
        shape, (start, stop), offset, nbytes = tuple(value["shape"]), piece["span"], piece["offset"], piece["bytes"]
        dtype, chunk, digits = dtype_of(value["dtype"]), piece["chunk_bytes"], piece["xxh3_64"]
        file, key, numbers = piece["file"], piece["key"], (*shape, start, stop, offset, nbytes, chunk)
        for (lo, hi), size in zip(piece["box"], shape, strict=True):
            if lo != 0 or hi != size:
                return None
            numbers += (lo, hi)
        lists = value["pieces"], value["shape"], piece["box"], piece["span"]
        if (
            len(shape) > _MAX_DIMS
            or len(value) != 3
            or len(piece) != 8
            or dtype is None
            or {*map(type, numbers)} != {int}
        ):
            return None
        if {*map(type, lists)} != {list}:
            return None
    except (TypeError, ValueError, KeyError):
        return None
    region, numel = _whole(shape)
    is_plain = (
        (start, stop) == region.span
        and 0 < nbytes == numel * dtype.itemsize <= MAX_INTEGER
        and 0 <= offset <= MAX_INTEGER
        and chunk in _CHUNKS
        and {*map(type, (file, key, digits))} == {str}
        and len(digits) == DIGITS * num_chunks(nbytes, chunk)
        and _HASHES.fullmatch(digits)
        and len(shape) <= _MAX_DIMS
        and min(shape, default=1) > 0
    )
    return TensorEntry(dtype, shape, (Piece(file, key, region, offset, nbytes, chunk, digits),)) if is_plain else None


@functools.lru_cache(maxsize=1 << 14)  # models have many tensors and few shapes
def _whole(shape: tuple[int, ...]) -> tuple[Region, int]:
    """The region of a whole tensor, and its elements."""
    box = whole_box(shape)
    return Region(box, (0, box_numel(box))), box_numel(box)


def _tensor(node: Node) -> TensorEntry:
    dtype_node, shape_node, pieces_node = node.fields("dtype", "shape", "pieces")
    dtype = dtype_of(dtype_node.text())
    if dtype is None:
        dtype_node.fail(f"{dtype_node.value[:80]!r} is not a dtype this version knows")
    sizes = shape_node.items()
    if len(sizes) > _MAX_DIMS:
        shape_node.fail(f"has {len(sizes)} dims, at most {_MAX_DIMS}")
    shape = tuple(size.integer() for size in sizes)
    if box_numel(whole_box(shape)) > MAX_INTEGER:
        shape_node.fail("has more than 2**62 elements")
    pieces = tuple(_piece(piece, shape, dtype.itemsize) for piece in pieces_node.items())
    try:
        trouble = tiling_problem(shape, [piece.region for piece in pieces])
    except ValueError as error:
        trouble = str(error)
    if trouble:
        pieces_node.fail(trouble)
    return TensorEntry(dtype, shape, pieces)


def _piece(node: Node, shape: tuple[int, ...], itemsize: int) -> Piece:
    file, key, box, span, offset, nbytes, chunk, digest = node.fields(
        "file", "key", "box", "span", "offset", "bytes", "chunk_bytes", "xxh3_64"
    )
    region = Region(tuple(side.pair() for side in box.items()), span.pair())
    if trouble := region_problem(shape, region):
        node.fail(trouble)
    if region.numel == 0 or nbytes.integer() != region.numel * itemsize:
        node.fail(f"bytes {nbytes.value} for {region.numel} elements of {itemsize} bytes")
    return Piece(
        file=file.text(),
        key=key.text(),
        region=region,
        offset=offset.integer(),
        nbytes=nbytes.value,
        chunk_nbytes=_chunk(chunk),
        checksum=_checksums(digest, nbytes.value, chunk.value),
    )


def _chunk(node: Node) -> int:
    if node.integer() not in _CHUNKS:
        node.fail(f"{node.value} is not a power of two from {min(_CHUNKS):,} to {max(_CHUNKS):,}")
    return int(node.value)


def _checksums(node: Node, nbytes: int, chunk: int) -> str:
    text, count = node.text(_matches(_HASHES, "hex digits")), num_chunks(nbytes, chunk)
    if len(text) != DIGITS * count:
        node.fail(f"has {len(text)} digits; {count} chunks have {DIGITS * count}")
    return text


def _check_files(manifest: Manifest) -> None:
    """Every piece lies in a listed file; every listed file is header, pieces, end, without gaps."""
    held: dict[str, list[Piece]] = defaultdict(list)
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces:
            if piece.file not in manifest.files:
                raise CheckpointCorrupt(f"tensors[{name[:80]!r}]: no file {piece.file[:80]!r} in files")
            held[piece.file].append(piece)
    for name, file in manifest.files.items():
        where, end = Node(None, f"files[{name!r}]"), file.header_nbytes
        if len({piece.key for piece in held[name]}) != len(held[name]):
            where.fail("two pieces have one key")
        for piece in sorted(held[name], key=lambda each: each.offset):
            if piece.offset != end:
                where.fail(f"piece {piece.key[:80]!r} begins at byte {piece.offset:,}, expected {end:,}")
            end += piece.nbytes
        if end != file.nbytes:
            where.fail(f"its pieces end at byte {end:,}, its size is {file.nbytes:,}")
