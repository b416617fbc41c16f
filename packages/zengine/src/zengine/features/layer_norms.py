"""Gradient norms by layer, for the histograms of "tensorboard.gradient_histograms".

Every so many steps each rank sums the squared norms of its pieces by layer, and one all-reduce with a number per
layer completes them; other steps cost one comparison.  The unit (loss scale, weights) does not matter: telemetry
rescales them to the report's norm.  The layers of a pipeline are those of all stages, first to last.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

import attrs
import torch

import zcomm
import zpartition
from zengine.engine.feature import Feature

if TYPE_CHECKING:
    from zengine.engine.clock import Clock
    from zengine.engine.parts import Run, TelemetrySlot
    from zpartition import ModelParallelGroup, Partition


@final
@attrs.define(eq=False)
class LayerNorms(Feature):
    """Measures at `steps % every == 0`, on all ranks alike."""

    every: int
    clock: Clock = attrs.field(init=False)
    telemetry: TelemetrySlot = attrs.field(init=False)

    def attach(self, run: Run) -> None:
        self.clock, self.telemetry = run.clock, run.parts.telemetry

    def gradients_ready(self, partition: Partition) -> None:
        if (self.clock.steps + 1) % self.every == 0:
            self.telemetry.layers(norms_by_layer(partition))


def norms_by_layer(partition: Partition) -> dict[str, float]:
    """Return the norm of each layer's reduced gradients over all ranks, in layer order.  All ranks call."""
    layers = {layer_of(name): 0 for name in partition.params}
    index = {layer: position for position, layer in enumerate(layers)}
    squares = torch.zeros(len(layers), dtype=torch.float64, device=partition.device)
    if (
        partition.rank < partition.layout.num_shards or partition.layout.is_expert_sharded
    ):  # the others keep the same gradients
        _add_pieces(partition, index, squares)
    if layers:
        zcomm.all_reduce(squares, partition.group, label="gradient norms by layer")
        partition.mp_group.all_reduce(squares)
    return _of_all_stages(dict(zip(layers, squares.tolist())), zpartition.pipeline_stages_of(partition.module))


def _of_all_stages(own: dict[str, float], stages: ModelParallelGroup) -> dict[str, float]:
    """Return norms from squares; a layer split between two stages is one."""
    found: dict[str, float] = {}
    for squares in [own] if stages.size == 1 else zcomm.all_gather_object(own, stages.group):
        for layer, square in squares.items():
            found[layer] = found.get(layer, 0.0) + square
    return {layer: math.sqrt(square) for layer, square in found.items()}


def _add_pieces(partition: Partition, index: dict[str, int], squares: torch.Tensor) -> None:
    """Add to `squares` (a float64 a layer) those of this rank's pieces."""
    places, norms = [], []
    for storage in partition.storages:
        if storage.master.grad is None or not partition.is_counted(storage.bucket):  # another rank counts it
            continue
        gradient = storage.master.grad.flatten()
        for piece in storage.pieces(partition.rank):
            part = gradient[piece.offset : piece.offset + piece.numel]
            norms.append(torch.linalg.vector_norm(part, dtype=torch.float32).to(squares.device))
            places.append(index[layer_of(piece.slot.name)])
    if norms:
        squares.index_add_(0, torch.tensor(places, device=squares.device), torch.stack(norms).double().square())


def layer_of(name: str) -> str:
    """The layer of a parameter: up to the first number in its path, else its module.

    "blocks.3.mlp.weight" -> "blocks.3"; "embedding.weight" -> "embedding"; "scale" -> "scale".
    """
    parts = name.split(".")
    numbers = [position for position, part in enumerate(parts) if part.isdigit()]
    end = numbers[0] + 1 if numbers else max(1, len(parts) - 1)
    return ".".join(parts[:end])
