"""`python -m zckpt ls|show|verify PATH`: look at checkpoints without the program that made them.

PATH is a root folder or one checkpoint in it.  Exit status: 0 all is well, 1 something is damaged, 2 nothing there or
never committed (also argparse's status for wrong usage).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .checkpoint import Checkpoint
from .errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from .finding import committed, find
from .manifest import FILE_NAME
from .opening import open_checkpoint
from .places import LATEST, remain, tag_problem
from .shard import describe

OK, CORRUPT, ABSENT = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="zckpt", description="Inspect zckpt checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, text in (
        ("ls", list_root, "the checkpoints of a root folder"),
        ("show", show, "what one checkpoint holds"),
        ("verify", verify, "read every byte and compare every checksum"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("path", type=Path, help="root folder" if name == "ls" else "checkpoint, or root folder")
        command.set_defaults(run=run)
    chosen = parser.parse_args(arguments)
    try:
        status: int = chosen.run(chosen.path)
        return status
    except CheckpointNotFound as error:
        print(f"not found: {error}", file=sys.stderr)
        return ABSENT
    except CheckpointError as error:
        print(f"damaged: {error}", file=sys.stderr)
        return CORRUPT


def list_root(root: Path) -> int:
    """One line a folder, newest first, then what crashes left."""
    if not root.is_dir():
        raise CheckpointNotFound(f"{root} is not a folder")
    seen = [(each.tag, each.path) for each in committed(root)]
    known = {path.name for _, path in seen}
    others = [name for name in sorted(path.name for path in root.iterdir() if path.is_dir()) if name not in known]
    pointer = _pointer(root)
    status = OK if seen else ABSENT
    for tag, path in seen + [(name, root / name) for name in others if not tag_problem(name)]:
        state = _state(path, tag)
        status = CORRUPT if state.startswith("DAMAGED") else status
        print(f"{tag:<32} {state}{f'  <- {LATEST}' if tag == pointer else ''}")
    for name in others:
        if remain(name) is not None:
            print(f"{name:<32} left by an interrupted save; the next save removes it")
    return status


def _pointer(root: Path) -> str:
    try:
        return (root / LATEST).read_text(errors="replace").strip()
    except OSError:
        return ""


def _state(path: Path, tag: str) -> str:
    try:
        found = open_checkpoint(path, tag=tag).manifest
    except CheckpointNotFound:
        return f"incomplete: no {FILE_NAME}"
    except CheckpointError as error:
        return f"DAMAGED: {error}"
    return (
        f"step {found.step:>10,}  {found.nbytes:>16,} bytes  {len(found.tensors):,} tensors  {found.world_size} ranks"
    )


def _resolve(path: Path) -> Checkpoint:
    """A folder with a manifest is a checkpoint, a folder without one a root."""
    if not path.is_dir():
        raise CheckpointNotFound(f"{path} is not a folder")
    path = path.resolve()
    if (path / FILE_NAME).exists():
        return open_checkpoint(path, tag=_aside_tag(path.name))
    if remain(path.name) is not None or any(path.glob("*.safetensors")):
        raise CheckpointNotFound(f"{path} has no {FILE_NAME}: never committed")
    found = find(path)
    for note in found.notes:
        print(f"note: {note}")
    return found


def _aside_tag(name: str) -> str:
    found = remain(name)
    return found.tag if found is not None else name


def show(path: Path) -> int:
    """The manifest for people."""
    found = _resolve(path)
    told = found.manifest
    print(
        f"{found.path}\ntag {told.tag}, step {told.step:,}, attempt {told.attempt}, saved by {told.world_size} ranks"
    )
    print("written by " + ", ".join(f"{name} {version}" for name, version in sorted(told.libraries.items())))
    print(f"{len(told.tensors):,} tensors, {told.nbytes:,} bytes in {len(told.files)} files")
    for name in found.names():
        entry = told.tensors[name]
        print(f"  {name}: {describe(entry.dtype, entry.shape)}, {len(entry.pieces)} pieces")
    print("objects: " + (", ".join(sorted(told.objects)) or "none"))
    print(
        "objects of each rank: " + (", ".join(sorted({key for each in told.rank_objects for key in each})) or "none")
    )
    return OK


def verify(path: Path) -> int:
    """Every checksum, and a second opinion on the files by the safetensors library."""
    found = _resolve(path)
    found.verify()
    _second_opinion(found)
    print(f"{found.path}: sound ({found.manifest.nbytes:,} bytes, {len(found.manifest.tensors):,} tensors)")
    return OK


def _second_opinion(found: Checkpoint) -> None:
    """Other tools will open these files with this library: it must see the tensors that the manifest names."""
    from safetensors import SafetensorError, safe_open

    for file in found.manifest.files:
        pieces = [piece for entry in found.manifest.tensors.values() for piece in entry.pieces if piece.file == file]
        try:
            with safe_open(found.path / file, framework="pt") as opened:
                told = set(opened.keys())
        except SafetensorError as error:
            raise CheckpointCorrupt(f"{found.path / file}: safetensors cannot open it: {error}") from None
        if told != {piece.key for piece in pieces}:
            raise CheckpointCorrupt(f"{found.path / file}: its header names other tensors than the manifest")
