"""Files of torch.save with the small state of a checkpoint, for converters that read DeepSpeed's files.

DeepSpeed's folder has `..._model_states.pt` (the caller's state and the counters, beside weights) and
`..._optim_states.pt` (the ZeRO stage, beside optimizer state).  Converters such as Lightning's take the weights from
`get_fp32_state_dict_from_zero_checkpoint`, and read from these files what is not a weight.  Our folders have no such
files, so they are written on demand to a temporary folder, which is removed when the process ends.  They hold no
weights and no optimizer state.  Nothing of ours reads them.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

import zckpt
from zengine.as_deepspeed import API_VERSION
from zengine.checkpoint.jsonable import decode

__all__ = [
    "atoi",
    "get_checkpoint_files",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "natural_keys",
]

_MANIFEST = "manifest.json"  # in every folder of ours
_MODEL_FILE = {False: "mp_rank_00_model_states.pt", True: "zero_pp_rank_0_mp_rank_00_model_states.pt"}  # by: stage 3


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """Return the file with the caller's state and the counters; checkpoint_dir: the folder of a tag.

    Raises:
        FileNotFoundError: there is no checkpoint, or DeepSpeed's has no such file for that stage.
    """
    folder, name = _existing(checkpoint_dir), _MODEL_FILE[zero_stage >= 3]
    found = _written(folder) / name if _is_ours(folder) else folder / name
    if not found.exists():
        raise FileNotFoundError(f"can't find model states file at '{found}' (ZeRO stage {zero_stage})")
    return str(found)


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """Return the files of the optimizer state; of our checkpoints one, which has only the ZeRO stage."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """Return the files of the model state; of our checkpoints one."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def get_checkpoint_files(checkpoint_dir: str | os.PathLike[str], glob_pattern: str) -> list[str]:
    """Return the matching files in the folder of a tag, with numbers in their names in order.

    Raises FileNotFoundError if there is none.
    """
    folder = _existing(checkpoint_dir)
    found = [str(path) for path in (_written(folder) if _is_ours(folder) else folder).glob(glob_pattern)]
    if not found:
        raise FileNotFoundError(f"can't find {glob_pattern} files in directory '{folder}'")
    return sorted(found, key=natural_keys)


def natural_keys(text: str) -> list[str | int]:
    """Return a key that sorts numbers inside names by value."""
    return [atoi(part) for part in re.split(r"(\d+)", text)]


def atoi(text: str) -> str | int:
    """Return the number of a text of digits, other text unchanged."""
    return int(text) if text.isdigit() else text


def _existing(checkpoint_dir: str | os.PathLike[str]) -> Path:
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"directory '{folder}' doesn't exist")
    return folder


def _is_ours(folder: Path) -> bool:
    return (folder / _MANIFEST).exists()


def _written(folder: Path) -> Path:
    """Return a temporary folder with the files of the checkpoint in `folder`."""
    stamp = (folder / _MANIFEST).stat().st_mtime_ns
    return Path(_write(str(folder.resolve()), stamp).name)


@functools.lru_cache(maxsize=8)
def _write(folder: str, stamp: int) -> tempfile.TemporaryDirectory[str]:
    path = Path(folder)
    checkpoint = zckpt.find(path.parent, path.name)
    stage = checkpoint.objects.get("zero_stage", 0)
    written = tempfile.TemporaryDirectory(prefix="zengine-states-")
    target = Path(written.name)
    torch.save(_model_state(checkpoint), target / _MODEL_FILE[int(stage) >= 3])
    optimizer = {"optimizer_state_dict": {"zero_stage": stage}, "ds_version": API_VERSION}
    torch.save(optimizer, target / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return written


def _model_state(checkpoint: zckpt.Checkpoint) -> dict[str, Any]:
    """Return the caller's state, and the counters under DeepSpeed's names."""
    tensors: dict[str, torch.Tensor] = {}
    client_state = decode(checkpoint.objects.get("client_state", {}), "client_state", tensors)
    checkpoint.read([zckpt.whole(name, tensor) for name, tensor in tensors.items()], strict=False)
    clock = checkpoint.objects["clock"]
    counters = {
        "global_steps": clock["steps"],
        "skipped_steps": clock["skipped_steps"],
        "global_samples": clock["samples"],
        "dp_world_size": checkpoint.manifest.world_size,
        "mp_world_size": 1,
        "ds_version": API_VERSION,
    }
    return {**counters, **client_state}
