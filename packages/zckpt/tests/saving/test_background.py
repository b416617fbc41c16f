from __future__ import annotations

import errno
import gc
import mmap
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zckpt
from zckpt import (
    LOCAL,
    AsyncSaver,
    CheckpointError,
    CheckpointExists,
    CheckpointInputError,
    CheckpointWarning,
    CheckpointWriteError,
    Peers,
    Shard,
    find,
    save_async,
    views,
)
from zckpt.saving.background import HostMemory
from zckpt.testing import FaultyStorage, run_threads


class Gate:
    """A storage that blocks the writer until it is released."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.storage = FaultyStorage(LOCAL, self.before)

    def before(self, operation: str, path: Path) -> None:
        if operation == "create" and path.name.endswith(".safetensors"):
            self.reached.set()
            assert self.open.wait(30)


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = net(torch.rand(8, 3, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def full(operation: str, path: Path) -> None:
    if operation == "write" and path.name.endswith(".safetensors"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_what_is_saved_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    gate, live, objects = Gate(), torch.arange(5.0), {"epochs": [1]}
    with AsyncSaver() as saver:
        handle = saver.save(tmp_path, "a", tensors={"w": live}, objects=objects, storage=gate.storage)
        live.zero_()
        objects["epochs"].append(2)
        assert gate.reached.wait(30)
        assert not handle.done
        with pytest.raises(TimeoutError, match=r"'a' is not done after 0\.01 s"):
            handle.wait(0.01)
        gate.open.set()
        assert handle.wait() == tmp_path / "a"
        assert handle.done
    assert find(tmp_path).tensor("w").tolist() == [0, 1, 2, 3, 4]
    assert find(tmp_path).objects == {"epochs": [1]}


def test_a_second_save_waits_and_has_the_memory_of_the_first(tmp_path: Path) -> None:
    gate, live = Gate(), torch.zeros(1000)
    with AsyncSaver() as saver:
        first = saver.save(tmp_path, tensors={"w": live}, storage=gate.storage, step=1)
        memory = first.job.shards[0].tensor.data_ptr()
        threading.Timer(0.05, gate.open.set).start()
        live.fill_(2)
        second = saver.save(tmp_path, tensors={"w": live}, step=2)
        assert first.done
        assert first.path is not None
        assert second.job.shards[0].tensor.data_ptr() == memory
        with pytest.raises(CheckpointInputError, match="the copy of 'step-1' is gone"):
            first.restore()
    assert [find(tmp_path, f"step-{n}").tensor("w")[0].item() for n in (1, 2)] == [0, 2]


class Copies(TorchDispatchMode):
    """Counts the bytes that operations write into memory, their own or another's."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            given = [each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)]
            is_view = found.untyped_storage().data_ptr() in given and not func._schema.is_mutable
            self.nbytes += 0 if is_view else found.nbytes
        return found


def test_a_call_copies_each_byte_once_and_does_nothing_else_with_it(tmp_path: Path) -> None:
    gate, state = Gate(), {f"w{n}": torch.rand(50_000 + n) for n in range(8)}
    with AsyncSaver() as saver:
        for step in range(2):
            with Copies() as copies:
                handle = saver.save(tmp_path, tensors=state, storage=gate.storage, step=step)
            assert copies.nbytes == sum(each.nbytes for each in state.values())
            assert not handle.done, "nothing is written before the call returns"
            gate.open.set()
            handle.wait()
            gate.open.clear()


def rise(work: Callable[[], object]) -> int:
    """How far the resident memory rises above what it is now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    before, _ = resident()
    work()
    return resident()[1] - before


def resident() -> tuple[int, int]:
    """Bytes of resident memory: now, and at most."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) << 10, int(lines["VmHWM"].split()[0]) << 10


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="cannot reset the high-water mark")
def test_one_copy_is_held_also_when_the_state_grows(tmp_path: Path) -> None:
    room = 40 << 20  # two writers with two buffers of 4 MiB each; huge pages
    state = {f"w{n}": torch.ones(2 << 20) for n in range(12)}
    nbytes = sum(each.nbytes for each in state.values())
    with AsyncSaver() as saver:

        def twice() -> None:
            for step in range(2):
                saver.save(tmp_path, tensors=state, step=step)
            saver.wait()

        first = rise(twice)
        assert nbytes < first < nbytes + room
        state["more"] = torch.ones(5 << 20)  # the buffer is too small now
        grown = rise(lambda: saver.save(tmp_path, tensors=state, step=2).wait())
        assert grown < 20 * (1 << 20) + room


