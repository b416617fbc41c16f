"""Compression of models in training: rounding, pruning, fewer layers (DeepSpeed's compression library).

Order of modules: `techniques` (values and their arithmetic), `layers` (a layer under techniques), `select` (which
layers a config means), `teacher` (layers and logits of another model), then the verbs, in `start` and `clean`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zengine.imports import homes_below, lazy_attributes

if TYPE_CHECKING:
    from zengine.compression.clean import redundancy_clean
    from zengine.compression.layers import compressed_layers
    from zengine.compression.start import init_compression
    from zengine.compression.teacher import distillation_loss

__all__ = ["compressed_layers", "distillation_loss", "init_compression", "redundancy_clean"]

_HOME_OF = homes_below(
    __name__,
    {
        "clean": "redundancy_clean",
        "layers": "compressed_layers",
        "start": "init_compression",
        "teacher": "distillation_loss",
    },
)

__getattr__, __dir__ = lazy_attributes(__name__, _HOME_OF)
