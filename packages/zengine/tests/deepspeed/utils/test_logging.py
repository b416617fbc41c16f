"""DeepSpeed's logger is zengine's."""

from __future__ import annotations

import logging

import pytest

from zengine.deepspeed.utils import OnDevice, log_dist, logger, set_log_level
from zengine.deepspeed.utils import logging as logging_module


@pytest.mark.parametrize("has_group", [True, False])
def test_messages_come_from_the_ranks_that_were_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, has_group: bool
):
    monkeypatch.setattr(logging_module, "is_initialized", lambda: has_group)
    with caplog.at_level(logging.INFO, "zengine"):
        log_dist("for rank 0")
        log_dist("for all", ranks=[-1], level=logging.WARNING)
        log_dist("for rank 7", ranks=[7])
    without_ranks = [] if has_group else ["[rank 0] for rank 7"]  # a process alone says everything
    assert caplog.messages == ["[rank 0] for rank 0", "[rank 0] for all", *without_ranks]


def test_a_level_is_set_by_name_or_number():
    before = logger.level
    try:
        set_log_level("error")
        assert logger.level == logging.ERROR
        set_log_level(logging.DEBUG)
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)


def test_on_device_builds_elsewhere_in_another_dtype_and_undoes_it():
    import torch

    with OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = torch.nn.Linear(2, 2)
    assert (layer.weight.device.type, layer.weight.dtype) == ("meta", torch.bfloat16)
    with OnDevice(dtype=torch.bfloat16, enabled=False):
        assert torch.ones(1).dtype == torch.float32
    assert torch.nn.Linear(2, 2).weight.dtype == torch.float32