def test_a_second_save_is_refused_if_that_is_asked_for(tmp_path: Path) -> None:
    gate = Gate()
    with AsyncSaver(when_busy="refuse") as saver:
        saver.save(tmp_path, "a", tensors={"w": torch.ones(2)}, storage=gate.storage)
        with pytest.raises(CheckpointInputError, match="the save of 'a' is not done: wait"):
            saver.save(tmp_path, "b")
        gate.open.set()
        saver.wait()
        saver.save(tmp_path, "b")
    assert [seen.tag for seen in zckpt.list_checkpoints(tmp_path)] == ["b", "a"]


def test_ranks_cannot_refuse_alone() -> None:
    class Two:
        rank, world_size = 0, 2

        def exchange(self, value: object) -> list[object]:
            raise AssertionError

    with pytest.raises(CheckpointInputError, match="ranks finish at different times"):
        AsyncSaver(Two(), "refuse")
    with pytest.raises(ValueError, match="sometimes"):
        AsyncSaver(when_busy="sometimes")


@pytest.mark.parametrize("where", ["save", "check", "wait", "close", "handle.wait", "handle.check", "with"])
def test_an_error_of_the_writer_is_raised_once_by_whoever_asks_first(tmp_path: Path, where: str) -> None:
    saver = AsyncSaver()
    zckpt.save(tmp_path, "good", tensors={"w": torch.ones(2)})
    handle = saver.save(tmp_path, "a", tensors={"w": torch.zeros(2)}, storage=FaultyStorage(LOCAL, full))
    assert handle.thread is not None
    handle.thread.join()
    asks = {
        "save": lambda: saver.save(tmp_path, "b"),
        "check": saver.check,
        "wait": saver.wait,
        "close": saver.close,
        "handle.wait": handle.wait,
        "handle.check": handle.check,
        "with": lambda: saver.__exit__(None, None, None),
    }
    with pytest.raises(CheckpointWriteError, match=r"the file needs [\d,]+ bytes, [\d,]+ are free"):
        asks[where]()
    with pytest.raises(CheckpointError, match="failed; its error was raised before"):
        handle.wait()
    assert [seen.tag for seen in zckpt.list_checkpoints(tmp_path)] == ["good"], "nothing was begun"
    if where not in ("close", "with"):
        saver.save(tmp_path, "b", tensors={"w": torch.ones(2)}).wait()  # the disk has room again
        assert find(tmp_path).tag == "b"
    saver.close()


def test_an_error_in_the_block_is_not_hidden_by_one_of_the_writer(tmp_path: Path) -> None:
    def loop() -> None:
        with AsyncSaver() as saver:
            saver.save(tmp_path, "a", tensors={"w": torch.zeros(2)}, storage=FaultyStorage(LOCAL, full))
            raise KeyError("mine")

    with pytest.warns(CheckpointWarning, match="a background save failed too"), pytest.raises(KeyError, match="mine"):
        loop()


