"""`zckpt inspect`: the contents of a checkpoint, by groups of names."""

from __future__ import annotations

import argparse
import fnmatch
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from zckpt.cli.output import OK, count_text, print_json, size_text, table
from zckpt.cli.resolve import resolve
from zckpt.format.manifest import TensorEntry
from zckpt.format.safetensors_layout import dtype_name
from zckpt.loading.checkpoint import Checkpoint

_TOP = "(no group)"


def run(arguments: argparse.Namespace) -> int:
    found = resolve(arguments.path, arguments.tag)
    tensors = {
        name: entry
        for name, entry in sorted(found.manifest.tensors.items())
        if fnmatch.fnmatchcase(name, arguments.match)
    }
    if arguments.json:
        print_json(_as_json(found, tensors, arguments.depth))
        return OK
    print("\n".join(_head(found)))
    print("\n" + "\n".join(_groups_table(tensors, arguments.depth)))
    if arguments.tensors and tensors:
        print("\n" + "\n".join(_tensors_table(tensors)))
    return OK


def group_of(name: str, depth: int) -> str:
    """The first `depth` parts of a dotted name, without the last part, up to the first number.

    >>> group_of("optimizer.exp_avg.blocks.0.weight", 2), group_of("blocks.0.attn.weight", 2), group_of("bias", 2)
    ('optimizer.exp_avg', 'blocks', '(no group)')
    """
    parts = name.split(".")[:-1][: max(depth, 0)]
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0]] if numbers else parts) or _TOP


def _head(found: Checkpoint) -> list[str]:
    manifest = found.manifest
    elements = sum(_numel(entry) for entry in manifest.tensors.values())
    libraries = ", ".join(f"{name} {version}" for name, version in sorted(manifest.libraries.items()))
    ranks = sorted({key for each in manifest.rank_objects for key in each})
    rows = [
        ["tag", manifest.tag],
        ["step", f"{manifest.step:,}"],
        ["attempt", manifest.attempt],
        ["saved by", f"{count_text(manifest.world_size, 'rank')}, with {libraries}"],
        [
            "holds",
            f"{count_text(len(manifest.tensors), 'tensor')}, {count_text(elements, 'element')}, "
            f"{size_text(manifest.nbytes)} in {count_text(len(manifest.files), 'file')}",
        ],
        ["objects", ", ".join(sorted(manifest.objects)) or "none"],
        ["of each rank", ", ".join(ranks) or "none"],
    ]
    return [str(found.path), *(f"  {line}" for line in table(rows))]


def _groups(tensors: dict[str, TensorEntry], depth: int) -> dict[str, list[TensorEntry]]:
    groups: dict[str, list[TensorEntry]] = defaultdict(list)
    for name, entry in tensors.items():
        groups[group_of(name, depth)].append(entry)
    return dict(sorted(groups.items(), key=lambda item: -_nbytes(item[1])))


def _groups_table(tensors: dict[str, TensorEntry], depth: int) -> list[str]:
    rows = [["group", "tensors", "elements", "size", "dtypes"]]
    for group, entries in [*_groups(tensors, depth).items(), ("total", list(tensors.values()))]:
        elements = sum(map(_numel, entries))
        rows.append(
            [group, f"{len(entries):,}", f"{elements:,}", size_text(_nbytes(entries)), ", ".join(_dtypes(entries))]
        )
    return table(rows, right=(1, 2, 3))


def _tensors_table(tensors: dict[str, TensorEntry]) -> list[str]:
    rows = [["tensor", "dtype", "shape", "size", "pieces"]]
    for name, entry in tensors.items():
        rows.append(
            [name, *_dtypes([entry]), str(entry.shape), size_text(_nbytes([entry])), f"{len(entry.pieces):,}"]
        )
    return table(rows, right=(3, 4))


def _as_json(found: Checkpoint, tensors: dict[str, TensorEntry], depth: int) -> dict[str, Any]:
    manifest = found.manifest
    groups = {
        group: {
            "tensors": len(entries),
            "elements": sum(map(_numel, entries)),
            "bytes": _nbytes(entries),
            "dtypes": _dtypes(entries),
        }
        for group, entries in _groups(tensors, depth).items()
    }
    return {
        "path": str(found.path),
        "tag": manifest.tag,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "world_size": manifest.world_size,
        "bytes": manifest.nbytes,
        "libraries": manifest.libraries,
        "files": {name: entry.nbytes for name, entry in manifest.files.items()},
        "groups": groups,
        "tensors": {
            name: {
                "dtype": dtype_name(entry.dtype),
                "shape": list(entry.shape),
                "bytes": _nbytes([entry]),
                "pieces": len(entry.pieces),
            }
            for name, entry in tensors.items()
        },
        "objects": manifest.objects,
        "notes": list(found.notes),
    }


def _dtypes(entries: Iterable[TensorEntry]) -> list[str]:
    return sorted({str(entry.dtype).removeprefix("torch.") for entry in entries})


def _nbytes(entries: Iterable[TensorEntry]) -> int:
    return sum(piece.nbytes for entry in entries for piece in entry.pieces)


def _numel(entry: TensorEntry) -> int:
    return math.prod(entry.shape)
