"""Fingerprints: contexts, lines, rings, and which group a verb belongs to."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zcomm
from zcomm.collectives.handles import start
from zcomm.hangs import detector, fingerprint, observer
from zcomm.hangs.fingerprint import RING_LENGTH, Call, CallState, Ring, position, short_path
from zcomm.testing import run_ranks

HERE = short_path(__file__)


class NoWork:
    def wait(self) -> None:
        """Nothing."""

    def is_completed(self) -> bool:
        return True


def a_call(label: str = "") -> Call:
    return Call("barrier", label, 2)


def test_contexts_nest_and_end_with_their_blocks() -> None:
    assert fingerprint.current_context() == ""
    with zcomm.context("step 12"):
        with zcomm.context("backward of blocks.3.mlp"):
            assert Ring("", ()).add(a_call(), None).context == "step 12, backward of blocks.3.mlp"
        assert fingerprint.current_context() == "step 12"
    with pytest.raises(KeyError), zcomm.context("step 13"):
        raise KeyError
    assert fingerprint.current_context() == ""


def test_a_context_holds_on_other_threads_and_blocks_may_overlap() -> None:
    first, second = zcomm.context("one"), zcomm.context("two")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(fingerprint.current_context()))
    thread.start()
    thread.join()
    second.__exit__(None, None, None)
    assert seen == ["two"]


def test_a_fingerprint_names_the_line_of_the_program_and_not_ours() -> None:
    line = sys._getframe().f_lineno + 1
    start(a_call("x"), NoWork, (), async_op=False)
    entry = observer.UNOBSERVED.entries()[-1]
    assert entry.site == f"{HERE}:{line} in test_a_fingerprint_names_the_line_of_the_program_and_not_ours"
    assert (entry.call.label, entry.state) == ("x", CallState.DONE)


def test_a_ring_forgets_the_oldest_and_counts_on() -> None:
    ring = Ring("", ())
    for _ in range(RING_LENGTH + 5):
        ring.add(a_call(), None)
    numbers = [entry.sequence for entry in ring.entries()]
    assert numbers == list(range(6, RING_LENGTH + 6))


def test_threads_get_numbers_of_their_own() -> None:
    ring = Ring("", ())
    threads = [threading.Thread(target=lambda: [ring.add(a_call(), None) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.sequence for entry in ring.entries()) == list(range(1, 201))


def test_a_fingerprint_keeps_no_tensor() -> None:
    tensor = torch.zeros(4)
    seen = weakref.ref(tensor)
    start(Call.of("all_reduce", "", 2, tensor), NoWork, (tensor,), async_op=False)
    del tensor
    gc.collect()
    assert seen() is None


def test_the_reduction_and_the_sender_have_names() -> None:
    assert Ring("", ()).add(a_call(), dist.ReduceOp.MAX).detail_text == "max"
    assert Ring("", ()).add(a_call(), 3).detail_text == "from rank 3"
    assert Ring("", ()).add(a_call(), None).detail_text == ""


def test_a_position_is_the_programs_frames_and_the_library_that_they_wait_in() -> None:
    here = position(sys._getframe())
    assert here[0].startswith(f"{HERE}:")
    assert len(here) == 4
    found: list[list[str]] = []
    with zcomm.traced(lambda _: found.append(position(sys._getframe(1)))):
        start(a_call(), NoWork, (), async_op=False)
    assert found[0][0].endswith("in <lambda>")
    assert "trace.py" in found[0][0], "the innermost frame is a library's and comes first"
    assert found[0][1].startswith(f"{HERE}:")


def test_paths_are_relative_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_path(str(tmp_path / "code" / "train.py")) == os.path.join("code", "train.py")
    assert short_path(threading.__file__) == "threading.py"
    assert short_path(os.path.join(os.sep, "x", "site-packages", "y", "z.py")) == os.path.join("y", "z.py")
    assert short_path(os.path.join(os.sep, "elsewhere", "a.py")) == os.path.join(os.sep, "elsewhere", "a.py")


def rank_uses_every_verb() -> list[tuple[str, str, int, str]]:
    """(title of the group, op, sequence, detail) of each fingerprint."""
    size = dist.get_world_size()
    group = dist.new_group(list(range(size)))
    for given in (group, None):
        zcomm.all_reduce(torch.zeros(2), given, op="max")
        zcomm.reduce_scatter(torch.zeros(1), torch.zeros(size), given)
        zcomm.all_gather(torch.zeros(size), torch.zeros(1), given)
        zcomm.broadcast(torch.zeros(1), given, source=1)
        zcomm.barrier(given)
    present = detector.start()
    assert present is not None
    rings = [present.ring(given) for given in (group, None)]
    return [(ring.title, e.call.op, e.sequence, e.detail_text) for ring in rings for e in ring.entries()]


def test_every_verb_is_filed_under_its_group() -> None:
    verbs = [("all_reduce", "max"), ("reduce_scatter", "sum"), ("all_gather", ""), ("broadcast", "from rank 1")]
    verbs.append(("barrier", ""))
    titles = ("the group of ranks 0, 1", "the default group")
    expected = [(title, op, at + 1, detail) for title in titles for at, (op, detail) in enumerate(verbs)]
    assert run_ranks(rank_uses_every_verb, 2) == [expected, expected]
