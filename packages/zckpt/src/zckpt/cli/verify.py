"""`zckpt verify`: every byte read and compared with its checksum, and the files opened as another tool would.

That each tensor is covered exactly once, without gap or overlap, is part of opening a manifest (coverage.py), so a
checkpoint that does not is refused before its first byte is read.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

from zckpt.cli.output import CORRUPT, OK, Progress, count_text, print_json, size_text, some
from zckpt.cli.resolve import existing_root, resolve
from zckpt.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, os_error_text
from zckpt.loading.checkpoint import Checkpoint, open_checkpoint
from zckpt.loading.plan_reads import ReadItem, stored
from zckpt.loading.run_reads import ReadRunner
from zckpt.loading.select import list_checkpoints
from zckpt.loading.verify import Verifier
from zckpt.storage.storage import LOCAL

_BATCH_NBYTES = 64 << 20


def run(arguments: argparse.Namespace) -> int:
    results = list(_results(arguments))
    if arguments.json:
        print_json({"sound": all(not each["problems"] for each in results), "checkpoints": results})
    return CORRUPT if any(each["problems"] for each in results) else OK


def _results(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One after the other, each told as soon as it is known."""
    if not arguments.all:
        try:
            chosen = resolve(arguments.path, arguments.tag)
        except CheckpointCorrupt as error:
            if not arguments.json:
                raise
            yield {"path": error.path or arguments.path, "tag": arguments.tag, "problems": [str(error)]}
        else:
            yield _verify(chosen, arguments)
        return
    root, storage = existing_root(arguments.path)
    seen = list_checkpoints(root, storage=storage)
    if not seen:
        raise CheckpointNotFound(f"{root} holds no committed checkpoint")
    for each in seen:
        try:
            found = open_checkpoint(each.path, tag=each.tag, storage=storage)
        except CheckpointError as error:
            yield _told({"path": str(each.path), "tag": each.tag, "problems": [str(error)]}, arguments, "")
        else:
            yield _verify(found, arguments)


def _verify(found: Checkpoint, arguments: argparse.Namespace) -> dict[str, Any]:
    started_s, told = time.monotonic(), found.manifest
    with Progress(told.nbytes, found.tag) as progress:
        problems = check(found, max(1, arguments.threads), progress)
    result = {
        "path": str(found.path),
        "tag": found.tag,
        "step": found.step,
        "bytes": told.nbytes,
        "tensors": len(told.tensors),
        "problems": problems,
    }
    words = (
        f"{count_text(len(told.tensors), 'tensor')}, each covered exactly once; {size_text(told.nbytes)} in "
        f"{count_text(len(told.files), 'file')}, every checksum right ({time.monotonic() - started_s:.1f} s)"
    )
    return _told(result, arguments, words)


def _told(result: dict[str, Any], arguments: argparse.Namespace, words: str) -> dict[str, Any]:
    problems = result["problems"]
    if not arguments.json and not problems:
        print(f"{result['path']}: sound: {words}")
    elif not arguments.json:
        print(f"{result['path']}: DAMAGED: {count_text(len(problems), 'problem')}")
        print("\n".join(f"  {line}" for line in some(problems, arguments.limit)))
    return result


def check(found: Checkpoint, num_threads: int, progress: Progress) -> list[str]:
    """Read everything; one line for each problem."""
    verifier = Verifier(found.path, found.manifest, found.storage)  # one of its own: it is told to go on
    problems = dict.fromkeys(_header_problems(verifier))
    runner = ReadRunner(found.path, found.storage, verifier, num_threads)
    for batch in _batches([stored(name, entry) for name, entry in sorted(found.manifest.tensors.items())]):
        if _problem(runner, batch):
            problems.update({text: None for item in batch if (text := _problem(runner, [item]))})
        progress.advance(sum(map(_nbytes, batch)))
    if not problems and found.storage is LOCAL:
        problems.update(dict.fromkeys(_second_opinion(found)))
    return list(problems)


def _header_problems(verifier: Verifier) -> Iterator[str]:
    """Each file's header by itself; what lies behind a damaged one is then checked too."""
    for file in sorted(verifier.manifest.files):
        try:
            with verifier.storage.open(verifier.folder / file) as reader:
                verifier.check_header(reader, file)
        except CheckpointCorrupt as error:
            yield str(error)
            verifier.headers.add(file)
        except OSError as error:
            yield f"checkpoint {verifier.folder}: {os_error_text(error)}"


def _batches(items: Sequence[ReadItem]) -> Iterator[list[ReadItem]]:
    """Small tensors together, so that all threads have something to do."""
    batch: list[ReadItem] = []
    for item in items:
        batch.append(item)
        if sum(map(_nbytes, batch)) >= _BATCH_NBYTES or len(batch) == 1000:
            yield batch
            batch = []
    if batch:
        yield batch


def _nbytes(item: ReadItem) -> int:
    return sum(piece.nbytes for piece in item.pieces)


def _problem(runner: ReadRunner, items: Sequence[ReadItem]) -> str:
    try:
        runner.prove(items)
    except CheckpointCorrupt as error:
        return str(error)
    except OSError as error:
        return f"checkpoint {runner.folder}: {os_error_text(error)}"
    return ""


def _second_opinion(found: Checkpoint) -> Iterator[str]:
    """Other tools will open these files with this library: it must see the tensors that the manifest names."""
    from safetensors import SafetensorError, safe_open

    for file in found.manifest.files:
        pieces = [piece for entry in found.manifest.tensors.values() for piece in entry.pieces if piece.file == file]
        try:
            with safe_open(found.path / file, framework="pt") as opened:
                told = set(opened.keys())
        except SafetensorError as error:
            yield f"{found.path / file}: safetensors cannot open it: {error}"
            continue
        if told != {piece.key for piece in pieces}:
            yield f"{found.path / file}: its header names other tensors than the manifest"
