"""`load_model`: sources, formats, dtypes, memory, and what it says of files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from memory import peak_bytes
from torch import Tensor, nn

from zengine.inference import load_model
from zengine.inference.experts.separate import separate_chosen
from zengine.inference.loading.load import fill
from zengine.inference.loading.packed import save_packed
from zengine.inference.loading.sources import open_source
from zengine.inference.quantized_modules import QuantizedLinear, quantize_linears
from zprecision.quant import Int4, Int8

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
IDS = torch.arange(3, 23)[None]


def llama(**sizes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | sizes)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


def logits(module: nn.Module, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(ids).logits
    return found


def test_a_folder_is_loaded_as_it_is(folder: Path) -> None:
    loaded = load_model(folder)
    assert torch.equal(logits(loaded.module), logits(llama()))
    assert loaded.decoder is not None
    assert (loaded.report.layers, loaded.folder, loaded.reason) == ((), folder, "")


@pytest.mark.parametrize("format", ["int4", "int8"])
def test_streamed_quantization_equals_quantization_of_the_loaded_module(folder: Path, format: str) -> None:
    loaded = load_model(folder, format=format)
    wanted = llama()
    kept = set(loaded.report.kept)
    rows = quantize_linears(wanted, lambda name: Int8() if format == "int8" or name in kept else Int4())
    assert [(row.name, row.format) for row in rows] == [(row.name, row.format) for row in loaded.report.layers]
    assert torch.equal(logits(loaded.module), logits(wanted))
    assert isinstance(loaded.module.lm_head, QuantizedLinear)
    assert loaded.decoder is not None
    assert loaded.module.model.embed_tokens.weight.dtype == torch.float32


def test_the_peak_is_the_loaded_model_and_one_layer(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 96}
    llama(**sizes).save_pretrained(tmp_path)
    plain = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    skeleton = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | sizes)).to("meta")
    with peak_bytes() as counter, open_source(tmp_path) as source:
        report = fill(skeleton, source, lambda _name: Int4(), torch.device("cpu"))
        counted = counter.present
    held = report.nbytes + sum(each.nbytes for each in (*skeleton.parameters(), *skeleton.buffers()))
    assert counted <= 1.05 * held + 65536, "the counter sees the loaded model"
    assert counted >= report.nbytes
    unit = 768 * 256 * 4  # the largest layer, float32
    assert counter.peak < held + 4 * unit < plain / 2


def other_models() -> dict[str, Any]:
    sizes = {key: each for key, each in SIZES.items() if key != "pad_token_id"}
    gpt = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=50, eos_token_id=None)
    return {
        "transposed layers": (gpt, transformers.GPT2LMHeadModel),
        "experts that files hold one by one": (
            transformers.MixtralConfig(**sizes, num_local_experts=4),
            transformers.MixtralForCausalLM,
        ),
    }


@pytest.mark.parametrize("case", ["transposed layers", "experts that files hold one by one"])
def test_other_models_are_streamed_too(case: str, tmp_path: Path) -> None:
    config, kind = other_models()[case]
    torch.manual_seed(0)
    wanted = kind(config).eval()
    wanted.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, format=lambda name: None if "lm_head" in name else Int8())
    separate_chosen(wanted, lambda _name: Int8())
    quantize_linears(wanted, lambda name: None if "lm_head" in name else Int8())
    assert torch.equal(logits(loaded.module), logits(wanted))
    assert not isinstance(loaded.module.lm_head, QuantizedLinear)
    assert loaded.decoder is not None, loaded.reason


def test_a_layer_that_four_bits_do_not_suit_is_read_again_and_gets_eight(tmp_path: Path) -> None:
    made = llama()
    with torch.no_grad():
        weight = made.model.layers[1].mlp.up_proj.weight
        weight.sign_()
        weight[:, 0] = 13.9  # next to it, all others round to zero
    made.save_pretrained(tmp_path)
    report = load_model(tmp_path, format="int4-amax").report
    assert report.kept == ("model.layers.1.mlp.up_proj",)
    assert {row.name: row.format for row in report.layers}[report.kept[0]] == "int8"


def test_the_dtype_is_that_of_the_config_or_the_one_given(tmp_path: Path) -> None:
    llama().to(torch.bfloat16).save_pretrained(tmp_path)
    dtypes = {
        str(given): load_model(tmp_path, **given).module.model.norm.weight.dtype
        for given in ({}, {"format": "int8"}, {"format": "int8", "dtype": torch.bfloat16})
    }
    assert list(dtypes.values()) == [torch.bfloat16, torch.float32, torch.bfloat16]
    with torch.device("meta"):
        skeleton = llama()
    loaded = load_model(tmp_path, module=skeleton, dtype=torch.bfloat16)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(logits(loaded.module), logits(wanted.eval()))
    assert loaded.module.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("format", [None, "int4"])
def test_codes_without_a_config_are_not_read_as_weights(format: str | None, folder: Path, tmp_path: Path) -> None:
    state = llama().state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    torch.save(state | {name: state[name].to(torch.int8)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=rf"{name} is torch.int8 in the files, and must be of floating point: codes"):
        load_model(tmp_path, format=format)


def test_weights_that_are_no_numbers_are_named(folder: Path, tmp_path: Path) -> None:
    made = llama()
    with torch.no_grad():
        made.model.layers[1].mlp.up_proj.weight[3, 3] = torch.nan
    made.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert (loaded.decoder, loaded.reason) == (None, "model.layers.1.mlp.up_proj.weight has infinite or NaN values")


def test_formats_are_values_texts_or_functions_to_these(folder: Path) -> None:
    report = load_model(folder, format=lambda name: "int8" if "mlp" in name else Int4() if "q_proj" in name else None)
    found = {row.name.rpartition(".")[2]: row.format for row in report.report.layers}
    assert found == {"gate_proj": "int8", "up_proj": "int8", "down_proj": "int8", "q_proj": "int4"}
    with pytest.raises(TypeError, match="format is 4: pass a text such as 'int4'"):
        load_model(folder, format=4)
    with pytest.raises(TypeError, match=r"dtype is 'bf16': pass torch\.float32.*format= quantizes layers"):
        load_model(folder, dtype="bf16")
    with pytest.raises(TypeError, match=r"dtype is torch\.int8"):
        load_model(folder, dtype=torch.int8)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_saved_state_of_a_quantized_module_is_a_source(is_tied: bool, tmp_path: Path) -> None:
    wanted = llama(tie_word_embeddings=is_tied)
    rows = quantize_linears(wanted, lambda name: Int8(group=None) if "down" in name else Int4())
    wanted.save_pretrained(tmp_path)
    torch.save(wanted.state_dict(), tmp_path / "state.pt")
    for path, given in ((tmp_path, None), (tmp_path / "state.pt", llama(tie_word_embeddings=is_tied))):
        loaded = load_model(path, module=given)
        assert [(row.name, row.format) for row in loaded.report.layers] == [(row.name, row.format) for row in rows]
        assert torch.equal(logits(loaded.module), logits(wanted))


@pytest.mark.parametrize(
    ("part", "change", "told"),
    [
        ("header", lambda header: header[:-3], "q_proj.weight: the header of a quantized tensor is damaged"),
        ("header", lambda header: header[None], r"q_proj.weight: 'header' must be a row of bytes, and is \(1, "),
        ("panels", lambda panels: panels[:-1], "q_proj.weight: 'panels' of int8 for the shape"),
        ("panels", lambda _panels: None, "q_proj.weight: "),
    ],
)
def test_damaged_saved_states_are_named(part: str, change: Any, told: str, tmp_path: Path) -> None:
    saved = llama()
    quantize_linears(saved, lambda _name: Int8())
    state = saved.state_dict()
    name = f"model.layers.0.self_attn.q_proj.weight.{part}"
    value = change(state.pop(name))
    torch.save(state if value is None else state | {name: value}, tmp_path / "state.pt")
    with pytest.raises(ValueError, match=told):
        load_model(tmp_path / "state.pt", module=llama())


def test_a_packed_folder_stands_alone(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    first = load_model(folder, format="int4")
    path = save_packed(first.module, tmp_path / "packed", source=first.folder)
    again = load_model(path)
    assert torch.equal(logits(again.module), logits(first.module))
    assert [(row.name, row.format) for row in again.report.layers] == [
        (row.name, row.format) for row in first.report.layers
    ]
    assert again.decoder is not None
    assert again.folder == path
    assert (path / "tokenizer.json").is_file()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    with pytest.raises(ValueError, match=r"packed: its config says 1,000,000,000 layers, and it has \d+ tensors"):
        load_model(path)
