"""Sources: checkpoints of zckpt, lists of DeepSpeed, torch's files; what is no source is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zckpt
from zengine.inference import load_model
from zengine.inference.loading.checkpoint_lists import is_checkpoint_list, read_checkpoint_list
from zengine.inference.loading.sources import open_source
from zengine.inference.quantized_modules import QuantizedLinear, quantize_linears
from zprecision.quant import Int8

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """Tied weights, a buffer, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(24, 64), nn.Linear(64, 24, bias=False)
        self.head.weight = self.tokens.weight
        self.up = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("shift", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(x) * self.scale + self.shift)


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def eight_bits() -> Model:
    made = Model()
    quantize_linears(made, lambda _name: Int8())
    return made


def check(given: Any) -> None:
    plain, quantized = load_model(given, module=on_meta()), load_model(given, module=on_meta(), format="int8")
    assert torch.equal(plain.module(X), Model()(X))
    assert torch.equal(quantized.module(X), eight_bits()(X))
    assert isinstance(quantized.module.head, QuantizedLinear)
    assert torch.equal(quantized.module.tokens.weight, Model().tokens.weight)
    assert plain.decoder is None
    assert "RuntimeError" in plain.reason, "its forward takes no token ids"


def test_a_checkpoint_of_an_engine_or_its_root(tmp_path: Path) -> None:
    state = {f"model.{name}": each for name, each in Model().state_dict().items() if name != "head.weight"}
    state["optimizer.exp_avg.up.weight"] = torch.zeros(64, 64)
    objects: dict[str, Any] = {"tied": {"head.weight": "tokens.weight"}}
    folder = zckpt.save(tmp_path, "one", shards=[zckpt.whole(*each) for each in state.items()], objects=objects)
    check(folder)
    check(tmp_path)
    with open_source(folder) as source:
        assert source.tensors["up.weight"].get_shape() == [64, 64]
        assert torch.equal(source.tensors["up.weight"][3:5, :7], Model().up.weight[3:5, :7])
        assert set(source.tensors) == set(Model().state_dict())
        with pytest.raises(TypeError, match="is not a box"):
            source.tensors["up.weight"][::2]


def test_files_of_torch_and_lists_of_them(tmp_path: Path) -> None:
    state = list(Model().state_dict().items())
    torch.save({"module": dict(state)}, tmp_path / "all.pt")
    torch.save(dict(state[:2]), tmp_path / "a.pt")
    torch.save(dict(state[2:]), tmp_path / "b.bin")
    check(tmp_path / "all.pt")
    for kind in ("ds_model", "BLOOM"):
        check({"type": kind, "checkpoints": ["a.pt", "b.bin"], "base_dir": str(tmp_path)})
    listed = {"type": "Megatron", "checkpoints": "all.pt", "version": 0, "tp_size": 1}
    (tmp_path / "list.json").write_text(json.dumps(listed))
    check(tmp_path / "list.json")


WRONG: dict[str, tuple[Any, str]] = {
    "an unknown type": ({"type": "gpt", "checkpoints": ["a.pt"]}, "has the type 'gpt': use 'ds_model', 'BLOOM' or"),
    "no type": ({"checkpoints": ["a.pt"]}, "has the type None"),
    "unknown keys": ({"type": "bloom", "checkpoint": ["a.pt"]}, "has unknown keys: checkpoint; allowed: base_dir"),
    "no files": ({"type": "bloom", "checkpoints": []}, r"has the checkpoints '\[\]': it must list names of files"),
    "files that are numbers": ({"type": "bloom", "checkpoints": [1]}, r"has the checkpoints '\[1\]'"),
    "files that no ranks have": (
        {"type": "ds_model", "checkpoints": {"non_tp": ["a.pt"], "tp": ["b.pt", "c.pt"]}, "tp_size": 4},
        "has the tp_size 4 and 2 files: all ranks must have equally many",
    ),
    "a version": ({"type": "Megatron", "checkpoints": ["a.pt"], "version": 3}, "version 3.*of version 0, 1 or 2"),
    "a size of text": ({"type": "Megatron", "checkpoints": ["a.pt"], "tp_size": "2"}, "has the tp_size '2'"),
    "a folder of numbers": ({"type": "bloom", "checkpoints": ["a.pt"], "base_dir": 5}, "has the base_dir 5"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_lists_are_named(case: str, tmp_path: Path) -> None:
    given, told = WRONG[case]
    for name in ("a.pt", "b.pt", "c.pt"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=told):
        read_checkpoint_list(given, str(tmp_path))


def test_files_that_overlap_or_are_missing_are_named(tmp_path: Path) -> None:
    torch.save(Model().state_dict(), tmp_path / "a.pt")
    torch.save(Model().state_dict(), tmp_path / "b.pt")
    twice = {"type": "ds_model", "checkpoints": ["a.pt", "b.pt"]}
    with pytest.raises(ValueError, match=r"b\.pt and another file of checkpoint both hold 'scale'"):
        load_model(twice, module=on_meta(), base_dir=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"c\.pt: no such file; pass base_dir"):
        load_model({"type": "ds_model", "checkpoints": ["c.pt"]}, base_dir=str(tmp_path))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="and holds a list"):
        load_model(tmp_path / "list.json")
    (tmp_path / "list.json").write_text("{")
    with pytest.raises(ValueError, match=r"list\.json is no JSON"):
        load_model(tmp_path / "list.json")
    assert not is_checkpoint_list("model.safetensors.index.json")


def test_a_source_without_a_config_needs_a_module(tmp_path: Path) -> None:
    torch.save(Model().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no config\.json with a model_type beside it: pass module="):
        load_model(tmp_path)
    pytest.importorskip("transformers")
    for content, told in (
        ("[]", "must hold an object, and holds a list"),
        ('{"model_type": "nothing"}', "its config does not describe a causal language model"),
        (
            '{"model_type": "llama", "num_hidden_layers": 1000000000}',
            "says 1,000,000,000 layers, and it has 6",
        ),
        ('{"model_type": "gpt2", "n_layer": 1000000000}', "says 1,000,000,000 layers, and it has 6"),
        ('{"model_type": "llama", "hidden_size": -64}', "does not describe a causal language model: .*negative"),
        ('{"model_type": "llama", "hidden_size": "64"}', "does not describe a causal language model: .*hidden_size"),
        ('{"model_type": "llama", "pad_token_id": 1000000000}', "does not describe a causal .*: Padding_idx"),
        ('{"model_type": "llama", "quantization_config": 5}', "quantization_config of its config.json must be"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=told):
            load_model(tmp_path)
    with pytest.raises(zckpt.CheckpointNotFound):
        load_model(tmp_path / "absent")
    with pytest.raises(ValueError, match="'int3' names no format"):
        load_model(tmp_path, format="int3")
