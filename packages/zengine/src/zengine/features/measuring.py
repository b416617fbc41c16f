"""Tells telemetry what only a complete engine knows, and what each forward is given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch

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
from zpartition import FullTensors

if TYPE_CHECKING:
    from zengine.config import Plan
    from zengine.data import Loader
    from zengine.engine.parts import Run, TelemetrySlot


@final
class Measuring(Feature):
    """Present where anything is measured; on ranks that are silent its calls end in identities."""

    telemetry: TelemetrySlot
    probe: Probe  # looks in the first step how much is computed again

    def attach(self, run: Run) -> None:
        self.telemetry = run.parts.telemetry
        self.telemetry.begin(subject_of(run))
        looks = run.plan.telemetry.rates.recomputation == "auto" and run.parts.world.rank == 0
        self.probe = Probe.of(run.module) if looks else Probe()
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
        """The module has no hooks of this, whatever the first step came to."""
        self.probe.close()


def subject_of(run: Run) -> Subject:
    """The engine as telemetry sees it."""
    from zpartition.experts import active_fractions  # costs tens of milliseconds, where anything is measured

    plan = run.plan
    layers, width = shape_of(run.module)
    whole = FullTensors.of(run.module)  # of a rank's part the formula knows nothing
    used = active_fractions(run.module)  # a token goes to some experts
    rates = plan.telemetry.rates
    return Subject(
        formula=Formula(
            num_parameters=sum(
                round(math.prod(whole.shape(param)) * used.get(id(param), 1.0)) for param in run.module.parameters()
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
    """Passes over the data so far, with fractions where the loader knows its length; empty without our loader."""
    return tuple if loader is None else lambda: (loader.epochs_done(),)


def hparams_of(plan: Plan, optimizer: torch.optim.Optimizer | None) -> dict[str, bool | float | str]:
    """The few values by which runs are compared."""
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
    """Of the first group; the learning rate is the one that schedules lead to and away from."""
    group = {} if optimizer is None else optimizer.param_groups[0]
    rate = plan.optimizer.params.get("lr", group.get("initial_lr", group.get("lr")))
    found = {"lr": rate, "weight_decay": group.get("weight_decay")}
    return {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}


def _plain(value: Any) -> Any:
    """A value of the plan in JSON."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
