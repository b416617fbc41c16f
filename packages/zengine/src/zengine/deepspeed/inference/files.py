"""Files of an inference config: `checkpoint`, `base_dir`, `save_mp_checkpoint_path`, and `checkpoint_config`.

    {"checkpoint": "llama-3-8b", "dtype": "int8", "save_mp_checkpoint_path": "llama-3-8b-int8"}     once
    {"checkpoint": "llama-3-8b-int8", "dtype": "int8"}                                              from then on

Layers are quantized while the files are read, so the unquantized model is never in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, final

import attrs
import torch
from torch import nn

import zpartition
from zengine.config import Problem
from zengine.config.grammar.kinds import Mismatch, ValueKind
from zengine.config.grammar.table import Row, Section
from zengine.deepspeed.inference.parallel import Parallelism, honoured
from zengine.deepspeed.inference.quantization import WeightQuantization
from zengine.deepspeed.section_model import SectionModel
from zengine.inference.loading.load import empty_model, fill
from zengine.inference.loading.packed import PackedFolder, find_packed, load_packed, save_packed
from zengine.inference.loading.sources import Source, open_source
from zengine.inference.loading.stored import QuantizedSlice
from zengine.inference.quantized import LayerError
from zengine.inference.quantized_modules import nothing_to_quantize

__all__ = [
    *("CHECKPOINT_CONFIG", "FILE_KEYS", "InferenceCheckpointConfig", "WeightFiles"),
    *(
        "check_expert_ranks",
        "check_is_plain",
        "check_packed",
        "file_problems",
        "has_codes",
        "load_part",
        "load_quantized",
        "open_model",
    ),
    *("read_files", "save_quantized"),
]


def _read_checkpoint(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    raise Mismatch("must be the path of a weight file, a folder or a JSON list of files, or such a list as a dict")


def _read_path(value: object) -> str:
    if isinstance(value, (str, os.PathLike)):
        return str(os.fspath(value))
    raise Mismatch("must be a path")


_CHECKPOINT = ValueKind("a path or a list of files", _read_checkpoint)
_PATH = ValueKind("a path", _read_path)
FILE_KEYS: dict[str, Row] = {
    "checkpoint": honoured(kind=_CHECKPOINT),
    "base_dir": honoured(kind=_PATH, default=""),
    "save_mp_checkpoint_path": honoured(kind=_PATH),
}
CHECKPOINT_CONFIG: dict[str, Row] = {
    "checkpoint_dir": honoured(kind=_CHECKPOINT),
    "base_dir": honoured(kind=_PATH),
    "save_mp_checkpoint_path": honoured(kind=_PATH),
}
_NO_PARTS, _ONE_RANK = "save_mp_checkpoint_path writes no parts of expert ranks", "Remove it, or use one expert rank."
_OWN = "pass the model's own folder as checkpoint."
_SAME = {"checkpoint_dir": "checkpoint", "base_dir": "base_dir", "save_mp_checkpoint_path": "save_mp_checkpoint_path"}


@final
class InferenceCheckpointConfig(SectionModel):
    """Section `checkpoint_config`: another home of three keys."""

    rows = Section(keys=CHECKPOINT_CONFIG)
    title = "init_inference.checkpoint_config"
    models: ClassVar[Mapping[str, type[SectionModel]]] = {}


@attrs.frozen(kw_only=True)
class WeightFiles:
    """Files that weights are read from, and written to."""

    checkpoint: str | Mapping[str, Any] | None = None  # a path, or DeepSpeed's list of files
    base_dir: str = ""  # of relative paths
    save_path: str | None = None  # folder that the quantized model is written to

    @property
    def packed(self) -> PackedFolder | None:
        """Return the packed model that the checkpoint is; None if it is none."""
        is_path = isinstance(self.checkpoint, str)
        return find_packed(Path(self.base_dir, str(self.checkpoint))) if is_path else None


def read_files(given: Mapping[str, Any], section: Mapping[str, Any]) -> WeightFiles:
    """Return the files of a config; section: its `checkpoint_config`."""
    merged = {_SAME[key]: value for key, value in section.items()} | {
        key: value for key, value in given.items() if key in FILE_KEYS and value is not None
    }
    return WeightFiles(
        checkpoint=merged.get("checkpoint"),
        base_dir=merged.get("base_dir") or "",
        save_path=merged.get("save_mp_checkpoint_path"),
    )


def file_problems(
    given: Mapping[str, Any], section: Mapping[str, Any], *, is_quantized: bool, expert_ranks: int
) -> Iterator[Problem]:
    """Yield a problem for each key that is given twice, and for a path to save to that cannot be served."""
    for key, value in section.items():
        other = given.get(_SAME[key])
        if other is not None and other != value:
            reason = f"{_SAME[key]} is {other!r}, and checkpoint_config.{key} is {value!r}"
            yield Problem(reason=reason, key=f"init_inference.{_SAME[key]}", suggestion="Keep one of them.")
    files = read_files(given, section)
    if files.save_path is not None and not is_quantized:
        yield Problem(
            reason="save_mp_checkpoint_path writes quantized weights, and none are",
            key="init_inference.save_mp_checkpoint_path",
            suggestion='Pass dtype="int8" or quant={"weight": {"num_bits": 4}}, or remove it.',
        )
    if files.save_path is not None and expert_ranks > 1:
        yield Problem(
            reason=_NO_PARTS,
            key="init_inference.save_mp_checkpoint_path",
            suggestion=_ONE_RANK,
        )


def check_packed(packed: PackedFolder, parallelism: Parallelism, *, is_streamed: bool) -> None:
    """Raise ValueError if the packed model cannot be read by so many ranks, or block by block."""
    if parallelism.tensor.size:
        packed.check_num_ranks(parallelism.tensor.size)
    if is_streamed:
        raise ValueError(f"{packed.path} is a packed model, and init_inference.zero streams whole weights: {_OWN}")


def check_expert_ranks(files: WeightFiles, num_ranks: int) -> None:
    """Raise ValueError if so many ranks, which hold different experts, cannot read or write a packed model."""
    if num_ranks == 1:
        return
    if files.packed is not None:
        raise ValueError(f"{files.packed.path} is a packed model, and expert ranks read whole weights: {_OWN}")
    if files.save_path is not None:
        raise ValueError(f"{_NO_PARTS}, and experts are over {num_ranks} ranks. {_ONE_RANK}")


def open_model(path: str, given: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model of a path, on the meta device, and the config with the path as its checkpoint.

    Raises FileNotFoundError, ValueError for a config with another checkpoint, and as `empty_model`.
    """
    base_dir = str(given.get("base_dir") or "")
    if not Path(base_dir, path).exists():
        raise FileNotFoundError(
            f"init_inference(): {path!r} is no file or folder here: pass the path of a Hugging Face folder or a GGUF "
            "file, or a module; a model of a hub, download it first (huggingface_hub.snapshot_download)."
        )
    if given.get("checkpoint") not in (None, path):
        raise ValueError(
            f"init_inference() got the model {path!r} and checkpoint={given['checkpoint']!r}: give the weights once."
        )
    return empty_model(path, base_dir), {**given, "checkpoint": path}


