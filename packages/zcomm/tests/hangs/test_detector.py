"""The hang detector on real ranks: every way in which a collective can hang, and the error on each rank."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from zcomm import compat
from zcomm.hangs import detector, observer
from zcomm.hangs.fingerprint import short_path
from zcomm.hangs.side_channel import SideChannel
from zcomm.hangs.verify import no_verification
from zcomm.testing import RankFailed, run_ranks

HERE = short_path(__file__)
WORLDS = pytest.mark.parametrize("world_size", [2, 4])
TRANSPORTS = pytest.mark.parametrize("transport", ["gloo", "auto"])


def short_limit_group(limit_s: float = 2.0) -> dist.ProcessGroup:
    """Make a group of all ranks with a short time limit, and use it once to set it up."""
    group = dist.new_group(timeout=timedelta(seconds=limit_s))
    zcomm.all_reduce(torch.zeros(4), group, label="first")
    return group


def failure_of(collective: Callable[[], Any]) -> str:
    with pytest.raises(zcomm.CollectiveFailed) as caught:
        collective()
    return str(caught.value)


def fetch_data() -> None:
    """Stay in the program until the others have timed out."""
    deadline_s = time.monotonic() + 20
    while not detector.is_aborted() and time.monotonic() < deadline_s:
        time.sleep(0.05)


def detector_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "zcomm-hang-detector"]


def findings(message: str) -> list[str]:
    """The diagnosis, equal on all ranks."""
    return message.partition("All ranks together:\n")[2].splitlines()


def rank_skips() -> str:
    group = short_limit_group()
    with zcomm.context("step 12"):
        if dist.get_rank() == 1:
            fetch_data()
        return failure_of(lambda: zcomm.all_reduce(torch.zeros(4), group, label="grad_bucket[3]"))


@TRANSPORTS
@WORLDS
def test_a_rank_that_does_not_come_is_named_with_its_line_on_every_rank(
    world_size: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZCOMM_TRANSPORT", transport)
    messages = run_ranks(rank_skips, world_size)
    members = "0, 1" if world_size == 2 else "0-3"
    assert len({tuple(findings(message)) for message in messages}) == 1, messages
    first, *_ = findings(messages[0])
    assert first.strip().startswith(
        f"Rank 1 has issued 1 collective of the group of ranks {members}, and is not waiting for any; it is at "
        f"step 12, {HERE}:{fetch_data.__code__.co_firstlineno + 4} in fetch_data < {HERE}:"
    )
    assert "for collective 2 of the group of ranks" in messages[0]
    assert "all_reduce sum 'grad_bucket[3]' of float32[4] (step 12, issued at " in messages[0]
    assert messages[0].startswith(f"all_reduce 'grad_bucket[3]' of float32[4] on cpu over {world_size} ranks failed ")
    assert "not issued: this world has failed before" in messages[1]


def rank_calls_another() -> str:
    group, rank, size = short_limit_group(), dist.get_rank(), dist.get_world_size()
    if rank == 1:
        whole = torch.zeros(2 * size)
        return failure_of(lambda: zcomm.all_gather(whole, torch.zeros(2), group, label="unit blocks.4"))
    return failure_of(lambda: zcomm.all_reduce(torch.zeros(4), group, label="unit blocks.3"))


@TRANSPORTS
@WORLDS
def test_a_rank_that_calls_another_collective_is_named_with_both(
    world_size: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZCOMM_TRANSPORT", transport)
    messages = run_ranks(rank_calls_another, world_size)
    assert len({tuple(findings(message)) for message in messages}) == 1, messages
    first, *_ = findings(messages[0])
    others = "ranks 0, 2, 3" if world_size > 2 else "rank 0"
    assert first.strip().startswith(
        f"Rank 1's collective 2 is all_gather 'unit blocks.4' of float32[{2 * world_size}] (issued at {HERE}:"
    )
    assert f"; on {others} it is all_reduce sum 'unit blocks.3' of float32[4] (issued at {HERE}:" in first


def rank_dies() -> None:
    group = short_limit_group()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    zcomm.all_reduce(torch.zeros(4), group, label="x")


@TRANSPORTS
@WORLDS
def test_a_rank_that_died_is_reported_as_gone(
    world_size: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZCOMM_TRANSPORT", transport)
    with pytest.raises(RankFailed) as caught:
        run_ranks(rank_dies, world_size)
    texts = [report.text for report in caught.value.reports if "All ranks together" in report.text]
    assert texts, caught.value
    assert all("Rank 1 is gone: its process has ended (process " in text for text in texts), texts


def rank_stops() -> str:
    group = short_limit_group()
    pids = zcomm.all_gather_object(os.getpid())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    try:
        return failure_of(lambda: zcomm.all_reduce(torch.zeros(4), group))
    finally:
        os.kill(pids[1], signal.SIGCONT)


def test_a_rank_that_is_stopped_does_not_answer() -> None:
    message, _ = run_ranks(rank_stops, 2)
    assert "Rank 1 does not answer (process " in message
    assert "look at the other ranks first" in message


def rank_is_stuck_elsewhere() -> str:
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    rank = dist.get_rank()
    zcomm.barrier()
    if rank == 0:
        return failure_of(lambda: zcomm.all_reduce(torch.zeros(4), pair, label="pair"))
    if rank == 3:
        fetch_data()
    return failure_of(lambda: zcomm.barrier(label="all"))


@TRANSPORTS
def test_the_chain_of_waits_is_followed_and_ranks_in_other_groups_fail_too(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZCOMM_TRANSPORT", transport)
    messages = run_ranks(rank_is_stuck_elsewhere, 4)
    for said in (
        "Rank 1 has issued 0 collectives of the group of ranks 0, 1, and waits for barrier 'all' of the default",
        "Rank 3 has issued 1 collective of the default group, and is not waiting for any; it is at ",
    ):
        assert said in messages[0]
    assert len({tuple(findings(message)) for message in messages}) == 1
    for rank in (1, 2):
        assert "aborted: another rank failed; see its traceback" in messages[rank]


def rank_has_no_store() -> str:
    original, compat.default_store = compat.default_store, lambda: None
    try:
        group = short_limit_group()
        if dist.get_rank() == 1:
            time.sleep(3)
            return ""
        return failure_of(lambda: zcomm.all_reduce(torch.zeros(4), group))
    finally:
        compat.default_store = original


def test_without_a_store_the_report_is_marked_as_this_ranks_own() -> None:
    message, _ = run_ranks(rank_has_no_store, 2)
    assert "Rank 0 waits for collective 2 of the group of ranks 0, 1: all_reduce sum of float32[4]" in message
    assert "The other ranks could not be asked: this world has no store that they share." in message


def rank_leaves(port: int) -> str:
    rank = dist.get_rank()
    dist.destroy_process_group()
    environ = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with zcomm.init(environ=environ, device="cpu", timeout_s=5) as world:
        zcomm.barrier()
        if rank == 0:
            return failure_of(lambda: zcomm.all_reduce(torch.zeros(4), label="late"))
        assert len(detector_threads()) == 1
        world.close()
        assert detector_threads() == []
    return ""


def test_a_rank_that_closed_its_world_has_left() -> None:
    message, _ = run_ranks(rank_leaves, 2, free_port())
    assert "Rank 1 has left the world after 1 collective of the default group." in message


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


SCRIPT = """
import os, sys, torch, zcomm
with zcomm.init(device="cpu", timeout_s=3) as world:
    zcomm.barrier()
    with zcomm.context("step 7"):
        if world.rank == 0 or sys.argv[1] == "no rank skips":
            zcomm.all_reduce(torch.ones(3), label="loss")
        zcomm.broadcast(torch.ones(3), label="weights")
