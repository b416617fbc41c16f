"""Weights that rest on a drive or on the host: equal outputs, and two blocks at a time."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from streamed_blocks import IDS, Model, held
from torch import nn

import zengine.deepspeed as deepspeed
from zengine.deepspeed.inference.config import DeepSpeedInferenceConfig
from zengine.inference.offload import DriveRest, HostRest, WeightStream, block_list
from zengine.inference.quantized_modules import QuantizedLinear


def nvme(path: Path, **given: Any) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(path)}
    return {"dtype": "fp32", "zero": {"stage": 3, "offload_param": offload}, **given}


@pytest.fixture
def most_held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of blocks with weights, at every start of one."""
    found: list[int] = []
    acquire = WeightStream.acquire

    def counted(self: WeightStream, index: int) -> None:
        acquire(self, index)
        found.append(sum(bool(tensor.numel()) for packed in self.packed for tensor in packed.tensors[:1]))

    monkeypatch.setattr(WeightStream, "acquire", counted)
    return found


FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"dtype": "int8"},
    "int4": {"quant": {"weight": {"num_bits": 4}}},
    "some": {"quant": {"weight": {"post_init_quant": {"blocks.1.up": {"num_bits": 4}}}}},
}


@pytest.mark.parametrize("case", FORMATS)
@pytest.mark.parametrize("is_on_meta", [False, True], ids=["in memory", "on meta"])
def test_blocks_on_a_drive_give_the_same_outputs(
    case: str, is_on_meta: bool, tmp_path: Path, most_held: list[int]
) -> None:
    given = {"dtype": "fp32", **FORMATS[case]}
    wanted = deepspeed.init_inference(Model(), given)
    with torch.device("meta" if is_on_meta else "cpu"):
        model = Model()
    if is_on_meta:
        safetensors.torch.save_file(Model().state_dict(), tmp_path / "model.safetensors")
        given["checkpoint"] = str(tmp_path)
    engine = deepspeed.init_inference(model, nvme(tmp_path, **given))
    assert held(model) == [False] * 5
    for skips in (False, True, False):
        assert torch.equal(engine(IDS, skips), wanted(IDS, skips))
        assert held(model) == [False] * 5
    assert most_held == [1] * 14
    assert isinstance(model.blocks[1].up, QuantizedLinear) == (case != "plain")


def test_memory_is_that_of_two_blocks(tmp_path: Path) -> None:
    model = Model()
    tensors = [sum(param.nbytes for param in block.parameters()) for block in model.blocks]
    engine = deepspeed.init_inference(model, nvme(tmp_path))
    engine(IDS)
    stream = engine._stream
    assert max(tensors) <= stream.buffer_bytes / 2 < max(tensors) + 6 * 4096, "one buffer is one block, padded"
    assert stream.resting_bytes >= sum(tensors)
    assert sum(param.nbytes for param in model.parameters()) < 8_000, "embedding, norm and head"


def test_a_failed_block_is_left_without_weights(tmp_path: Path) -> None:
    engine = deepspeed.init_inference(Model(), nvme(tmp_path))
    wanted = engine(IDS)
    with pytest.raises(IndexError):
        engine(IDS + 100)
    handle = engine.module.blocks[1].up.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine(IDS)
    assert held(engine.module) == [False] * 5
    handle.remove()
    assert torch.equal(engine(IDS), wanted)


def test_a_cast_after_the_start_casts_the_resting_blocks(tmp_path: Path) -> None:
    engine = deepspeed.init_inference(Model(), nvme(tmp_path))
    engine.bfloat16()
    assert torch.equal(engine(IDS), Model().bfloat16()(IDS))


def test_a_state_dict_without_the_blocks_is_rejected(tmp_path: Path) -> None:
    engine = deepspeed.init_inference(Model(), nvme(tmp_path))
    for each in (engine, engine.module):
        with pytest.raises(RuntimeError, match=r"blocks of Model rest outside of the device.*from the checkpoint"):
            each.state_dict()


