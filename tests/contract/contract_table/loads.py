"""Rejected loads: the engine saves, the files are damaged, and loading them raises."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import xxhash

import zckpt
import zcomm


def try_to_load(engine: Any) -> None:
    """Load a checkpoint with an impossible counter and one with a flipped byte; both raise on every rank."""
    root = zcomm.all_gather_object(tempfile.mkdtemp())[0]
    folder = Path(engine.save_checkpoint(root, "damaged"))
    alone = zcomm.group_rank() == 0
    try:
        for damage, message in ((_count_backwards, "steps = -2 must be"), (_flip, "damaged")):
            if alone:
                damage(folder)
            zcomm.barrier()
            with pytest.raises(zckpt.CheckpointError, match=message):
                engine.load_checkpoint(root, "damaged")
            zcomm.barrier()
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _count_backwards(folder: Path) -> None:
    _rewrite(folder / "manifest.json", b'"steps":2,', b'"steps":-2,')


def _flip(folder: Path) -> None:
    """Restore the counter and flip a byte of a tensor in each file."""
    _rewrite(folder / "manifest.json", b'"steps":-2,', b'"steps":2,')
    for file in folder.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)


def _rewrite(manifest: Path, old: bytes, new: bytes) -> None:
    """Write the manifest with a correct checksum."""
    content = manifest.read_bytes()
    body = content[: content.rindex(b',"checksum"')].replace(old, new)
    manifest.write_bytes(body + b',"checksum":"%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode())
