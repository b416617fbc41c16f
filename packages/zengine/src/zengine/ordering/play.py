"""Play: the steps of one rank, with the engine that a run would have, and the operations that it launches.

A rank takes the road of `zengine.initialize` and of the training loop, inside a played world (`zcomm.played_world`).
In steps of `Script.misses` it has no gradients of some layers, which are drawn for each rank: it computes with their
weights as with constants, as a program does that routes no token to an expert, or skips a branch.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import zcomm
import zoptim
import zpartition
from zengine.build.assemble import Client
from zengine.build.groups import process_layout
from zengine.build.mpu import groups_for_model
from zengine.config import Config, Plan, resolve
from zengine.config.keys.zero import NO_ZENFLOW
from zengine.config.plan.optimizer import OptimizerPlan
from zengine.config.plan.telemetry import ProfilingPlan, TelemetryPlan
from zengine.config.plan.zero import selective_policy
from zengine.data.tree import map_tensors
from zengine.imports import is_pipeline
from zengine.initialize import facts_of_world, make_engine
from zengine.ordering.decisions import DECISIONS, Decide, Oracle, Script
from zengine.ordering.exchange import Board, Replies
from zengine.ordering.unknown import UnknownValues
from zengine.planning.activations import call_model, loss_of

__all__ = ["Play", "Played", "PlayedRun"]

Train = Callable[[Any, int, Any], None]  # (engine, step, draws of this rank)


@attrs.frozen(kw_only=True, eq=False)
class PlayedRun:
    """The run whose ranks are played."""

    config: Config
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Any]  # from the size of a micro-batch to the model's argument, or a pipeline's pair
    world_size: int
    train: Train | None = None  # one step, for models that are not called with a batch
    decisions: Mapping[str, Decide] = attrs.field(factory=dict)  # beside those of the packages
    script: Script = attrs.field(factory=Script)


@attrs.frozen(kw_only=True, eq=False)
class Played:
    """One rank, played."""

    launches: list[zcomm.PlayedCall]  # from `initialize` to the last step, or to the error
    axes: tuple[str, ...] = ()  # of the layout of all ranks
    table: NDArray[np.int64] = attrs.field(factory=lambda: np.zeros(0, dtype=np.int64))
    error: Exception | None = None  # that the rank raised


@final
class Play:
    """Plays ranks of one run, one after the other."""

    def __init__(self, subject: PlayedRun) -> None:
        self.subject = subject
        self.board = Board()
        self._rules: dict[Any, Any] = {}  # of operations, see UnknownValues

    def run(self, rank: int) -> Played:
        """Play `rank` from `initialize` to the last step.  Its errors are part of the result."""
        subject, found = self.subject, list[zcomm.PlayedCall]()
        decisions = {**DECISIONS, **subject.decisions}
        oracle = Oracle(decisions, rank, subject.world_size, subject.script)
        values = UnknownValues(oracle.decide, self._rules)
        replies = Replies(values, self.board, rank)
        try:
            with ExitStack() as stack:
                stack.enter_context(_quiet())
                stack.enter_context(torch.random.fork_rng(devices=[]))
                torch.manual_seed(subject.script.seed)
                world = stack.enter_context(
                    zcomm.played_world(rank, subject.world_size, listen=found.append, answer=replies.answer)
                )
                stack.enter_context(values.running())
                engine = _start(subject, world)
                stack.callback(engine.parts.partition.close, keep_weights=False)
                groups = engine.parts.groups
                for step in range(subject.script.num_steps):
                    oracle.step = step
                    self._step(engine, step, rank, values)
        except Exception as error:
            return Played(launches=found, error=error)
        return Played(launches=found, axes=groups.axes, table=groups.table)

    def _step(self, engine: Any, step: int, rank: int, values: UnknownValues) -> None:
        subject, script = self.subject, self.subject.script
        draw = random.Random(f"{script.seed} step {step} rank {rank}")
        sizes = engine.plan.batch.sizes_of(engine.parts.groups.get_data_parallel_rank())
        count = engine.gradient_accumulation_steps()

        def batches() -> Iterator[Any]:
            for index in range(count):
                yield map_tensors(subject.make_batch(sizes[index]), values.mark)

        with _constants(_droppable(engine, draw) if step in script.misses else []):
            if subject.train is not None:
                subject.train(engine, step, draw)
            elif is_pipeline(engine.module):
                engine.train_batch(batches())
            else:
                for given in batches():
                    engine.backward(loss_of(call_model(engine, given)))
                    engine.step()


def _start(subject: PlayedRun, world: zcomm.World) -> Any:
    """Make the engine as `initialize` does, without sinks and files."""
    model = subject.make_model()
    layout = process_layout(None, None, model)
    plan = resolve(subject.config, facts_of_world(subject.config, world, layout))
    groups = groups_for_model(model, plan, layout)
    return make_engine(model, Client(), playable(plan), world, groups)


def playable(plan: Plan) -> Plan:
    """Return the plan without telemetry, profilers and files, and with an optimizer.

    Without ZenFlow, too, which reads gradients: its ranks sum columns in steps that the policy says.
    """
    optimizer = plan.optimizer if plan.optimizer.type else OptimizerPlan(type="AdamW")
    offload = plan.zero.offload
    offload = attrs.evolve(offload, states=_in_memory(offload.states), weights=_in_memory(offload.weights))
    offload = attrs.evolve(offload, selective=selective_policy(NO_ZENFLOW))
    return attrs.evolve(
        plan,
        telemetry=TelemetryPlan(throughput=False),
        profiling=ProfilingPlan(),
        optimizer=optimizer,
        zero=attrs.evolve(plan.zero, offload=offload),
        zenflow=NO_ZENFLOW,
        log_level="",
    )


def _in_memory(tier: zpartition.Tier) -> zpartition.Tier:
    """Return the host in place of a disk, which would write real files; both send the same."""
    return zpartition.Tier.HOST if tier is zpartition.Tier.DISK else tier


def _droppable(engine: Any, draw: random.Random) -> list[nn.Module]:
    """Return the leaf layers of which this rank has no gradients: about a quarter, at least one is left."""
    leaves = [module for module in engine.module.modules() if any(p.requires_grad for p in module.parameters(False))]
    chosen = [module for module in leaves if draw.random() < 0.25]
    return chosen[: max(len(leaves) - 1, 0)]


@contextmanager
def _constants(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Compute with the weights of `modules` as constants inside: their gradients do not arrive."""
    handles = [handle for module in modules for handle in _constant(module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _constant(module: nn.Module) -> list[Any]:
    held: list[dict[str, Any]] = []

    def begin(_module: nn.Module, _args: Any) -> None:
        held.append(dict(module._parameters))
        for name, param in module._parameters.items():
            module._parameters[name] = None if param is None else param.detach().requires_grad_()  # type: ignore[assignment]

    def end(_module: nn.Module, _args: Any, _output: Any) -> None:
        module._parameters.update(held.pop())

    return [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out notices, which every played rank 0 would repeat, and kernels that compute values."""
    log = logging.getLogger("zengine")
    was, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings(), zoptim.use_level("none"):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = was
