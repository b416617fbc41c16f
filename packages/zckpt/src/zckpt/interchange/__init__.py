"""Checkpoints of others, in and out: DeepSpeed, Hugging Face, plain state_dicts, torch.distributed.checkpoint.

    zckpt.interchange.import_deepspeed("runs/old", "runs/new")      # then load "runs/new" at any world size and stage
    zckpt.interchange.export_huggingface(zckpt.find("runs/new"), "weights", dtype=torch.bfloat16)

Nothing here unpickles: `.pt` files go through a machine of our own that makes plain data and tensors (unpickler.py,
allowed_globals.py), over files that are mapped rather than loaded (zipmap.py).  What is written is safetensors and
JSON, or
torch's own distributed format.  Foreign files are local paths; a root of ours may be whatever `zckpt.save` takes.
"""

from __future__ import annotations

import sys
from typing import Any

from zckpt.interchange.dcp import export_dcp, import_dcp
from zckpt.interchange.deepspeed import DeepSpeedCheckpoint, import_deepspeed, read_deepspeed
from zckpt.interchange.detect import detect_format
from zckpt.interchange.engine_state import tied_weights
from zckpt.interchange.huggingface import export_huggingface
from zckpt.interchange.patchwork import Patchwork
from zckpt.interchange.weights import Weights, import_weights, read_weights

__all__ = [
    "DeepSpeedCheckpoint",
    "Patchwork",
    "Weights",
    "detect_format",
    "export_dcp",
    "export_huggingface",
    "import_dcp",
    "import_deepspeed",
    "import_weights",
    "read_deepspeed",
    "read_weights",
    "tied_weights",
]

# Names of 0.1 -> their names since 0.3, for one minor version.
RENAMED = {"recognise": "detect_format"}


def __getattr__(name: str) -> Any:
    if name in RENAMED:
        is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"  # of `from ... import name`
        error = ImportError if is_import else AttributeError
        raise error(f"{__name__}.{name} was renamed in 0.3.0; use {__name__}.{RENAMED[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
