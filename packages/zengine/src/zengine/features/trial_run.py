"""Runs that `deepspeed --autotuning` starts: they measure the model or a few steps, write a file and end.

Problem.  A tuner needs what only the user's script has: the model with its batches, and the time of a step.

Design.  The launcher starts the script as it is, with a config that names a file.  `ModelProfile` stops the first
training forward: its arguments give the batch, and a copy of the module on tensors without memory gives, by the
planner's dry runs, the largest micro-batch of each ZeRO stage and the bytes that a step sends.  `StepProfile` times
the steps after `start_profile_step` up to `end_profile_step`, from boundary to boundary, and their phases.  Both end
the process with status 0, on all ranks at the same call.

Rejected: obeying "enabled" alone, as DeepSpeed does: a script that is started without the launcher would end after
five steps.  A formula of Adam's states for what fits: the planner knows optimizer, offload and precision.
"""

from __future__ import annotations

import collections
import inspect
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

import zpartition
from zengine.data.tree import iter_tensors, map_tensors
from zengine.engine.feature import Feature
from zengine.flops.meter import make_counter
from zengine.telemetry.instants import HOST, DeviceInstants, Instants, Interval

if TYPE_CHECKING:
    from zengine.config.keys.autotuning import Autotuning
    from zengine.engine.clock import MicroStep
    from zengine.engine.parts import Run
    from zengine.step_report import StepReport

__all__ = ["ModelProfile", "StepProfile", "batch_maker", "trial_features"]

_STEP = "step"  # a phase, and the whole of it with forward, backward and what the caller does between them
_WHOLE = "whole"


def trial_features(keys: Autotuning) -> Iterator[Feature]:
    """Yield the feature that measures, if the launcher has asked for one."""
    if keys.enabled and keys.model_info_path:
        yield ModelProfile(Path(keys.model_info_path))
    elif keys.enabled and keys.metric_path:
        yield StepProfile(keys)


@final
class ModelProfile(Feature):
    """Writes sizes of the model in its first training forward, and ends the process."""

    run: Run

    def __init__(self, path: Path) -> None:
        self.path = path

    def attach(self, run: Run) -> None:
        self.run = run

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not torch.is_grad_enabled():
            return args, kwargs
        if self.run.parts.world.rank == 0:
            _write(self.path, _model_facts(self.run, args, kwargs))
        raise SystemExit(0)


def _model_facts(run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes of the model, and what fits at each stage, or the "reason" why that is unknown."""
    whole = zpartition.FullTensors.of(run.module)
    numels = [(math.prod(whole.shape(param)), param.requires_grad) for param in run.module.parameters()]
    facts: dict[str, Any] = {
        "num_params": sum(numel for numel, _ in numels),
        "trainable_num_params": sum(numel for numel, is_trained in numels if is_trained),
    }
    try:
        return facts | _stage_facts(run, args, kwargs)
    except Exception as error:  # a model that cannot be copied, planned, or run on tensors without memory
        return {**facts, "reason": f"{type(error).__name__}: {error}"}


def _stage_facts(run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the memory of a rank, and for each stage the largest micro-batch and the bytes that a step sends."""
    from zengine.planning import sizes
    from zengine.planning.activations import copy_without_memory
    from zengine.planning.forecast import usable

    plan, world = run.plan, run.parts.world
    subject = sizes.Workload(
        module=copy_without_memory(run.module, "meta"),
        batch=batch_maker(run.module, args, kwargs, run.micro_batch_size),
        device=world.device.type,
        autocast=plan.numerics.autocast,
    )
    num_ranks = plan.parallel.gradient_ranks
    memory = sizes.rank_memory_bytes(world.device.type, world.launch.local_world_size)
    stages = [
        {
            "stage": fit.stage,
            "largest_micro_batch": fit.largest,
            "sent_bytes": [sizes.step_traffic_bytes(subject, plan, fit.stage, steps, num_ranks) for steps in (1, 2)],
        }
        for fit in sizes.fit_stages(subject, plan, num_ranks, usable(memory))
    ]
    return {
        "device": world.device.type,
        "memory_bytes": memory,
        "activation_mem_per_gpu": subject.activations(1).peak,
        "replicas": plan.batch.replicas,
        "stages": stages,
    }


def batch_maker(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], micro_batch: int
) -> Callable[[int], Any]:
    """Return a function from a number of samples to the arguments of forward, by name, of that many samples.

    args, kwargs: of a forward with `micro_batch` samples in the first dimension of its tensors; others stay.
    """
    given: Any = _by_name(module, args, kwargs) if args and kwargs else kwargs or args
    samples = collections.Counter(tensor.shape[0] for tensor in iter_tensors(given) if tensor.dim())
    size = micro_batch if micro_batch in samples else max(samples, key=samples.__getitem__, default=micro_batch)

    def make(count: int) -> Any:
        def resized(tensor: Tensor) -> Tensor:
            is_batch = tensor.dim() > 0 and tensor.shape[0] == size
            return torch.zeros((count, *tensor.shape[1:]) if is_batch else tensor.shape, dtype=tensor.dtype)

        return map_tensors(given, resized)

    return make


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of forward by name."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    named = {name: value for name, value in bound.arguments.items() if name not in kwargs}
    extra = [name for name, each in bound.signature.parameters.items() if each.kind is each.VAR_KEYWORD]
    return {**{name: value for name, value in named.items() if name not in extra}, **kwargs}


