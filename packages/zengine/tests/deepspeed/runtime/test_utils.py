"""Moving structures, and looking at memory."""

from __future__ import annotations

import logging

import pytest
import torch

from zengine.deepspeed.runtime import utils


def test_tensors_in_structures_move_and_the_rest_stays():
    given = {"a": torch.ones(2), "b": [torch.ones(1), "text"], "c": (torch.ones(1), 3)}
    moved = utils.move_to_device(given, "meta")
    assert moved["a"].device.type == moved["b"][0].device.type == moved["c"][0].device.type == "meta"
    assert (moved["b"][1], moved["c"][1], type(moved["c"])) == ("text", 3, tuple)
    kept = utils.move_to_device(given, "meta", criterion_func=lambda tensor: tensor.numel() > 1)
    assert (kept["a"].device.type, kept["b"][0].device.type) == ("meta", "cpu")


def test_memory_is_told_when_it_is_insisted_upon(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "zengine"):
        utils.see_memory_usage("before")
        utils.see_memory_usage("after", force=True)
    utils.empty_cache()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("after: ")
