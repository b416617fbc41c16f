"""Sources of weights: what lies at a path, opened as tensors by name.

    with open_source("llama-3-8b") as source:
        source.tensors["model.norm.weight"][:]

A path is a Hugging Face folder (plain, GPTQ, AWQ or compressed-tensors), a `.safetensors` or `.pt` file, a GGUF file,
a zckpt checkpoint or the root of several (the newest is read), or a JSON list of files as DeepSpeed has them.  Files
are mapped or read by pieces, so an open source takes no memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import attrs
import torch
from torch import Tensor, nn

from zengine.inference.loading import gguf
from zengine.inference.loading.checkpoint_lists import CheckpointList, is_checkpoint_list, read_checkpoint_list
from zengine.inference.loading.parts import PartedTensor
from zengine.inference.loading.prequantized import with_saved_codes, with_whole_weights
from zengine.inference.loading.stored import StoredTensor, Tensors, sides_of

if TYPE_CHECKING:
    from zckpt import Checkpoint

__all__ = ["Given", "Source", "open_source", "read_config"]

Given = str | os.PathLike[str] | Mapping[str, Any]  # a path, or DeepSpeed's list of files as a dict

_MODEL = "model."  # prefix of the weights in an engine's checkpoint
_MOST_CONFIG_BYTES = 1 << 24
_OLD_GPTQ = "quantize_config.json"  # where GPTQ's tools wrote what config.json has now


@final
@attrs.frozen(eq=False, kw_only=True)
class Source:
    """Open weights; valid inside the `with` that opened them."""

    origin: str  # for errors
    tensors: Tensors  # by their names in the files
    config: Mapping[str, Any] = attrs.field(factory=dict)  # the model's config, as in config.json; {}: none
    folder: Path | None = None  # that may have a tokenizer beside the weights
    adjust: Callable[[nn.Module], None] = lambda _module: None  # the filled module, for what no tensor says


@contextlib.contextmanager
def open_source(given: Given, base_dir: str = "") -> Iterator[Source]:
    """Open weights.

    given: a path, or a list of files as DeepSpeed has them.  base_dir: of the files of such a list.

    Raises CheckpointError and ValueError for what is absent, damaged or of no known format.
    """
    if is_checkpoint_list(given):
        with _open_list(read_checkpoint_list(given, base_dir)) as source:
            yield source
        return
    assert not isinstance(given, Mapping)
    path = Path(base_dir, given) if base_dir else Path(given)
    if checkpoint := _find_checkpoint(path):
        yield _checkpoint_source(path, checkpoint)
        return
    with _open_gguf(path) if path.suffix == ".gguf" else _open_weights(path) as source:
        yield source


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Return the config.json of a folder; {} if there is none.  Raises ValueError for a damaged one."""
    path = folder / name
    if not path.is_file():
        return {}
    if path.stat().st_size > _MOST_CONFIG_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; a config has at most {_MOST_CONFIG_BYTES:,}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object, and holds a {type(found).__name__}")
    return found


@contextlib.contextmanager
def _open_weights(path: Path) -> Iterator[Source]:
    import zckpt.interchange

    folder = path if path.is_dir() else path.parent
    with zckpt.interchange.read_weights(path) as weights:
        config = read_config(folder) if path.is_dir() else {}
        held = with_saved_codes(weights, str(path))
        tensors = with_whole_weights(held, _quantization(folder, config) if path.is_dir() else {}, str(path))
        yield Source(origin=str(path), tensors=tensors, config=config, folder=folder)


