"""Stages: recognizes a `PipelineModule` without importing pipelines for models that are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

from torch import nn

from zengine.imports import is_imported

if TYPE_CHECKING:
    from zpartition.pipeline import PipelineModule

__all__ = ["is_staged", "stage_axes"]


def is_staged(model: nn.Module) -> TypeGuard[PipelineModule]:
    """Return True if `model` holds some of the layers of a pipeline."""
    if not is_imported("zpartition.pipeline"):
        return False
    from zpartition.pipeline import PipelineModule

    return isinstance(model, PipelineModule)


def stage_axes(model: nn.Module) -> Mapping[str, int]:
    """Return the parallel degree that a pipeline fixes by itself; empty for other models."""
    return {"pipeline": model.pipeline_position.num_ranks} if is_staged(model) else {}
