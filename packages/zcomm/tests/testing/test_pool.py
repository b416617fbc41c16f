"""run_ranks: results, every way to fail, and what one task leaves for the next."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist

import zcomm
from zcomm.testing import Ending, RankFailed, end_ranks, run_ranks


@attrs.frozen
class Parcel:
    """A class of this file, to be sent both ways."""

    text: str
    tensor: torch.Tensor


def rank_sums(value: float, *, plus: float) -> torch.Tensor:
    tensor = torch.tensor([value + plus + dist.get_rank()])
    zcomm.all_reduce(tensor)
    return tensor


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_returns_its_value(world_size: int) -> None:
    sums = run_ranks(rank_sums, world_size, 10.0, plus=1.0)
    expected = world_size * 11.0 + sum(range(world_size))
    assert [each.item() for each in sums] == [expected] * world_size


def rank_echoes(parcel: Parcel) -> Parcel:
    assert type(parcel) is Parcel
    return Parcel(f"{parcel.text}{dist.get_rank()}", parcel.tensor + 1)


def test_values_of_the_tests_own_classes_travel_both_ways() -> None:
    first, second = run_ranks(rank_echoes, 2, Parcel("r", torch.arange(3)))
    assert type(first) is Parcel
    assert (first.text, second.text) == ("r0", "r1")
    assert second.tensor.tolist() == [1, 2, 3]


def test_a_function_of_an_installed_package_may_run() -> None:
    assert run_ranks(zcomm.group_rank, 2) == [0, 1]


def rank_returns_its_pid() -> int:
    return os.getpid()


def test_the_processes_stay_warm_between_tests() -> None:
    assert run_ranks(rank_returns_its_pid, 2) == run_ranks(rank_returns_its_pid, 2)


def test_a_rank_that_was_ended_while_idle_is_replaced() -> None:
    victim, other = run_ranks(rank_returns_its_pid, 2)
    os.kill(victim, signal.SIGKILL)
    while Path(f"/proc/{victim}").exists():  # until its parent, the fork server, has buried it
        time.sleep(0.01)
    assert not set(run_ranks(rank_returns_its_pid, 2)) & {victim, other}


# --- failures


def rank_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the true cause")
    zcomm.all_reduce(torch.ones(4), label="grad_bucket[1]")


def test_a_raising_rank_is_reported_first_with_its_own_traceback() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(rank_raises, 2)
    first, second = caught.value.reports
    assert (first.rank, first.ending, first.error) == (1, Ending.RAISED, "ValueError")
    assert 'raise ValueError("the true cause")' in first.text
    assert "rank.py" not in first.text, "the harness shows its own frames"
    assert (second.rank, second.ending) == (0, Ending.LOST_PEER)
    assert "grad_bucket[1]" in second.text
    message = str(caught.value)
    assert message.startswith("rank_raises failed on 2 ranks")
    assert message.index("the true cause") < message.index("rank 0 lost its peers (CollectiveFailed)")


def rank_dies(number: int) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    zcomm.all_reduce(torch.ones(4))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_killed_rank_is_reported_with_its_signal(name: str) -> None:
    with pytest.raises(RankFailed, match=rf"rank 1 died:\nkilled by {name}") as caught:
        run_ranks(rank_dies, 2, int(getattr(signal, name)))
    assert caught.value.reports[0].ending is Ending.DIED
    assert ("in rank_dies" in caught.value.reports[0].text) == (name == "SIGSEGV"), "a crash shows its Python stack"


def rank_exits() -> None:
    if dist.get_rank() == 0:
        os._exit(7)


def test_a_rank_that_exits_is_reported_with_its_code_and_the_others_as_returned() -> None:
    with pytest.raises(RankFailed, match=r"exited with code 7(.|\n)*returned normally: rank 1"):
        run_ranks(rank_exits, 2)


def rank_hangs() -> None:
    if dist.get_rank() == 1:
        sleeping_for_ever()
    zcomm.all_reduce(torch.ones(4))


def sleeping_for_ever() -> None:
    while True:
        time.sleep(0.05)


def test_hanging_ranks_are_reported_with_their_python_stacks() -> None:
    with pytest.raises(RankFailed, match=r"rank_hangs failed on 2 ranks: no answer within 0\.5 s") as caught:
        run_ranks(rank_hangs, 2, timeout_s=0.5)
    waiting, sleeping = caught.value.reports
    assert waiting.ending is sleeping.ending is Ending.HUNG
    assert "in all_reduce" in waiting.text
    assert "in sleeping_for_ever" in sleeping.text
    assert "in serve" not in sleeping.text, "the harness shows its own frames"


def rank_stops() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_rank_is_reported_and_does_not_hold_the_suite() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 was still running(.|\n)*stopped(.|\n)*returned normally: rank 0"):
        run_ranks(rank_stops, 2, timeout_s=0.3)


def rank_swallows_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    sleeping_for_ever()


def test_after_a_failure_every_old_process_is_gone_and_new_ones_work() -> None:
    before = run_ranks(rank_returns_its_pid, 2)
    with pytest.raises(RankFailed):
        run_ranks(rank_swallows_signals, 2, timeout_s=0.3)
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)
    assert not set(run_ranks(rank_returns_its_pid, 2)) & set(before)


def rank_compares() -> None:
    expected, found = [1, 2], [1, 3]
    assert expected == found


def test_a_bare_assert_shows_the_values() -> None:
    with pytest.raises(RankFailed, match=r"where expected = \[1, 2\]\n  where found = \[1, 3\]"):
        run_ranks(rank_compares, 1)


def rank_returns_a_lambda() -> Any:
    return lambda: None


def test_a_result_that_cannot_be_pickled_is_reported() -> None:
    with pytest.raises(RankFailed, match="returned a function that cannot be pickled"):
        run_ranks(rank_returns_a_lambda, 1)


def rank_prints_and_fails(path: str) -> None:
    sys.stdout = open(path, "w")  # noqa: SIM115 - buffered, and the process is about to end
    print("printed in the rank")
    raise ValueError


def test_what_a_rank_printed_is_not_lost_when_it_fails(tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        run_ranks(rank_prints_and_fails, 1, str(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "printed in the rank\n"


def rank_exits_politely() -> None:
    sys.exit(3)


def test_sys_exit_is_reported_like_an_exception() -> None:
    with pytest.raises(RankFailed, match="raised SystemExit"):
        run_ranks(rank_exits_politely, 1)


# --- misuse


def test_a_world_without_ranks_is_rejected() -> None:
    with pytest.raises(ValueError, match="a world size of at least 1, got 0"):
        run_ranks(rank_returns_its_pid, 0)


def test_arguments_that_cannot_travel_are_rejected() -> None:
    with pytest.raises(TypeError, match="cannot send the arguments of rank_echoes"):
        run_ranks(rank_echoes, 2, lambda: None)


def rank_nests() -> None:
    run_ranks(rank_returns_its_pid, 2)


def test_ranks_inside_ranks_are_rejected() -> None:
    with pytest.raises(RankFailed, match=r"run_ranks was called inside a rank process.*__main__"):
        run_ranks(rank_nests, 1)


# --- what one task leaves for the next


def rank_makes_a_mess() -> None:
    os.environ["MESS"] = "1"
    os.environ.pop("HOME", None)
    os.chdir("/")
    sys.path.insert(0, "/mess")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.set_deterministic_debug_mode("error")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_default_device("meta")
    sys.stdout = sys.stderr
    random.seed(9), np.random.seed(9), torch.manual_seed(9)


def rank_returns_its_state() -> dict[str, Any]:
    return {
        "mess": os.environ.get("MESS"),
        "home": os.environ.get("HOME"),
        "cwd": os.getcwd(),
        "path": "/mess" in sys.path,
        "dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "stdout": sys.stdout is sys.__stdout__,
        "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "random": [random.random(), float(np.random.rand()), torch.rand(()).item()],
    }


def test_nothing_that_a_function_sets_reaches_the_next_one() -> None:
    clean = run_ranks(rank_returns_its_state, 2)
    assert clean[0]["threads"] == 1
    run_ranks(rank_makes_a_mess, 2)
    assert run_ranks(rank_returns_its_state, 2) == clean
    assert clean[0]["random"] == clean[1]["random"]


def test_environment_and_working_directory_are_the_callers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESS", "from the caller")
    monkeypatch.setenv("SLURM_PROCID", "7")
    monkeypatch.chdir(tmp_path)
    state = run_ranks(rank_returns_its_state, 1)[0]
    assert (state["mess"], state["cwd"]) == ("from the caller", str(tmp_path))
    assert run_ranks(rank_reads_launch, 2) == [
        ["0", "2", "0", "2", "127.0.0.1", None],
        ["1", "2", "1", "2", "127.0.0.1", None],
    ]


def rank_reads_launch() -> list[str | None]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "SLURM_PROCID")
    return [os.environ.get(name) for name in names]


# --- whole processes

SCRIPT = """
import multiprocessing, os, helper, zcomm
from zcomm.testing import run_ranks

