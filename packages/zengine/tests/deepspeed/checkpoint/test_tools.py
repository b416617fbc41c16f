"""Tools for folders of DeepSpeed, used as scripts use them, on the fixtures that the real DeepSpeed wrote.

Golden tables are those of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.interchange import ForeignCheckpoint, read_deepspeed, write_torch_file
from zengine import deepspeed
from zengine.deepspeed import checkpoint
from zengine.deepspeed.checkpoint import DeepSpeedCheckpoint, constants, ds_to_universal, model_3d_desc
from zengine.deepspeed.checkpoint.reshape_meg_2d import get_mpu_ranks, reshape_meg_2d_parallel
from zengine.deepspeed.checkpoint.reshape_utils import merge_state, partition_data
from zengine.deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from zengine.deepspeed.utils import zero_to_fp32

FIXTURES = Path(__file__).resolve().parents[4] / "zckpt/tests/fixtures/deepspeed"
PIPELINE = FIXTURES / "pipe_zero1_fp32" / "global_step3"
needs_fixtures = pytest.mark.skipif(not FIXTURES.is_dir(), reason="needs the fixtures of zckpt's tests")


@pytest.mark.parametrize(
    ("source", "target", "wanted"),
    [
        ((2, 2, 2), (1, 1, 1), [{"0,0": [0, 4, 1, 5, 2, 6, 3, 7]}]),
        ((2, 2, 2), (1, 1, 2), [{"0,0": [0, 4, 1, 5]}, {"0,0": [2, 6, 3, 7]}]),
        ((2, 2, 2), (1, 2, 1), [{"0,0": [0, 4, 2, 6], "0,1": [1, 5, 3, 7]}]),
        ((2, 2, 2), (2, 1, 1), [{"0,0": [0, 4, 1, 5], "1,0": [2, 6, 3, 7]}]),
        ((3, 2, 1), (3, 1, 1), [{"0,0": [0, 1], "1,0": [2, 3], "2,0": [4, 5]}]),
    ],
)
def test_degrees_shrink_as_in_deepspeed(source: Any, target: Any, wanted: Any) -> None:
    tables = model_3d_desc(*source).reshape(model_3d_desc(*target))
    assert [table.map for table in tables] == wanted


def test_degrees_do_not_grow() -> None:
    small, large = model_3d_desc(1, 2, 1), model_3d_desc(2, 2, 2)
    is_valid, problems = small.can_reshape(large)
    assert not is_valid
    assert problems[0] == "Expansion reshape not supported - PP: 1 ---> 2"
    with pytest.raises(AssertionError, match="DP: 1 ---> 2"):
        small.reshape(large)
    assert large.is_valid(0, 2, 0) == (False, ["TP indexing error: index 2 >= degree 2"])
    assert (large.world_size(), large.get_desc()) == (8, "PP,TP,DP = (2, 2, 2)")
    with pytest.raises(AssertionError, match="cannot grow"):
        reshape_meg_2d_parallel(1, 1, 1, 2)
    with pytest.raises(AssertionError, match="5 items do not divide by 2"):
        partition_data([1, 2, 3, 4, 5], 2)


def test_ranks_of_megatrons_groups() -> None:
    tensor, pipeline, data = get_mpu_ranks(tp_size=2, pp_size=2, dp_size=2)
    assert tensor == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert pipeline == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert data == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_states_of_ranks_are_merged() -> None:
    a = {"w": torch.zeros(2), "n": 1, "l": [torch.ones(1)]}
    merged = merge_state(a, {"w": torch.ones(1), "n": 2, "l": [torch.zeros(1)], "x": 3})
    assert merged["w"].tolist() == [0, 0, 1]
    assert (merged["n"], merged["x"], merged["l"][0].tolist()) == (1, 3, [1, 0])
    with pytest.raises(ValueError, match="a dict and a list"):
        merge_state({}, [])
    with pytest.raises(ValueError, match="lists of 1 and 2 items"):
        merge_state([1], [1, 2])


@needs_fixtures
def test_a_pipelines_files_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    found = DeepSpeedCheckpoint(str(PIPELINE), final_layer_norm_idx=-1)
    assert (found.pp_degree, found.tp_degree, found.dp_degree, found.original_world_size) == (2, 1, 2, 4)
    assert found.layer_keys == ["layer_00", "layer_01", "layer_03", "layer_04"]
    assert (found.get_embedding_layer_id(), found.get_final_norm_layer_id()) == ("layer_00", "layer_04")
    assert found.get_pp_transformer_map(1) == ["layer_03"]
    assert set(found.get_embedding_state(0)) == {"word.weight"}
    assert found.get_final_norm_state(0)["weight"].shape == (5,)
    (layer,) = found.get_transformer_state(tp_index=0, pp_index=1)
    assert layer["up.weight"].shape == (7, 5)
    assert found.get_2d_parallel_state(tp_index=0, pp_index=1)["global_steps"] == 3
    assert (found.get_iteration(), found.get_args()) == (0, None)
    assert found.get_checkpoint_info("global_samples") == 36
    found.show_2d_mapping()
    assert "[1, 0] = " in capsys.readouterr().out
    found.validate_files()
    assert capsys.readouterr().out == ""


@needs_fixtures
def test_optimizer_shards_are_joined_for_fewer_ranks() -> None:
    alone = DeepSpeedCheckpoint(str(PIPELINE), dp_degree=1)
    assert alone.is_change_dp_degree()
    assert not alone.is_change_pp_degree()
    assert [Path(p).name[:14] for p in alone.get_zero_files(1, 0, 0)] == ["zero_pp_rank_0", "zero_pp_rank_1"]
    state = alone.get_zero_checkpoint_state(pp_index=1, tp_index=0, dp_index=0)["optimizer_state_dict"]
    assert state["partition_count"] == [1]
    moments = state["base_optimizer_state"]["state"][0]
    (masters,) = state["single_partition_of_fp32_groups"]
    with read_deepspeed(PIPELINE) as opened:
        ours = ForeignCheckpoint.of(opened)
        wanted = ours.tensor("optimizer.exp_avg.layers.3.up.weight").reshape(-1)
        assert torch.equal(moments["exp_avg"][55:90], wanted)
        assert torch.equal(masters[55:90], ours.tensor("model.layers.3.up.weight").reshape(-1))
    with pytest.raises(AssertionError, match="No ZeRO files"):
        checkpoint.ZeROCheckpoint(str(FIXTURES / "zero0_fp32" / "global_step3"))
    with pytest.raises(AssertionError, match="does not exist"):
        DeepSpeedCheckpoint(str(FIXTURES / "nothing"))


def test_constants_and_names_are_deepspeeds() -> None:
    assert constants.OPTIMIZER_STATE_DICT == checkpoint.OPTIMIZER_STATE_DICT == "optimizer_state_dict"
    assert constants.UNIVERSAL_CHECKPOINT_INFO == "universal_checkpoint_info"
    assert checkpoint.get_zero_ckpt_name_for_rank("a", 3, 1) == "a/zero_pp_rank_3_mp_rank_01_optim_states.pt"
    assert checkpoint.get_model_ckpt_name_for_rank("a", "02") == "a/mp_rank_02_model_states.pt"
    assert checkpoint.get_layer_ckpt_name_for_rank("a", "layer_03", 1) == "a/layer_03-model_01_model_states.pt"


@needs_fixtures
@pytest.mark.parametrize("case", ["zero2_fp16", "pipe_zero1_fp32"])
def test_the_tool_writes_what_deepspeeds_tool_wrote(tmp_path: Path, case: str) -> None:
    """As `python -m zengine.deepspeed.checkpoint.ds_to_universal`, beside the fixture of the real tool."""
    out = tmp_path / "global_step3_universal"
    command = ["--input_folder", str(FIXTURES / case / "global_step3"), "--output_folder", f"{out}/"]
    ds_to_universal.main(ds_to_universal.parse_arguments([*command, "--inject_missing_state"]))
    assert (tmp_path / "latest_universal").read_text() == out.name
    with read_deepspeed(tmp_path) as mine, read_deepspeed(FIXTURES / f"universal_{case}") as theirs:
        ours, wanted = ForeignCheckpoint.of(mine), ForeignCheckpoint.of(theirs)
        assert set(ours.names()) >= set(wanted.names())
        assert all(torch.equal(ours.tensor(name), wanted.tensor(name)) for name in wanted.names())
        for key in ("clock", "optimizer", "scheduler", "scaler", "client_state"):
            assert ours.objects[key] == wanted.objects[key]


def test_the_tool_refuses_what_it_cannot_convert(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    given = argparse.Namespace(input_folder=str(tmp_path), output_folder=str(tmp_path / "out"))
    with pytest.raises(zckpt.CheckpointInputError, match="is no checkpoint"):
        ds_to_universal.main(given)
    assert not (tmp_path / "out").exists()


@needs_fixtures
def test_files_by_kind_are_found_by_number(tmp_path: Path) -> None:
    for rank in (0, 2, 10):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    assert [Path(p).name[13:15] for p in zero_to_fp32.get_optim_files(tmp_path)] == ["0_", "2_", "10"]
    assert zero_to_fp32.get_model_state_file(PIPELINE, 1) == str(PIPELINE / "mp_rank_00_model_states.pt")
    assert len(zero_to_fp32.get_model_state_files(PIPELINE)) == 2
    for stage in (1, 3):
        with pytest.raises(FileNotFoundError, match="can't find model states file at"):
            zero_to_fp32.get_model_state_file(tmp_path, stage)
    with pytest.raises(FileNotFoundError, match="doesn't exist"):
        zero_to_fp32.get_model_state_file(tmp_path / "x", 1)


def test_a_parameter_loads_its_states_from_a_universal_folder(tmp_path: Path) -> None:
    """As Megatron-DeepSpeed's loader does: whole, or the part of a tensor rank."""
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    engine = deepspeed.initialize(model=torch.nn.Linear(3, 4), config={**config, "zero_optimization": {"stage": 2}})[
        0
    ]
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    weight: Any = engine.module.weight
    checkpoint.enable_universal_checkpoint([weight])
    saved = {
        "fp32": torch.arange(12.0).view(4, 3),
        "exp_avg": torch.ones(4, 3),
        "exp_avg_sq": torch.full((4, 3), 2.0),
    }
    for key, value in saved.items():
        write_torch_file(tmp_path / f"{key}.pt", {"cat_dim": 0, "param": torch.cat([value, value + 100])})
    write_torch_file(tmp_path / "step.pt", 7)
    assert weight.load_hp_checkpoint_state(str(tmp_path), tp_rank=1, tp_world_size=2) == 7
    assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(weight), saved["fp32"] + 100)
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(deepspeed.utils.safe_get_full_optimizer_state(weight, key), saved[key] + 100)
    with pytest.raises(zckpt.CheckpointMismatch, match=r"shape \(8, 3\), and the parameter \(4, 3\)"):
        weight.load_hp_checkpoint_state(str(tmp_path), tp_rank=0, tp_world_size=1)
    assert isinstance(engine.checkpoint_engine, TorchCheckpointEngine)
    assert engine._get_optimizer_ckpt_name("a", "t", 1) == "a/t/expp_rank_1_mp_rank_00_optim_states.pt"
    assert engine.sparse_tensor_module_names == set()
    info = checkpoint.SubparamShape(patterns=["a.*"], shape=((2, 2), 3), partition_dim=0)
    assert (info.patterns, info.partition_dim) == (["a.*"], 0)
    engine.close()