@final
class StepProfile(Feature):
    """Times steps, writes their figures, and ends the process.

    The first step's micro-batches are counted by torch's FLOP counter, on rank 0; no profiled step is.
    """

    run: Run
    instants: Instants

    def __init__(self, keys: Autotuning) -> None:
        self.path = Path(keys.metric_path)
        self.first = max(keys.start_profile_step, 1)  # steps before the profiled ones; FLOPs are counted in one
        self.last = max(keys.end_profile_step, self.first + 1)
        self.step = 1  # the present one
        self.intervals: dict[str, list[Interval]] = collections.defaultdict(list)
        self.begun: dict[str, Any] = {}  # phase -> timestamp
        self.counter = make_counter()
        self.is_counting = False
        self.num_flops = 0  # of this rank, in one step

    def attach(self, run: Run) -> None:
        self.run = run
        self.instants = DeviceInstants() if run.device.type == "cuda" else HOST
        self._begin(_WHOLE)

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        counts = self.step == 1 and self.run.parts.world.rank == 0
        if counts and torch.is_grad_enabled() and not self.is_counting:
            self.counter.__enter__()
            self.is_counting = True
        self._begin("forward")
        return args, kwargs

    def forward_end(self, output: Any) -> Any:
        self._end("forward")
        return output

    def backward_begin(self, micro: MicroStep, loss: Tensor) -> Tensor:
        self._begin("backward")
        return loss

    def backward_end(self, micro: MicroStep) -> None:
        self._end("backward")

    def step_begin(self) -> None:
        self._stop_counting()
        self._begin(_STEP)

    def step_end(self, report: StepReport) -> None:
        self._end(_STEP)
        self._end(_WHOLE)
        if self.step >= self.last:
            self.instants.synchronize()
            if self.run.parts.world.rank == 0:
                _write(self.path, self._figures())
            raise SystemExit(0)
        self.step += 1
        self._begin(_WHOLE)

    def close(self) -> None:
        self._stop_counting()

    def _begin(self, phase: str) -> None:
        self.begun[phase] = self.instants.now()

    def _end(self, phase: str) -> None:
        begin = self.begun.pop(phase, None)
        if begin is not None and self.step > self.first:
            self.intervals[phase].append(self.instants.interval(begin, self.instants.now()))

    def _stop_counting(self) -> None:
        if self.is_counting:
            self.is_counting = False
            self.counter.__exit__(None, None, None)
            self.num_flops = int(self.counter.get_total_flops())

    def _figures(self) -> dict[str, float]:
        """Return milliseconds of a step and of its phases, samples per second of all ranks, FLOP/s of this rank."""
        num_steps = len(self.intervals[_WHOLE])
        ms = {phase: sum(each.ms() for each in found) / num_steps for phase, found in self.intervals.items()}
        seconds = ms.pop(_WHOLE) / 1e3
        return {
            **ms,
            "latency": seconds * 1e3,
            "throughput": self.run.clock.samples_per_micro_step * self.run.plan.batch.accumulation / seconds,
            "FLOPS_per_gpu": self.num_flops / seconds,
            "num_steps": num_steps,
        }


def _write(path: Path, facts: Mapping[str, Any]) -> None:
    """Write JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
