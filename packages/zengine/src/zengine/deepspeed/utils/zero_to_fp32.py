"""`deepspeed.utils.zero_to_fp32`: whole float32 weights from a checkpoint, ours or DeepSpeed's.

    python -m zengine.deepspeed.utils.zero_to_fp32 checkpoint_dir output_dir [--safe_serialization]

A checkpoint of ours stores weights by name at any stage, so they are read without merging.  DeepSpeed's flat buffers
are joined from the shards that zckpt finds in them.  `convert_...` holds one tensor in memory at a time.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

import zckpt
import zckpt.interchange
from zengine.checkpoint.consensus import MODEL
from zengine.checkpoint.weight_files import Entry, write_weights
from zengine.deepspeed.utils.state_files import (
    atoi,
    get_checkpoint_files,
    get_model_state_file,
    get_model_state_files,
    get_optim_files,
    natural_keys,
)

__all__ = [
    "atoi",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_checkpoint_files",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "main",
    "natural_keys",
]

log = logging.getLogger("zengine")
_UNITS = {"KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@attrs.frozen
class _Weight:
    """Tensor of a checkpoint, read on demand."""

    names: tuple[str, ...]  # several if weights are tied
    shape: tuple[int, ...]
    dtype: torch.dtype  # of the result
    is_trained: bool  # True if it has optimizer state
    read: Callable[[], Tensor]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return the weights by name on the CPU, floating ones in float32; tied weights share one tensor.

    checkpoint_dir: the folder passed to `save_checkpoint`.  tag: None: the tag in `latest`.
    exclude_frozen_parameters: omit weights without optimizer state, and buffers.
    lazy_mode: ignored; values are always tensors.

    Raises zckpt.CheckpointNotFound, zckpt.CheckpointCorrupt.
    """
    with ExitStack() as stack:
        weights = _weights(checkpoint_dir, tag, exclude_frozen_parameters, stack)
        state: dict[str, Tensor] = {}
        for weight in weights:
            state.update(dict.fromkeys(weight.names, weight.read().to(weight.dtype)))
        return state


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights as `pytorch_model.bin` (or model.safetensors), in numbered files of at most max_shard_size.

    Every name of a tied weight can be loaded; a safetensors file stores its values once per name.
    """
    with ExitStack() as stack:
        weights = _weights(checkpoint_dir, tag, exclude_frozen_parameters, stack)
        tied = {alias: weight.names[0] for weight in weights for alias in weight.names[1:]}
        stem, ending = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
        if safe_serialization:
            weights = [attrs.evolve(weight, names=(name,)) for weight in weights for name in weight.names]
        files = _split_into_files(weights, _parse_size(max_shard_size), stem, ending)
        table: dict[str, str] = {}
        for name, members in files.items():
            entries = [Entry(each.names, each.shape, each.dtype) for each in members]
            here = {alias: tied[alias] for each in members for alias in each.names if alias in tied}
            values = (each.read().to(each.dtype) for each in members)
            write_weights(Path(output_dir) / name, entries, values, here)
            table.update({alias: name for each in members for alias in each.names})
        if len(files) > 1:
            total = sum(4 * torch.Size(each.shape).numel() for each in weights)
            index = {"metadata": {"total_size": total}, "weight_map": table}
            (Path(output_dir) / f"{stem}{ending}.index.json").write_text(json.dumps(index, indent=2) + "\n")


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Move `model` to the CPU, load the weights into it and return it; it must not belong to an engine.

    Names that only one of the two has are left alone, as in DeepSpeed, and logged.
    """
    model = model.cpu()
    missing, unexpected = model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), False)
    first = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - first.keys()
    for what, names in (("the checkpoint lacks", set(missing) - tied), ("the model lacks", unexpected)):
        if names:  # older checkpoints have a tied weight under one name only
            log.warning("%s: %s %d names: %s", checkpoint_dir, what, len(names), ", ".join(sorted(names)[:5]))
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32", description="Extract whole float32 weights from a checkpoint."
    )
    parser.add_argument("checkpoint_dir", help="folder passed to save_checkpoint")
    parser.add_argument("output_dir", help="folder to write")
    parser.add_argument("--max_shard_size", default="5GB", help="maximum size of a file (default 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of .bin")
    parser.add_argument("-t", "--tag", default=None, help="checkpoint to read (default: the tag in `latest`)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="omit frozen parameters")
    given = parser.parse_args(argv)
    convert_zero_checkpoint_to_fp32_state_dict(**vars(given))
    print(f"{given.checkpoint_dir}: wrote float32 weights to {given.output_dir}")
    return 0


# Reading


def _weights(folder: str | os.PathLike[str], tag: str | None, trained_only: bool, stack: ExitStack) -> list[_Weight]:
    """Return the weights of a checkpoint of either format, in its order."""
    found = _read_deepspeed(folder, tag, stack) if _is_deepspeed(folder) else _read_zckpt(folder, tag)
    return [weight for weight in found if weight.is_trained or not trained_only]


def _is_deepspeed(folder: str | os.PathLike[str]) -> bool:
    try:
        return zckpt.interchange.detect_format(folder) == "deepspeed"
    except zckpt.CheckpointError:
        return False


def _read_zckpt(folder: str | os.PathLike[str], tag: str | None) -> Iterator[_Weight]:
    yield from _weights_of(zckpt.find(folder, tag))


def _weights_of(checkpoint: zckpt.Checkpoint | zckpt.interchange.ForeignCheckpoint) -> Iterator[_Weight]:
    frozen = checkpoint.objects.get("frozen")  # older and imported checkpoints do not say: state tells
    stateful = {name.partition(".")[2].partition(".")[2] for name in checkpoint.names() if not name.startswith(MODEL)}
    names_of = _names_of([name for name in checkpoint.names() if name.startswith(MODEL)], checkpoint.objects)
    for name, names in names_of.items():
        shape, dtype = (
            tuple(checkpoint.manifest.tensors[name].shape),
            _fp32_of(checkpoint.manifest.tensors[name].dtype),
        )
        is_trained = names[0] not in frozen if isinstance(frozen, list) else names[0] in stateful
        yield _Weight(names, shape, dtype, is_trained, functools.partial(checkpoint.tensor, name))


def _read_deepspeed(folder: str | os.PathLike[str], tag: str | None, stack: ExitStack) -> Iterator[_Weight]:
    opened = stack.enter_context(zckpt.interchange.read_deepspeed(folder, tag))
    yield from _weights_of(zckpt.interchange.ForeignCheckpoint.of(opened))


def _names_of(stored: Sequence[str], objects: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return {stored weight: its names in the model, including tied ones}."""
    tied = zckpt.interchange.tied_weights(objects, frozenset(stored))
    found = {name: [name.removeprefix(MODEL)] for name in stored if name not in tied}
    for alias, name in tied.items():
        if name in found:
            found[name].append(alias.removeprefix(MODEL))
    return {name: tuple(names) for name, names in found.items()}


# Writing


def _fp32_of(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for narrower floating dtypes; float64 and integers are unchanged."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _split_into_files(weights: Sequence[_Weight], limit: int, stem: str, ending: str) -> Mapping[str, list[_Weight]]:
    groups: list[list[_Weight]] = [[]]
    total = 0
    for weight in weights:
        nbytes = weight.dtype.itemsize * torch.Size(weight.shape).numel()
        if groups[-1] and total + nbytes > limit:
            groups.append([])
            total = 0
        groups[-1].append(weight)
        total += nbytes
    if len(groups) == 1:
        return {f"{stem}{ending}": groups[0]}
    return {f"{stem}-{n:05d}-of-{len(groups):05d}{ending}": members for n, members in enumerate(groups, 1)}


def _parse_size(text: str | int | None) -> int:
    """Parse a size in bytes: "5GB", 5000000000, or None for no limit."""
    if text is None:
        return 1 << 62
    if isinstance(text, int):
        return text
    for unit in sorted(_UNITS, key=len, reverse=True):
        if text.upper().endswith(unit):
            return int(float(text[: -len(unit)]) * _UNITS[unit])
    raise ValueError(f"max_shard_size={text!r} is not a size; write a number and one of {', '.join(_UNITS)}")


if __name__ == "__main__":
    raise SystemExit(main())
