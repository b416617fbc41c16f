"""Quantized models, written once and read without quantizing: DeepSpeed's `save_mp_checkpoint_path`.

    save_packed(module, "llama-int4", config=source.config, source=source.folder)
    load_packed(module, "llama-int4")                    # or load_model("llama-int4")

    llama-int4/config.json, tokenizer.json, ...          those of the model, so the folder stands alone
    llama-int4/rank_0_of_1/weights/                      a zckpt checkpoint: safetensors files, checksums, one rename

A quantized layer is stored as the parts of its `state_dict`: for products by integers the panels that the kernels
read, so nothing is quantized, packed or reordered when they are read.  Each rank of a split model has a folder of its
own, which all of them need.  zckpt makes a folder visible when all of it is on disk, and compares checksums when it
is read.

Rejected: one file for all ranks (each would read the others' parts or need their lengths), and mapping the files into
the module (the kernels would read pages of a file that somebody may truncate).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from zengine.inference.experts.separate import separate_chosen
from zengine.inference.loading import weights
from zengine.inference.quantized import LayerError, QuantizationReport
from zengine.inference.quantized_modules import QuantizedLinear, put_quantized
from zprecision.quant import PackedTensor, QuantizedTensor, format_name

if TYPE_CHECKING:
    from zckpt import Checkpoint

__all__ = ["PackedFolder", "find_packed", "load_packed", "save_packed"]

_TAG = "weights"
_FOLDER = re.compile(r"rank_(\d{1,6})_of_(\d{1,6})")
_KIND = "zengine packed model"
_VERSION = 1
_MOST_NBYTES = 1 << 28  # of a file of the tokenizer
_BESIDE = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
    "spiece.model",
)


@attrs.frozen
class PackedFolder:
    """A folder of `save_packed`.  Invariant: it has the parts of all its ranks."""

    path: Path
    num_ranks: int  # that the model is split over

    def check_num_ranks(self, num_ranks: int) -> None:
        """Raise ValueError if the model was written for another number of ranks."""
        if self.num_ranks != num_ranks:
            ranks = f"{self.num_ranks} tensor-parallel rank{'s' * (self.num_ranks != 1)}"
            raise ValueError(
                f"{self.path} was written for {ranks}, and "
                f"this run has {num_ranks}: start {self.num_ranks}, or load the whole model and write it again"
            )

    def checkpoint(self, rank: int) -> Checkpoint:
        """Open the part of a rank."""
        import zckpt

        return zckpt.find(self.path / _name(rank, self.num_ranks), _TAG)


def find_packed(path: str | os.PathLike[str]) -> PackedFolder | None:
    """Return the packed model in a folder; None if it holds none.

    Raises ValueError if it holds parts of several splits, or lacks those of some ranks.
    """
    path = Path(path)
    named = [_FOLDER.fullmatch(each.name) for each in path.iterdir()] if path.is_dir() else []
    places = sorted((int(each[2]), int(each[1])) for each in named if each)
    if not places:
        return None
    sizes = sorted({size for size, _ in places})
    if len(sizes) > 1:
        raise ValueError(
            f"{path} holds models split over {' and over '.join(map(str, sizes))} ranks: write each into a folder of "
            "its own"
        )
    missing = [rank for rank in range(sizes[0]) if not (path / _name(rank, sizes[0]) / _TAG).is_dir()]
    if missing:
        raise ValueError(
            f"{path} is split over {sizes[0]} ranks, and the parts of {', '.join(map(str, missing[:5]))} are "
            "missing: a save was interrupted, or files are lost; write it again"
        )
    return PackedFolder(path, sizes[0])


def save_packed(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    config: Mapping[str, Any] | None = None,
    source: Path | None = None,
    rank: int = 0,
    num_ranks: int = 1,
) -> Path:
    """Write a module with quantized layers, whole or this rank's part; return its folder.

    config: of the model, as in config.json, so that `load_model` can build it; None: that of the module, if any.
    source: folder whose tokenizer is copied.  rank, num_ranks: of the ranks that the model is split over.

    Raises ValueError if nothing is quantized, or the folder holds another model; zckpt's CheckpointError (the disk).
    """
    import zckpt

    path = Path(path)
    layers = {name: child for name, child in module.named_modules() if isinstance(child, QuantizedLinear)}
    if not layers:
        raise ValueError(f"{type(module).__name__} has no quantized layers to write; pass dtype='int8' or quant=")
    _check_target(path, num_ranks)
    path.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        _write_beside(path, config if config is not None else _config_of(module), source)
    tensors: dict[str, Tensor] = {
        f"{name}.weight.{part}": values
        for name, layer in layers.items()
        for part, values in layer.weight.state_dict().items()
    }
    tensors |= {name: tensor.detach() for name, tensor in weights.stored_tensors(module)}
    objects = {"kind": _KIND, "version": _VERSION, "rank": rank, "num_ranks": num_ranks}
    shards = [zckpt.whole(name, tensor.contiguous()) for name, tensor in tensors.items()]
    folder = path / _name(rank, num_ranks)
    zckpt.save(folder, _TAG, shards=shards, objects=objects, overwrite=True)
    return path


@torch.no_grad()
def load_packed(
    module: nn.Module, found: PackedFolder, device: torch.device, *, rank: int = 0, num_ranks: int = 1
) -> QuantizationReport:
    """Fill a module with a packed model, or with this rank's part; return its quantized layers.

    module: with the plain layers that were quantized, on the meta device or with memory.

    Raises ValueError for another number of ranks and parts that do not fit; zckpt's CheckpointError (damaged files).
    """
    found.check_num_ranks(num_ranks)
    checkpoint = found.checkpoint(rank)
    _check_kind(checkpoint)
    parts = _quantized_parts(checkpoint)
    separate_chosen(module, parts.get)
    _check_names(module, checkpoint, parts)
    rows = []
    states = _read_states(checkpoint, parts)
    for name in [name for name, _ in module.named_modules() if name in parts]:
        weight = _weight_of(states.pop(name), f"{checkpoint.path}: {name}")
        _check_shape(module, name, weight, checkpoint)
        put_quantized(module, name, weight.to(device))
        rows.append(LayerError(name=name, format=format_name(weight.format), error=0.0, nbytes=weight.nbytes))
    weights.materialize(module, device)
    _read_plain(module, checkpoint)
    return QuantizationReport(layers=tuple(rows), kept=())


def _name(rank: int, num_ranks: int) -> str:
    return f"rank_{rank}_of_{num_ranks}"


# -- writing ---------------------------------------------------------------------------------------


def _check_target(path: Path, num_ranks: int) -> None:
    """Raise ValueError if the folder holds something else."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is no folder: pass the folder to write the packed model into")
    names = [each.name for each in path.iterdir()] if path.is_dir() else []
    strays = [name for name in names if not _FOLDER.fullmatch(name) and name not in _BESIDE]
    splits = {int(each[2]) for name in names if (each := _FOLDER.fullmatch(name))} - {num_ranks}
    if strays or splits:
        held = (
            f"a model split over {splits.pop()} ranks" if splits else f"other files ({', '.join(sorted(strays)[:3])})"
        )
        raise ValueError(f"{path} holds {held}: pass an empty or new folder")


