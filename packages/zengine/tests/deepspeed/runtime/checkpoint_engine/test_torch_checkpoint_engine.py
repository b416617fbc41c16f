"""Single files of a caller, through DeepSpeed's interface."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import zckpt
from zengine.deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, create_checkpoint_engine


def test_single_files_are_written_and_read_without_pickling(tmp_path: Path) -> None:
    engine = create_checkpoint_engine(None, None, 0, False, None)
    info = CheckpointCommitInfo("tag", str(tmp_path), True)
    engine.makedirs(str(tmp_path / "a"), exist_ok=True)
    engine.create(info)
    path = str(tmp_path / "a" / "x.pt")
    engine.save({"w": torch.arange(6.0)[2:4], "n": [1, (2.5, None)]}, path)
    assert engine.commit(info) is True
    loaded = torch.load(path, weights_only=True)
    assert loaded["w"].untyped_storage().nbytes() == 8, "not the whole storage"
    again = engine.load(path, map_location="cpu")
    assert (again["w"].tolist(), again["n"]) == ([2.0, 3.0], [1, (2.5, None)])
    with pytest.raises(TypeError, match="no plain form"):
        engine.save({"f": json.loads}, path)
    torch.save({"f": json.JSONDecoder}, path)
    with pytest.raises(zckpt.CheckpointCorrupt, match=r"json.decoder.JSONDecoder.*not allowed"):
        engine.load(path)
