"""A rendezvous that cannot complete ends in one named error, whatever the reason."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import zcomm
from zcomm.groups import rendezvous
from zcomm.groups.launch import Launch


@pytest.fixture
def mute_server() -> Iterator[int]:
    """Port of a server that accepts connections and sends nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])
    for thread in threading.enumerate():
        if thread.name == "zcomm-rendezvous":
            thread.join(20)  # the client ends with the server


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join(rank: int, port: int) -> None:
    environ = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    zcomm.init(environ=environ, device="cpu", timeout_s=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_peer_never_comes_names_address_port_world_size_and_timeout(rank: int, free_port: int) -> None:
    expected = rf"Rank {rank} did not meet the others at 127\.0\.0\.1:{free_port} \(torchrun launch, world size 2, "
    with pytest.raises(zcomm.RendezvousFailed, match=expected + r"timeout 1 s\).*MASTER_PORT.*ZCOMM_TIMEOUT_S"):
        join(rank, free_port)
    assert not dist.is_initialized()


def test_a_port_that_is_taken_is_reported_on_rank_0(mute_server: int) -> None:
    with pytest.raises(zcomm.RendezvousFailed, match=rf"127\.0\.0\.1:{mute_server} .*address already in use"):
        join(0, mute_server)


def test_a_mute_server_on_the_port_does_not_block_a_rank_forever(
    mute_server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_MUTE_PEER_GRACE_S", 0.3)
    with pytest.raises(zcomm.RendezvousFailed, match="accepts connections there, but it is not a torch store"):
        join(1, mute_server)


def test_slurm_users_are_pointed_to_srun() -> None:
    launch = Launch(0, 2, 0, 2, "node1", 15000, "slurm")
    error = rendezvous.rendezvous_failed(launch, 5.0, TimeoutError("nobody came"))
    assert "start the script with srun" in str(error)
    assert "node1:15000" in str(error)


def test_a_world_of_one_opens_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(*_: object, **__: object) -> None:
        raise AssertionError("a world of one connected to something")

    monkeypatch.setattr(rendezvous.compat, "rendezvous", reject)
    with zcomm.init(environ={"RANK": "0", "WORLD_SIZE": "1"}, device="cpu") as world:
        assert world.world_size == 1