def _config_of(module: nn.Module) -> dict[str, Any]:
    config = getattr(module, "config", None)
    to_dict = getattr(config, "to_dict", None)
    found = to_dict() if callable(to_dict) else {}
    return found if isinstance(found, dict) and isinstance(found.get("model_type"), str) else {}


def _write_beside(path: Path, config: Mapping[str, Any], source: Path | None) -> None:
    """Write the model's config, and copy its tokenizer."""
    for name in _BESIDE:
        origin = None if source is None else source / name
        if origin is not None and origin.is_file() and origin.stat().st_size <= _MOST_NBYTES:
            shutil.copyfile(origin, path / name)
    plain = {
        key: value for key, value in config.items() if key not in ("quantization_config", "torch_dtype", "dtype")
    }
    if plain:
        text = json.dumps(plain, indent=2, default=str)
        making = path / "config.json"
        making.write_text(text + "\n", encoding="utf-8")


# -- reading ---------------------------------------------------------------------------------------


def _check_kind(checkpoint: Checkpoint) -> None:
    kind, version = checkpoint.objects.get("kind"), checkpoint.objects.get("version")
    if kind != _KIND or version != _VERSION:
        raise ValueError(
            f"{checkpoint.path} is no packed model of this version: kind {kind!r:.80}, version {version!r:.20}; "
            "write it again"
        )


