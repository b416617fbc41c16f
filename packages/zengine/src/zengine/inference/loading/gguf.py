"""GGUF files of the LLaMA family under Hugging Face's names: llama (mistral is written as such), qwen2, qwen3.

The file's metadata becomes a config of Transformers, its tensors get the names of that model, and blocks of Q8_0,
Q4_0, Q4_K and Q6_K stay as they are.  llama.cpp rotates neighbouring features where Transformers rotates halves, so
its converter permutes the rows of LLaMA's query and key projections within each head; here they are put back.

`rope_freqs.weight` (LLaMA 3.1 and later) divides the rotary frequencies; `divide_frequencies` does so in the module.

Rejected: a table of all architectures (each has its own norms, biases and permutations, and a wrong one computes
nonsense silently): others raise, by name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from zengine.inference.loading.stored import QuantizedSlice, StoredTensor, Tensors
from zprecision.quant import QuantizedTensor, format_named, from_blocks

if TYPE_CHECKING:
    from zckpt import GGUFFile

__all__ = ["divide_frequencies", "model_config", "model_tensors"]

_ROPE_FACTORS = "rope_freqs.weight"
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")
_MOST = 1 << 31  # of any size in the metadata

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_LAYER = re.compile(r"blk\.(\d{1,6})\.([a-z_]+)\.(weight|bias)")


@attrs.frozen
class _Architecture:
    """What differs between the architectures that are read."""

    model_type: str  # of Transformers
    permuted: tuple[str, ...] = ()  # layers whose rows the converter permutes


_ARCHITECTURES = {
    "llama": _Architecture("llama", ("attn_q", "attn_k")),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
}


# -- config ----------------------------------------------------------------------------------------


def model_config(file: GGUFFile) -> dict[str, Any]:
    """Return the model's config, as config.json has it.

    Raises ValueError for another architecture, and for metadata that is missing or contradicts the tensors.
    """
    arch = _architecture(file)
    keys = _Keys(file.path, file.metadata, file.metadata["general.architecture"])
    if keys.number("expert_count", 0):
        raise ValueError(f"{file.path} has experts, and only dense models are read from GGUF; load its safetensors")
    width, heads = keys.number("embedding_length"), keys.number("attention.head_count")
    head_dim = keys.number("attention.key_length", width // heads)
    if keys.number("rope.dimension_count", head_dim) != head_dim or head_dim % 2:
        raise ValueError(f"{file.path} rotates a part of each head, or an odd number of features; this is not read")
    layers = {int(inside[1]) for name in file.tensors if (inside := _IN_LAYER.fullmatch(name))}
    if len(layers) != keys.number("block_count"):
        raise ValueError(
            f"{file.path} has tensors of {len(layers)} layers; its metadata says {keys.number('block_count')}"
        )
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} has no token_embd.weight")
    found: dict[str, Any] = {
        "model_type": arch.model_type,
        "hidden_size": width,
        "num_hidden_layers": len(layers),
        "intermediate_size": keys.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": keys.number("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(keys),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "float32",
        **_special_tokens(keys),
    }
    if arch.model_type == "llama":
        found["attention_bias"] = "blk.0.attn_output.bias" in file.tensors
        found["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    return found


def _architecture(file: GGUFFile) -> _Architecture:
    name = file.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise ValueError(
            f"{file.path} holds a {name!r} model; GGUF files of {', '.join(_ARCHITECTURES)} are read. Load the "
            "model's Hugging Face folder, with format= to quantize it"
        )
    return _ARCHITECTURES[name]


@attrs.frozen
class _Keys:
    """Metadata of one architecture."""

    path: Path
    values: Mapping[str, Any]
    prefix: str

    def number(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number, or the default."""
        found: object = self.values.get(f"{self.prefix}.{key}", default)
        if default is not None and found is default:
            return default
        if not isinstance(found, int) or isinstance(found, bool) or not 0 < found < _MOST:
            raise ValueError(f"{self.path}: {self.prefix}.{key} is {found!r:.80}, and must be a positive number")
        return found

    def real(self, key: str, default: float | None = None) -> float:
        """Return a positive number, or the default."""
        found = self.values.get(f"{self.prefix}.{key}", default)
        if not isinstance(found, (int, float)) or isinstance(found, bool) or not 0 < found < float(_MOST) ** 2:
            raise ValueError(f"{self.path}: {self.prefix}.{key} is {found!r:.80}, and must be a positive number")
        return float(found)