def test_a_folder_that_is_absent_is_made(tmp_path: Path) -> None:
    engine = deepspeed.init_inference(Model(), nvme(tmp_path / "not" / "yet"))
    assert torch.equal(engine(IDS), Model()(IDS))


def test_the_folder_is_removed_with_the_engine(tmp_path: Path) -> None:
    engine = deepspeed.init_inference(Model(), nvme(tmp_path))
    engine(IDS)
    assert len(list(tmp_path.iterdir())) == 1
    del engine
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_blocks_on_the_host_are_copied_to_buffers() -> None:
    model, wanted = Model().eval(), Model().eval()(IDS)
    found, stream = block_list(model), WeightStream(HostRest(pins=False), torch.device("cpu"))
    for block in found.blocks.values():
        stream.park(block, found.resting(block))
    with torch.no_grad():
        assert torch.equal(model(IDS), wanted)
    assert held(model) == [False] * 5


def test_blocks_for_another_device_pass_the_host(tmp_path: Path) -> None:
    model, wanted = Model().eval(), Model().eval()(IDS)
    found, stream = block_list(model), WeightStream(DriveRest(str(tmp_path), stages=True), torch.device("cpu"))
    for block in found.blocks.values():
        stream.park(block, found.resting(block))
    with torch.no_grad():
        assert torch.equal(model(IDS), wanted)


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[4].norm.weight = self.norm.weight
        self.blocks[0].up.bias = self.blocks[4].up.bias


def test_shared_tensors_stay(tmp_path: Path) -> None:
    wanted = Tied().eval()(IDS)
    engine = deepspeed.init_inference(Tied(), nvme(tmp_path))
    assert engine.module.blocks[4].norm.weight is engine.module.norm.weight
    assert engine.module.norm.weight.numel() == 32
    assert torch.equal(engine(IDS), wanted)
    with torch.device("meta"):
        model = Tied()
    safetensors.torch.save_file(
        {k: v.clone() for k, v in Tied().state_dict().items()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match="blocks of Tied share weights and are on the meta device"):
        deepspeed.init_inference(model, nvme(tmp_path, checkpoint=str(tmp_path)))


def test_what_is_not_streamed_is_told(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING, "zengine"):
        engine = deepspeed.init_inference(
            Model(), {"dtype": "fp32", "zero": {"stage": 3, "offload_param": {"device": "cpu"}}}
        )
    assert "on a CPU the host has the weights already" in caplog.text
    assert held(engine.module) == [True] * 5
    caplog.clear()
    with caplog.at_level(logging.WARNING, "zengine"):
        deepspeed.init_inference(Model(), nvme(tmp_path, replace_with_kernel_inject=True))
    assert "weights that are streamed are not fused" in caplog.text
    with pytest.raises(ValueError, match="Linear has no list of blocks"):
        deepspeed.init_inference(nn.Linear(2, 2), nvme(tmp_path))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"zero": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme_path is missing"),
        ({"zero": {"stage": 3, "offload_param": {"device": "disk"}}}, "offload_param.device"),
        ({"zero": {"stage": 3, "offload": 1}}, "unknown key"),
    ],
)
def test_sections_that_cannot_be_honoured_are_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DeepSpeedInferenceConfig.of(given)


def test_stages_without_effect_are_told(caplog: pytest.LogCaptureFixture) -> None:
    (notice,) = DeepSpeedInferenceConfig.of({"zero": {"stage": 2, "offload_param": {"device": "cpu"}}}).notices
    assert "only stage 3 streams weights" in notice
    with caplog.at_level(logging.WARNING, "zengine"):
        engine = deepspeed.init_inference(Model(), {"dtype": "fp32", "zero": {"stage": 3}})
    assert "shares weights between ranks, and each has its own here" in caplog.text
    assert held(engine.module) == [True] * 5