def _quantized_parts(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return the names of the parts of each quantized layer."""
    found: dict[str, list[str]] = {}
    for name in checkpoint.names():
        layer, middle, part = name.rpartition(".weight.")
        if middle:
            found.setdefault(layer, []).append(part)
    return found


def _check_names(module: nn.Module, checkpoint: Checkpoint, parts: Mapping[str, list[str]]) -> None:
    """Raise ValueError if the checkpoint lacks tensors of the module, or has others."""
    own = {id(tensor): name for name, tensor in weights.stored_tensors(module)}
    aliases: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(param), []).append(name)
    replaced = {f"{name}.weight" for name in parts}
    wanted = {
        name
        for key, first in own.items()
        if (left := [each for each in aliases.get(key, [first]) if each not in replaced])
        for name in left[:1]
    }
    stored = {name for name in checkpoint.names() if ".weight." not in name}
    known = replaced <= {name for each in aliases.values() for name in each}
    if wanted != stored or not known:
        differing = sorted((wanted ^ stored) | (replaced - {name for each in aliases.values() for name in each}))
        raise ValueError(
            f"{checkpoint.path} does not fit {type(module).__name__}: {len(differing)} names differ: "
            f"{', '.join(differing[:5])}"
        )


def _read_states(checkpoint: Checkpoint, parts: Mapping[str, list[str]]) -> dict[str, dict[str, Tensor]]:
    """Read the parts of all layers in one pass, in which threads share the files."""
    from zckpt import whole

    stored = checkpoint.manifest.tensors
    names = {layer: {part: f"{layer}.weight.{part}" for part in each} for layer, each in parts.items()}
    states = {
        layer: {part: torch.empty(stored[name].shape, dtype=stored[name].dtype) for part, name in each.items()}
        for layer, each in names.items()
    }
    wanted = [whole(name, states[layer][part]) for layer, each in names.items() for part, name in each.items()]
    checkpoint.read(wanted, strict=False)
    return states


def _weight_of(state: Mapping[str, Tensor], where: str) -> PackedTensor | QuantizedTensor:
    kind = PackedTensor if "panels" in state else QuantizedTensor
    try:
        return kind.from_state_dict(state)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_shape(
    module: nn.Module, name: str, weight: PackedTensor | QuantizedTensor, checkpoint: Checkpoint
) -> None:
    layer = module.get_submodule(name)
    own = tuple(layer.weight.shape)  # type: ignore[arg-type]
    if (isinstance(layer, nn.Linear) and tuple(weight.shape) != own) or sorted(weight.shape) != sorted(own):
        raise ValueError(f"{checkpoint.path}: {name} has the shape {tuple(weight.shape)}, the module's {own}")


def _read_plain(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Read what is not quantized, cast to the module's dtypes."""
    from zckpt import whole

    targets = {name: tensor.detach() for name, tensor in weights.stored_tensors(module)}
    hosts = {
        name: torch.empty_like(each, device="cpu", memory_format=torch.contiguous_format)
        for name, each in targets.items()
    }
    checkpoint.read([whole(name, each) for name, each in hosts.items()], strict=False, cast=True)
    for name, each in hosts.items():
        targets[name].copy_(each)
