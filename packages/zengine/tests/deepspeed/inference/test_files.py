"""Files of `init_inference`: quantized while they are read, lists of files, the packed model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import zengine.deepspeed as deepspeed
from zengine.inference.quantized_modules import QuantizedLinear

IDS = torch.arange(10)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norm, self.up = nn.Embedding(11, 64), nn.LayerNorm(64), nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) * self.scale
        return x + self.down(torch.relu(self.up(self.norm(x))))


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def wanted(dtype: str) -> Tensor:
    found: Tensor = deepspeed.init_inference(Model(), {"dtype": dtype})(IDS)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    safetensors.torch.save_file(Model().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("make", [Model, on_meta])
@pytest.mark.parametrize("dtype", ["int8", "fp32"])
def test_a_checkpoint_is_loaded_and_perhaps_quantized(make: Any, dtype: str, file: Path) -> None:
    engine = deepspeed.init_inference(make(), {"dtype": dtype, "checkpoint": file.name, "base_dir": str(file.parent)})
    assert isinstance(engine.module.up, QuantizedLinear) == (dtype == "int8")
    assert torch.equal(engine(IDS), wanted(dtype))


def test_a_list_of_files_is_loaded(tmp_path: Path) -> None:
    state = list(Model().state_dict().items())
    torch.save(dict(state[:3]), tmp_path / "a.pt")
    torch.save(dict(state[3:]), tmp_path / "b.pt")
    listed = {"type": "ds_model", "checkpoints": ["a.pt", "b.pt"], "version": 1.0}
    (tmp_path / "list.json").write_text(json.dumps(listed))
    for checkpoint in (str(tmp_path / "list.json"), {**listed, "base_dir": str(tmp_path)}):
        for dtype in ("int8", "fp32"):
            engine = deepspeed.init_inference(on_meta(), {"dtype": dtype, "checkpoint": checkpoint})
            assert torch.equal(engine(IDS), wanted(dtype))


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_a_packed_model_is_written_once_and_read_without_quantizing(
    with_checkpoint: bool, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "packed"
    given: dict[str, Any] = {"dtype": "int8", "save_mp_checkpoint_path": str(folder)}
    if with_checkpoint:
        given["checkpoint"] = str(file)
    first = deepspeed.init_inference(Model(), given)(IDS)
    assert torch.equal(first, wanted("int8"))
    monkeypatch.setattr("zengine.inference.quantized.quantize", None)
    engine = deepspeed.init_inference(on_meta(), {"dtype": "int8", "checkpoint": str(folder)})
    assert torch.equal(engine(IDS), first)


def test_a_packed_model_keeps_its_formats_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = str(tmp_path / "packed")
    deepspeed.init_inference(Model(), {"dtype": "int8", "save_mp_checkpoint_path": folder})
    deepspeed.init_inference(on_meta(), {"dtype": "int8", "checkpoint": folder})
    assert not caplog.records
    given = {"dtype": "fp32", "checkpoint": folder, "quant": {"weight": {"num_bits": 4}}}
    engine = deepspeed.init_inference(on_meta(), given)
    assert f"{folder} has int8 in 2 layers (up, ...), and the config asks for int4: they stay" in caplog.text
    assert torch.equal(engine(IDS), wanted("int8"))


def test_a_packed_model_is_not_split_again(file: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "packed")
    given = {"dtype": "int8", "checkpoint": str(file), "save_mp_checkpoint_path": folder}
    deepspeed.init_inference(on_meta(), given)
    told = "was written for 1 tensor-parallel rank, and this run has 2: start 1"
    with pytest.raises(ValueError, match=told):
        deepspeed.init_inference(
            on_meta(), {"dtype": "fp32", "checkpoint": folder, "tensor_parallel": {"tp_size": 2}}
        )
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    for other in ({"ep_size": 2}, {"zero": {"stage": 3, "offload_param": offload}}):
        with pytest.raises(ValueError, match=r"is a packed model, and .* whole weights"):
            deepspeed.init_inference(on_meta(), {"dtype": "int8", "checkpoint": folder, **other})


@pytest.mark.parametrize("dtype", ["int8", "fp32"])
def test_codes_are_not_read_as_weights(dtype: str, file: Path) -> None:
    state = Model().state_dict()
    safetensors.torch.save_file(state | {"up.weight": state["up.weight"].to(torch.int8)}, file)
    with pytest.raises(ValueError, match=r"does not fit Model: up\.weight is torch\.int8 in the files, and must be"):
        deepspeed.init_inference(Model(), {"dtype": dtype, "checkpoint": str(file)})


def test_files_that_do_not_fit_change_nothing(file: Path) -> None:
    safetensors.torch.save_file({"up.weight": torch.ones(3, 3)}, file)
    module = Model()
    told = r"does not fit Model.*missing: .*down\.weight.*up\.weight has shape \(3, 3\)"
    with pytest.raises(ValueError, match=told):
        deepspeed.init_inference(module, {"dtype": "int8", "checkpoint": str(file)})
    assert isinstance(module.up, nn.Linear)
    assert torch.equal(module.up.weight, Model().up.weight)
