"""The comparison of two runs finds what differs, down to one state of one parameter."""

from __future__ import annotations

import torch

from zpartition.offload import NOTHING
from zpartition.testing import differing, fingerprint, make, train


def test_two_runs_are_alike_until_one_number_is_not() -> None:
    found = []
    for _ in range(2):
        model, optimizer, partition = make(NOTHING, 0, torch.float32)
        train(partition, model, optimizer, range(2), 1)
        found.append(fingerprint(partition, model))
        partition.close()
    assert not differing(*found)
    found[0]["exp_avg.last.bias"][0] += 1
    assert differing(*found) == ["exp_avg.last.bias"]
