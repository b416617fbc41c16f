"""Sources of the config."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zengine import ConfigError, add_config_arguments
from zengine.initialize import pick_config


def test_each_single_source_is_taken():
    assert pick_config(None, {"a": 1}, None) == {"a": 1}
    assert pick_config(None, None, "x.json") == "x.json"
    args = add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed", "--deepspeed_config", "y.json"])
    assert pick_config(args, None, None) == "y.json"


def test_two_sources_are_a_conflict_that_names_both():
    args = SimpleNamespace(deepspeed_config="y.json")
    with pytest.raises(
        ConfigError, match=r"given 2 times \(config= is \{'a': 1\}, args.deepspeed_config is 'y.json'\)"
    ):
        pick_config(args, {"a": 1}, None)


def test_equal_sources_are_one(tmp_path: Path):
    path = tmp_path / "ds.json"
    path.write_text('{"a": 1e0, "b": {"c": "torch.float32"}} // the same')
    args, same = SimpleNamespace(deepspeed_config=str(path)), {"b": {"c": torch.float32}, "a": 1}
    assert pick_config(args, same, dict(same)) is same
    assert pick_config(args, path, None) is path
    assert pick_config(args, None, None) == str(path)
    with pytest.raises(ConfigError, match="given 3 times"):
        pick_config(args, same, {**same, "a": 2})


def test_no_source_says_how_to_give_one():
    with pytest.raises(ConfigError, match="Pass config="):
        pick_config(SimpleNamespace(), None, None)