print("executed", flush=True)
run_ranks(zcomm.group_rank, 2)
print("pids", *[child.pid for child in multiprocessing.active_children()], flush=True)
{end}
"""
HELPER = """
import os, time

def rank_kills_the_test_and_goes_on(pid):
    os.kill(pid, 9)
    time.sleep(100)
"""
KILLED = "run_ranks(helper.rank_kills_the_test_and_goes_on, 2, os.getpid())"


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A temporary folder whose name leaves room for a socket's (tmp_path does not)."""
    with tempfile.TemporaryDirectory(prefix="z-") as folder:
        yield Path(folder)


def test_an_unguarded_script_runs_once_and_leaves_no_process_however_it_ends(short_folder: Path) -> None:
    (short_folder / "helper.py").write_text(HELPER)
    running = []
    for name, end, code in (("normal", "", 0), ("killed", KILLED, -9)):
        script = short_folder / f"{name}.py"
        script.write_text(SCRIPT.format(end=end))
        environ = {**os.environ, "TMPDIR": str(short_folder)}
        command = [sys.executable, str(script)]
        running.append((subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ), code))
    for process, code in running:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == code
        executed, pids = output.splitlines()
        assert executed == "executed"
        assert len(pids.split()) == 3
        await_end_of(pids.split()[1:])


