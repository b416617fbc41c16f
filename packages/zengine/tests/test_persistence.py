"""The engine's members that read and write runs and weights; what they do is in test_checkpointing."""

from __future__ import annotations

import torch
from torch import nn

import zengine


def _engine() -> zengine.Engine:
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    return zengine.initialize(model=nn.Linear(3, 1), config=config)[0]


def test_a_state_dict_has_the_names_of_the_module_and_loads_into_another_engine() -> None:
    first, second = _engine(), _engine()
    assert list(first.state_dict()) == list(first.module.state_dict()) == ["weight", "bias"]
    second.load_state_dict(first.state_dict())
    for name, value in second.state_dict().items():
        assert torch.equal(value, first.state_dict()[name])


def test_a_checkpoint_comes_back_with_its_folder_and_client_state(tmp_path) -> None:
    first, second = _engine(), _engine()
    folder = first.save_checkpoint(tmp_path, client_state={"epoch": 3})
    assert second.load_checkpoint(tmp_path) == (folder, {"epoch": 3})
    assert torch.equal(second.module.weight, first.module.weight)
