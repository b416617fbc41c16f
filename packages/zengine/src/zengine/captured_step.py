"""A training step in one CUDA graph: forward, backward, inspection, update and loss scale, launched at once.

Problem.  A step of a small model launches thousands of kernels of a few microseconds each, and the host cannot launch
them as fast as the device runs them.  A graph has one launch.  But it repeats exactly what was captured: the same
kernels on the same memory, and the host decides nothing while it runs.

Design.  `capture_step(engine, loss_function)` returns a function that trains on one batch and returns its report.
Its first `NUM_EAGER` updates are plain steps, which allocate memory and compile kernels; the next call captures and
replays, every later one replays.  So no step is lost to warm-up, and weights, states, schedule and reports are those
of plain steps, bit for bit (but a report of a replay does not name the parameter whose gradient is not finite).  What
the host decides in a plain step is decided in the graph:

  - batches are copied into fixed memory; learning rates are read from device memory, which the call writes;
  - the divisor (loss scale, clipping) is computed on the device, and `found_inf` lets the optimizer's kernels skip;
  - the loss scale moves in place.

Norm, loss, scale and skipping are read after the replay: the one wait of the step.  From them the host does the rest,
as in a plain step: schedule, counters, report, features that act at the end of a step.

The memory of gradients, weights and states belongs to the partition and stays where it is; the graph's own pool has
the rest.  A graph whose memory has moved (states were offloaded, say) raises before it writes.

Rejected: `torch.cuda.make_graphed_callables`, which captures forward and backward alone, and whose gradients are
accumulated by ordinary launches; graphs over several ranks, until NCCL's kernels in them have run on hardware.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import attrs
import torch
from torch import Tensor

import zoptim
import zprecision
from zengine.build.assemble import divides
from zengine.engine.clock import Boundary
from zengine.engine.engine import Engine
from zengine.engine.feature import Feature
from zengine.engine.loss_weighting import check_loss, check_reached
from zengine.engine.parts import OptimizerSlot, ShardOptimizer
from zengine.step_report import StepReport

__all__ = ["NUM_EAGER", "CapturedStep", "capture_step"]

NUM_EAGER = 3  # plain steps with an update before the capture
_IN_THE_GRAPH = ("forward_begin", "forward_end", "backward_begin", "backward_end", "step_begin", "gradients_ready")


def capture_step(engine: Engine, loss_function: Callable[..., Tensor]) -> CapturedStep:
    """Return a function that runs whole training steps of `engine` in a CUDA graph.

        step = zengine.capture_step(engine, lambda x, y: torch.nn.functional.mse_loss(engine(x), y))
        for x, y in loader:
            report = step(x, y)  # in the place of engine(x), engine.backward(loss) and engine.step()

    loss_function: takes the tensors of a batch, which have the same shapes in every step, and returns its loss.  It
        must not read values on the host, nor decide anything there that may change.

    Raises:
        ValueError: a setting of the engine cannot be captured; the message says what to change.
    """
    if reason := _reason_against(engine):
        raise ValueError(f"capture_step() cannot capture this engine: {reason}")
    return CapturedStep(engine, loss_function)


@final
@attrs.define(eq=False)
class CapturedStep:
    """One training step as a CUDA graph; see `capture_step`.

    Invariant: with a graph, `inputs`, `rates` and `numbers` are the memory that it reads and writes.
    """

    engine: Engine
    loss_function: Callable[..., Tensor]
    graph: Any = None  # torch.cuda.CUDAGraph; None before the capture
    inputs: tuple[Tensor, ...] = ()  # the batch
    rates: tuple[Tensor, ...] = ()  # () float64, the learning rate of each parameter group
    numbers: Tensor | None = None  # (9,) float64: what the host reads, see `_record`
    captured: tuple[Any, ...] = ()  # addresses and options at the capture
    held: tuple[Any, ...] = ()  # other memory of the graph, which nobody else may hold: tables, buffers of gradients
    num_eager: int = 0  # plain steps so far, without skipped ones

    def __call__(self, *batch: Tensor) -> StepReport:
        """Train on a batch, tensors on any device; return the report.

        Raises:
            TypeError: something in the batch is not a tensor.
            ValueError: a tensor has another shape or dtype than at the capture; or something that the graph contains
                has changed since.
            LossScaleExhausted: as `engine.step`.
        """
        self.engine.clock.require_open("capture_step()")
        if others := [type(each).__name__ for each in batch if not isinstance(each, Tensor)]:
            raise TypeError(
                f"capture_step(): a batch is a list of tensors, as in step(x, y), not {', '.join(others)}. Pass the "
                "tensors of a dict one by one, and numbers as tensors."
            )
        if self.num_eager < NUM_EAGER:
            report = self._step_eagerly(batch)
            self.num_eager += report.applied  # a step that was skipped has made no states
            return report
        if self.graph is None:
            self._capture(batch)
        self._load(batch)
        self._check_unchanged()
        for rate, group in zip(self.rates, self._optimizer.param_groups):
            rate.fill_(float(group["lr"]))
        self.graph.replay()
        return self._finish()

    def _step_eagerly(self, batch: tuple[Tensor, ...]) -> StepReport:
        self.engine.backward(self.loss_function(*batch))
        report = self.engine.step()
        assert report is not None
        return report

    # -- the capture -----------------------------------------------------------------------------

    def _capture(self, batch: tuple[Tensor, ...]) -> None:
        device = self.engine.parts.world.device
        self.inputs = tuple(torch.empty_like(each, device=device) for each in batch)
        self._load(batch)  # a real batch, for code that looks at values
        self.rates = tuple(torch.zeros((), dtype=torch.float64, device=device) for _ in self._optimizer.param_groups)
        squares, reducer = _Squares.of(self.engine), self.engine.parts.partition.reducer
        graph, probe = torch.cuda.CUDAGraph(), reducer.non_finite_probe
        num_probed, probe.steps_left = probe.steps_left, 0  # it reads gradients on the host
        try:
            with torch.cuda.graph(graph):
                self._record(squares)
        finally:
            self.engine.parts.partition.zero_grad()
            self.engine.clock.begin_step()
            probe.steps_left = num_probed
        self.held = (squares, *reducer.pool.free, reducer.pool.arena, *(each.store for each in reducer.gradients))
        self.graph, self.captured = graph, (self._addresses(), self._options())

    def _record(self, squares: _Squares) -> None:
        """Launch the step, which `engine.backward` and `engine.step` would launch, without a read on the host."""
        engine, plan = self.engine, self.engine.plan
        parts, partition, scaler = engine.parts, engine.parts.partition, engine.parts.scaler
        loss = self.loss_function(*self.inputs)
        check_loss(loss)
        with partition.micro_step(is_last=True, is_scaled=plan.scales_losses):
            torch.autograd.backward(scaler.scale(loss))
            check_reached(partition)
        gradients = partition.finish_gradients()
        if partition.num_unused():
            raise ValueError(
                "capture_step(): some parameters have no gradient; a plain step decides on the host to leave them "
                "unchanged: freeze them (requires_grad_(False)) before initialize(), or use them."
            )
        total = squares.of_gradients(gradients)
        none = torch.zeros(3, dtype=torch.float64, device=total.device)  # drift, late, unused; weight, weighted
        mean, factor = (each.detach().double().reshape(1) for each in (loss, scaler.factor))
        numbers = torch.cat([total, none, mean, none[:2], factor])
        found_inf = (~torch.isfinite(total)).float().reshape(())
        divisor = zprecision.clip_divisor(total[0].sqrt(), scaler.factor, plan.clip_norm) if divides(plan) else None
        with self._reading_the_device(found_inf if plan.skip_nonfinite else None):
            parts.optimizer.update(partition, divisor, any_unused=False)
        at_floor = scaler.update_in_place(found_inf)
        self.numbers = torch.cat([numbers, at_floor.double().reshape(1)])

    @contextmanager
    def _reading_the_device(self, found_inf: Tensor | None) -> Iterator[None]:
        """Let the optimizer read learning rates and `found_inf` from device memory inside."""
        optimizer = self._optimizer
        numbers = [group["lr"] for group in optimizer.param_groups]
        try:
            optimizer.found_inf = found_inf
            for group, rate in zip(optimizer.param_groups, self.rates):
                group["lr"] = rate
            yield
        finally:
            optimizer.found_inf = None
            for group, number in zip(optimizer.param_groups, numbers):
                group["lr"] = number

    # -- a replay --------------------------------------------------------------------------------

    def _load(self, batch: tuple[Tensor, ...]) -> None:
        """Copy the batch into the graph's memory."""
        found, wanted = ([(tuple(each.shape), each.dtype) for each in tensors] for tensors in (batch, self.inputs))
        if found != wanted:
            raise ValueError(
                f"capture_step(): a batch of {_described(found)} does not fit the graph, which was captured with "
                f"{_described(wanted)}. Pad the batch, or train on it with engine(), engine.backward() and "
                "engine.step()."
            )
        for place, tensor in zip(self.inputs, batch):
            place.copy_(tensor, non_blocking=True)

    def _check_unchanged(self) -> None:
        """Raise ValueError if the graph would write to memory that is no longer the engine's, or has old options."""
        for what, before, now in zip(
            (
                "weights, states or the loss scale have moved (a load, offload_states, or a plain step in fp16)",
                "an option other than lr has changed",
            ),
            self.captured,
            (self._addresses(), self._options()),
        ):
            if before != now:
                raise ValueError(f"capture_step(): {what} since the capture: call zengine.capture_step(...) again.")

    def _finish(self) -> StepReport:
        """Read the numbers of the replayed step and do what the host does in a plain one."""
        engine, parts, run = self.engine, self.engine.parts, self.engine._run
        clock, losses = engine.clock, run.losses
        clock.forward(with_grad=True)
        with clock.backward():
            assert self.numbers is not None
            total, *others, at_floor = self.numbers.tolist()
            losses.set_mean(others[3])
        clock.end_micro_step()
        with clock.update():
            numbers = parts.read(_stats(total, others), losses)
            lr = parts.optimizer.lr()
            skip = parts.skip_reason(numbers, losses)
            if skip.nonfinite is not None:
                skip = attrs.evolve(skip, is_fatal=bool(at_floor))  # as it was before the scale moved
            if not skip:
                parts.scheduler.step()
            clock.end_step(applied=not skip)
            report = engine.__dict__["_last_report"] = parts.report(clock, numbers, lr, skip)
            skip.raise_if_fatal(clock.steps)
        parts.telemetry.micro_step_end()
        engine._finish_step(report)
        return report

    # -- helpers ---------------------------------------------------------------------------------

    @property
    def _optimizer(self) -> Any:
        return self.engine.parts.optimizer.optimizer

    def _addresses(self) -> list[int]:
        """Return the addresses of the weights, of everything that the optimizer writes, and of the loss scale."""
        partition, scale = self.engine.parts.partition, self.engine.parts.scaler.factor
        weights = [each.flat for each in partition.whole]
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        tensors: Iterable[Any] = (*(each.master for each in partition.storages), *weights, *states, scale)
        return [each.data_ptr() for each in tensors if isinstance(each, Tensor)]

    def _options(self) -> list[Mapping[str, Any]]:
        """Return the options of the parameter groups that the graph has as constants."""
        variable = ("params", "lr", "param_names")
        return [{k: v for k, v in group.items() if k not in variable} for group in self._optimizer.param_groups]


