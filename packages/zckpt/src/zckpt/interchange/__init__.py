"""Import and export of other formats: DeepSpeed, Hugging Face, plain state_dicts, torch.distributed.checkpoint.

    zckpt.interchange.import_deepspeed("runs/old", "runs/new")      # then load "runs/new" at any world size and stage
    zckpt.interchange.export_huggingface(zckpt.find("runs/new"), "weights", dtype=torch.bfloat16)
    zckpt.interchange.export_universal(zckpt.find("runs/new"), "runs/back/step30_universal")     # for DeepSpeed

Nothing here unpickles.  A restricted interpreter reads `.pt` files into plain data and tensors (zckpt.containers),
and files are mapped instead of loaded.  Exports are safetensors and JSON, torch's own
distributed format, or for DeepSpeed torch's files, written without pickling.  Foreign files are local paths; a zckpt
root is anything that `zckpt.save` accepts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from zckpt.containers.torch_file import read_torch_file
from zckpt.containers.torch_write import write_torch_file
from zckpt.errors import CheckpointInputError
from zckpt.interchange.dcp import export_dcp, import_dcp
from zckpt.interchange.deepspeed import (
    DeepSpeedCheckpoint,
    import_deepspeed,
    read_deepspeed,
    read_deepspeed_together,
)
from zckpt.interchange.engine_state import tied_weights
from zckpt.interchange.huggingface import export_huggingface
from zckpt.interchange.opened import ForeignCheckpoint
from zckpt.interchange.patchwork import Patchwork
from zckpt.interchange.universal_export import export_universal
from zckpt.interchange.weights import Weights, import_weights, read_weights

__all__ = [
    "DeepSpeedCheckpoint",
    "ForeignCheckpoint",
    "Patchwork",
    "Weights",
    "detect_format",
    "export_dcp",
    "export_huggingface",
    "export_universal",
    "import_dcp",
    "import_deepspeed",
    "import_weights",
    "read_deepspeed",
    "read_deepspeed_together",
    "read_torch_file",
    "read_weights",
    "tied_weights",
    "write_torch_file",
]

DEEPSPEED, DCP, HUGGINGFACE, STATE_DICT = "deepspeed", "dcp", "huggingface", "state_dict"

_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")

# Names of 0.1 -> their names since 0.3, for one minor version.
RENAMED = {"recognise": "detect_format"}


def detect_format(path: str | os.PathLike[str]) -> str:
    """Detect the format by file names: "deepspeed", "dcp", "huggingface" or "state_dict".

    Raises CheckpointInputError for anything else.
    """
    path = Path(path)
    if path.is_file() and path.suffix in _FILES:
        return STATE_DICT
    if (path / ".metadata").is_file():
        return DCP
    weights = ("model.safetensors", "pytorch_model.bin")
    if any(
        (path / f"{name}{end}").is_file() for name in weights for end in ("", ".index.json")
    ) and not _is_deepspeed_run(path):
        return HUGGINGFACE
    if any(path.glob("*mp_rank_*_model_states.pt")) or any(path.glob("*/*mp_rank_*_model_states.pt")):
        return DEEPSPEED
    raise CheckpointInputError(
        f"{path} has no known format. Supported: a DeepSpeed checkpoint (*_model_states.pt), a torch distributed "
        f"one (.metadata), a Hugging Face folder (model.safetensors, pytorch_model.bin or their index), or a file "
        f"({', '.join(_FILES)})"
    )


def _is_deepspeed_run(path: Path) -> bool:
    """True for a run folder of DeepSpeed: `save_16bit_model` puts pytorch_model.bin beside the tags."""
    latest = (path / name for name in ("latest", "latest_universal"))
    return any(file.is_file() for file in latest) and any(path.glob("*/*mp_rank_*_model_states.pt"))


def __getattr__(name: str) -> Any:
    if name in RENAMED:
        is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"  # of `from ... import name`
        error = ImportError if is_import else AttributeError
        raise error(f"{__name__}.{name} was renamed in 0.3.0; use {__name__}.{RENAMED[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