"""


@TRANSPORTS
@pytest.mark.parametrize(("argument", "codes"), [("rank 1 skips", [1, 1]), ("no rank skips", [0, 0])])
def test_all_processes_of_a_job_end_with_the_same_error(
    argument: str, codes: list[int], transport: str, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), argument],
            env=os.environ | address | {"ZCOMM_TRANSPORT": transport, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=600)[1] for process in started]
    assert [process.returncode for process in started] == codes, said
    odd = f"broadcast from rank 0 'weights' of float32[3] (step 7, issued at {script}:8 in <module>)"
    texts = f"Rank 1's collective 2 is {odd}; on rank 0 it is all_reduce sum 'loss'"
    assert all((texts in text) == any(codes) for text in said), said


def rank_opens_many_worlds(port: int) -> tuple[int, int]:
    """Threads and open files that 50 worlds have left."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    environ = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    counts = []
    for _ in range(51):
        with zcomm.init(environ=environ, device="cpu", timeout_s=30):
            zcomm.all_reduce(torch.zeros(1))
        counts.append((len(detector_threads()), len(os.listdir("/proc/self/fd"))))
    return counts[-1][0], counts[-1][1] - counts[0][1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts files in /proc")
def test_fifty_worlds_leave_no_thread_and_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCOMM_TRANSPORT", "gloo")
    for num_threads, more_files in run_ranks(rank_opens_many_worlds, 2, free_port()):
        assert num_threads == 0
        assert more_files <= 0


def rank_destroys_its_group() -> int:
    zcomm.barrier()
    assert len(detector_threads()) == 1
    dist.destroy_process_group()
    deadline_s = time.monotonic() + 20
    while detector_threads() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return len(detector_threads())


def test_the_thread_ends_with_a_group_that_was_not_closed() -> None:
    assert run_ranks(rank_destroys_its_group, 2) == [0, 0]


def rank_gets_an_unsupported_dtype() -> list[str]:
    with pytest.raises(ValueError, match="this dtype"):
        zcomm.all_reduce(torch.zeros(2, dtype=torch.int16))
    zcomm.barrier()
    present = detector.start()
    assert present is not None
    return [entry.state.name for entry in present.ring(None).entries()]


def test_a_rejected_call_is_not_a_failure() -> None:
    assert run_ranks(rank_gets_an_unsupported_dtype, 2) == [["DONE", "DONE"], ["DONE", "DONE"]]


def test_a_world_of_one_has_no_detector() -> None:
    with zcomm.init(environ={}, device="cpu"):
        assert detector.start() is None
        assert detector_threads() == []


def test_outside_a_world_no_rank_is_asked() -> None:
    entry = observer.observer().record(zcomm.hangs.fingerprint.Call("barrier", "", 2), None, None)
    observer.observer().check(entry)
    assert observer.observer().explain(entry).startswith(" (A peer died")
    assert not detector.is_aborted()


def test_a_diagnosis_that_takes_too_long_times_out() -> None:
    forever = threading.Event()
    assert detector._within(0.01, lambda: str(forever.wait())) == ""
    assert detector._within(60.0, lambda: "found") == "found"
    forever.set()


class BrokenStore:
    """A store whose server has gone."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def broken(*_: object) -> None:
            raise RuntimeError(f"{name}: Connection reset by peer\nframe 0")

        return broken


def test_a_store_that_has_gone_is_reported_and_the_thread_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector, "_POLL_S", 0.0)
    with zcomm.init(environ={}, device="cpu") as world:
        lonely = detector.HangDetector(
            weakref.ref(world.group), 0, 2, SideChannel(BrokenStore(), 0, 2), no_verification
        )
        lonely.ring(None).add(zcomm.hangs.fingerprint.Call("barrier", "end", 2), None)
        lonely.serve()
        said = lonely.explain()
    assert said.startswith("Rank 0 waits for collective 1 of the default group: barrier 'end' (issued at ")
    assert "the store is gone, and perhaps rank 0 with it (add: Connection reset by peer)" in said
    assert "frame 0" not in said


def test_a_failure_does_not_change() -> None:
    with zcomm.init(environ={}, device="cpu") as world:
        lonely = detector.HangDetector(weakref.ref(world.group), 0, 2, None, no_verification)
        first = lonely.explain()
        lonely._set_failure("another")
        assert lonely.explain() == first


def leaves_while_its_program_runs_on() -> bool:
    """Return True if a rank that closes its world reads the frames of its running main thread."""
    looked = []
    real = detector.position
    detector.position = lambda frame: looked.append(frame) or real(frame)
    try:
        zcomm.barrier()
        detector.stop()
    finally:
        detector.position = real
    return bool(looked)


def test_a_rank_that_closes_its_world_reads_no_frames_of_a_running_thread() -> None:
    assert run_ranks(leaves_while_its_program_runs_on, 2) == [False, False]
