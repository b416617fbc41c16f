import gc
from pathlib import Path

import pytest
import torch

import zckpt
from zckpt import Shard, collector_paused, save


def test_the_collector_is_off_inside_and_on_after_even_an_error() -> None:
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), collector_paused():
        raise ValueError("inside")
    assert gc.isenabled()


def test_a_collector_that_the_program_has_disabled_stays_so() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_verbs_that_a_program_waits_for_postpone_it(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Noting:
        name, global_shape, box, span = "w", (3,), ((0, 3),), (0, 3)

        @property
        def tensor(self) -> torch.Tensor:
            seen.append(gc.isenabled())
            return torch.ones(3)

    save(tmp_path, "a", shards=[Noting()])
    zckpt.load(tmp_path, tensors=[Noting()])
    assert seen
    assert not any(seen)
    assert gc.isenabled()
    with zckpt.AsyncSaver() as saver:
        saver.save(tmp_path, "b", shards=[Shard("w", (3,), ((0, 3),), (0, 3), torch.ones(3))]).wait()
        assert gc.isenabled()
