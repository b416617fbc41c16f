"""Folders quantized by GPTQ, AWQ and compressed-tensors: equal to the decoded weights; configs that are not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zengine.inference import load_model
from zengine.inference.loading.prequantized import with_whole_weights
from zengine.inference.quantized_modules import QuantizedLinear

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
}
IDS = torch.arange(3, 23)[None]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
}


BYTES = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}},
    "ignore": ["lm_head"],
}


def words(values: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack codes of four bits along an axis."""
    moved = np.moveaxis(values, axis, -1).astype(np.uint32)
    found = sum(moved[..., element::8] << np.uint32(4 * place) for place, element in enumerate(order))
    return torch.from_numpy(np.moveaxis(found, -1, axis).copy().view(np.int32))


def parts_of(method: str, weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """The parts of a layer with random codes, and its values."""
    rng, (rows, columns) = np.random.default_rng(seed), weight.shape
    group = AWQ["group_size"] if method == "awq" else 32
    index = np.arange(columns) // group
    if method == "act-order":
        index = rng.permutation(index)
    codes = rng.integers(0, 16, (rows, columns))
    scales = rng.uniform(0.01, 0.04, (rows, columns // group)).astype(np.float16)
    zeros = rng.integers(1, 16, scales.shape) if method == "awq" else np.full(scales.shape, 8)
    values = torch.from_numpy((codes - zeros[:, index]) * scales.astype(np.float64)[:, index])
    if method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        made = {"qweight": words(codes.T, 1, order), "qzeros": words(zeros.T, 1, order)}
        return made | {"scales": torch.from_numpy(scales.T.copy())}, values
    if method == "bytes":
        codes = rng.integers(-128, 128, (rows, columns))
        row_scales = rng.uniform(0.0005, 0.002, (rows, 1)).astype(np.float16)
        made = {"weight": torch.from_numpy(codes.astype(np.int8)), "weight_scale": torch.from_numpy(row_scales)}
        return made, torch.from_numpy(codes * row_scales.astype(np.float64))
    if method == "compressed":
        shape = torch.tensor([rows, columns])
        return {
            "weight_packed": words(codes, 1),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": shape,
        }, values
    made = {
        "qweight": words(codes.T, 0),
        "qzeros": words(zeros.T - 1, 1),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return made | {"g_idx": torch.from_numpy(index.astype(np.int32))}, values


def write(folder: Path, method: str, config: dict[str, Any], name: str = "config.json") -> Any:
    """Write a quantized LLaMA; return the module with the decoded weights."""
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    state: dict[str, Tensor] = {}
    for at, (layer, param) in enumerate(made.named_parameters()):
        if "proj" not in layer:
            state[layer] = param.detach().clone()
            continue
        parts, values = parts_of(method, param, at)
        state |= {f"{layer.removesuffix('.weight')}.{part}": each for part, each in parts.items()}
        with torch.no_grad():
            param.copy_(values)
    safetensors.torch.save_file(state, folder / "model.safetensors")
    own = {"model_type": "llama", **SIZES, "torch_dtype": "float16"}
    if name == "config.json":
        own["quantization_config"] = config
    else:
        (folder / name).write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(own))
    return made


CASES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "gptq": ("gptq", GPTQ, {"int4"}),
    "gptq in the order of activations": ("act-order", GPTQ, set()),
    "awq": ("awq", AWQ, {"int8-g64", "int8-row"}),
    "compressed-tensors": ("compressed", COMPRESSED, {"int4"}),
    "compressed-tensors in bytes": ("bytes", BYTES, {"int8-row"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_equals_the_module_with_the_decoded_weights(case: str, tmp_path: Path) -> None:
    method, config, formats = CASES[case]
    wanted = write(tmp_path, method, config)
    loaded = load_model(tmp_path)
    assert {row.format for row in loaded.report.layers} == formats
    assert len(loaded.report.layers) == (7 if formats else 0)
    for name, param in wanted.named_parameters():
        layer = loaded.module.get_submodule(name.removesuffix(".weight"))
        is_quantized = isinstance(layer, QuantizedLinear)
        found = layer.weight.dequantize(torch.float32) if is_quantized else layer.weight
        assert torch.equal(found, param), name
    with torch.no_grad():
        found, expected = loaded.module(IDS).logits, wanted(IDS).logits
    assert (found - expected).norm() <= (0.03 if formats else 0.0) * expected.norm()
    assert loaded.decoder is not None, loaded.reason


@pytest.mark.parametrize("case", CASES)
def test_init_inference_keeps_the_codes_of_a_folder(case: str, tmp_path: Path) -> None:
    method, config, formats = CASES[case]
    write(tmp_path, method, config)
    wanted = load_model(tmp_path, dtype=torch.float32)
    with torch.device("meta"):
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    for model, given in ((str(tmp_path), {}), (tmp_path, {}), (made, {"checkpoint": str(tmp_path)})):
        engine = deepspeed.init_inference(model, dtype="fp32", replace_with_kernel_inject=True, **given)
        layers = [each for each in engine.module.modules() if isinstance(each, QuantizedLinear)]
        assert len(layers) == (7 if formats else 0)
        assert torch.equal(engine(IDS).logits, wanted.module(IDS).logits)
        assert engine._fused is not None
        tokens = engine.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert tokens.shape == (1, IDS.shape[1] + 3)


def _split_codes(folder: Path) -> tuple[bool, int, bool]:
    """Whether two ranks compute what one does, the quantized layers of this one, and whether it is fused."""
    given = {"dtype": "fp32", "replace_with_kernel_inject": True, "max_out_tokens": 40}
    whole = deepspeed.init_inference(folder, given)
    split = deepspeed.init_inference(folder, {**given, "tensor_parallel": {"tp_size": 2}})
    layers = [each for each in split.module.modules() if isinstance(each, QuantizedLinear)]
    assert {each.weight.format for each in layers} == {
        each.weight.format for each in whole.module.modules() if isinstance(each, QuantizedLinear)
    }
    assert sum(each.weight.nbytes for each in layers) < 0.6 * sum(
        each.weight.nbytes for each in whole.module.modules() if isinstance(each, QuantizedLinear)
    )
    return torch.equal(split(IDS).logits, whole(IDS).logits), len(layers), split._fused is not None


@pytest.mark.parametrize("case", ["gptq", "awq", "compressed-tensors in bytes"])
def test_tensor_ranks_split_the_codes_of_a_folder(case: str, tmp_path: Path) -> None:
    method, config, _ = CASES[case]
    write(tmp_path, method, config)
    assert run_ranks(_split_codes, 2, tmp_path) == [(True, 7, True)] * 2


def test_init_inference_says_what_to_do_with_models_of_other_quantizers(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.hf_quantizer, model.quantization_method = object(), "gptq"
    with pytest.raises(
        ValueError, match=r"Transformers quantized \(gptq\): pass the folder instead, init_inference\("
    ):
        deepspeed.init_inference(model, dtype="fp32")
    write(tmp_path, "gptq", {"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(ValueError, match=r"quantized by 'bitsandbytes': gptq, awq and compressed-tensors are read"):
        deepspeed.init_inference(tmp_path)
    with pytest.raises(ValueError, match=r"got the model '.*' and checkpoint='other': give the weights once"):
        deepspeed.init_inference(str(tmp_path), checkpoint="other")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no config\.json with a model_type"):
        deepspeed.init_inference(tmp_path)


def test_codes_in_the_order_of_activations_are_quantized_again_if_asked(tmp_path: Path) -> None:
    write(tmp_path, "act-order", GPTQ)
    rows = load_model(tmp_path, format="int8").report.layers
    assert {row.format for row in rows} == {"int8"}
    assert all(row.error > 0 for row in rows)


def test_the_older_place_of_a_config_is_read(tmp_path: Path) -> None:
    wanted = write(tmp_path, "gptq", {key: GPTQ[key] for key in ("bits", "group_size")}, "quantize_config.json")
    found = load_model(tmp_path).module.model.layers[0].mlp.up_proj.weight.dequantize(torch.float32)
    assert torch.equal(found, wanted.model.layers[0].mlp.up_proj.weight)


LAYER = {"x.qweight": torch.zeros(8, 16, dtype=torch.int32)}
PACKED = {"x.weight_packed": torch.zeros(16, 8, dtype=torch.int32), "x.weight_shape": torch.tensor([16, 64])}
REJECTED: dict[str, tuple[dict[str, Any], dict[str, Tensor], str]] = {
    "another method": ({"quant_method": "bitsandbytes"}, {}, "is quantized by 'bitsandbytes': gptq, awq and"),
    "no method": ({"bits": 4}, {}, "is quantized by 'an unnamed method'"),
    "three bits": (GPTQ | {"bits": 3}, {}, "its gptq layout cannot be read: 3 bits; 4 and 8 are read"),
    "another layout": (GPTQ | {"checkpoint_format": "marlin"}, {}, "checkpoint_format 'marlin'; gptq and gptq_v2"),
    "a group of text": (GPTQ | {"group_size": "32"}, {}, "group_size is '32', and must be a whole number"),
    "an empty group": (GPTQ | {"group_size": 0}, {}, "group_size is 0, and must be positive"),
    "another version": (AWQ | {"version": "gemv"}, {}, "its awq layout cannot be read: version 'gemv'; gemm is read"),
    "eight bits of AWQ": (AWQ | {"bits": 8}, {}, "8 bits; 4 are read"),
    "floats": (
        COMPRESSED | {"format": "float-quantized"},
        {},
        "format float-quantized; pack-quantized and int-quan",
    ),
    "weights of floats": (
        COMPRESSED | {"config_groups": {"a": {"weights": WEIGHTS | {"type": "float"}}}},
        {},
        "weights of .*; integers of 4 and 8 bits",
    ),
    "no groups": (COMPRESSED | {"config_groups": {}}, {}, "config_groups is missing"),
    "no layers": (GPTQ, {}, "its config names 'gptq', but no layer has qweight"),
    "both": (GPTQ, LAYER | {"x.weight": torch.zeros(16, 64)}, r"has both x\.weight and x\.qweight"),
    "codes of one dim": (GPTQ, {"x.qweight": torch.zeros(8)}, "x: 'qweight' must be a matrix"),
    "no shape": (COMPRESSED, {"x.weight_packed": PACKED["x.weight_packed"]}, "'weight_shape' must hold two numbers"),
    "a shape of floats": (
        COMPRESSED,
        PACKED | {"x.weight_shape": torch.tensor([16, torch.inf])},
        r"'weight_shape' must be whole numbers, and is torch\.float32",
    ),
    "a forged shape": (
        COMPRESSED,
        PACKED | {"x.weight_shape": torch.tensor([16, -5])},
        r"'weight_shape' says \(16, -5\), and 'weight_packed' has 16 rows",
    ),
}


class Slice:
    """A tensor of a file."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def get_shape(self) -> list[int]:
        return list(self.values.shape)

    def __getitem__(self, box: Any) -> Tensor:
        return self.values[box]


def sliced(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: Slice(each) for name, each in tensors.items()}


@pytest.mark.parametrize("case", REJECTED)
def test_what_is_not_read_is_named(case: str) -> None:
    config, tensors, told = REJECTED[case]
    with pytest.raises(ValueError, match=f"^here.*{told}"):
        with_whole_weights(sliced(tensors), config, "here")


@pytest.mark.parametrize(
    ("config", "tensors", "told"),
    [
        (GPTQ, LAYER, "here: x: 'scales' is missing"),
        (COMPRESSED, PACKED | {"x.weight_shape": torch.tensor([16, 200])}, "has 8 words a row, which no"),
        (COMPRESSED, PACKED | {"x.weight_scale": torch.full((16, 1), torch.nan)}, "infinite or NaN values"),
    ],
)
def test_damaged_layers_are_named_when_they_are_read(
    config: dict[str, Any], tensors: dict[str, Tensor], told: str
) -> None:
    found = with_whole_weights(sliced(tensors), config, "here")
    with pytest.raises(ValueError, match=told):
        found["x.weight"][:]