@final
@attrs.frozen(eq=False)
class _Squares:
    """Sum of the squares of gradients, as `zoptim.sum_of_squares`, with tables that are made before the capture."""

    job: zoptim.SquaresJob
    sizes: list[int]

    @classmethod
    def of(cls, engine: Engine) -> _Squares:
        partition = engine.parts.partition
        like = [
            torch.empty(
                each.bucket.numel, dtype=partition.policy.accumulate_for(each.bucket.dtype), device=partition.device
            )
            for each in partition.storages
        ]
        return cls(zoptim.SquaresJob(like), [each.numel() for each in like])

    def of_gradients(self, gradients: list[Tensor]) -> Tensor:
        """Return (1,) float64."""
        assert [each.numel() for each in gradients] == self.sizes
        self.job.bind(gradients)
        return self.job.measure()[0].square().view(1)


def _stats(total: float, others: list[float]) -> zprecision.GradientStats:
    """Return numbers that were read as the inspection of a plain step."""
    return zprecision.GradientStats((math.sqrt(total), *others))


def _reason_against(engine: Engine) -> str:
    """Return what to change so that a step of `engine` can be captured; "" if it can be."""
    return "; ".join(reason for reason, is_against in (_by_config(engine) | _by_parts(engine)).items() if is_against)


