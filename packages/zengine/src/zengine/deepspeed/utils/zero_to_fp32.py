"""`deepspeed.utils.zero_to_fp32`: whole float32 weights out of a checkpoint, ours or DeepSpeed's.

    python -m zengine.deepspeed.utils.zero_to_fp32 checkpoint_dir output_dir [--safe_serialization]

A checkpoint of ours has its weights by name, at any stage, so nothing is merged: they are read.  DeepSpeed's flat
buffers are put together from the parts that zckpt finds in them.  `convert_...` holds one tensor at a time.
"""

from __future__ import annotations

import argparse
import functools
import json
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

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "main",
]

_UNITS = {"KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@attrs.frozen
class _Weight:
    """One tensor of a checkpoint, read when it is asked for."""

    names: tuple[str, ...]  # more than one where weights are tied
    shape: tuple[int, ...]
    dtype: torch.dtype  # of the file's
    is_trained: bool  # whether the optimizer kept a state of it
    read: Callable[[], Tensor]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """The weights by name, floating ones in float32, on the CPU; names of tied weights share one tensor.

    checkpoint_dir: what was given to `save_checkpoint`.  tag: None takes what `latest` says.
    exclude_frozen_parameters: leave out what the optimizer has no state of, buffers too.
    lazy_mode: accepted; DeepSpeed's are pseudo-tensors, these are tensors.

    Raises zckpt.CheckpointNotFound (no checkpoint there), zckpt.CheckpointCorrupt.
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
    """Write them as `pytorch_model.bin` (or model.safetensors), in numbered files of at most max_shard_size.

    Every name of a tied weight can be loaded: safetensors, which share nothing, hold its values once for each.
    """
    with ExitStack() as stack:
        weights = _weights(checkpoint_dir, tag, exclude_frozen_parameters, stack)
        tied = {alias: weight.names[0] for weight in weights for alias in weight.names[1:]}
        stem, ending = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
        if safe_serialization:
            weights = [attrs.evolve(weight, names=(name,)) for weight in weights for name in weight.names]
        files = _files(weights, _size(max_shard_size), stem, ending)
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
    """Load them into `model`, which no engine may hold; returns it.

    Checkpoints that were saved before names of tied weights were, have them by one name.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    missing, unexpected = model.load_state_dict(state, strict=False)
    first = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - first.keys()
    if unexpected or set(missing) - tied:
        raise ValueError(
            f"the checkpoint in {checkpoint_dir} is not of this model: missing {sorted(set(missing) - tied)[:5]}, "
            f"unexpected {sorted(unexpected)[:5]}"
        )
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32", description="Whole float32 weights out of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="the folder that save_checkpoint was given")
    parser.add_argument("output_dir", help="folder to write into")
    parser.add_argument("--max_shard_size", default="5GB", help="of one file (default 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of .bin")
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint (default: what `latest` says)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen ones out")
    given = parser.parse_args(argv)
    convert_zero_checkpoint_to_fp32_state_dict(**vars(given))
    print(f"{given.checkpoint_dir}: float32 weights are in {given.output_dir}")
    return 0


# -- where they come from ------------------------------------------------------------------------


def _weights(folder: str | os.PathLike[str], tag: str | None, trained_only: bool, stack: ExitStack) -> list[_Weight]:
    """Of a checkpoint of either kind, in its order."""
    found = _of_deepspeed(folder, tag, stack) if _is_deepspeed(folder) else _of_ours(folder, tag)
    return [weight for weight in found if weight.is_trained or not trained_only]


def _is_deepspeed(folder: str | os.PathLike[str]) -> bool:
    try:
        return zckpt.interchange.detect_format(folder) == "deepspeed"
    except zckpt.CheckpointError:
        return False


def _of_ours(folder: str | os.PathLike[str], tag: str | None) -> Iterator[_Weight]:
    checkpoint = zckpt.find(folder, tag)
    stateful = {name.partition(".")[2].partition(".")[2] for name in checkpoint.names() if not name.startswith(MODEL)}
    names_of = _names_of([name for name in checkpoint.names() if name.startswith(MODEL)], checkpoint.objects)
    for name, names in names_of.items():
        shape, dtype = (
            tuple(checkpoint.manifest.tensors[name].shape),
            _fp32_of(checkpoint.manifest.tensors[name].dtype),
        )
        yield _Weight(names, shape, dtype, names[0] in stateful, functools.partial(checkpoint.tensor, name))


def _of_deepspeed(folder: str | os.PathLike[str], tag: str | None, stack: ExitStack) -> Iterator[_Weight]:
    parts: dict[str, list[Any]] = {}
    stateful: set[str] = set()
    opened = stack.enter_context(zckpt.interchange.read_deepspeed(folder, tag))
    for shard in opened.shards():
        if shard.name.startswith(MODEL):
            parts.setdefault(shard.name, []).append(shard)
        else:
            stateful.add(shard.name.partition(".")[2].partition(".")[2])
    for name, names in _names_of(list(parts), opened.objects()).items():
        shape, dtype = tuple(parts[name][0].global_shape), _fp32_of(parts[name][0].tensor.dtype)
        yield _Weight(names, shape, dtype, names[0] in stateful, functools.partial(_joined, parts[name]))


def _names_of(stored: Sequence[str], objects: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Name of each stored weight -> its names in the model, those of tied weights included."""
    tied = zckpt.interchange.tied_weights(objects, frozenset(stored))
    found = {name: [name.removeprefix(MODEL)] for name in stored if name not in tied}
    for alias, name in tied.items():
        if name in found:
            found[name].append(alias.removeprefix(MODEL))
    return {name: tuple(names) for name, names in found.items()}


def _joined(shards: Sequence[Any]) -> Tensor:
    """A tensor from the parts of its ranks: spans of boxes."""
    whole = torch.empty(shards[0].global_shape, dtype=shards[0].tensor.dtype)
    boxes: dict[Any, list[Any]] = {}
    for shard in shards:
        boxes.setdefault(shard.box, []).append(shard)
    for box, members in boxes.items():
        target = whole[tuple(slice(low, high) for low, high in box)] if box else whole
        flat = torch.empty(target.numel(), dtype=whole.dtype)
        for member in members:
            flat[slice(*member.span)] = member.tensor.reshape(-1)
        target.copy_(flat.view(target.shape))
    return whole


# -- how they are written ------------------------------------------------------------------------


def _fp32_of(dtype: torch.dtype) -> torch.dtype:
    """float32 for what is floating, and no more than that; float64 and counters stay as they are."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _files(weights: Sequence[_Weight], limit: int, stem: str, ending: str) -> Mapping[str, list[_Weight]]:
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


def _size(text: str | int | None) -> int:
    """Bytes: "5GB", 5000000000, or None for no limit."""
    if text is None:
        return 1 << 62
    if isinstance(text, int):
        return text
    for unit in sorted(_UNITS, key=len, reverse=True):
        if text.upper().endswith(unit):
            return int(float(text[: -len(unit)]) * _UNITS[unit])
    raise ValueError(f"max_shard_size={text!r} is no size: write a number and one of {', '.join(_UNITS)}")


if __name__ == "__main__":
    raise SystemExit(main())
