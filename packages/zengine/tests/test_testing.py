"""The small engine of tests trains, and its batches differ by index."""

from __future__ import annotations

import pytest
import torch

from zengine.testing import Regression, check_resumes, rank_batch, small_engine


def test_a_small_engine_is_what_a_plain_loop_computes() -> None:
    engine, plain = small_engine(optimizer={"type": "SGD", "params": {"lr": 0.5}}), Regression()
    loss = engine(rank_batch(1))
    engine.backward(loss)
    assert engine.step()
    plain(rank_batch(1)).backward()
    for ours, theirs in zip(engine.module.parameters(), plain.parameters()):
        torch.testing.assert_close(ours, theirs - 0.5 * theirs.grad)
    assert sum(param.numel() for param in plain.parameters()) == 21
    assert not torch.equal(rank_batch(0), rank_batch(1))
    assert small_engine(Regression(), train_micro_batch_size_per_gpu=4).train_batch_size() == 4


class Counting:
    """A loader of numbers; `forgets` on purpose."""

    def __init__(self, forgets: bool = False) -> None:
        self.at, self.forgets = 0, forgets

    def __iter__(self):
        self.at += 1
        yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": 0 if self.forgets else self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_loader_that_forgets_its_position_is_found() -> None:
    check_resumes(Counting, 3, 4)
    with pytest.raises(AssertionError):
        check_resumes(Counting, 3, 4, forgets=True)
