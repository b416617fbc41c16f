"""init() and World: alone, adopted, over a real rendezvous, under torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zcomm
from zcomm.groups.launch import SINGLE, Launch
from zcomm.groups.world import choose_device, resolve_timeout_s
from zcomm.testing import run_ranks

SECOND_OF_TWO = Launch(1, 2, 1, 2, "127.0.0.1", 1, "torchrun")


@pytest.fixture
def world() -> Iterator[zcomm.World]:
    """A world of one in this process."""
    with zcomm.init(environ={}, device="cpu") as alone:
        yield alone


def test_alone_there_is_a_real_group_of_one(world: zcomm.World) -> None:
    assert (world.rank, world.world_size, world.local_rank, world.backend) == (0, 1, 0, "gloo")
    assert world.device == torch.device("cpu")
    assert world.group is dist.group.WORLD
    assert dist.get_world_size() == 1


def test_init_is_idempotent(world: zcomm.World) -> None:
    assert zcomm.init() is world
    assert zcomm.init(backend="gloo", device="cpu") is world


def test_close_may_be_called_again_and_a_new_world_may_follow() -> None:
    first = zcomm.init(environ={}, device="cpu")
    first.close()
    first.close()
    assert first.group is None
    assert not dist.is_initialized()
    with zcomm.init(environ={}, device="cpu") as second:
        assert second is not first
        first.close()  # must not touch the second
        assert dist.is_initialized()


def test_a_group_destroyed_behind_our_back_is_not_handed_out_again(world: zcomm.World) -> None:
    dist.destroy_process_group()
    with zcomm.init(environ={}, device="cpu") as second:
        assert second is not world
        assert zcomm.init() is second


def test_closing_gives_the_environment_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with zcomm.init(environ={}, device="cpu"):
        assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_chosen_network_interface_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with zcomm.init(environ={}, device="cpu"):
        pass
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_another_kind_of_world_is_rejected_while_one_is_open(world: zcomm.World) -> None:
    with pytest.raises(ValueError, match=r"backend='nccl'.*already has a default group, with backend 'gloo'"):
        zcomm.init(backend="nccl")
    with pytest.raises(ValueError, match=r"device='cuda:3'.*already uses cpu"):
        zcomm.init(device="cuda:3")


def test_a_group_made_elsewhere_is_adopted_and_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with zcomm.init(environ={}) as adopted:
            assert adopted.group is dist.group.WORLD
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def rank_adopts() -> tuple[int, int, int, float]:
    with zcomm.init() as world:
        found = (world.rank, world.world_size, world.local_rank, world.timeout_s)
        assert zcomm.init() is world
    assert dist.is_initialized(), "close() destroyed a group that was not its own"
    return found


def test_inside_run_ranks_init_adopts_the_group_with_its_timeout() -> None:
    assert run_ranks(rank_adopts, 2, timeout_s=40) == [(0, 2, 0, 100.0), (1, 2, 1, 100.0)]


def rank_adopts_without_environment() -> str:
    return zcomm.init(environ={"RANK": "0"}).launch.source


def test_an_adopted_group_needs_no_environment() -> None:
    assert run_ranks(rank_adopts_without_environment, 2) == ["adopted", "adopted"]


def rank_meets_twice(port: int) -> list[float]:
    rank = dist.get_rank()
    dist.destroy_process_group()
    environ = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sums = []
    for _ in range(2):
        with zcomm.init(environ=environ, device="cpu", timeout_s=30):
            tensor = torch.tensor([1.0 + rank])
            zcomm.all_reduce(tensor)
            sums.append(tensor.item())
    return sums


def test_two_ranks_meet_at_an_address_and_after_closing_meet_again(free_port: int) -> None:
    assert run_ranks(rank_meets_twice, 2, free_port) == [[3.0, 3.0], [3.0, 3.0]]


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


SCRIPT = """
import os, torch, zcomm
for _ in range(2):
    with zcomm.init(device="cpu", timeout_s=30) as world:
        tensor = torch.ones(3)
        zcomm.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 3, tensor
        assert zcomm.all_gather_object(world.rank) == [0, 1]
