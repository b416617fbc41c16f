from pathlib import Path

import pytest
import torch

from zckpt import CheckpointCorrupt, CheckpointMismatch, CheckpointNotFound, Peers, Shard, load, save, save_async
from zckpt.testing import run_threads


def test_the_newest_or_the_one_of_the_tag_is_loaded_with_its_objects(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, tensors={"w": torch.full((2,), float(step))}, objects={"n": step}, step=step)
    live = torch.zeros(2)
    loaded = load(tmp_path, tensors={"w": live})
    assert (loaded.step, loaded.objects, live.tolist()) == (2, {"n": 2}, [2, 2])
    assert loaded.report.loaded == ("w",)
    assert load(tmp_path, "step-1", tensors={"w": live}).checkpoint.tag == "step-1"
    assert live.tolist() == [1, 1]


def test_missing_and_extra_names_are_refused_or_reported(tmp_path: Path) -> None:
    save(tmp_path, "a", tensors={"w": torch.ones(2), "v": torch.ones(1)})
    live = torch.zeros(2)
    wanted = {"w": live, "x": torch.zeros(3)}
    with pytest.raises(CheckpointMismatch, match=r"(?s)1 missing.*x: float32 \(3,\).*1 extra.*v: float32 \(1,\)"):
        load(tmp_path, tensors=wanted)
    assert not live.any()
    report = load(tmp_path, tensors=wanted, strict=False).report
    assert (report.missing, report.extra, live.tolist()) == (("x",), ("v",), [1, 1])


def test_all_ranks_load_what_rank_zero_finds_and_fail_together(tmp_path: Path) -> None:
    save(tmp_path, "a", tensors={"w": torch.arange(4.0)})

    def script(peers: Peers) -> list[float]:
        live = torch.zeros(2)
        span = (2 * peers.rank, 2 * peers.rank + 2)
        load(tmp_path, tensors=[Shard("w", (4,), ((0, 4),), span, live)], peers=peers)
        return live.tolist()

    assert [each.value for each in run_threads(script, 2)] == [[0, 1], [2, 3]]

    def lost(peers: Peers) -> None:
        load(tmp_path / ("there" if peers.rank else "."), tensors={}, strict=False, peers=peers)

    for outcome in run_threads(lost, 2):
        assert isinstance(outcome.error, CheckpointNotFound)
        assert "rank 1" in str(outcome.error)


def test_bytes_are_proved_first_if_that_is_asked_for(tmp_path: Path) -> None:
    path = save(tmp_path, "a", tensors={"w": torch.ones(2)}) / "rank00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    live = torch.zeros(2)
    with pytest.raises(CheckpointCorrupt, match="tensor 'w'"):
        load(tmp_path, tensors={"w": live}, verify="first")
    assert not live.any()
    load(tmp_path, tensors={"w": live}, verify=False)
    assert live.any()


def test_a_root_may_be_a_url(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}/run"
    live = torch.ones(3)
    save_async(url, tensors={"w": live}, step=1).wait()
    live.zero_()
    assert load(url, tensors={"w": live}).step == 1
    assert live.tolist() == [1, 1, 1]


def test_what_is_missing_keeps_its_values_where_it_is_not_contiguous_too(tmp_path: Path) -> None:
    save(tmp_path, "a", tensors={"v": torch.ones(1)})
    live = torch.arange(4096.0).view(64, 64).t()
    expected = live.clone()
    assert load(tmp_path, tensors={"w": live, "v": torch.zeros(1)}, strict=False).report.missing == ("w",)
    assert live.equal(expected)
