from pathlib import Path

import pytest
import torch

from zckpt import AsyncSaver, CheckpointInputError, CheckpointMismatch, MemoryCheckpoint, Peers, Shard, whole
from zckpt.testing import run_threads


def part(values: torch.Tensor, name: str = "w") -> Shard:
    """The rank's half of an (8,) tensor; its first value identifies it."""
    start = int(values[0].item()) if values.numel() else 0
    return Shard(name, (8,), ((0, 8),), (start, start + values.numel()), values)


def test_ranks_read_back_what_they_gave_by_the_names_of_all(tmp_path: Path) -> None:
    def rank(peers: Peers) -> None:
        live = torch.arange(4.0) + 4 * peers.rank
        own = [part(live), whole(f"only.{peers.rank}", torch.ones(()))]
        with AsyncSaver(peers) as saver:
            handle = saver.save(
                tmp_path, "a", shards=own, objects={"lr": 1}, rank_objects={"seed": peers.rank}, step=7
            )
            handle.wait()
            copy = handle.checkpoint(peers)
            assert copy.names() == ("only.0", "only.1", "w")
            assert (copy.tag, copy.step, copy.objects, copy.manifest.world_size) == ("a", 7, {"lr": 1}, 2)
            assert [copy.rank_objects(each)["seed"] for each in range(2)] == [0, 1]
            wanted = torch.zeros(4, dtype=torch.float64)
            span = (4 * peers.rank, 4 * peers.rank + 4)
            report = copy.read([Shard("w", (8,), ((0, 8),), span, wanted)], strict=False, cast=True, peers=peers)
            assert wanted.tolist() == live.tolist()
            assert report.extra == ("only.0", "only.1")
            wide = torch.zeros(8)
            with pytest.raises(CheckpointMismatch, match=r"rank 0 holds no copy of w .*from disk"):
                copy.read([whole("w", wide)], strict=False, peers=peers)
            assert not wide.any()
        with pytest.raises(CheckpointInputError, match="is gone"):
            handle.checkpoint(peers)

    assert [each.error for each in run_threads(rank, 2)] == [None, None]


def test_copies_of_different_saves_do_not_mix() -> None:
    def rank(peers: Peers) -> None:
        with pytest.raises(CheckpointMismatch, match=r"copies of different saves: 'a0', 'a1'"):
            MemoryCheckpoint.of([], {}, {}, tag=f"a{peers.rank}", step=0, peers=peers)

    assert [each.error for each in run_threads(rank, 2)] == [None, None]
