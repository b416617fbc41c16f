"""Moving structures, and looking at memory."""

from __future__ import annotations

import random
from pathlib import Path

import numpy
import pytest
import torch

from zcomm.testing import run_ranks
from zengine.deepspeed.runtime import utils


def test_tensors_in_structures_move_and_the_rest_stays():
    given = {"a": torch.ones(2), "b": [torch.ones(1), "text"], "c": (torch.ones(1), 3)}
    moved = utils.move_to_device(given, "meta")
    assert moved["a"].device.type == moved["b"][0].device.type == moved["c"][0].device.type == "meta"
    assert (moved["b"][1], moved["c"][1], type(moved["c"])) == ("text", 3, tuple)
    selected = torch.ones(2)
    assert utils.move_to_device([selected], "cpu", criterion_func=lambda tensor: True)[0] is selected
    kept = utils.copy_to_device(given, "meta", lambda item: isinstance(item, torch.Tensor) and item.numel() > 1)
    assert (kept["a"].device.type, kept["b"][0].device.type, kept["c"][1]) == ("meta", "cpu", 3)
    assert utils.get_tensor_bytes(given) == 16


def test_memory_is_told_when_it_is_insisted_upon(capsys: pytest.CaptureFixture[str]):
    utils.see_memory_usage("before")
    utils.see_memory_usage("after", force=True)
    utils.memory_status("status")
    utils.empty_cache()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "after"
    assert lines[1].startswith("MA ")
    assert "CPU Virtual Memory:  used = " in lines[2]
    assert lines[3].startswith("RANK=0 MEMSTATS status device=")
    assert utils.get_ma_status() > 0


def test_one_seed_is_for_all_generators():
    drawn = []
    for _ in range(2):
        utils.set_random_seed(2**40 + 3)
        drawn.append((random.random(), float(numpy.random.rand()), torch.rand(()).item()))
    assert drawn[0] == drawn[1]


def test_a_call_is_text():
    assert utils.call_to_str("int") == "int()"
    assert utils.call_to_str("int", 3, val="jeff") == "int(3, val='jeff')"


def test_small_helpers(tmp_path: Path):
    utils.ensure_directory_exists(tmp_path / "a" / "b.txt")
    assert (tmp_path / "a").is_dir()
    assert utils.get_only_unique_item([2, 2]) == 2
    with pytest.raises(RuntimeError, match="only one unique"):
        utils.get_only_unique_item([1, 2])
    empty, full = torch.nn.Parameter(torch.ones(0)), torch.nn.Parameter(torch.ones(2))
    assert utils.filter_empty_parameters([empty, full]) == [full]
    assert utils.filter_empty_parameters([{"params": [empty]}, {"params": [full], "lr": 1}]) == [
        {"params": [full], "lr": 1}
    ]
    assert utils.DummyOptim([full]).param_groups == [{"params": [full]}]
    assert utils.noop_decorator(test_a_call_is_text) is test_a_call_is_text
    with utils.noop_context():
        assert utils.get_inactive_params([full]) == []
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / "file").write_bytes(b"1234")
    assert run_ranks(utils.get_checkpoint_folder_size, 1, str(tmp_path), "tag", 0) == [4]


def test_structures_are_compared_with_their_tensors():
    assert utils.compare_tensors_in_structures([torch.ones(2), 1], [torch.ones(2), 1])
    assert not utils.compare_tensors_in_structures({"a": torch.ones(2)}, {"a": torch.zeros(2)})
    assert not utils.compare_tensors_in_structures([1], {"a": 1})