def _by_config(engine: Engine) -> dict[str, bool]:
    plan, clock = engine.plan, engine.clock
    return {
        "stage 3 gathers weights when modules ask for them; set zero_optimization.stage to 0, 1 or 2": (
            plan.zero.shards_weights
        ),
        "states in host memory are updated by the host; remove offload_optimizer": plan.zero.offload.moves_states,
        "gradient_accumulation_steps must be 1; use larger batches": (
            clock.accumulation != 1 or clock.boundary is not Boundary.COUNTED
        ),
        "activation checkpoints save random states on the host; remove activation_checkpointing.modules": bool(
            plan.activations.modules
        ),
        "timers record events inside the step; turn off telemetry (wall_clock_breakdown, monitors, flops)": (
            plan.telemetry.is_wanted
        ),
    }


def _by_parts(engine: Engine) -> dict[str, bool]:
    world, partition = engine.parts.world, engine.parts.partition
    features = [type(each).__name__ for each in engine._features if _acts_in_the_graph(each)]
    return {
        f"it is on {world.device}; CUDA graphs need a GPU": world.device.type != "cuda",
        f"it has {world.world_size} ranks; only one is supported until NCCL in graphs has run on hardware": (
            world.world_size > 1
        ),
        "the lengths of sparse gradients are read on the host; set sparse_gradients to false": any(
            bucket.is_sparse for bucket in partition.layout.buckets
        ),
        f"features act inside the step on the host: {', '.join(features)}; turn them off": bool(features),
        "the optimizer must be one of zoptim's with kernels on this GPU (Adam, AdamW, Lion, SGD), which skip a step "
        "by a flag on the device": not _skips_on_the_device(engine.parts.optimizer),
        "float64 parameters have no kernels; use float32, bf16 or fp16": any(
            each.dtype == torch.float64 for each in partition.params.values()
        ),
    }


def _acts_in_the_graph(feature: Feature) -> bool:
    return any(getattr(type(feature), hook) is not getattr(Feature, hook) for hook in _IN_THE_GRAPH)


def _skips_on_the_device(slot: OptimizerSlot) -> bool:
    optimizer = slot.optimizer
    if not (isinstance(slot, ShardOptimizer) and isinstance(optimizer, zoptim.FlatOptimizer)):
        return False
    groups = optimizer.param_groups
    return optimizer.elementwise and all(
        not group.get("foreach") and all(zoptim.has_kernels(each.device) for each in group["params"])
        for group in groups
    )


def _described(tensors: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{list(shape)} {dtype}" for shape, dtype in tensors) or "no tensors"
