"""Progressive layer drop: deep layers are skipped more and more often (Zhang and He 2020, algorithm 1).

In step t (from 0) layer i of L is kept with probability 1 - (i / L) (1 - theta(t)), where theta falls from 1 to the
config's theta: theta(t) = (1 - theta) exp(-gamma t) + theta.  As with DeepSpeed, which computes theta at the end of a
step, the first two steps see theta(0) and the third sees theta(1).

A module whose forward names the keyword `pld_theta`, or takes any (`**kwargs`), gets it (and
`progressive_layer_drop=True`) while it trains, as with DeepSpeed, and skips its layers itself.  Other modules need no
change: the config names a list of layers, and the engine skips them.

- All layers of a micro-step compare their probabilities with one number: where a layer runs, all before it run too.
  So the whole model, which is what evaluation runs, is trained as often as its last layer.
- The number is a function of (seed, step, micro-step), so all ranks skip the same layers, as stage 3 needs.  It moves
  by the golden ratio from step to step, and by 1 / n within a step of n micro-steps: with two, a layer that is kept
  at least half the time runs in each step, and in any dozen steps each is skipped about as often as the law says.
- The backward of a micro-step, where activation checkpointing runs layers again, sees the number of its forward: it
  changes with a forward while no other waits for its backward.
- A skipped layer returns its first input.  A layer that returns a tuple (hidden, None, ...) returns (hidden, None,
  ...) when it is skipped; the form of its output is learnt in its first call, which runs, and saved.
- In a pipeline the layers are those of one class, numbered over all stages, and a step has one number, as several
  micro-batches are in flight.

Rejected: a number for each layer, as in the paper, where the whole model is seldom trained and its loss is higher
(bench/results/layer-drop-bits.md); a wrapper module in place of a layer, which renames its parameters.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor, nn

import zpartition
from zengine.engine.feature import Feature
from zengine.features.named_layers import NamedLayers, find_named_layers

if TYPE_CHECKING:
    from zengine.config.keys.features import ProgressiveLayerDrop
    from zengine.engine.clock import Clock
    from zengine.engine.parts import Run, TelemetrySlot
    from zengine.step_report import StepReport

KEYWORD = "pld_theta"
_GOLDEN = 0x9E3779B97F4A7C15  # of 2**64, as the golden ratio's fraction of 1

log = logging.getLogger("zengine")


def theta_at(step: int, theta: float, gamma: float) -> float:
    """Return theta(step) = (1 - theta) exp(-gamma step) + theta, with numpy's exp, as DeepSpeed computes it."""
    return float((1.0 - theta) * np.exp(-gamma * step) + theta)


def is_kept(seed: int, step: int, probability: float, part: float = 0.0) -> bool:
    """Return whether a layer that is kept with this probability runs, as a function of the arguments alone.

    part: share of the step's micro-steps that have run, at least 0 and less than 1.
    """
    start = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little")
    return (start + step * _GOLDEN + int(part * 2.0**64)) % 2**64 < probability * 2.0**64