def _rope(keys: _Keys) -> dict[str, Any]:
    """Return the rotary parameters."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base", 10_000.0)}
    kind = keys.values.get(f"{keys.prefix}.rope.scaling.type", "none")
    if kind in ("none", ""):
        return found
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{keys.path} scales its rotary positions by {kind!r}; linear and yarn are read")
    found |= {"rope_type": kind, "factor": keys.real("rope.scaling.factor")}
    if kind == "yarn":
        found["original_max_position_embeddings"] = keys.number("rope.scaling.original_context_length")
    return found


def _special_tokens(keys: _Keys) -> dict[str, int | None]:
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: keys.values.get(f"tokenizer.ggml.{key}_token_id") for name, key in ids.items()}
    return {name: each if isinstance(each, int) and each < _MOST else None for name, each in found.items()}


# -- tensors ---------------------------------------------------------------------------------------


def model_tensors(file: GGUFFile) -> Tensors:
    """Return the tensors under the names of Transformers' model, without `rope_freqs.weight`.

    Raises ValueError for names that the architecture does not have, and types that are not read.
    """
    arch = _architecture(file)
    prefix = file.metadata["general.architecture"]
    keys = _Keys(file.path, file.metadata, prefix)
    heads = keys.number("attention.head_count")
    counts = {"attn_q": heads, "attn_k": keys.number("attention.head_count_kv", heads)}
    found: dict[str, StoredTensor] = {}
    for name in file.tensors:
        if name == _ROPE_FACTORS:
            continue
        stored = _stored(file, name)
        inside = _IN_LAYER.fullmatch(name)
        if inside is None or inside[2] not in _LAYER:
            if name not in _OUTSIDE:
                raise ValueError(f"{file.path} has the tensor {name[:80]!r}, which no {prefix} model has")
            found[_OUTSIDE[name]] = stored
            continue
        if inside[2] in arch.permuted:
            stored = _unpermuted(stored, counts[inside[2]], f"{file.path}: {name}")
        found[f"model.layers.{int(inside[1])}.{_LAYER[inside[2]]}.{inside[3]}"] = stored
    return found


@attrs.frozen(eq=False)
class _Rows:
    """A plain tensor whose rows are in another order in the file."""

    values: Tensor
    rows: Tensor

    def get_shape(self) -> list[int]:
        return list(self.values.shape)

    def __getitem__(self, box: Any) -> Tensor:
        first, *others = box if isinstance(box, tuple) else (box,)
        if first is ...:
            first, others = slice(None), []
        return self.values[self.rows[first]][(slice(None), *others)]


def _stored(file: GGUFFile, name: str) -> StoredTensor:
    info = file.tensors[name]
    if info.type_name in _PLAIN:
        return _plain(file, name)
    if info.type_name not in _BLOCKS or len(info.shape) != 2:
        raise ValueError(
            f"{file.path}: {name} is a {info.type_name} of {len(info.shape)} dims; matrices of {', '.join(_BLOCKS)} "
            f"and tensors of {', '.join(_PLAIN)} are read"
        )
    return QuantizedSlice(f"{file.path}: {name}", info.shape, functools.partial(_read_blocks, file, name))


def _plain(file: GGUFFile, name: str) -> _Slice:
    info = file.tensors[name]
    data, dtype = file.read(name), _PLAIN[info.type_name]
    if data.data_ptr() % dtype.itemsize:  # the file may align tensors to single bytes
        data = data.clone()
    return _Slice(data.view(dtype).view(info.shape))


@attrs.frozen(eq=False)
class _Slice:
    """A plain tensor, a view of the file."""

    values: Tensor

    def get_shape(self) -> list[int]:
        return list(self.values.shape)

    def __getitem__(self, box: Any) -> Tensor:
        return self.values[box]


def _read_blocks(file: GGUFFile, name: str) -> QuantizedTensor:
    info = file.tensors[name]
    return from_blocks(file.read(name), format_named(info.type_name), info.shape)


def _unpermuted(stored: StoredTensor, heads: int, where: str) -> StoredTensor:
    """Return a projection with its rows in Transformers' order: by head, both halves one after the other."""
    count = stored.get_shape()[0] if stored.get_shape() else 0
    if count % (2 * heads):
        raise ValueError(f"{where} has {count} rows, no multiple of two for each of {heads} heads")
    rows = torch.arange(count).view(heads, count // heads // 2, 2).transpose(1, 2).flatten()
    if isinstance(stored, QuantizedSlice):
        return stored.with_rows(rows)
    assert isinstance(stored, _Slice)
    return _Rows(stored.values, rows)


# -- rotary positions ------------------------------------------------------------------------------


def divide_frequencies(module: nn.Module, file: GGUFFile) -> None:
    """Divide the rotary frequencies of `module` by the factors of the file, if it has some; in place.

    Raises ValueError if the factors do not fit the module.
    """
    if _ROPE_FACTORS not in file.tensors:
        return
    if file.tensors[_ROPE_FACTORS].type_name not in _PLAIN:
        raise ValueError(f"{file.path}: {_ROPE_FACTORS} is a {file.tensors[_ROPE_FACTORS].type_name}; F32 is read")
    factors = _plain(file, _ROPE_FACTORS).values.float()
    buffers = [buffer for name, buffer in module.named_buffers() if name.rpartition(".")[2].endswith("inv_freq")]
    if not buffers or any(buffer.shape != factors.shape for buffer in buffers) or not bool((factors > 0).all()):
        raise ValueError(
            f"{file.path}: {_ROPE_FACTORS} has {tuple(factors.shape)} factors, which do not fit the model"
        )
    with torch.no_grad():
        for buffer in buffers:
            buffer.div_(factors.to(buffer.device))
