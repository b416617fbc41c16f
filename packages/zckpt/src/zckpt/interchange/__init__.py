"""Checkpoints of others, in and out: DeepSpeed, Hugging Face, plain state_dicts, torch.distributed.checkpoint.

    zckpt.interchange.import_deepspeed("runs/old", "runs/new")      # then load "runs/new" at any world size and stage
    zckpt.interchange.export_huggingface(zckpt.find("runs/new"), "weights", dtype=torch.bfloat16)

Nothing here unpickles: `.pt` files go through a machine of our own that makes plain data and tensors (machine.py,
admitted.py), over files that are mapped rather than loaded (zipmap.py).  What is written is safetensors and JSON, or
torch's own distributed format.  Foreign files are local paths; a root of ours may be whatever `zckpt.save` takes.
"""

from __future__ import annotations

from .dcp import export_dcp, import_dcp
from .deepspeed import DeepSpeedCheckpoint, import_deepspeed, read_deepspeed
from .engine_state import tied_weights
from .huggingface import export_huggingface
from .patchwork import Patchwork
from .recognising import recognise
from .weights import Weights, import_weights, read_weights

__all__ = [
    "DeepSpeedCheckpoint",
    "Patchwork",
    "Weights",
    "export_dcp",
    "export_huggingface",
    "import_dcp",
    "import_deepspeed",
    "import_weights",
    "read_deepspeed",
    "read_weights",
    "recognise",
    "tied_weights",
]
