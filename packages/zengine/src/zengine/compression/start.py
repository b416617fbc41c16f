"""`init_compression`: a model whose layers are rounded and pruned while they train.

Called before `initialize`, so that the optimizer gets learned scores.  The techniques wait until an engine with the
same section counts steps (features/compression.py).
"""

from __future__ import annotations

import logging
import weakref
from typing import Any, TypeVar

import attrs
from torch import nn

from zengine.compression.layers import StepCount, compress, compressed_layers
from zengine.compression.select import Selection, read_section, select, unwrapped
from zengine.compression.teacher import copy_layers
from zengine.compression.techniques import Mask
from zengine.config.keys.compression import CompressionTraining
from zpartition import is_deferred

__all__ = ["Compression", "compression_of", "init_compression"]

log = logging.getLogger("zengine")

Model = TypeVar("Model", bound=nn.Module)


@attrs.frozen(eq=False)
class Compression:
    """State of a compressed model."""

    count: StepCount
    teacher: nn.Module | None


_COMPRESSIONS: weakref.WeakKeyDictionary[nn.Module, Compression] = weakref.WeakKeyDictionary()


def compression_of(model: nn.Module) -> Compression | None:
    """Return the state of a model that `init_compression` has changed, or of a copy; None for others."""
    found = _COMPRESSIONS.get(model)
    if found is None:  # a deep copy has copies of the layers
        layer = next(iter(compressed_layers(model).values()), None)
        found = None if layer is None else Compression(layer.count, None)
    return found


def init_compression(model: Model, config: Any, teacher_model: nn.Module | None = None, mpu: Any = None) -> Model:
    """Prepare `model` for the techniques of the config's section compression_training; return it.

    Parameters keep their names and values.  Learned scores are new parameters of their layers; masks of initial
    weights and ranges of activations are buffers.  Ranks may have different initial weights: the engine broadcasts
    buffers, too.

    Args:
        model: the model, before `initialize`; or a wrapper with the model as `module`.
        config: path, dict or JSON text.
        teacher_model: a trained model, for layer_reduction and distillation.
        mpu: its ColumnParallelLinear and RowParallelLinear are linear layers, too.

    Raises:
        ConfigError: the config is invalid.
        ValueError: the model is compressed already; a module is in two groups of a technique; a technique cannot
            change a module; a teacher is missing.
    """
    section, inner = read_section(config), unwrapped(model)
    if _COMPRESSIONS.get(inner) is not None or compressed_layers(inner):
        raise ValueError("init_compression(): the model is compressed already; call it once, with all techniques")
    if teacher_model is None:
        _check_needs_no_teacher(section)
    selections = select(inner, section, mpu)
    made = [
        (inner.get_submodule(name), name, selection.make(inner.get_submodule(name)))
        for selection in selections
        for name in selection.names
    ]
    for layer, name, technique in made:
        technique.check(layer, name)
        if isinstance(technique, Mask) and not technique.is_learned and is_deferred(inner):
            raise ValueError(
                f"{technique.name}: method 'l1' chooses by initial weights, and those of {name!r} do not exist yet "
                '(zero.Init); use "topk", or make the model outside of zero.Init'
            )
    if teacher_model is not None and section.layer_reduction.enabled:
        copy_layers(inner, unwrapped(teacher_model), section.layer_reduction)
    count = StepCount()
    for layer, _, technique in made:
        compress(layer, count).add(technique)
    _COMPRESSIONS[inner] = Compression(count, teacher_model)
    _log_selections(selections)
    return model


def _check_needs_no_teacher(section: CompressionTraining) -> None:
    needing = [name for name in ("layer_reduction", "distillation") if getattr(section, name).enabled]
    if needing:
        raise ValueError(
            f"compression_training.{needing[0]} needs a teacher: call init_compression(model, config, "
            "teacher_model=teacher)"
        )


def _log_selections(selections: list[Selection]) -> None:
    for selection in selections:
        for match in selection.matches:
            if not match.names:
                log.warning(
                    "compression_training.%s: %r of group %r finds no module that it can change, and has no effect",
                    *(selection.technique, match.pattern, selection.group),
                )
        log.info("%s: group %r has %d modules", selection.technique, selection.group, len(selection.names))
