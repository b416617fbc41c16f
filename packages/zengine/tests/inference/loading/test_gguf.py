"""GGUF files against Transformers' modules with the decoded weights; forged metadata and tensors."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import FORMATS, PLAIN, permuted, write_gguf
from torch import Tensor

from zckpt import CheckpointError, read_gguf
from zengine.inference import load_model
from zengine.inference.quantized_modules import QuantizedLinear
from zprecision.quant import dequantize, format_name, quantize

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "rms_norm_eps": 1e-5,
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
IDS = torch.arange(3, 23)[None]
Types = dict[str, str]  # part of a name -> type; others are F32


def metadata(kind: str) -> dict[str, Any]:
    found = {
        "embedding_length": 256,
        "feed_forward_length": 256,
        "block_count": 2,
        "context_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0,
    }
    return {"general.architecture": kind, **{f"{kind}.{name}": value for name, value in found.items()}}


def model(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, head_dim=64, **changes)
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for param in made.parameters():
            param.add_(torch.randn_like(param) * (0.1 if param.dim() > 1 else 0.5))
    return made


def tensors_of(made: Any, types: Types, kind: str) -> dict[str, tuple[Tensor, str]]:
    """Tensors of a module as a converter writes them; the module gets the decoded values."""
    found = {}
    for name, param in made.named_parameters():
        type_name = next((each for part, each in types.items() if part in name), "F32")
        values, where = param.detach(), name.split(".")
        if type_name in FORMATS:
            decoded = dequantize(quantize(values, FORMATS[type_name]))
        else:
            decoded = values.to(PLAIN[type_name]).float()
        inside = ".".join(where[3:-1])
        target = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}.get(name, "output")
        if where[1] == "layers":
            target = f"blk.{where[2]}.{NAMES[inside]}"
        if kind == "llama" and inside in ("self_attn.q_proj", "self_attn.k_proj"):
            values = permuted(values, 4 if "q_proj" in inside else 2)
        found[f"{target}.{where[-1]}"] = (values.clone(), type_name)
        with torch.no_grad():
            param.copy_(decoded)
    return found


MIXED = {
    "q_proj.weight": "Q8_0",
    "k_proj.weight": "Q4_0",
    "v_proj.weight": "Q6_K",
    "up_proj": "Q4_K",
    "down_proj": "Q4_0",
    "gate_proj": "F16",
    "embed_tokens": "Q6_K",
    "o_proj": "BF16",
}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_equals_the_module_with_the_decoded_weights(kind: str, tied: bool, tmp_path: Path) -> None:
    wanted = model(kind, tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "a.gguf", metadata(kind), tensors_of(wanted, MIXED, kind))
    loaded = load_model(path)
    assert type(loaded.module) is type(wanted)
    layers = {name: each for name, each in loaded.module.named_modules() if isinstance(each, QuantizedLinear)}
    assert {row.name: row.format for row in loaded.report.layers} == {
        name: format_name(each.weight.format) for name, each in layers.items()
    }
    assert layers["model.layers.1.self_attn.k_proj"].weight.nbytes == 128 * 256 * 4.5 / 8
    assert ("lm_head" in layers) == tied, "the tied head keeps the codes of the embedding"
    for name, param in wanted.named_parameters():
        layer = layers.get(name.removesuffix(".weight"))
        found = loaded.module.get_parameter(name) if layer is None else layer.weight.dequantize(torch.float32)
        assert torch.equal(found, param), name
    with torch.no_grad():
        found, expected = loaded.module(IDS).logits, wanted(IDS).logits
    assert (found - expected).norm() < 0.05 * expected.norm(), "activations are rounded to 8 bits"
    assert loaded.decoder is not None, loaded.reason


def test_a_given_module_gets_plain_weights_and_other_formats_are_quantized(tmp_path: Path) -> None:
    wanted = model("llama")
    path = write_gguf(tmp_path / "a.gguf", metadata("llama"), tensors_of(wanted, {"k_proj": "F16"}, "llama"))
    with torch.device("meta"):
        skeleton = model("llama")
    loaded = load_model(path, module=skeleton)
    assert loaded.module is skeleton
    with torch.no_grad():
        assert torch.equal(loaded.module(IDS).logits, wanted(IDS).logits)
    mixed = write_gguf(tmp_path / "b.gguf", metadata("llama"), tensors_of(model("llama"), MIXED, "llama"))
    rows = {row.name.rpartition(".")[2]: row.format for row in load_model(mixed, format="int4").report.layers}
    assert (rows["k_proj"], rows["up_proj"]) == ("q4_0", "q4_k"), "codes of four bits stay"
    assert (rows["q_proj"], rows["gate_proj"]) == ("int4", "int4"), "eight bits and plain numbers do not"


def test_rotary_frequencies_are_divided_by_the_files_factors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    wanted = model("llama")
    scaled = transformers.AutoConfig.for_model("llama", **SIZES | {"rope_parameters": scaling}, head_dim=64)
    wanted.model.rotary_emb = type(wanted.model.rotary_emb)(config=scaled)
    plain = 5000.0 ** -(torch.arange(0, 64, 2) / 64)
    factors = plain / wanted.model.rotary_emb.inv_freq
    assert factors.max() > 7
    tensors = tensors_of(wanted, {}, "llama") | {"rope_freqs.weight": (factors, "F32")}
    loaded = load_model(write_gguf(tmp_path / "a.gguf", metadata("llama"), tensors))
    with torch.no_grad():
        assert torch.allclose(loaded.module(IDS).logits, wanted(IDS).logits, rtol=1e-4, atol=1e-4)
    assert loaded.decoder is not None, loaded.reason
    tensors["rope_freqs.weight"] = (factors[:5].contiguous(), "F32")
    with pytest.raises(ValueError, match=r"rope_freqs\.weight has \(5,\) factors, which do not fit"):
        load_model(write_gguf(tmp_path / "b.gguf", metadata("llama"), tensors))


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": (
        {"general.architecture": "gemma2"},
        "holds a 'gemma2' model; GGUF files of llama",
    ),
    "no heads": ({"llama.attention.head_count": None}, r"llama\.attention\.head_count is None, and must be"),
    "zero heads": ({"llama.attention.head_count": 0}, r"llama\.attention\.head_count is 0, and must be a positive"),
    "heads of text": ({"llama.attention.head_count": "4"}, r"head_count is '4', and must be a positive number"),
    "many layers": ({"llama.block_count": 10**9}, "has tensors of 2 layers; its metadata says 1000000000"),
    "experts": ({"llama.expert_count": 8}, "has experts, and only dense models are read"),
    "a width": ({"llama.embedding_length": 512}, r"does not fit LlamaForCausalLM: .*of another shape"),
    "heads that do not divide": (
        {"llama.attention.head_count_kv": 3},
        "has 128 rows, no multiple of two for each",
    ),
    "a part of each head": ({"llama.rope.dimension_count": 32}, "rotates a part of each head"),
    "another scaling": ({"llama.rope.scaling.type": "longrope"}, "scales its rotary positions by 'longrope'"),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": None}, "epsilon is None, and must be a positive"),
}


@pytest.fixture(scope="module")
def tensors() -> dict[str, tuple[Tensor, str]]:
    return tensors_of(model("llama", tie_word_embeddings=True), {"proj": "Q4_0"}, "llama")


@pytest.mark.parametrize("case", FORGED)
def test_forged_metadata_is_named(case: str, tensors: dict[str, tuple[Tensor, str]], tmp_path: Path) -> None:
    changed, told = FORGED[case]
    given = {name: value for name, value in (metadata("llama") | changed).items() if value is not None}
    with pytest.raises(ValueError, match=told):
        load_model(write_gguf(tmp_path / "a.gguf", given, tensors))


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("blk.0.ffn_up.weight", None, r"missing: model\.layers\.0\.mlp\.up_proj\.weight"),
        ("blk.0.ffn_more.weight", (torch.ones(2, 2), "F32"), r"has the tensor 'blk\.0\.ffn_more\.weight', which no"),
        ("blk.0.ffn_up.weight", (torch.ones(64, 256), "F32"), r"up_proj\.weight has shape \(64, 256\)"),
        ("blk.0.ffn_up.weight", (torch.ones(256, 256), "Q4_1"), "is a Q4_1 of 2 dims; matrices of Q8_0, Q4_0"),
        ("blk.0.attn_norm.weight", (torch.ones(256), "Q8_0"), "is a Q8_0 of 1 dims"),
        ("blk.0.ffn_up.weight", (torch.full((256, 256), 1e9), "F16"), None),
        ("token_embd.weight", None, "has no token_embd.weight"),
    ],
)
def test_forged_tensors_are_named(
    name: str, value: Any, told: str | None, tensors: dict[str, tuple[Tensor, str]], tmp_path: Path
) -> None:
    given = {key: each for key, each in (tensors | {name: value}).items() if each is not None}
    path = write_gguf(tmp_path / "a.gguf", metadata("llama"), given)
    if told is None:  # infinite weights are the file's, as plain numbers; quantized they are named
        told = "quantize: the tensor has infinite or NaN values"
        with pytest.raises(ValueError, match=told):
            load_model(path, format="int8")
        return
    with pytest.raises(ValueError, match=told):
        load_model(path)


def test_scales_that_are_no_numbers_are_named(tensors: dict[str, tuple[Tensor, str]], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", metadata("llama"), tensors)
    with read_gguf(path) as file:
        start = file.tensors["blk.0.ffn_up.weight"].start
    content = bytearray(path.read_bytes())
    content[start : start + 2] = b"\xff\x7f"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="its scales have infinite or NaN values; the file is damaged"):
        load_model(path)


def test_files_with_random_changes_are_read_or_named(tensors: dict[str, tuple[Tensor, str]], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", metadata("llama"), tensors)
    good, draw = path.read_bytes(), random.Random(0)
    head = good.index(b"blk.1.ffn_down.weight")
    with torch.device("meta"):
        skeleton = model("llama", tie_word_embeddings=True)
    for _ in range(60):
        changed = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            changed[draw.randrange(head)] = draw.randrange(256)
        path.write_bytes(changed[: draw.choice([len(changed), len(changed), draw.randrange(len(changed))])])
        with contextlib.suppress(ValueError, CheckpointError):
            load_headers(path, skeleton)


def load_headers(path: Path, skeleton: torch.nn.Module) -> None:
    """All checks of a load, without values."""
    from zengine.inference.loading.sources import open_source
    from zengine.inference.loading.weights import check_fits

    with open_source(path) as source:
        assert source.config["num_hidden_layers"] == 2
    check_fits(skeleton, path)
