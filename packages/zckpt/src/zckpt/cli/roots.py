"""Commands on a root: `zckpt ls` and `zckpt prune`."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from zckpt.cli.output import ABSENT, CORRUPT, OK, count_text, print_json, size_text, table
from zckpt.cli.resolve import existing_root
from zckpt.errors import CheckpointError, CheckpointNotFound
from zckpt.format.paths import LATEST, parse_leftover, tag_problem
from zckpt.loading.checkpoint import as_read_errors, open_checkpoint
from zckpt.loading.select import list_checkpoints
from zckpt.saving.prune import PruneReport, prune
from zckpt.saving.retention import Best, Retention
from zckpt.storage.storage import PathKind, Storage, read_all


def run_ls(arguments: argparse.Namespace) -> int:
    root, storage = existing_root(arguments.root)
    with as_read_errors(f"listing {root}"):
        rows, leftovers = _rows(root, storage), _leftovers(root, storage)
        pointer = _pointer(root, storage)
    for row in rows:
        row["latest"] = row["tag"] == pointer
    if arguments.json:
        print_json({"root": str(root), "checkpoints": rows, "interrupted": leftovers})
    else:
        _print_rows(rows, leftovers)
    if any(row["state"] == "damaged" for row in rows):
        return CORRUPT
    return OK if any(row["state"] == "complete" for row in rows) else ABSENT


def run_prune(arguments: argparse.Namespace) -> int:
    keep = Retention(
        last=arguments.last,
        every=arguments.every,
        best=[Best.parse(text) for text in arguments.best],
        tags=arguments.keep_tag,
    )
    root, storage = existing_root(arguments.root)
    done = prune(root, keep, storage=storage, dry_run=arguments.dry_run)
    if not done.decisions and not done.damaged:
        raise CheckpointNotFound(f"{root} holds no committed checkpoint")
    if arguments.json:
        print_json({"root": str(root), "dry_run": arguments.dry_run, **_report_json(done)})
    else:
        _print_report(done, "would be removed" if arguments.dry_run else "removed")
    return CORRUPT if done.damaged else OK


def _rows(root: Path, storage: Storage) -> list[dict[str, Any]]:
    seen = {each.tag: each.path for each in list_checkpoints(root, storage=storage)}
    named = [name for name in storage.names(root) if not tag_problem(name) and name not in seen]
    others = {name: root / name for name in named if storage.kind(root / name) is PathKind.FOLDER}
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


def _leftovers(root: Path, storage: Storage) -> list[str]:
    return [name for name in storage.names(root) if parse_leftover(name) is not None]


def _pointer(root: Path, storage: Storage) -> str:
    with contextlib.suppress(OSError):
        return read_all(storage, root / LATEST, 4096).decode(errors="replace").strip()
    return ""


def _print_rows(rows: list[dict[str, Any]], leftovers: list[str]) -> None:
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
    for name in leftovers:
        print(f"{name}  left by an interrupted save; the next save removes it")


def _print_report(done: PruneReport, removed: str) -> None:
    rows = [
        [each.candidate.tag, f"{each.candidate.step:,}", removed if each.is_removed else "kept", each.reason]
        for each in done.decisions
    ]
    if rows:
        print("\n".join(table([["tag", "step", "", "because"], *rows], right=(1,))))
    for line in done.damaged:
        print(f"not removed, as it is damaged: {line}")
    kept = len(done.decisions) - len(done.removed)
    print(f"{count_text(len(done.removed), 'checkpoint')} {removed}, {kept:,} kept")


def _report_json(done: PruneReport) -> dict[str, Any]:
    kept = {each.candidate.tag: each.reason for each in done.decisions if not each.is_removed}
    return {"removed": done.removed, "kept": kept, "damaged": done.damaged}