def test_what_a_save_cannot_take_is_told_and_later_ones_go_on(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        handle = saver.save(tmp_path, "a", objects={"x": object()})
        with pytest.raises(CheckpointInputError, match=r"while planning: rank 0: objects\['x'\]"):
            handle.wait()
        saver.save(tmp_path, "b", tensors={"w": torch.zeros(2)}).wait()
        with pytest.raises(CheckpointExists):
            saver.save(tmp_path, "b").wait()


def test_the_copy_is_put_back_after_a_step_that_went_wrong(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    net[2].weight = torch.nn.Parameter(torch.rand(4, 2).t())  # not contiguous
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    train(net, optimizer, 2)
    extra = torch.arange(4.0)
    shard = Shard("extra", (8,), ((0, 8),), (4, 8), extra)
    other = Shard("extra", (8,), ((0, 8),), (0, 4), torch.zeros(4))
    gate = Gate()
    with AsyncSaver() as saver:
        handle = saver.save(
            tmp_path, "a", tensors=views(net, optimizer), shards=[shard, other], objects={"epoch": 1},
            rank_objects={"seed": 2}, storage=gate.storage,
        )  # fmt: skip
        expected = train(net, optimizer, 2)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(float("nan"))
        optimizer.param_groups[0]["lr"] = 7.0
        extra.zero_()
        handle.restore()  # the disk has nothing yet
        assert train(net, optimizer, 2) == expected
        assert extra.tolist() == [0, 1, 2, 3]
        assert (handle.objects, handle.rank_objects) == ({"epoch": 1}, {"seed": 2})
        gate.open.set()
    with pytest.raises(CheckpointInputError, match="is gone"):
        handle.restore()


def test_ranks_save_behind_the_back_of_their_loops_and_no_thread_is_left(tmp_path: Path) -> None:
    before = threading.active_count()

    def loop(peers: Peers) -> float:
        live = torch.full((10,), float(peers.rank))
        with AsyncSaver(peers) as saver:
            for step in range(3):
                shards = [Shard("w", (20,), ((0, 20),), (10 * peers.rank, 10 * peers.rank + 10), live)]
                saver.save(tmp_path, shards=shards, step=step)
                live += 10
                time.sleep(0.01 * peers.rank)
        return live[0].item()

    assert [each.error for each in run_threads(loop, 2)] == [None, None]
    assert find(tmp_path).step == 2
    assert find(tmp_path).tensor("w").tolist() == [20.0] * 10 + [21.0] * 10
    assert threading.active_count() == before


def test_a_rank_that_cannot_copy_is_every_ranks_error(tmp_path: Path) -> None:
    def loop(peers: Peers) -> None:
        with AsyncSaver(peers) as saver:
            saver.save(tmp_path, "a", rank_objects={"x": object() if peers.rank else 1})

    for outcome in run_threads(loop, 2):
        assert isinstance(outcome.error, CheckpointInputError)
        assert "rank 1: rank_objects['x']" in str(outcome.error)


def test_one_save_needs_no_saver(tmp_path: Path) -> None:
    before = threading.active_count()
    assert save_async(tmp_path, tensors={"w": torch.ones(3)}, step=9).wait() == tmp_path / "step-9"
    with AsyncSaver() as saver:
        save_async(tmp_path, saver=saver, step=10)
    assert find(tmp_path).step == 10
    assert threading.active_count() == before


def test_a_program_that_ends_finishes_what_it_has_begun(tmp_path: Path) -> None:
    program = (
        "import torch, zckpt, sys\n"
        "zckpt.save_async(sys.argv[1], 'a', tensors={'w': torch.ones(5_000_000)}, writers=4)\n"
        "raise SystemExit('the loop is over')"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.PIPE, timeout=600)
    assert ended.returncode == 1
    assert ended.stderr.strip().endswith(b"the loop is over")
    assert find(tmp_path, "a").tensor("w").sum() == 5_000_000


def test_an_error_that_nobody_asks_for_is_a_warning_when_the_handle_goes(tmp_path: Path) -> None:
    handle = save_async(tmp_path, "a", tensors={"w": torch.zeros(2)}, storage=FaultyStorage(LOCAL, full))
    assert handle.thread is not None
    handle.thread.join()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del handle
        gc.collect()
    (told,) = [str(each.message) for each in caught if each.category is CheckpointWarning]
    assert told.startswith(
        "the background save of 'a' failed and its error was never checked: CheckpointWriteError: "
    )
    asked = save_async(tmp_path, "a", tensors={"w": torch.zeros(2)}, storage=FaultyStorage(LOCAL, full))
    with pytest.raises(CheckpointWriteError):
        asked.wait()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del asked
        gc.collect()
    assert not [each for each in caught if each.category is CheckpointWarning]


def test_a_kernel_without_large_pages_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)  # EINVAL
    save_async(tmp_path, "a", tensors={"w": torch.ones(2)}).wait()
    assert find(tmp_path).tensor("w").tolist() == [1, 1]


@pytest.mark.parametrize("where", ["copy", "start"])
def test_a_saver_whose_save_did_not_begin_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt if where == "copy" else RuntimeError("can't start new thread")

    with AsyncSaver(when_busy="refuse") as saver:
        with monkeypatch.context() as patch:
            if where == "copy":
                patch.setattr(HostMemory, "copy_shards", interrupt)
            else:
                patch.setattr(threading.Thread, "start", interrupt)
            with pytest.raises((KeyboardInterrupt, RuntimeError)):
                saver.save(tmp_path, "a", tensors={"w": torch.ones(2)})
        assert saver.save(tmp_path, "b", tensors={"w": torch.ones(2)}).wait() == tmp_path / "b"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_tensors_are_copied_into_pinned_memory(tmp_path: Path) -> None:
    live = torch.rand(1000, device="cuda")
    saved = live.clone()
    with AsyncSaver() as saver:
        handle = saver.save(tmp_path, "a", tensors={"w": live})
        assert handle.job.shards[0].tensor.is_pinned()
        live.zero_()
        handle.restore()
        assert live.equal(saved)
    assert find(tmp_path).tensor("w").equal(saved.cpu())