PRELOADING = """
import sys
import zcomm.testing, helper
zcomm.testing.preload("colorsys", "no_such_module")
print(zcomm.testing.run_ranks(helper.rank_has, 1, ["colorsys", "no_such_module", "sndhdr"]))
"""
HAS = """
import sys

def rank_has(names):
    return [name in sys.modules for name in names]
"""


def test_ranks_find_imported_what_was_named_before_the_first_one_started(short_folder: Path) -> None:
    (short_folder / "helper.py").write_text(HAS)
    (short_folder / "script.py").write_text(PRELOADING)
    environ = {**os.environ, "TMPDIR": str(short_folder)}
    done = subprocess.run(
        [sys.executable, str(short_folder / "script.py")], capture_output=True, text=True, env=environ, timeout=100
    )
    assert done.stdout == "[[True, False, False]]\n", done.stderr


def await_end_of(pids: list[str]) -> None:
    deadline_s = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline_s, "rank processes outlived their parent"
        time.sleep(0.02)


def _pid() -> int:
    return os.getpid()


def test_ranks_can_be_ended_and_the_next_call_has_fresh_ones():
    first = run_ranks(_pid, 2)
    assert run_ranks(_pid, 2) == first
    end_ranks()
    assert not set(run_ranks(_pid, 2)) & set(first)