os.write(1, f"rank {world.rank} from {world.launch.source}\\n".encode())
"""


def test_under_torchrun_the_ranks_find_each_other(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 from torchrun", "rank 1 from torchrun"]


@pytest.mark.parametrize(
    ("given", "environ", "limit_s"),
    [
        (None, {}, 600.0),
        (7, {"ZCOMM_TIMEOUT_S": "1"}, 7.0),
        (None, {"ZCOMM_TIMEOUT_S": "2.5", "DEEPSPEED_TIMEOUT": "9"}, 2.5),
        (None, {"ZCOMM_TIMEOUT_S": "", "DEEPSPEED_TIMEOUT": "9"}, 540.0),
    ],
)
def test_the_time_limit_comes_from_argument_then_environment(
    given: float | None, environ: dict[str, str], limit_s: float
) -> None:
    assert resolve_timeout_s(given, environ) == limit_s


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        (0, {}, "timeout_s=0 must be a positive number of seconds"),
        (float("nan"), {}, "timeout_s=nan must be"),
        (None, {"ZCOMM_TIMEOUT_S": "soon"}, "ZCOMM_TIMEOUT_S='soon' must be a positive number of seconds"),
        (None, {"DEEPSPEED_TIMEOUT": "-1"}, "DEEPSPEED_TIMEOUT='-1' must be a positive number of minutes"),
    ],
)
def test_a_senseless_time_limit_is_rejected(given: float | None, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_timeout_s(given, environ)


@pytest.mark.parametrize(
    ("backend", "device", "num_gpus", "placed"),
    [
        (None, None, 0, ("gloo", "cpu")),
        (None, None, 2, ("nccl", "cuda:1")),
        (None, None, 1, ("nccl", "cuda:0")),  # the scheduler hides the GPUs of the others
        (None, "cpu", 2, ("gloo", "cpu")),
        (None, "cuda", 4, ("nccl", "cuda:1")),
        (None, "cuda:3", 4, ("nccl", "cuda:3")),
        ("gloo", None, 2, ("gloo", "cpu")),
        ("gloo", "cuda", 2, ("gloo", "cuda:1")),
        ("cpu:gloo,cuda:nccl", None, 2, ("cpu:gloo,cuda:nccl", "cuda:1")),
    ],
)
def test_backend_and_device_follow_the_machine(
    backend: str | None, device: str | None, num_gpus: int, placed: tuple[str, str]
) -> None:
    wanted = None if device is None else torch.device(device)
    assert choose_device(backend, wanted, SECOND_OF_TWO, num_gpus) == (placed[0], torch.device(placed[1]))


@pytest.mark.parametrize(
    ("backend", "device", "num_gpus", "message"),
    [
        ("mpi", None, 0, "backend 'mpi' is unknown; allowed: 'gloo', 'nccl'"),
        ("nccl", None, 0, "backend 'nccl' needs a GPU, but no GPU is visible. Use backend='gloo'"),
        ("nccl", "cpu", 2, "backend 'nccl' needs a GPU, but device is cpu"),
        (None, "cuda", 0, "needs GPU 1, but the visible GPUs number 0"),
        (None, "cuda:2", 2, r"rank 1 \(local rank 1\) needs GPU 2, but the visible GPUs number 2"),
    ],
)
def test_an_impossible_placement_names_the_reason(
    backend: str | None, device: str | None, num_gpus: int, message: str
) -> None:
    wanted = None if device is None else torch.device(device)
    with pytest.raises(ValueError, match=message):
        choose_device(backend, wanted, SECOND_OF_TWO, num_gpus)


def test_a_wrong_argument_is_rejected_before_anything_is_opened() -> None:
    with pytest.raises(ValueError, match="unknown"):
        zcomm.init(backend="glo", environ={})
    assert not dist.is_initialized()
    assert SINGLE.world_size == 1