def _quantization(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how a folder is quantized; {} if it is not."""
    found = config.get("quantization_config") or config.get("compression_config") or {}
    if not found and (folder / _OLD_GPTQ).is_file():
        found = {"quant_method": "gptq", **read_config(folder, _OLD_GPTQ)}
    if not isinstance(found, Mapping):
        raise ValueError(f"{folder}: quantization_config of its config.json must be an object")
    return found


@contextlib.contextmanager
def _open_gguf(path: Path) -> Iterator[Source]:
    import zckpt

    with zckpt.read_gguf(path) as file:
        yield Source(
            origin=str(path),
            tensors=gguf.model_tensors(file),
            config=gguf.model_config(file),
            folder=path.parent,
            adjust=functools.partial(gguf.divide_frequencies, file=file),
        )


@contextlib.contextmanager
def _open_list(found: CheckpointList) -> Iterator[Source]:
    import zckpt.interchange

    held: dict[str, list[tuple[str, StoredTensor]]] = {}  # files and tensors, by name
    with contextlib.ExitStack() as stack:
        for path in found.files:
            weights = stack.enter_context(zckpt.interchange.read_weights(path))
            for name in weights:
                held.setdefault(name, []).append((path.name, weights[name]))
        tensors = {name: _listed(name, each, found) for name, each in held.items()}
        folder = found.files[0].parent
        whole = with_saved_codes(tensors, found.origin)
        yield Source(origin=found.origin, tensors=whole, config=read_config(folder), folder=folder)


def _listed(name: str, held: list[tuple[str, StoredTensor]], found: CheckpointList) -> StoredTensor:
    """Return a tensor that one file of a list has, or one for each rank.  Raises ValueError for other numbers."""
    files, tensors = tuple(file for file, _ in held), tuple(tensor for _, tensor in held)
    if len(tensors) == 1:
        return tensors[0]
    if len(tensors) != found.num_ranks:
        raise ValueError(
            f"{files[1]} and another file of {found.origin} both hold {name!r}: a tensor must be in one file or, in "
            f'parts, in tp_size = {found.num_ranks} of them, and is in {len(tensors)}; pass {{"tp_size": ...}} if '
            "these are the files of tensor-parallel ranks"
        )
    if name.endswith(".weight.header"):
        raise ValueError(
            f"{found.origin}: {name.removesuffix('.header')!r} is quantized in parts, which are not joined: pass "
            "the model's plain weights, or a folder of save_mp_checkpoint_path"
        )
    return PartedTensor(name, found.origin, files, tensors, found.has_thirds)


# -- zckpt ---------------------------------------------------------------------------------------


@final
@attrs.frozen(eq=False)
class _CheckpointSlice:
    """A tensor of a zckpt checkpoint, read by boxes."""

    checkpoint: Checkpoint
    name: str

    def get_shape(self) -> list[int]:
        return list(self.checkpoint.manifest.tensors[self.name].shape)

    def __getitem__(self, box: Any) -> Tensor:
        from zckpt import Shard

        entry = self.checkpoint.manifest.tensors[self.name]
        sides = sides_of(box, entry.shape)
        values = torch.empty([stop - start for start, stop in sides], dtype=entry.dtype)
        if values.numel():
            shard = Shard(self.name, tuple(entry.shape), tuple(sides), (0, values.numel()), values.view(-1))
            self.checkpoint.read([shard], strict=False)
        return values


def _find_checkpoint(path: Path) -> Checkpoint | None:
    """Return the checkpoint at a path, or the newest below it; None if it is no folder of zckpt's."""
    import zckpt

    if not path.is_dir():
        return None
    if (path / "manifest.json").is_file():
        return zckpt.open_checkpoint(path)
    return zckpt.find(path) if any(path.glob("*/manifest.json")) else None


def _checkpoint_source(path: Path, checkpoint: Checkpoint) -> Source:
    """Return the model's weights of an engine's checkpoint, or all tensors of another one."""
    import zckpt.interchange

    stored = checkpoint.manifest.tensors
    ties = zckpt.interchange.tied_weights(checkpoint.objects, stored)
    named = {name: name for name in stored} | ties
    prefix = _MODEL if any(name.startswith(_MODEL) for name in stored) else ""
    tensors = {
        name.removeprefix(prefix): _CheckpointSlice(checkpoint, target)
        for name, target in named.items()
        if name.startswith(prefix)
    }
    folders = [path, *([path.parent] if checkpoint.path == path else [])]
    folder = next((each for each in folders if (each / "config.json").is_file()), None)
    config = {} if folder is None else read_config(folder)
    whole = with_saved_codes(tensors, str(checkpoint.path))
    return Source(origin=str(checkpoint.path), tensors=whole, config=config, folder=folder)
