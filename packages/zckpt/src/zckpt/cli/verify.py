"""`zckpt verify`: read every byte, compare every checksum, and open the files with the safetensors library.

Opening the manifest checks that each tensor is covered exactly once (regions.py), so a checkpoint with a gap or an
overlap fails before its first byte is read.
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
from zckpt.loading.plan_reads import ReadItem, whole_item
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
    """Verify one checkpoint after another; print each result at once."""
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
            yield _report({"path": str(each.path), "tag": each.tag, "problems": [str(error)]}, arguments, "")
        else:
            yield _verify(found, arguments)


def _verify(found: Checkpoint, arguments: argparse.Namespace) -> dict[str, Any]:
    started_s, manifest = time.monotonic(), found.manifest
    with Progress(manifest.nbytes, found.tag) as progress:
        problems = check(found, max(1, arguments.threads), progress)
    result = {
        "path": str(found.path),
        "tag": found.tag,
        "step": found.step,
        "bytes": manifest.nbytes,
        "tensors": len(manifest.tensors),
        "problems": problems,
    }
    words = (
        f"{count_text(len(manifest.tensors), 'tensor')}, each covered exactly once; {size_text(manifest.nbytes)} in "
        f"{count_text(len(manifest.files), 'file')}, every checksum right ({time.monotonic() - started_s:.1f} s)"
    )
    return _report(result, arguments, words)


def _report(result: dict[str, Any], arguments: argparse.Namespace, words: str) -> dict[str, Any]:
    problems = result["problems"]
    if not arguments.json and not problems:
        print(f"{result['path']}: sound: {words}")
    elif not arguments.json:
        print(f"{result['path']}: DAMAGED: {count_text(len(problems), 'problem')}")
        print("\n".join(f"  {line}" for line in some(problems, arguments.limit)))
    return result


def check(found: Checkpoint, num_threads: int, progress: Progress) -> list[str]:
    """Read everything; return one line per problem."""
    verifier = Verifier(found.path, found.manifest, found.storage)  # not the checkpoint's: it skips damaged headers
    problems = dict.fromkeys(_header_problems(verifier))
    runner = ReadRunner(found.path, found.storage, verifier, num_threads)
    for batch in _batches([whole_item(name, entry) for name, entry in sorted(found.manifest.tensors.items())]):
        if _problem(runner, batch):
            problems.update({text: None for item in batch if (text := _problem(runner, [item]))})
        progress.advance(sum(map(_nbytes, batch)))
    if not problems and found.storage is LOCAL:
        problems.update(dict.fromkeys(_library_problems(found)))
    return list(problems)


def _header_problems(verifier: Verifier) -> Iterator[str]:
    """Problems of the files' headers; marks damaged headers as checked, so that the data behind them is read too."""
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
    """Group small tensors, so that every thread has work."""
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
        runner.verify(items)
    except CheckpointCorrupt as error:
        return str(error)
    except OSError as error:
        return f"checkpoint {runner.folder}: {os_error_text(error)}"
    return ""


def _library_problems(found: Checkpoint) -> Iterator[str]:
    """Open the files with the safetensors library, as other tools do, and compare names with the manifest."""
    from safetensors import SafetensorError, safe_open

    for file in found.manifest.files:
        pieces = [piece for entry in found.manifest.tensors.values() for piece in entry.pieces if piece.file == file]
        try:
            with safe_open(found.path / file, framework="pt") as opened:
                names = set(opened.keys())
        except SafetensorError as error:
            yield f"{found.path / file}: safetensors cannot open it: {error}"
            continue
        if names != {piece.key for piece in pieces}:
            yield f"{found.path / file}: its header names other tensors than the manifest"
