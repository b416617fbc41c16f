"""Features that feed telemetry: facts of the finished engine, inputs of each forward, gradient norms by layer.

`Measuring` passes `telemetry` a `Subject` when the engine is complete, the arguments of each training forward, and
the share of the layers that backward recomputes.

`LayerNorms` serves the histograms of "tensorboard.gradient_histograms".  Every few steps each rank sums the squared
norms of its pieces by layer, and one all-reduce with a number per layer completes them; other steps cost one
comparison.  The unit (loss scale, weights) does not matter: telemetry rescales the norms to the report's norm.  The
layers of a pipeline are those of all stages, first to last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import attrs
import torch

import zcomm
import zpartition
from zengine.engine.feature import Feature
from zengine.flops.recomputation import Probe
from zengine.telemetry.subject import (
    RunRecord,
    Subject,
    environment,
    has_gradient_checkpointing,
    now,
    shape_of,
    without_secrets,
)
from zengine.telemetry.work import Formula

if TYPE_CHECKING:
    from zengine.config import Plan
    from zengine.data import Loader
    from zengine.engine.clock import Clock
    from zengine.engine.parts import Run, TelemetrySlot
    from zpartition import ModelParallelGroup, Partition

__all__ = ["LayerNorms", "Measuring", "epochs_of", "hparams_of", "layer_of", "norms_by_layer", "subject_of"]


@final
class Measuring(Feature):
    """Feeds telemetry; present if anything is measured.  On ranks without output telemetry ignores the calls."""

    telemetry: TelemetrySlot
    probe: Probe  # observes the first step's recomputation

    def attach(self, run: Run) -> None:
        self.telemetry = run.parts.telemetry
        self.telemetry.begin(subject_of(run))
        observes = run.plan.telemetry.rates.recomputation == "auto" and run.parts.world.rank == 0
        self.probe = Probe.of(run.module) if observes else Probe()
        if run.parts.loader is not None:
            run.parts.loader.waiting = self.telemetry.span("data")

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.is_grad_enabled():
            self.telemetry.forward(args, kwargs)
            self.probe.forward_begin()
        return args, kwargs

    def step_begin(self) -> None:
        for share in self.probe.finish():
            self.telemetry.recomputes(share)

    def close(self) -> None:
        """Remove the probe's hooks, also if the first step never ended."""
        self.probe.close()


@final
@attrs.define(eq=False)
class LayerNorms(Feature):
    """Measures gradient norms by layer at `steps % every == 0`, on all ranks."""

    every: int
    clock: Clock = attrs.field(init=False)
    telemetry: TelemetrySlot = attrs.field(init=False)

    def attach(self, run: Run) -> None:
        self.clock, self.telemetry = run.clock, run.parts.telemetry

    def gradients_ready(self, partition: Partition) -> None:
        if (self.clock.steps + 1) % self.every == 0:
            self.telemetry.layers(norms_by_layer(partition))


def subject_of(run: Run) -> Subject:
    """Return the facts of an engine that telemetry needs."""
    from zpartition.experts import active_fractions  # late: tens of milliseconds

    plan = run.plan
    layers, width = shape_of(run.module)
    full = zpartition.FullTensors.of(run.module)  # the formula counts whole parameters
    used = active_fractions(run.module)  # a token visits only some experts
    rates = plan.telemetry.rates
    return Subject(
        formula=Formula(
            num_parameters=sum(
                round(math.prod(full.shape(param)) * used.get(id(param), 1.0)) for param in run.module.parameters()
            ),
            num_layers=rates.num_layers or layers,
            hidden_size=rates.hidden_size or width,
        ),
        recomputes=rates.recomputation == "yes"
        or (rates.recomputation == "auto" and has_gradient_checkpointing(run.module)),
        epochs=epochs_of(run.parts.loader),
        ledger=run.parts.partition.ledger,
        record=RunRecord(
            started=now(),
            config=without_secrets(plan.given),
            plan=[(key, _plain(value), plan.origins.get(key, "default")) for key, value in plan.rows()],
            environment=environment(run.parts.world.device, run.parts.world.world_size),
            hparams=hparams_of(plan, run.optimizer),
        ),
    )


def epochs_of(loader: Loader | None) -> Callable[[], tuple[float, ...]]:
    """Return a function for the passes over the data, fractional if the loader has a length; () without one."""
    return tuple if loader is None else lambda: (loader.epochs_done(),)


def hparams_of(plan: Plan, optimizer: torch.optim.Optimizer | None) -> dict[str, bool | float | str]:
    """Return the few values by which runs are compared."""
    return {
        "batch": float(plan.batch.train_batch_size),
        "micro_batch": float(plan.batch.micro_batch_size),
        "accumulation": float(plan.batch.accumulation),
        "replicas": float(plan.batch.replicas),
        "optimizer": plan.optimizer.type or ("none" if optimizer is None else type(optimizer).__name__),
        "scheduler": plan.scheduler.type or "none in the config",
        **_options_of(plan, optimizer),
        "clip_norm": plan.clip_norm,
        "zero_stage": float(plan.zero.stage),
        "dtype": str(plan.precision.param).removeprefix("torch."),
        "seed": float(plan.data.seed),
    }


def _options_of(plan: Plan, optimizer: torch.optim.Optimizer | None) -> dict[str, float]:
    """Return options of the first group; the learning rate is the base rate of the schedule."""
    group = {} if optimizer is None else optimizer.param_groups[0]
    rate = plan.optimizer.params.get("lr", group.get("initial_lr", group.get("lr")))
    found = {"lr": rate, "weight_decay": group.get("weight_decay")}
    return {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}


def _plain(value: Any) -> Any:
    """Return a value of the plan as JSON."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def norms_by_layer(partition: Partition) -> dict[str, float]:
    """Return the norm of each layer's reduced gradients over all ranks, in layer order.  All ranks call."""
    layers = {layer_of(name): 0 for name in partition.params}
    index = {layer: position for position, layer in enumerate(layers)}
    squares = torch.zeros(len(layers), dtype=torch.float64, device=partition.device)
    # ranks beyond the shards keep copies of the same gradients
    if partition.rank < partition.layout.num_shards or partition.layout.is_expert_sharded:
        _add_pieces(partition, index, squares)
    if layers:
        zcomm.all_reduce(squares, partition.group, label="gradient norms by layer")
        partition.mp_group.all_reduce(squares)
    return _norms_over_stages(dict(zip(layers, squares.tolist())), zpartition.pipeline_stages_of(partition.module))


def _norms_over_stages(own: dict[str, float], stages: ModelParallelGroup) -> dict[str, float]:
    """Return norms from the stages' squares; squares of a layer that spans two stages are added."""
    found: dict[str, float] = {}
    for squares in [own] if stages.size == 1 else zcomm.all_gather_object(own, stages.group):
        for layer, square in squares.items():
            found[layer] = found.get(layer, 0.0) + square
    return {layer: math.sqrt(square) for layer, square in found.items()}


def _add_pieces(partition: Partition, index: dict[str, int], squares: torch.Tensor) -> None:
    """Add the squares of this rank's pieces to `squares` ((num_layers,) float64)."""
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
    """Return the layer of a parameter: its path up to the first number, else its module.

    "blocks.3.mlp.weight" -> "blocks.3"; "embedding.weight" -> "embedding"; "scale" -> "scale".
    """
    parts = name.split(".")
    numbers = [position for position, part in enumerate(parts) if part.isdigit()]
    end = numbers[0] + 1 if numbers else max(1, len(parts) - 1)
    return ".".join(parts[:end])
