"""Where the config and the group come from."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
from torch import nn

from zengine import ConfigError, add_config_arguments
from zengine.sources import data_parallel_group, pick_config


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


def test_no_source_says_how_to_give_one():
    with pytest.raises(ConfigError, match="Pass config="):
        pick_config(SimpleNamespace(), None, None)


def test_model_parallelism_of_an_mpu_is_refused_with_its_size():
    mpu = SimpleNamespace(get_model_parallel_world_size=lambda: 2, get_data_parallel_group=lambda: None)
    with pytest.raises(ValueError, match=r"get_model_parallel_world_size\(\) is 2"):
        data_parallel_group(mpu, None, nn.Module())


def test_an_mpu_without_model_parallelism_gives_its_group():
    group = object()
    mpu = SimpleNamespace(get_model_parallel_world_size=lambda: 1, get_data_parallel_group=lambda: group)
    assert data_parallel_group(mpu, None, nn.Module()) is group


def test_mpu_and_mesh_together_are_refused():
    with pytest.raises(ValueError, match="both mpu= and mesh="):
        data_parallel_group(object(), object(), nn.Module())


def test_a_mesh_of_several_axes_is_refused_with_its_axes():
    mesh = SimpleNamespace(ndim=2, mesh_dim_names=("dp", "tp"), shape=(2, 2))
    with pytest.raises(ValueError, match=r"axes \('dp', 'tp'\)"):
        data_parallel_group(None, mesh, nn.Module())