def check_is_plain(model: nn.Module) -> None:
    """Raise ValueError for a model whose layers Transformers has quantized: they are none that we know."""
    if getattr(model, "hf_quantizer", None) is None:
        return
    method = getattr(model, "quantization_method", None)
    raise ValueError(
        f"{type(model).__name__} has layers that Transformers quantized ({getattr(method, 'value', method)}): pass "
        "the folder instead, init_inference('folder'), which reads GPTQ, AWQ and compressed-tensors without their "
        "packages; of other methods pass the plain weights, with dtype='int8' or quant={'weight': {'num_bits': 4}}."
    )


def load_part(module: nn.Module, packed: PackedFolder, device: torch.device) -> tuple[LayerError, ...]:
    """Fill a module that is split over tensor ranks with this rank's part; return a row for each quantized layer."""
    ranks = zpartition.model_parallel_group_of(module)
    return load_packed(module, packed, device, rank=ranks.rank, num_ranks=ranks.size).layers


def load_quantized(
    module: nn.Module,
    files: WeightFiles,
    quantization: WeightQuantization | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[LayerError, ...] | None:
    """Fill a whole module from files, quantizing its layers on the way; return a row for each.

    dtype: of the other parameters.

    Without quantization the codes of a quantized folder (GPTQ, AWQ, ...) stay as they are.

    Returns None, with nothing done, if no file is given, or neither quantization nor files with codes.  Writes the
    packed model if `files` asks for it.  Raises ValueError and CheckpointError as `load_model` does.
    """
    if files.checkpoint is None:
        return None
    if (packed := files.packed) is not None:
        return load_packed(module.to(dtype=dtype), packed, device).layers
    with open_source(files.checkpoint, files.base_dir) as source:
        if quantization is None and not has_codes(source):
            return None
        choose = _as_stored if quantization is None else quantization.format_of
        rows = fill(module.to(dtype=dtype), source, choose, device, outliers=False).layers
        if not rows and quantization is not None:
            raise ValueError(nothing_to_quantize(module))
        save_quantized(module, files, source.folder)
    return rows


def has_codes(source: Source) -> bool:
    """Return whether files hold quantized layers."""
    return any(isinstance(each, QuantizedSlice) for each in source.tensors.values())


def _as_stored(_name: str) -> None:
    """Choose no format: codes stay, and plain layers, too."""


def save_quantized(module: nn.Module, files: WeightFiles, folder: Path | None = None) -> None:
    """Write a quantized module, whole or this rank's part, if `files` asks for it; folder: of its tokenizer."""
    if files.save_path is not None:
        ranks = zpartition.model_parallel_group_of(module)
        save_packed(module, files.save_path, source=folder, rank=ranks.rank, num_ranks=ranks.size)
