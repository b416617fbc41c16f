"""The small engine of tests trains, and rows differ by index."""

from __future__ import annotations

import torch

from zengine.testing import Regression, rank_batch, small_engine


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
