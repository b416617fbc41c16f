"""Format detection by file names alone."""

from __future__ import annotations

import os
from pathlib import Path

from zckpt.errors import CheckpointInputError

DEEPSPEED, DCP, HUGGINGFACE, STATE_DICT = "deepspeed", "dcp", "huggingface", "state_dict"

_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


def detect_format(path: str | os.PathLike[str]) -> str:
    """ "deepspeed", "dcp", "huggingface" or "state_dict"; CheckpointInputError if it is none of them."""
    path = Path(path)
    if path.is_file() and path.suffix in _FILES:
        return STATE_DICT
    if (path / ".metadata").is_file():
        return DCP
    weights = ("model.safetensors", "pytorch_model.bin")
    if any((path / f"{name}{end}").is_file() for name in weights for end in ("", ".index.json")) and not _is_a_run(
        path
    ):
        return HUGGINGFACE
    if any(path.glob("*mp_rank_*_model_states.pt")) or any(path.glob("*/*mp_rank_*_model_states.pt")):
        return DEEPSPEED
    raise CheckpointInputError(
        f"{path} is nothing that can be imported: a DeepSpeed checkpoint (*_model_states.pt), a torch distributed "
        f"one (.metadata), a Hugging Face folder (model.safetensors, pytorch_model.bin or their index), or a file "
        f"({', '.join(_FILES)})"
    )


def _is_a_run(path: Path) -> bool:
    """DeepSpeed's `save_16bit_model` puts pytorch_model.bin beside the tags: the whole run is the better answer."""
    return (path / "latest").is_file() and any(path.glob("*/*mp_rank_*_model_states.pt"))
