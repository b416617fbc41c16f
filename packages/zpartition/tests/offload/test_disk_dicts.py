"""State dicts of an optimizer on disk equal those in memory, and load."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from zpartition import Offload, Tier, make_state
from zpartition.testing import differing, fingerprint, make, train


def test_state_dicts_go_both_ways(tmp_path: Path) -> None:
    disk = Offload(states=Tier.DISK, directory=str(tmp_path), ratio=0.7)
    (model, optimizer, partition), (other, plain, apart) = (make(o, 1, torch.bfloat16) for o in (disk, Offload()))
    fresh = copy.deepcopy(optimizer.state_dict())
    assert not fresh["state"]
    for each, how, what in ((model, optimizer, partition), (other, plain, apart)):
        train(what, each, how, range(3), 1)
    saved, expected = optimizer.state_dict(), plain.state_dict()
    on_disk = [s.master for s in partition.storages if s.placement.tier is Tier.DISK]
    assert on_disk
    assert not any(master in optimizer.state for master in on_disk)
    assert saved["param_groups"] == expected["param_groups"]
    assert saved["state"].keys() == expected["state"].keys()
    for number, entry in expected["state"].items():
        assert all(torch.equal(saved["state"][number][key], entry[key]) for key in entry)

    before = fingerprint(partition, model)
    train(partition, model, optimizer, range(3, 4), 1)
    assert any(name.startswith("exp_avg") for name in differing(before, fingerprint(partition, model)))
    optimizer.load_state_dict(copy.deepcopy(expected))
    assert not any(master in optimizer.state for master in on_disk)
    assert not [name for name in differing(before, fingerprint(partition, model)) if name.startswith("exp_avg")]
    optimizer.load_state_dict({**copy.deepcopy(expected), "state": {}})
    assert not optimizer.state_dict()["state"]
    train(partition, model, optimizer, range(4, 5), 1)
    assert optimizer.state_dict()["state"]
    make_state(optimizer, partition.holders, lambda name: {}).hand_over()  # a checkpoint from before the first step
    assert not optimizer.state_dict()["state"]
    partition.close()
    assert not optimizer._optimizer_state_dict_pre_hooks
    apart.close()
