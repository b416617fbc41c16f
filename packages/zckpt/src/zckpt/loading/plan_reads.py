"""Planning of a read: pure functions from addresses to a plan or a list of problems.

Everything is checked before the first tensor is modified.  Each rank finds its own missing and mismatched names.
Extra names are known only after all ranks have exchanged what they want, since with sharded state no rank wants all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import attrs
import torch

from zckpt.errors import CheckpointMismatch
from zckpt.format.canonical import JSON
from zckpt.format.manifest import Manifest, Piece, TensorEntry
from zckpt.format.regions import Region, box_numel, overlap, whole_box
from zckpt.format.shard import Shard, ShardLike, check_shard, describe, region_of, shape_of

_SHOWN = 10  # problems of each kind that an error lists


@attrs.frozen
class LoadReport:
    """Result of a read, over all ranks that took part."""

    loaded: tuple[str, ...]  # names filled on any rank
    missing: tuple[str, ...]  # wanted, not in the checkpoint; their tensors are unchanged
    extra: tuple[str, ...]  # in the checkpoint, wanted by no rank
    read_nbytes: int  # tensor bytes that this rank read to copy, rounded out to whole chunks


@attrs.frozen
class ReadRequest:
    """Tensors to read and the options of `Checkpoint.read`."""

    wanted: Iterable[ShardLike]  # iterated once
    on_mismatch: Literal["raise", "ignore"] = "raise"  # for missing and extra names; `strict` of `read`
    verify: bool | Literal["first"] = True
    cast: bool = False
    ignore: tuple[str, ...] = ()
    readers: int = 4


@attrs.frozen
class ReadItem:
    """One wanted shard and the pieces that hold some of it."""

    shard: ShardLike
    region: Region
    entry: TensorEntry
    pieces: tuple[Piece, ...]


@attrs.frozen
class ReadPlan:
    """One rank's side of a read."""

    items: tuple[ReadItem, ...]
    names: tuple[str, ...]  # all wanted, present or not
    missing: dict[str, str]  # name -> dtype and shape, as wanted
    unfit: dict[str, tuple[str, ...]]  # kind ("shape", "dtype") -> lines

    @property
    def nbytes(self) -> int:
        """Stored bytes that are wanted."""
        return sum(item.region.numel * item.entry.dtype.itemsize for item in self.items)

    def as_json(self) -> JSON:
        return {
            "names": list(self.names),
            "missing": self.missing,
            "unfit": {kind: list(lines) for kind, lines in self.unfit.items()},
            "nbytes": self.nbytes,
        }


def plan_read(manifest: Manifest, wanted: Iterable[ShardLike], *, cast: bool) -> ReadPlan:
    """Plan this rank's read.  Raises CheckpointInputError for a malformed shard; other problems are in the plan."""
    items: list[ReadItem] = []
    names: dict[str, None] = {}
    missing: dict[str, str] = {}
    unfit: dict[str, list[str]] = {"shape": [], "dtype": []}
    for shard in wanted:
        check_shard(shard)
        names[shard.name] = None
        entry = manifest.tensors.get(shard.name)
        if entry is None:
            missing[shard.name] = describe(shard.tensor.dtype, shape_of(shard))
        elif problem := _mismatch(shard, entry, cast):
            unfit[problem[0]].append(problem[1])
        else:
            items.append(_item(shard, entry))
    return ReadPlan(
        tuple(items), tuple(names), missing, {kind: tuple(lines) for kind, lines in unfit.items() if lines}
    )


def whole_item(name: str, entry: TensorEntry) -> ReadItem:
    """Item for verifying a whole tensor; its shard is empty, so it cannot be filled."""
    box = whole_box(entry.shape)
    region = Region(box, (0, box_numel(box)))
    empty = Shard(name, (0,), ((0, 0),), (0, 0), torch.empty(0, dtype=entry.dtype))
    return ReadItem(empty, region, entry, entry.pieces)


def _item(shard: ShardLike, entry: TensorEntry) -> ReadItem:
    region, pieces = region_of(shard), entry.pieces
    if len(pieces) != 1 or pieces[0].region != region or not region.numel:
        pieces = tuple(piece for piece in pieces if overlap(region, piece.region))
    return ReadItem(shard, region, entry, pieces)


def _mismatch(shard: ShardLike, entry: TensorEntry, cast: bool) -> tuple[str, str] | None:
    wanted, stored = shard.tensor.dtype, entry.dtype
    if shape_of(shard) != entry.shape:
        return "shape", f"{shard.name}: wanted {describe(wanted, shape_of(shard))}, stored {entry.shape}"
    if wanted == stored or (cast and wanted.is_floating_point and stored.is_floating_point):
        return None
    hint = " (cast=True converts)" if wanted.is_floating_point and stored.is_floating_point else ""
    return "dtype", f"{shard.name}: wanted {describe(wanted, entry.shape)}, stored {describe(stored, ())[:-3]}{hint}"


def merge_plans(
    answers: Sequence[JSON], manifest: Manifest, ignore: Sequence[str] = ()
) -> tuple[LoadReport, dict[str, list[str]]]:
    """Combine the plans of all ranks: (report, kind of problem -> lines), equal on all ranks."""
    names = sorted({name for answer in answers for name in answer["names"]})
    missing = {name: text for answer in reversed(answers) for name, text in answer["missing"].items()}
    unfit = {line: kind for answer in answers for kind, lines in answer["unfit"].items() for line in lines}
    unwanted = sorted(set(manifest.tensors) - set(names))
    extra = tuple(name for name in unwanted if not name.startswith(tuple(ignore)))
    report = LoadReport(
        loaded=tuple(name for name in names if name not in missing),
        missing=tuple(sorted(missing)),
        extra=extra,
        read_nbytes=0,
    )
    problems = {
        "missing (wanted, not in the checkpoint)": [f"{name}: {missing[name]}" for name in report.missing],
        "extra (in the checkpoint, not wanted)": [
            f"{name}: {describe(manifest.tensors[name].dtype, manifest.tensors[name].shape)}" for name in extra
        ],
        "of another shape": [line for line, kind in unfit.items() if kind == "shape"],
        "of another dtype": [line for line, kind in unfit.items() if kind == "dtype"],
    }
    return report, problems


def is_disjoint(answers: Sequence[JSON], manifest: Manifest) -> bool:
    """True if ranks read mostly different bytes: together at most 1.25 times the checkpoint."""
    return sum(int(answer["nbytes"]) for answer in answers) <= 1.25 * manifest.nbytes


def check_problems(problems: Mapping[str, Sequence[str]], *, strict: bool, where: str) -> None:
    """Raise CheckpointMismatch with the first ten problems of each kind; if not strict, shapes and dtypes only."""
    counted = [kind for kind, lines in problems.items() if lines and (strict or kind.startswith("of another"))]
    if not counted:
        return
    lines = []
    for kind in counted:
        shown, rest = problems[kind][:_SHOWN], len(problems[kind]) - _SHOWN
        lines += [f"{len(problems[kind])} {kind}:", *(f"  {line}" for line in shown)]
        lines += [f"  ... and {rest} more"] if rest > 0 else []
    hint = "" if any(kind.startswith("of another") for kind in counted) else "\nstrict=False loads the other names."
    raise CheckpointMismatch(
        f"{where} does not match the tensors to load; nothing was loaded.\n" + "\n".join(lines) + hint, path=where
    )