@final
class LayerDrop(Feature):
    """Passes theta to the module, or skips the named layers."""

    name = "progressive_layer_drop"

    module: nn.Module
    clock: Clock
    telemetry: TelemetrySlot
    layers: dict[int, SkippedLayer]  # this rank's named layers, by number; empty: the module skips
    num_layers: int  # of the model; 0: the module skips

    def __init__(self, plan: ProgressiveLayerDrop) -> None:
        self.plan = plan
        self.layers = {}
        self.num_layers = 0
        self._micro_step = 0  # of the last forward; in a pipeline 0
        self._is_open = True

    def attach(self, run: Run) -> None:
        """Find the layers, unless the module takes theta.

        Raises:
            ValueError: `layers` names none; or it is empty and forward of the module does not take `pld_theta`.
        """
        self.module, self.clock, self.telemetry = run.module, run.clock, run.parts.telemetry
        if not self.plan.layers:
            _check_takes_theta(run.module, is_first=run.parts.world.rank == 0)
            return
        named = find_named_layers(run.module, self.plan.layers, "progressive_layer_drop.layers")
        _check_owned(named, zpartition.pipeline_stages_of(run.module))
        self.num_layers = named.count
        for number, layer in named.own.items():
            self.layers[number] = SkippedLayer(layer, self._keeps(number))
        if run.parts.world.rank == 0:
            log.info("progressive layer drop: skips some of the %d layers of %s", named.count, named.path)

    @property
    def theta(self) -> float:
        """Theta of the running step."""
        return self._theta_in(self.clock.steps)

    def _theta_in(self, steps: int) -> float:
        return theta_at(max(steps - 1, 0), self.plan.theta, self.plan.gamma)

    def keeps(self, layer: int, steps: int, micro_step: int = 0) -> bool:
        """Return True if the layer of that number runs in a micro-step of the step after `steps` steps."""
        probability = 1.0 - layer / self.num_layers * (1.0 - self._theta_in(steps))
        count = self.clock.accumulation
        return is_kept(self.plan.seed, steps, probability, micro_step % count / count)

    def _keeps(self, layer: int) -> Callable[[], bool]:
        return lambda: not self._is_open or self.keeps(layer, self.clock.steps, self._micro_step)

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.is_grad_enabled() and self.clock.forwards == 1:
            self._micro_step = self.clock.index + self.clock.pairs
        if self.num_layers or not self.module.training:
            return args, kwargs
        return args, {**kwargs, "progressive_layer_drop": True, KEYWORD: self.theta}

    def step_end(self, report: StepReport) -> None:
        """Chart theta, and the share of the named layers that ran."""
        steps = report.step - 1
        events = [("data/pld_theta", self._theta_in(steps), report.step)]
        if self.num_layers:
            places = list(itertools.product(range(self.num_layers), range(self._micro_step + 1)))
            kept = sum(self.keeps(layer, steps, micro_step) for layer, micro_step in places)
            events.append(("data/pld_kept_layers", kept / len(places), report.step))
        self.telemetry.write_events(events)
        self._micro_step = 0

    def state_dict(self) -> Mapping[str, Any]:
        """Return the number of members of this rank's layers' outputs; 0: a tensor, -1: not called yet."""
        return {"outputs": {str(number): layer.num_members for number, layer in self.layers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prepare_load(state)()

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state; return a function that restores it.  Raises ValueError."""
        outputs = state.get("outputs") if isinstance(state, Mapping) else None
        if not isinstance(outputs, Mapping) or not all(type(each) is int and each >= -1 for each in outputs.values()):
            raise ValueError(f"outputs = {outputs!r} must be whole numbers of at least -1, by layer")
        # Checkpoints hold rank 0's, and all layers of a class return the same form.
        known = [int(each) for each in outputs.values() if each >= 0]

        def commit() -> None:
            for number, layer in self.layers.items():
                layer.num_members = int(outputs.get(str(number), known[0] if known else -1))

        return commit

    def close(self) -> None:
        """Restore forward of the layers."""
        self._is_open = False
        for layer in self.layers.values():
            layer.restore()


def _check_takes_theta(module: nn.Module, *, is_first: bool) -> None:
    """Raise ValueError unless forward of `module` takes `pld_theta`; rank 0 warns if only its `**kwargs` do."""
    parameters = inspect.signature(module.forward).parameters
    if KEYWORD in parameters:
        return
    lists = [
        f"{name} ({len(part)})"
        for name, part in module.named_modules()
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) > 1
    ]
    found = ", ".join(lists) or "none"
    advice = f'"layers" to the list of layers to skip; lists of this model, with their lengths: {found}'
    if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        raise ValueError(
            f"progressive_layer_drop: forward() of {type(module).__name__} does not take the keyword {KEYWORD}, so "
            f"it would skip nothing. Set {advice}"
        )
    if is_first:
        log.warning(
            "progressive_layer_drop: forward() of %s takes %s among its **kwargs; if it does not read it there, "
            "nothing is skipped. Then set %s",
            type(module).__name__,
            KEYWORD,
            advice,
        )


def _check_owned(named: NamedLayers, stages: zpartition.ModelParallelGroup) -> None:
    """Raise ValueError on every rank if some layer is no module of its own on any stage of a pipeline."""
    absent = named.absent(stages)
    if absent:
        raise ValueError(
            f"progressive_layer_drop.layers = {named.path!r}: layers {absent} are functions or TiedLayerSpecs, and "
            "only a module that is called in one place can be skipped. Use a LayerSpec for each of them"
        )


@final
class SkippedLayer:
    """Forward of one layer, skipped at some micro-steps.

    A bound method replaces forward, so a deep copy of the module has a copy of this object.
    """

    def __init__(self, layer: nn.Module, keeps: Callable[[], bool]) -> None:
        self.layer = layer
        self.keeps = keeps  # in the running micro-step
        self.num_members = -1  # of the layer's output: 0 for a tensor, -1 before the first call
        self._name_of_input = next(iter(inspect.signature(layer.forward).parameters), "")
        self.forward: Callable[..., Any] = layer.forward  # its own
        self._had_own = "forward" in layer.__dict__
        layer.forward = self.run

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, or return its first input in the form of its output."""
        if self.num_members >= 0 and self.layer.training and not self.keeps():
            hidden = args[0] if args else kwargs[self._name_of_input]
            return (hidden, *[None] * (self.num_members - 1)) if self.num_members else hidden
        output = self.forward(*args, **kwargs)
        if self.num_members < 0:
            self.num_members = self._members_of(output)
        return output

    def _members_of(self, output: Any) -> int:
        if isinstance(output, Tensor):
            return 0
        if isinstance(output, tuple) and isinstance(output[0], Tensor) and all(each is None for each in output[1:]):
            return len(output)
        raise TypeError(
            f"progressive_layer_drop: {type(self.layer).__name__} must return the hidden state, or a tuple (hidden "
            f"state, None, ...), to be skipped, and it returned {_form(output)}"
        )

    def restore(self) -> None:
        if self._had_own:
            self.layer.forward = self.forward
        else:
            del self.layer.forward


def _form(output: Any) -> str:
    if isinstance(output, tuple):
        return f"({', '.join(type(each).__name__ for each in output)})"
    return type(output).__name__
