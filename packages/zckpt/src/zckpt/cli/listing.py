"""`zckpt ls`: the checkpoints of a root, newest first, then what crashes left."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, CheckpointNotFound
from ..finding import committed
from ..opening import named_os_errors, open_checkpoint
from ..places import LATEST, remain, tag_problem
from ..storage import Kind, Storage, read_all
from .resolve import existing_root
from .status import ABSENT, CORRUPT, OK
from .text import count_text, print_json, size_text, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", help="root folder, or URL")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    root, storage = existing_root(arguments.root)
    with named_os_errors(f"listing {root}"):
        rows, remains = _rows(root, storage), _remains(root, storage)
        pointer = _pointer(root, storage)
    for row in rows:
        row["latest"] = row["tag"] == pointer
    if arguments.json:
        print_json({"root": str(root), "checkpoints": rows, "interrupted": remains})
    else:
        _print(rows, remains)
    if any(row["state"] == "damaged" for row in rows):
        return CORRUPT
    return OK if any(row["state"] == "complete" for row in rows) else ABSENT


def _rows(root: Path, storage: Storage) -> list[dict[str, Any]]:
    seen = {each.tag: each.path for each in committed(root, storage=storage)}
    named = [name for name in storage.names(root) if not tag_problem(name) and name not in seen]
    others = {name: root / name for name in named if storage.kind(root / name) is Kind.FOLDER}
    return [_row(tag, path, storage) for tag, path in {**seen, **others}.items()]


def _row(tag: str, path: Path, storage: Storage) -> dict[str, Any]:
    try:
        found = open_checkpoint(path, tag=tag, storage=storage).manifest
    except CheckpointNotFound:
        return {"tag": tag, "state": "incomplete", "problem": "no manifest.json"}
    except CheckpointError as error:
        return {"tag": tag, "state": "damaged", "problem": str(error)}
    return {
        "tag": tag,
        "state": "complete",
        "step": found.step,
        "bytes": found.nbytes,
        "tensors": len(found.tensors),
        "world_size": found.world_size,
    }


def _remains(root: Path, storage: Storage) -> list[str]:
    return [name for name in storage.names(root) if remain(name) is not None]


def _pointer(root: Path, storage: Storage) -> str:
    with contextlib.suppress(OSError):
        return read_all(storage, root / LATEST, 4096).decode(errors="replace").strip()
    return ""


def _print(rows: list[dict[str, Any]], remains: list[str]) -> None:
    complete = [row for row in rows if row["state"] == "complete"]
    lines = [["tag", "step", "size", "tensors", "saved by"]]
    for row in complete:
        ranks = count_text(row["world_size"], "rank") + (f"  <- {LATEST}" if row["latest"] else "")
        lines.append([row["tag"], f"{row['step']:,}", size_text(row["bytes"]), f"{row['tensors']:,}", ranks])
    if complete:
        print("\n".join(table(lines, right=(1, 2, 3))))
    for row in rows:
        if row["state"] != "complete":
            shown = "DAMAGED" if row["state"] == "damaged" else row["state"]
            print(f"{row['tag']}  {shown}: {row['problem']}{f'  <- {LATEST}' if row['latest'] else ''}")
    for name in remains:
        print(f"{name}  left by an interrupted save; the next save removes it")
