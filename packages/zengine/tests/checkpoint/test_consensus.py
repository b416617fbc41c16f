"""Decisions about checkpoints that are equal on all ranks."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import zckpt
import zcomm
import zengine
from zckpt.containers.zipmap import ZipMap
from zcomm.testing import run_ranks
from zengine.checkpoint.consensus import GroupPeers, common_tag, errors_at, find, found_source, on_every_rank

DEEPSPEED = Path(__file__).resolve().parents[3] / "zckpt/tests/fixtures/deepspeed"


def _peers() -> GroupPeers:
    return GroupPeers(None, zcomm.group_rank(), zcomm.group_size())


def _tags(validation: str) -> str:
    try:
        return common_tag(f"rank{zcomm.group_rank()}", validation, _peers())
    except ValueError as error:
        return str(error)


def test_rank_0s_tag_is_taken_or_all_ranks_fail():
    assert run_ranks(_tags, 2, "WARN") == run_ranks(_tags, 2, "IGNORE") == ["rank0", "rank0"]
    assert all("rank 0: 'rank0', rank 1: 'rank1'" in message for message in run_ranks(_tags, 2, "FAIL"))


def _fails_on(bad: int) -> str:
    def work() -> dict[str, int]:
        if zcomm.group_rank() == bad:
            raise TypeError("no")
        return {"rank": zcomm.group_rank()}

    try:
        return str(on_every_rank(work, _peers()))
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__} {error}"


def test_work_succeeds_on_all_ranks_or_on_none():
    assert run_ranks(_fails_on, 2, 9) == ["{'rank': 0}", "{'rank': 1}"]
    assert run_ranks(_fails_on, 2, 1) == ["ValueError nothing was saved, because of rank 1: no", "TypeError no"]


def _two_file_systems() -> str:
    root = tempfile.mkdtemp()
    if zcomm.group_rank() == 0:
        zckpt.save(root, "only-here", shards=[], objects={})
    try:
        return find(root, None, _peers()).tag
    except zckpt.CheckpointError as error:
        return str(error)


def test_a_rank_that_sees_another_file_system_stops_all():
    first, second = run_ranks(_two_file_systems, 2)
    assert "rank 1 finds no checkpoint" in first
    assert "this rank finds 'only-here': do all hosts see the same file system?" in first
    assert second


def _two_newest() -> str:
    root = tempfile.mkdtemp()
    zckpt.save(root, f"of-rank-{zcomm.group_rank()}", shards=[], objects={})
    try:
        return find(root, None, _peers()).tag
    except (zckpt.CheckpointError, ValueError) as error:
        return str(error)


def test_a_rank_that_cannot_follow_rank_0_stops_all():
    first, second = run_ranks(_two_newest, 2)
    assert first.startswith("nothing was loaded, because of rank 1:")
    assert "of-rank-0" in second


def test_an_engine_that_only_runs_forward_loads_a_trained_checkpoint(tmp_path):
    model = nn.Linear(2, 1)
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {}},
    }
    engine, *_ = zengine.initialize(model=model, config=config)
    engine.backward(engine(torch.ones(1, 2)).mean())
    engine.step()
    engine.save_checkpoint(tmp_path)
    forward_only, *_ = zengine.initialize(model=nn.Linear(2, 1), config={"train_batch_size": 1})
    forward_only.load_checkpoint(tmp_path)
    assert torch.equal(forward_only.module.weight, model.weight)
    with pytest.raises(zckpt.CheckpointNotFound):
        forward_only.load_checkpoint(tmp_path, tag="global_step9")


def _fails_on_rank_0(name: str) -> str:
    def work() -> None:
        if zcomm.group_rank() == 0:
            raise getattr(zckpt, name, OSError)("of rank 0")

    try:
        on_every_rank(work, _peers())
    except Exception as error:
        return type(error).__name__
    return "nothing"


def test_an_error_of_zckpts_is_of_its_class_on_every_rank():
    assert run_ranks(_fails_on_rank_0, 2, "CheckpointStateError") == ["CheckpointStateError"] * 2
    assert run_ranks(_fails_on_rank_0, 2, "no class of zckpt's") == ["OSError", "ValueError"]


@pytest.mark.parametrize("error", [KeyError("key"), TypeError("no number"), AttributeError("items"), IndexError()])
def test_whatever_an_owner_trips_over_names_file_and_key(error):
    node = zckpt.Node(5, "runs/a/manifest.json: objects['clock']", zckpt.CheckpointStateError)
    with pytest.raises(zckpt.CheckpointStateError) as told, errors_at(node):
        raise error
    assert str(told.value).startswith("runs/a/manifest.json: objects['clock']: ")


def _open_together(folder: str) -> tuple[str, list[str]]:
    """Return the error, and the files that this rank verified."""
    verified: list[str] = []
    verify = ZipMap.verify

    def recorded(file: ZipMap) -> None:
        verified.append(file.path.name)
        verify(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ZipMap, "verify", recorded)
        try:
            with found_source(folder, None, _peers()) as source:
                return str(source.manifest.tag), verified
        except zckpt.CheckpointCorrupt as error:
            return str(error), verified


@pytest.mark.skipif(not DEEPSPEED.is_dir(), reason="needs the fixtures of zckpt's tests")
def test_ranks_of_a_host_verify_a_deepspeed_folder_together_and_share_the_verdict(tmp_path):
    shutil.copytree(DEEPSPEED / "zero2_bf16", tmp_path / "run")
    (tag, first), (_, second) = run_ranks(_open_together, 2, str(tmp_path / "run"))
    files = sorted(path.name for path in (tmp_path / "run/global_step3").glob("*.pt"))
    assert (tag, sorted(first + second)) == ("global_step3", files)
    damaged = tmp_path / "run/global_step3" / second[-1]
    with ZipMap.open(damaged) as file:
        start = next(each.start for each in file.members.values() if each.name.startswith("data/") and each.nbytes)
    content = bytearray(damaged.read_bytes())
    content[start] ^= 1
    damaged.write_bytes(content)
    (told, _), (raised, _) = run_ranks(_open_together, 2, str(tmp_path / "run"))
    assert told == f"nothing was loaded, because of rank 1: {raised}"
    assert damaged.name in raised
